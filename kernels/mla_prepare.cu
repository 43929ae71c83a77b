/* Absorbed queries and the new cache row. Layer: backend (CUDA). Twin: the query part of the host's MLA layer.
 *
 * mla_prepare_kernel  q is there. Grid: heads × ceil(C / 64) blocks for the queries, and one for the cache row; at 12 heads, C 512: 97.
 *                     Block: 256 threads, 8 columns a thread, 32 rows at a time. Reads the nope rows of kv_b once.
 * mla_query_kernel    q = W_qb rms(q_a) too. Grid: a cluster of 8 blocks a head, and one for the cache row; a block has an eighth of the
 *                     head's rows of q_b and 64 columns of the absorbed query, and gives its q to the cluster. Reads the head's rows of
 *                     q_b and the nope rows of kv_b once (12 heads: 3.8 + 0.8 MB of q8_0), all of them before the wait.
 * Bound: latency. */
#include <cuda_runtime.h>

#include "kernels/attention.cuh"
#include "kernels/gemv.cuh"
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
  for (int64_t c = 32 * threadIdx.x; c < a.latent; c += 32 * BLOCK) asm volatile("prefetch.global.L2 [%0];" ::"l"(a.kv_norm + c));
  k3_wait();
  const uint32_t position = (uint32_t)__ldcg((const long long *)a.position); /* the launcher checks; divisions of 64 bits are slow */
  float sum = 0.0f;
  for (int64_t c = threadIdx.x; c < a.latent; c += BLOCK) {
    const float value = __ldcg(a.kv + c);
    sum += value * value;
  }
  const uint32_t positions = (uint32_t)a.page_positions, world = (uint32_t)a.world, page = position / positions;
  const int64_t row = (int64_t)(page / world) * positions + position % positions;
  if (page % world != (uint32_t)a.rank || row >= a.capacity) return;
  const int64_t width = a.latent + a.rope;
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

/* TILE columns of a query from `first` on: 8 columns a thread, whose rows are summed over the block. */
__device__ __forceinline__ void store_columns(const K3CudaMlaPrepare &a, float sum[8], float (*partial)[TILE], int64_t out, int64_t first)
{
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
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
  if (threadIdx.x >= TILE || first + threadIdx.x >= a.latent) return;
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < BLOCK / 32; i++) total += partial[i][threadIdx.x];
  store_query(a, out + first + threadIdx.x, total);
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
  const int64_t out = head * (a.latent + a.rope);
  store_columns(a, sum, partial, out, first);
  if (first == 0)
    for (int64_t i = threadIdx.x; i < a.rope; i += BLOCK) store_query(a, out + a.latent + i, __ldcg(q + a.nope + i));
}

/* Of mla_query_kernel: blocks of a head; rows of q_b a warp; steps of 512 columns of them; values of q_a a thread, in fours. */
constexpr int CLUSTER = 8, WARPS = BLOCK / 32, Q_ROWS = 3, Q_CHUNKS = 3, Q_FOURS = 2;
constexpr size_t ALONE_BYTES = 80 << 10; /* shared memory not used: with it a multiprocessor takes one block, not two of 47 KB of weights each */
constexpr int MAX_NOPE = BATCH * ROWS, MAX_Q_COLS = 512 * Q_CHUNKS;

/* rms(q_a) as 16-bit codes, to `in`; w: the weights of the norm. */
__device__ __forceinline__ void fill_q_a(const K3CudaMlaPrepare &a, const float w[Q_FOURS][4], const k3::SharedInput &in, float *scratch)
{
  const int n = (int)a.q_b.cols;
  float v[Q_FOURS][4], sum = 0.0f;
#pragma unroll
  for (int r = 0; r < Q_FOURS; r++) k3::fetch4(a.q_a, 4 * (threadIdx.x + r * BLOCK), n, v[r]);
#pragma unroll
  for (int r = 0; r < Q_FOURS; r++)
#pragma unroll
    for (int k = 0; k < 4; k++) sum = fmaf(v[r][k], v[r][k], sum);
  const float scale = 1.0f / sqrtf(k3::block_sum(sum, scratch) / (float)n + (float)a.norm_eps);
#pragma unroll
  for (int r = 0; r < Q_FOURS; r++) {
#pragma unroll
    for (int k = 0; k < 4; k++) v[r][k] *= scale * w[r][k];
    if (4 * (threadIdx.x + r * BLOCK) < n) k3::put4(in, 4 * (threadIdx.x + r * BLOCK), v[r]); /* n: whole warps */
  }
}

