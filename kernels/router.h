/* Choosing the experts. Layer: backend (CUDA). */
#ifndef K3_KERNELS_ROUTER_H
#define K3_KERNELS_ROUTER_H

#include "kernels/input.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { K3_ROUTER_EXPERTS = 1024, K3_ROUTER_CHOSEN = 32 };

/* s = sigmoid(logits); the `chosen` largest of s + bias, ties to the lower index, in falling order;
 * weight = s / (sum of the chosen s + 1e-20) * scaling (without renormalize the divisor is 1).
 * in   logits [experts] f32: W_router x, of all ranks;  bias [experts] f32
 * out  ids [chosen] int32, weights [chosen] f32
 * A NaN among s + bias makes all weights NaN, so that the step fails instead of going without that expert. experts <= 1024, chosen <= 32. Twin: k3_host_route. */
typedef struct {
  int experts, chosen;
  const float *logits, *bias;
  float scaling;
  int renormalize;
} K3CudaRouting;

/* The routing in one kernel of its own; with latent.n > 0 further blocks quantise the latent vector y beside it
 * (input kind VALUES; to `quantised`). */
typedef struct {
  K3CudaRouting routing;
  int32_t *ids;
  float *weights;
  K3CudaInput latent;
  K3CudaVector quantised;
} K3CudaRouter;
K3Status k3_cuda_router(const K3CudaLaunch *launch, const K3CudaRouter *router);

/* Errors: K3_ERR_INPUT naming the limit. */
K3Status k3_cuda_routing_check(const K3CudaLaunch *launch, const K3CudaRouting *routing);

#ifdef __cplusplus
}
#endif
#endif
