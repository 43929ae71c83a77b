/* The matrix-vector core: a block's rows streamed through a ring of registers. Layer: backend (CUDA), device code.
 *
 * The work of a block is a range of rows, cut into steps: one step = one 16-byte load a lane. A row takes `chunks` steps
 * of `lanes` lanes, and a warp does 32/lanes rows at a time. The steps of all rows stand in one line that is dealt
 * evenly to the warps, so that rows need not divide by anything; a row that two warps share is summed in shared
 * memory, in warp order (the same result every time). Each lane keeps DEPTH loads in flight, from before the wait
 * for the predecessor where the weights are known by then. */
#ifndef K3_KERNELS_GEMV_CUH
#define K3_KERNELS_GEMV_CUH

#include "kernels/dot.cuh"
#include "kernels/input.h"
#include "kernels/quantise.cuh"

namespace k3 {

/* How pieces of rows meet lanes. */
struct Tiling {
  int pieces;     /* of a row */
  int lanes;      /* of a row: power of two */
  int lanes_log;
  int chunks;     /* steps of a row */
};

/* The widest tiling that a narrower one does not beat by an eighth. */
static __host__ __device__ inline Tiling tiling_of(int pieces)
{
  Tiling t{pieces, 32, 5, (pieces + 31) / 32};
  int slots = t.chunks * 32;
  for (int log = 4; log >= 0; log--) {
    int chunks = (pieces + (1 << log) - 1) >> log;
    if ((chunks << log) * 8 <= slots * 7) {
      slots = chunks << log;
      t = Tiling{pieces, 1 << log, log, chunks};
    }
  }
  return t;
}

/* Shared floats for the row sums of `rows` rows (at most this many by a block at once). */
static __host__ __device__ inline int segment_floats(int rows, int lanes, int warps)
{
  int rows_step = 32 / lanes;
  return ((rows + rows_step - 1) / rows_step + warps) * rows_step;
}

/* Values of a row that a lane takes at a time, of the formats that are no GGUF blocks. */
static inline int piece_values(K3Type type)
{
  static const int values[K3_TYPE_COUNT] = {4, 8, 16, 32, 128, 8};
  return values[type];
}

/* n / d with magic_of(d) = 2^32 / d + 1 (0 stands for d = 1): exact for n · d < 2^32, else one too much at most. */
static __device__ __forceinline__ int divide(int n, uint32_t magic) { return magic ? (int)__umulhi((uint32_t)n, magic) : n; }
static inline uint32_t magic_of(int64_t d) { return d == 1 ? 0 : (uint32_t)((1ull << 32) / (uint64_t)d + 1); }

/* Rows as they stand. */
struct PlainMap {
  enum { SORTED = 0 };
  Parts parts;
  int pieces;
  __device__ __forceinline__ const Parts &of_pair(int) const { return parts; }
  template <class F>
  __device__ __forceinline__ Parts place(int row, int piece, int64_t *index) const
  {
    *index = F::index((int64_t)row, piece, pieces);
    return parts;
  }
};

template <class F, int DEPTH, class Map>
struct Gemv {
  const Map map;
  const Tiling t;
  const int row_begin, row_end;
  const int warp;
  int steps_warp, sub, lane_piece;
  int left, chunk, group;   /* to load */
  typename F::Raw ring[DEPTH];

  /* This warp among those that share the rows: of a whole block unless said. */
  __device__ __forceinline__ Gemv(const Map &m, const Tiling &tiling, int begin, int end, int its_warp = threadIdx.x >> 5,
                                  int warps = blockDim.x >> 5)
      : map(m), t(tiling), row_begin(begin), row_end(end), warp(its_warp)
  {
    int lane = threadIdx.x & 31;
    sub = lane >> t.lanes_log;
    lane_piece = lane & (t.lanes - 1);
    int steps = groups() * t.chunks;
    steps_warp = (steps + warps - 1) / warps;
    int first = min(warp * steps_warp, steps);
    left = min(first + steps_warp, steps) - first;
    group = first / t.chunks;
    chunk = first - group * t.chunks;
  }

