/* Rows of GGUF blocks times a vector: the core of linear_blocks.cu and experts_blocks.cu. Layer: backend (CUDA), device code.
 *
 * What a block's bits mean stands in plan/blocks.h, the host's too; here is only the traffic. A lane takes one unit (32 or 64
 * values) of two rows, the same unit of each block it comes to, so that the activation is read from shared memory once for both; 8, 16 or 32 lanes take a pair of rows
 * in `chunks` steps. The steps of all pairs stand in one line that is dealt evenly to the warps, as in gemv.cuh. Integer
 * activations: dp4a with both bytes of the 16-bit codes (quantise.cuh); an offset meets the sum of 16 codes. Exact: float32.
 * Codebooks lie in shared memory, small ones in as many copies as there are banks: random look-ups then never collide.
 * Twin: src/host/matrix.c. */
#ifndef K3_KERNELS_BLOCKS_CUH
#define K3_KERNELS_BLOCKS_CUH

#include "kernels/gemv.cuh"
#include "kernels/wait.cuh"
#include "plan/blocks.h"

namespace k3 {

enum { BLOCK_THREADS = 512, BLOCK_ANY = -1 /* in the place of a type: the type is an argument */ };

/* Copies of the packed codebook and of its sign selectors in shared memory, a power of two. */
static __host__ __device__ constexpr int grid_copies(int type)
{
  return type == K3_TYPE_IQ2_XXS || type == K3_TYPE_IQ2_XS || type == K3_TYPE_IQ3_XXS ? 32 : type == K3_TYPE_IQ2_S ? 16
         : type == K3_TYPE_IQ1_M ? 8 : 1;
}
static __host__ __device__ constexpr int sign_copies(int type)
{
  return type == K3_TYPE_IQ2_XXS || type == K3_TYPE_IQ2_XS || type == K3_TYPE_IQ3_XXS || type == K3_TYPE_IQ2_S ? 32 : 1;
}
/* Pairs of units in flight a lane: what keeps about 40 KB a multiprocessor on the way. */
static __host__ __device__ constexpr int block_depth(int type)
{
  return type == BLOCK_ANY || type == K3_TYPE_Q6_K || type == K3_TYPE_Q5_K || type == K3_TYPE_Q3_K || type == K3_TYPE_Q4_K ||
             type == K3_TYPE_IQ4_XS ? 1 : 2;
}

/* The plan of a launch over one matrix type: the input (gemv.cuh), then what blocks need. */
struct BlockPlan {
  SharedPlan input;
  int sums, book, bytes;
  int grid_words, sign_words;
  Tiling tiling;
};

struct BlockShared {
  SharedInput in;
  float *sums;    /* scale * sum of the codes; only where the type has offsets (fill_sums) */
  uint32_t *book;
  float *segments;
};

/* A matrix as an array of blocks, counted from its first row's first (fewer than 2^32). */
struct BlockMatrix {
  const uint8_t *codes, *high, *scale;
  uint32_t codes_bytes, high_bytes, scale_bytes;
  int units_log; /* of a block */
  __device__ __forceinline__ K3BlockParts place(uint32_t block) const
  {
    return K3BlockParts{codes + (uint64_t)block * codes_bytes, high + (uint64_t)block * high_bytes,
                        scale + (uint64_t)block * scale_bytes};
  }
};

template <int TYPE>
static __device__ __forceinline__ K3Type type_of(K3Type type)
{
  return TYPE == BLOCK_ANY ? type : (K3Type)TYPE;
}

template <int TYPE, bool EXACT, class Map>
struct BlockPairs {
  enum { DEPTH = block_depth(TYPE) };
  struct Raw {
    uint32_t word[2][K3_BLOCK_WORDS];
  };
  const Map map;
  const K3Type type;
  const Tiling t; /* pieces: units of a row */
  const int pair_begin, pair_end;
  int steps_warp, warp, sub, lane_piece;
  int unit, units_log; /* of this lane: the same in all its blocks */
  int left, chunk, group;
  int load_chunk, load_group;
  Raw ring[DEPTH];

  __device__ __forceinline__ BlockPairs(const Map &m, K3Type matrix_type, int log_units, const Tiling &tiling, int begin, int end)
      : map(m), type(type_of<TYPE>(matrix_type)), t(tiling), pair_begin(begin), pair_end(end), units_log(log_units)
  {
    int lane = threadIdx.x & 31, warps = blockDim.x >> 5, rows_log = 5 - t.lanes_log;
    warp = threadIdx.x >> 5;
    sub = lane >> t.lanes_log;
    lane_piece = lane & (t.lanes - 1);
    unit = lane_piece & ((1 << units_log) - 1);
    int steps = ((end - begin + (1 << rows_log) - 1) >> rows_log) * t.chunks;
    steps_warp = max(1, (steps + warps - 1) / warps);
    int first = min(warp * steps_warp, steps);
    left = min(first + steps_warp, steps) - first;
    group = first / t.chunks;
    chunk = first - group * t.chunks;
  }

