/* A slice of absorbed MLA on Hopper's tensor cores. Layer: backend (CUDA), sm_90a. Twin: k3_host_mla_slice.
 *
 * Grid    slices × passes blocks (pass fastest); one block a multiprocessor; two passes of one slice form a cluster
 *         that loads the cache once between them.
 * Block   4 warpgroups: one for scores and softmax, two for the sums over values, one that copies.
 * Reads   the slice's rows once a pair of passes (1,152 bytes each), the queries once a block.
 * Bound   few heads: memory; 48 heads a block: tensor cores and shared memory alike, 2,100 cycles a tile counted, 2,450
 *         measured; then start and end (doc/performance.md).
 *
 *   scores   S[64 heads, 64 rows] = queries [64, 576] · tileᵀ      512 of the 576 in registers (128 a thread), heads past N
 *                                                                  are dropped
 *   sums     Oᵀ[512, N] += tileᵀ [512, 64] · weights [64, N]       the same tile in shared memory, read transposed, so
 *                                                                  that any multiple of 8 heads is an exact width
 * With most of the queries out of shared memory it holds three tiles of 64 rows: one in the sums, the next in the scores, the
 * third on its way. A tile is a rope chunk and 4 stages of 2 chunks of 64 columns; stages 0 and 2 are the first 256 columns,
 * for one warpgroup of sums, 1 and 3 the others, for the other. The third buffer brings the queries first. */
#include <cuda.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <math.h>
#include <string.h>

#include "kernels/hopper.cuh"
#include "kernels/mla.h"
#include "kernels/wait.cuh"

