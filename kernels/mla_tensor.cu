/* A slice of absorbed MLA on Hopper's tensor cores. Layer: backend (CUDA), sm_90a. Twin: k3_host_mla_slice.
 *
 * Grid    slices × passes blocks (pass fastest); one block a multiprocessor; two passes of one slice form a cluster
 *         that loads the cache once between them.
 * Block   13 warps: one warpgroup for scores and softmax, two for the sums over values, one warp that copies.
 * Reads   the slice's rows once a pair of passes (1,152 bytes each), the queries once a block.
 * Bound   few heads: memory; 48 heads a block: memory and shared memory alike.
 *
 * Everything is transposed, so that any multiple of 8 heads is an exact operand width (no padding of heads to 64):
 *   scores   Sᵀ[64 rows, N] = cache tile [64, 576] · queriesᵀ [576, N]
 *   sums     Oᵀ[512, N]    += tileᵀ [512, 64] · weights [64, N]        the same tile in shared memory, read transposed
 * A tile of 64 rows arrives as 3 stages of 3 chunks of 64 columns in a ring, chunks 6 … 8 (8: the R part) first. The
 * scores of tile t + 1 run while the sums of tile t do. Asking the L2 for later tiles (ahead > 0) was slower wherever
 * memory is the bound: 12 heads x 131,072 rows 39 us without, 47 with one or two tiles, 57 with four. */
#include <cuda.h>
#include <cuda_runtime.h>
#include <math.h>
#include <string.h>

#include "kernels/hopper.cuh"
#include "kernels/mla.h"
#include "kernels/wait.cuh"