  __device__ __forceinline__ int groups() const
  {
    int rows_log = 5 - t.lanes_log;
    return (row_end - row_begin + (1 << rows_log) - 1) >> rows_log;
  }

  /* Lanes past the row or the last row repeat a neighbour's load and are left out of the sum: a branch here would make
   * the warp wait for the load in the middle of the ring. */
  __device__ __forceinline__ void load_next(typename F::Raw *raw, int *load_chunk, int *load_group) const
  {
    int row = row_begin + (*load_group << (5 - t.lanes_log)) + sub, piece = (*load_chunk << t.lanes_log) + lane_piece;
    int64_t index;
    Parts parts = map.template place<F>(min(row, row_end - 1), min(piece, t.pieces - 1), &index);
    *raw = F::load(parts, index);
    if (++*load_chunk == t.chunks) {
      *load_chunk = 0;
      ++*load_group;
    }
  }

  __device__ __forceinline__ void flush(float sum, int at_group, float *segments) const
  {
    for (int o = t.lanes >> 1; o; o >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, o);
    if (lane_piece == 0) segments[((at_group + warp) << (5 - t.lanes_log)) + sub] = sum;
  }

  /* The first loads, which need nothing but weights. */
  int load_chunk, load_group;
  __device__ __forceinline__ void preload()
  {
    load_chunk = chunk;
    load_group = group;
#pragma unroll
    for (int i = 0; i < DEPTH; i++) {
      if (i < left) load_next(&ring[i], &load_chunk, &load_group);
      else ring[i] = F::zero();
    }
  }

  /* Row sums to `segments`. */
  __device__ __forceinline__ void run(const SharedInput &in, float *segments)
  {
    float sum = 0;
    for (int u = 0; u < left; u += DEPTH) {
#pragma unroll
      for (int i = 0; i < DEPTH; i++) {
        if (u + i >= left) break;
        int piece = (chunk << t.lanes_log) + lane_piece;
        float part = F::dot(ring[i], F::load_x(in, min(piece, t.pieces - 1)), in);
        sum += piece < t.pieces ? part : 0.0f;
        if (u + i + DEPTH < left) load_next(&ring[i], &load_chunk, &load_group);
        if (++chunk == t.chunks) {
          flush(sum, group, segments);
          sum = 0;
          chunk = 0;
          group++;
        }
      }
    }
    if (chunk && left) flush(sum, group, segments);
  }

