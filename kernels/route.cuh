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
  int group_bad[32]; /* some score is NaN */
  int count;
  uint32_t bound;
  int32_t ids[K3_ROUTER_CHOSEN];
};

/* Order-preserving bits of a float; NaN becomes 0, which no other value has. */
static __device__ __forceinline__ uint32_t ordered(float v)
{
  uint32_t b = __float_as_uint(v);
  if (v != v) return 0;
  return b & 0x80000000u ? ~b : b | 0x80000000u;
}

/* This thread's first two biases: weights, so they may be fetched before the wait. */
static __device__ __forceinline__ void fetch_bias(const K3CudaRouting &r, float bias[2])
{
#pragma unroll
  for (int k = 0; k < 2; k++) {
    int e = threadIdx.x + k * blockDim.x;
    bias[k] = e < r.experts ? __ldg(r.bias + e) : 0.0f;
  }
}

/* The ids of the chosen, in s; all threads of a block of whole warps. Ends with a barrier. Groups of 32 experts: at most 32.
 * bias: from fetch_bias. */
static __device__ inline void route_ids(const K3CudaRouting &r, float bias[2], RouteShared &s)
{
  int lane = threadIdx.x & 31, groups = (r.experts + 31) / 32;
  for (int first = threadIdx.x; first < groups * 32; first += 2 * blockDim.x) { /* two at a time: one L2 access */
    float logit[2];
#pragma unroll
    for (int k = 0; k < 2; k++) {
      int e = first + k * blockDim.x;
      logit[k] = e < r.experts ? __ldcg(r.logits + e) : 0.0f;
      if (first != (int)threadIdx.x) bias[k] = e < r.experts ? __ldg(r.bias + e) : 0.0f;
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
      int bad = __ballot_sync(0xffffffffu, key == 0 && e < r.experts) != 0;
      if (lane == 0) s.group_max[e >> 5] = most, s.group_bad[e >> 5] = bad;
    }
  }
  if (threadIdx.x == 0) s.count = 0, s.bound = 0;
  __syncthreads();
  if (threadIdx.x < 32 && groups >= r.chosen) { /* the chosen-th largest group maximum */
    uint32_t mine = lane < groups ? s.group_max[lane] : 0;
    int rank = 0;
#pragma unroll
    for (int g = 0; g < 32; g++) {
      uint32_t other = __shfl_sync(0xffffffffu, mine, g);
      rank += g < groups && (other > mine || (other == mine && g < lane));
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
  for (int c = threadIdx.x >> 5; c < count; c += blockDim.x >> 5) { /* a warp a candidate */
    uint64_t mine = s.candidate[c];
    int rank = 0;
    for (int k = 0; k < count; k += 32)
      rank += __popc(__ballot_sync(0xffffffffu, k + lane < count && s.candidate[k + lane] > mine));
    if (lane == 0 && rank < r.chosen) s.ids[rank] = (int32_t)~(uint32_t)mine;
  }
  __syncthreads();
}

/* The weights of s.ids, a lane each; one whole warp. */
static __device__ __forceinline__ float route_weight(const K3CudaRouting &r, const RouteShared &s)
{
  int lane = threadIdx.x & 31;
  float score = lane < r.chosen ? s.score[s.ids[lane]] : 0.0f, sum = score;
#pragma unroll
  for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, o);
  bool bad = __ballot_sync(0xffffffffu, lane < (r.experts + 31) / 32 && s.group_bad[lane]) != 0;
  return bad ? NAN : score / (r.renormalize ? sum + 1e-20f : 1.0f) * r.scaling;
}

} /* namespace k3 */
#endif
