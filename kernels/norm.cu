/* Attention residual + RMS norm + quantise. See norm.h. Layer: backend (CUDA).
 *
 * Grid: one cluster of 8 blocks, each with an eighth of the vector, four values a thread; sums meet through
 * distributed shared memory, two cluster barriers in all. Reads (banked + 4) * n * 4 bytes, most of them before the wait.
 * Bound: latency. Twins: k3_host_attn_res, k3_host_rms. */
#include "kernels/norm.h"

#include <cooperative_groups.h>

#include "kernels/gemv.cuh"
#include "kernels/wait.cuh"

namespace {

using namespace k3;
namespace cg = cooperative_groups;

enum { CLUSTER = 8, MOST_THREADS = 1024, HELD = 8 /* banked vectors in registers */ };

struct Sums {
  float dot[K3_NORM_BANK + 1], square[K3_NORM_BANK + 1]; /* of each banked vector; the last used: p' */
  float h;
};

struct Shared {
  Sums from[CLUSTER];           /* written by each block of the cluster */
  float warp[2 * HELD + 2][33];
  float weight[K3_NORM_BANK + 1];
  float scale;
};

__device__ __forceinline__ float warp_sum(float v)
{
#pragma unroll
  for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(0xffffffffu, v, o);
  return v;
}

__device__ __forceinline__ float4 load4(const float *from, bool there)
{
  return there ? __ldcg((const float4 *)from) : make_float4(0, 0, 0, 0);
}

__device__ __forceinline__ float dot(const float4 &a, const float4 &b)
{
  return fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, a.w * b.w)));
}

/* This thread's two parts for one vector, to the warp's place. */
__device__ __forceinline__ void part_sums(Shared &s, int slot, const float4 &v, const float4 &score)
{
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  float d = warp_sum(dot(v, score)), q = warp_sum(dot(v, v));
  if (lane == 0) {
    s.warp[2 * slot][warp] = d;
    s.warp[2 * slot + 1][warp] = q;
  }
}

/* After a barrier: thread t < 2 * count * CLUSTER sums one quantity over the warps and tells one block of the cluster. */
__device__ __forceinline__ void tell(cg::cluster_group &cluster, Shared &s, int first, int slots)
{
  int warps = blockDim.x >> 5, me = (int)cluster.block_rank();
  for (int t = threadIdx.x; t < 2 * slots * CLUSTER; t += blockDim.x) {
    int quantity = t / CLUSTER, to = t % CLUSTER, slot = quantity >> 1;
    float sum = 0;
    for (int w = 0; w < warps; w++) sum += s.warp[quantity][w];
    Sums *sums = &cluster.map_shared_rank(&s, to)->from[me];
    if (quantity & 1) sums->square[first + slot] = sum;
    else sums->dot[first + slot] = sum;
  }
}

