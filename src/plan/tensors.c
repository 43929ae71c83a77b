/* The table of tensors. See tensors.h. Layer: plan. */
#include "plan/tensors.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Which layers bear a role. */
typedef enum { IN_ROOT, IN_ALL, IN_KDA, IN_MLA, IN_DENSE, IN_MOE } Place;

typedef struct {
  const char *name;
  Place place;
  int is_matrix;
  K3Share share;
  int share_axis;
} RoleEntry;

static const RoleEntry roles[K3_ROLE_COUNT] = {
  [K3_ROLE_EMBED] = {"embed", IN_ROOT, 1, K3_SHARE_VOCAB, 0},
  [K3_ROLE_FINAL_NORM] = {"final_norm", IN_ROOT, 0, K3_SHARE_NONE, 0},
  [K3_ROLE_OUTPUT_RES_NORM] = {"output_res_norm", IN_ROOT, 0, K3_SHARE_NONE, 0},
  [K3_ROLE_OUTPUT_RES_PROJ] = {"output_res_proj", IN_ROOT, 0, K3_SHARE_NONE, 0},
  [K3_ROLE_LM_HEAD] = {"lm_head", IN_ROOT, 1, K3_SHARE_VOCAB, 0},
  [K3_ROLE_INPUT_NORM] = {"input_norm", IN_ALL, 0, K3_SHARE_NONE, 0},
  [K3_ROLE_POST_ATTN_NORM] = {"post_attn_norm", IN_ALL, 0, K3_SHARE_NONE, 0},
  [K3_ROLE_ATTN_RES_NORM] = {"attn_res_norm", IN_ALL, 0, K3_SHARE_NONE, 0},
  [K3_ROLE_ATTN_RES_PROJ] = {"attn_res_proj", IN_ALL, 0, K3_SHARE_NONE, 0},
  [K3_ROLE_MLP_RES_NORM] = {"mlp_res_norm", IN_ALL, 0, K3_SHARE_NONE, 0},
  [K3_ROLE_MLP_RES_PROJ] = {"mlp_res_proj", IN_ALL, 0, K3_SHARE_NONE, 0},
  [K3_ROLE_Q_PROJ] = {"q_proj", IN_KDA, 1, K3_SHARE_KDA_HEADS, 0},
  [K3_ROLE_K_PROJ] = {"k_proj", IN_KDA, 1, K3_SHARE_KDA_HEADS, 0},
  [K3_ROLE_V_PROJ] = {"v_proj", IN_KDA, 1, K3_SHARE_KDA_HEADS, 0},
  [K3_ROLE_KDA_G_PROJ] = {"g_proj", IN_KDA, 1, K3_SHARE_KDA_HEADS, 0},
  [K3_ROLE_Q_CONV] = {"q_conv", IN_KDA, 0, K3_SHARE_KDA_HEADS, 0},
  [K3_ROLE_K_CONV] = {"k_conv", IN_KDA, 0, K3_SHARE_KDA_HEADS, 0},
  [K3_ROLE_V_CONV] = {"v_conv", IN_KDA, 0, K3_SHARE_KDA_HEADS, 0},
  [K3_ROLE_F_A_PROJ] = {"f_a_proj", IN_KDA, 1, K3_SHARE_NONE, 0},
  [K3_ROLE_F_B_PROJ] = {"f_b_proj", IN_KDA, 1, K3_SHARE_KDA_HEADS, 0},
  [K3_ROLE_DT_BIAS] = {"dt_bias", IN_KDA, 0, K3_SHARE_KDA_HEADS, 0},
  [K3_ROLE_B_PROJ] = {"b_proj", IN_KDA, 1, K3_SHARE_KDA_HEADS, 0},
  [K3_ROLE_A_LOG] = {"A_log", IN_KDA, 0, K3_SHARE_KDA_HEADS, 0},
  [K3_ROLE_O_NORM] = {"o_norm", IN_KDA, 0, K3_SHARE_NONE, 0},
  [K3_ROLE_KDA_O_PROJ] = {"o_proj", IN_KDA, 1, K3_SHARE_KDA_HEADS, 1},
  [K3_ROLE_Q_A_PROJ] = {"q_a_proj", IN_MLA, 1, K3_SHARE_NONE, 0},
  [K3_ROLE_Q_A_NORM] = {"q_a_norm", IN_MLA, 0, K3_SHARE_NONE, 0},
  [K3_ROLE_Q_B_PROJ] = {"q_b_proj", IN_MLA, 1, K3_SHARE_MLA_HEADS, 0},
  [K3_ROLE_KV_A_PROJ] = {"kv_a_proj", IN_MLA, 1, K3_SHARE_NONE, 0},
  [K3_ROLE_KV_A_NORM] = {"kv_a_norm", IN_MLA, 0, K3_SHARE_NONE, 0},
  [K3_ROLE_KV_B_PROJ] = {"kv_b_proj", IN_MLA, 1, K3_SHARE_MLA_HEADS, 0},
  [K3_ROLE_MLA_G_PROJ] = {"g_proj", IN_MLA, 1, K3_SHARE_MLA_HEADS, 0},
  [K3_ROLE_MLA_O_PROJ] = {"o_proj", IN_MLA, 1, K3_SHARE_MLA_HEADS, 1},
  [K3_ROLE_GATE_PROJ] = {"gate_proj", IN_DENSE, 1, K3_SHARE_DENSE, 0},
  [K3_ROLE_UP_PROJ] = {"up_proj", IN_DENSE, 1, K3_SHARE_DENSE, 0},
  [K3_ROLE_DOWN_PROJ] = {"down_proj", IN_DENSE, 1, K3_SHARE_DENSE, 1},
  [K3_ROLE_ROUTER] = {"router", IN_MOE, 1, K3_SHARE_ROUTER_ROWS, 0},
  [K3_ROLE_ROUTER_BIAS] = {"router_bias", IN_MOE, 0, K3_SHARE_NONE, 0},
  [K3_ROLE_ROUTED_DOWN_PROJ] = {"routed_down_proj", IN_MOE, 1, K3_SHARE_LATENT_ROWS, 0},
  [K3_ROLE_ROUTED_NORM] = {"routed_norm", IN_MOE, 0, K3_SHARE_NONE, 0},
  [K3_ROLE_ROUTED_UP_PROJ] = {"routed_up_proj", IN_MOE, 1, K3_SHARE_LATENT_COLUMNS, 1},
  [K3_ROLE_EXPERTS_GATE] = {"experts_gate", IN_MOE, 1, K3_SHARE_EXPERTS, 1},
  [K3_ROLE_EXPERTS_UP] = {"experts_up", IN_MOE, 1, K3_SHARE_EXPERTS, 1},
  [K3_ROLE_EXPERTS_DOWN] = {"experts_down", IN_MOE, 1, K3_SHARE_EXPERTS, 2},
  [K3_ROLE_SHARED_GATE_PROJ] = {"shared_gate_proj", IN_MOE, 1, K3_SHARE_SHARED, 0},
  [K3_ROLE_SHARED_UP_PROJ] = {"shared_up_proj", IN_MOE, 1, K3_SHARE_SHARED, 0},
  [K3_ROLE_SHARED_DOWN_PROJ] = {"shared_down_proj", IN_MOE, 1, K3_SHARE_SHARED, 1},
};

