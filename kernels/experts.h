/* Routed experts of one rank, and the shared experts' down beside them. Layer: backend (CUDA).
 * The list of chosen experts is made on the device; ids outside this rank's group are passed over, and the work of those
 * that remain is spread evenly over all blocks. */
#ifndef K3_KERNELS_EXPERTS_H
#define K3_KERNELS_EXPERTS_H

#include "kernels/linear.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { K3_ROUTER_EXPERTS = 1024, K3_ROUTER_CHOSEN = 32 };

/* s = sigmoid(logits); the `chosen` largest of s + bias, ties to the lower index, in falling order;
 * weight = s / (sum of the chosen s + 1e-20) * scaling (without renormalize the divisor is 1).
 * in   logits [experts] f32: W_router x, of all ranks;  bias [experts] f32
 * A NaN among s + bias makes all weights NaN, so that the step fails instead of going without that expert.
 * experts <= 1024, chosen <= 32. Twin: k3_host_route. */
typedef struct {
  int experts, chosen;
  const float *logits, *bias;
  float scaling;
  int renormalize;
} K3CudaRouting;

/* The routing, then hidden[s] = situ(Gate_e y, Up_e y) for the s-th chosen expert e of this rank's group; z = sum over them of
 * w_e Down_e hidden[s], zero when none is local; and (shared.y != NULL) shared.y (+)= shared.matrix x, where x comes from
 * shared_input (SITU).
 * in   y: input of latent L (VALUES); gate, up: [local * band, L]; down: [local * L, band]; expert-major
 * out  ids, weights [chosen]; hidden [chosen][band] f32, as many rows as there are local experts; z [L] f32
 * Blocks wait for the hidden values of others, so each must find room at the same time: one an SM. `meeting`, one a stream:
 * k3_cuda_meeting_bytes(chosen, band, L) bytes, aligned to 16, all of their bits 1 before the first launch; all launches that share it are
 * of one `chosen`, `band` and L.
 * Errors: K3_ERR_INPUT, K3_ERR_DEVICE. Twins: k3_host_experts_gate_up, k3_host_experts_down. */
typedef struct {
  K3CudaInput y;
  K3CudaMatrix gate, up, down;
  int64_t first, local, band;   /* experts [first, first + local) are here; intermediate rows of this rank */
  K3CudaRouting routing;
  int32_t *ids;
  float *weights;
  float *hidden, *z;
  uint32_t *meeting;
  K3CudaLinearItem shared;
  K3CudaInput shared_input;
  float situ_beta, situ_linear_beta;
  int exact;
} K3CudaExperts;
K3Status k3_cuda_experts(const K3CudaLaunch *launch, const K3CudaExperts *experts);
/* Twice: the hidden vectors and, where they are wide enough to cut the rows of down among groups of blocks, the sums of each. */
enum { K3_EXPERTS_GROUPS = 16, K3_EXPERTS_WHOLE = 16384 };
static inline int64_t k3_cuda_meeting_bytes(int64_t chosen, int64_t band, int64_t latent)
{
  int64_t sums = chosen * band > K3_EXPERTS_WHOLE ? K3_EXPERTS_GROUPS * latent : 0;
  return 16 + 2 * (chosen * band + sums) * (int64_t)sizeof(float);
}

/* Whether gate and up may have these formats: one, or two kinds of GGUF blocks. */
static inline int k3_cuda_experts_pair(K3Type gate, K3Type up)
{
  return gate == up || (k3_cuda_is_blocks(gate) && k3_cuda_is_blocks(up));
}

/* Its halves for matrices of GGUF blocks (k3_cuda_is_blocks), which it calls: experts_blocks.cu. The first routes; shared is
 * left out. */
K3Status k3_cuda_experts_gate_up_blocks(const K3CudaLaunch *launch, const K3CudaExperts *experts);
K3Status k3_cuda_experts_down_blocks(const K3CudaLaunch *launch, const K3CudaExperts *experts);

#ifdef __cplusplus
}
#endif
#endif
