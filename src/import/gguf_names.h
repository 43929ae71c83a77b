/* Names of tensors in GGUF models of architecture kimi-k3. Layer: import.
 * Source: the tensor table of the gguf package for this architecture (MODEL_ARCH.KIMI_K3). */
#ifndef K3_IMPORT_GGUF_NAMES_H
#define K3_IMPORT_GGUF_NAMES_H

#include "import/gguf.h"
#include "plan/tensors.h"

/* How a tensor of ours comes from theirs. */
typedef enum {
  K3_GGUF_SAME,  /* the same numbers */
  K3_GGUF_ONES,  /* residual norms: theirs is norm * projection, kept as projection, so the norm is ones */
  K3_GGUF_A_LOG, /* theirs is -exp(A_log) */
  K3_GGUF_KV_B   /* one matrix, or the K part (transposed within a head) and the V part apart */
} K3GgufOrigin;

K3GgufOrigin k3_gguf_origin(K3Role role);

/* The name for `spec`; that of the joined matrix for K3_GGUF_KV_B. */
void k3_gguf_name(const K3TensorSpec *spec, char name[K3_GGUF_NAME_SIZE]);

/* Names of the two parts of kv_b_proj in `layer`. */
void k3_gguf_name_k_b(int64_t layer, char name[K3_GGUF_NAME_SIZE]);
void k3_gguf_name_v_b(int64_t layer, char name[K3_GGUF_NAME_SIZE]);

#endif
