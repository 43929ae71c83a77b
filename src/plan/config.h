/* The model's sizes and constants, as /config of the model file holds them. Layer: plan.
 * Source: model.md, "Sizes". Every field is read; none has a default. */
#ifndef K3_PLAN_CONFIG_H
#define K3_PLAN_CONFIG_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

enum { K3_MAX_LAYERS = 1000 }; /* the group name /layers/NNN has three digits */

typedef enum { K3_LAYER_KDA = 0, K3_LAYER_MLA = 1 } K3LayerType;

typedef struct {
  int64_t num_layers;
  int64_t hidden_size;         /* H */
  int64_t vocab_size;          /* V */
  int64_t num_heads;
  int64_t q_lora_rank;
  int64_t kv_lora_rank;        /* C */
  int64_t qk_nope_head_dim;
  int64_t qk_rope_head_dim;    /* R */
  int64_t v_head_dim;
  int64_t kda_head_dim;        /* D */
  int64_t kda_conv_kernel;
  double kda_gate_lower_bound;
  int64_t num_experts;         /* E */
  int64_t num_experts_per_token;
  int64_t num_shared_experts;
  int64_t latent_size;         /* L */
  int64_t moe_intermediate_size; /* I */
  int64_t dense_intermediate_size;
  int64_t first_dense_layers;
  int64_t attn_res_block_size;
  double rms_norm_eps;
  double low_rank_norm_eps;
  double situ_beta;
  double situ_linear_beta;
  double routed_scaling_factor;
  uint8_t renormalize;
  int64_t max_context;         /* positions */
  uint8_t layer_types[K3_MAX_LAYERS]; /* K3LayerType of each layer */
} K3Config;

typedef enum { K3_FIELD_INTEGER, K3_FIELD_REAL, K3_FIELD_BOOLEAN } K3FieldKind;

typedef struct {
  const char *name; /* attribute of /config */
  K3FieldKind kind;
  size_t offset;    /* in K3Config */
} K3ConfigField;

/* All scalar fields, in the order of the table in model.md (layer_types is not among them). */
extern const K3ConfigField k3_config_fields[];
extern const int k3_config_field_count;

/* The field called `name`, NULL when there is none. */
const K3ConfigField *k3_config_find(const char *name);

/* Value of a field as a double (exact: all integers are below 2^53), and its setter.
 * k3_config_set: K3_ERR_INPUT when `value` does not suit the field's kind. */
double k3_config_get(const K3Config *config, const K3ConfigField *field);
K3Status k3_config_set(K3Config *config, const K3ConfigField *field, double value);

/* Checks ranges and the relations between fields.
 * Errors: K3_ERR_INPUT naming the field, what it holds and what is wanted. `origin` (a file or a
 * recipe) begins the message. */
K3Status k3_config_check(const K3Config *config, const char *origin);

/* Derived sizes. */
int64_t k3_config_qk_head_dim(const K3Config *config); /* nope + rope */
int64_t k3_config_cache_width(const K3Config *config); /* C + R, numbers a position */
int64_t k3_config_shared_size(const K3Config *config); /* num_shared_experts * I */
int k3_config_is_dense(const K3Config *config, int64_t layer);
int64_t k3_config_count_layers(const K3Config *config, K3LayerType type);

#endif
