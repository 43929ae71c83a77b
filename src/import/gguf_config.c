/* GGUF metadata -> K3Config. See gguf_config.h. Layer: import. */
#include "import/gguf_config.h"

#include <stdio.h>
#include <string.h>

#define ARCHITECTURE "kimi-k3"
#define KEY(name) ARCHITECTURE "." name

enum { GATING_SIGMOID = 2 }; /* gguf.ExpertGatingFuncType */

/* Keys that are fields of ours. Per-layer lists are read where all their elements are the same. */
static const struct {
  const char *key, *field;
} key_map[] = {
    {KEY("block_count"), "num_layers"},
    {KEY("embedding_length"), "hidden_size"},
    {KEY("attention.head_count"), "num_heads"},
    {KEY("attention.q_lora_rank"), "q_lora_rank"},
    {KEY("attention.kv_lora_rank"), "kv_lora_rank"},
    {KEY("rope.dimension_count"), "qk_rope_head_dim"},
    {KEY("attention.value_length_mla"), "v_head_dim"},
    {KEY("kda.head_dim"), "kda_head_dim"},
    {KEY("ssm.conv_kernel"), "kda_conv_kernel"},
    {KEY("kda.gate_lower_bound"), "kda_gate_lower_bound"},
    {KEY("expert_count"), "num_experts"},
    {KEY("expert_used_count"), "num_experts_per_token"},
    {KEY("expert_shared_count"), "num_shared_experts"},
    {KEY("expert_latent_length"), "latent_size"},
    {KEY("expert_feed_forward_length"), "moe_intermediate_size"},
    {KEY("feed_forward_length"), "dense_intermediate_size"},
    {KEY("leading_dense_block_count"), "first_dense_layers"},
    {KEY("attn_res.block_size"), "attn_res_block_size"},
    {KEY("attention.layer_norm_rms_epsilon"), "rms_norm_eps"},
    {KEY("activation.situ_beta"), "situ_beta"},
    {KEY("activation.situ_linear_beta"), "situ_linear_beta"},
    {KEY("expert_weights_scale"), "routed_scaling_factor"},
    {KEY("expert_weights_norm"), "renormalize"},
    {KEY("context_length"), "max_context"},
};

static const char *path_of(const K3Gguf *gguf) { return gguf->shards[0].path; }

static K3Status find(const K3Gguf *gguf, const char *key, K3GgufValue *value)
{
  if (k3_gguf_value(gguf, key, value)) return K3_OK;
  K3_FAIL(K3_ERR_INPUT, "%s: metadata key %s is missing (no default is assumed)", path_of(gguf), key);
}

static K3Status fail_kind(const K3Gguf *gguf, const char *key, const K3GgufValue *value, const char *wanted)
{
  char text[80];
  K3_FAIL(K3_ERR_INPUT, "%s: metadata key %s is %s, wanted %s", path_of(gguf), key,
          k3_gguf_kind_text(value, text, sizeof text), wanted);
}

/* Element `index` as a number of the field's kind. */
static K3Status read_element(const K3Gguf *gguf, const char *key, const K3GgufValue *value, int64_t index,
                             K3FieldKind kind, double *number)
{
  int64_t whole = 0;
  if (kind == K3_FIELD_REAL) {
    if (!k3_gguf_real(value, index, number)) return fail_kind(gguf, key, value, "float32");
    return K3_OK;
  }
  int is_bool = value->kind == K3_GGUF_BOOL;
  if (!k3_gguf_integer(value, index, &whole) || is_bool != (kind == K3_FIELD_BOOLEAN))
    return fail_kind(gguf, key, value, kind == K3_FIELD_BOOLEAN ? "bool" : "a whole number below 2^63");
  if (whole < -((int64_t)1 << 52) || whole > (int64_t)1 << 52)
    K3_FAIL(K3_ERR_INPUT, "%s: metadata key %s is %lld, out of range", path_of(gguf), key, (long long)whole);
  *number = (double)whole;
  return K3_OK;
}

static K3Status read_field(const K3Gguf *gguf, const char *key, const K3ConfigField *field, K3Config *config)
{
  K3GgufValue value;
  double first = 0, other = 0;
  K3_TRY(find(gguf, key, &value));
  if (value.is_array && value.count != config->num_layers) /* 0 while block_count itself is read */
    return fail_kind(gguf, key, &value, "a number, or one a layer");
  K3_TRY(read_element(gguf, key, &value, 0, field->kind, &first));
  for (int64_t i = 1; i < value.count; i++) {
    K3_TRY(read_element(gguf, key, &value, i, field->kind, &other));
    if (other != first)
      K3_FAIL(K3_ERR_INPUT, "%s: metadata key %s is %g in layer 0 and %g in layer %lld, but all layers share one value",
              path_of(gguf), key, first, other, (long long)i);
  }
  return k3_config_set(config, field, first);
}

/* A whole number; `required` or -1 when absent. */
static K3Status read_whole(const K3Gguf *gguf, const char *key, int required, int64_t *number)
{
  K3GgufValue value;
  double read = 0;
  *number = -1;
  if (!required && !k3_gguf_value(gguf, key, &value)) return K3_OK;
  K3_TRY(find(gguf, key, &value));
  if (value.is_array) return fail_kind(gguf, key, &value, "a whole number");
  K3_TRY(read_element(gguf, key, &value, 0, K3_FIELD_INTEGER, &read));
  *number = (int64_t)read;
  return K3_OK;
}