namespace {

constexpr int TILE = K3_MLA_TENSOR_TILE_ROWS;
constexpr int LATENT = 512, ROPE = 64;
constexpr int CHUNK_COLS = 64, CHUNKS = (LATENT + ROPE) / CHUNK_COLS, ROPE_CHUNK = CHUNKS - 1;
constexpr int CHUNK_BYTES = TILE * CHUNK_COLS * 2;
constexpr int STAGE_CHUNKS = 2, STAGES = 4, STAGE_BYTES = STAGE_CHUNKS * CHUNK_BYTES, BUFFER_BYTES = STAGES * STAGE_BYTES;
constexpr int BUFFERS = 3, ROPE_BUFFERS = 2;
constexpr int QUERY_BUFFER = BUFFERS - 1;                 /* where the queries arrive */
constexpr int BLOCK = 512;
/* Registers a thread, 65,536 in all. */
constexpr int SCORE_REGISTERS = 224, SUM_REGISTERS = 128, COPY_REGISTERS = 32;
static_assert((SCORE_REGISTERS + 2 * SUM_REGISTERS + COPY_REGISTERS) * 128 == 65536, "registers of a multiprocessor");
enum { SYNC_SCORES = 1, SYNC_SUMS = 2 /* and 3 */ };
static_assert(TILE == 64 && BUFFERS * STAGES * STAGE_CHUNKS * CHUNK_COLS == BUFFERS * LATENT, "a buffer holds a tile's values");

template <int N>
struct Shared { /* byte offsets; swizzle atoms want multiples of 1,024 */
  static constexpr int VALUES = 0, ROPES = VALUES + BUFFERS * BUFFER_BYTES;
  static constexpr int QUERY = QUERY_BUFFER * BUFFER_BYTES, QUERY_CHUNK = N * CHUNK_COLS * 2;
  static constexpr int QUERY_ROPE = ROPES + ROPE_BUFFERS * CHUNK_BYTES; /* stays; as 64 heads it runs into what follows */
  static constexpr int WEIGHTS = QUERY_ROPE + QUERY_CHUNK; /* two of [N, rounded up to 16][64] */
  static constexpr int WEIGHTS_BYTES = (N + 15) / 16 * 16 * TILE * 2;
  static constexpr int RESCALE = WEIGHTS + 2 * WEIGHTS_BYTES; /* two of f32 [64]; then 1 / l of the whole slice [N] */
  static constexpr int INVERSE = RESCALE + 2 * 64 * 4;
  static constexpr int FULL = INVERSE + N * 4, EMPTY = FULL + 8 * BUFFERS * STAGES;
  static constexpr int ROPE_FULL = EMPTY + 8 * BUFFERS * STAGES, ROPE_EMPTY = ROPE_FULL + 8 * ROPE_BUFFERS;
  static constexpr int WEIGHTS_FULL = ROPE_EMPTY + 8 * ROPE_BUFFERS, WEIGHTS_EMPTY = WEIGHTS_FULL + 16;
  static constexpr int INVERSE_FULL = WEIGHTS_EMPTY + 16, QUERY_FULL = INVERSE_FULL + 8; /* of each stage, the rope */
  static constexpr int USED = QUERY_FULL + 8 * (STAGES + 1), READ = QUERY_ROPE + 64 * 128;
  static constexpr int BYTES = USED > READ ? USED : READ;
  static constexpr int OUT_BOX = N * CHUNK_COLS * 2;
  static_assert(ROPE_CHUNK * QUERY_CHUNK <= BUFFER_BYTES && STAGE_CHUNKS * OUT_BOX <= STAGE_BYTES, "they fit");
  static_assert(QUERY_CHUNK % 1024 == 0 && WEIGHTS_BYTES % 1024 == 0 && OUT_BOX % 1024 == 0, "swizzle atoms");
  static_assert(BYTES <= 227 * 1024, "shared memory of a block");
};

struct TensorArguments {
  CUtensorMap values_map, rope_map, query_map, out_map;
  int heads, passes;
  int64_t slices;
  const int64_t *rows;
  float scale_log2;
  uint16_t *acc;
  float *m, *l;
  int pair; /* 1: clusters with two passes of a slice, each block copies every other stage to both */
};

/* First chunk of columns of a tile's stage. */
__device__ __forceinline__ constexpr int first_chunk(int stage) { return stage % 2 * 4 + stage / 2 * 2; }

/* A warp says that it needs a stage no more, to whoever fills it. Only where it is filled again: an arrival that nobody
 * waits for could reach a block of the pair that has ended. */
__device__ __forceinline__ void release(uint32_t barrier, int pair, int lane)
{
  __syncwarp();
  if (!pair) {
    if (lane == 0) barrier_arrive(barrier);
  } else if (lane < 2) {
    barrier_arrive_at(barrier, (uint32_t)lane);
  }
}

struct Slice {
  int begin, left; /* its first row; rows from there to the newest, those of later slices too */
  int tiles;
};

/* A buffer of the ring and how often it was used before: b = tile mod 3, use = tile / 3. */
struct Ring {
  uint32_t buffer = 0, use = 0;
  __device__ __forceinline__ void advance()
  {
    if (++buffer == BUFFERS) buffer = 0, use++;
  }
};

__device__ __forceinline__ void copy_rows(const TensorArguments &a, const CUtensorMap *map, uint32_t to, uint32_t full,
                                          int bytes, int row, int chunk, bool mine)
{
  barrier_expect(full, bytes);
  if (!a.pair)
    copy_box(map, to, full, 0, row, chunk);
  else if (mine)
    copy_box_to(map, to, full, 0, row, chunk, 3);
}

/* A part of the queries of a pass: stage 0 … 3, or the rope. */
template <int N>
__device__ __forceinline__ void copy_queries(const TensorArguments &a, uint32_t base, int pass, int part)
{
  using L = Shared<N>;
  const bool rope = part == STAGES;
  const uint32_t full = base + L::QUERY_FULL + 8 * part;
  const int chunk = rope ? ROPE_CHUNK : first_chunk(part);
  const uint32_t to = base + (rope ? L::QUERY_ROPE : L::QUERY + chunk * L::QUERY_CHUNK);
  barrier_expect(full, (rope ? 1 : STAGE_CHUNKS) * L::QUERY_CHUNK);
  copy_box(&a.query_map, to, full, 0, pass * N, chunk);
  if (!rope) copy_box(&a.query_map, to + L::QUERY_CHUNK, full, 0, pass * N, chunk + 1);
}

template <int N>
__device__ void copy_tiles(const TensorArguments &a, const Slice &slice, uint32_t base, int rank)
{
  using L = Shared<N>;
  const int newest = (slice.left - 1) / TILE; /* tile of the newest row, if it is one of ours */
  Ring ring;
  for (int tile = 0; tile < slice.tiles; tile++) {
    if (tile == 1) barrier_wait(base + L::FULL, 0); /* its rows would delay the first's and the queries, at the SM's one port */
    if (tile == newest) k3_wait(); /* older rows do not depend on the launch before */
    const int row = slice.begin + tile * TILE;
    const uint32_t rope = tile % ROPE_BUFFERS, rope_use = tile / ROPE_BUFFERS;
    if (rope_use > 0) barrier_wait(base + L::ROPE_EMPTY + 8 * rope, (rope_use - 1) & 1);
    copy_rows(a, &a.rope_map, base + L::ROPES + rope * CHUNK_BYTES, base + L::ROPE_FULL + 8 * rope, CHUNK_BYTES, row,
              ROPE_CHUNK, tile % 2 == rank);
    const uint32_t uses = ring.use + (ring.buffer == QUERY_BUFFER); /* the queries' was one */
    for (int stage = 0; stage < STAGES; stage++) {
      const uint32_t at = ring.buffer * STAGES + stage;
      if (uses > 0) barrier_wait(base + L::EMPTY + 8 * at, (uses - 1) & 1);
      copy_rows(a, &a.values_map, base + L::VALUES + at * STAGE_BYTES, base + L::FULL + 8 * at, STAGE_BYTES, row,
                first_chunk(stage), stage % 2 == rank);
    }
    ring.advance();
  }
}

/* Two numbers as 16 bits, and back. */
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

template <bool F16>
__device__ __forceinline__ float2 unpack_pair(uint32_t packed)
{
  if constexpr (F16)
    return __half22float2(*(const __half2 *)&packed);
  else
    return make_float2(__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000u));
}

