/* Names of tensors in GGUF models. See gguf_names.h. Layer: import. */
#include "import/gguf_names.h"

#include <stdio.h>

/* At the root, or what follows "blk.N.". */
static const char *const names[K3_ROLE_COUNT] = {
    [K3_ROLE_EMBED] = "token_embd.weight",
    [K3_ROLE_FINAL_NORM] = "output_norm.weight",
    [K3_ROLE_OUTPUT_RES_NORM] = "output_res_score.weight",
    [K3_ROLE_OUTPUT_RES_PROJ] = "output_res_score.weight",
    [K3_ROLE_LM_HEAD] = "output.weight",
    [K3_ROLE_INPUT_NORM] = "attn_norm.weight",
    [K3_ROLE_POST_ATTN_NORM] = "ffn_norm.weight",
    [K3_ROLE_ATTN_RES_NORM] = "attn_res_score.weight",
    [K3_ROLE_ATTN_RES_PROJ] = "attn_res_score.weight",
    [K3_ROLE_MLP_RES_NORM] = "ffn_res_score.weight",
    [K3_ROLE_MLP_RES_PROJ] = "ffn_res_score.weight",
    [K3_ROLE_Q_PROJ] = "attn_q.weight",
    [K3_ROLE_K_PROJ] = "attn_k.weight",
    [K3_ROLE_V_PROJ] = "attn_v.weight",
    [K3_ROLE_KDA_G_PROJ] = "ssm_g.weight",
    [K3_ROLE_Q_CONV] = "ssm_conv1d_q.weight",
    [K3_ROLE_K_CONV] = "ssm_conv1d_k.weight",
    [K3_ROLE_V_CONV] = "ssm_conv1d_v.weight",
    [K3_ROLE_F_A_PROJ] = "ssm_f_a.weight",
    [K3_ROLE_F_B_PROJ] = "ssm_f_b.weight",
    [K3_ROLE_DT_BIAS] = "ssm_dt.bias",
    [K3_ROLE_B_PROJ] = "ssm_beta.weight",
    [K3_ROLE_A_LOG] = "ssm_a",
    [K3_ROLE_O_NORM] = "ssm_norm.weight",
    [K3_ROLE_KDA_O_PROJ] = "attn_output.weight",
    [K3_ROLE_Q_A_PROJ] = "attn_q_a.weight",
    [K3_ROLE_Q_A_NORM] = "attn_q_a_norm.weight",
    [K3_ROLE_Q_B_PROJ] = "attn_q_b.weight",
    [K3_ROLE_KV_A_PROJ] = "attn_kv_a_mqa.weight",
    [K3_ROLE_KV_A_NORM] = "attn_kv_a_norm.weight",
    [K3_ROLE_KV_B_PROJ] = "attn_kv_b.weight",
    [K3_ROLE_MLA_G_PROJ] = "attn_gate.weight",
    [K3_ROLE_MLA_O_PROJ] = "attn_output.weight",
    [K3_ROLE_GATE_PROJ] = "ffn_gate.weight",
    [K3_ROLE_UP_PROJ] = "ffn_up.weight",
    [K3_ROLE_DOWN_PROJ] = "ffn_down.weight",
    [K3_ROLE_ROUTER] = "ffn_gate_inp.weight",
    [K3_ROLE_ROUTER_BIAS] = "exp_probs_b.bias",
    [K3_ROLE_ROUTED_DOWN_PROJ] = "ffn_routed_down.weight",
    [K3_ROLE_ROUTED_NORM] = "ffn_routed_norm.weight",
    [K3_ROLE_ROUTED_UP_PROJ] = "ffn_routed_up.weight",
    [K3_ROLE_EXPERTS_GATE] = "ffn_gate_exps.weight",
    [K3_ROLE_EXPERTS_UP] = "ffn_up_exps.weight",
    [K3_ROLE_EXPERTS_DOWN] = "ffn_down_exps.weight",
    [K3_ROLE_SHARED_GATE_PROJ] = "ffn_gate_shexp.weight",
    [K3_ROLE_SHARED_UP_PROJ] = "ffn_up_shexp.weight",
    [K3_ROLE_SHARED_DOWN_PROJ] = "ffn_down_shexp.weight",
};

K3GgufOrigin k3_gguf_origin(K3Role role)
{
  switch (role) {
  case K3_ROLE_OUTPUT_RES_NORM:
  case K3_ROLE_ATTN_RES_NORM:
  case K3_ROLE_MLP_RES_NORM: return K3_GGUF_ONES;
  case K3_ROLE_A_LOG: return K3_GGUF_A_LOG;
  case K3_ROLE_KV_B_PROJ: return K3_GGUF_KV_B;
  default: return K3_GGUF_SAME;
  }
}

void k3_gguf_name(const K3TensorSpec *spec, char name[K3_GGUF_NAME_SIZE])
{
  if (spec->layer < 0) snprintf(name, K3_GGUF_NAME_SIZE, "%s", names[spec->role]);
  else snprintf(name, K3_GGUF_NAME_SIZE, "blk.%lld.%s", (long long)spec->layer, names[spec->role]);
}

void k3_gguf_name_k_b(int64_t layer, char name[K3_GGUF_NAME_SIZE])
{
  snprintf(name, K3_GGUF_NAME_SIZE, "blk.%lld.attn_k_b.weight", (long long)layer);
}

void k3_gguf_name_v_b(int64_t layer, char name[K3_GGUF_NAME_SIZE])
{
  snprintf(name, K3_GGUF_NAME_SIZE, "blk.%lld.attn_v_b.weight", (long long)layer);
}
