/* Attention residual + RMS norm + quantise. See norm.h. Layer: backend (CUDA). Twins: k3_host_attn_res, k3_host_rms.
 *
 * bank_kernel: a cluster of 8 blocks for each sublayer, each with an eighth of the vector, four values a thread; sums meet through
 * distributed shared memory. Reads the bank once a sublayer, from L2. Bound: latency, once in attn_res_block_size layers.
 * norm_kernel: one such cluster. The branch is all that it reads after the wait, and its blocks meet once: three sums of each warp
 * go to every block by st.async, which needs no barrier of the cluster (whose release waits for all its stores, 1 us under load).
 * Reads 6 * n * 4 bytes. Bound: latency. */
#include "kernels/norm.cuh"

#include <cooperative_groups.h>

namespace {

using namespace k3;
namespace cg = cooperative_groups;

enum { HELD = 8 /* banked vectors at a time */ };

struct Shared {
  float2 from[CLUSTER][K3_NORM_BANK]; /* {v · score, v · v}, written by each block of the cluster */
  float2 warp[HELD][32];
  float weight[K3_NORM_BANK];
  float square[CLUSTER];
};

__global__ void __launch_bounds__(MOST_THREADS, 1) bank_kernel(const __grid_constant__ K3CudaBank a)
{
  __shared__ Shared s;
  cg::cluster_group cluster = cg::this_cluster();
  const int sublayer = (int)blockIdx.x / CLUSTER, me = (int)cluster.block_rank();
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = (int)blockDim.x >> 5;
  const int64_t part = (a.n / 4 + CLUSTER - 1) / CLUSTER; /* cells of four a block */
  const int64_t at = (part * me + threadIdx.x) * 4;
  const bool there = (int64_t)threadIdx.x < part && at < a.n;
  const float4 score = load4(a.score[sublayer] + at, there);
  k3_wait();

  /* 1. Two sums of each vector, to every block of the cluster. */
  cluster.sync(); /* all blocks of the cluster run before anyone writes into another */
  for (int first = 0; first < a.banked; first += HELD) {
    const int count = min((int)HELD, a.banked - first);
    float4 held[HELD];
#pragma unroll
    for (int j = 0; j < HELD; j++) held[j] = load4(a.bank + (first + j) * a.n + at, there && j < count);
#pragma unroll
    for (int j = 0; j < HELD; j++) {
      const float2 sums = make_float2(warp_sum(dot(held[j], score)), warp_sum(dot(held[j], held[j])));
      if (lane == 0) s.warp[j][warp] = sums;
    }
    __syncthreads();
    for (int t = threadIdx.x; t < count * CLUSTER; t += blockDim.x) {
      float2 sums = make_float2(0, 0);
      for (int w = 0; w < warps; w++) sums.x += s.warp[t / CLUSTER][w].x, sums.y += s.warp[t / CLUSTER][w].y;
      cluster.map_shared_rank(&s, t % CLUSTER)->from[me][first + t / CLUSTER] = sums;
    }
    __syncthreads();
  }
  cluster.sync();

  /* 2. Scores and weights: warp 0 of every block alike. */
  if (warp == 0) {
    float most = -INFINITY, total = 0, value[K3_NORM_BANK / 32];
#pragma unroll
    for (int k = 0; k < K3_NORM_BANK / 32; k++) {
      const int j = lane + 32 * k;
      value[k] = -INFINITY;
      if (j < a.banked) {
        float d = 0, q = 0;
#pragma unroll
        for (int c = 0; c < CLUSTER; c++) d += s.from[c][j].x, q += s.from[c][j].y;
        value[k] = d / sqrtf(q / (float)a.n + a.eps);
      }
      most = max_nan(most, value[k]);
    }
#pragma unroll
    for (int o = 16; o; o >>= 1) most = max_nan(most, __shfl_xor_sync(0xffffffffu, most, o));
#pragma unroll
    for (int k = 0; k < K3_NORM_BANK / 32; k++) {
      const int j = lane + 32 * k;
      const float weight = j < a.banked ? expf(value[k] - most) : 0.0f;
      s.weight[j] = weight;
      total += weight;
    }
    total = warp_sum(total);
    if (me == 0 && lane == 0) a.mix[K3_NORM_MIX * sublayer] = most, a.mix[K3_NORM_MIX * sublayer + 1] = total;
  }
  __syncthreads();

  /* 3. The weighted sum. */
  float4 sum = make_float4(0, 0, 0, 0);
  for (int first = 0; first < a.banked; first += HELD) {
#pragma unroll
    for (int j = 0; j < HELD; j++) {
      if (first + j >= a.banked) break;
      const float4 v = load4(a.bank + (first + j) * a.n + at, there);
      const float w = s.weight[first + j];
      sum.x = fmaf(w, v.x, sum.x), sum.y = fmaf(w, v.y, sum.y), sum.z = fmaf(w, v.z, sum.z), sum.w = fmaf(w, v.w, sum.w);
    }
  }
  if (there) *(float4 *)(a.mixed + sublayer * a.n + at) = sum;

  /* 4. Its square. */
  const float square = warp_sum(dot(sum, sum));
  if (lane == 0) s.warp[0][warp].x = square;
  __syncthreads();
  if (threadIdx.x == 0) {
    float total = 0;
    for (int w = 0; w < warps; w++) total += s.warp[0][w].x;
    cluster.map_shared_rank(&s, 0)->square[me] = total;
  }
  cluster.sync();
  if (me == 0 && threadIdx.x == 0) {
    float total = 0;
    for (int c = 0; c < CLUSTER; c++) total += s.square[c];
    a.mix[K3_NORM_MIX * sublayer + 2] = total;
  }
}

/* The branch as this rank has it. */
struct Stored {
  __device__ __forceinline__ explicit Stored(const K3CudaNorm &) {}
  __device__ __forceinline__ float4 operator()(const float *from, bool there) { return load4(from, there); }
};

__global__ void __launch_bounds__(MOST_THREADS, 1) norm_kernel(const __grid_constant__ K3CudaNorm a, const float per_n)
{
  norm_vector<Stored>(a, per_n, a);
}

__global__ void score_kernel(const float *a, const float *b, int64_t n, float *score)
{
  k3_wait();
  int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
  if (i < n) score[i] = a[i] * b[i];
}

} /* namespace */