/* 2^x; below 2^-126 zero, which a 16-bit weight is long before. */
__device__ __forceinline__ float weight_of(float x)
{
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/* Over the four lanes that share a head. */
__device__ __forceinline__ float quad_max(float x)
{
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x)
{
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

/* Warps 0 … 3, 16 heads each. A thread holds heads lane/4 and lane/4 + 8, rows 8 j + 2 (lane % 4) + {0, 1}: scores 4 j + {0, 1}
 * of the first head, 4 j + {2, 3} of the second. */
template <int N, bool F16>
struct Scores {
  using L = Shared<N>;
  const TensorArguments &a;
  const Slice &slice;
  const uint32_t base;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint32_t query[ROPE_CHUNK][4][4];
  float m[2] = {K3_CUDA_EMPTY_M, K3_CUDA_EMPTY_M}, l[2] = {0.0f, 0.0f}, keep[2];
  Ring ring;

  __device__ __forceinline__ Scores(const TensorArguments &arguments, const Slice &of, uint32_t address)
      : a(arguments), slice(of), base(address)
  {
  }

  /* A chunk of queries to registers; heads past N repeat others and are dropped. */
  __device__ __forceinline__ void load_queries(int chunk)
  {
    const int head = (16 * warp + lane % 16) % N;
#pragma unroll
    for (int k = 0; k < 4; k++)
      load_matrices(query[chunk][k],
                    base + L::QUERY + chunk * L::QUERY_CHUNK + head * 128 + (((2 * k + lane / 16) ^ (head % 8)) * 16));
  }

  /* Starts the scores of a tile. The products queue up, but not all of a tile's: the tile before is weighed between them.
   * FIRST: there is none before, and the queries arrive meanwhile, in the same order. */
  template <bool FIRST>
  __device__ __forceinline__ void start(int tile, float (&s)[TILE / 2], float (&before)[TILE / 2])
  {
    const uint32_t rope = tile % ROPE_BUFFERS;
    if (FIRST) { /* the queries: mostly here before the rows */
#pragma unroll
      for (int stage = 0; stage < STAGES; stage++) {
        barrier_wait(base + L::QUERY_FULL + 8 * stage, 0);
#pragma unroll
        for (int c = 0; c < STAGE_CHUNKS; c++) load_queries(first_chunk(stage) + c);
      }
      barrier_wait(base + L::QUERY_FULL + 8 * STAGES, 0);
    }
    barrier_wait(base + L::ROPE_FULL + 8 * rope, tile / ROPE_BUFFERS & 1);
    wgmma_begin();
    const uint64_t rope_query = wgmma_operand(base + L::QUERY_ROPE);
    const uint64_t rope_rows = wgmma_operand(base + L::ROPES + rope * CHUNK_BYTES);
#pragma unroll
    for (int k = 0; k < 4; k++) wgmma_shared<F16>(s, rope_query + 2 * k, rope_rows + 2 * k, k > 0);
#pragma unroll
    for (int stage = 0; stage < STAGES; stage++) {
      const uint32_t at = ring.buffer * STAGES + stage;
      barrier_wait(base + L::FULL + 8 * at, ring.use & 1);
      wgmma_begin();
      const uint64_t rows = wgmma_operand(base + L::VALUES + at * STAGE_BYTES);
#pragma unroll
      for (int c = 0; c < STAGE_CHUNKS; c++)
#pragma unroll
        for (int k = 0; k < 4; k++)
          wgmma_registers<F16>(s, query[first_chunk(stage) + c][k], rows + c * (CHUNK_BYTES >> 4) + 2 * k, 1);
      if (!FIRST && stage == 0) find_largest(tile - 1, before);
      if (!FIRST && stage == 1) weigh(tile - 1, before);
    }
    wgmma_commit();
    ring.advance();
    if (!FIRST) add_up(before);
  }

  /* Waits for the scores of a tile. */
  __device__ __forceinline__ void finish(int tile)
  {
    wgmma_wait<0>();
    if (tile + ROPE_BUFFERS < slice.tiles) release(base + L::ROPE_EMPTY + 8 * (tile % ROPE_BUFFERS), a.pair, lane);
  }

  /* The score that weights refer to, and what a new one leaves of the sums. It stays while weights keep below 2^8: each change
   * is a pass over all sums. */
  __device__ __forceinline__ void find_largest(int tile, float (&s)[TILE / 2])
  {
    /* rows past the end never count, whatever they hold */
    const int valid = slice.left - tile * TILE;
    if (valid < TILE) {
#pragma unroll
      for (int i = 0; i < TILE / 2; i++)
        if (8 * (i / 4) + 2 * (lane % 4) + i % 2 >= valid) s[i] = -INFINITY;
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float top[TILE / 8];
#pragma unroll
      for (int j = 0; j < TILE / 8; j++) top[j] = fmaxf(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]);
#pragma unroll
      for (int step = TILE / 16; step > 0; step /= 2)
#pragma unroll
        for (int j = 0; j < step; j++) top[j] = fmaxf(top[j], top[j + step]);
      const float before = m[h];
      const float most = quad_max(top[0]) * a.scale_log2;
      if (most > before + 8.0f) m[h] = most; /* the first: from -1e30 */
      keep[h] = exp2f(before - m[h]);
    }
  }

  /* Scores to weights, in the layout of an operand: [head][64 rows], swizzled. */
  __device__ __forceinline__ void weigh(int tile, float (&s)[TILE / 2])
  {
    const uint32_t buffer = tile & 1, use = tile >> 1;
#pragma unroll
    for (int i = 0; i < TILE / 2; i++) s[i] = weight_of(fmaf(s[i], a.scale_log2, -m[i / 2 % 2]));
    if (use > 0) barrier_wait(base + L::WEIGHTS_EMPTY + 8 * buffer, (use - 1) & 1);
    if (16 * warp < N) {
      const uint32_t row = base + L::WEIGHTS + buffer * L::WEIGHTS_BYTES + (16 * warp + lane % 16) * 128;
#pragma unroll
      for (int j = 0; j < TILE / 8; j += 2)
        store_matrices(row + (((j + lane / 16) ^ (lane % 8)) * 16), pack_pair<F16>(s[4 * j], s[4 * j + 1]),
                       pack_pair<F16>(s[4 * j + 2], s[4 * j + 3]), pack_pair<F16>(s[4 * j + 4], s[4 * j + 5]),
                       pack_pair<F16>(s[4 * j + 6], s[4 * j + 7]));
      if (lane % 4 == 0) {
        const uint32_t rescale = base + L::RESCALE + (buffer * 64 + 16 * warp + lane / 4) * 4;
        store_shared(rescale, keep[0]), store_shared(rescale + 32, keep[1]);
      }
      fence_async_shared();
    }
    barrier_arrive(base + L::WEIGHTS_FULL + 8 * buffer);
  }

  __device__ __forceinline__ void last(int tile, float (&s)[TILE / 2])
  {
    find_largest(tile, s);
    weigh(tile, s);
    add_up(s);
  }

  /* Of the weights as rounded for the products: one row alone is then returned exactly. */
  __device__ __forceinline__ void add_up(const float (&s)[TILE / 2])
  {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
      for (int j = 0; j < TILE / 8; j++) {
        const float2 pair = unpack_pair<F16>(pack_pair<F16>(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]));
        sum.x += pair.x, sum.y += pair.y;
      }
      l[h] = l[h] * keep[h] + (sum.x + sum.y);
    }
  }
};

