/* Rows of iq1_s on the tensor cores. Layer: backend (CUDA), device code. Twin: k3_host_dequantise; the format: dot.cuh.
 *
 * A unit of work of a warp: 16 rows × 4 pieces (512 values). Lane (g, t) = (lane / 4, lane % 4) loads piece t of rows 2g and
 * 2g + 1. One mma (16 × 32 by 32 × 8, bytes) takes one codebook entry (8 values) of each lane and row, entry l of sub-block j of
 * the lane's piece. The eight columns of B hold the activation's codes of the four pieces apart: column 2t piece t's high bytes,
 * 2t + 1 its low bytes, and zeros where k belongs to another piece. So after four mma (l = 0 … 3) lane (g, t) finds the sums of
 * its own sub-block for both rows in its own registers, and scales them there. Exact in integers, as dp4a is; a third of
 * its instructions, and x is read from shared memory once for 16 rows. What remains is one codebook look-up for 8 values. */
#ifndef K3_KERNELS_IQ1_MMA_CUH
#define K3_KERNELS_IQ1_MMA_CUH

#include "kernels/gemv.cuh"

namespace k3 {

/* c += A B: A 16 × 32 by rows, B 32 × 8 by columns, signed bytes. */
static __device__ __forceinline__ void mma_bytes(int c[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, int b0, int b1)
{
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/* Shared floats for the sums of `rows` rows of `pieces` pieces. */
static __host__ __device__ inline int iq1_segment_floats(int rows, int pieces)
{
  return (rows + 15) / 16 * ((pieces + 3) / 4) * 16;
}

/* In the place of Gemv (gemv.cuh), with the same members. The units of all rows stand in one line, dealt to the warps in
 * turn; DEPTH units are in flight. Sums of a unit go to shared memory and are added in order by row_sum. */
template <int DEPTH, class Map>
struct Iq1Rows {
  const Map map;
  const int row_begin, row_end, pieces, spans;
  int count, warps, warp, group, part;
  int load_unit;
  Iq1Raw ring[DEPTH][2];

  __device__ __forceinline__ Iq1Rows(const Map &m, const Tiling &tiling, int begin, int end)
      : map(m), row_begin(begin), row_end(end), pieces(tiling.pieces), spans((tiling.pieces + 3) >> 2)
  {
    count = ((end - begin + 15) >> 4) * spans;
    warps = (int)(blockDim.x >> 5);
    warp = (int)(threadIdx.x >> 5);
    group = (int)(threadIdx.x & 31) >> 2;
    part = (int)threadIdx.x & 3;
  }

  __device__ __forceinline__ int piece_of(int unit) const { return (unit % spans) * 4 + part; }

  /* Rows and pieces past the end repeat the last. */
  __device__ __forceinline__ void load_next(Iq1Raw raw[2])
  {
    int tile = load_unit / spans, row = row_begin + tile * 16 + 2 * group;
    int piece = min((load_unit - tile * spans) * 4 + part, pieces - 1);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      int64_t index;
      Parts parts = map.place(min(row + r, row_end - 1), piece, &index);
      raw[r] = Iq1Base::load(parts, index);
    }
    load_unit += warps;
  }

  __device__ __forceinline__ void preload()
  {
    load_unit = warp;
#pragma unroll
    for (int i = 0; i < DEPTH; i++) {
      if (load_unit < count) load_next(ring[i]);
      else ring[i][0] = ring[i][1] = Iq1Base::zero();
    }
  }

  /* Both rows' pieces times x. */
  __device__ __forceinline__ void multiply(const Iq1Raw raw[2], int piece, const SharedInput &in, float total[2]) const
  {
    const bool holds = part == group >> 1; /* this lane's column of B is its own piece's */
    const int4 *plane = group & 1 ? in.low : in.high;
    const float4 scales = ((const float4 *)in.scales)[piece], sums = ((const float4 *)in.sums)[piece];
    total[0] = total[1] = 0.0f;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      int4 x[2] = {make_int4(0, 0, 0, 0), make_int4(0, 0, 0, 0)};
      if (holds) x[0] = plane[cell(piece * 8 + 2 * j)], x[1] = plane[cell(piece * 8 + 2 * j + 1)];
      const uint32_t qh0 = Iq1Base::high_of(raw[0], j), qh1 = Iq1Base::high_of(raw[1], j);
      int c[4] = {0, 0, 0, 0};
#pragma unroll
      for (int l = 0; l < 4; l++) {
        const uint32_t e0 = Iq1Base::entry(in, word(raw[0].qs, j), qh0, l), e1 = Iq1Base::entry(in, word(raw[1].qs, j), qh1, l);
        mma_bytes(c, e0 & 0x0f0f0f0fu, e1 & 0x0f0f0f0fu, e0 >> 4 & 0x0f0f0f0fu, e1 >> 4 & 0x0f0f0f0fu,
                  word(x[l >> 1], 2 * (l & 1)), word(x[l >> 1], 2 * (l & 1) + 1));
      }
      const float s = j == 0 ? scales.x : j == 1 ? scales.y : j == 2 ? scales.z : scales.w;
      const float xs = j == 0 ? sums.x : j == 1 ? sums.y : j == 2 ? sums.z : sums.w;
      total[0] = fmaf(Iq1Base::scale_of(qh0), fmaf(both(c[0], c[1]), s, Iq1Base::shift_of(qh0) * xs), total[0]);
      total[1] = fmaf(Iq1Base::scale_of(qh1), fmaf(both(c[2], c[3]), s, Iq1Base::shift_of(qh1) * xs), total[1]);
    }
    total[0] *= half_bits(raw[0].d);
    total[1] *= half_bits(raw[1].d);
  }

  __device__ __forceinline__ void run(const SharedInput &in, float *segments)
  {
    for (int first = warp; first < count; first += DEPTH * warps) {
#pragma unroll
      for (int i = 0; i < DEPTH; i++) {
        const int unit = first + i * warps;
        if (unit >= count) break;
        const int piece = piece_of(unit);
        float total[2];
        multiply(ring[i], min(piece, pieces - 1), in, total);
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
  typedef Iq1Rows<DEPTH, Map> Type;
  enum { ROWS = 16 };
};

} /* namespace k3 */
#endif
