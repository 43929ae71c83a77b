/* Config fields, their checks and derived sizes. See config.h. Layer: plan. */
#include "plan/config.h"

#include <math.h>
#include <string.h>

#define INTEGER(field) {#field, K3_FIELD_INTEGER, offsetof(K3Config, field)}
#define REAL(field) {#field, K3_FIELD_REAL, offsetof(K3Config, field)}
#define BOOLEAN(field) {#field, K3_FIELD_BOOLEAN, offsetof(K3Config, field)}

const K3ConfigField k3_config_fields[] = {
  INTEGER(num_layers), INTEGER(hidden_size), INTEGER(vocab_size), INTEGER(num_heads),
  INTEGER(q_lora_rank), INTEGER(kv_lora_rank), INTEGER(qk_nope_head_dim), INTEGER(qk_rope_head_dim),
  INTEGER(v_head_dim), INTEGER(kda_head_dim), INTEGER(kda_conv_kernel), REAL(kda_gate_lower_bound),
  INTEGER(num_experts), INTEGER(num_experts_per_token), INTEGER(num_shared_experts),
  INTEGER(latent_size), INTEGER(moe_intermediate_size), INTEGER(dense_intermediate_size),
  INTEGER(first_dense_layers), INTEGER(attn_res_block_size), REAL(rms_norm_eps),
  REAL(low_rank_norm_eps), REAL(situ_beta), REAL(situ_linear_beta), REAL(routed_scaling_factor),
  BOOLEAN(renormalize), INTEGER(max_context),
};
const int k3_config_field_count = (int)(sizeof k3_config_fields / sizeof k3_config_fields[0]);

const K3ConfigField *k3_config_find(const char *name)
{
  for (int i = 0; i < k3_config_field_count; i++)
    if (strcmp(k3_config_fields[i].name, name) == 0) return &k3_config_fields[i];
  return NULL;
}

double k3_config_get(const K3Config *config, const K3ConfigField *field)
{
  const char *at = (const char *)config + field->offset;
  if (field->kind == K3_FIELD_INTEGER) return (double)*(const int64_t *)(const void *)at;
  if (field->kind == K3_FIELD_REAL) return *(const double *)(const void *)at;
  return (double)*(const uint8_t *)at;
}

K3Status k3_config_set(K3Config *config, const K3ConfigField *field, double value)
{
  char *at = (char *)config + field->offset;
  if (field->kind == K3_FIELD_REAL) {
    *(double *)(void *)at = value;
    return K3_OK;
  }
  if (!(value == floor(value) && fabs(value) < 9007199254740992.0))
    K3_FAIL(K3_ERR_INPUT, "config field %s = %g: wants a whole number", field->name, value);
  if (field->kind == K3_FIELD_INTEGER) {
    *(int64_t *)(void *)at = (int64_t)value;
    return K3_OK;
  }
  if (value != 0.0 && value != 1.0)
    K3_FAIL(K3_ERR_INPUT, "config field %s = %g: wants 0 or 1", field->name, value);
  *(uint8_t *)at = (uint8_t)value;
  return K3_OK;
}

int64_t k3_config_qk_head_dim(const K3Config *c) { return c->qk_nope_head_dim + c->qk_rope_head_dim; }
int64_t k3_config_cache_width(const K3Config *c) { return c->kv_lora_rank + c->qk_rope_head_dim; }
int64_t k3_config_shared_size(const K3Config *c) { return c->num_shared_experts * c->moe_intermediate_size; }
int k3_config_is_dense(const K3Config *c, int64_t layer) { return layer < c->first_dense_layers; }

int64_t k3_config_count_layers(const K3Config *config, K3LayerType type)
{
  int64_t count = 0;
  for (int64_t i = 0; i < config->num_layers; i++) count += config->layer_types[i] == type;
  return count;
}

/* Inclusive bounds of the integer fields. The upper ones keep every product of two sizes and a
 * block's bytes inside int64. */
static K3Status check_integers(const K3Config *config, const char *origin)
{
  for (int i = 0; i < k3_config_field_count; i++) {
    const K3ConfigField *field = &k3_config_fields[i];
    if (field->kind != K3_FIELD_INTEGER) continue;
    int64_t value = (int64_t)k3_config_get(config, field);
    int64_t low = 1, high = (int64_t)1 << 24;
    if (field->offset == offsetof(K3Config, num_layers)) high = K3_MAX_LAYERS;
    if (field->offset == offsetof(K3Config, first_dense_layers)) low = 0, high = K3_MAX_LAYERS;
    if (field->offset == offsetof(K3Config, num_shared_experts)) high = 1024;
    if (field->offset == offsetof(K3Config, kv_lora_rank)) high = 16384; /* a head's latent sums stand on the stack */
    if (field->offset == offsetof(K3Config, kda_head_dim)) high = 4096;  /* likewise, and a state is D x D */
    if (field->offset == offsetof(K3Config, max_context)) high = (int64_t)1 << 31;
    if (value < low || value > high)
      K3_FAIL(K3_ERR_INPUT, "%s: config field %s = %lld, wanted %lld to %lld", origin, field->name,
              (long long)value, (long long)low, (long long)high);
  }
  return K3_OK;
}

K3Status k3_config_check(const K3Config *config, const char *origin)
{
  K3_TRY(check_integers(config, origin));
  for (int i = 0; i < k3_config_field_count; i++) {
    const K3ConfigField *field = &k3_config_fields[i];
    if (field->kind != K3_FIELD_REAL) continue;
    double value = k3_config_get(config, field);
    int negative = field->offset == offsetof(K3Config, kda_gate_lower_bound);
    if (!isfinite(value) || (negative ? value >= 0.0 : value <= 0.0))
      K3_FAIL(K3_ERR_INPUT, "%s: config field %s = %g, wanted a finite number %s zero", origin,
              field->name, value, negative ? "below" : "above");
  }
  if (config->renormalize > 1)
    K3_FAIL(K3_ERR_INPUT, "%s: config field renormalize = %d, wanted 0 or 1", origin, config->renormalize);
  if (config->num_experts_per_token > config->num_experts)
    K3_FAIL(K3_ERR_INPUT, "%s: config field num_experts_per_token = %lld, wanted at most num_experts = %lld",
            origin, (long long)config->num_experts_per_token, (long long)config->num_experts);
  if (config->first_dense_layers > config->num_layers)
    K3_FAIL(K3_ERR_INPUT, "%s: config field first_dense_layers = %lld, wanted at most num_layers = %lld",
            origin, (long long)config->first_dense_layers, (long long)config->num_layers);
  for (int64_t i = 0; i < config->num_layers; i++)
    if (config->layer_types[i] > K3_LAYER_MLA)
      K3_FAIL(K3_ERR_INPUT, "%s: /config/layer_types[%lld] = %d, wanted 0 (KDA) or 1 (MLA)", origin,
              (long long)i, config->layer_types[i]);
  return K3_OK;
}