static void set_shape(K3TensorSpec *spec, int64_t a, int64_t b, int64_t c)
{
  spec->rank = c ? 3 : b ? 2 : 1;
  spec->shape[0] = a;
  spec->shape[1] = b ? b : 1;
  spec->shape[2] = c ? c : 1;
}

/* Shapes as in the table of model.md. share_size is set where one of what is dealt spans several elements. */
static void fill_shape(const K3Config *c, K3TensorSpec *spec)
{
  int64_t hidden = c->hidden_size, kda = c->num_heads * c->kda_head_dim, value = c->num_heads * c->v_head_dim;
  int64_t qk = k3_config_qk_head_dim(c), key_value = c->qk_nope_head_dim + c->v_head_dim;
  int64_t shared = k3_config_shared_size(c);
  spec->share_size = 1;
  switch (spec->role) {
  case K3_ROLE_EMBED:
  case K3_ROLE_LM_HEAD: set_shape(spec, c->vocab_size, hidden, 0); break;
  case K3_ROLE_Q_PROJ:
  case K3_ROLE_K_PROJ:
  case K3_ROLE_V_PROJ:
  case K3_ROLE_KDA_G_PROJ: set_shape(spec, kda, hidden, 0); spec->share_size = c->kda_head_dim; break;
  case K3_ROLE_Q_CONV:
  case K3_ROLE_K_CONV:
  case K3_ROLE_V_CONV: set_shape(spec, kda, c->kda_conv_kernel, 0); spec->share_size = c->kda_head_dim; break;
  case K3_ROLE_F_A_PROJ: set_shape(spec, c->kda_head_dim, hidden, 0); break;
  case K3_ROLE_F_B_PROJ: set_shape(spec, kda, c->kda_head_dim, 0); spec->share_size = c->kda_head_dim; break;
  case K3_ROLE_DT_BIAS: set_shape(spec, kda, 0, 0); spec->share_size = c->kda_head_dim; break;
  case K3_ROLE_B_PROJ: set_shape(spec, c->num_heads, hidden, 0); break;
  case K3_ROLE_A_LOG: set_shape(spec, c->num_heads, 0, 0); break;
  case K3_ROLE_O_NORM: set_shape(spec, c->kda_head_dim, 0, 0); break;
  case K3_ROLE_KDA_O_PROJ: set_shape(spec, hidden, kda, 0); spec->share_size = c->kda_head_dim; break;
  case K3_ROLE_Q_A_PROJ: set_shape(spec, c->q_lora_rank, hidden, 0); break;
  case K3_ROLE_Q_A_NORM: set_shape(spec, c->q_lora_rank, 0, 0); break;
  case K3_ROLE_Q_B_PROJ: set_shape(spec, c->num_heads * qk, c->q_lora_rank, 0); spec->share_size = qk; break;
  case K3_ROLE_KV_A_PROJ: set_shape(spec, k3_config_cache_width(c), hidden, 0); break;
  case K3_ROLE_KV_A_NORM: set_shape(spec, c->kv_lora_rank, 0, 0); break;
  case K3_ROLE_KV_B_PROJ: set_shape(spec, c->num_heads * key_value, c->kv_lora_rank, 0); spec->share_size = key_value; break;
  case K3_ROLE_MLA_G_PROJ: set_shape(spec, value, hidden, 0); spec->share_size = c->v_head_dim; break;
  case K3_ROLE_MLA_O_PROJ: set_shape(spec, hidden, value, 0); spec->share_size = c->v_head_dim; break;
  case K3_ROLE_GATE_PROJ:
  case K3_ROLE_UP_PROJ: set_shape(spec, c->dense_intermediate_size, hidden, 0); break;
  case K3_ROLE_DOWN_PROJ: set_shape(spec, hidden, c->dense_intermediate_size, 0); break;
  case K3_ROLE_ROUTER: set_shape(spec, c->num_experts, hidden, 0); break;
  case K3_ROLE_ROUTER_BIAS: set_shape(spec, c->num_experts, 0, 0); break;
  case K3_ROLE_ROUTED_DOWN_PROJ: set_shape(spec, c->latent_size, hidden, 0); break;
  case K3_ROLE_ROUTED_NORM: set_shape(spec, c->latent_size, 0, 0); break;
  case K3_ROLE_ROUTED_UP_PROJ: set_shape(spec, hidden, c->latent_size, 0); break;
  case K3_ROLE_EXPERTS_GATE:
  case K3_ROLE_EXPERTS_UP: set_shape(spec, c->num_experts, c->moe_intermediate_size, c->latent_size); break;
  case K3_ROLE_EXPERTS_DOWN: set_shape(spec, c->num_experts, c->latent_size, c->moe_intermediate_size); break;
  case K3_ROLE_SHARED_GATE_PROJ:
  case K3_ROLE_SHARED_UP_PROJ: set_shape(spec, shared, hidden, 0); break;
  case K3_ROLE_SHARED_DOWN_PROJ: set_shape(spec, hidden, shared, 0); break;
  default: set_shape(spec, hidden, 0, 0); break; /* the norms and score vectors of width H */
  }
}