namespace {

constexpr int TILE = K3_MLA_TENSOR_TILE_ROWS;
constexpr int LATENT = 512, ROPE = 64;
constexpr int CHUNK_COLS = 64, CHUNKS = (LATENT + ROPE) / CHUNK_COLS;
constexpr int CHUNK_BYTES = TILE * CHUNK_COLS * 2;
constexpr int STAGE_CHUNKS = 3, TILE_STAGES = CHUNKS / STAGE_CHUNKS, STAGE_BYTES = STAGE_CHUNKS * CHUNK_BYTES;
constexpr int BLOCK = 13 * 32;
constexpr int STAGE_PITCH = LATENT + 4; /* floats; 2 · pitch ≡ 8 mod 32: conflict-free stores */
enum { SYNC_SCORES = 1, SYNC_SUMS = 2 /* and 3 */, SYNC_BOTH_SUMS = 4 };

template <int N>
struct Shared { /* byte offsets from a 1,024-aligned base */
  static constexpr int SLOTS = N == 48 ? 6 : N == 24 ? 7 : 8;
  static constexpr int QUERY = SLOTS * STAGE_BYTES;
  static constexpr int QUERY_CHUNK = N * CHUNK_COLS * 2;
  static constexpr int WEIGHTS = QUERY + CHUNKS * QUERY_CHUNK; /* two of [N][64] */
  static constexpr int WEIGHTS_BYTES = N * TILE * 2;
  static constexpr int RESCALE = WEIGHTS + 2 * WEIGHTS_BYTES; /* two of f32 [N] */
  static constexpr int COLUMN = RESCALE + 2 * N * 4;          /* two of f32 [4][N] */
  static constexpr int BARRIERS = COLUMN + 2 * 4 * N * 4;
  static constexpr int FULL = BARRIERS, EMPTY = FULL + 8 * SLOTS;
  static constexpr int QUERY_FULL = EMPTY + 8 * SLOTS;
  static constexpr int WEIGHTS_FULL = QUERY_FULL + 8, WEIGHTS_EMPTY = WEIGHTS_FULL + 16;
  static constexpr int BYTES = WEIGHTS_EMPTY + 16;
  static_assert(N * STAGE_PITCH * 4 <= QUERY, "the result is staged in the ring");
  static_assert(QUERY_CHUNK % 1024 == 0 && WEIGHTS_BYTES % 1024 == 0, "swizzle atoms");
  static_assert(BYTES + 1024 <= 227 * 1024, "shared memory of a block");
};

struct TensorArguments {
  CUtensorMap cache_map, query_map;
  int64_t heads, passes, slices;
  const int64_t *rows;
  float scale_log2;
  float *acc, *m, *l;
  int pair; /* 1: clusters of two passes, each block copies every other stage to both */
  int ahead; /* stages asked of the L2 */
};

/* Stages of a tile in the ring's order: chunks 6 … 8, 0 … 2, 3 … 5. */
__device__ __forceinline__ constexpr int first_chunk(int stage) { return stage == 0 ? 6 : 3 * (stage - 1); }
__device__ __forceinline__ constexpr int stage_of(int chunk) { return chunk >= 6 ? 0 : 1 + chunk / 3; }
/* The four chunks of a summing warpgroup, those of the stage that both need last: 0 1 2 3 and 6 7 4 5. */
__device__ __forceinline__ constexpr int chunk_of(int warpgroup, int i) { return warpgroup == 0 ? i : i < 2 ? 6 + i : 2 + i; }

/* One lane of a warp says that the warp needs a slot no more, to whoever fills it. */
__device__ __forceinline__ void release(uint32_t barrier, int pair, int lane)
{
  if (!pair) {
    if (lane == 0) barrier_arrive(barrier);
  } else if (lane < 2) {
    barrier_arrive_at(barrier, (uint32_t)lane);
  }
}

struct Slice {
  int64_t begin, end, rows; /* rows of this slice, all cached rows */
  int tiles;
};

template <int N>
__device__ void copy_tiles(const TensorArguments &a, const Slice &slice, uint32_t base, int pass, uint32_t rank)
{
  using L = Shared<N>;
  const int total = slice.tiles * TILE_STAGES, begin = (int)slice.begin;
  const int newest = (int)((slice.rows - 1 - slice.begin) / TILE); /* tile of the newest row, if it is one of ours */
  bool waited = false;
  int slot = 0, stage = 0, tile = 0, asked = L::SLOTS;
  uint32_t phase = 1;
  for (int n = 0; n <= total; n++) {
    /* Older rows do not depend on the launch before; the newest row and the queries do. */
    if (!waited && (n == total || n == L::SLOTS || tile == newest)) {
      k3_wait();
      waited = true;
      barrier_expect(base + L::QUERY_FULL, CHUNKS * L::QUERY_CHUNK);
      for (int c = 0; c < CHUNKS; c += STAGE_CHUNKS)
        copy_box(&a.query_map, base + L::QUERY + c * L::QUERY_CHUNK, base + L::QUERY_FULL, 0, pass * N, c);
    }
    if (n == total) break;
    if (n >= L::SLOTS) barrier_wait(base + L::EMPTY + 8 * slot, phase);
    const uint32_t full = base + L::FULL + 8 * slot, to = base + slot * STAGE_BYTES;
    barrier_expect(full, STAGE_BYTES);
    if (!a.pair)
      copy_box(&a.cache_map, to, full, 0, begin + tile * TILE, first_chunk(stage));
    else if ((n & 1) == (int)rank)
      copy_box_to(&a.cache_map, to, full, 0, begin + tile * TILE, first_chunk(stage), 3);
    if (n >= L::SLOTS - 1)
      for (; asked < total && asked <= n + a.ahead; asked++)
        if (!a.pair || (asked & 1) == (int)rank)
          fetch_box(&a.cache_map, 0, begin + asked / TILE_STAGES * TILE, first_chunk(asked % TILE_STAGES));
    if (++stage == TILE_STAGES) stage = 0, tile++;
    if (++slot == L::SLOTS) slot = 0, phase ^= 1;
  }
}

template <bool F16>
__device__ __forceinline__ uint32_t pack_pair(float low, float high)
{
  uint32_t packed;
  if constexpr (F16)
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

/* Two 8 × 8 matrices held as products hold them, stored transposed: lane i < 16 gives the row of matrix i / 8. */
__device__ __forceinline__ void store_transposed(uint32_t to, uint32_t first, uint32_t second)
{
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(to), "r"(first), "r"(second)
               : "memory");
}

/* Warps 0 … 3. A thread holds rows lane/4 and lane/4 + 8 of its warp's 16, heads 8 j + 2 (lane % 4) + {0, 1}. */
template <int N, bool F16>
__device__ void score_tiles(const TensorArguments &a, const Slice &slice, uint32_t base, char *shared, int pass,
                            int64_t slice_index)
{
  using L = Shared<N>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float m[N / 4], l[N / 4];
#pragma unroll
  for (int i = 0; i < N / 4; i++) m[i] = K3_CUDA_EMPTY_M, l[i] = 0.0f;

  uint32_t slot = 0, phase = 0;
  barrier_wait(base + L::QUERY_FULL, 0);
  for (int tile = 0; tile < slice.tiles; tile++) {
    /* 1. scores */
    float s[N / 2];
#pragma unroll 1
    for (int stage = 0; stage < TILE_STAGES; stage++) {
      barrier_wait(base + L::FULL + 8 * slot, phase);
      const uint64_t rows = wgmma_operand(base + slot * STAGE_BYTES);
      const uint64_t query = wgmma_operand(base + L::QUERY + first_chunk(stage) * L::QUERY_CHUNK);
      wgmma_begin();
#pragma unroll
      for (int c = 0; c < STAGE_CHUNKS; c++)
#pragma unroll
        for (int k = 0; k < 4; k++)
          wgmma<N, F16, 0>(s, rows + c * (CHUNK_BYTES >> 4) + 2 * k, query + c * (L::QUERY_CHUNK >> 4) + 2 * k,
                           stage + c + k > 0);
      if (++slot == L::SLOTS) slot = 0, phase ^= 1;
    }
    wgmma_commit();
    wgmma_wait<0>();

    /* 2. rows past the end never count, whatever they hold */
    const int64_t valid = slice.rows - (slice.begin + (int64_t)tile * TILE);
    if (valid < TILE) {
      const int row = 16 * warp + lane / 4;
#pragma unroll
      for (int i = 0; i < N / 2; i++)
        if (row + 8 * ((i >> 1) & 1) >= valid) s[i] = -INFINITY;
    }

    /* 3. largest score of each head: thread, warp, warpgroup */
    float top[N / 4];
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
      top[i] = fmaxf(s[4 * (i / 2) + i % 2], s[4 * (i / 2) + 2 + i % 2]);
#pragma unroll
      for (int step = 4; step < 32; step *= 2) top[i] = fmaxf(top[i], __shfl_xor_sync(~0u, top[i], step));
    }
    float *column = (float *)(shared + L::COLUMN) + (tile & 1) * 4 * N;
    if (lane < 4)
#pragma unroll
      for (int j = 0; j < N / 8; j++)
        *(float2 *)&column[warp * N + 8 * j + 2 * lane] = make_float2(top[2 * j], top[2 * j + 1]);
    group_sync(SYNC_SCORES, 128);

    /* 4. weights, in the layout of an operand: [head][64 rows], swizzled */
    const uint32_t buffer = tile & 1, use = tile >> 1;
    if (use > 0) barrier_wait(base + L::WEIGHTS_EMPTY + 8 * buffer, (use - 1) & 1);
    const uint32_t weights = base + L::WEIGHTS + buffer * L::WEIGHTS_BYTES;
    float *rescale = (float *)(shared + L::RESCALE) + buffer * N;
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
      const int head = 8 * j + 2 * (lane % 4);
      float2 high = *(float2 *)&column[head];
#pragma unroll
      for (int w = 1; w < 4; w++) {
        const float2 other = *(float2 *)&column[w * N + head];
        high.x = fmaxf(high.x, other.x), high.y = fmaxf(high.y, other.y);
      }
      const float new_x = fmaxf(m[2 * j], high.x * a.scale_log2), new_y = fmaxf(m[2 * j + 1], high.y * a.scale_log2);
      const float keep_x = exp2f(m[2 * j] - new_x), keep_y = exp2f(m[2 * j + 1] - new_y);
      m[2 * j] = new_x, m[2 * j + 1] = new_y;
      const float p0 = exp2f(fmaf(s[4 * j], a.scale_log2, -new_x)), p1 = exp2f(fmaf(s[4 * j + 1], a.scale_log2, -new_y));
      const float p2 = exp2f(fmaf(s[4 * j + 2], a.scale_log2, -new_x)),
                  p3 = exp2f(fmaf(s[4 * j + 3], a.scale_log2, -new_y));
      l[2 * j] = l[2 * j] * keep_x + (p0 + p2), l[2 * j + 1] = l[2 * j + 1] * keep_y + (p1 + p3);
      if (warp == 0 && lane < 4) *(float2 *)&rescale[head] = make_float2(keep_x, keep_y);
      const int line = lane % 8, unit = 2 * warp + (lane / 8 & 1);
      store_transposed(weights + (8 * j + line) * 128 + ((unit ^ line) * 16), pack_pair<F16>(p0, p1),
                       pack_pair<F16>(p2, p3));
    }
    fence_async_shared();
    barrier_arrive(base + L::WEIGHTS_FULL + 8 * buffer);
  }

  /* 5. m is the same in all threads of a head; l is summed over them */
  float *column = (float *)(shared + L::COLUMN) + (slice.tiles & 1) * 4 * N;