/* TYPE: of kv_b. */
template <K3Type TYPE>
__global__ void __launch_bounds__(BLOCK, 2) mla_query_kernel(const __grid_constant__ K3CudaMlaPrepare a)
{
  const int64_t head = blockIdx.x / CLUSTER;
  if (head == a.heads) { /* no block of this cluster sends or receives */
    if (blockIdx.x % CLUSTER == 0) cache_row(a);
    else k3_wait();
    return;
  }
  __shared__ float partial[WARPS][TILE], nope[MAX_NOPE], scratch[33], scales[MAX_Q_COLS / 32];
  __shared__ int4 high[MAX_Q_COLS / 16], low[MAX_Q_COLS / 16];
  __shared__ __align__(8) uint64_t exchanged;
  const uint32_t queries = shared_address(&exchanged);
  if (threadIdx.x == 0) {
    barrier_init(queries, 1);
    barrier_init_fence();
    barrier_expect(queries, 4 * (uint32_t)a.nope);
  }
  cluster_arrive(); /* all blocks of the cluster run: waited for before the first store to another */
  const int rank = blockIdx.x % CLUSTER, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rows = (int)(a.nope + a.rope), mine = rows / CLUSTER, chunks = (int)a.q_b.cols / 512;

  /* 1. All weights. Nothing is used before the wait, which would wait for it. */
  k3::Q8Raw q_b[Q_ROWS][Q_CHUNKS];
  const k3::Parts parts = k3::parts_of(a.q_b);
#pragma unroll
  for (int r = 0; r < Q_ROWS; r++)
#pragma unroll
    for (int c = 0; c < Q_CHUNKS; c++) {
      const int64_t row = head * rows + rank * mine + min(warp + WARPS * r, mine - 1);
      q_b[r][c] = k3::Q8Base::zero();
      if (c < chunks) q_b[r][c] = k3::Q8Base::load(parts, (row * chunks + c) * 32 + lane);
    }
  float norm[Q_FOURS][4];
  const int64_t first = (int64_t)rank * TILE, col = first + threadIdx.x % 8 * 8, end = col < a.latent ? a.nope : 0;
  const int row0 = threadIdx.x / 8;
  StoredWeights<TYPE, 8> stored[BATCH];
#pragma unroll
  for (int b = 0; b < BATCH; b++) stored[b].load(a.kv_b, head * (a.nope + a.v_dim) + row0 + b * ROWS, col, row0 + b * ROWS < end);
#pragma unroll
  for (int r = 0; r < Q_FOURS; r++) k3::fetch4(a.q_a_norm, 4 * (threadIdx.x + r * BLOCK), (int)a.q_b.cols, norm[r]);
  k3::SharedInput in = {};
  in.high = high, in.low = low, in.scales = scales;
  k3_wait();

  /* 2. This block's rows of q. */
  fill_q_a(a, norm, in, scratch);
  __syncthreads();
  float sum[8] = {0};
#pragma unroll
  for (int c = 0; c < Q_CHUNKS; c++) {
    if (c >= chunks) break;
    const k3::Q8Int::X x = k3::Q8Int::load_x(in, c * 32 + lane);
#pragma unroll
    for (int r = 0; r < Q_ROWS; r++) sum[r] += k3::Q8Int::dot(q_b[r][c], x, in);
  }
#pragma unroll
  for (int r = 0; r < Q_ROWS; r++) sum[r] = warp_sum(sum[r]);
  cluster_wait();
  const int64_t out = head * (a.latent + a.rope);
#pragma unroll
  for (int r = 0; r < Q_ROWS; r++) {
    const int row = rank * mine + warp + WARPS * r;
    if (warp + WARPS * r >= mine) continue;
    if (row < a.nope) {
      if (lane < CLUSTER) send_to(nope + row, queries, (uint32_t)lane, sum[r]);
    } else if (lane == 0) {
      store_query(a, out + a.latent + row - a.nope, sum[r]);
    }
    sum[r] = 0.0f;
  }
  barrier_wait(queries, 0); /* all that others send to this block has come, so it may end */

  /* 3. Its columns of the absorbed query. */
#pragma unroll
  for (int i = 0; i < 8; i++) sum[i] = 0.0f;
#pragma unroll
  for (int b = 0; b < BATCH; b++) {
    const float x = row0 + b * ROWS < a.nope ? nope[row0 + b * ROWS] : 0.0f;
    float w[8];
    stored[b].decode(w);
#pragma unroll
    for (int i = 0; i < 8; i++) sum[i] += w[i] * x;
  }
  store_columns(a, sum, partial, out, first);
}

} // namespace