/* LONG: more banked vectors than registers hold; they are read twice. */
template <bool LONG>
__global__ void __launch_bounds__(MOST_THREADS, 1) norm_kernel(const __grid_constant__ K3CudaNorm a)
{
  __shared__ Shared s;
  cg::cluster_group cluster = cg::this_cluster();
  int64_t part = (a.n / 4 + CLUSTER - 1) / CLUSTER; /* cells of four a block, whole blocks of 32 */
  part = (part + 7) / 8 * 8;
  int64_t cell4 = part * cluster.block_rank() + threadIdx.x, at = cell4 * 4;
  bool there = (int64_t)threadIdx.x < part && at < a.n;
  float4 score = make_float4(0, 0, 0, 0), norm, p = score, held[HELD];

  /* 1. What is known before the predecessor ends. */
  if (a.banked) score = there ? __ldg((const float4 *)(a.score + at)) : score;
  norm = there ? __ldg((const float4 *)(a.norm + at)) : make_float4(0, 0, 0, 0);
  if (!a.early) k3_wait();
  if (!(a.replace && a.branch)) p = load4(a.p + at, there);
  if (!LONG) {
#pragma unroll
    for (int j = 0; j < HELD; j++)
      if (j < a.banked) held[j] = load4(a.bank + j * a.n + at, there);
  }
  /* all blocks of the cluster run before anyone writes into another */
  cluster.sync();
  if (!LONG) {
#pragma unroll
    for (int j = 0; j < HELD; j++)
      if (j < a.banked) part_sums(s, j, held[j], score);
    __syncthreads();
    tell(cluster, s, 0, a.banked);
  } else {
    for (int first = 0; first < a.banked; first += HELD) {
      int count = min((int)HELD, a.banked - first);
      for (int j = 0; j < count; j++) part_sums(s, j, load4(a.bank + (first + j) * a.n + at, there), score);
      __syncthreads();
      tell(cluster, s, first, count);
      __syncthreads();
    }
  }
  if (a.early) k3_wait();

  /* 2. p' and its sums. */
  if (a.branch) {
    float4 b = load4(a.branch + at, there);
    if (a.replace) p = b;
    else p.x += b.x, p.y += b.y, p.z += b.z, p.w += b.w;
    if (there) *(float4 *)(a.p + at) = p;
  }
  if (there && a.append) *(float4 *)(a.bank + a.banked * a.n + at) = p;
  float4 h = p;
  if (a.banked) {
    __syncthreads();
    part_sums(s, 0, p, score);
    __syncthreads();
    tell(cluster, s, a.banked, 1);
    cluster.sync();

    /* 3. Scores, softmax, mix: warp 0 of every block alike. */
    if (threadIdx.x < 32) {
      int lane = threadIdx.x, count = a.banked + 1;
      float most = -INFINITY, total = 0, value[3];
#pragma unroll
      for (int k = 0; k < 3; k++) {
        int j = lane + 32 * k;
        value[k] = -INFINITY;
        if (j < count) {
          float d = 0, q = 0;
#pragma unroll
          for (int c = 0; c < CLUSTER; c++) d += s.from[c].dot[j], q += s.from[c].square[j];
          value[k] = d / sqrtf(q / (float)a.n + a.res_eps);
        }
        most = max_nan(most, value[k]);
      }
#pragma unroll
      for (int o = 16; o; o >>= 1) most = max_nan(most, __shfl_xor_sync(0xffffffffu, most, o));
#pragma unroll
      for (int k = 0; k < 3; k++) {
        value[k] = lane + 32 * k < count ? expf(value[k] - most) : 0.0f;
        total += value[k];
      }
      total = warp_sum(total);
#pragma unroll
      for (int k = 0; k < 3; k++)
        if (lane + 32 * k < count) s.weight[lane + 32 * k] = value[k] / total;
    }
    __syncthreads();
    float w = s.weight[a.banked];
    h.x *= w, h.y *= w, h.z *= w, h.w *= w;
    if (!LONG) {
#pragma unroll
      for (int j = 0; j < HELD; j++)
        if (j < a.banked) {
          float u = s.weight[j];
          h.x = fmaf(u, held[j].x, h.x), h.y = fmaf(u, held[j].y, h.y);
          h.z = fmaf(u, held[j].z, h.z), h.w = fmaf(u, held[j].w, h.w);
        }
    } else {
      for (int j = 0; j < a.banked; j++) {
        float4 v = load4(a.bank + j * a.n + at, there);
        float u = s.weight[j];
        h.x = fmaf(u, v.x, h.x), h.y = fmaf(u, v.y, h.y), h.z = fmaf(u, v.z, h.z), h.w = fmaf(u, v.w, h.w);
      }
    }
  }

  /* 4. The norm of h over the cluster. */
  __syncthreads();
  float q = warp_sum(dot(h, h));
  if ((threadIdx.x & 31) == 0) s.warp[0][threadIdx.x >> 5] = q;
  __syncthreads();
  if (threadIdx.x < CLUSTER) {
    float sum = 0;
    for (int w = 0; w < (int)(blockDim.x >> 5); w++) sum += s.warp[0][w];
    cluster.map_shared_rank(&s, (int)threadIdx.x)->from[cluster.block_rank()].h = sum;
  }
  cluster.sync();
  float square = 0;
#pragma unroll
  for (int c = 0; c < CLUSTER; c++) square += s.from[c].h;
  float scale = 1.0f / sqrtf(square / (float)a.n + a.eps);
  float v[4] = {h.x * scale * norm.x, h.y * scale * norm.y, h.z * scale * norm.z, h.w * scale * norm.w};
  if (there && a.x.values) *(float4 *)(a.x.values + at) = make_float4(v[0], v[1], v[2], v[3]);
  if (a.x.codes) {
    float block_scale, unused;
    Codes4 codes = quantise4(v, false, &block_scale, &unused);
    if (there) {
      *(uint32_t *)(a.x.codes + at) = codes.high;
      *(uint32_t *)(a.x.codes + a.n + at) = codes.low;
      if ((threadIdx.x & 7) == 0) a.x.scales[at / 32] = block_scale;
    }
  }
}

__global__ void score_kernel(const float *a, const float *b, int64_t n, float *score)
{
  k3_wait();
  int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
  if (i < n) score[i] = a[i] * b[i];
}

} /* namespace */

K3Status k3_cuda_norm(const K3CudaLaunch *launch, const K3CudaNorm *norm)
{
  K3CudaNorm a = *norm;
  int64_t most = (int64_t)CLUSTER * MOST_THREADS * 4;
  if (a.n < 4 || a.n % 4 || a.n > most || (a.x.codes && a.n % 32))
    K3_FAIL(K3_ERR_INPUT, "norm of layer %lld, phase %s: a vector of %lld; multiples of %d up to %lld are possible",
            (long long)launch->layer, launch->phase, (long long)a.n, a.x.codes ? 32 : 4, (long long)most);
  if (a.banked < 0 || a.banked + (a.append != 0) > K3_NORM_BANK)
    K3_FAIL(K3_ERR_INPUT, "norm of layer %lld: %d banked vectors; at most %d are possible", (long long)launch->layer,
            a.banked, K3_NORM_BANK);
  int64_t part = ((a.n / 4 + CLUSTER - 1) / CLUSTER + 7) / 8 * 8;
  unsigned threads = (unsigned)((part + 31) / 32 * 32);
  void *arguments[] = {&a};
  if (a.banked > HELD)
    return k3_cuda_launch_kernel(launch, "norm_long_kernel", (const void *)norm_kernel<true>, CLUSTER, threads, CLUSTER, 0,
                                 arguments);
  return k3_cuda_launch_kernel(launch, "norm_kernel", (const void *)norm_kernel<false>, CLUSTER, threads, CLUSTER, 0,
                               arguments);
}

K3Status k3_cuda_norm_score(const K3CudaLaunch *launch, const float *a, const float *b, int64_t n, float *score)
{
  void *arguments[] = {&a, &b, &n, &score};
  return k3_cuda_launch_kernel(launch, "score_kernel", (const void *)score_kernel, (unsigned)((n + 255) / 256), 256, 1, 0,
                               arguments);
}