#pragma unroll
  for (int i = 0; i < N / 4; i++)
#pragma unroll
    for (int step = 4; step < 32; step *= 2) l[i] += __shfl_xor_sync(~0u, l[i], step);
  if (lane < 4)
#pragma unroll
    for (int i = 0; i < N / 4; i++) column[warp * N + 8 * (i / 2) + 2 * lane + i % 2] = l[i];
  group_sync(SYNC_SCORES, 128);
  k3_wait();
  if (warp == 0 && lane < 4)
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
      const int head = 8 * (i / 2) + 2 * lane + i % 2;
      if (pass * N + head >= a.heads) continue;
      const int64_t at = (pass * N + head) * a.slices + slice_index;
      a.m[at] = m[i];
      a.l[at] = column[head] + column[N + head] + column[2 * N + head] + column[3 * N + head];
    }
}

/* Warps 4 … 11, two warpgroups; each has 4 chunks of 64 columns. */
template <int N, bool F16, int warpgroup>
__device__ void sum_tiles(const TensorArguments &a, const Slice &slice, uint32_t base, char *shared, int pass,
                          int64_t index)
{
  using L = Shared<N>;
  const int thread = threadIdx.x - 128, warp = thread % 128 / 32, lane = thread % 32;
  float acc[4][N / 2];
  uint32_t first_slot = 0;
  for (int tile = 0; tile < slice.tiles; tile++) {
    const uint32_t buffer = tile & 1;
    uint32_t slot[TILE_STAGES];
#pragma unroll
    for (int i = 0; i < TILE_STAGES; i++) slot[i] = (first_slot + i) % L::SLOTS;
    first_slot = (first_slot + TILE_STAGES) % L::SLOTS;
    barrier_wait(base + L::WEIGHTS_FULL + 8 * buffer, (tile >> 1) & 1);

    /* 1. a partial last tile: rows past the end may hold NaN, and 0 · NaN is NaN */
    const int64_t valid = slice.rows - (slice.begin + (int64_t)tile * TILE);
    if (valid < TILE) {
      const int units = (TILE - (int)valid) * 8;
      for (int c = 0; c < 4; c++) {
        const int chunk = chunk_of(warpgroup, c), stage = stage_of(chunk);
        const uint32_t at = stage == 0 ? slot[0] : stage == 1 ? slot[1] : slot[2];
        char *rows = shared + at * STAGE_BYTES + (chunk - first_chunk(stage)) * CHUNK_BYTES + valid * 128;
        for (int i = thread % 128; i < units; i += 128) *(uint4 *)(rows + i * 16) = make_uint4(0, 0, 0, 0);
      }
      fence_async_shared();
      group_sync(SYNC_SUMS + warpgroup, 128);
    }

    /* 2. earlier tiles to the new largest score */
    if (tile > 0) {
      const float *rescale = (const float *)(shared + L::RESCALE) + buffer * N;
#pragma unroll
      for (int j = 0; j < N / 8; j++) {
        const float2 keep = *(const float2 *)&rescale[8 * j + 2 * (lane % 4)];
#pragma unroll
        for (int c = 0; c < 4; c++) {
          acc[c][4 * j] *= keep.x, acc[c][4 * j + 1] *= keep.y;
          acc[c][4 * j + 2] *= keep.x, acc[c][4 * j + 3] *= keep.y;
        }
      }
    }

    /* 3. sums; a stage is given back as soon as its products are done */
    const uint64_t weights = wgmma_operand(base + L::WEIGHTS + buffer * L::WEIGHTS_BYTES);
#pragma unroll
    for (int c = 0; c < 4; c++) {
      const int chunk = chunk_of(warpgroup, c), stage = stage_of(chunk);
      const uint32_t at = stage == 0 ? slot[0] : stage == 1 ? slot[1] : slot[2];
      const uint64_t rows = wgmma_operand(base + at * STAGE_BYTES + (chunk - first_chunk(stage)) * CHUNK_BYTES);
      wgmma_begin();
#pragma unroll
      for (int k = 0; k < 4; k++) wgmma<N, F16, 1>(acc[c], rows + k * (2048 >> 4), weights + 2 * k, tile + k > 0);
      wgmma_commit();
    }
    wgmma_wait<1>();
    release(base + L::EMPTY + 8 * slot[0], a.pair, lane);
    release(base + L::EMPTY + 8 * slot[1], a.pair, lane);
    wgmma_wait<0>();
    release(base + L::EMPTY + 8 * slot[2], a.pair, lane);
    if (lane == 0) barrier_arrive(base + L::WEIGHTS_EMPTY + 8 * buffer);
  }

  /* 4. out, by way of shared memory: [head][column], a bulk copy a head */
  group_sync(SYNC_BOTH_SUMS, 256);
  float *stage = (float *)shared;
#pragma unroll
  for (int c = 0; c < 4; c++)
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
      const int head = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
      const int at = chunk_of(warpgroup, c) * CHUNK_COLS + 16 * warp + lane / 4 + 8 * ((i >> 1) & 1);
      stage[head * STAGE_PITCH + at] = acc[c][i];
    }
  fence_async_shared();
  group_sync(SYNC_BOTH_SUMS, 256);
  k3_wait();
  if (thread < N && pass * N + thread < a.heads) {
    copy_out(a.acc + (index + thread) * LATENT, shared_address(stage + thread * STAGE_PITCH), LATENT * 4);
    copy_out_finish();
  }
}