  /* The sum of row row_begin + i, after a block barrier behind run(). */
  __device__ __forceinline__ float row_sum(const float *segments, int i) const
  {
    int rows_log = 5 - t.lanes_log, g = i >> rows_log, s = i & ((1 << rows_log) - 1);
    int first = g * t.chunks / steps_warp, last = ((g + 1) * t.chunks - 1) / steps_warp;
    float sum = 0;
    for (int w = first; w <= last; w++) sum += segments[((g + w) << rows_log) + s];
    return sum;
  }
};

/* Block sum, the same in every thread; scratch [33]. */
static __device__ __forceinline__ float block_sum(float v, float *scratch)
{
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
#pragma unroll
  for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(0xffffffffu, v, o);
  if (lane == 0) scratch[warp] = v;
  __syncthreads();
  if (warp == 0) {
    v = lane < warps ? scratch[lane] : 0.0f;
#pragma unroll
    for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(0xffffffffu, v, o);
    if (lane == 0) scratch[32] = v;
  }
  __syncthreads();
  return scratch[32];
}

/* The codes of four neighbours, byte by byte. */
struct Codes4 {
  uint32_t high, low;
};

/* Four neighbouring values of this thread, a block of 32 over 8 lanes; *scale is the block's; summed: *sum is
 * scale · Σ codes. */
static __device__ __forceinline__ Codes4 quantise4(const float v[4], bool summed, float *scale, float *sum)
{
  float most = max_nan(max_nan(fabsf(v[0]), fabsf(v[1])), max_nan(fabsf(v[2]), fabsf(v[3])));
#pragma unroll
  for (int o = 4; o; o >>= 1) most = max_nan(most, __shfl_xor_sync(0xffffffffu, most, o));
  float factor = code_factor(most);
  int code[4];
#pragma unroll
  for (int k = 0; k < 4; k++) code[k] = code_of(v[k], factor);
  *scale = code_scale(most);
  *sum = 0.0f;
  if (summed) {
    int total = code[0] + code[1] + code[2] + code[3];
#pragma unroll
    for (int o = 4; o; o >>= 1) total += __shfl_xor_sync(0xffffffffu, total, o);
    *sum = *scale * (float)total;
  }
  Codes4 c;
  c.high = high_of(code[0]) | high_of(code[1]) << 8 | high_of(code[2]) << 16 | (uint32_t)high_of(code[3]) << 24;
  c.low = low_of(code[0]) | low_of(code[1]) << 8 | low_of(code[2]) << 16 | (uint32_t)low_of(code[3]) << 24;
  return c;
}

/* tanh without a branch, to 4e-7 of itself: a polynomial of our own fit up to 0.55, 1 - 2 / (1 + e^2x) beyond. */
static __device__ __forceinline__ float fast_tanh(float x)
{
  const float a = fabsf(x), s = x * x;
  const float small = fmaf(fmaf(fmaf(fmaf(0.01643446f, s, -0.05266952f), s, 0.13320671f), s, -0.33332943f) * s, x, x);
  const float large = copysignf(1.0f - __fdividef(2.0f, 1.0f + __expf(2.0f * a)), x);
  return a < 0.55f ? small : large;
}

static __device__ __forceinline__ float situ(float g, float u, float beta, float linear_beta)
{
  return __fdividef(beta * fast_tanh(__fdividef(g, beta)), 1.0f + __expf(-g)) * (linear_beta * fast_tanh(__fdividef(u, linear_beta)));
}

enum { BOOK_COPIES = 16, BOOK_BYTES = BOOK_COPIES * K3_CODEBOOK_ENTRIES * 2 };

/* Parts of a block's dynamic shared memory, in bytes from its start; -1: absent. */
struct SharedPlan {
  int codes, low, scales, sums, values, codebook, segments, bytes;
};

static inline int take(int *at, int64_t bytes)
{
  int begin = *at;
  *at += (int)((bytes + 127) / 128 * 128);
  return begin;
}

/* The plan of one input whose parts begin at `at`. */
static inline SharedPlan plan_shared(int at, int64_t n, int codes, int floats, int book, int segments)
{
  SharedPlan p;
  int64_t padded = (n + 127) / 128 * 128;
  p.codebook = book ? take(&at, codes ? BOOK_BYTES : K3_CODEBOOK_ENTRIES * 2) : -1;
  p.codes = codes ? take(&at, padded) : -1;
  p.low = codes ? take(&at, padded + 64) + 64 : -1; /* in other banks than the cells of `codes` that are read with it */
  p.scales = codes ? take(&at, padded / 8) : -1;
  p.sums = codes ? take(&at, padded / 8) : -1;
  p.values = floats ? take(&at, padded * 4) : -1;
  p.segments = take(&at, (int64_t)segments * 4);
  p.bytes = at;
  return p;
}

static __device__ __forceinline__ SharedInput shared_input(char *memory, const SharedPlan &p)
{
  SharedInput in;
  in.high = p.codes >= 0 ? (int4 *)(memory + p.codes) : nullptr;
  in.low = p.codes >= 0 ? (int4 *)(memory + p.low) : nullptr;
  in.scales = p.codes >= 0 ? (float *)(memory + p.scales) : nullptr;
  in.sums = p.codes >= 0 ? (float *)(memory + p.sums) : nullptr;
  in.values = p.values >= 0 ? (float4 *)(memory + p.values) : nullptr;
  in.codebook = p.codebook >= 0 ? (uint32_t *)(memory + p.codebook) : nullptr;
  return in;
}

/* The codebook never changes: before the wait. A block barrier must follow. Beside codes (mma_rows.cuh) each two lanes of a warp have
 * a copy in two banks of their own: a line of 128 bytes holds the four entries of qs and bit 2 of the rest eight times two times,
 * and the lines stand in the order of qs as a signed byte. */
static __device__ __forceinline__ void fill_codebook(const SharedInput &in, const uint32_t *codebook)
{
  if (!in.codebook || !codebook) return;
  if (!in.high) {
    for (int i = threadIdx.x; i < K3_CODEBOOK_ENTRIES / 8; i += blockDim.x) ((uint4 *)in.codebook)[i] = ((const uint4 *)codebook)[i];
    return;
  }
#pragma unroll 8
  for (int i = threadIdx.x; i < BOOK_BYTES / 16; i += blockDim.x) {
    uint2 four = ((const uint2 *)codebook)[i >> 3 ^ 256];
    ((uint4 *)in.codebook)[i] = make_uint4(four.x, four.x, four.y, four.y);
  }
}

/* The same in two parts, by THREADS threads of which this is number t (whole warps): 64 lines a warp, of which each lane loads two. */
template <int THREADS>
struct Book {
  enum { LINES = K3_CODEBOOK_ENTRIES / 4, STEP = THREADS / 8, ROUNDS = LINES / STEP };
  uint2 mine[ROUNDS / 8];
  static __device__ __forceinline__ int line(int t, int lane, int k) { return (t >> 5) * 4 + (lane & 3) + STEP * (8 * k + (lane >> 2)); }
  __device__ __forceinline__ void load(const uint32_t *codebook, int t)
  {
#pragma unroll
    for (int k = 0; k < ROUNDS / 8; k++) mine[k] = __ldg((const uint2 *)codebook + line(t, t & 31, k));
  }
  __device__ __forceinline__ void store(const SharedInput &in, int t)
  {
    if (!in.high) { /* one copy */
#pragma unroll
      for (int k = 0; k < ROUNDS / 8; k++) ((uint2 *)in.codebook)[line(t, t & 31, k)] = mine[k];
      return;
    }
#pragma unroll
    for (int k = 0; k < ROUNDS / 8; k++)
#pragma unroll 4
      for (int i = 0; i < 8; i++) {
        const int from = i * 4 + ((t & 31) >> 3);
        const uint32_t low = __shfl_sync(0xffffffffu, mine[k].x, from), high = __shfl_sync(0xffffffffu, mine[k].y, from);
        ((uint4 *)in.codebook)[((t >> 3) + STEP * (8 * k + i) ^ 256) * 8 + (t & 7)] = make_uint4(low, low, high, high);
      }
  }
};

/* Four values at i … i+3 from L2; beyond `n`: 0. */
static __device__ __forceinline__ void fetch4(const float *from, int i, int n, float v[4])
{
  if (i + 4 <= n && ((uintptr_t)from & 15) == 0) { /* i is a multiple of four */
    float4 f = __ldcg((const float4 *)(from + i));
    v[0] = f.x, v[1] = f.y, v[2] = f.z, v[3] = f.w;
  } else {
#pragma unroll
    for (int k = 0; k < 4; k++) v[k] = i + k < n ? __ldcg(from + i + k) : 0.0f;
  }
}

/* Cell `cell` of a vector of n values from the L2, beyond it 0. Volatile: where it stands, with the others and ahead of their uses. */
static __device__ __forceinline__ float4 fetch_cell(const float *from, int cell, int n)
{
  float4 v = make_float4(0, 0, 0, 0);
  asm volatile("{ .reg .pred there; setp.lt.s32 there, %4, %5;\n"
               "@there ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%6]; }"
               : "+f"(v.x), "+f"(v.y), "+f"(v.z), "+f"(v.w)
               : "r"(4 * cell), "r"(n), "l"(from + 4 * cell));
  return v;
}

/* Stores four values (all lanes of a warp together) into the shared input, quantised if it has codes. */
static __device__ __forceinline__ void put4(const SharedInput &in, int i, const float v[4])
{
  if (in.values) in.values[cell(i >> 2)] = make_float4(v[0], v[1], v[2], v[3]);
  if (in.high) {
    float scale, sum;
    Codes4 codes = quantise4(v, in.codebook != nullptr, &scale, &sum);
    int at = cell(i >> 4) * 4 + ((i >> 2) & 3);
    ((uint32_t *)in.high)[at] = codes.high;
    ((uint32_t *)in.low)[at] = codes.low;
    if ((threadIdx.x & 7) == 0) {
      in.scales[i >> 5] = scale;
      if (in.codebook) in.sums[i >> 5] = sum; /* the sums serve iq1_s alone */
    }
  }
}

/* The same of one value a thread, a block of 32 over a warp: where making the value is long. */
static __device__ __forceinline__ void put1(const SharedInput &in, int i, float v)
{
  if (in.values) ((float *)(in.values + cell(i >> 2)))[i & 3] = v;
  if (in.high) {
    float most = fabsf(v);
#pragma unroll
    for (int o = 16; o; o >>= 1) most = max_nan(most, __shfl_xor_sync(0xffffffffu, most, o));
    int code = code_of(v, code_factor(most));
    ((int8_t *)(in.high + cell(i >> 4)))[i & 15] = (int8_t)high_of(code);
    ((int8_t *)(in.low + cell(i >> 4)))[i & 15] = (int8_t)low_of(code);
    if (in.codebook) {
#pragma unroll
      for (int o = 16; o; o >>= 1) code += __shfl_xor_sync(0xffffffffu, code, o);
    }
    if ((threadIdx.x & 31) == 0) {
      in.scales[i >> 5] = code_scale(most);
      if (in.codebook) in.sums[i >> 5] = code_scale(most) * (float)code;
    }
  }
}

/* The fills below issue all loads of a round before the first use: each would cost an L2 access in turn otherwise. */

/* The weights of fill_rms, which never change, towards the L2 before the wait. */
static __device__ __forceinline__ void warm_norm(const K3CudaInput &input)
{
  for (int i = threadIdx.x * 32; i < (int)input.n; i += blockDim.x * 32)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(input.norm + input.offset + i));
}

