/* Rows of iq1_s and mxfp4, and of q8_0 as experts.cu has it, on the tensor cores. Layer: backend (CUDA), device code. Twin:
 * k3_host_dequantise; formats: dot.cuh.
 *
 * A unit of work of a warp: 16 rows × 4 pieces (512 values of iq1_s, 128 of mxfp4 and of q8_0). Lane (g, t) = (lane / 4, lane % 4) loads
 * piece t of rows g and g + 8. One mma (16 × 32 by 32 × 8, bytes) takes 8 values of each lane and row. The eight columns of B hold the
 * activation's codes of the four pieces apart: column 2t piece t's high bytes, 2t + 1 its low bytes, and zeros where k belongs to another
 * piece. So after four mma lane (g, t) finds the sums of its own piece for both rows in its own registers, and scales them
 * there. Exact in integers, as dp4a is; a third of its instructions, and x is read from shared memory once for 16 rows.
 *
 * Of iq1_s the four pieces are the halves of two blocks, and the two lanes of a block have a record each (weights.h), whose 8 values of
 * an mma are an entry of one half or of the other. So a sub-block of four pieces takes two mma for the even halves and two for the odd
 * ones, by the same B: columns of the other half get what nobody reads, and one load of x fills B for all four. A unit takes 100 cycles of
 * shared memory and L1 (64 the 32 look-ups, 12 the codes, 8 scales, 16 the weights) and 290 instructions, 73 cycles on four schedulers.
 *
 * SORTED, x of iq1_s as experts.cu makes it, so that one address serves all loads of a lane: the 16 codes of half h, sub-block q and part u
 * (of two) of block b stand at cell 16 b + 4 q + 2 h + u; four scales of a piece, then its four sums; zeros up to whole units. */
#ifndef K3_KERNELS_MMA_ROWS_CUH
#define K3_KERNELS_MMA_ROWS_CUH

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

static constexpr float MAGIC = 12582912.0f; /* 1.5 · 2^23: the low bits of a sum with it are an integer (experts.cu) */
static constexpr int MAGIC_INT = 0x4b400000;

/* A lane's part of a column of B, 16 codes a load; where k is of another piece, or by_records (iq1_s) of another block, zeros.
 * Two predicates that are the same, which the compiler cannot know: of two loads by one it makes a branch. */
struct Column {
  int4 x[2];
  int holds[2];
  __device__ __forceinline__ Column(int by_records)
  {
    uint32_t lane, bit;
    asm("mov.u32 %0, %%laneid;" : "=r"(lane));
    asm("mov.u32 %0, %%lanemask_eq;" : "=r"(bit));
    holds[0] = by_records ? (lane >> 1 & 1) == lane >> 4 : (lane & 3) == lane >> 3;
    holds[1] = (bit & (by_records ? 0xcccc3333u : 0x88442211u)) != 0;
    x[0] = x[1] = make_int4(0, 0, 0, 0);
  }
  __device__ __forceinline__ void load(int half, uint32_t address)
  {
    asm volatile("{ .reg .pred holds; setp.ne.s32 holds, %5, 0;\n"
                 "@holds ld.shared.v4.s32 {%0, %1, %2, %3}, [%4]; }"
                 : "+r"(x[half].x), "+r"(x[half].y), "+r"(x[half].z), "+r"(x[half].w)
                 : "r"(address), "r"(holds[half]));
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

/* Shared floats for the sums of `rows` rows, shared by `warps` warps. */
static __host__ __device__ inline int mma_segment_floats(int rows, int warps) { return ((rows + 15) / 16 + warps) * 16; }

/* Where piece `piece` of rows `row` and row + 8 lies, neither past `last`, and how often it goes on four pieces on, F::STRIDE of `index`
 * away. A map of its own kind brings a place_pair. */
template <class F, class Map>
static __device__ __forceinline__ int place_pair(const Map &map, int row, int last, int piece, uint32_t index[2])
{
  return map.template place_pair<F>(row, last, piece, index);
}
template <class F>
static __device__ __forceinline__ int place_pair(const PlainMap &map, int row, int last, int piece, uint32_t index[2])
{
  index[0] = F::index((uint32_t)min(row, last), piece, map.pieces);
  index[1] = row + 8 <= last ? index[0] + 8 * map.pieces : index[0]; /* in any order of rows by eights */
  return (map.pieces - 1 - piece) >> 2;
}

/* What a lane keeps while it multiplies: shared addresses, made once and not again in each unit as the compiler would. */
struct Lane {
  int group, part;
  uint32_t copy, plane, scales, sums; /* book_copy; of its column of B */
  __device__ __forceinline__ Lane(const SharedInput &in, int its_group, int its_part, bool sorted)
      : group(its_group), part(its_part), copy(book_copy(group * 4 + part)), plane(shared_address(group & 1 ? in.low : in.high)),
        scales(shared_address(in.scales)), sums(shared_address(in.sums))
  {
    if (sorted) plane += (group >> 2) * 256 + (group >> 1 & 1) * 32 + (part & 1) * 16;
    asm volatile("" : "+r"(copy), "+r"(plane), "+r"(scales), "+r"(sums));
  }
};
static __device__ __forceinline__ float4 shared_float4(uint32_t address)
{
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address));
  return v;
}

