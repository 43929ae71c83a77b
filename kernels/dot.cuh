/* Pieces of weights: how each format is loaded, decoded and multiplied. Layer: backend (CUDA), device code.
 *
 * A piece is what one lane loads at once (16 bytes of codes). Formats named …Int multiply by the activation's 16-bit codes, a
 * dp4a for each of their two bytes (iq1_s, and the experts' mxfp4: mma_rows.cuh); those named …Exact by its float32 values, with
 * the weights decoded to float.
 * Twin: k3_host_dequantise; source: model.md "Block formats". */
#ifndef K3_KERNELS_DOT_CUH
#define K3_KERNELS_DOT_CUH

#include <cuda_fp16.h>

#include "kernels/weights.h"

namespace k3 {

/* The input vector in shared memory. 16-byte cells stand at cell(i), so that lanes at a stride of 2, 4 or 8 cells meet
 * different banks. */
struct SharedInput {
  int4 *high, *low;     /* the codes' two bytes (quantise.cuh), 16 values a cell each */
  float *scales;        /* one a block of 32 */
  float *sums;          /* one a block of 32: SUMS 1 scale * sum of the codes (iq1_s), 2 -12 times their sum, an int (mxfp4) */
  float4 *values;       /* 4 values a cell */
  uint32_t *codebook;   /* iq1_s, packed; beside codes: BOOK_COPIES of it */
};

static __device__ __forceinline__ int cell(int i) { return i ^ ((i >> 3) & 7); }

/* Where the parts of a matrix begin. */
struct Parts {
  const uint8_t *codes, *high, *scale;
};

static __device__ __forceinline__ Parts parts_of(const K3CudaMatrix &m)
{
  return Parts{(const uint8_t *)m.codes, (const uint8_t *)m.high, (const uint8_t *)m.scale};
}

/* Weights are read once: they do not stay in L1, and give way first in the L2 to what is used again. */
static __device__ __forceinline__ uint64_t stream_policy()
{
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
static __device__ __forceinline__ uint4 load16(const void *address)
{
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], %5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address), "l"(stream_policy()));
  return v;
}
static __device__ __forceinline__ uint2 load8(const void *address)
{
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v2.u32 {%0,%1}, [%2], %3;"
               : "=r"(v.x), "=r"(v.y) : "l"(address), "l"(stream_policy()));
  return v;
}
static __device__ __forceinline__ uint32_t load2(const void *address)
{
  uint16_t v;
  asm volatile("ld.global.nc.L2::cache_hint.u16 %0, [%1], %2;" : "=h"(v) : "l"(address), "l"(stream_policy()));
  return v;
}
static __device__ __forceinline__ uint32_t load1(const void *address)
{
  uint32_t v;
  asm volatile("ld.global.nc.L2::cache_hint.u8 %0, [%1], %2;" : "=r"(v) : "l"(address), "l"(stream_policy()));
  return v;
}