/* The normalised part of a longer vector. */
static __device__ __forceinline__ void fill_rms(const K3CudaInput &input, const SharedInput &in, float *scratch)
{
  int n = (int)input.n, full = (int)input.full, padded = (n + 127) / 128 * 128, i = threadIdx.x * 4, round = blockDim.x * 4;
  const float *from = input.vector.values + input.offset, *norm = input.norm + input.offset;
  float v[4], w[4], sum = 0;
  fetch4(from, i, n, v);
  fetch4(norm, i, n, w);
  for (int j = threadIdx.x * 4; j < full; j += 2 * round) {
    float a[4], b[4];
    fetch4(input.vector.values, j, full, a);
    fetch4(input.vector.values, j + round, full, b);
#pragma unroll
    for (int k = 0; k < 4; k++) sum = fmaf(a[k], a[k], fmaf(b[k], b[k], sum));
  }
  float scale = 1.0f / sqrtf(block_sum(sum, scratch) / (float)full + input.eps);
  while (i < padded) {
#pragma unroll
    for (int k = 0; k < 4; k++) v[k] = v[k] * scale * w[k];
    put4(in, i, v);
    i += round;
    if (i >= padded) break;
    fetch4(from, i, n, v);
    fetch4(norm, i, n, w);
  }
}

