/* Rows of iq1_s and of q8_0 on the tensor cores. Layer: backend (CUDA), device code. Twin: k3_host_dequantise; formats:
 * dot.cuh.
 *
 * A unit of work of a warp: 16 rows × 4 pieces (512 values of iq1_s, 64 of q8_0). Lane (g, t) = (lane / 4, lane % 4) loads piece t
 * of rows 2g and 2g + 1. One mma (16 × 32 by 32 × 8, bytes) takes 8 values of each lane and row: of iq1_s one codebook entry,
 * entry l of sub-block j of the lane's piece. The eight columns of B hold the activation's codes of the four pieces apart: column 2t
 * piece t's high bytes, 2t + 1 its low bytes, and zeros where k belongs to another piece. So after four mma (l = 0 … 3; two of q8_0)
 * lane (g, t) finds the sums of its own sub-block for both rows in its own registers, and scales them there. Exact in integers, as
 * dp4a is; a third of its instructions, and x is read from shared memory once for 16 rows. What remains of iq1_s is one codebook
 * look-up for 8 values: about 9 instructions and 3.5 accesses of shared memory for 32 random words. */
#ifndef K3_KERNELS_IQ1_MMA_CUH
#define K3_KERNELS_IQ1_MMA_CUH

#include "kernels/gemv.cuh"

