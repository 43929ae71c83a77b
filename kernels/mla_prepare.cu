/* Absorbed queries and the new cache row. Layer: backend (CUDA). Twin: the query part of the host's MLA layer.
 *
 * mla_prepare_kernel  q is there. Grid: heads × ceil(C / 64) blocks for the queries, and one for the cache row; at 12 heads, C 512: 97.
 *                     Block: 256 threads, 8 columns a thread, 32 rows at a time. Reads the nope rows of kv_b once.
 * mla_query_kernel    q = W_qb rms(q_a) too. Grid: a cluster of 8 blocks a head, and one for the cache row; a block has an eighth of the
 *                     head's rows of q_b and 64 columns of the absorbed query, and gives its q to the cluster. Reads the head's rows of
 *                     q_b and the nope rows of kv_b once (12 heads: 3.8 + 0.8 MB of q8_0), before the wait into shared memory and into the L2.
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
template <int THREADS>
__device__ __noinline__ void cache_row(const K3CudaMlaPrepare &a)
{
  __shared__ float sums[THREADS / 32];
  for (int64_t c = 32 * threadIdx.x; c < a.latent; c += 32 * THREADS) asm volatile("prefetch.global.L2 [%0];" ::"l"(a.kv_norm + c));
  k3_wait();
  const uint32_t position = (uint32_t)__ldcg((const long long *)a.position); /* the launcher checks; divisions of 64 bits are slow */
  float sum = 0.0f;
  for (int64_t c = threadIdx.x; c < a.latent; c += THREADS) {
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
  for (int i = 0; i < THREADS / 32; i++) sum += sums[i];
  const float norm = 1.0f / sqrtf(sum / (float)a.latent + (float)a.norm_eps);
  for (int64_t c = threadIdx.x; c < width; c += THREADS) {
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
template <int THREADS>
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
  for (int i = 0; i < THREADS / 32; i++) total += partial[i][threadIdx.x];
  store_query(a, out + first + threadIdx.x, total);
}

__global__ void __launch_bounds__(BLOCK, 2) mla_prepare_kernel(const __grid_constant__ K3CudaMlaPrepare a)
{
  const unsigned tiles = (unsigned)((a.latent + TILE - 1) / TILE);
  const int64_t head = blockIdx.x / tiles;
  if (head == a.heads) {
    cache_row<BLOCK>(a);
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
  store_columns<BLOCK>(a, sum, partial, out, first);
  if (first == 0)
    for (int64_t i = threadIdx.x; i < a.rope; i += BLOCK) store_query(a, out + a.latent + i, __ldcg(q + a.nope + i));
}

/* Of mla_query_kernel: threads; blocks of a head; rows of q_b a warp; steps of 512 columns of them; rows of W_uk a thread, Q_ROW_STEP apart. */
constexpr int Q_BLOCK = 384, CLUSTER = 8, Q_WARPS = Q_BLOCK / 32, Q_ROWS = 2, Q_CHUNKS = 3, Q_ROW_STEP = Q_BLOCK / (TILE / 8), Q_BATCH = 3;
constexpr int MAX_NOPE = Q_BATCH * Q_ROW_STEP, MAX_Q_COLS = 512 * Q_CHUNKS;
static_assert(MAX_Q_COLS == 4 * Q_BLOCK && Q_ROWS * CLUSTER <= 32, "four values of q_a a thread; a lane a row of q and block of the cluster");
constexpr size_t Q_B_BYTES = (size_t)Q_ROWS * Q_WARPS * MAX_Q_COLS / 16 * 17;
constexpr size_t ALONE_BYTES = 80 << 10; /* more than used: with it a multiprocessor takes one block, not two of 47 KB of weights each */

/* rms(q_a) as 16-bit codes, to `in`; v, w: four values of q_a and the weights of the norm. scratch [Q_WARPS]. */
__device__ __forceinline__ void fill_q_a(const K3CudaMlaPrepare &a, float4 v, float4 w, const k3::SharedInput &in, float *scratch)
{
  const int n = (int)a.q_b.cols;
  const float each = 1.0f / (float)n, eps = (float)a.norm_eps;
  float sum = warp_sum(fmaf(v.x, v.x, fmaf(v.y, v.y, fmaf(v.z, v.z, v.w * v.w))));
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0.0f;
#pragma unroll
  for (int i = 0; i < Q_WARPS; i++) sum += scratch[i];
  const float scale = rsqrtf(fmaf(sum, each, eps));
  const float x[4] = {v.x * scale * w.x, v.y * scale * w.y, v.z * scale * w.z, v.w * scale * w.w};
  if (4 * (int)threadIdx.x < n) k3::put4(in, 4 * threadIdx.x, x); /* n: whole warps */
}

/* TYPE: of kv_b. Dynamic shared memory: the block's rows of q_b, their codes and then their scales. */
template <K3Type TYPE>
__global__ void __launch_bounds__(Q_BLOCK, 2) mla_query_kernel(const __grid_constant__ K3CudaMlaPrepare a)
{
  const int head = blockIdx.x / CLUSTER;
  if (head == (int)a.heads) { /* no block of this cluster sends or receives */
    if (blockIdx.x % CLUSTER == 0) cache_row<Q_BLOCK>(a);
    else k3_wait();
    return;
  }
  extern __shared__ __align__(128) char q_b[];
  __shared__ float partial[Q_WARPS][TILE], nope[MAX_NOPE], scratch[Q_WARPS], scales[MAX_Q_COLS / 32];
  __shared__ int4 high[MAX_Q_COLS / 16], low[MAX_Q_COLS / 16];
  __shared__ __align__(8) uint64_t barriers[2];
  const uint32_t queries = shared_address(&barriers[0]), loaded = shared_address(&barriers[1]);
  const int rank = blockIdx.x % CLUSTER, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rows = (int)(a.nope + a.rope), mine = rows / CLUSTER, cols = (int)a.q_b.cols, chunks = cols / 512;
  const uint32_t codes_bytes = (uint32_t)(mine * cols), scales_bytes = codes_bytes / 16;

  /* 1. The weights. Those of q_b by the copy engine: loads to registers come back in order, and q_a's would wait for them. */
  if (threadIdx.x == 0) {
    barrier_init(queries, 1), barrier_init(loaded, 1);
    barrier_init_fence();
    barrier_expect(queries, 4 * (uint32_t)a.nope);
    barrier_expect(loaded, codes_bytes + scales_bytes);
    const int64_t at = (int64_t)(head * rows + rank * mine) * cols;
    copy_bytes(shared_address(q_b), (const char *)a.q_b.codes + at, codes_bytes, loaded);
    copy_bytes(shared_address(q_b) + codes_bytes, (const char *)a.q_b.scale + at / 16, scales_bytes, loaded);
  }
  cluster_arrive(); /* all blocks of the cluster run: waited for before the first store to another */
  const int first = rank * TILE, col = first + threadIdx.x % 8 * 8, end = col < (int)a.latent ? (int)a.nope : 0, row0 = threadIdx.x / 8;
  typedef StoredWeights<TYPE, 8> Stored;
  typename Stored::Place place[Q_BATCH];
#pragma unroll
  for (int b = 0; b < Q_BATCH; b++) {
    place[b] = Stored::place(a.kv_b, head * (a.nope + a.v_dim) + row0 + b * Q_ROW_STEP, col);
    if (row0 + b * Q_ROW_STEP < end) Stored::warm(place[b]);
  }
  const float4 norm = k3::fetch_cell(a.q_a_norm, threadIdx.x, cols);
  k3::SharedInput in = {};
  in.high = high, in.low = low, in.scales = scales;
  k3_wait_in_place<false>(rows < 0);

  /* 2. This block's rows of q. */
  fill_q_a(a, k3::fetch_cell(a.q_a, threadIdx.x, cols), norm, in, scratch);
  Stored stored[Q_BATCH]; /* behind q_a */
#pragma unroll
  for (int b = 0; b < Q_BATCH; b++) stored[b].load(place[b], row0 + b * Q_ROW_STEP < end);
  __syncthreads();
  barrier_wait(loaded, 0);
  float sum[8] = {0};
#pragma unroll
  for (int c = 0; c < Q_CHUNKS; c++) {
    if (c >= chunks) break;
    const k3::Q8Int::X x = k3::Q8Int::load_x(in, c * 32 + lane);
#pragma unroll
    for (int r = 0; r < Q_ROWS; r++) {
      const int at = (min(warp + Q_WARPS * r, mine - 1) * chunks + c) * 32 + lane; /* of 16 codes */
      const k3::Q8Raw w = {*(const uint4 *)(q_b + at * 16), *(const uint16_t *)(q_b + codes_bytes + at / 2 * 2)};
      sum[r] += k3::Q8Int::dot(w, x, in);
    }
  }
  warp_sums<Q_ROWS>(sum);
  cluster_wait();
  const int64_t out = head * (a.latent + a.rope);
  const int own = warp + Q_WARPS * (lane / CLUSTER), row = rank * mine + own; /* a lane a row and block of the cluster */
  const float q = lane < CLUSTER ? sum[0] : sum[1];
  if (lane < Q_ROWS * CLUSTER && own < mine) {
    if (row < (int)a.nope) send_to(nope + row, queries, (uint32_t)(lane % CLUSTER), q);
    else if (lane % CLUSTER == 0) store_query(a, out + a.latent + row - a.nope, q);
  }
  barrier_wait(queries, 0); /* all that others send to this block has come, so it may end */

  /* 3. Its columns of the absorbed query. */
#pragma unroll
  for (int i = 0; i < 8; i++) sum[i] = 0.0f;
#pragma unroll
  for (int b = 0; b < Q_BATCH; b++) {
    const float x = row0 + b * Q_ROW_STEP < (int)a.nope ? nope[row0 + b * Q_ROW_STEP] : 0.0f;
    float w[8];
    stored[b].decode(w);
#pragma unroll
    for (int i = 0; i < 8; i++) sum[i] += w[i] * x;
  }
  store_columns<Q_BLOCK>(a, sum, partial, out, first);
}

} // namespace

int k3_cuda_mla_prepare_multiplies(const K3CudaLaunch *launch, const K3CudaMlaPrepare *a)
{
  const int64_t rows = a->nope + a->rope;
  return a->q_b.type == K3_TYPE_Q8_0 && a->q_b.cols % 512 == 0 && a->q_b.cols <= MAX_Q_COLS && rows % CLUSTER == 0 &&
         ((uintptr_t)a->q_a | (uintptr_t)a->q_a_norm | (uintptr_t)a->q_b.codes | (uintptr_t)a->q_b.scale) % 16 == 0 &&
         rows / CLUSTER <= Q_ROWS * Q_WARPS && a->nope <= MAX_NOPE && a->latent <= CLUSTER * TILE &&
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
    return k3_cuda_launch_kernel(launch, "mla_query_kernel", kernel, grid, Q_BLOCK, CLUSTER, grid <= (unsigned)launch->sm_count ? ALONE_BYTES : Q_B_BYTES,
                                 parameters);
  }
  return k3_cuda_launch_kernel(launch, "mla_prepare_kernel", (const void *)mla_prepare_kernel,
                               (unsigned)(a->heads * tiles + 1), BLOCK, 1, 0, parameters);
}
