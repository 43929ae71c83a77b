/* Rows of iq1_s, mxfp4 and q8_0 on the tensor cores. Layer: backend (CUDA), device code. Twin: k3_host_dequantise; formats:
 * dot.cuh.
 *
 * A unit of work of a warp: 16 rows × 4 pieces (512 values of iq1_s, 128 of mxfp4, 64 of q8_0). Lane (g, t) = (lane / 4, lane % 4) loads
 * piece t of rows g and g + 8. One mma (16 × 32 by 32 × 8, bytes) takes 8 values of each lane and row: of iq1_s one codebook entry,
 * entry l of sub-block j of the lane's piece. The eight columns of B hold the activation's codes of the four pieces apart: column 2t
 * piece t's high bytes, 2t + 1 its low bytes, and zeros where k belongs to another piece. So after four mma (l = 0 … 3; two of q8_0)
 * lane (g, t) finds the sums of its own sub-block for both rows in its own registers, and scales them there. Exact in integers, as
 * dp4a is; a third of its instructions, and x is read from shared memory once for 16 rows. A unit of iq1_s takes 120 cycles of shared
 * memory and L1 (64 the 32 look-ups, 32 the codes, 8 scales, 16 the weights) and 190 of a scheduler's integer pipe for four warps. */
#ifndef K3_KERNELS_IQ1_MMA_CUH
#define K3_KERNELS_IQ1_MMA_CUH

#include "kernels/gemv.cuh"
#include "kernels/hopper.cuh"