  /* The block of a row that this lane takes in step `at`; lanes past the row take its last. */
  __device__ __forceinline__ int block_of(int at) const
  {
    return min((at << t.lanes_log) + lane_piece, t.pieces - 1) >> units_log;
  }

  /* Lanes past the row or the last pair repeat a neighbour's load and are left out of the sum. */
  __device__ __forceinline__ void load_next(Raw *raw)
  {
    int pair = min(pair_begin + (load_group << (5 - t.lanes_log)) + sub, pair_end - 1), block = block_of(load_chunk);
    K3BlockParts parts[2];
    map.place(pair, block, parts);
#pragma unroll
    for (int m = 0; m < 2; m++) k3_block_fetch(type, parts[m], unit, raw->word[m]);
    if (++load_chunk == t.chunks) {
      load_chunk = 0;
      ++load_group;
    }
  }

  __device__ __forceinline__ void preload()
  {
    load_chunk = chunk;
    load_group = group;
#pragma unroll
    for (int i = 0; i < DEPTH; i++)
      if (i < left) load_next(&ring[i]);
  }

  /* Both rows' units times x, in float32. */
  __device__ __forceinline__ void multiply_exact(const Raw &raw, int first, int step, const BlockShared &s, const K3BlockBook &book,
                                                 float sum[2]) const
  {
#pragma unroll
    for (int r = 0; r < 4; r++) {
      if (r >= k3_block_runs(type)) break;
      const int at = first + step * r;
      float4 x[4];
      float all = 0;
#pragma unroll
      for (int k = 0; k < 4; k++) {
        x[k] = s.in.values[cell(4 * at + k)];
        all += (x[k].x + x[k].y) + (x[k].z + x[k].w);
      }
#pragma unroll
      for (int m = 0; m < 2; m++) {
        K3BlockRun run;
        k3_block_decode(type, raw.word[m], unit, r, &book, &run);
        float part = 0;
#pragma unroll
        for (int k = 0; k < 4; k++) {
          const int w = (int)run.code[k];
          part = dot4(x[k], (float)(int8_t)w, (float)(int8_t)(w >> 8), (float)(int8_t)(w >> 16), (float)(w >> 24), part);
        }
        sum[m] = fmaf(run.scale, part, sum[m]);
        if (k3_block_has_offset(type)) sum[m] = fmaf(run.offset, all, sum[m]);
      }
    }
  }

  /* The same with the 16-bit codes of x. The cells of a unit's runs differ in their lowest bits alone, so that one swizzle
   * serves all; runs of one scale are summed as integers. */
  __device__ __forceinline__ void multiply_codes(const Raw &raw, int first, int step, const BlockShared &s, const K3BlockBook &book,
                                                 float sum[2]) const
  {
    const int runs = k3_block_runs(type), from = cell(first);
    const bool wide = k3_block_wide(type), offsets = k3_block_has_offset(type);
    float scale[4], all[4] = {0, 0, 0, 0};
    unit_floats(s.in.scales, first >> 1, runs, wide || !k3_block_strided(type), scale);
    if (offsets) unit_floats(s.sums, wide ? first >> 1 : (first & ~7) | (first & 1) << 2, runs, wide, all);
    int a[2] = {0, 0}, b[2] = {0, 0};
#pragma unroll
    for (int r = 0; r < 4; r++) {
      if (r >= runs) break;
      const int4 high = s.in.high[from ^ (step * r)], low = s.in.low[from ^ (step * r)];
#pragma unroll
      for (int m = 0; m < 2; m++) {
        K3BlockRun run;
        k3_block_decode(type, raw.word[m], unit, r, &book, &run);
#pragma unroll
        for (int k = 0; k < 4; k++) {
          a[m] = __dp4a((int)run.code[k], word(high, k), a[m]);
          b[m] = __dp4a((int)run.code[k], word(low, k), b[m]);
        }
        if (wide && !(r & 1)) continue;
        sum[m] = fmaf(both(a[m], b[m]), run.scale * scale[r], sum[m]);
        if (offsets) sum[m] = fmaf(run.offset, all[r], sum[m]);
        a[m] = b[m] = 0;
      }
    }
  }

  /* One float a run from `from` on; paired: one for two runs. */
  __device__ __forceinline__ static void unit_floats(const float *from, int at, int runs, bool paired, float v[4])
  {
    if (paired && runs == 4) {
      float2 two = *(const float2 *)(from + at);
      v[0] = v[1] = two.x, v[2] = v[3] = two.y;
    } else if (paired) {
      v[0] = v[1] = v[2] = v[3] = from[at];
    } else {
      float4 four = *(const float4 *)(from + at);
      v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
    }
  }

