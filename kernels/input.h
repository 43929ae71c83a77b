/* The input vector of a matrix product, and what is done to it on the way into shared memory. Layer: backend (CUDA).
 * Every block of a product prepares the whole vector itself, which costs less than a launch of its own. */
#ifndef K3_KERNELS_INPUT_H
#define K3_KERNELS_INPUT_H

#include "kernels/weights.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
  K3_INPUT_QUANTISED = 0, /* codes and scales are there (k3_cuda_norm made them); values too, for float weights */
  K3_INPUT_VALUES,        /* values [n], quantised here */
  K3_INPUT_SITU,          /* situ(values[i], up[i]), quantised here */
  K3_INPUT_RMS            /* element offset + i of norm * values / sqrt(mean(values^2) + eps), values [full] */
} K3CudaInputKind;

typedef struct {
  K3CudaInputKind kind;
  int64_t n;
  K3CudaVector vector;
  const float *up;               /* SITU */
  float situ_beta, situ_linear_beta;
  const float *norm;             /* RMS: [full] */
  int64_t full, offset;          /* RMS */
  float eps;                     /* RMS */
} K3CudaInput;

#ifdef __cplusplus
}
#endif
#endif