namespace k3 {

/* c += A B: A 16 × 32 by rows, B 32 × 8 by columns, signed bytes. */
static __device__ __forceinline__ void mma_bytes(int c[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, int b0,
                                                 int b1)
{
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/* Bytes of a (0 … 3) and b (4 … 7) by the nibbles of SELECT; 8 more: its sign, 0 here. __byte_perm knows no signs. */
template <int SELECT>
static __device__ __forceinline__ uint32_t permute(uint32_t a, uint32_t b)
{
  uint32_t r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "n"(SELECT));
  return r;
}

/* (a & b) | c in one instruction: of two constants the compiler makes two. */
static __device__ __forceinline__ uint32_t and_or(uint32_t a, uint32_t b, uint32_t c)
{
  uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}

/* Shared floats for the sums of `rows` rows of `pieces` pieces. */
static __host__ __device__ inline int mma_segment_floats(int rows, int pieces)
{
  return (rows + 15) / 16 * ((pieces + 3) / 4) * 16;
}

/* Where piece `piece` of rows `row` and row + 1 lies, neither past `last`. A map of its own kind brings a place_pair. */
template <class Map>
static __device__ __forceinline__ void place_pair(const Map &map, int row, int last, int piece, Parts parts[2],
                                                  uint32_t index[2])
{
  map.place_pair(row, last, piece, parts, index);
}
static __device__ __forceinline__ void place_pair(const PlainMap &map, int row, int last, int piece, Parts parts[2],
                                                  uint32_t index[2])
{
  parts[0] = parts[1] = map.parts;
  index[0] = (uint32_t)min(row, last) * map.pieces + piece;
  index[1] = (uint32_t)min(row + 1, last) * map.pieces + piece;
}

/* The byte addresses in the codebook (fill_codebook) of the four entries of a sub-block. qh's 12 bits are spread to the four
   * bytes of `high` by two products, and a byte permutation puts each address together. */
static __device__ __forceinline__ void iq1_addresses(uint32_t qs, uint32_t qh, uint32_t at[4])
{
  const uint32_t even = (qh & 0x1c7u) * 0x1004u, odd = (qh & 0xe38u) * 0x20080u;
  const uint32_t high = ((even & 0x00ff00ffu) | (odd & 0xff00ff00u)) | (qs & 0x03030303u), low = qs & 0xfcfcfcfcu;
  at[0] = permute<0xcc40>(low, high), at[1] = permute<0xdd51>(low, high);
  at[2] = permute<0xee62>(low, high), at[3] = permute<0xff73>(low, high);
}

/* Piece `piece` of two rows times x, in the lane (group, part) that loaded it. The bytes of A are 16 times the codebook's values
 * plus one, as a mask leaves them. */
static __device__ __forceinline__ void multiply_pair(const Iq1Raw raw[2], int piece, int group, int part,
                                                     const SharedInput &in, float total[2])
{
  const bool holds = part == group >> 1; /* this lane's column of B is its own piece's */
  const char *plane = (const char *)(group & 1 ? in.low : in.high) + piece * 128, *book = (const char *)in.codebook;
  const int turn = (piece & 7) << 4; /* cell() */
  const float4 scales = ((const float4 *)in.scales)[piece], sums = ((const float4 *)in.sums)[piece];
  total[0] = total[1] = 0.0f;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    int4 x[2] = {make_int4(0, 0, 0, 0), make_int4(0, 0, 0, 0)};
    if (holds) x[0] = *(const int4 *)(plane + (32 * j ^ turn)), x[1] = *(const int4 *)(plane + ((32 * j + 16) ^ turn));
    uint32_t qh[2], at[2][4];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      qh[r] = Iq1Base::high_of(raw[r], j);
      iq1_addresses(word(raw[r].qs, j), qh[r], at[r]);
    }
    int c[4] = {0, 0, 0, 0};
#pragma unroll
    for (int l = 0; l < 4; l++) {
      const uint32_t e0 = *(const uint32_t *)(book + at[0][l]), e1 = *(const uint32_t *)(book + at[1][l]);
      mma_bytes(c, e0 << 4 & 0xf0f0f0f0u, e1 << 4 & 0xf0f0f0f0u, e0 & 0xf0f0f0f0u, e1 & 0xf0f0f0f0u,
                word(x[l >> 1], 2 * (l & 1)), word(x[l >> 1], 2 * (l & 1) + 1));
    }
    const float s = j == 0 ? scales.x : j == 1 ? scales.y : j == 2 ? scales.z : scales.w;
    const float xs = j == 0 ? sums.x : j == 1 ? sums.y : j == 2 ? sums.z : sums.w;
#pragma unroll
    for (int r = 0; r < 2; r++) { /* 16 (delta - 1) is -16 and 2 of the sign of qh; 2 s + 1 is 16 (1 + s / 8) - 15 */
      const float delta = __uint_as_float(__float_as_uint(2.0f * xs) ^ (qh[r] << 16 & 0x80000000u));
      const float scale = fmaf(__uint_as_float(and_or(qh[r] << 8, 0x700000u, 0x3f800000u)), 16.0f, -15.0f);
      total[r] = fmaf(scale, fmaf(both(c[2 * r], c[2 * r + 1]), s, fmaf(xs, -16.0f, delta)), total[r]);
    }
  }
  total[0] *= half_bits(raw[0].d) * 0.0625f;
  total[1] *= half_bits(raw[1].d) * 0.0625f;
}

static __device__ __forceinline__ void multiply_pair(const Q8Raw raw[2], int piece, int group, int part,
                                                     const SharedInput &in, float total[2])
{
  int4 x = make_int4(0, 0, 0, 0);
  if (part == group >> 1) x = (group & 1 ? in.low : in.high)[cell(piece)];
  int c[4] = {0, 0, 0, 0};
  mma_bytes(c, raw[0].w.x, raw[1].w.x, raw[0].w.y, raw[1].w.y, x.x, x.y);
  mma_bytes(c, raw[0].w.z, raw[1].w.z, raw[0].w.w, raw[1].w.w, x.z, x.w);
  const float s = in.scales[piece >> 1];
  total[0] = both(c[0], c[1]) * (half_bits(raw[0].d) * s);
  total[1] = both(c[2], c[3]) * (half_bits(raw[1].d) * s);
}

/* In the place of Gemv (gemv.cuh), with the same members. The units of all rows stand in one line, dealt to the warps in
 * turn; DEPTH units are in flight. Sums of a unit go to shared memory and are added in order by row_sum. */
