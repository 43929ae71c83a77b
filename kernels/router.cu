/* The router's top-k, and the latent vector quantised beside it. See router.h. Layer: backend (CUDA).
 *
 * Grid: block 0 routes, the others (one for each 2,048 latent values) quantise; 512 threads. Reads experts * 8 + latent * 4
 * bytes. Bound: latency (three barriers and a count over some 30 candidates). Twin: k3_host_route. */
#include "kernels/router.h"

#include "kernels/gemv.cuh"
#include "kernels/route.cuh"
#include "kernels/wait.cuh"

namespace {

using namespace k3;

enum { THREADS = 512 };

__global__ void __launch_bounds__(THREADS) router_kernel(const __grid_constant__ K3CudaRouter a)
{
  __shared__ RouteShared shared;
  float bias[2];
  if (blockIdx.x == 0) fetch_bias(a.routing, bias);
  k3_wait();
  if (blockIdx.x == 0) {
    route_ids(a.routing, bias, shared);
    if (threadIdx.x >= 32) return;
    float weight = route_weight(a.routing, shared);
    if (threadIdx.x < a.routing.chosen) {
      a.ids[threadIdx.x] = shared.ids[threadIdx.x];
      a.weights[threadIdx.x] = weight;
    }
    return;
  }
  int n = (int)a.latent.n, i = (int)((blockIdx.x - 1) * THREADS + threadIdx.x) * 4;
  if (i - (int)(threadIdx.x & 31) * 4 >= n) return; /* whole warps */
  float v[4], scale, unused;
  fetch4(a.latent.vector.values, i, n, v);
  Codes4 codes = quantise4(v, false, &scale, &unused);
  if (i < n) {
    *(uint32_t *)(a.quantised.codes + i) = codes.high;
    *(uint32_t *)(a.quantised.codes + n + i) = codes.low;
    if ((threadIdx.x & 7) == 0) a.quantised.scales[i / 32] = scale;
  }
}

} /* namespace */

K3Status k3_cuda_routing_check(const K3CudaLaunch *launch, const K3CudaRouting *routing)
{
  if (routing->experts < 1 || routing->experts > K3_ROUTER_EXPERTS || routing->chosen < 1 ||
      routing->chosen > K3_ROUTER_CHOSEN || routing->chosen > routing->experts)
    K3_FAIL(K3_ERR_INPUT, "router of layer %lld: %d of %d experts; this build does at most %d of %d",
            (long long)launch->layer, routing->chosen, routing->experts, K3_ROUTER_CHOSEN, K3_ROUTER_EXPERTS);
  return K3_OK;
}

K3Status k3_cuda_router(const K3CudaLaunch *launch, const K3CudaRouter *router)
{
  K3_TRY(k3_cuda_routing_check(launch, &router->routing));
  K3CudaRouter a = *router;
  if (a.latent.n % 32)
    K3_FAIL(K3_ERR_INPUT, "router of layer %lld: a latent vector of %lld is no whole number of 32s",
            (long long)launch->layer, (long long)a.latent.n);
  void *arguments[] = {&a};
  unsigned blocks = 1 + (unsigned)((a.latent.n + THREADS * 4 - 1) / (THREADS * 4));
  return k3_cuda_launch_kernel(launch, "router_kernel", (const void *)router_kernel, blocks, THREADS, 1, 0, arguments);
}