template <int N, bool F16>
__device__ void score_tiles(const TensorArguments &a, const Slice &slice, uint32_t base, int pass, int slice_index)
{
  using L = Shared<N>;
  Scores<N, F16> scores(a, slice, base);
  const int warp = scores.warp, lane = scores.lane;

  /* 1. queries, in the order of use, and the first tile */
  k3_wait();
  if (lane == 0) { /* one by one they would take some 400 cycles to go out */
    copy_queries<N>(a, base, pass, warp);
    if (warp == 3) copy_queries<N>(a, base, pass, STAGES);
  }
  __syncwarp();
  float even[TILE / 2], odd[TILE / 2];
  scores.template start<true>(0, even, odd);
  fence_async_shared(); /* the copy engine writes there next */
  if (slice.tiles > QUERY_BUFFER)
#pragma unroll
    for (int stage = 0; stage < STAGES; stage++)
      release(base + L::EMPTY + 8 * (QUERY_BUFFER * STAGES + stage), a.pair, lane);

  /* 2. the scores of a tile while the one before is weighed */
  for (int tile = 0;; tile += 2) {
    scores.finish(tile);
    if (tile + 1 == slice.tiles) {
      scores.last(tile, even);
      break;
    }
    scores.template start<false>(tile + 1, odd, even);
    scores.finish(tile + 1);
    if (tile + 2 == slice.tiles) {
      scores.last(tile + 1, odd);
      break;
    }
    scores.template start<false>(tile + 2, even, odd);
  }

  /* 3. acc is stored divided by l, and the partial (m, l, acc) is then (m + log2 l, 1, acc / l) */
  const float sum[2] = {quad_sum(scores.l[0]), quad_sum(scores.l[1])};
#pragma unroll
  for (int h = 0; h < 2; h++)
    if (lane % 4 == 0 && 16 * warp + lane / 4 + 8 * h < N)
      store_shared(base + L::INVERSE + (16 * warp + lane / 4 + 8 * h) * 4, sum[h] == 0.0f ? 0.0f : 1.0f / sum[h]);
  barrier_arrive(base + L::INVERSE_FULL);
  if (a.pair) cluster_arrive(); /* nothing goes from block to block any more */
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int head = 16 * warp + lane / 4 + 8 * h;
    if (lane % 4 != 0 || head >= N || pass * N + head >= a.heads) continue;
    const int64_t at = (int64_t)(pass * N + head) * a.slices + slice_index;
    const bool none = sum[h] == 0.0f; /* every score -inf */
    a.m[at] = none ? K3_CUDA_EMPTY_M : scores.m[h] + log2f(sum[h]), a.l[at] = none ? 0.0f : 1.0f;
  }
}

