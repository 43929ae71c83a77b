/* Kimi delta attention on the device: one token, the heads of one rank. Layer: backend (CUDA).
 * Source: model.md, "KDA". */
#ifndef K3_KERNELS_KDA_H
#define K3_KERNELS_KDA_H

#include "kernels/launch.h"
#include "kernels/weights.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { K3_KDA_MAX_DIM = 256, K3_KDA_MAX_KERNEL = 8 };

/* Convolution, norms, decay, state update, readout, output norm and gate in one launch.
 * in      q, k, v, gate [heads · D] f32  W_q x, W_k x, W_v x, W_g x
 * in      f_a     [D] f32                W_fa x
 * in      beta    [heads] f32            W_b x, before the sigmoid
 * in      f_b     [heads · D, D]         f32, bf16 or q8_0 (q8_0: D a multiple of 32); NULL codes: `decay` instead
 * in      decay   [heads · D] f32        W_fb W_fa x, when f_b.codes is NULL
 * in      *_conv  [heads · D, kernel] f32, the current token meets the last tap
 * in      dt_bias [heads · D], a_log [heads], o_norm [D] f32
 * in/out  window  [3 (q, k, v), kernel - 1, heads · D] f32, oldest first
 * in/out  state   [heads, D value, D key] f32: a value's keys contiguous (the host's [key, value] transposed)
 * out     out     values [heads · D]: rms(o) ⊙ sigmoid(gate); codes, scales: the same quantised, NULL: left out
 *                 (codes need D a multiple of 32)
 * window and state are read before k3_wait(): only this launch, a step earlier, may have written them.
 * Errors: K3_ERR_INPUT (shape), K3_ERR_DEVICE (launch). Twins: k3_host_kda_conv, k3_host_kda_heads. */
typedef struct {
  int64_t heads, head_dim, kernel;
  double gate_lower_bound, rms_norm_eps;
  const float *q, *k, *v, *gate, *f_a, *beta, *decay;
  K3CudaMatrix f_b;
  const float *q_conv, *k_conv, *v_conv;
  const float *dt_bias, *a_log, *o_norm;
  float *window;
  float *state;
  K3CudaVector out;
} K3CudaKda;

K3Status k3_cuda_kda(const K3CudaLaunch *launch, const K3CudaKda *arguments);

#ifdef __cplusplus
}
#endif
#endif
