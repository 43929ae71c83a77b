/* config.json -> K3Config. See hf_config.h. Layer: import. */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include "import/hf_config.h"

#ifdef HAVE_JSON_C

#include <json.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "import/json_file.h"

enum { MAX_CONFIG_BYTES = 16 << 20 };

#define LINEAR "linear_attn_config"

/* Where a key stands. */
typedef struct {
  const char *path;           /* of config.json, for messages */
  struct json_object *top;    /* the whole */
  struct json_object *text;   /* text_config, or the whole when flat */
  struct json_object *linear; /* linear_attn_config of text */
  const char *prefix;         /* "text_config." or "" */
} Json;

/* A key of the text model, or of linear_attn_config when `in_linear`. */
typedef struct {
  const char *key;
  int in_linear;
  const char *field; /* of K3Config */
} KeyMap;

static const KeyMap key_map[] = {
    {"num_hidden_layers", 0, "num_layers"},
    {"hidden_size", 0, "hidden_size"},
    {"vocab_size", 0, "vocab_size"},
    {"num_attention_heads", 0, "num_heads"},
    {"q_lora_rank", 0, "q_lora_rank"},
    {"kv_lora_rank", 0, "kv_lora_rank"},
    {"qk_nope_head_dim", 0, "qk_nope_head_dim"},
    {"qk_rope_head_dim", 0, "qk_rope_head_dim"},
    {"v_head_dim", 0, "v_head_dim"},
    {"head_dim", 1, "kda_head_dim"},
    {"short_conv_kernel_size", 1, "kda_conv_kernel"},
    {"gate_lower_bound", 1, "kda_gate_lower_bound"},
    {"num_experts", 0, "num_experts"},
    {"num_experts_per_token", 0, "num_experts_per_token"},
    {"num_shared_experts", 0, "num_shared_experts"},
    {"routed_expert_hidden_size", 0, "latent_size"},
    {"moe_intermediate_size", 0, "moe_intermediate_size"},
    {"intermediate_size", 0, "dense_intermediate_size"},
    {"first_k_dense_replace", 0, "first_dense_layers"},
    {"attn_res_block_size", 0, "attn_res_block_size"},
    {"rms_norm_eps", 0, "rms_norm_eps"},
    {"activation_situ_beta", 0, "situ_beta"},
    {"activation_situ_linear_beta", 0, "situ_linear_beta"},
    {"routed_scaling_factor", 0, "routed_scaling_factor"},
    {"moe_renormalize", 0, "renormalize"},
};

/* Values that choose between formulas: one of them is implemented. `wanted` is JSON text. */
typedef struct {
  const char *key;
  int in_linear;
  int optional;
  const char *wanted;
  const char *why;
} FixedKey;

static const FixedKey fixed_keys[] = {
    {"hidden_act", 0, 0, "\"situ\"", "the only activation implemented"},
    {"moe_router_activation_func", 0, 0, "\"sigmoid\"", "the only router activation implemented"},
    {"topk_method", 0, 0, "\"noaux_tc\"", "the only choice of experts implemented"},
    {"num_expert_group", 0, 0, "1", "experts are chosen without groups"},
    {"topk_group", 0, 0, "1", "experts are chosen without groups"},
    {"moe_layer_freq", 0, 0, "1", "every layer after the dense ones has experts"},
    {"latent_moe_use_norm", 0, 0, "true", "the routed sum is always normed"},
    {"mla_use_nope", 0, 0, "true", "no rotary embedding is implemented"},
    {"mla_use_output_gate", 0, 0, "true", "MLA layers always have an output gate"},
    {"use_full_rank_gate", 1, 0, "true", "KDA layers have a full-rank output gate, not a low-rank one"},
    {"tie_word_embeddings", 0, 1, "false", "embeddings and head are two tensors"},
    {"attention_bias", 0, 1, "false", "projections have no bias"},
    {"mlp_bias", 0, 1, "false", "projections have no bias"},
};

static struct json_object *find(const Json *json, const char *key, int in_linear)
{
  struct json_object *value = NULL;
  json_object_object_get_ex(in_linear ? json->linear : json->text, key, &value);
  return value; /* NULL also stands for null */
}

static K3Status fail_missing(const Json *json, const char *key, int in_linear)
{
  K3_FAIL(K3_ERR_INPUT, "%s: key %s%s%s is missing or null (no default is assumed)", json->path, json->prefix,
          in_linear ? LINEAR "." : "", key);
}