/* 64 columns × N heads of sums, as products hold them, divided by l, to global memory by way of a box of shared memory. */
template <int N>
__device__ __forceinline__ void put_chunk(const TensorArguments &a, const float *acc, const float2 *inverse, uint32_t to, int col,
                                          int head, int slice, int warpgroup, int thread)
{
  const int warp = thread / 32, lane = thread % 32;
  const uint32_t row = to + lane % 8 * 128 + (((2 * warp + lane / 8 % 2) ^ (lane % 8)) * 16); /* a head; 8 columns */
#pragma unroll
  for (int j = 0; j < N / 8; j++)
    store_transposed(row + j * 1024, pack_pair<true>(acc[4 * j] * inverse[j].x, acc[4 * j + 1] * inverse[j].y),
                     pack_pair<true>(acc[4 * j + 2] * inverse[j].x, acc[4 * j + 3] * inverse[j].y));
  fence_async_shared();
  group_sync(SYNC_SUMS + warpgroup, 128);
  if (thread == 0) {
    copy_box_out(&a.out_map, to, col, head, slice);
    copy_out_commit();
  }
}

/* Warps 4 … 11, two warpgroups; each has 4 chunks of 64 columns. */
template <int N, bool F16>
__device__ void sum_tiles(const TensorArguments &a, const Slice &slice, uint32_t base, int pass, int slice_index,
                          int warpgroup)
{
  using L = Shared<N>;
  const int thread = threadIdx.x % 128, lane = thread % 32;
  float acc[4][N / 2];
  Ring ring;
  for (int tile = 0; tile < slice.tiles; tile++) {
    const uint32_t buffer = tile & 1;
    barrier_wait(base + L::WEIGHTS_FULL + 8 * buffer, (tile >> 1) & 1);

    /* 1. a partial last tile: rows past the end may hold NaN, and 0 · NaN is NaN */
    const int valid = slice.left - tile * TILE;
    if (valid < TILE) {
      const int units = (TILE - valid) * 8;
      for (int c = 0; c < 4; c++) {
        const uint32_t at = ring.buffer * STAGES + c / STAGE_CHUNKS * 2 + warpgroup;
        const uint32_t rows = base + L::VALUES + at * STAGE_BYTES + c % STAGE_CHUNKS * CHUNK_BYTES + valid * 128;
        for (int i = thread; i < units; i += 128) clear_shared(rows + i * 16);
      }
      fence_async_shared();
      group_sync(SYNC_SUMS + warpgroup, 128);
    }

    /* 2. earlier tiles to the new reference, if any head has one */
    if (tile > 0) {
      const uint32_t rescale = base + L::RESCALE + (buffer * 64 + 2 * (lane % 4)) * 4;
      float2 keep[N / 8];
      bool same = true;
#pragma unroll
      for (int j = 0; j < N / 8; j++) {
        keep[j] = load_shared(rescale + 32 * j);
        same = same && keep[j].x == 1.0f && keep[j].y == 1.0f;
      }
      if (!__all_sync(~0u, same))
#pragma unroll
        for (int j = 0; j < N / 8; j++)
#pragma unroll
          for (int c = 0; c < 4; c++) {
            acc[c][4 * j] *= keep[j].x, acc[c][4 * j + 1] *= keep[j].y;
            acc[c][4 * j + 2] *= keep[j].x, acc[c][4 * j + 3] *= keep[j].y;
          }
    }

    /* 3. sums; a stage is given back as soon as its products are done */
    const uint64_t weights = wgmma_operand(base + L::WEIGHTS + buffer * L::WEIGHTS_BYTES);
    const uint32_t first = ring.buffer * STAGES + warpgroup, second = first + 2;
    const auto multiply = [&](int c) {
      wgmma_begin();
      const uint64_t rows = wgmma_operand(base + L::VALUES + (c < STAGE_CHUNKS ? first : second) * STAGE_BYTES +
                                          c % STAGE_CHUNKS * CHUNK_BYTES);
#pragma unroll
      for (int k = 0; k < 4; k++)
        wgmma_transposed<N, F16>(acc[c], rows + k * (2048 >> 4), weights + 2 * k, tile + k > 0);
      wgmma_commit();
    };
    if (tile == slice.tiles - 1) {
      /* 4. out, by way of this warpgroup's stages of the tile before; each chunk during the products of the next, as a warp is held up until
       * its last products are under way */
      multiply(0), multiply(1);
      k3_wait();
      if (a.pair) cluster_arrive();
      group_sync(SYNC_SUMS + warpgroup, 128);
      const uint32_t to = base + L::VALUES + (ring.buffer + BUFFERS - 1) % BUFFERS * BUFFER_BYTES + warpgroup * STAGE_BYTES;
      barrier_wait(base + L::INVERSE_FULL, 0);
      float2 inverse[N / 8];
#pragma unroll
      for (int j = 0; j < N / 8; j++) inverse[j] = load_shared(base + L::INVERSE + (8 * j + 2 * (lane % 4)) * 4);
#pragma unroll
      for (int c = 0; c < 4; c++) {
        c < 3 ? wgmma_wait<1>() : wgmma_wait<0>();
        if (c < 2) multiply(c + 2);
        put_chunk<N>(a, acc[c], inverse, to + c / STAGE_CHUNKS * 2 * STAGE_BYTES + c % STAGE_CHUNKS * L::OUT_BOX,
                     (4 * warpgroup + c) * CHUNK_COLS, pass * N, slice_index, warpgroup, thread);
      }
      if (thread == 0) copy_out_finish();
      break;
    }
#pragma unroll
    for (int c = 0; c < 4; c++) multiply(c);
    wgmma_wait<2>();
    const bool filled_again = tile + BUFFERS < slice.tiles;
    if (filled_again) release(base + L::EMPTY + 8 * first, a.pair, lane);
    wgmma_wait<0>();
    if (filled_again) release(base + L::EMPTY + 8 * second, a.pair, lane);
    if (lane == 0) barrier_arrive(base + L::WEIGHTS_EMPTY + 8 * buffer);
    ring.advance();
  }
}