static K3Status check_architecture(const K3Gguf *gguf)
{
  K3GgufValue value;
  K3_TRY(find(gguf, "general.architecture", &value));
  if (value.kind != K3_GGUF_STRING || value.is_array)
    return fail_kind(gguf, "general.architecture", &value, "a string");
  int64_t length = value.bytes - 8;
  if (length != (int64_t)strlen(ARCHITECTURE) || memcmp(value.data + 8, ARCHITECTURE, (size_t)length) != 0)
    K3_FAIL(K3_ERR_INPUT, "%s: general.architecture is \"%.*s\", wanted \"" ARCHITECTURE "\"", path_of(gguf),
            (int)(length < 80 ? length : 80), (const char *)value.data + 8);
  return K3_OK;
}

/* The key, or else the number of the tokenizer's tokens, which is what the converter writes the key from. */
static K3Status read_vocabulary(const K3Gguf *gguf, K3Config *config)
{
  K3GgufValue tokens;
  K3_TRY(read_whole(gguf, KEY("vocab_size"), 0, &config->vocab_size));
  if (config->vocab_size >= 0) return K3_OK;
  if (!k3_gguf_value(gguf, "tokenizer.ggml.tokens", &tokens) || !tokens.is_array)
    K3_FAIL(K3_ERR_INPUT, "%s: metadata keys " KEY("vocab_size") " and tokenizer.ggml.tokens are both missing",
            path_of(gguf));
  config->vocab_size = tokens.count;
  return K3_OK;
}

/* 0 in attention.head_count_kv marks a KDA layer. */
static K3Status read_layer_types(const K3Gguf *gguf, K3Config *config)
{
  static const char key[] = KEY("attention.head_count_kv");
  K3GgufValue value;
  K3_TRY(find(gguf, key, &value));
  if (config->num_layers < 1 || config->num_layers > K3_MAX_LAYERS)
    K3_FAIL(K3_ERR_INPUT, "%s: metadata key " KEY("block_count") " is %lld, wanted 1 to %d", path_of(gguf),
            (long long)config->num_layers, K3_MAX_LAYERS);
  if (!value.is_array || value.count != config->num_layers)
    return fail_kind(gguf, key, &value, "a list of " KEY("block_count") " whole numbers (0 marks a KDA layer)");
  for (int64_t layer = 0; layer < value.count; layer++) {
    double heads = 0;
    K3_TRY(read_element(gguf, key, &value, layer, K3_FIELD_INTEGER, &heads));
    if (heads != 0 && heads != 1 && heads != (double)config->num_heads)
      K3_FAIL(K3_ERR_INPUT, "%s: metadata key %s[%lld] is %g, wanted 0 (KDA), 1 or the number of heads (MLA)",
              path_of(gguf), key, (long long)layer, heads);
    config->layer_types[layer] = heads == 0 ? K3_LAYER_KDA : K3_LAYER_MLA;
  }
  return K3_OK;
}

/* Values that choose between formulas, or repeat what other keys say. */
static K3Status check_fixed(const K3Gguf *gguf, const K3Config *config)
{
  int64_t latent_key = config->kv_lora_rank + config->qk_rope_head_dim;
  const struct {
    const char *key;
    int required;
    int64_t wanted, also;
    const char *why;
  } fixed[] = {
      {KEY("expert_gating_func"), 1, GATING_SIGMOID, GATING_SIGMOID,
       "sigmoid is the only router activation implemented"},
      {KEY("expert_group_count"), 0, 0, 1, "experts are chosen without groups"},
      {KEY("expert_group_used_count"), 0, 0, 1, "experts are chosen without groups"},
      {KEY("attention.key_length"), 0, latent_key, latent_key, "kv_lora_rank + rope.dimension_count"},
      {KEY("attention.value_length"), 0, config->kv_lora_rank, config->kv_lora_rank, "kv_lora_rank"},
      {KEY("nextn_predict_layers"), 0, 0, 0, "no layers for predicting several tokens are implemented"},
  };
  for (size_t i = 0; i < sizeof fixed / sizeof fixed[0]; i++) {
    int64_t number;
    K3_TRY(read_whole(gguf, fixed[i].key, fixed[i].required, &number));
    if (number == -1 && !fixed[i].required) continue;
    if (number != fixed[i].wanted && number != fixed[i].also)
      K3_FAIL(K3_ERR_INPUT, "%s: metadata key %s is %lld, wanted %lld: %s", path_of(gguf), fixed[i].key,
              (long long)number, (long long)fixed[i].wanted, fixed[i].why);
  }
  return K3_OK;
}

K3Status k3_gguf_config_read(const K3Gguf *gguf, K3Config *config)
{
  int64_t key_length = 0;
  memset(config, 0, sizeof *config);
  K3_TRY(check_architecture(gguf));
  for (size_t i = 0; i < sizeof key_map / sizeof key_map[0]; i++)
    K3_TRY(read_field(gguf, key_map[i].key, k3_config_find(key_map[i].field), config));
  K3_TRY(read_vocabulary(gguf, config));
  K3_TRY(read_whole(gguf, KEY("attention.key_length_mla"), 1, &key_length));
  config->qk_nope_head_dim = key_length - config->qk_rope_head_dim;
  config->low_rank_norm_eps = 1e-6;
  K3_TRY(read_layer_types(gguf, config));
  K3_TRY(check_fixed(gguf, config));
  return k3_config_check(config, path_of(gguf));
}
