/* Matrices on the device, and the rows' common bounds, for the files of kernel_check. Host code, CUDA C++. */
#ifndef K3_TESTS_KERNEL_DEVICE_H
#define K3_TESTS_KERNEL_DEVICE_H

#include "tests/kernel_reference.h"
#include "tests/kernel_table.h"

/* Relative L2. The codes' own error: a step of 1/32512 of a block's largest value, which is about 2.1 deviations of 32 normal
 * values, has the deviation 2.1 / 32512 / sqrt(12) = 2e-5 of the vector. Float32 sums: 1e-7. */
static const double CODES_ALLOWED = 8e-5, FLOAT_ALLOWED = 3e-6;
#define Q8 K3_TYPE_Q8_0

extern uint32_t *d_codebook;      /* packed; made by main */
extern cudaStream_t check_stream; /* blocking: in order with the plain copies */

K3CudaMatrix device_matrix(const RefMatrix *m);                                  /* by way of repack */
K3CudaMatrix synth_matrix(K3Type type, int64_t rows, int64_t cols, K3SynthRule rule); /* made on the device */
K3SynthRule fresh_rule(K3Table *table, int64_t cols);
void free_matrix(const K3CudaMatrix *m);
void flip(const void *device, uint8_t mask); /* one byte on the device, for the controls */
K3CudaLaunch plain_launch(K3Table *table, K3CudaUse *use);
void ref_route(const float *logits, const float *bias, int experts, int chosen, int32_t *ids, double *weights);

/* One file each. */
void check_all_linear(K3Table *table);
void tune_linear(K3Table *table);
void check_all_experts(K3Table *table);
void check_all_formats(K3Table *table, const char *only); /* only: a format's name, or NULL */
void time_chain(K3Table *table, int tune);

#endif
