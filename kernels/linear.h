/* Matrix-vector products that share one input: one launch, up to eight matrices. Layer: backend (CUDA). */
#ifndef K3_KERNELS_LINEAR_H
#define K3_KERNELS_LINEAR_H

#include "kernels/input.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { K3_LINEAR_ITEMS = 8 };

typedef struct {
  K3CudaMatrix matrix; /* [rows, cols], cols = input.n */
  float *y;            /* [rows] f32 */
  int add;             /* 0: y = W x; 1: y += W x */
} K3CudaLinearItem;

/* y_i = W_i x (+ y_i) for all items; formats may differ.
 * exact: 0: quantised weights meet 16-bit codes of x (dp4a), plain floats its float32 values; 1: float32 throughout.
 * blocks_per_sm, threads: tuning, 0 for the defaults. Two blocks an SM are the default from 10 MB on (measured).
 * Errors: K3_ERR_INPUT (shapes), K3_ERR_DEVICE (launch). Twin: k3_host_linear. */
typedef struct {
  K3CudaInput input;
  int count;
  K3CudaLinearItem items[K3_LINEAR_ITEMS];
  int exact;
  int blocks_per_sm, threads;
} K3CudaLinear;

K3Status k3_cuda_linear(const K3CudaLaunch *launch, const K3CudaLinear *linear);

/* One matrix of GGUF blocks (k3_cuda_is_blocks), in a launch of its own (linear_blocks.cu). */
K3Status k3_cuda_linear_blocks(const K3CudaLaunch *launch, const K3CudaInput *input, const K3CudaLinearItem *item, int exact);

/* Bytes of weights that the launch reads. */
int64_t k3_cuda_linear_bytes(const K3CudaLinear *linear);

#ifdef __cplusplus
}
#endif
#endif
