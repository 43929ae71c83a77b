/* Recipes of synthetic models and the rules their values follow. See synth_recipe.h. Layer: plan.
 *
 * The rules keep activations of order one through any number of layers and leave no term of the model
 * negligible; the comments in role_rule() give the reasons. */
#include "plan/synth_recipe.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_RECIPE = 2048 };

typedef struct {
  const char *name;
  K3Config config; /* without layer_types */
  K3Type trunk, experts;
} Base;

static const Base bases[] = {
    /* Runs in a blink, yet has every kind of layer, uneven bands and sizes that differ from one another. */
    {"tiny",
     {.num_layers = 13,
      .hidden_size = 256,
      .vocab_size = 1003,
      .num_heads = 8,
      .q_lora_rank = 96,
      .kv_lora_rank = 64,
      .qk_nope_head_dim = 32,
      .qk_rope_head_dim = 16,
      .v_head_dim = 32,
      .kda_head_dim = 32,
      .kda_conv_kernel = 4,
      .kda_gate_lower_bound = -5.0,
      .num_experts = 24,
      .num_experts_per_token = 4,
      .num_shared_experts = 2,
      .latent_size = 128,
      .moe_intermediate_size = 96,
      .dense_intermediate_size = 320,
      .first_dense_layers = 1,
      .attn_res_block_size = 4,
      .rms_norm_eps = 1e-5,
      .low_rank_norm_eps = 1e-6,
      .situ_beta = 4.0,
      .situ_linear_beta = 25.0,
      .routed_scaling_factor = 1.0,
      .renormalize = 1,
      .max_context = 131072},
     K3_TYPE_F32,
     K3_TYPE_F32},
    /* Kimi K3 as released. */
    {"k3",
     {.num_layers = 93,
      .hidden_size = 7168,
      .vocab_size = 163840,
      .num_heads = 96,
      .q_lora_rank = 1536,
      .kv_lora_rank = 512,
      .qk_nope_head_dim = 128,
      .qk_rope_head_dim = 64,
      .v_head_dim = 128,
      .kda_head_dim = 128,
      .kda_conv_kernel = 4,
      .kda_gate_lower_bound = -5.0,
      .num_experts = 896,
      .num_experts_per_token = 16,
      .num_shared_experts = 2,
      .latent_size = 3584,
      .moe_intermediate_size = 3072,
      .dense_intermediate_size = 33792,
      .first_dense_layers = 1,
      .attn_res_block_size = 12,
      .rms_norm_eps = 1e-5,
      .low_rank_norm_eps = 1e-6,
      .situ_beta = 4.0,
      .situ_linear_beta = 25.0,
      .routed_scaling_factor = 1.0,
      .renormalize = 1,
      .max_context = 1048576},
     K3_TYPE_Q8_0,
     K3_TYPE_MXFP4},
};

/* ---------------------------------------------------------------- parsing */

static K3Status parse_type(const char *key, const char *value, K3Type *type)
{
  int found = k3_format_find(value);
  if (found < 0)
    K3_FAIL(K3_ERR_USAGE, "recipe: %s=%s is no storage type; known: f32, %s", key, value, k3_format_names());
  *type = (K3Type)found;
  return K3_OK;
}

static K3Status parse_seed(const char *value, uint64_t *seed)
{
  char *end = NULL;
  errno = 0;
  unsigned long long number = strtoull(value, &end, 10);
  if (*value < '0' || *value > '9' || *end || errno)
    K3_FAIL(K3_ERR_USAGE, "recipe: seed=%s is no whole number from 0 to 2^64-1", value);
  *seed = number;
  return K3_OK;
}

static K3Status parse_layer_types(const char *value, K3Config *config, int64_t *count)
{
  size_t digits = strlen(value);
  if (digits < 1 || digits > K3_MAX_LAYERS || strspn(value, "01") != digits)
    K3_FAIL(K3_ERR_USAGE, "recipe: layer_types=%s wants 1 to %d digits, 0 = KDA and 1 = MLA", value, K3_MAX_LAYERS);
  for (size_t i = 0; i < digits; i++) config->layer_types[i] = (uint8_t)(value[i] - '0');
  *count = (int64_t)digits;
  return K3_OK;
}

static K3Status parse_number(const char *key, const char *value, double *number)
{
  char *end = NULL;
  *number = strtod(value, &end);
  if (end == value || *end || !isfinite(*number) || strpbrk(value, "xX "))
    K3_FAIL(K3_ERR_USAGE, "recipe: %s=%s is no number", key, value);
  return K3_OK;
}

static K3Status parse_field(const char *key, const char *value, K3Config *config)
{
  double number;
  const K3ConfigField *field = k3_config_find(key);
  if (!field)
    K3_FAIL(K3_ERR_USAGE,
            "recipe: there is no override \"%s\"; known: the fields of /config (num_layers, hidden_size, …), "
            "layer_types, seed, trunk, experts, dt_bias",
            key);
  K3_TRY(parse_number(key, value, &number));
  if (field->kind != K3_FIELD_REAL && (number != floor(number) || fabs(number) >= 9007199254740992.0))
    K3_FAIL(K3_ERR_USAGE, "recipe: %s=%s wants a whole number", key, value);
  return k3_config_set(config, field, number);
}

