/* What a step is put together from: step_parts.cu, step_attention.cu, step_ffn.cu; step.cu puts it together.
 * Layer: backend (CUDA), internal. All functions enqueue work on the rank's stream. */
#ifndef K3_KERNELS_STEP_H
#define K3_KERNELS_STEP_H

#include "kernels/backend.h"

/* --- collectives: nothing in a world of one, nor in a slice ----------------------------------------------- */

/* Sum over the ranks, in place. */
K3Status k3_step_reduce(K3Cuda *cuda, float *data, int64_t count);
/* See K3CudaComm.all_gather. */
K3Status k3_step_gather(K3Cuda *cuda, int buffers, const void *const *own, void *const *data, const K3Pieces *pieces,
                        int64_t size);
/* Rank r's piece is `width` numbers for each element it owns of `share`. `slot` (0 … 3) picks arrays of cuda->piece. */
K3Pieces k3_step_share_pieces(K3Cuda *cuda, int slot, K3Share share, int64_t width);
/* `each` elements from each rank, rank by rank. */
K3Pieces k3_step_equal_pieces(K3Cuda *cuda, int slot, int64_t each);

/* --- inputs of products -------------------------------------------------------------------------------------- */

K3CudaInput k3_step_values(const float *values, int64_t n);
/* A vector that its maker quantised, where it did. */
K3CudaInput k3_step_vector(K3CudaVector vector, int64_t n);
/* situ(gate, up). */
K3CudaInput k3_step_situ(const K3Cuda *cuda, const float *gate, const float *up, int64_t n);
/* Columns [offset, offset + n) of norm ⊙ values / rms(values), values [full]. */
K3CudaInput k3_step_rms(const float *values, const float *norm, double eps, int64_t full, int64_t offset, int64_t n);

/* --- products -------------------------------------------------------------------------------------------------- */

/* The group's products of `input`, outputs from y on. */
K3Status k3_step_multiply_group(K3Cuda *cuda, const K3CudaGroup *group, K3CudaInput input, float *y);
/* y = W x, or y += W x. A rank without columns contributes nothing. */
K3Status k3_step_multiply(K3Cuda *cuda, int64_t layer, K3Role role, K3CudaInput input, float *y, int add);

/* --- sublayers: x is the normed input; this rank's partial sum is left in cuda->branch ------------------------------ */

K3Status k3_step_attend_kda(K3Cuda *cuda, int64_t layer, K3CudaVector x);
K3Status k3_step_attend_mla(K3Cuda *cuda, int64_t layer, K3CudaVector x);
K3Status k3_step_feed_dense(K3Cuda *cuda, int64_t layer, K3CudaVector x);
K3Status k3_step_feed_moe(K3Cuda *cuda, int64_t layer, K3CudaVector x);

/* Behind the first product of layer i's attention: where its norm has added to the bank, the bank's part for the sublayers that
 * follow. */
K3Status k3_step_mix_bank(K3Cuda *cuda, int64_t i);

#endif