static K3Status read_number(const Json *json, const KeyMap *map, K3Config *config)
{
  const K3ConfigField *field = k3_config_find(map->field);
  struct json_object *value = find(json, map->key, map->in_linear);
  const char *group = map->in_linear ? LINEAR "." : "";
  if (!value) return fail_missing(json, map->key, map->in_linear);
  enum json_type type = json_object_get_type(value);
  int ok = type == json_type_int;
  const char *wanted = "a whole number";
  if (field->kind == K3_FIELD_REAL) ok = ok || type == json_type_double, wanted = "a number";
  if (field->kind == K3_FIELD_BOOLEAN) ok = type == json_type_boolean, wanted = "true or false";
  if (!ok)
    K3_FAIL(K3_ERR_INPUT, "%s: key %s%s%s is %.60s, wanted %s", json->path, json->prefix, group, map->key,
            json_object_to_json_string(value), wanted);
  double number = type == json_type_boolean ? json_object_get_boolean(value) : json_object_get_double(value);
  if (field->kind == K3_FIELD_INTEGER && (number < -9e15 || number > 9e15))
    K3_FAIL(K3_ERR_INPUT, "%s: key %s%s%s is %.60s, out of range", json->path, json->prefix, group, map->key,
            json_object_to_json_string(value));
  return k3_config_set(config, field, number);
}

static K3Status check_fixed(const Json *json)
{
  for (size_t i = 0; i < sizeof fixed_keys / sizeof fixed_keys[0]; i++) {
    const FixedKey *fixed = &fixed_keys[i];
    struct json_object *value = find(json, fixed->key, fixed->in_linear);
    if (!value && fixed->optional) continue;
    if (!value) return fail_missing(json, fixed->key, fixed->in_linear);
    const char *text = json_object_to_json_string_ext(value, JSON_C_TO_STRING_PLAIN);
    if (strcmp(text, fixed->wanted) != 0)
      K3_FAIL(K3_ERR_INPUT, "%s: key %s%s%s is %.60s, wanted %s: %s", json->path, json->prefix,
              fixed->in_linear ? LINEAR "." : "", fixed->key, text, fixed->wanted, fixed->why);
  }
  return K3_OK;
}

/* Head counts that K3 has once and config.json several times. */
static K3Status check_heads(const Json *json, const K3Config *config)
{
  struct json_object *kda = find(json, "num_heads", 1), *key_value = find(json, "num_key_value_heads", 0);
  if (!kda) return fail_missing(json, "num_heads", 1);
  if (!json_object_is_type(kda, json_type_int) || json_object_get_int64(kda) != config->num_heads)
    K3_FAIL(K3_ERR_INPUT,
            "%s: key %s" LINEAR ".num_heads is %.60s, wanted num_attention_heads = %lld: both kinds of "
            "attention have the same heads",
            json->path, json->prefix, json_object_to_json_string(kda), (long long)config->num_heads);
  if (key_value &&
      (!json_object_is_type(key_value, json_type_int) || json_object_get_int64(key_value) != config->num_heads))
    K3_FAIL(K3_ERR_INPUT, "%s: key %snum_key_value_heads is %.60s, wanted num_attention_heads = %lld or no such key",
            json->path, json->prefix, json_object_to_json_string(key_value), (long long)config->num_heads);
  return K3_OK;
}

/* Marks the ONE-based layers of a list: seen[layer] gets `mark`; twice is an error. */
static K3Status mark_layers(const Json *json, const char *key, uint8_t mark, const K3Config *config, uint8_t *seen)
{
  struct json_object *list = find(json, key, 1);
  if (!list) return fail_missing(json, key, 1);
  if (!json_object_is_type(list, json_type_array))
    K3_FAIL(K3_ERR_INPUT, "%s: key %s" LINEAR ".%s is %.60s, wanted a list of one-based layers", json->path,
            json->prefix, key, json_object_to_json_string(list));
  for (size_t i = 0; i < json_object_array_length(list); i++) {
    struct json_object *item = json_object_array_get_idx(list, i);
    int64_t layer = json_object_is_type(item, json_type_int) ? json_object_get_int64(item) : 0;
    if (layer < 1 || layer > config->num_layers)
      K3_FAIL(K3_ERR_INPUT,
              "%s: key %s" LINEAR ".%s[%zu] is %.60s, wanted a one-based layer, 1 to num_hidden_layers = %lld",
              json->path, json->prefix, key, i, json_object_to_json_string(item), (long long)config->num_layers);
    if (seen[layer])
      K3_FAIL(K3_ERR_INPUT, "%s: layer %lld (one-based) is listed twice in " LINEAR ".full_attn_layers and .kda_layers",
              json->path, (long long)layer);
    seen[layer] = mark;
  }
  return K3_OK;
}