static int layer_bears(const K3Config *config, int64_t layer, Place place)
{
  switch (place) {
  case IN_ROOT: return layer < 0;
  case IN_ALL: return layer >= 0;
  case IN_KDA: return layer >= 0 && config->layer_types[layer] == K3_LAYER_KDA;
  case IN_MLA: return layer >= 0 && config->layer_types[layer] == K3_LAYER_MLA;
  case IN_DENSE: return layer >= 0 && k3_config_is_dense(config, layer);
  case IN_MOE: return layer >= 0 && !k3_config_is_dense(config, layer);
  }
  return 0;
}

K3Status k3_tensors_build(const K3Config *config, K3TensorTable *table)
{
  size_t most = (size_t)(config->num_layers + 1) * K3_ROLE_COUNT;
  table->count = 0;
  table->specs = calloc(most, sizeof *table->specs);
  table->index = malloc((size_t)(config->num_layers + 1) * sizeof *table->index);
  if (!table->specs || !table->index) {
    k3_tensors_free(table);
    K3_FAIL(K3_ERR_INPUT, "no memory for the table of %zu tensors", most);
  }
  for (int64_t layer = -1; layer < config->num_layers; layer++)
    for (int role = 0; role < K3_ROLE_COUNT; role++) {
      const RoleEntry *entry = &roles[role];
      table->index[layer + 1][role] = -1;
      if (!layer_bears(config, layer, entry->place)) continue;
      K3TensorSpec *spec = &table->specs[table->count];
      spec->name = entry->name;
      spec->role = (K3Role)role;
      spec->layer = layer;
      spec->is_matrix = entry->is_matrix;
      spec->share = entry->share;
      spec->share_axis = entry->share_axis;
      if (layer < 0)
        snprintf(spec->path, sizeof spec->path, "/%s", entry->name);
      else
        snprintf(spec->path, sizeof spec->path, "/layers/%03d/%s", (int)layer, entry->name);
      fill_shape(config, spec);
      table->index[layer + 1][role] = table->count++;
    }
  return K3_OK;
}

void k3_tensors_free(K3TensorTable *table)
{
  free(table->specs);
  free(table->index);
  table->specs = NULL;
  table->index = NULL;
  table->count = 0;
}

int64_t k3_tensors_find(const K3TensorTable *table, int64_t layer, K3Role role)
{
  return table->index[layer + 1][role];
}

int64_t k3_tensors_find_path(const K3TensorTable *table, const char *path)
{
  for (int64_t i = 0; i < table->count; i++)
    if (strcmp(table->specs[i].path, path) == 0) return i;
  return -1;
}

int64_t k3_tensor_elements(const K3TensorSpec *spec)
{
  return spec->shape[0] * spec->shape[1] * spec->shape[2];
}