namespace k3 {

/* d = c + A B: A 16 × 32 by rows, B 32 × 8 by columns, signed bytes. */
static __device__ __forceinline__ void mma_bytes(int d[4], const int c[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, int b0,
                                                 int b1)
{
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}

static constexpr float MAGIC = 12582912.0f; /* 1.5 · 2^23: the low bits of a sum with it are an integer */
static constexpr int MAGIC_INT = 0x4b400000;

/* A lane's column of B: 32 codes of its piece. Lanes of other pieces keep zeros. */
struct Column {
  int4 x[2];
  int holds;
  __device__ __forceinline__ Column(int group, int part) : holds(part == group >> 1)
  {
    x[0] = x[1] = make_int4(0, 0, 0, 0);
  }
  __device__ __forceinline__ void load(int half, uint32_t address)
  {
    asm volatile("{ .reg .pred holds; setp.ne.s32 holds, %5, 0;\n"
                 "@holds ld.shared.v4.s32 {%0, %1, %2, %3}, [%4]; }"
                 : "+r"(x[half].x), "+r"(x[half].y), "+r"(x[half].z), "+r"(x[half].w)
                 : "r"(address), "r"(holds));
  }
};

/* The bits of a codebook address that name a lane's copy (fill_codebook), four times: 2, 4, 5, 6. */
static __device__ __forceinline__ uint32_t book_copy(int lane)
{
  return (uint32_t)((lane & 2) << 1 | (lane & 0x1c) << 2) * 0x01010101u;
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

/* Shared floats for the sums of `rows` rows, shared by `warps` warps. */
static __host__ __device__ inline int mma_segment_floats(int rows, int warps) { return ((rows + 15) / 16 + warps) * 16; }

/* Where piece `piece` of rows `row` and row + 8 lies, neither past `last`. A map of its own kind brings a place_pair. */
template <class F, class Map>
static __device__ __forceinline__ void place_pair(const Map &map, int row, int last, int piece, Parts parts[2],
                                                  uint32_t index[2])
{
  map.template place_pair<F>(row, last, piece, parts, index);
}
template <class F>
static __device__ __forceinline__ void place_pair(const PlainMap &map, int row, int last, int piece, Parts parts[2],
                                                  uint32_t index[2])
{
  parts[0] = parts[1] = map.parts;
  index[0] = F::index((uint32_t)min(row, last), piece, map.pieces);
  index[1] = row + 8 <= last ? index[0] + 8 * map.pieces : index[0]; /* in any order of rows by eights */
}

/* Piece `piece` of two rows times x, in the lane (group, part) that loaded it; `column`: this lane's column of B, zeros unless it holds
 * its own piece's codes. */
static __device__ __forceinline__ void multiply_pair(const Iq1Raw raw[2], int piece, int group, int part,
                                                     const SharedInput &in, Column &column, float total[2])
{
  const uint32_t plane = shared_address(group & 1 ? in.low : in.high) + piece * 128;
  const char *book = (const char *)in.codebook + BOOK_BYTES / 2;
  const uint32_t lanes = book_copy(group * 4 + part), turn = (piece & 7) << 4; /* cell() */
  const int zero[4] = {0, MAGIC_INT, 0, MAGIC_INT}; /* the low byte's sums come as floats of 1.5 · 2^23 more */
  total[0] = total[1] = 0.0f;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    column.load(0, plane + (32 * j ^ turn)), column.load(1, plane + (32 * j + 16 ^ turn));
    uint32_t entry[2][4];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const uint32_t high = and_or(Iq1Base::high_of(raw[r], j), 0x8a8a8a8au, lanes), qs = word(raw[r].qs, j);
      entry[r][0] = *(const uint16_t *)(book + (int)permute<0x8804>(qs, high));
      entry[r][1] = *(const uint16_t *)(book + (int)permute<0x9915>(qs, high));
      entry[r][2] = *(const uint16_t *)(book + (int)permute<0xaa26>(qs, high));
      entry[r][3] = *(const uint16_t *)(book + (int)permute<0xbb37>(qs, high));
    }
    int c[4];
#pragma unroll
    for (int l = 0; l < 4; l++)
      mma_bytes(c, l ? c : zero, entry_first(entry[0][l]), entry_first(entry[1][l]), entry_second(entry[0][l]), entry_second(entry[1][l]),
                word(column.x[l >> 1], 2 * (l & 1)), word(column.x[l >> 1], 2 * (l & 1) + 1));
    const float s = in.scales[4 * piece + j], xs = in.sums[4 * piece + j];
#pragma unroll
    for (int r = 0; r < 2; r++) { /* eight times the sum, so that delta is 1 */
      const uint32_t pair = j < 2 ? raw[r].qh.x : raw[r].qh.y;
      const uint32_t bits = j & 1 ? (pair & 0x604000u) * 0x41u : (pair & 0x2060u) * 0x8200u; /* s to bits 20 to 22 */
      const float scale = fmaf(__uint_as_float(and_or(bits, 0x700000u, 0x3f800000u)), 16.0f, -15.0f); /* 16 (1 + s / 8) - 15 is 2 s + 1 */
      const float delta = __uint_as_float(__float_as_uint(xs) ^ ((j & 1 ? pair << 2 : pair << 1) & 0x80000000u));
      const float sum = fmaf(__int_as_float(c[2 * r] * 256 + c[2 * r + 1]), 8.0f, -8.0f * MAGIC);
      total[r] = fmaf(scale, fmaf(sum, s, delta), total[r]);
    }
  }
  total[0] *= half_bits(raw[0].d) * 0.125f;
  total[1] *= half_bits(raw[1].d) * 0.125f;
}

/* Twice the e2m1 values of four nibbles plus twelve, as bytes: those of positive nibbles and those of negative ones, each zero (the
 * sign of a byte that has none) where the other is. */
enum { MXFP4_SHIFT = 12 };
static __device__ __forceinline__ uint32_t e2m1_shifted(uint32_t nibbles, uint32_t turned)
{
  return permute_signs(0x0f0e0d0cu, 0x18141210u, nibbles) | permute_signs(0x090a0b0cu, 0x00040608u, turned);
}

/* sums: -12 times the sum of the codes, as integers. */
static __device__ __forceinline__ void multiply_pair(const Mxfp4Raw raw[2], int piece, int group, int part,
                                                     const SharedInput &in, Column &column, float total[2])
{
  const uint32_t plane = shared_address(group & 1 ? in.low : in.high);
  column.load(0, plane + cell(2 * piece) * 16), column.load(1, plane + cell(2 * piece + 1) * 16);
  const int zero[4] = {0, 0, 0, 0};
  int c[4];
#pragma unroll
  for (int l = 0; l < 4; l++) {
    uint32_t first[2], second[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const uint32_t w = word(raw[r].w, l), turned = w ^ 0x88888888u;
      first[r] = e2m1_shifted(w, turned), second[r] = e2m1_shifted(w >> 16, turned >> 16);
    }
    mma_bytes(c, l ? c : zero, first[0], first[1], second[0], second[1], word(column.x[l >> 1], 2 * (l & 1)),
              word(column.x[l >> 1], 2 * (l & 1) + 1));
  }
  const int shift = __float_as_int(in.sums[piece]);
  const float s = in.scales[piece] * 0.5f;
#pragma unroll
  for (int r = 0; r < 2; r++) total[r] = (float)(c[2 * r] * 256 + c[2 * r + 1] + shift) * (e8m0(raw[r].s) * s);
}

static __device__ __forceinline__ void multiply_pair(const Q8Raw raw[2], int piece, int group, int part,
                                                     const SharedInput &in, Column &column, float total[2])
{
  column.load(0, shared_address((group & 1 ? in.low : in.high) + cell(piece)));
  const int zero[4] = {0, 0, 0, 0};
  int c[4];
  mma_bytes(c, zero, raw[0].w.x, raw[1].w.x, raw[0].w.y, raw[1].w.y, column.x[0].x, column.x[0].y);
  mma_bytes(c, c, raw[0].w.z, raw[1].w.z, raw[0].w.w, raw[1].w.w, column.x[0].z, column.x[0].w);
  const float s = in.scales[piece >> 1];
  total[0] = both(c[0], c[1]) * (half_bits(raw[0].d) * s);
  total[1] = both(c[2], c[3]) * (half_bits(raw[1].d) * s);
}

/* In the place of Gemv (gemv.cuh), with the same members. The units of all rows stand in one line, dealt evenly to the warps. A warp's
 * sums of 16 rows go to shared memory, where row_sum adds those of several warps in order.
 * DEPTH units are loaded at first, and then STAGE at a time, right after the wait for the stage before: the compiler has one
 * scoreboard for all of them, so that a wait for one is a wait for all, and a load issued shortly before it would be waited for. */
template <class F, int DEPTH, int STAGE, class Map>
struct MmaRows {
  const Map map;
  const int row_begin, row_end, pieces, spans, warp;
  int group, part;
  int units_warp, left, tile, span; /* tile: 16 rows */
  int load_tile, load_span;
  typename F::Raw ring[DEPTH][2];

