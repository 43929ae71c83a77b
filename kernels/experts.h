/* Routed experts of one rank: gate and up, then down. Layer: backend (CUDA).
 * The list of chosen experts is made and read on the device; ids outside this rank's group are passed over, and the work
 * of those that remain is spread evenly over all blocks. */
#ifndef K3_KERNELS_EXPERTS_H
#define K3_KERNELS_EXPERTS_H

#include "kernels/linear.h"
#include "kernels/router.h"

#ifdef __cplusplus
extern "C" {
#endif

/* hidden[s][r] = situ(Gate_e y, Up_e y)[r] for the s-th chosen expert e of this rank's group.
 * in   y: input of latent L (QUANTISED, VALUES, …); gate, up: [local * band, L], expert-major
 * in   route: 1: the routing is done here by every block (no kernel before), and ids, weights are written;
 *      0: ids, weights are read
 * out  hidden [chosen][band] f32, as many rows as there are local experts
 * Errors: K3_ERR_INPUT, K3_ERR_DEVICE. Twin: k3_host_experts_gate_up. */
typedef struct {
  K3CudaInput y;
  K3CudaMatrix gate, up;
  int64_t first, local, band;   /* experts [first, first + local) are here; intermediate rows of this rank */
  int route;
  K3CudaRouting routing;        /* chosen is read in both cases */
  int32_t *ids;
  float *weights;
  float *hidden;
  float situ_beta, situ_linear_beta;
  int exact;
  int threads;                  /* a block; 0: default (tuning) */
} K3CudaExpertsGateUp;
K3Status k3_cuda_experts_gate_up(const K3CudaLaunch *launch, const K3CudaExpertsGateUp *experts);

/* z = sum over local chosen e of w_e Down_e hidden_e: [L] f32, zero when none is local; and, in the same launch, the shared
 * experts' down (shared.y != NULL): shared.y (+)= shared.matrix x, where x comes from shared_input (SITU of the
 * gate and up outputs, as a rule).
 * in   hidden [chosen][band]; down: [local * L, band], expert-major; ids, weights as gate_up left them
 * Errors: K3_ERR_INPUT, K3_ERR_DEVICE. Twin: k3_host_experts_down. */
typedef struct {
  const float *hidden;
  K3CudaMatrix down;
  int64_t first, local, band, latent;
  int chosen;
  const int32_t *ids;
  const float *weights;
  float *z;
  K3CudaLinearItem shared;
  K3CudaInput shared_input;
  int exact;
  int threads;                  /* a block; 0: default (tuning) */
} K3CudaExpertsDown;
K3Status k3_cuda_experts_down(const K3CudaLaunch *launch, const K3CudaExpertsDown *experts);

/* The same of matrices of GGUF blocks (k3_cuda_is_blocks), which the two above pass on: experts_blocks.cu. shared is left out. */
K3Status k3_cuda_experts_gate_up_blocks(const K3CudaLaunch *launch, const K3CudaExpertsGateUp *experts);
K3Status k3_cuda_experts_down_blocks(const K3CudaLaunch *launch, const K3CudaExpertsDown *experts);

#ifdef __cplusplus
}
#endif
#endif