static __device__ __forceinline__ void prefetch_l2(const void *address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

static __device__ __forceinline__ float half_bits(uint32_t bits)
{
  return __half2float(__ushort_as_half((unsigned short)bits));
}
static __device__ __forceinline__ float e8m0(uint32_t s) { return __uint_as_float(s ? s << 23 : 0x00400000u); }
static __device__ __forceinline__ uint32_t word(const uint4 &v, int i)
{
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}
static __device__ __forceinline__ int word(const int4 &v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

/* Σ w · code from the sums of the two planes. */
static __device__ __forceinline__ float both(int high, int low) { return (float)(high * 256 + low); }

static __device__ __forceinline__ float dot4(const float4 &x, float a, float b, float c, float d, float sum)
{
  return fmaf(x.x, a, fmaf(x.y, b, fmaf(x.z, c, fmaf(x.w, d, sum))));
}

/* Where piece `piece` of row `row` is, of `pieces` a row. */
struct Rowwise {
  enum { STRIDE = 4 }; /* of four pieces on */
  template <class I>
  static __device__ __forceinline__ I index(I row, int piece, int pieces)
  {
    return row * pieces + piece;
  }
};

/* ---- q8_0: 16 codes, half a block ---- */
struct Q8Raw {
  uint4 w;
  uint32_t d;
};
struct Q8Base : Rowwise {
  enum { VALUES = 16 };
  typedef Q8Raw Raw;
  static __device__ __forceinline__ Raw load(const Parts &p, int64_t i)
  {
    Raw r;
    r.w = load16(p.codes + i * 16);
    r.d = load2(p.scale + (i >> 1) * 2);
    return r;
  }
  static __device__ __forceinline__ Raw zero() { return Raw{make_uint4(0, 0, 0, 0), 0}; }
  static __device__ __forceinline__ uint32_t touch(const Raw &r) { return r.w.x | r.d; }
};
struct Q8Int : Q8Base {
  enum { CODES = 1, FLOATS = 0, BOOK = 0, SUMS = 0 };
  struct X {
    int4 high, low;
    float s;
  };
  static __device__ __forceinline__ X load_x(const SharedInput &x, int i)
  {
    return X{x.high[cell(i)], x.low[cell(i)], x.scales[i >> 1]};
  }
  static __device__ __forceinline__ float dot(const Raw &r, const X &x, const SharedInput &)
  {
    int high = 0, low = 0;
#pragma unroll
    for (int k = 0; k < 4; k++) {
      high = __dp4a((int)word(r.w, k), word(x.high, k), high);
      low = __dp4a((int)word(r.w, k), word(x.low, k), low);
    }
    return both(high, low) * (half_bits(r.d) * x.s);
  }
};
struct Q8Exact : Q8Base {
  enum { CODES = 0, FLOATS = 1, BOOK = 0, SUMS = 0 };
  struct X {
    int i;
  };
  static __device__ __forceinline__ X load_x(const SharedInput &, int i) { return X{i}; }
  static __device__ __forceinline__ float dot(const Raw &r, const X &x, const SharedInput &in)
  {
    float sum = 0;
#pragma unroll
    for (int k = 0; k < 4; k++) {
      int w = (int)word(r.w, k);
      sum = dot4(in.values[cell(x.i * 4 + k)], (float)(int8_t)w, (float)(int8_t)(w >> 8), (float)(int8_t)(w >> 16),
                 (float)(w >> 24), sum);
    }
    return sum * half_bits(r.d);
  }
};

/* ---- mxfp4: 32 codes, a block ---- */
struct Mxfp4Raw {
  uint4 w;
  uint32_t s;
};
/* Twice the e2m1 values of the nibbles at bits 0, 4, 8, 12, as four int8. */
static __device__ __forceinline__ int e2m1x4(uint32_t nibbles)
{
  uint32_t select = nibbles & 0x7777u;
  uint32_t plus = __byte_perm(0x03020100u, 0x0c080604u, select);
  uint32_t minus = __byte_perm(0xfdfeff00u, 0xf4f8fafcu, select);
  return (int)__byte_perm(plus, minus, 0x3210u | ((nibbles & 0x8888u) >> 1));
}
struct Mxfp4Base : Rowwise {
  enum { VALUES = 32 };
  typedef Mxfp4Raw Raw;
  static __device__ __forceinline__ Raw load(const Parts &p, int64_t i)
  {
    Raw r;
    r.w = load16(p.codes + i * 16);
    r.s = load1(p.scale + i);
    return r;
  }
  static __device__ __forceinline__ Raw zero() { return Raw{make_uint4(0, 0, 0, 0), 0}; }
  static __device__ __forceinline__ uint32_t touch(const Raw &r) { return r.w.x | r.s; }
};
struct Mxfp4Int : Mxfp4Base {
  enum { CODES = 1, FLOATS = 0, BOOK = 0, SUMS = 2 };
  static constexpr float UNIT = 1.0f;
  struct X {
    int4 high[2], low[2];
    float s;
  };
  static __device__ __forceinline__ X load_x(const SharedInput &x, int i)
  {
    int a = cell(2 * i), b = cell(2 * i + 1);
    return X{{x.high[a], x.high[b]}, {x.low[a], x.low[b]}, x.scales[i]};
  }
  static __device__ __forceinline__ float dot(const Raw &r, const X &x, const SharedInput &)
  {
    int high = 0, low = 0;
#pragma unroll
    for (int k = 0; k < 8; k++) {
      int w = e2m1x4(word(r.w, k >> 1) >> ((k & 1) * 16));
      high = __dp4a(w, word(x.high[k >> 2], k & 3), high);
      low = __dp4a(w, word(x.low[k >> 2], k & 3), low);
    }
    return both(high, low) * (e8m0(r.s) * 0.5f * x.s);
  }
};
struct Mxfp4Exact : Mxfp4Base {
  enum { CODES = 0, FLOATS = 1, BOOK = 0, SUMS = 0 };
  struct X {
    int i;
  };
  static __device__ __forceinline__ X load_x(const SharedInput &, int i) { return X{i}; }
  static __device__ __forceinline__ float dot(const Raw &r, const X &x, const SharedInput &in)
  {
    float sum = 0;
#pragma unroll
    for (int k = 0; k < 8; k++) {
      int w = e2m1x4(word(r.w, k >> 1) >> ((k & 1) * 16));
      sum = dot4(in.values[cell(x.i * 8 + k)], (float)(int8_t)w, (float)(int8_t)(w >> 8), (float)(int8_t)(w >> 16),
                 (float)(w >> 24), sum);
    }
    return sum * (e8m0(r.s) * 0.5f);
  }
};

/* The bytes of (low, high) that the nibbles of `select` name; 8 more: the sign of that byte, eight times. __byte_perm knows no signs. */
static __device__ __forceinline__ uint32_t permute_signs(uint32_t low, uint32_t high, uint32_t select)
{
  uint32_t r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(low), "r"(high), "r"(select));
  return r;
}
/* Values 0 … 3 and 4 … 7 of a codebook entry, as bytes. Nibble j names values j and 4 + j, of the nine pairs that there are: 0 … 7
 * stand in the tables, and 15, the sign of two bytes that are no less than zero, is the pair of zeros. */
static __device__ __forceinline__ uint32_t entry_first(uint32_t entry) { return permute_signs(0xff0100ffu, 0x0100ff01u, entry); }
static __device__ __forceinline__ uint32_t entry_second(uint32_t entry) { return permute_signs(0x00ffffffu, 0x01010100u, entry); }

/* (a & b) | c in one instruction: of two constants the compiler makes two. */
static __device__ __forceinline__ uint32_t and_or(uint32_t a, uint32_t b, uint32_t c)
{
  uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}

/* ---- iq1_s: 128 codes, half a super-block: four sub-blocks of 32. A record (weights.h) has half of the entries of both halves ---- */
struct Iq1Raw {
  uint4 qs;
  uint2 qh;
  uint32_t d;
};
struct Iq1Base {
  enum { VALUES = 128, STRIDE = 32 };
  typedef Iq1Raw Raw;
  /* Eight rows of a block of 256 values, two pieces each, stand together (weights.h). */
  template <class I>
  static __device__ __forceinline__ I index(I row, int piece, int pieces)
  {
    return (row >> 3) * (pieces * 8) + ((piece >> 1) << 4 | ((int)row & 7) << 1 | (piece & 1));
  }
  static __device__ __forceinline__ Raw load(const Parts &p, int64_t i)
  {
    Raw r;
    r.qs = load16(p.codes + i * 16);
    r.qh = load8(p.high + i * 8);
    r.d = load2(p.scale + (i >> 1) * 2);
    return r;
  }
  static __device__ __forceinline__ Raw zero() { return Raw{make_uint4(0, 0, 0, 0), make_uint2(0, 0), 0}; }
  /* Some bits of each load. */
  static __device__ __forceinline__ uint32_t touch(const Raw &r) { return r.qs.x | r.qh.x | r.d; }
  /* The word of sub-blocks 2m and 2m + 1 (weights.h), shifted so that sub-block k's bits are where those of an even one lie. */
  static __device__ __forceinline__ uint32_t high_of(const uint2 &qh, int k) { return (k < 2 ? qh.x : qh.y) << (k & 1); }
  /* 2 s + 1 of the even and of the odd sub-block of a pair, with the sign of delta, times SCALES_UNIT, as two half floats: their
   * smallest numbers, whose bits are integers. */
  static constexpr float SCALES_UNIT = 0x1p-20f;
  static __device__ __forceinline__ uint32_t scales_of(uint32_t pair)
  {
    return and_or(__funnelshift_r(pair, pair, 6), 0x80c080c0u, and_or(pair << 1, 0x00200020u, 0x00100010u));
  }
  static __device__ __forceinline__ float scale_of(uint32_t pair, int odd)
  {
    return fabsf(half_bits(scales_of(pair) >> (16 * odd) & 0xffffu)) * (1.0f / SCALES_UNIT);
  }
  static __device__ __forceinline__ float delta_of(uint32_t pair, int odd) { return pair >> (odd ? 5 : 21) & 1u ? -0.125f : 0.125f; }
  /* The codebook entry of byte l; `high` as high_of gives it. */
  static __device__ __forceinline__ int entry_index(uint32_t qs, uint32_t high, int l)
  {
    uint32_t byte = high >> (8 * l);
    return (int)((qs >> (8 * l) & 255u) << 3 | (byte >> 5 & 4u) | (byte >> 2 & 2u) | (byte >> 1 & 1u));
  }
};
struct Iq1Int : Iq1Base { /* multiplied by mma_rows.cuh */
  enum { CODES = 1, FLOATS = 0, BOOK = 1, SUMS = 1 };
  static constexpr float UNIT = 0.125f / SCALES_UNIT; /* mma_rows.cuh sums eight times the products, times SCALES_UNIT */
};
struct Iq1ExactRaw {
  uint4 qs[2];
  uint2 qh[2];
  uint32_t d;
};
struct Iq1Exact : Iq1Base {
  enum { CODES = 0, FLOATS = 1, BOOK = 1, SUMS = 0 };
  typedef Iq1ExactRaw Raw;
  static __device__ __forceinline__ Raw load(const Parts &p, int64_t i)
  {
    Raw r;
#pragma unroll
    for (int u = 0; u < 2; u++) r.qs[u] = load16(p.codes + (i & ~1ll) * 16 + u * 16), r.qh[u] = load8(p.high + (i & ~1ll) * 8 + u * 8);
    r.d = load2(p.scale + (i >> 1) * 2);
    return r;
  }
  static __device__ __forceinline__ Raw zero() { return Raw{}; }
  struct X {
    int i;
  };
  static __device__ __forceinline__ X load_x(const SharedInput &, int i) { return X{i}; }
  static __device__ __forceinline__ float dot(const Raw &r, const X &x, const SharedInput &in)
  {
    const int half = x.i & 1;
    float total = 0;
#pragma unroll 1
    for (int k = 0; k < 4; k++) {
      const uint2 own = half ? r.qh[1] : r.qh[0];
      uint32_t pair = k < 2 ? own.x : own.y;
      float sum = 0, delta = delta_of(pair, k & 1);
#pragma unroll
      for (int l = 0; l < 4; l++) {
        int index = entry_index(word(r.qs[l >> 1], k), high_of(r.qh[l >> 1], k), 2 * half + (l & 1));
        uint32_t e = ((const uint16_t *)in.codebook)[index], a = entry_first(e), b = entry_second(e);
        int at = x.i * 32 + k * 8 + l * 2;
        sum = dot4(in.values[cell(at)], (float)(int8_t)a + delta, (float)(int8_t)(a >> 8) + delta, (float)(int8_t)(a >> 16) + delta,
                   (float)(int8_t)(a >> 24) + delta, sum);
        sum = dot4(in.values[cell(at + 1)], (float)(int8_t)b + delta, (float)(int8_t)(b >> 8) + delta,
                   (float)(int8_t)(b >> 16) + delta, (float)(int8_t)(b >> 24) + delta, sum);
      }
      total = fmaf(scale_of(pair, k & 1), sum, total);
    }
    return total * half_bits(r.d);
  }
};

/* ---- bf16, f16: 8 values; f32: 4 values; always times float activations ---- */
struct PlainRaw {
  uint4 w;
};
struct PlainBase : Rowwise {
  enum { CODES = 0, FLOATS = 1, BOOK = 0, SUMS = 0 };
  typedef PlainRaw Raw;
  struct X {
    int i;
  };
  static __device__ __forceinline__ Raw load(const Parts &p, int64_t i) { return Raw{load16(p.codes + i * 16)}; }
  static __device__ __forceinline__ Raw zero() { return Raw{make_uint4(0, 0, 0, 0)}; }
  static __device__ __forceinline__ X load_x(const SharedInput &, int i) { return X{i}; }
};
struct Bf16 : PlainBase {
  enum { VALUES = 8 };
  static __device__ __forceinline__ float low(uint32_t w) { return __uint_as_float(w << 16); }
  static __device__ __forceinline__ float high(uint32_t w) { return __uint_as_float(w & 0xffff0000u); }
  static __device__ __forceinline__ float dot(const Raw &r, const X &x, const SharedInput &in)
  {
    float sum = dot4(in.values[cell(2 * x.i)], low(r.w.x), high(r.w.x), low(r.w.y), high(r.w.y), 0.0f);
    return dot4(in.values[cell(2 * x.i + 1)], low(r.w.z), high(r.w.z), low(r.w.w), high(r.w.w), sum);
  }
};
struct F16 : PlainBase {
  enum { VALUES = 8 };
  static __device__ __forceinline__ float dot(const Raw &r, const X &x, const SharedInput &in)
  {
    float sum = 0;
#pragma unroll
    for (int k = 0; k < 2; k++) {
      uint32_t a = word(r.w, 2 * k), b = word(r.w, 2 * k + 1);
      sum = dot4(in.values[cell(2 * x.i + k)], half_bits(a & 0xffffu), half_bits(a >> 16), half_bits(b & 0xffffu), half_bits(b >> 16), sum);
    }
    return sum;
  }
};
struct F32 : PlainBase {
  enum { VALUES = 4 };
  static __device__ __forceinline__ float dot(const Raw &r, const X &x, const SharedInput &in)
  {
    return dot4(in.values[cell(x.i)], __uint_as_float(r.w.x), __uint_as_float(r.w.y), __uint_as_float(r.w.z),
                __uint_as_float(r.w.w), 0.0f);
  }
};

/* Element (row, col) of a matrix of plain floats. */
static __device__ __forceinline__ float plain_element(const K3CudaMatrix &m, int64_t row, int64_t col)
{
  int64_t at = row * m.cols + col;
  switch (m.type) {
  case K3_TYPE_F32: return ((const float *)m.codes)[at];
  case K3_TYPE_BF16: return __uint_as_float((uint32_t)((const uint16_t *)m.codes)[at] << 16);
  default: return half_bits(((const uint16_t *)m.codes)[at]);
  }
}

/* Element (row, col) of a matrix, decoded (GGUF blocks: block_element in blocks.cuh). */
static __device__ inline float element(const K3CudaMatrix &m, int64_t row, int64_t col)
{
  int64_t at = row * m.cols + col;
  switch (m.type) {
  case K3_TYPE_F32:
  case K3_TYPE_BF16:
  case K3_TYPE_F16: return plain_element(m, row, col);
  case K3_TYPE_Q8_0: return (float)((const int8_t *)m.codes)[at] * half_bits(((const uint16_t *)m.scale)[at >> 5]);
  case K3_TYPE_MXFP4: {
    uint32_t nibble = (((const uint8_t *)m.codes)[at >> 1] >> ((at & 1) * 4)) & 15u;
    return (float)(int8_t)(e2m1x4(nibble) & 0xff) * (0.5f * e8m0(((const uint8_t *)m.scale)[at >> 5]));
  }
  default: {
    int64_t piece = Iq1Base::index(row, (int)(col >> 7), (int)(m.cols >> 7)), record = (piece & ~1ll) | (col >> 4 & 1);
    int k = (int)(col >> 5) & 3, odd = k & 1, l = (int)(col >> 7 & 1) * 2 + ((int)(col >> 3) & 1);
    uint32_t qs = ((const uint32_t *)m.codes)[record * 4 + k], pair = ((const uint32_t *)m.high)[piece * 2 + (k >> 1)];
    uint2 high = ((const uint2 *)m.high)[record];
    uint32_t e = ((const uint16_t *)m.codebook)[Iq1Base::entry_index(qs, Iq1Base::high_of(high, k), l)];
    float value = (float)(int8_t)((at & 4 ? entry_second(e) : entry_first(e)) >> (8 * (at & 3)));
    return half_bits(((const uint16_t *)m.scale)[piece >> 1]) * Iq1Base::scale_of(pair, odd) * (value + Iq1Base::delta_of(pair, odd));
  }
  }
}

} /* namespace k3 */
#endif