/* Values 0 … 3 and 4 … 7 of a codebook entry (dot.cuh), eight times, so that delta is 1. */
static __device__ __forceinline__ uint32_t eight_first(uint32_t entry) { return permute_signs(0xf80800f8u, 0x0800f808u, entry); }
static __device__ __forceinline__ uint32_t eight_second(uint32_t entry) { return permute_signs(0x00f8f8f8u, 0x08080800u, entry); }

/* A unit, whose first piece is `first` of `pieces`, of two rows times x, added to `sum`, 1 / F::UNIT times what it is. */
template <int SORTED>
static __device__ __forceinline__ void multiply_pair(const Iq1Raw raw[2], int first, int pieces, const Lane &lane,
                                                     const SharedInput &in, Column &column, float sum[2])
{
  const int own = first + lane.part, piece = SORTED ? own : min(own, pieces - 1);
  const int of_column = min(first + (lane.group >> 1), pieces - 1);
  const uint32_t plane = lane.plane + (SORTED ? first : of_column) * 128, at = (lane.part & 1) << 4 ^ (of_column & 7) << 4; /* cell() */
  const char *book = (const char *)in.codebook + BOOK_BYTES / 2;
  const int zero[4] = {0, 0, 0, 0};
  const float4 s = shared_float4(lane.scales + piece * (SORTED ? 32 : 16));
  const float4 xs = shared_float4(SORTED ? lane.scales + piece * 32 + 16 : lane.sums + piece * 16);
  float total[2] = {0.0f, 0.0f};
  uint32_t scales[2];
#pragma unroll
  for (int q = 0; q < 4; q++) {
    column.load(q & 1, SORTED ? plane + 64 * q : plane + (32 * q ^ at));
    uint32_t entry[2][4];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const uint32_t high = and_or(Iq1Base::high_of(raw[r].qh, q), 0x8a8a8a8au, lane.copy), qs = word(raw[r].qs, q);
      entry[r][0] = *(const uint16_t *)(book + (int)permute<0x8804>(qs, high));
      entry[r][1] = *(const uint16_t *)(book + (int)permute<0x9915>(qs, high));
      entry[r][2] = *(const uint16_t *)(book + (int)permute<0xaa26>(qs, high));
      entry[r][3] = *(const uint16_t *)(book + (int)permute<0xbb37>(qs, high));
    }
    int c[2][4]; /* of even pieces; of odd ones */
#pragma unroll
    for (int l = 0; l < 2; l++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const uint32_t a = entry[0][2 * h + l], b = entry[1][2 * h + l];
        mma_bytes(c[h], l ? c[h] : zero, eight_first(a), eight_first(b), eight_second(a), eight_second(b), word(column.x[q & 1], 2 * l),
                  word(column.x[q & 1], 2 * l + 1));
      }
    const float sq = q == 0 ? s.x : q == 1 ? s.y : q == 2 ? s.z : s.w, xsq = q == 0 ? xs.x : q == 1 ? xs.y : q == 2 ? xs.z : xs.w;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      if (!(q & 1)) scales[r] = Iq1Base::scales_of(q < 2 ? raw[r].qh.x : raw[r].qh.y);
      const float scale = half_bits(q & 1 ? scales[r] >> 16 : scales[r] & 0xffffu); /* delta's sign turns over the sum, then both */
      const int even = c[0][2 * r] * 256 + c[0][2 * r + 1], odd = c[1][2 * r] * 256 + c[1][2 * r + 1];
      const uint32_t turned = __float_as_uint((float)(lane.part & 1 ? odd : even)) ^ (__float_as_uint(scale) & 0x80000000u);
      total[r] = fmaf(scale, fmaf(__uint_as_float(turned), sq, xsq), total[r]);
    }
  }
#pragma unroll
  for (int r = 0; r < 2; r++) sum[r] = fmaf(SORTED || own < pieces ? half_bits(raw[r].d) : 0.0f, total[r], sum[r]);
}

/* Twice the e2m1 values of four nibbles plus twelve, as bytes: those of positive nibbles and those of negative ones, each zero (the
 * sign of a byte that has none) where the other is. */