/* No rows: l = 0, m = -1e30, acc = 0. */
__device__ void empty_slice(const TensorArguments &a, int first_head, int heads, int64_t slice_index)
{
  uint16_t *acc = a.acc + (slice_index * a.heads + first_head) * LATENT;
  k3_wait();
  for (int i = threadIdx.x; i < heads * LATENT; i += BLOCK) acc[i] = 0;
  for (int i = threadIdx.x; i < heads; i += BLOCK) {
    a.m[(first_head + i) * a.slices + slice_index] = K3_CUDA_EMPTY_M;
    a.l[(first_head + i) * a.slices + slice_index] = 0.0f;
  }
}

template <int N, bool F16>
__global__ void __launch_bounds__(BLOCK, 1) mla_tensor_kernel(const __grid_constant__ TensorArguments a)
{
  using L = Shared<N>;
  extern __shared__ __align__(1024) char shared[];
  const uint32_t base = shared_address(shared);
  const int pass = (int)(blockIdx.x % (unsigned)a.passes), slice_index = (int)(blockIdx.x / (unsigned)a.passes);
  const int rank = a.pair ? blockIdx.x & 1 : 0;

  const int64_t rows = __ldcg((const long long *)a.rows);
  const int releases = a.pair ? 8 : 4;
  if (threadIdx.x == 0) { /* four warps share them */
    for (int i = 0; i < BUFFERS * STAGES; i++) barrier_init(base + L::FULL + 8 * i, 1);
    barrier_init_fence();
  } else if (threadIdx.x == 128) {
    for (int i = 0; i < BUFFERS * STAGES; i++) barrier_init(base + L::EMPTY + 8 * i, releases);
    barrier_init_fence();
  } else if (threadIdx.x == 256) {
    for (int i = 0; i < ROPE_BUFFERS; i++) {
      barrier_init(base + L::ROPE_FULL + 8 * i, 1);
      barrier_init(base + L::ROPE_EMPTY + 8 * i, releases);
    }
    for (int i = 0; i <= STAGES; i++) barrier_init(base + L::QUERY_FULL + 8 * i, 1);
    barrier_init_fence();
  } else if (threadIdx.x == 384) {
    fetch_map(&a.values_map), fetch_map(&a.rope_map), fetch_map(&a.query_map), fetch_map(&a.out_map);
    for (int i = 0; i < 2; i++) {
      barrier_init(base + L::WEIGHTS_FULL + 8 * i, 128);
      barrier_init(base + L::WEIGHTS_EMPTY + 8 * i, 8);
    }
    barrier_init(base + L::INVERSE_FULL, 128);
    barrier_init_fence();
  }
  if (a.pair) cluster_arrive();
  const int begin = (int)k3_attention_slice_begin_narrow((uint32_t)rows, TILE, (uint32_t)a.slices, (uint32_t)slice_index);
  const int end = (int)k3_attention_slice_begin_narrow((uint32_t)rows, TILE, (uint32_t)a.slices, (uint32_t)slice_index + 1);
  const Slice slice = {begin, (int)rows - begin, (end - begin + TILE - 1) / TILE};
  if (slice.tiles == 0) { /* both blocks of a pair take this way */
    if (a.pair) cluster_wait();
    empty_slice(a, pass * N, min(N, a.heads - pass * N), slice_index);
    return;
  }
  if (a.pair)
    cluster_wait();
  else
    __syncthreads();

  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0); /* roles are uniform, and the compiler must know */
  if (warpgroup == 3) {
    registers_fewer<COPY_REGISTERS>();
    if (threadIdx.x == BLOCK - 128) copy_tiles<N>(a, slice, base, rank);
    if (a.pair) cluster_arrive();
  } else if (warpgroup == 0) {
    registers_more<SCORE_REGISTERS>();
    score_tiles<N, F16>(a, slice, base, pass, slice_index);
  } else {
    sum_tiles<N, F16>(a, slice, base, pass, slice_index, warpgroup - 1);
  }
  if (a.pair) cluster_wait(); /* the other block has all that this one sent it */
}

