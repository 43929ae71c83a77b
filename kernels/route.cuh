/* Top-k of the router by one block, at the head of the experts' kernel. Layer: backend (CUDA), device code.
 *
 * The chosen-th largest of the groups' maxima bounds the result from below, so that few candidates remain; each is ranked
 * by counting. A group is every 32nd expert, as neighbours may well be chosen together. Keys are unique (value, then index), so
 * every block finds the same list. Twin: k3_host_route. */
#ifndef K3_KERNELS_ROUTE_CUH
#define K3_KERNELS_ROUTE_CUH

#include "kernels/experts.h"
#include "kernels/hopper.cuh"

namespace k3 {

/* The first threads of a block route; keys a thread; how often route_ids lets them meet. */
enum { ROUTE_MEETINGS = 2, ROUTE_THREADS = 256, ROUTE_WARPS = ROUTE_THREADS / 32, ROUTE_KEYS = K3_ROUTER_EXPERTS / ROUTE_THREADS };

struct RouteShared {
  uint64_t candidate[K3_ROUTER_EXPERTS];
  float score[K3_ROUTER_EXPERTS];
  uint32_t part_max[ROUTE_WARPS][32];              /* of a thread's experts */
  alignas(16) uint32_t group_max[ROUTE_WARPS][32]; /* of every 32nd expert, for each warp anew; NAN_GROUP: some score is NaN */
  int count;
  int32_t ids[K3_ROUTER_CHOSEN];   /* of the chosen, in falling order */
  int32_t local[K3_ROUTER_CHOSEN]; /* those of this rank, counted from its first expert */
  int local_count;
};

static constexpr uint32_t NAN_GROUP = 0xffffffffu;

/* Order-preserving bits of a float; NaN becomes 0, which no other value has. */
static __device__ __forceinline__ uint32_t ordered(float v)
{
  uint32_t b = __float_as_uint(v);
  if (v != v) return 0;
  return b & 0x80000000u ? ~b : b | 0x80000000u;
}

static __device__ __forceinline__ float route_score(float logit) { return __fdividef(1.0f, 1.0f + expf(-logit)); }

/* This thread's numbers of a vector of one for each expert, past its end the last. All loads go out here: an ordinary load the compiler
 * puts behind the arithmetic of the one before, and each is a miss. */
static __device__ __forceinline__ void fetch_keys(const float *from, int experts, float v[ROUTE_KEYS])
{
#pragma unroll
  for (int k = 0; k < ROUTE_KEYS; k++)
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v[k]) : "l"(from + min((int)threadIdx.x + k * ROUTE_THREADS, experts - 1)) : "memory");
}

/* ids, local and local_count in s, from fetch_keys of the bias and the logits; the first ROUTE_THREADS threads. A block barrier
 * must follow. */
static __device__ inline void route_ids(const K3CudaRouting &r, int64_t first, int64_t local,
                                        const float bias[ROUTE_KEYS], const float logit[ROUTE_KEYS], RouteShared &s)
{
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  uint32_t key[ROUTE_KEYS], most = 0;
#pragma unroll
  for (int k = 0; k < ROUTE_KEYS; k++) {
    const bool there = threadIdx.x + k * ROUTE_THREADS < r.experts;
    const float score = route_score(logit[k]);
    if (there) s.score[threadIdx.x + k * ROUTE_THREADS] = score;
    key[k] = ordered(score + bias[k]);
    most = max(most, key[k] == 0 ? NAN_GROUP : there ? key[k] : 0); /* past the end: a NaN again, or nothing */
    if (!there) key[k] = 0;
  }
  s.part_max[warp][lane] = most;
  if (threadIdx.x == 0) s.count = 0, s.local_count = 0;
  group_sync(1, ROUTE_THREADS);

  /* every warp: the least of the group maxima that fewer than `chosen` exceed */
  uint32_t mine = 0, bound = 0;
#pragma unroll
  for (int w = 0; w < ROUTE_WARPS; w++) mine = max(mine, s.part_max[w][lane]);
  s.group_max[warp][lane] = mine;
  __syncwarp();
  if (!__any_sync(0xffffffffu, mine == NAN_GROUP)) {
    int above = 0;
#pragma unroll
    for (int g = 0; g < 32; g += 4) {
      uint4 other = *(const uint4 *)&s.group_max[warp][g];
      above += (other.x > mine) + (other.y > mine) + (other.z > mine) + (other.w > mine);
    }
    bound = __reduce_min_sync(0xffffffffu, above < r.chosen ? mine : 0xffffffffu);
  }
  uint32_t mask[ROUTE_KEYS];
  int here = 0, base = 0;
#pragma unroll
  for (int k = 0; k < ROUTE_KEYS; k++) {
    mask[k] = __ballot_sync(0xffffffffu, threadIdx.x + k * ROUTE_THREADS < r.experts && key[k] >= bound);
    here += __popc(mask[k]);
  }
  if (lane == 0 && here) base = atomicAdd(&s.count, here);
  base = __shfl_sync(0xffffffffu, base, 0);
#pragma unroll
  for (int k = 0; k < ROUTE_KEYS; k++) {
    if (mask[k] >> lane & 1)
      s.candidate[base + __popc(mask[k] & ((1u << lane) - 1u))] = (uint64_t)key[k] << 32 | ~(threadIdx.x + k * ROUTE_THREADS);
    base += __popc(mask[k]);
  }
  group_sync(1, ROUTE_THREADS);

  /* eight lanes a candidate: how many stand before it, and (upper half) how many of those are local */
  int count = s.count, eighth = threadIdx.x & 7;
  for (int c = threadIdx.x >> 3; c - (lane >> 3) < count; c += ROUTE_THREADS / 8) {
    uint64_t own = c < count ? s.candidate[c] : 0;
    uint32_t before = 0;
#pragma unroll 1
    for (int at = eighth; at < count; at += 32) {
#pragma unroll
      for (int k = 0; k < 32; k += 8) {
        uint64_t other = at + k < count ? s.candidate[at + k] : 0;
        uint32_t id = ~(uint32_t)other - (uint32_t)first;
        before += other > own ? id < (uint32_t)local ? 0x10001 : 1 : 0;
      }
    }
#pragma unroll
    for (int o = 4; o; o >>= 1) before += __shfl_xor_sync(0xffffffffu, before, o);
    int rank = before & 0xffff, slot = before >> 16;
    if (eighth == 0 && c < count && rank < r.chosen) {
      int32_t id = (int32_t)~(uint32_t)own;
      s.ids[rank] = id;
      if ((uint32_t)(id - first) < (uint32_t)local) {
        s.local[slot] = (int32_t)(id - first);
        atomicAdd(&s.local_count, 1);
      }
    }
  }
}

/* The weight of s.ids[lane]; one whole warp. */
static __device__ __forceinline__ float route_weight(const K3CudaRouting &r, const RouteShared &s)
{
  int lane = threadIdx.x & 31;
  float score = lane < r.chosen ? s.score[s.ids[lane]] : 0.0f, sum = score;
#pragma unroll
  for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, o);
  bool bad = __any_sync(0xffffffffu, s.group_max[0][lane] == NAN_GROUP);
  return bad ? NAN : score / (r.renormalize ? sum + 1e-20f : 1.0f) * r.scaling;
}

} /* namespace k3 */
#endif
