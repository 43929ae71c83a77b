/* Names of the phases of a step, of the arms of attention, of cache types. See backend.h. Layer: backend (interface). */
#include "decode/backend.h"

const char *const k3_phase_names[K3_PHASE_COUNT] = {
  [K3_PHASE_EMBED] = "embed",         [K3_PHASE_ATTN_KDA] = "attn_kda", [K3_PHASE_ATTN_MLA] = "attn_mla",
  [K3_PHASE_FFN_DENSE] = "ffn_dense", [K3_PHASE_FFN_MOE] = "ffn_moe",   [K3_PHASE_COMM] = "comm",
  [K3_PHASE_HEAD] = "head",
};

const char *const k3_attention_arm_names[K3_ATTENTION_COUNT] = {
  [K3_ATTENTION_SPLIT] = "split", [K3_ATTENTION_UNSPLIT] = "unsplit",
  [K3_ATTENTION_CORE] = "core",   [K3_ATTENTION_TENSOR] = "tensor",
};

const char *const k3_cache_type_names[K3_CACHE_TYPE_F16 + 1] = {
  [K3_CACHE_TYPE_DEFAULT] = "",
  [K3_CACHE_TYPE_F32] = "f32",
  [K3_CACHE_TYPE_BF16] = "bf16",
  [K3_CACHE_TYPE_F16] = "f16",
};
