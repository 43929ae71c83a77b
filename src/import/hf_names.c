/* Names in released checkpoints. See hf_names.h. Layer: import. */
#include "import/hf_names.h"

#include <stdio.h>
#include <string.h>

/* What follows "model.layers.N." in a layer, or the prefix at the root. */
static const char *const names[K3_ROLE_COUNT][K3_HF_VARIANTS] = {
    [K3_ROLE_EMBED] = {"model.embed_tokens.weight"},
    [K3_ROLE_FINAL_NORM] = {"model.norm.weight"},
    [K3_ROLE_OUTPUT_RES_NORM] = {"model.output_attn_res_norm.weight", "model.output_attn_res.norm_weight"},
    [K3_ROLE_OUTPUT_RES_PROJ] = {"model.output_attn_res_proj.weight", "model.output_attn_res.proj_weight"},
    [K3_ROLE_LM_HEAD] = {"lm_head.weight"},
    [K3_ROLE_INPUT_NORM] = {"input_layernorm.weight"},
    [K3_ROLE_POST_ATTN_NORM] = {"post_attention_layernorm.weight"},
    [K3_ROLE_ATTN_RES_NORM] = {"self_attention_res_norm.weight", "self_attention_res.norm_weight"},
    [K3_ROLE_ATTN_RES_PROJ] = {"self_attention_res_proj.weight", "self_attention_res.proj_weight"},
    [K3_ROLE_MLP_RES_NORM] = {"mlp_res_norm.weight", "mlp_res.norm_weight"},
    [K3_ROLE_MLP_RES_PROJ] = {"mlp_res_proj.weight", "mlp_res.proj_weight"},
    [K3_ROLE_Q_PROJ] = {"self_attn.q_proj.weight"},
    [K3_ROLE_K_PROJ] = {"self_attn.k_proj.weight"},
    [K3_ROLE_V_PROJ] = {"self_attn.v_proj.weight"},
    [K3_ROLE_KDA_G_PROJ] = {"self_attn.g_proj.weight"},
    [K3_ROLE_Q_CONV] = {"self_attn.q_conv1d.weight"},
    [K3_ROLE_K_CONV] = {"self_attn.k_conv1d.weight"},
    [K3_ROLE_V_CONV] = {"self_attn.v_conv1d.weight"},
    [K3_ROLE_F_A_PROJ] = {"self_attn.f_a_proj.weight"},
    [K3_ROLE_F_B_PROJ] = {"self_attn.f_b_proj.weight"},
    [K3_ROLE_DT_BIAS] = {"self_attn.dt_bias"},
    [K3_ROLE_B_PROJ] = {"self_attn.b_proj.weight"},
    [K3_ROLE_A_LOG] = {"self_attn.A_log"},
    [K3_ROLE_O_NORM] = {"self_attn.o_norm.weight"},
    [K3_ROLE_KDA_O_PROJ] = {"self_attn.o_proj.weight"},
    [K3_ROLE_Q_A_PROJ] = {"self_attn.q_a_proj.weight"},
    [K3_ROLE_Q_A_NORM] = {"self_attn.q_a_layernorm.weight"},
    [K3_ROLE_Q_B_PROJ] = {"self_attn.q_b_proj.weight"},
    [K3_ROLE_KV_A_PROJ] = {"self_attn.kv_a_proj_with_mqa.weight"},
    [K3_ROLE_KV_A_NORM] = {"self_attn.kv_a_layernorm.weight"},
    [K3_ROLE_KV_B_PROJ] = {"self_attn.kv_b_proj.weight"},
    [K3_ROLE_MLA_G_PROJ] = {"self_attn.g_proj.weight"},
    [K3_ROLE_MLA_O_PROJ] = {"self_attn.o_proj.weight"},
    [K3_ROLE_GATE_PROJ] = {"mlp.gate_proj.weight"},
    [K3_ROLE_UP_PROJ] = {"mlp.up_proj.weight"},
    [K3_ROLE_DOWN_PROJ] = {"mlp.down_proj.weight"},
    [K3_ROLE_ROUTER] = {"block_sparse_moe.gate.weight"},
    [K3_ROLE_ROUTER_BIAS] = {"block_sparse_moe.gate.e_score_correction_bias",
                             "block_sparse_moe.e_score_correction_bias"},
    [K3_ROLE_ROUTED_DOWN_PROJ] = {"block_sparse_moe.routed_expert_down_proj.weight"},
    [K3_ROLE_ROUTED_NORM] = {"block_sparse_moe.routed_expert_norm.weight"},
    [K3_ROLE_ROUTED_UP_PROJ] = {"block_sparse_moe.routed_expert_up_proj.weight"},
    [K3_ROLE_SHARED_GATE_PROJ] = {"block_sparse_moe.shared_experts.gate_proj.weight"},
    [K3_ROLE_SHARED_UP_PROJ] = {"block_sparse_moe.shared_experts.up_proj.weight"},
    [K3_ROLE_SHARED_DOWN_PROJ] = {"block_sparse_moe.shared_experts.down_proj.weight"},
    /* what follows "block_sparse_moe.experts.E." */
    [K3_ROLE_EXPERTS_GATE] = {"w1"},
    [K3_ROLE_EXPERTS_DOWN] = {"w2"},
    [K3_ROLE_EXPERTS_UP] = {"w3"},
};

int k3_hf_is_expert(const K3TensorSpec *spec)
{
  return spec->role == K3_ROLE_EXPERTS_GATE || spec->role == K3_ROLE_EXPERTS_UP || spec->role == K3_ROLE_EXPERTS_DOWN;
}

int k3_hf_name(const K3TensorSpec *spec, int variant, const char *prefix, char name[K3_HF_NAME_SIZE])
{
  const char *stem = names[spec->role][variant];
  name[0] = '\0';
  if (!stem) return 0;
  if (spec->layer < 0) snprintf(name, K3_HF_NAME_SIZE, "%s%s", prefix, stem);
  else snprintf(name, K3_HF_NAME_SIZE, "%smodel.layers.%lld.%s", prefix, (long long)spec->layer, stem);
  return 1;
}

void k3_hf_expert_name(const K3TensorSpec *spec, int64_t expert, K3HfPart part, const char *prefix,
                       char name[K3_HF_NAME_SIZE])
{
  static const char *const parts[] = {
      [K3_HF_PLAIN] = "weight", [K3_HF_PACKED] = "weight_packed", [K3_HF_SCALE] = "weight_scale"};
  snprintf(name, K3_HF_NAME_SIZE, "%smodel.layers.%lld.block_sparse_moe.experts.%lld.%s.%s", prefix,
           (long long)spec->layer, (long long)expert, names[spec->role][0], parts[part]);
}

int k3_hf_is_vision(const char *name)
{
  static const char *const prefixes[] = {"vision_tower.", "vision_model.", "mm_projector.", "multi_modal_projector."};
  for (size_t i = 0; i < sizeof prefixes / sizeof prefixes[0]; i++)
    if (strncmp(name, prefixes[i], strlen(prefixes[i])) == 0) return 1;
  return 0;
}