  __device__ __forceinline__ void flush(float sum[2], int at_group, float *segments) const
  {
    for (int o = t.lanes >> 1; o; o >>= 1) {
      sum[0] += __shfl_xor_sync(0xffffffffu, sum[0], o);
      sum[1] += __shfl_xor_sync(0xffffffffu, sum[1], o);
    }
    if (lane_piece == 0)
      ((float2 *)segments)[((at_group + warp) << (5 - t.lanes_log)) + sub] = make_float2(sum[0], sum[1]);
    sum[0] = sum[1] = 0;
  }

  /* Sums of the rows to the segments. */
  __device__ __forceinline__ void run(const BlockShared &s)
  {
    const int lane = threadIdx.x & 31;
    K3BlockBook book;
    uint32_t grid_at = 4 * (lane & (grid_copies(TYPE) - 1)), sign_at = 4 * (lane & (sign_copies(TYPE) - 1));
    asm volatile("" : "+r"(grid_at), "+r"(sign_at)); /* opaque: an address is one multiply-add then */
    book.grid = (const uint32_t *)((const char *)s.book + grid_at);
    book.grid_step = 4 * grid_copies(TYPE);
    book.signs = (const uint32_t *)((const char *)(s.book + s_grid_words * grid_copies(TYPE)) + sign_at);
    book.sign_step = 4 * sign_copies(TYPE);
    uint32_t table[4]; /* sixteen values: registers */
    if (TYPE == K3_TYPE_IQ4_XS) {
#pragma unroll
      for (int i = 0; i < 4; i++) table[i] = s.book[i];
      book.grid = table;
    }
    const int cells = k3_block_runs(type) << units_log, step = k3_block_strided(type) ? 2 : 1;
    float sum[2] = {0, 0};
    for (int u = 0; u < left; u += DEPTH) {
#pragma unroll
      for (int i = 0; i < DEPTH; i++) {
        if (u + i >= left) break;
        const int first = block_of(chunk) * cells + k3_block_run_at(type, unit, 0);
        float part[2] = {0, 0};
        if (EXACT) multiply_exact(ring[i], first, step, s, book, part);
        else multiply_codes(ring[i], first, step, s, book, part);
        if ((chunk << t.lanes_log) + lane_piece < t.pieces) sum[0] += part[0], sum[1] += part[1];
        if (u + i + DEPTH < left) load_next(&ring[i]);
        if (++chunk == t.chunks) {
          flush(sum, group, s.segments);
          chunk = 0;
          group++;
        }
      }
    }
    if (chunk && left) flush(sum, group, s.segments);
  }
  int s_grid_words; /* of the packed codebook: where its signs begin */

