/* Both ends of a step: the embedding's row, and the greedy choice. Layer: backend (CUDA).
 * The head's logits themselves are k3_cuda_linear over the band of lm_head. */
#ifndef K3_KERNELS_HEAD_H
#define K3_KERNELS_HEAD_H

#include "kernels/weights.h"

#ifdef __cplusplus
extern "C" {
#endif

/* values [cols] = row (token - first_row) of `matrix`, f32; all zero when this rank does not hold it, so that a sum over
 * the ranks is the row. `token` is read on the device. Twin: k3_host_embed. */
typedef struct {
  K3CudaMatrix matrix;
  int64_t first_row;
  const int64_t *token;
  float *values;
} K3CudaEmbed;
K3Status k3_cuda_embed(const K3CudaLaunch *launch, const K3CudaEmbed *embed);

/* The largest logit and its vocabulary row; ties to the lower row.
 * out  value [1] f32;  row [1] int64 = first_row + index, or -1 when any logit is NaN (value NaN then)
 * scratch [256] uint64; d_count [1] uint32, zero before the first call (each call leaves it zero). Twin: k3_host_argmax. */
typedef struct {
  const float *logits;
  int64_t count, first_row;
  uint64_t *scratch;
  uint32_t *d_count;
  float *value;
  int64_t *row;
} K3CudaArgmax;
K3Status k3_cuda_argmax(const K3CudaLaunch *launch, const K3CudaArgmax *argmax);

#ifdef __cplusplus
}
#endif
#endif