int k3_cuda_mla_prepare_multiplies(const K3CudaLaunch *launch, const K3CudaMlaPrepare *a)
{
  const int64_t rows = a->nope + a->rope;
  return a->q_b.type == K3_TYPE_Q8_0 && a->q_b.cols % 512 == 0 && a->q_b.cols <= MAX_Q_COLS && rows % CLUSTER == 0 &&
         rows / CLUSTER <= Q_ROWS * WARPS && a->nope <= MAX_NOPE && a->latent <= CLUSTER * TILE &&
         (a->heads + 1) * CLUSTER <= 2 * launch->sm_count; /* all at once: with more heads the weights come late */
}

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
  if (a->page_positions > UINT32_MAX || (a->capacity + a->page_positions) * a->world > UINT32_MAX)
    K3_FAIL(K3_ERR_INPUT, "mla_prepare: a cache of %lld rows on each of %lld ranks; positions are of 32 bits", (long long)a->capacity,
            (long long)a->world);
  if (a->page_positions < 1 || a->world < 1 || a->rank < 0 || a->rank >= a->world)
    K3_FAIL(K3_ERR_INPUT, "mla_prepare: page of %lld positions, rank %lld of %lld", (long long)a->page_positions,
            (long long)a->rank, (long long)a->world);
  if (a->query16 && a->cache_type == K3_CACHE_F32)
    K3_FAIL(K3_ERR_INPUT, "mla_prepare: 16-bit queries asked for beside a float32 cache");
  const int64_t tiles = (a->latent + TILE - 1) / TILE;
  void *parameters[] = {const_cast<K3CudaMlaPrepare *>(a)};
  if (!a->q) {
    if (!k3_cuda_mla_prepare_multiplies(launch, a))
      K3_FAIL(K3_ERR_INPUT, "mla_prepare: q is wanted, as q_b_proj of %lld columns and %lld heads of %lld + %lld are not served",
              (long long)a->q_b.cols, (long long)a->heads, (long long)a->nope, (long long)a->rope);
    const void *kernel = a->kv_b.type == K3_TYPE_F32    ? (const void *)mla_query_kernel<K3_TYPE_F32>
                         : a->kv_b.type == K3_TYPE_BF16 ? (const void *)mla_query_kernel<K3_TYPE_BF16>
                                                        : (const void *)mla_query_kernel<K3_TYPE_Q8_0>;
    const unsigned grid = (unsigned)((a->heads + 1) * CLUSTER);
    return k3_cuda_launch_kernel(launch, "mla_query_kernel", kernel, grid, BLOCK, CLUSTER, grid <= (unsigned)launch->sm_count ? ALONE_BYTES : 0,
                                 parameters);
  }
  return k3_cuda_launch_kernel(launch, "mla_prepare_kernel", (const void *)mla_prepare_kernel,
                               (unsigned)(a->heads * tiles + 1), BLOCK, 1, 0, parameters);
}