/* What is quantised already. */
static __device__ __forceinline__ void fill_quantised(const K3CudaInput &input, const SharedInput &in)
{
  int n = (int)input.n, blocks = n / 32;
  if (in.high) {
    const int4 *high = (const int4 *)input.vector.codes, *low = high + 2 * blocks;
    int i = threadIdx.x;
    float scale = i < blocks ? __ldcg(input.vector.scales + i) : 0.0f;
    for (; i < 2 * blocks; i += blockDim.x) {
      int4 h = __ldcg(high + i), l = __ldcg(low + i);
      in.high[cell(i)] = h;
      in.low[cell(i)] = l;
    }
    for (i = threadIdx.x; i < blocks; i += blockDim.x)
      in.scales[i] = i == (int)threadIdx.x ? scale : __ldcg(input.vector.scales + i);
    if (in.codebook)
      for (i = threadIdx.x; i < blocks; i += blockDim.x) {
        int sum[2] = {0, 0};
#pragma unroll
        for (int p = 0; p < 2; p++) {
          int4 a = __ldcg((p ? low : high) + 2 * i), b = __ldcg((p ? low : high) + 2 * i + 1);
#pragma unroll
          for (int k = 0; k < 4; k++) sum[p] = __dp4a(word(b, k), 0x01010101, __dp4a(word(a, k), 0x01010101, sum[p]));
        }
        in.sums[i] = __ldcg(input.vector.scales + i) * both(sum[0], sum[1]);
      }
  }
  if (in.values)
    for (int i = threadIdx.x * 4; i < (n + 127) / 128 * 128; i += blockDim.x * 4) {
      float v[4];
      fetch4(input.vector.values, i, n, v);
      in.values[cell(i >> 2)] = make_float4(v[0], v[1], v[2], v[3]);
    }
}

