/* The norm of the residual stream as a function of a cluster's blocks, for the kernels that get the branch from here or there:
 * norm.cu from this rank's memory, comm_device.cu from all ranks. Layer: backend (CUDA), device code. */
#ifndef K3_KERNELS_NORM_CUH
#define K3_KERNELS_NORM_CUH

#include "kernels/attention.cuh"
#include "kernels/gemv.cuh"
#include "kernels/norm.h"
#include "kernels/wait.cuh"

namespace k3 {

enum { CLUSTER = 8, MOST_THREADS = 1024 };

static __device__ __forceinline__ float4 load4(const float *from, bool there)
{
  return there ? __ldcg((const float4 *)from) : make_float4(0, 0, 0, 0);
}

static __device__ __forceinline__ float dot(const float4 &a, const float4 &b)
{
  return fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, a.w * b.w)));
}

/* Cells of four a block, whole blocks of 32 values. */
static __host__ __device__ __forceinline__ int block_cells(int n)
{
  return ((n / 4 + CLUSTER - 1) / CLUSTER + 7) / 8 * 8;
}

/* Sums that all warps of the cluster send to all its blocks. */
struct Meeting {
  float sum[3][CLUSTER * MOST_THREADS / 32];
};

/* Sums over the cluster, the same in every thread of every block: each adds them up in the same order. */
template <int COUNT>
static __device__ __forceinline__ void meet(Meeting &meeting, uint32_t barrier, int me, float *sums)
{
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = (int)blockDim.x >> 5;
  warp_sums<COUNT>(sums);
#pragma unroll
  for (int k = 0; k < COUNT; k++) {
    if (lane < CLUSTER) send_to(&meeting.sum[k][me * warps + warp], barrier, (uint32_t)lane, sums[k]);
    sums[k] = 0;
  }
  barrier_wait(barrier, 0); /* all that others send to this block has come, so it may end */
#pragma unroll 1
  for (int first = 0; first < CLUSTER * warps; first += 32)
#pragma unroll
    for (int k = 0; k < COUNT; k++) sums[k] += first + lane < CLUSTER * warps ? meeting.sum[k][first + lane] : 0.0f;
  warp_sums<COUNT>(sums);
}

/* k3_cuda_norm by a cluster. Branch(from) is made before the wait where a.early, and called behind it, once by each thread, for the
 * four floats of the branch at an address. per_n: 1 / n. */
template <class Branch, class From>
static __device__ __forceinline__ void norm_vector(const K3CudaNorm &a, const float per_n, const From &from)
{
  __shared__ Meeting meeting, second;
  __shared__ __align__(8) uint64_t barriers[2];
  const int me = (int)blockIdx.x;
  const uint32_t warps = blockDim.x >> 5, met = shared_address(&barriers[0]), met_again = shared_address(&barriers[1]);
  if (threadIdx.x == 0) {
    barrier_init(met, 1), barrier_init(met_again, 1);
    barrier_init_fence();
    barrier_expect(met, 3 * 4 * CLUSTER * warps);
    barrier_expect(met_again, 4 * CLUSTER * warps);
  }
  cluster_arrive(); /* all blocks of the cluster run: waited for before the first store to another */
  const int n = (int)a.n, part = block_cells(n), at = (part * me + (int)threadIdx.x) * 4;
  const bool there = (int)threadIdx.x < part && at < n, joins = a.branch && a.replace;

  /* 1. What is known before the predecessor ends. By load4, as the compiler puts loads by __ldg behind the wait. */
  const float4 norm = load4(a.norm + at, there), score = load4(a.score + at, there && a.mixed);
  if (!a.early) k3_wait();
  Branch branch_of(from);
  const float4 bank = load4(a.mixed + at, there && a.mixed);
  const float most_banked = a.mixed ? __ldcg(a.mix) : -INFINITY, weight_banked = a.mixed ? __ldcg(a.mix + 1) : 0.0f;
  const float square_banked = a.mixed ? __ldcg(a.mix + 2) : 0.0f;
  float4 p = load4(a.p + at, there && !joins);
  if (a.early) k3_wait_early(); /* the product behind it starts as the predecessor ends, not 1 us later */

  /* 2. p' and the sums. */
  const float4 branch = branch_of(a.branch + at, there && a.branch);
  p.x += branch.x, p.y += branch.y, p.z += branch.z, p.w += branch.w;
  float sums[3] = {dot(p, p), dot(p, score), dot(p, bank)};
  cluster_wait();
  meet<3>(meeting, met, me, sums);
  if (there && a.branch) *(float4 *)(a.p + at) = p;
  if (there && a.banked) *(float4 *)(a.banked + at) = p;

  /* 3. h = of_bank · bank + of_p · p', and |h|² from the sums; where it is small beside its terms, from h itself. */
  float of_bank = 0.0f, of_p = 1.0f;
  if (a.mixed) {
    const float value = sums[1] * rsqrtf(sums[0] * per_n + a.res_eps), most = max_nan(value, most_banked);
    of_bank = expf(most_banked - most), of_p = expf(value - most);
    const float share =
        __fdividef(1.0f, fmaf(of_bank, weight_banked, of_p)); /* of a total between 1 and 1 + the bank's weights */
    of_bank *= share, of_p *= share;
  }
  const float4 h = make_float4(fmaf(of_bank, bank.x, of_p * p.x), fmaf(of_bank, bank.y, of_p * p.y),
                               fmaf(of_bank, bank.z, of_p * p.z), fmaf(of_bank, bank.w, of_p * p.w));
  const float apart = fmaf(of_bank * of_bank, square_banked, of_p * of_p * sums[0]);
  float square = fmaf(2.0f * of_bank * of_p, sums[2], apart);
  if (square < 0.25f * apart) {
    sums[0] = dot(h, h);
    meet<1>(second, met_again, me, sums);
    square = sums[0];
  }

  /* 4. x. */
  const float scale = rsqrtf(square * per_n + a.eps);
  const float v[4] = {h.x * scale * norm.x, h.y * scale * norm.y, h.z * scale * norm.z, h.w * scale * norm.w};
  if (there && a.x.values) *(float4 *)(a.x.values + at) = make_float4(v[0], v[1], v[2], v[3]);
  if (a.x.codes) {
    float block_scale, unused;
    const Codes4 codes = quantise4(v, false, &block_scale, &unused);
    if (there) {
      *(uint32_t *)(a.x.codes + at) = codes.high;
      *(uint32_t *)(a.x.codes + n + at) = codes.low;
      if ((threadIdx.x & 7) == 0) a.x.scales[at / 32] = block_scale;
    }
  }
}

} /* namespace k3 */
#endif