/* One override "key=value"; `word` is cut in place. */
static K3Status parse_override(char *word, K3SynthRecipe *recipe, int64_t *layer_types, int *num_layers_given)
{
  char *equals = strchr(word, '=');
  if (!equals || equals == word || !equals[1])
    K3_FAIL(K3_ERR_USAGE, "recipe: \"%s\" is not of the form name=value", word);
  *equals = '\0';
  const char *value = equals + 1;
  if (strcmp(word, "seed") == 0) return parse_seed(value, &recipe->seed);
  if (strcmp(word, "trunk") == 0) return parse_type(word, value, &recipe->trunk);
  if (strcmp(word, "experts") == 0) return parse_type(word, value, &recipe->experts);
  if (strcmp(word, "dt_bias") == 0) return parse_number(word, value, &recipe->dt_bias);
  if (strcmp(word, "layer_types") == 0) return parse_layer_types(value, &recipe->config, layer_types);
  if (strcmp(word, "num_layers") == 0) *num_layers_given = 1;
  return parse_field(word, value, &recipe->config);
}

K3Status k3_synth_recipe_parse(const char *text, K3SynthRecipe *recipe)
{
  char copy[MAX_RECIPE];
  size_t length = strlen(text);
  if (length >= sizeof copy) K3_FAIL(K3_ERR_USAGE, "recipe: longer than %d characters", MAX_RECIPE - 1);
  memcpy(copy, text, length + 1);
  char *overrides = strchr(copy, ':');
  if (overrides) *overrides++ = '\0';

  const Base *base = NULL;
  for (size_t i = 0; i < sizeof bases / sizeof bases[0]; i++)
    if (strcmp(bases[i].name, copy) == 0) base = &bases[i];
  if (!base) K3_FAIL(K3_ERR_USAGE, "recipe: there is no \"%s\"; known: tiny, k3", copy);
  memset(recipe, 0, sizeof *recipe);
  recipe->config = base->config;
  recipe->seed = 1;
  recipe->trunk = base->trunk;
  recipe->experts = base->experts;
  recipe->dt_bias = -3; /* decays from about 0.5 to 0.99 a token */

  int64_t layer_types = 0;
  int num_layers_given = 0;
  while (overrides) {
    char *next = strchr(overrides, ',');
    if (next) *next++ = '\0';
    K3_TRY(parse_override(overrides, recipe, &layer_types, &num_layers_given));
    overrides = next;
  }
  K3Config *config = &recipe->config;
  if (layer_types && !num_layers_given) config->num_layers = layer_types;
  if (layer_types && layer_types != config->num_layers)
    K3_FAIL(K3_ERR_USAGE, "recipe: layer_types has %lld digits, num_layers = %lld", (long long)layer_types,
            (long long)config->num_layers);
  if (!layer_types && config->num_layers <= K3_MAX_LAYERS)
    for (int64_t i = 0; i < config->num_layers; i++)
      config->layer_types[i] = (i + 1) % 4 == 0 || i + 1 == config->num_layers ? K3_LAYER_MLA : K3_LAYER_KDA;

  char origin[MAX_RECIPE + 8] = "synth:";
  memcpy(origin + 6, text, length + 1);
  return k3_config_check(config, origin);
}

/* ---------------------------------------------------------------- types and rules */

static int is_expert(K3Role role)
{
  return role == K3_ROLE_EXPERTS_GATE || role == K3_ROLE_EXPERTS_UP || role == K3_ROLE_EXPERTS_DOWN;
}

K3Status k3_synth_type(const K3SynthRecipe *recipe, const K3TensorSpec *spec, K3Type *type)
{
  *type = K3_TYPE_F32;
  if (!spec->is_matrix) return K3_OK;
  K3Type wanted = is_expert(spec->role) ? recipe->experts : recipe->trunk;
  int64_t row = spec->shape[spec->rank - 1];
  if (row % k3_format(wanted)->block_values == 0) {
    *type = wanted;
    return K3_OK;
  }
  if (is_expert(spec->role))
    K3_FAIL(
        K3_ERR_INPUT,
        "recipe: experts=%s does not suit %s: a row has %lld values, wanted a multiple of %lld; change %s or experts",
        k3_format(wanted)->name, spec->path, (long long)row, (long long)k3_format(wanted)->block_values,
        spec->role == K3_ROLE_EXPERTS_DOWN ? "moe_intermediate_size" : "latent_size");
  return K3_OK;
}

typedef struct {
  double mean, deviation;
} Rule;

