/* Absorbed queries and the new cache row. Layer: backend (CUDA). Twin: the query part of the host's MLA layer.
 *
 * Grid    heads × ceil(C / 64) blocks for the queries, and one for the cache row. At 12 heads, C 512: 97.
 * Block   256 threads: 8 columns a thread, 32 rows at a time.
 * Reads   the nope rows of kv_b once: heads · nope · C weights (12 heads: 0.8 MB q8_0, 1.6 MB bf16).
 * Bound   latency; the first 128 rows' weights are under way before the predecessor ends. */
#include <cuda_runtime.h>

#include "kernels/attention.cuh"
#include "kernels/mla.h"
#include "kernels/wait.cuh"

namespace {

constexpr int BLOCK = 256, TILE = 64, ROWS = BLOCK / (TILE / 8), BATCH = 4;

__device__ __forceinline__ void store16(void *to, int64_t at, K3CudaCacheType type, float value)
{
  if (type == K3_CACHE_BF16)
    ((__nv_bfloat16 *)to)[at] = __float2bfloat16_rn(value);
  else
    ((__half *)to)[at] = __float2half_rn(value);
}

__device__ __forceinline__ void store_query(const K3CudaMlaPrepare &a, int64_t at, float value)
{
  a.query[at] = value;
  if (a.query16) store16(a.query16, at, a.cache_type, value);
}

/* cache[row of position] = [rms(c) | r], by one block, on the rank that owns the page. */
__device__ __noinline__ void cache_row(const K3CudaMlaPrepare &a)
{
  __shared__ float sums[BLOCK / 32];
  k3_wait();
  const int64_t position = __ldcg((const long long *)a.position), page = position / a.page_positions;
  const int64_t row = page / a.world * a.page_positions + position % a.page_positions;
  if (page % a.world != a.rank || row >= a.capacity) return;
  const int64_t width = a.latent + a.rope;
  float sum = 0.0f;
  for (int64_t c = threadIdx.x; c < a.latent; c += BLOCK) sum += __ldcg(a.kv + c) * __ldcg(a.kv + c);
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0.0f;
  for (int i = 0; i < BLOCK / 32; i++) sum += sums[i];
  const float norm = 1.0f / sqrtf(sum / (float)a.latent + (float)a.norm_eps);
  for (int64_t c = threadIdx.x; c < width; c += BLOCK) {
    const float value = c < a.latent ? __ldcg(a.kv + c) * norm * a.kv_norm[c] : __ldcg(a.kv + c);
    if (a.cache_type == K3_CACHE_F32)
      ((float *)a.cache)[row * width + c] = value;
    else
      store16(a.cache, row * width + c, a.cache_type, value);
  }
}

/* BATCH rows, ROWS apart, 8 columns of each; zeros past `end`. */
template <K3Type TYPE>
__device__ __forceinline__ void load_rows(const K3CudaMatrix &kv_b, int64_t top, int64_t row, int64_t end, int64_t col,
                                          float w[BATCH][8])
{
  StoredWeights<TYPE, 8> stored[BATCH];
#pragma unroll
  for (int b = 0; b < BATCH; b++) stored[b].load(kv_b, top + row + b * ROWS, col, row + b * ROWS < end);
#pragma unroll
  for (int b = 0; b < BATCH; b++) stored[b].decode(w[b]);
}

__global__ void __launch_bounds__(BLOCK, 2) mla_prepare_kernel(const __grid_constant__ K3CudaMlaPrepare a)
{
  const unsigned tiles = (unsigned)((a.latent + TILE - 1) / TILE);
  const int64_t head = blockIdx.x / tiles;
  if (head == a.heads) {
    cache_row(a);
    return;
  }
  __shared__ float partial[BLOCK / 32][TILE];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t first = (int64_t)(blockIdx.x % tiles) * TILE, col = first + threadIdx.x % 8 * 8;
  const int64_t top = head * (a.nope + a.v_dim), row0 = threadIdx.x / 8;
  const float *q = a.q + head * (a.nope + a.rope);

  float w[BATCH][8], sum[8] = {0};
  const int64_t end = col < a.latent ? a.nope : 0;
  K3_BY_TYPE(a.kv_b, load_rows, a.kv_b, top, row0, end, col, w);
  k3_wait();
#pragma unroll 1
  for (int64_t row = row0; row < end; row += BATCH * ROWS) {
    if (row != row0) K3_BY_TYPE(a.kv_b, load_rows, a.kv_b, top, row, end, col, w);
#pragma unroll
    for (int b = 0; b < BATCH; b++) {
      if (row + b * ROWS >= end) continue;
      const float x = __ldcg(q + row + b * ROWS);
#pragma unroll
      for (int i = 0; i < 8; i++) sum[i] += w[b][i] * x;
    }
  }
  /* 8 lanes of one column group hold different rows: lanes 8 apart, then warps. */
#pragma unroll
  for (int i = 0; i < 8; i++) {
    sum[i] += __shfl_xor_sync(~0u, sum[i], 8);
    sum[i] += __shfl_xor_sync(~0u, sum[i], 16);
  }
  if (lane < 8)
#pragma unroll
    for (int i = 0; i < 8; i++) partial[warp][lane * 8 + i] = sum[i];
  __syncthreads();
  const int64_t out = head * (a.latent + a.rope);
  if (threadIdx.x < TILE && first + threadIdx.x < a.latent) {
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < BLOCK / 32; i++) total += partial[i][threadIdx.x];
    store_query(a, out + first + threadIdx.x, total);
  }
  if (first == 0)
    for (int64_t i = threadIdx.x; i < a.rope; i += BLOCK) store_query(a, out + a.latent + i, __ldcg(q + a.nope + i));
}

} // namespace

