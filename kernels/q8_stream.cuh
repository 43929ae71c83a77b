/* Rows of q8_0 whose pieces fill whole warps: one line of bytes. Layer: backend (CUDA), device code. Twin: k3_host_linear.
 *
 * In the place of Gemv (gemv.cuh), with its members and its order of sums, for pieces % 32 == 0: a block's rows are one run of
 * steps, so that a lane walks on by constants, and a step takes 30 instructions in the place of 85, with no branch but the
 * end of a row. Bound of a product by instructions before (K3's KDA projections: 14,000 of 17,800 cycles), by memory now. */
#ifndef K3_KERNELS_Q8_STREAM_CUH
#define K3_KERNELS_Q8_STREAM_CUH

#include "kernels/gemv.cuh"

namespace k3 {

/* Unless `there` the scale is 0, so that the step adds nothing. */
static __device__ __forceinline__ void load_if(Q8Raw &raw, const uint8_t *codes, const uint8_t *scale, bool there)
{
  asm volatile("{ .reg .pred there; setp.ne.s32 there, %5, 0;\n"
               "mov.u32 %4, 0;\n"
               "@there ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%6], %8;\n"
               "@there ld.global.nc.L2::cache_hint.u16 %4, [%7], %8; }"
               : "+r"(raw.w.x), "+r"(raw.w.y), "+r"(raw.w.z), "+r"(raw.w.w), "=&r"(raw.d)
               : "r"((int)there), "l"(codes), "l"(scale), "l"(stream_policy()));
}

template <int DEPTH>
struct Q8Stream {
  const int chunks; /* steps of a row */
  int steps_warp, warp, left, group, until; /* until: steps to the end of the row */
  const uint8_t *codes, *scale; /* of the next load */
  Q8Raw ring[DEPTH];

  __device__ __forceinline__ Q8Stream(const K3CudaMatrix &m, int chunks_, int begin, int end) : chunks(chunks_)
  {
    int warps = blockDim.x >> 5, steps = (end - begin) * chunks;
    warp = threadIdx.x >> 5;
    steps_warp = (int)((unsigned)(steps + warps - 1) / (unsigned)warps);
    int first = min(warp * steps_warp, steps);
    left = min(first + steps_warp, steps) - first;
    group = (int)((unsigned)first / (unsigned)chunks);
    until = chunks - (first - group * chunks);
    int64_t piece = ((int64_t)begin * chunks + first) * 32 + (threadIdx.x & 31);
    codes = (const uint8_t *)m.codes + piece * 16;
    scale = (const uint8_t *)m.scale + (piece >> 1) * 2;
  }

  __device__ __forceinline__ void load(Q8Raw &raw, int at, bool there) const { load_if(raw, codes + at * 512, scale + at * 32, there); }

  __device__ __forceinline__ void preload()
  {
#pragma unroll
    for (int i = 0; i < DEPTH; i++) {
      ring[i].w = make_uint4(0, 0, 0, 0);
      load(ring[i], i, i < left);
    }
    codes += DEPTH * 512;
    scale += DEPTH * 32;
  }

  __device__ __forceinline__ void flush(float sum, float *segments) const
  {
#pragma unroll
    for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, o);
    if ((threadIdx.x & 31) == 0) segments[group + warp] = sum;
  }

  __device__ __forceinline__ void run(const SharedInput &in, float *segments)
  {
    const int lane = threadIdx.x & 31, x_row = (lane ^ (lane >> 3)) * 16, scale_row = (lane >> 1) * 4; /* cell(): odd chunks flip bit 2 */
    const char *high = (const char *)in.high, *low = (const char *)in.low, *scales = (const char *)in.scales;
    int chunk = chunks - until, x_at = (x_row ^ (chunk & 1) * 64) + chunk * 512, scale_at = scale_row + chunk * 64, u;
    float sum = 0;
    for (u = 0; u < left; u += DEPTH) {
#pragma unroll
      for (int i = 0; i < DEPTH; i++) {
        const Q8Int::X x{*(const int4 *)(high + x_at), *(const int4 *)(low + x_at), *(const float *)(scales + scale_at)};
        sum += Q8Int::dot(ring[i], x, in);
        load(ring[i], i, u + i + DEPTH < left);
        x_at = (x_at ^ 64) + 512;
        scale_at += 64;
        if (--until == 0) {
          if (u + i + 1 - chunks < left) flush(sum, segments); /* the row began within the share */
          sum = 0;
          until = chunks;
          group++;
          x_at = x_row;
          scale_at = scale_row;
        }
      }
      codes += DEPTH * 512;
      scale += DEPTH * 32;
    }
    if (left && until < chunks && u - (chunks - until) < left) flush(sum, segments);
  }

  /* The sum of row row_begin + i, after a block barrier behind run(). */
  __device__ __forceinline__ float row_sum(const float *segments, int i) const
  {
    int first = i * chunks / steps_warp, last = ((i + 1) * chunks - 1) / steps_warp;
    float sum = 0;
    for (int w = first; w <= last; w++) sum += segments[i + w];
    return sum;
  }
};

} /* namespace k3 */
#endif