/* No rows: l = 0, m = -1e30, acc = 0. */
__device__ void empty_slice(const TensorArguments &a, int64_t first_head, int heads, int64_t slice_index)
{
  float *acc = a.acc + (slice_index * a.heads + first_head) * LATENT;
  k3_wait();
  for (int i = threadIdx.x; i < heads * LATENT; i += BLOCK) acc[i] = 0.0f;
  for (int i = threadIdx.x; i < heads; i += BLOCK) {
    a.m[(first_head + i) * a.slices + slice_index] = K3_CUDA_EMPTY_M;
    a.l[(first_head + i) * a.slices + slice_index] = 0.0f;
  }
}

template <int N, bool F16>
__global__ void __launch_bounds__(BLOCK, 1) mla_tensor_kernel(const __grid_constant__ TensorArguments a)
{
  using L = Shared<N>;
  extern __shared__ char raw[];
  char *shared = raw + (1024 - shared_address(raw) % 1024) % 1024;
  const uint32_t base = shared_address(shared);
  const int pass = (int)(blockIdx.x % a.passes);
  const int64_t slice_index = blockIdx.x / a.passes;
  const int64_t index = slice_index * a.heads + (int64_t)pass * N; /* of the pass's first head in acc */
  const uint32_t rank = a.pair ? blockIdx.x & 1 : 0;

  Slice slice;
  slice.rows = __ldcg((const long long *)a.rows);
  slice.begin = k3_attention_slice_begin(slice.rows, TILE, a.slices, slice_index);
  slice.end = k3_attention_slice_begin(slice.rows, TILE, a.slices, slice_index + 1);
  slice.tiles = (int)((slice.end - slice.begin + TILE - 1) / TILE);
  if (slice.tiles == 0) { /* both blocks of a pair take this way */
    empty_slice(a, (int64_t)pass * N, (int)min((int64_t)N, a.heads - (int64_t)pass * N), slice_index);
    return;
  }

  if (threadIdx.x == 0) {
    fetch_map(&a.cache_map), fetch_map(&a.query_map);
    for (int i = 0; i < L::SLOTS; i++) {
      barrier_init(base + L::FULL + 8 * i, 1);
      barrier_init(base + L::EMPTY + 8 * i, a.pair ? 16 : 8);
    }
    barrier_init(base + L::QUERY_FULL, 1);
    for (int i = 0; i < 2; i++) {
      barrier_init(base + L::WEIGHTS_FULL + 8 * i, 128);
      barrier_init(base + L::WEIGHTS_EMPTY + 8 * i, 8);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if (a.pair) cluster_arrive(), cluster_wait();

  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0); /* roles are uniform, and the compiler must know */
  if (warp < 4) {
    score_tiles<N, F16>(a, slice, base, shared, pass, slice_index);
  } else if (warp < 8) {
    sum_tiles<N, F16, 0>(a, slice, base, shared, pass, index);
  } else if (warp < 12) {
    sum_tiles<N, F16, 1>(a, slice, base, shared, pass, index);
  } else if (threadIdx.x % 32 == 0) {
    copy_tiles<N>(a, slice, base, pass, rank);
  }
  if (a.pair) { /* the other block may still be reading or writing here */
    cluster_arrive();
    cluster_wait();
  }
}

/* Host side. */

K3Status make_map(CUtensorMap *map, K3CudaCacheType type, const void *memory, int64_t rows, int box_rows)
{
  typedef CUresult (*Encode)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                             const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                             CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  void *entry = NULL;
  cudaDriverEntryPointQueryResult found;
  K3_CUDA_TRY(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found));
  if (!entry || found != cudaDriverEntryPointSuccess)
    K3_FAIL(K3_ERR_DEVICE, "mla_tensor: the driver has no cuTensorMapEncodeTiled; a driver for CUDA 12 or newer is needed");
  /* columns of a chunk, rows, chunks: shared memory holds chunk after chunk */
  const cuuint64_t size[3] = {CHUNK_COLS, (cuuint64_t)rows, CHUNKS};
  const cuuint64_t stride[2] = {(LATENT + ROPE) * 2, CHUNK_COLS * 2};
  const cuuint32_t box[3] = {CHUNK_COLS, (cuuint32_t)box_rows, STAGE_CHUNKS}, step[3] = {1, 1, 1};
  CUresult result = ((Encode)entry)(
      map, type == K3_CACHE_F16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3,
      const_cast<void *>(memory), size, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    K3_FAIL(K3_ERR_DEVICE, "mla_tensor: cuTensorMapEncodeTiled gave %d for %lld rows at %p", (int)result, (long long)rows,
            memory);
  return K3_OK;
}

template <int N>
const void *kernel_of(K3CudaCacheType type)
{
  return type == K3_CACHE_F16 ? (const void *)mla_tensor_kernel<N, true> : (const void *)mla_tensor_kernel<N, false>;
}

K3Status find_kernel(int64_t width, K3CudaCacheType type, const void **kernel, size_t *shared)
{
  switch (width) {
  case 16: *kernel = kernel_of<16>(type), *shared = Shared<16>::BYTES + 1024; return K3_OK;
  case 24: *kernel = kernel_of<24>(type), *shared = Shared<24>::BYTES + 1024; return K3_OK;
  case 48: *kernel = kernel_of<48>(type), *shared = Shared<48>::BYTES + 1024; return K3_OK;
  default: K3_FAIL(K3_ERR_INPUT, "mla_tensor: %lld heads a pass; built for 16, 24 and 48", (long long)width);
  }
}

} // namespace