/* A vector's own rule, or a matrix' gain over 1/sqrt(fan in). */
static Rule role_rule(K3Role role, double per_fan_in)
{
  double s = per_fan_in;
  switch (role) {
  case K3_ROLE_EMBED: return (Rule){0, 1};
  case K3_ROLE_LM_HEAD: return (Rule){0, 2 * s};
  /* Scores of the attention residual near one: its softmax is neither flat nor one-hot. */
  case K3_ROLE_ATTN_RES_PROJ:
  case K3_ROLE_MLP_RES_PROJ:
  case K3_ROLE_OUTPUT_RES_PROJ: return (Rule){0, s};
  /* After silu, wide inputs have a positive mean, so q . k keeps away from zero, where o_norm would
   * magnify rounding. */
  case K3_ROLE_Q_CONV:
  case K3_ROLE_K_CONV:
  case K3_ROLE_V_CONV: return (Rule){0, 1};
  case K3_ROLE_DT_BIAS: return (Rule){0, 1}; /* its mean is the recipe's */
  case K3_ROLE_A_LOG: return (Rule){0.1, 0.3};
  case K3_ROLE_Q_A_PROJ: return (Rule){0, 0.03 * s}; /* small, so that low_rank_norm_eps shows */
  case K3_ROLE_Q_B_PROJ: return (Rule){0, 2 * s};    /* a peaked softmax */
  case K3_ROLE_KV_A_PROJ: return (Rule){0, 0.5 * s};
  case K3_ROLE_MLA_O_PROJ:
    return (Rule){0, 2 * s}; /* a mean of many values is small */
  /* Gate and up reach the bends of their tanh; down brings the product back to order one. */
  case K3_ROLE_GATE_PROJ:
  case K3_ROLE_SHARED_GATE_PROJ:
  case K3_ROLE_EXPERTS_GATE: return (Rule){0, 1.5 * s};
  case K3_ROLE_UP_PROJ:
  case K3_ROLE_SHARED_UP_PROJ:
  case K3_ROLE_EXPERTS_UP: return (Rule){0, 4 * s};
  case K3_ROLE_DOWN_PROJ:
  case K3_ROLE_SHARED_DOWN_PROJ: return (Rule){0, 0.2 * s};
  case K3_ROLE_EXPERTS_DOWN: return (Rule){0, 0.02 * s}; /* mean(z²) within sight of the epsilon of routed_norm */
  case K3_ROLE_ROUTED_UP_PROJ: return (Rule){0, 0.7 * s};
  case K3_ROLE_ROUTER_BIAS: return (Rule){0, 0.1};
  case K3_ROLE_FINAL_NORM:
  case K3_ROLE_OUTPUT_RES_NORM:
  case K3_ROLE_INPUT_NORM:
  case K3_ROLE_POST_ATTN_NORM:
  case K3_ROLE_ATTN_RES_NORM:
  case K3_ROLE_MLP_RES_NORM:
  case K3_ROLE_O_NORM:
  case K3_ROLE_Q_A_NORM:
  case K3_ROLE_KV_A_NORM:
  case K3_ROLE_ROUTED_NORM: return (Rule){1, 0.2};
  default: return (Rule){0, s};
  }
}

K3SynthRule k3_synth_rule(const K3SynthRecipe *recipe, const K3TensorSpec *spec)
{
  Rule rule = role_rule(spec->role, 1.0 / sqrt((double)spec->shape[spec->rank - 1]));
  if (spec->role == K3_ROLE_DT_BIAS) rule.mean = recipe->dt_bias;
  return (K3SynthRule){k3_synth_key(recipe->seed, spec->path), (float)rule.mean, (float)rule.deviation};
}

void k3_synth_fill(K3SynthRule rule, K3Type type, int64_t first, int64_t count, void *destination)
{
  int64_t block = k3_format(type)->block_values, bytes = k3_format(type)->block_bytes;
  uint64_t begin = (uint64_t)(first / block), blocks = (uint64_t)(count / block);
  uint8_t *to = destination;
  K3SynthBlock shape = k3_synth_block_shape(type);
  for (uint64_t i = 0; i < blocks; i++, to += bytes) {
    float value;
    uint16_t half;
    switch (type) {
    case K3_TYPE_BF16:
      half = k3_bf16_from_float(k3_synth_float(rule, begin + i));
      memcpy(to, &half, sizeof half);
      break;
    case K3_TYPE_F16:
      half = k3_f16_from_float(k3_synth_float(rule, begin + i));
      memcpy(to, &half, sizeof half);
      break;
    case K3_TYPE_F32:
      value = k3_synth_float(rule, begin + i);
      memcpy(to, &value, sizeof value);
      break;
    case K3_TYPE_Q8_0: k3_synth_q8_0(rule, begin + i, to); break;
    case K3_TYPE_MXFP4: k3_synth_mxfp4(rule, begin + i, to); break;
    case K3_TYPE_IQ1_S: k3_synth_iq1_s(rule, begin + i, to); break;
    default: k3_synth_block(rule, shape, begin + i, to);
    }
  }
}