/* Host side. */

struct Box { /* of a map of three dimensions, the first contiguous */
  CUtensorMapDataType type;
  const void *memory;
  cuuint64_t size[3], stride[2]; /* elements; bytes of the second and third dimension */
  cuuint32_t box[3];
};

K3Status make_map(CUtensorMap *map, const Box &b)
{
  typedef CUresult (*Encode)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                             const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                             CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  void *entry = NULL;
  cudaDriverEntryPointQueryResult found;
  K3_CUDA_TRY(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found));
  if (!entry || found != cudaDriverEntryPointSuccess)
    K3_FAIL(K3_ERR_DEVICE, "mla_tensor: the driver has no cuTensorMapEncodeTiled; a driver for CUDA 12 or newer is needed");
  const cuuint32_t step[3] = {1, 1, 1};
  CUresult result = ((Encode)entry)(map, b.type, 3, const_cast<void *>(b.memory), b.size, b.stride, b.box, step,
                                    CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                    CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    K3_FAIL(K3_ERR_DEVICE, "mla_tensor: cuTensorMapEncodeTiled gave %d for %llu x %llu x %llu at %p", (int)result,
            (unsigned long long)b.size[0], (unsigned long long)b.size[1], (unsigned long long)b.size[2], b.memory);
  return K3_OK;
}