int k3_cuda_mla_tensor_serves(int64_t latent, int64_t rope, K3CudaCacheType cache_type)
{
  return latent == LATENT && rope == ROPE && cache_type != K3_CACHE_F32;
}

K3Status k3_cuda_mla_tensor_shape(const K3CudaLaunch *launch, int64_t heads, int64_t latent, int64_t rope,
                                  K3CudaCacheType cache_type, K3AttentionShape *shape)
{
  if (!k3_cuda_mla_tensor_serves(latent, rope, cache_type))
    K3_FAIL(K3_ERR_INPUT, "mla_tensor: C %lld, R %lld, cache type %d; built for C 512, R 64 and a 16-bit cache",
            (long long)latent, (long long)rope, (int)cache_type);
  K3CudaUse use;
  const void *kernel = NULL;
  size_t shared = 0;
  K3_TRY(find_kernel(48, cache_type, &kernel, &shared));
  K3_TRY(k3_cuda_kernel_use("mla_tensor_kernel", kernel, 1, BLOCK, 1, shared, &use));
  if (use.blocks_per_sm < 1) K3_FAIL(K3_ERR_DEVICE, "mla_tensor: %zu bytes of shared memory do not fit", shared);
  k3_attention_kernel_shape(K3_ATTENTION_KERNEL_TENSOR, heads, latent, shape);
  shape->multiprocessors = launch->sm_count;
  shape->resident_blocks = use.blocks_per_sm;
  return K3_OK;
}

