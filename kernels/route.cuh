/* Top-k of the router by one block: used by router.cu and at the head of the experts' kernel. Layer: backend (CUDA).
 *
 * The chosen-th largest of the warps' maxima bounds the result from below, so that few candidates remain; each is ranked
 * by counting. Keys are unique (value, then index), so every block finds the same list. */
#ifndef K3_KERNELS_ROUTE_CUH
#define K3_KERNELS_ROUTE_CUH

#include "kernels/router.h"

namespace k3 {

struct RouteShared {
  uint64_t candidate[K3_ROUTER_EXPERTS];
  float score[K3_ROUTER_EXPERTS];
  uint32_t key[K3_ROUTER_EXPERTS];
  uint32_t group_max[32];
  int count;
  uint32_t bound;
  int32_t ids[K3_ROUTER_CHOSEN];
  float weights[K3_ROUTER_CHOSEN];
};

/* Order-preserving bits of a float; NaN becomes the smallest. */
static __device__ __forceinline__ uint32_t ordered(float v)
{
  uint32_t b = __float_as_uint(v);
  if (v != v) return 0;
  return b & 0x80000000u ? ~b : b | 0x80000000u;
}

/* All threads of a block of at least 32; ends with a barrier, ids and weights in s. Groups of 32 experts: at most 32. */
static __device__ inline void route(const K3CudaRouting &r, RouteShared &s)
{
  int lane = threadIdx.x & 31, groups = (r.experts + 31) / 32;
  if (threadIdx.x == 0) s.count = 0, s.bound = 0;
  for (int first = threadIdx.x; first < groups * 32; first += 2 * blockDim.x) { /* two at a time: one L2 access */
    float logit[2], bias[2];
#pragma unroll
    for (int k = 0; k < 2; k++) {
      int e = first + k * blockDim.x;
      logit[k] = e < r.experts ? __ldcg(r.logits + e) : 0.0f;
      bias[k] = e < r.experts ? __ldg(r.bias + e) : 0.0f;
    }
#pragma unroll
    for (int k = 0; k < 2; k++) {
      int e = first + k * blockDim.x;
      if (e >= groups * 32) break; /* whole warps */
      uint32_t key = 0;
      if (e < r.experts) {
        float score = 1.0f / (1.0f + expf(-logit[k]));
        key = ordered(score + bias[k]);
        s.score[e] = score;
        s.key[e] = key;
      }
      uint32_t most = __reduce_max_sync(0xffffffffu, key);
      if (lane == 0) s.group_max[e >> 5] = most;
    }
  }
  __syncthreads();
  if (threadIdx.x < 32 && groups >= r.chosen) { /* the chosen-th largest group maximum */
    uint32_t mine = lane < groups ? s.group_max[lane] : 0;
    int rank = 0;
    for (int g = 0; g < groups; g++) {
      uint32_t other = s.group_max[g];
      rank += other > mine || (other == mine && g < lane);
    }
    if (lane < groups && rank == r.chosen - 1) s.bound = mine;
  }
  __syncthreads();
  uint32_t bound = s.bound;
  for (int e = threadIdx.x; e < r.experts; e += blockDim.x) {
    uint32_t key = s.key[e];
    if (key >= bound) s.candidate[atomicAdd(&s.count, 1)] = (uint64_t)key << 32 | (uint32_t)~e;
  }
  __syncthreads();
  int count = s.count;
  for (int c = threadIdx.x; c < count; c += blockDim.x) {
    uint64_t mine = s.candidate[c];
    int rank = 0;
    for (int k = 0; k < count; k++) rank += s.candidate[k] > mine;
    if (rank < r.chosen) s.ids[rank] = (int32_t)~(uint32_t)mine;
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    float score = lane < r.chosen ? s.score[s.ids[lane]] : 0.0f, sum = score;
#pragma unroll
    for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, o);
    if (lane < r.chosen) s.weights[lane] = score / (r.renormalize ? sum + 1e-20f : 1.0f) * r.scaling;
  }
  __syncthreads();
}

} /* namespace k3 */
#endif