static K3Status read_layer_types(const Json *json, K3Config *config)
{
  uint8_t seen[K3_MAX_LAYERS + 1] = {0};
  if (config->num_layers < 1 || config->num_layers > K3_MAX_LAYERS)
    K3_FAIL(K3_ERR_INPUT, "%s: key %snum_hidden_layers is %lld, wanted 1 to %d", json->path, json->prefix,
            (long long)config->num_layers, K3_MAX_LAYERS);
  K3_TRY(mark_layers(json, "full_attn_layers", 1 + K3_LAYER_MLA, config, seen));
  K3_TRY(mark_layers(json, "kda_layers", 1 + K3_LAYER_KDA, config, seen));
  for (int64_t layer = 1; layer <= config->num_layers; layer++) {
    if (!seen[layer])
      K3_FAIL(K3_ERR_INPUT, "%s: layer %lld (one-based) is neither in " LINEAR ".full_attn_layers nor in .kda_layers",
              json->path, (long long)layer);
    config->layer_types[layer - 1] = (uint8_t)(seen[layer] - 1);
  }
  return K3_OK;
}

static K3Status read_optional(const Json *json, K3Config *config)
{
  const KeyMap length = {"model_max_length", 0, "max_context"},
               positions = {"max_position_embeddings", 0, "max_context"};
  const KeyMap epsilon = {"low_rank_norm_eps", 0, "low_rank_norm_eps"};
  if (!find(json, length.key, 0) && !find(json, positions.key, 0))
    K3_FAIL(K3_ERR_INPUT, "%s: keys %smodel_max_length and max_position_embeddings are both missing", json->path,
            json->prefix);
  K3_TRY(read_number(json, find(json, length.key, 0) ? &length : &positions, config));
  config->low_rank_norm_eps = 1e-6; /* written into the public modules, not into the config */
  if (find(json, epsilon.key, 0)) K3_TRY(read_number(json, &epsilon, config));
  return K3_OK;
}

/* The released form packs the experts; any other quantisation would be read wrongly. */
static K3Status check_quantisation(const Json *json)
{
  struct json_object *top = NULL, *value = NULL;
  struct json_object *places[2] = {find(json, "quantization_config", 0), NULL};
  if (json->top != json->text && json_object_object_get_ex(json->top, "quantization_config", &top)) places[1] = top;
  const char *const wanted[2][2] = {{"quant_method", "compressed-tensors"}, {"format", "mxfp4-pack-quantized"}};
  for (int i = 0; i < 2; i++) {
    if (!places[i]) continue;
    for (int k = 0; k < 2; k++) {
      if (!json_object_object_get_ex(places[i], wanted[k][0], &value)) value = NULL;
      if (!json_object_is_type(value, json_type_string) || strcmp(json_object_get_string(value), wanted[k][1]) != 0)
        K3_FAIL(K3_ERR_INPUT, "%s: key %squantization_config.%s is %.60s, wanted \"%s\": no other quantisation is read",
                json->path, i == 0 ? json->prefix : "", wanted[k][0], json_object_to_json_string(value), wanted[k][1]);
    }
  }
  return K3_OK;
}

static K3Status convert(Json *json, K3Config *config)
{
  json->text = json->top;
  json->prefix = "";
  struct json_object *nested = NULL;
  if (json_object_object_get_ex(json->top, "text_config", &nested)) {
    if (!json_object_is_type(nested, json_type_object))
      K3_FAIL(K3_ERR_INPUT, "%s: key text_config is no object", json->path);
    json->text = nested;
    json->prefix = "text_config.";
  }
  if (!json_object_object_get_ex(json->text, LINEAR, &json->linear) ||
      !json_object_is_type(json->linear, json_type_object))
    K3_FAIL(K3_ERR_INPUT, "%s: key %s" LINEAR " is missing or no object (is this a Kimi K3 checkpoint?)", json->path,
            json->prefix);
  memset(config, 0, sizeof *config);
  for (size_t i = 0; i < sizeof key_map / sizeof key_map[0]; i++) K3_TRY(read_number(json, &key_map[i], config));
  K3_TRY(read_optional(json, config));
  K3_TRY(check_fixed(json));
  K3_TRY(check_heads(json, config));
  K3_TRY(check_quantisation(json));
  K3_TRY(read_layer_types(json, config));
  return k3_config_check(config, json->path);
}

K3Status k3_hf_config_read(const char *directory, K3Config *config)
{
  K3Status status = K3_OK;
  char *path = NULL;
  Json json = {0};
  if (asprintf(&path, "%s/config.json", directory) < 0) K3_FAIL(K3_ERR_INPUT, "%s: no memory", directory);
  json.path = path;
  K3_TRY_DONE(k3_json_load(path, MAX_CONFIG_BYTES, &json.top));
  K3_TRY_DONE(convert(&json, config));
done:
  json_object_put(json.top);
  free(path);
  return status;
}

#endif /* HAVE_JSON_C */