K3Status k3_cuda_mla_prepare(const K3CudaLaunch *launch, const K3CudaMlaPrepare *a)
{
  if (a->heads < 1 || a->nope < 1 || a->rope < 0 || a->latent < 8 || a->latent % 8 != 0)
    K3_FAIL(K3_ERR_INPUT, "mla_prepare: heads %lld, nope %lld, rope %lld, C %lld; C must be a multiple of 8",
            (long long)a->heads, (long long)a->nope, (long long)a->rope, (long long)a->latent);
  if (a->kv_b.type != K3_TYPE_F32 && a->kv_b.type != K3_TYPE_BF16 && a->kv_b.type != K3_TYPE_Q8_0)
    K3_FAIL(K3_ERR_INPUT, "mla_prepare: kv_b_proj is %s; f32, bf16 and q8_0 are served", k3_format(a->kv_b.type)->name);
  if (a->kv_b.cols != a->latent || a->kv_b.rows < a->heads * (a->nope + a->v_dim))
    K3_FAIL(K3_ERR_INPUT, "mla_prepare: kv_b_proj is [%lld, %lld], wanted [%lld, %lld]", (long long)a->kv_b.rows,
            (long long)a->kv_b.cols, (long long)(a->heads * (a->nope + a->v_dim)), (long long)a->latent);
  if (a->page_positions < 1 || a->world < 1 || a->rank < 0 || a->rank >= a->world)
    K3_FAIL(K3_ERR_INPUT, "mla_prepare: page of %lld positions, rank %lld of %lld", (long long)a->page_positions,
            (long long)a->rank, (long long)a->world);
  if (a->query16 && a->cache_type == K3_CACHE_F32)
    K3_FAIL(K3_ERR_INPUT, "mla_prepare: 16-bit queries asked for beside a float32 cache");
  const int64_t tiles = (a->latent + TILE - 1) / TILE;
  void *parameters[] = {const_cast<K3CudaMlaPrepare *>(a)};
  return k3_cuda_launch_kernel(launch, "mla_prepare_kernel", (const void *)mla_prepare_kernel,
                               (unsigned)(a->heads * tiles + 1), BLOCK, 1, 0, parameters);
}