K3Status k3_cuda_mix_bank(const K3CudaLaunch *launch, const K3CudaBank *bank)
{
  K3CudaBank a = *bank;
  const int64_t most = (int64_t)CLUSTER * MOST_THREADS * 4;
  if (a.n < 4 || a.n % 4 || a.n > most)
    K3_FAIL(K3_ERR_INPUT, "bank of layer %lld: vectors of %lld; multiples of 4 up to %lld are possible",
            (long long)launch->layer, (long long)a.n, (long long)most);
  if (a.banked < 1 || a.banked > K3_NORM_BANK || a.count < 1 || a.count > K3_NORM_SUBLAYERS)
    K3_FAIL(K3_ERR_INPUT, "bank of layer %lld: %d vectors for %d sublayers; at most %d and %d are possible",
            (long long)launch->layer, a.banked, a.count, K3_NORM_BANK, K3_NORM_SUBLAYERS);
  const int64_t part = (a.n / 4 + CLUSTER - 1) / CLUSTER;
  void *arguments[] = {&a};
  return k3_cuda_launch_kernel(launch, "bank_kernel", (const void *)bank_kernel, (unsigned)(a.count * CLUSTER),
                               (unsigned)((part + 31) / 32 * 32), CLUSTER, 0, arguments);
}

K3Status k3_cuda_norm_launch(const K3CudaLaunch *launch, const char *kernel, const void *function,
                             const K3CudaNorm *norm, void **arguments)
{
  const K3CudaNorm a = *norm;
  const int64_t most = (int64_t)CLUSTER * MOST_THREADS * 4;
  if (a.n < 4 || a.n % 4 || a.n > most || (a.x.codes && a.n % 32))
    K3_FAIL(K3_ERR_INPUT, "norm of layer %lld, phase %s: a vector of %lld; multiples of %d up to %lld are possible",
            (long long)launch->layer, launch->phase, (long long)a.n, a.x.codes ? 32 : 4, (long long)most);
  const int part = block_cells((int)a.n);
  return k3_cuda_launch_kernel(launch, kernel, function, CLUSTER, (unsigned)((part + 31) / 32 * 32), CLUSTER, 0,
                               arguments);
}

K3Status k3_cuda_norm(const K3CudaLaunch *launch, const K3CudaNorm *norm)
{
  K3CudaNorm a = *norm;
  float per_n = 1.0f / (float)a.n;
  void *arguments[] = {&a, &per_n};
  return k3_cuda_norm_launch(launch, "norm_kernel", (const void *)norm_kernel, norm, arguments);
}

K3Status k3_cuda_norm_score(const K3CudaLaunch *launch, const float *a, const float *b, int64_t n, float *score)
{
  void *arguments[] = {&a, &b, &n, &score};
  return k3_cuda_launch_kernel(launch, "score_kernel", (const void *)score_kernel, (unsigned)((n + 255) / 256), 256, 1, 0,
                               arguments);
}