CUtensorMapDataType map_type(K3CudaCacheType type)
{
  return type == K3_CACHE_F16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
}

/* 16-bit rows of C + R, cut into chunks of columns: shared memory holds chunk after chunk. */
Box box_of_rows(K3CudaCacheType type, const void *memory, int64_t rows, int64_t box_rows, int box_chunks)
{
  return Box{map_type(type),
             memory,
             {CHUNK_COLS, (cuuint64_t)rows, CHUNKS},
             {(LATENT + ROPE) * 2, CHUNK_COLS * 2},
             {CHUNK_COLS, (cuuint32_t)box_rows, (cuuint32_t)box_chunks}};
}

template <int N>
const void *kernel_of(K3CudaCacheType type)
{
  return type == K3_CACHE_F16 ? (const void *)mla_tensor_kernel<N, true> : (const void *)mla_tensor_kernel<N, false>;
}

K3Status find_kernel(int64_t width, K3CudaCacheType type, const void **kernel, size_t *shared)
{
  switch (width) {
  case 16: *kernel = kernel_of<16>(type), *shared = Shared<16>::BYTES; return K3_OK;
  case 24: *kernel = kernel_of<24>(type), *shared = Shared<24>::BYTES; return K3_OK;
  case 48: *kernel = kernel_of<48>(type), *shared = Shared<48>::BYTES; return K3_OK;
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
  K3_TRY(make_map(&arguments.values_map, box_of_rows(s->cache_type, s->cache, s->capacity, TILE, STAGE_CHUNKS)));
  K3_TRY(make_map(&arguments.rope_map, box_of_rows(s->cache_type, s->cache, s->capacity, TILE, 1)));
  const cuuint64_t head_bytes = LATENT * 2;
  K3_TRY(make_map(&arguments.out_map, Box{map_type(k3_cuda_partial_type(1)),
                                          s->acc,
                                          {LATENT, (cuuint64_t)s->heads, (cuuint64_t)s->slices},
                                          {head_bytes, head_bytes * (cuuint64_t)s->heads},
                                          {CHUNK_COLS, (cuuint32_t)s->heads_per_pass, 1}}));
  const int64_t passes = (s->heads + s->heads_per_pass - 1) / s->heads_per_pass;
  if (s->heads > INT32_MAX || passes * s->slices > INT32_MAX || s->slices > UINT32_MAX / ((s->capacity + TILE - 1) / TILE))
    K3_FAIL(K3_ERR_INPUT, "mla_tensor: %lld slices of %lld heads are too many for a grid", (long long)s->slices,
            (long long)s->heads);
  arguments.heads = (int)s->heads, arguments.passes = (int)passes;
  arguments.slices = s->slices;
  arguments.rows = s->rows;
  arguments.scale_log2 = (float)(s->scale * 1.4426950408889634);
  Box queries = box_of_rows(s->cache_type, s->query, s->heads, s->heads_per_pass, 1);
  K3_TRY(make_map(&arguments.query_map, queries));
  arguments.acc = (uint16_t *)s->acc, arguments.m = s->m, arguments.l = s->l;
  arguments.pair = passes % 2 == 0 && !s->apart;
  void *parameters[] = {&arguments};
  return k3_cuda_launch_kernel(launch, "mla_tensor_kernel", kernel, (unsigned)(passes * s->slices), BLOCK,
                               arguments.pair ? 2 : 1, shared, parameters);
}