enum { MXFP4_SHIFT = 12 };
static __device__ __forceinline__ uint32_t e2m1_shifted(uint32_t nibbles, uint32_t turned)
{
  return permute_signs(0x0f0e0d0cu, 0x18141210u, nibbles) | permute_signs(0x090a0b0cu, 0x00040608u, turned);
}

/* sums: -12 times the sum of the codes, as integers. */
template <int SORTED>
static __device__ __forceinline__ void multiply_pair(const Mxfp4Raw raw[2], int first, int pieces, const Lane &lane,
                                                     const SharedInput &in, Column &column, float sum[2])
{
  const int piece = min(first + lane.part, pieces - 1);
  const uint32_t plane = lane.plane;
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
  for (int r = 0; r < 2; r++) {
    const float total = (float)(c[2 * r] * 256 + c[2 * r + 1] + shift) * (e8m0(raw[r].s) * s);
    sum[r] += first + lane.part < pieces ? total : 0.0f;
  }
}

/* In the place of Gemv (gemv.cuh), with the same members. The units of all rows stand in one line, dealt evenly to the warps. A warp's
 * sums of 16 rows go to shared memory, where row_sum adds those of several warps in order.
 * DEPTH units are loaded at first, and then STAGE at a time, right after the wait for the stage before: the compiler has one
 * scoreboard for all of them, so that a wait for one is a wait for all, and a load issued shortly before it would be waited for. */
template <class F, int DEPTH, int STAGE, class Map>
struct MmaRows {
  enum { SORTED = Map::SORTED && F::BOOK };
  const Map map;
  const int row_begin, row_end, pieces, spans, warp;
  int group, part;
  int units_warp, left, tile, span; /* tile: 16 rows */
  int load_unit, load_run;
  uint32_t load_index[2];
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
  __device__ __forceinline__ void load_next(typename F::Raw raw[2])
  {
    if (load_run == 0) {
      const int at = quotient(load_unit, spans);
      const int run = place_pair<F>(map, row_begin + at * 16 + group, row_end - 1, min((load_unit - at * spans) * 4 + part, pieces - 1), load_index);
      load_run = min((int)__reduce_min_sync(0xffffffffu, run), (at + 1) * spans - 1 - load_unit); /* a part of a row may end first */
    } else {
      load_run--;
#pragma unroll
      for (int r = 0; r < 2; r++) load_index[r] += F::STRIDE;
    }
#pragma unroll
    for (int r = 0; r < 2; r++) raw[r] = F::load(map.of_pair(r), load_index[r]);
    load_unit++;
  }

  __device__ __forceinline__ void preload()
  {
    load_unit = tile * spans + span;
    load_run = 0;
#pragma unroll
    for (int i = 0; i < DEPTH; i++) {
      if (i < left) load_next(ring[i]);
      else ring[i][0] = ring[i][1] = F::zero();
    }
  }

  __device__ __forceinline__ void flush(float sum[2], float *segments)
  {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 1);
      sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 2);
      sum[r] *= F::UNIT;
    }
    if (part == 0) segments[(tile + warp) * 16 + group] = sum[0], segments[(tile + warp) * 16 + group + 8] = sum[1];
    sum[0] = sum[1] = 0.0f;
  }

  /* Waits for the loads of a stage, as the index of the next depends on them: adds zero, which no compiler knows. On every path: where
   * one may come to the stage's use without, the compiler waits there, and for the loads that were issued between. */
  __device__ __forceinline__ void settle(int slot)
  {
    uint32_t any = 0;
#pragma unroll
    for (int i = 0; i < STAGE; i++) any |= F::touch(ring[slot + i][0]) | F::touch(ring[slot + i][1]);
    any &= gridDim.y - 1;
    load_index[0] += any;
    load_index[1] += any;
  }

  __device__ __forceinline__ void run(const SharedInput &in, float *segments)
  {
    static_assert(DEPTH % STAGE == 0 && DEPTH >= 2 * STAGE, "a stage in use, one on its way");
    Column column(F::BOOK);
    const Lane lane(in, group, part, SORTED);
    float sum[2] = {0.0f, 0.0f};
    for (int first = 0; first < left; first += DEPTH) {
#pragma unroll
      for (int slot = 0; slot < DEPTH; slot += STAGE) {
        const int unit = first + slot;
        if (unit >= left) break;
        settle(slot);
        if (unit > 0) { /* into the stage that was used last */
#pragma unroll
          for (int i = 0; i < STAGE; i++)
            if (unit - STAGE + DEPTH + i < left) load_next(ring[(slot - STAGE + DEPTH + i) % DEPTH]);
        }
#pragma unroll
        for (int i = 0; i < STAGE; i++) {
          if (unit + i >= left) break;
          multiply_pair<SORTED>(ring[slot + i], span * 4, pieces, lane, in, column, sum);
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