K3Status k3_cuda_mla_tensor(const K3CudaLaunch *launch, const K3CudaMlaSlice *s)
{
  if (!k3_cuda_mla_tensor_serves(s->latent, s->rope, s->cache_type))
    K3_FAIL(K3_ERR_INPUT, "mla_tensor: C %lld, R %lld, cache type %d; built for C 512, R 64 and a 16-bit cache",
            (long long)s->latent, (long long)s->rope, (int)s->cache_type);
  if (s->heads < 1 || s->slices < 1 || s->capacity < 1 || s->capacity > INT32_MAX)
    K3_FAIL(K3_ERR_INPUT, "mla_tensor: heads %lld, slices %lld, capacity %lld", (long long)s->heads,
            (long long)s->slices, (long long)s->capacity);
  const void *kernel = NULL;
  size_t shared = 0;
  K3_TRY(find_kernel(s->heads_per_pass, s->cache_type, &kernel, &shared));
  TensorArguments arguments;
  memset(&arguments, 0, sizeof arguments);
  K3_TRY(make_map(&arguments.cache_map, s->cache_type, s->cache, s->capacity, TILE));
  K3_TRY(make_map(&arguments.query_map, s->cache_type, s->query, s->heads, (int)s->heads_per_pass));
  arguments.heads = s->heads;
  arguments.passes = (s->heads + s->heads_per_pass - 1) / s->heads_per_pass;
  arguments.slices = s->slices;
  arguments.rows = s->rows;
  arguments.scale_log2 = (float)(s->scale * 1.4426950408889634);
  arguments.acc = s->acc, arguments.m = s->m, arguments.l = s->l;
  arguments.pair = arguments.passes % 2 == 0 && !s->apart;
  arguments.ahead = TILE_STAGES * (s->ahead > 0 ? s->ahead : 0);
  if (arguments.passes * s->slices > INT32_MAX)
    K3_FAIL(K3_ERR_INPUT, "mla_tensor: %lld slices are too many for a grid", (long long)s->slices);
  void *parameters[] = {&arguments};
  return k3_cuda_launch_kernel(launch, "mla_tensor_kernel", kernel, (unsigned)(arguments.passes * s->slices), BLOCK,
                               arguments.pair ? 2 : 1, shared, parameters);
}