  /* The sums of pair pair_begin + i, after a block barrier behind run(). */
  __device__ __forceinline__ float2 pair_sum(const BlockShared &s, int i) const
  {
    int rows_log = 5 - t.lanes_log, g = i >> rows_log, k = i & ((1 << rows_log) - 1);
    int first = g * t.chunks / steps_warp, last = ((g + 1) * t.chunks - 1) / steps_warp;
    float2 sum = make_float2(0, 0);
    for (int w = first; w <= last; w++) {
      float2 part = ((const float2 *)s.segments)[((g + w) << rows_log) + k];
      sum.x += part.x, sum.y += part.y;
    }
    return sum;
  }
};

/* ---- shared memory ---- */

/* The narrowest waste of lanes: 8, 16 or 32 of them a row. */
static __host__ __device__ inline Tiling block_tiling(int pieces)
{
  Tiling t{pieces, 32, 5, (pieces + 31) / 32};
  for (int log = 4; log >= 3; log--) {
    int chunks = (pieces + (1 << log) - 1) >> log;
    if (chunks << log < t.chunks * t.lanes) t = Tiling{pieces, 1 << log, log, chunks};
  }
  return t;
}

/* Floats for the sums of `pairs` pairs of rows. */
static inline int block_segment_floats(int pairs, int lanes, int warps) { return 2 * segment_floats(pairs, lanes, warps); }

/* n values of input; `segments` floats. words: of the packed codebook (grid, signs), 0 for none. */
static inline BlockPlan block_plan(K3Type type, int templated, int64_t n, int exact, int grid_words, int sign_words, int segments)
{
  BlockPlan p;
  p.input = plan_shared(0, n, !exact, exact, 0, segments);
  int at = p.input.bytes, kind = templated ? (int)type : (int)BLOCK_ANY;
  p.sums = take(&at, !exact && k3_block_has_offset(type) ? (n + 15) / 16 * 4 : 0);
  p.book = take(&at, 4 * ((int64_t)grid_words * grid_copies(kind) + (int64_t)sign_words * sign_copies(kind)));
  p.grid_words = grid_words;
  p.sign_words = sign_words;
  p.bytes = at;
  return p;
}

static __device__ __forceinline__ BlockShared block_shared(char *memory, const BlockPlan &p)
{
  BlockShared s;
  s.in = shared_input(memory, p.input);
  s.segments = (float *)(memory + p.input.segments);
  s.sums = (float *)(memory + p.sums);
  s.book = (uint32_t *)(memory + p.book);
  return s;
}

template <int COPIES>
static __device__ __forceinline__ void fill_copies(uint32_t *to, const uint32_t *from, int words)
{
  constexpr int SHARE = COPIES < 4 ? 1 : COPIES / 4;
  if (COPIES < 4) {
    for (int i = threadIdx.x; i < words; i += blockDim.x) to[i] = __ldg(from + i);
  } else {
    for (int i = threadIdx.x; i < words * SHARE; i += blockDim.x) {
      uint32_t w = __ldg(from + i / SHARE);
      ((uint4 *)to)[i] = make_uint4(w, w, w, w);
    }
  }
}

/* The codebook never changes: before the wait. A block barrier must follow. */
template <int TYPE>
static __device__ __forceinline__ void fill_book(const BlockShared &s, const BlockPlan &p, const uint32_t *book)
{
  fill_copies<grid_copies(TYPE)>(s.book, book, p.grid_words);
  fill_copies<sign_copies(TYPE)>(s.book + p.grid_words * grid_copies(TYPE), book + p.grid_words, p.sign_words);
}

/* Sums of codes times their scale, from the codes in shared memory; barriers before and after it. Wide formats: of 32 values, in
 * order; others: of 16, those of a unit's four runs side by side. */
static __device__ __forceinline__ void fill_sums(const BlockShared &s, K3Type type, int n)
{
  __syncthreads();
  if (!k3_block_has_offset(type)) return;
  const bool wide = k3_block_wide(type);
  for (int i = threadIdx.x; i < n / 16; i += blockDim.x) { /* n / 16 is even: neighbours are in one warp */
    const int4 high = s.in.high[cell(i)], low = s.in.low[cell(i)];
    int a = 0, b = 0;
#pragma unroll
    for (int k = 0; k < 4; k++) {
      a = __dp4a(word(high, k), 0x01010101, a);
      b = __dp4a(word(low, k), 0x01010101, b);
    }
    float sum = both(a, b) * s.in.scales[i >> 1];
    if (!wide) {
      s.sums[(i & ~7) | (i & 1) << 2 | (i >> 1 & 3)] = sum;
    } else {
      sum += __shfl_xor_sync(3u << (threadIdx.x & 30), sum, 1);
      if (!(i & 1)) s.sums[i >> 1] = sum;
    }
  }
  __syncthreads();
}

/* ---- host side ---- */

static inline BlockMatrix block_matrix(const K3CudaMatrix &m)
{
  const K3Format *f = k3_format(m.type);
  int units = (int)f->block_values / (k3_block_runs(m.type) * K3_BLOCK_RUN), log = 0;
  while (1 << log < units) log++;
  return BlockMatrix{(const uint8_t *)m.codes, (const uint8_t *)m.high, (const uint8_t *)m.scale, (uint32_t)f->codes.bytes,
                     (uint32_t)f->high.bytes, (uint32_t)f->scale.bytes, log};
}

static inline int block_unit_values(K3Type type) { return k3_block_runs(type) * K3_BLOCK_RUN; }

/* Element (row, col) of a matrix of blocks. */
static __device__ inline float block_element(const K3CudaMatrix &m, const BlockMatrix &blocks, int grid_words, int64_t row, int64_t col)
{
  const int runs = k3_block_runs(m.type), values = runs * K3_BLOCK_RUN << blocks.units_log, at = (int)(col % values) / K3_BLOCK_RUN;
  int unit = at / runs, r = at % runs;
  if (k3_block_strided(m.type)) unit = at / (2 * runs) * 2 + (at & 1), r = at % (2 * runs) >> 1;
  K3BlockParts parts = blocks.place((uint32_t)((row * m.cols + col) / values));
  uint32_t word[K3_BLOCK_WORDS];
  K3BlockBook book = {m.codebook, m.codebook + grid_words, 4, 4};
  K3BlockRun run;
  k3_block_fetch(m.type, parts, unit, word);
#pragma unroll
  for (int k = 0; k < 4; k++) /* a constant run: words stay in registers */
    if (k == r) k3_block_decode(m.type, word, unit, k, &book, &run);
  const int i = (int)col & 15;
  const uint32_t code = i < 8 ? i < 4 ? run.code[0] : run.code[1] : i < 12 ? run.code[2] : run.code[3];
  return __fadd_rn(__fmul_rn(run.scale, (float)(int8_t)(code >> (8 * (i & 3)))), run.offset);
}

} /* namespace k3 */
#endif