  __device__ __forceinline__ MmaRows(const Map &m, const Tiling &tiling, int begin, int end, int its_warp = threadIdx.x >> 5,
                                     int warps = blockDim.x >> 5)
      : map(m), row_begin(begin), row_end(end), pieces(tiling.pieces), spans((tiling.pieces + 3) >> 2), warp(its_warp)
  {
    const int units = ((end - begin + 15) >> 4) * spans;
    units_warp = (int)((unsigned)(units + warps - 1) / (unsigned)warps);
    const int first = min(warp * units_warp, units);
    left = min(first + units_warp, units) - first;
    tile = quotient(first, spans);
    span = first - tile * spans;
    group = (int)(threadIdx.x & 31) >> 2;
    part = (int)threadIdx.x & 3;
  }

  /* n / d for n below 2^20: an integer division takes 25 instructions. */
  static __device__ __forceinline__ int quotient(int n, int d) { return (int)__fdividef((float)n + 0.5f, (float)d); }

  /* Rows and pieces past the end repeat the last. */
  __device__ __forceinline__ void load_next(typename F::Raw raw[2], uint32_t zero)
  {
    Parts parts[2];
    uint32_t index[2];
    place_pair<F>(map, row_begin + load_tile * 16 + group, row_end - 1, min(load_span * 4 + part, pieces - 1), parts,
               index);
#pragma unroll
    for (int r = 0; r < 2; r++) raw[r] = F::load(parts[r], index[r] + zero);
    if (++load_span == spans) load_span = 0, load_tile++;
  }

  __device__ __forceinline__ void preload()
  {
    load_tile = tile;
    load_span = span;
#pragma unroll
    for (int i = 0; i < DEPTH; i++) {
      if (i < left) load_next(ring[i], 0);
      else ring[i][0] = ring[i][1] = F::zero();
    }
  }

  __device__ __forceinline__ void flush(float sum[2], float *segments)
  {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 1);
      sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 2);
    }
    if (part == 0) segments[(tile + warp) * 16 + group] = sum[0], segments[(tile + warp) * 16 + group + 8] = sum[1];
    sum[0] = sum[1] = 0.0f;
  }

  /* Waits for the loads of a stage; the result is zero, which no compiler knows. */
  __device__ __forceinline__ uint32_t settle(int slot) const
  {
    uint32_t any = 0;
#pragma unroll
    for (int i = 0; i < STAGE; i++) any |= F::touch(ring[slot + i][0]) | F::touch(ring[slot + i][1]);
    return any & (gridDim.y - 1);
  }

  __device__ __forceinline__ void run(const SharedInput &in, float *segments)
  {
    static_assert(DEPTH % STAGE == 0 && DEPTH >= 2 * STAGE, "a stage in use, one on its way");
    Column column(group, part);
    float sum[2] = {0.0f, 0.0f};
    for (int first = 0; first < left; first += DEPTH) {
#pragma unroll
      for (int slot = 0; slot < DEPTH; slot += STAGE) {
        const int unit = first + slot;
        if (unit >= left) break;
        const uint32_t zero = settle(slot);
        if (unit > 0) { /* into the stage that was used last */
#pragma unroll
          for (int i = 0; i < STAGE; i++)
            if (unit - STAGE + DEPTH + i < left) load_next(ring[(slot - STAGE + DEPTH + i) % DEPTH], zero);
        }
#pragma unroll
        for (int i = 0; i < STAGE; i++) {
          if (unit + i >= left) break;
          const int piece = span * 4 + part;
          float total[2];
          multiply_pair(ring[slot + i], min(piece, pieces - 1), group, part, in, column, total);
#pragma unroll
          for (int r = 0; r < 2; r++) sum[r] += piece < pieces ? total[r] : 0.0f;
          if (++span == spans) flush(sum, segments), span = 0, tile++;
        }
      }
    }
    if (span && left) flush(sum, segments);
  }

  /* The sum of row row_begin + i, after a block barrier behind run(). */
  __device__ __forceinline__ float row_sum(const float *segments, int i) const
  {
    const int at = i >> 4, first = quotient(at * spans, units_warp), last = quotient((at + 1) * spans - 1, units_warp);
    float sum = 0;
    for (int w = first; w <= last; w++) sum += segments[(at + w) * 16 + (i & 15)];
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
  typedef MmaRows<Iq1Int, DEPTH, 1, Map> Type;
  enum { ROWS = 16 };
};

} /* namespace k3 */
#endif
