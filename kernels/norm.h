/* The attention residual, its norm and its quantisation in one kernel. Layer: backend (CUDA). */
#ifndef K3_KERNELS_NORM_H
#define K3_KERNELS_NORM_H

#include "kernels/weights.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { K3_NORM_BANK = 64 }; /* most banked vectors */

/* p' = branch (replace) or p + branch or p (branch NULL);  h = attn_res over bank[0 … banked) and p' (p' itself while
 * banked is 0);  x = norm ⊙ h / sqrt(mean(h²) + eps), in f32 and quantised.
 * in   bank [banked][n] f32, stride n;  p [n];  branch [n] or NULL
 *      score [n] = res_norm ⊙ res_proj (k3_cuda_norm_score makes it once; NULL when banked is 0);  norm [n]
 * out  p [n] = p';  append: bank[banked] = p' too (restart: the caller counts it from the next call on)
 *      x.values [n], x.codes, x.scales (codes NULL: no quantisation; n % 32 must be 0 otherwise)
 * early: 1 if bank and p were complete when the kernel just before this one let its successor start (launch.h): both are then
 *      read before the programmatic wait.
 * Plain RMS norm + quantise: banked = 0, branch NULL, p the vector (it is not written then).
 * n <= 32768, multiple of 4. Errors: K3_ERR_INPUT, K3_ERR_DEVICE. Twins: k3_host_attn_res, k3_host_rms. */
typedef struct {
  int64_t n;
  int banked;
  float *bank;
  float *p;
  const float *branch;
  int replace, append, early;
  const float *score;
  const float *norm;
  float res_eps, eps;
  K3CudaVector x;
} K3CudaNorm;
K3Status k3_cuda_norm(const K3CudaLaunch *launch, const K3CudaNorm *norm);

/* score[i] = a[i] * b[i], at load time. */
K3Status k3_cuda_norm_score(const K3CudaLaunch *launch, const float *a, const float *b, int64_t n, float *score);

#ifdef __cplusplus
}
#endif
#endif