static __device__ __forceinline__ void fill_values(const K3CudaInput &input, const SharedInput &in)
{
  int n = (int)input.n, padded = (n + 127) / 128 * 128;
  for (int i = threadIdx.x * 4; i < padded; i += blockDim.x * 4) {
    float v[4];
    fetch4(input.vector.values, i, n, v);
    put4(in, i, v);
  }
}

/* values and up at i and a block's width on, for fill_situ: may be issued long before it. */
static __device__ __forceinline__ void fetch_situ(const K3CudaInput &input, int i, float held[2][2])
{
#pragma unroll
  for (int k = 0; k < 2; k++) {
    int at = i + k * (int)blockDim.x;
    held[k][0] = at < input.n ? __ldcg(input.vector.values + at) : 0.0f;
    held[k][1] = at < input.n ? __ldcg(input.up + at) : 0.0f;
  }
}

/* situ(values, up); `held`: fetch_situ at threadIdx.x. */
static __device__ __forceinline__ void fill_situ(const K3CudaInput &input, const SharedInput &in, float held[2][2])
{
  int padded = ((int)input.n + 127) / 128 * 128;
  for (int i = threadIdx.x; i < padded; i += 2 * blockDim.x) {
    if (i != (int)threadIdx.x) fetch_situ(input, i, held);
#pragma unroll
    for (int k = 0; k < 2; k++) {
      int at = i + k * (int)blockDim.x;
      if (at < padded) put1(in, at, situ(held[k][0], held[k][1], input.situ_beta, input.situ_linear_beta));
    }
  }
}

/* Prepares the input in shared memory; after the wait. scratch [33]. A block barrier must follow. */
static __device__ inline void fill_input(const K3CudaInput &input, const SharedInput &in, float *scratch)
{
  if (input.kind == K3_INPUT_QUANTISED) fill_quantised(input, in);
  else if (input.kind == K3_INPUT_RMS) fill_rms(input, in, scratch);
  else if (input.kind == K3_INPUT_SITU) {
    float held[2][2];
    fetch_situ(input, threadIdx.x, held);
    fill_situ(input, in, held);
  } else fill_values(input, in);
}

} /* namespace k3 */
#endif
