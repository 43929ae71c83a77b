/* The attention residual, its norm and its quantisation. Layer: backend (CUDA). */
#ifndef K3_KERNELS_NORM_H
#define K3_KERNELS_NORM_H

#include "kernels/weights.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { K3_NORM_BANK = 64 /* most banked vectors */, K3_NORM_SUBLAYERS = 32 /* of a launch */, K3_NORM_MIX = 3 };

/* attn_res over bank[0 … banked) and a vector v still to come is (Σ_j exp(s_j) bank_j + exp(s) v) / (Σ_j exp(s_j) + exp(s)). The
 * sums over the bank are the same whatever v is, so they are made once for the sublayers that meet this bank:
 *   mix[k] = {m = max_j s_j, Σ_j exp(s_j - m), |mixed[k]|²},   mixed[k][n] = Σ_j exp(s_j - m) bank_j,
 *   s_j = Σ score_k ⊙ bank_j / sqrt(mean(bank_j²) + eps)
 * in   bank [banked][n] f32;  score[k] [n] = res_norm ⊙ res_proj of sublayer k (k3_cuda_norm_score makes it once), k < count
 * out  mixed [count][n], mix [count][K3_NORM_MIX]
 * banked 1 … K3_NORM_BANK, count 1 … K3_NORM_SUBLAYERS, n <= 32768 and a multiple of 4.
 * Errors: K3_ERR_INPUT, K3_ERR_DEVICE. Source: model.md, "Attention residual"; twin: k3_host_attn_res. */
typedef struct {
  int64_t n;
  int banked, count;
  const float *bank;
  const float *score[K3_NORM_SUBLAYERS];
  float eps;
  float *mixed, *mix;
} K3CudaBank;
K3Status k3_cuda_mix_bank(const K3CudaLaunch *launch, const K3CudaBank *bank);

/* p' = branch (replace) or p + branch or p (branch NULL);  h = attn_res over the bank and p' (p' itself when mixed is NULL);
 * x = norm ⊙ h / sqrt(mean(h²) + eps), in f32 and quantised.
 * in   mixed [n], mix [K3_NORM_MIX]: the bank's part, from k3_cuda_mix_bank; NULL: nothing is banked
 *      p [n];  branch [n] or NULL;  score [n] (NULL when mixed is);  norm [n]
 * out  p [n] = p';  banked [n] = p' too, NULL: left out
 *      x.values [n], x.codes, x.scales (values or codes NULL: left out; with codes n % 32 must be 0)
 * early: 1 if mixed, mix and p were complete when the kernel just before this one let its successor start (launch.h): they are then
 *      read before the programmatic wait.
 * n <= 32768, multiple of 4. Errors: K3_ERR_INPUT, K3_ERR_DEVICE. Twins: k3_host_attn_res, k3_host_rms. */
typedef struct {
  int64_t n;
  const float *mixed, *mix;
  float *p, *banked;
  const float *branch;
  int replace, early;
  const float *score;
  const float *norm;
  float res_eps, eps;
  K3CudaVector x;
} K3CudaNorm;
K3Status k3_cuda_norm(const K3CudaLaunch *launch, const K3CudaNorm *norm);
/* The same by another kernel that calls norm_vector (norm.cuh): its `arguments`, checked and launched as norm wants. */
K3Status k3_cuda_norm_launch(const K3CudaLaunch *launch, const char *kernel, const void *function,
                             const K3CudaNorm *norm, void **arguments);

/* score[i] = a[i] * b[i], at load time. */
K3Status k3_cuda_norm_score(const K3CudaLaunch *launch, const float *a, const float *b, int64_t n, float *score);

#ifdef __cplusplus
}
#endif
#endif