template <class F, int DEPTH, class Map>
struct MmaRows {
  const Map map;
  const int row_begin, row_end, pieces, spans, warps, warp;
  int count, group, part;
  int tiles_step, spans_step; /* from a unit of this warp to the next: no division on the way */
  int load_unit, load_tile, load_span;
  typename F::Raw ring[DEPTH][2];

  __device__ __forceinline__ MmaRows(const Map &m, const Tiling &tiling, int begin, int end, int its_warp = threadIdx.x >> 5,
                                     int its_warps = blockDim.x >> 5)
      : map(m), row_begin(begin), row_end(end), pieces(tiling.pieces), spans((tiling.pieces + 3) >> 2), warps(its_warps),
        warp(its_warp)
  {
    count = ((end - begin + 15) >> 4) * spans;
    group = (int)(threadIdx.x & 31) >> 2;
    part = (int)threadIdx.x & 3;
    tiles_step = over_spans(warps);
    spans_step = warps - tiles_step * spans;
  }

  /* n / spans for n up to 32: an integer division takes 25 instructions. */
  __device__ __forceinline__ int over_spans(int n) const { return (int)__fdividef((float)n + 0.5f, (float)spans); }

  __device__ __forceinline__ void step(int *tile, int *span) const
  {
    *tile += tiles_step;
    *span += spans_step;
    if (*span >= spans) *span -= spans, ++*tile;
  }

  /* Rows and pieces past the end repeat the last. */
  __device__ __forceinline__ void load_next(typename F::Raw raw[2])
  {
    Parts parts[2];
    uint32_t index[2];
    place_pair(map, row_begin + load_tile * 16 + 2 * group, row_end - 1, min(load_span * 4 + part, pieces - 1), parts,
               index);
#pragma unroll
    for (int r = 0; r < 2; r++) raw[r] = F::load(parts[r], index[r]);
    load_unit += warps;
    step(&load_tile, &load_span);
  }

  __device__ __forceinline__ void preload()
  {
    load_unit = warp;
    load_tile = over_spans(warp);
    load_span = warp - load_tile * spans;
#pragma unroll
    for (int i = 0; i < DEPTH; i++) {
      if (load_unit < count) load_next(ring[i]);
      else ring[i][0] = ring[i][1] = F::zero();
    }
  }

  __device__ __forceinline__ void run(const SharedInput &in, float *segments)
  {
    int tile = 0, span = warp - over_spans(warp) * spans;
    for (int first = warp; first < count; first += DEPTH * warps) {
#pragma unroll
      for (int i = 0; i < DEPTH; i++) {
        const int unit = first + i * warps;
        if (unit >= count) break;
        const int piece = span * 4 + part;
        step(&tile, &span);
        float total[2];
        multiply_pair(ring[i], min(piece, pieces - 1), group, part, in, total);
        if (load_unit < count) load_next(ring[i]);
#pragma unroll
        for (int r = 0; r < 2; r++) {
          if (piece >= pieces) total[r] = 0.0f;
          total[r] += __shfl_xor_sync(0xffffffffu, total[r], 1);
          total[r] += __shfl_xor_sync(0xffffffffu, total[r], 2);
        }
        if (part == 0) *(float2 *)(segments + unit * 16 + 2 * group) = make_float2(total[0], total[1]);
      }
    }
  }

  /* The sum of row row_begin + i, after a block barrier behind run(). */
  __device__ __forceinline__ float row_sum(const float *segments, int i) const
  {
    const float *at = segments + (i >> 4) * spans * 16 + (i & 15);
    float sum = 0;
    for (int s = 0; s < spans; s++) sum += at[s * 16];
    return sum;
  }
};

/* Rows of any format: ROWS of them are best kept together by one block. */
template <class F, int DEPTH, class Map>
struct RowsOf {
  typedef Gemv<F, DEPTH, Map> Type;
  enum { ROWS = 1 };
};
template <int DEPTH, class Map>
struct RowsOf<Iq1Int, DEPTH, Map> {
  typedef MmaRows<Iq1Int, DEPTH, Map> Type;
  enum { ROWS = 16 };
};

} /* namespace k3 */
#endif
