/* Every tensor of a model: name, place, shape, and along which axis ranks share it. Layer: plan.
 * One table serves the reader, the writers, the planner, the synthesiser and the checks.
 * Source: model.md, "The model file"; design.md, "Who owns what". */
#ifndef K3_PLAN_TENSORS_H
#define K3_PLAN_TENSORS_H

#include "base/status.h"
#include "plan/config.h"

/* One role a name. Roles that two layer kinds share (g_proj, o_proj) are one. */
typedef enum {
  K3_ROLE_EMBED, K3_ROLE_FINAL_NORM, K3_ROLE_OUTPUT_RES_NORM, K3_ROLE_OUTPUT_RES_PROJ, K3_ROLE_LM_HEAD,
  K3_ROLE_INPUT_NORM, K3_ROLE_POST_ATTN_NORM, K3_ROLE_ATTN_RES_NORM, K3_ROLE_ATTN_RES_PROJ,
  K3_ROLE_MLP_RES_NORM, K3_ROLE_MLP_RES_PROJ,
  /* KDA */
  K3_ROLE_Q_PROJ, K3_ROLE_K_PROJ, K3_ROLE_V_PROJ, K3_ROLE_KDA_G_PROJ, K3_ROLE_Q_CONV, K3_ROLE_K_CONV,
  K3_ROLE_V_CONV, K3_ROLE_F_A_PROJ, K3_ROLE_F_B_PROJ, K3_ROLE_DT_BIAS, K3_ROLE_B_PROJ, K3_ROLE_A_LOG,
  K3_ROLE_O_NORM, K3_ROLE_KDA_O_PROJ,
  /* MLA */
  K3_ROLE_Q_A_PROJ, K3_ROLE_Q_A_NORM, K3_ROLE_Q_B_PROJ, K3_ROLE_KV_A_PROJ, K3_ROLE_KV_A_NORM,
  K3_ROLE_KV_B_PROJ, K3_ROLE_MLA_G_PROJ, K3_ROLE_MLA_O_PROJ,
  /* dense FFN */
  K3_ROLE_GATE_PROJ, K3_ROLE_UP_PROJ, K3_ROLE_DOWN_PROJ,
  /* MoE */
  K3_ROLE_ROUTER, K3_ROLE_ROUTER_BIAS, K3_ROLE_ROUTED_DOWN_PROJ, K3_ROLE_ROUTED_NORM,
  K3_ROLE_ROUTED_UP_PROJ, K3_ROLE_EXPERTS_GATE, K3_ROLE_EXPERTS_UP, K3_ROLE_EXPERTS_DOWN,
  K3_ROLE_SHARED_GATE_PROJ, K3_ROLE_SHARED_UP_PROJ, K3_ROLE_SHARED_DOWN_PROJ,
  K3_ROLE_COUNT
} K3Role;

/* What the ranks share out. Each is dealt in its own units (see plan/plan.h). */
typedef enum {
  K3_SHARE_NONE,           /* replicated */
  K3_SHARE_VOCAB,
  K3_SHARE_KDA_HEADS,
  K3_SHARE_MLA_HEADS,
  K3_SHARE_DENSE,          /* dense_intermediate_size */
  K3_SHARE_SHARED,         /* num_shared_experts * moe_intermediate_size */
  K3_SHARE_LATENT_ROWS,    /* rows of routed_down_proj */
  K3_SHARE_ROUTER_ROWS,    /* experts, as rows of the router */
  K3_SHARE_LATENT_COLUMNS, /* input columns of routed_up_proj */
  K3_SHARE_EXPERTS,        /* the expert grid: experts on axis 0, intermediate on K3TensorSpec.share_axis */
  K3_SHARE_COUNT
} K3Share;

typedef struct {
  char path[48];      /* "/layers/003/q_proj" */
  const char *name;   /* "q_proj" */
  K3Role role;
  int64_t layer;      /* -1: at the root */
  int rank;           /* axes: 1, 2 or 3 */
  int64_t shape[3];   /* logical; axes beyond `rank` are 1 */
  int is_matrix;      /* may be quantised along its last axis */
  K3Share share;
  int share_axis;     /* the axis that is dealt */
  int64_t share_size; /* elements of that axis for one of what is dealt (D rows a head) */
} K3TensorSpec;

typedef struct {
  int64_t count;
  K3TensorSpec *specs;
  int64_t (*index)[K3_ROLE_COUNT]; /* [1 + layer][role]: position in specs, -1 where absent */
} K3TensorTable;

/* Builds the table for a checked config. Errors: K3_ERR_INPUT (memory). Free with k3_tensors_free. */
K3Status k3_tensors_build(const K3Config *config, K3TensorTable *table);
void k3_tensors_free(K3TensorTable *table);

/* Index of a role in a layer (-1 = root); -1 when that layer has none. */
int64_t k3_tensors_find(const K3TensorTable *table, int64_t layer, K3Role role);

/* Index of the tensor with this path, -1 when there is none. */
int64_t k3_tensors_find_path(const K3TensorTable *table, const char *path);

/* Elements of the whole tensor. */
int64_t k3_tensor_elements(const K3TensorSpec *spec);

#endif
