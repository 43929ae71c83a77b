/* One description of every block format, for the host and for CUDA. Layer: plan (pure, inline).
 *
 * A block's bytes stand in up to three parts (codes, high, scale; K3Format says where they begin in a stored block), on the
 * device each in an array of its own. A block is decoded in units of 32 or 64 values, one lane's load on the device, and a
 * unit in runs of 16 values that share a scale:
 *     w = scale * code + offset,   code a signed byte, four to a word, the first value lowest.
 * Scales and products are exact in float32 and only the offset's sum rounds, so that a decoded value is bit-equal to the
 * public package's whatever the order of its operations. Formats without an offset have offset -0, which changes nothing.
 *
 * Source: the public package gguf 0.19.0 (gguf/quants.py) for what the bits mean, model.md for mxfp4's order of nibbles. */
#ifndef K3_PLAN_BLOCKS_H
#define K3_PLAN_BLOCKS_H

#include "base/float16.h"
#include "plan/formats.h"

#ifdef __CUDACC__
#define K3_BLOCK_INLINE static __forceinline__ __host__ __device__
#else
#define K3_BLOCK_INLINE static inline
#endif

enum { K3_BLOCK_WORDS = 20, K3_BLOCK_RUN = 16 };

/* Where the parts of one block are. */
typedef struct {
  const uint8_t *codes, *high, *scale;
} K3BlockParts;

/* A packed codebook (codebook.h): entry i lies i * grid_step bytes behind grid, sign selector i i * sign_step behind signs. */
typedef struct {
  const uint32_t *grid, *signs;
  uint32_t grid_step, sign_step;
} K3BlockBook;

/* 16 values. */
typedef struct {
  uint32_t code[4];
  float scale, offset;
} K3BlockRun;

/* ---- shape of a unit ---- */

/* Runs of a unit: 2 or 4. */
K3_BLOCK_INLINE int k3_block_runs(K3Type type)
{
  switch (type) {
  case K3_TYPE_IQ1_S:
  case K3_TYPE_IQ1_M:
  case K3_TYPE_IQ2_XXS:
  case K3_TYPE_IQ2_XS:
  case K3_TYPE_IQ2_S:
  case K3_TYPE_IQ3_XXS:
  case K3_TYPE_IQ3_S:
  case K3_TYPE_Q2_K:
  case K3_TYPE_Q3_K:
  case K3_TYPE_Q4_K:
  case K3_TYPE_Q5_K:
  case K3_TYPE_Q6_K:
  case K3_TYPE_IQ4_XS: return 4;
  default: return 2;
  }
}

/* The runs of a unit lie 32 values apart; elsewhere they follow one another. */
K3_BLOCK_INLINE int k3_block_strided(K3Type type)
{
  return type == K3_TYPE_Q2_K || type == K3_TYPE_Q3_K || type == K3_TYPE_Q6_K;
}

/* Runs 2i and 2i + 1 of a unit have one scale and one offset: 32 values. */
K3_BLOCK_INLINE int k3_block_wide(K3Type type)
{
  return !k3_block_strided(type) && type != K3_TYPE_IQ1_M && type != K3_TYPE_IQ2_XS && type != K3_TYPE_IQ2_S;
}

/* Where run `run` of unit `unit` begins, in runs of 16 from the block's first value. */
K3_BLOCK_INLINE int k3_block_run_at(K3Type type, int unit, int run)
{
  int runs = k3_block_runs(type);
  return k3_block_strided(type) ? (unit >> 1) * 2 * runs + (unit & 1) + 2 * run : unit * runs + run;
}

K3_BLOCK_INLINE int k3_block_has_offset(K3Type type)
{
  return type == K3_TYPE_Q4_1 || type == K3_TYPE_Q5_1 || type == K3_TYPE_Q2_K || type == K3_TYPE_Q4_K || type == K3_TYPE_Q5_K;
}

/* ---- loads: parts are aligned on the device, and read once; not on the host ---- */

K3_BLOCK_INLINE uint32_t k3_block_u8(const uint8_t *at) { return at[0]; }
K3_BLOCK_INLINE uint32_t k3_block_u16(const uint8_t *at)
{
#ifdef __CUDA_ARCH__
  return __ldg((const uint16_t *)at);
#else
  return (uint32_t)at[0] | (uint32_t)at[1] << 8;
#endif
}
K3_BLOCK_INLINE uint32_t k3_block_u32(const uint8_t *at)
{
#ifdef __CUDA_ARCH__
  return __ldg((const uint32_t *)at);
#else
  uint32_t word;
  memcpy(&word, at, 4);
  return word;
#endif
}
K3_BLOCK_INLINE void k3_block_2(const uint8_t *at, uint32_t *word)
{
#ifdef __CUDA_ARCH__
  uint2 v = __ldg((const uint2 *)at);
  word[0] = v.x, word[1] = v.y;
#else
  memcpy(word, at, 8);
#endif
}
K3_BLOCK_INLINE void k3_block_4(const uint8_t *at, uint32_t *word)
{
#ifdef __CUDA_ARCH__
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3]) : "l"(at));
#else
  memcpy(word, at, 16);
#endif
}
/* The same where several lanes want these bytes. */
K3_BLOCK_INLINE void k3_block_4_shared(const uint8_t *at, uint32_t *word)
{
#ifdef __CUDA_ARCH__
  uint4 v = __ldg((const uint4 *)at);
  word[0] = v.x, word[1] = v.y, word[2] = v.z, word[3] = v.w;
#else
  memcpy(word, at, 16);
#endif
}

/* The words of unit `unit` of the block at `p`. */
K3_BLOCK_INLINE void k3_block_fetch(K3Type type, K3BlockParts p, int unit, uint32_t word[K3_BLOCK_WORDS])
{
  const int half = unit >> 1, odd = unit & 1;
  switch (type) {
  case K3_TYPE_Q8_0:
    k3_block_4(p.codes, word);
    k3_block_4(p.codes + 16, word + 4);
    word[8] = k3_block_u16(p.scale);
    break;
  case K3_TYPE_MXFP4:
    k3_block_4(p.codes, word);
    word[4] = k3_block_u8(p.scale);
    break;
  case K3_TYPE_Q4_0:
  case K3_TYPE_IQ4_NL:
    k3_block_4(p.codes, word);
    word[4] = k3_block_u16(p.scale);
    break;
  case K3_TYPE_Q4_1:
    k3_block_4(p.codes, word);
    word[4] = k3_block_u32(p.scale);
    break;
  case K3_TYPE_Q5_0:
    k3_block_4(p.codes, word);
    word[4] = k3_block_u16(p.scale);
    word[5] = k3_block_u32(p.high);
    break;
  case K3_TYPE_Q5_1:
    k3_block_4(p.codes, word);
    word[4] = k3_block_u32(p.scale);
    word[5] = k3_block_u32(p.high);
    break;
  case K3_TYPE_Q2_K:
    k3_block_4(p.codes + 16 + 16 * unit, word);
    k3_block_2(p.codes + 8 * half, word + 4);
    word[6] = k3_block_u32(p.scale);
    break;
  case K3_TYPE_Q3_K:
    k3_block_4(p.codes + 32 + 16 * unit, word);
    k3_block_4_shared(p.codes + 16 * odd, word + 4);
    for (int i = 0; i < 3; i++) word[8 + i] = k3_block_u32(p.high + 4 * i);
    word[11] = k3_block_u16(p.scale);
    break;
  case K3_TYPE_Q4_K:
    k3_block_4(p.codes + 16 + 32 * unit, word);
    k3_block_4(p.codes + 32 + 32 * unit, word + 4);
    k3_block_4_shared(p.codes, word + 8);
    break;
  case K3_TYPE_Q5_K:
    k3_block_4(p.codes + 48 + 32 * unit, word);
    k3_block_4(p.codes + 64 + 32 * unit, word + 4);
    k3_block_4_shared(p.codes, word + 8);
    k3_block_4_shared(p.codes + 16, word + 12);
    k3_block_4_shared(p.codes + 32, word + 16);
    break;
  case K3_TYPE_Q6_K:
    k3_block_4(p.codes + 64 * half + 16 * odd, word);
    k3_block_4(p.codes + 64 * half + 32 + 16 * odd, word + 4);
    k3_block_4(p.codes + 128 + 32 * half + 16 * odd, word + 8);
    k3_block_2(p.codes + 192 + 8 * half, word + 12);
    word[14] = k3_block_u16(p.scale);
    break;
  case K3_TYPE_IQ1_S:
    k3_block_2(p.codes + 8 * unit, word);
    word[2] = k3_block_u32(p.high + 4 * unit);
    word[3] = k3_block_u16(p.scale);
    break;
  case K3_TYPE_IQ1_M:
    k3_block_2(p.codes + 8 * unit, word);
    word[2] = k3_block_u32(p.codes + 32 + 4 * unit);
    k3_block_2(p.scale, word + 3);
    break;
  case K3_TYPE_IQ2_XXS:
    k3_block_4(p.codes + 16 * unit, word);
    word[4] = k3_block_u16(p.scale);
    break;
  case K3_TYPE_IQ2_XS:
    k3_block_4(p.codes + 16 * unit, word);
    word[4] = k3_block_u16(p.high + 2 * unit);
    word[5] = k3_block_u16(p.scale);
    break;
  case K3_TYPE_IQ2_S:
    k3_block_2(p.codes + 8 * unit, word);
    k3_block_2(p.codes + 32 + 8 * unit, word + 2);
    word[4] = k3_block_u16(p.high + 2 * unit);
    word[5] = k3_block_u16(p.high + 8 + 2 * unit);
    word[6] = k3_block_u16(p.scale);
    break;
  case K3_TYPE_IQ3_XXS:
    k3_block_4(p.codes + 16 * unit, word);
    k3_block_2(p.codes + 64 + 8 * unit, word + 4);
    word[6] = k3_block_u16(p.scale);
    break;
  case K3_TYPE_IQ3_S:
    k3_block_4(p.codes + 16 * unit, word);
    word[4] = k3_block_u16(p.high + 2 * unit);
    word[5] = k3_block_u32(p.high + 8 + 8 * unit);
    word[6] = k3_block_u32(p.high + 12 + 8 * unit);
    word[7] = k3_block_u8(p.high + 40 + unit);
    word[8] = k3_block_u16(p.scale);
    break;
  case K3_TYPE_IQ4_XS:
    k3_block_4(p.codes + 32 * unit, word);
    k3_block_4(p.codes + 32 * unit + 16, word + 4);
    k3_block_2(p.scale, word + 8);
    break;
  default: break;
  }
}

/* ---- small parts of the decoders: four bytes at a time ---- */

K3_BLOCK_INLINE float k3_block_half(uint32_t bits)
{
#ifdef __CUDA_ARCH__
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((uint16_t)bits));
  return value;
#else
  return k3_f16_to_float((uint16_t)bits);
#endif
}

/* Byte i of the result is the byte of a (0 … 3) or b (4 … 7) that nibble i of the selector names; bit 3 of a nibble must be 0. */
K3_BLOCK_INLINE uint32_t k3_block_permute(uint32_t a, uint32_t b, uint32_t selector)
{
#ifdef __CUDA_ARCH__
  uint32_t word; /* __byte_perm would mask the selector first */
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(word) : "r"(a), "r"(b), "r"(selector));
  return word;
#else
  uint64_t both = (uint64_t)b << 32 | a;
  uint32_t word = 0;
  for (int i = 0; i < 4; i++) word |= (uint32_t)(both >> (selector >> (4 * i) & 7u) * 8u & 0xffu) << (8 * i);
  return word;
#endif
}

/* Bytes of 0 … 127 minus a constant of at most 128 each, signed. */
K3_BLOCK_INLINE uint32_t k3_block_less(uint32_t bytes, uint32_t constant)
{
  return ((bytes | 0x80808080u) - constant) ^ 0x80808080u;
}

/* Bit i of the low four to bit 0 of byte i. */
K3_BLOCK_INLINE uint32_t k3_block_spread(uint32_t bits) { return ((bits & 15u) * 0x00204081u) & 0x01010101u; }

K3_BLOCK_INLINE uint32_t k3_block_byte(uint32_t word, int i)
{
#ifdef __CUDA_ARCH__
  return k3_block_permute(word, 0, 0x4440u + (uint32_t)i);
#else
  return word >> (8 * i) & 0xffu;
#endif
}

/* Entry i of a table whose entries are `step` bytes apart. */
K3_BLOCK_INLINE uint32_t k3_block_look(const uint32_t *table, uint32_t step, uint32_t i)
{
  return *(const uint32_t *)((const char *)table + i * step);
}

/* Twice the e2m1 values of four nibbles (the first lowest). */
K3_BLOCK_INLINE uint32_t k3_block_e2m1(uint32_t nibbles)
{
  uint32_t plus = k3_block_permute(0x03020100u, 0x0c080604u, nibbles & 0x7777u);
  uint32_t minus = k3_block_permute(0xfdfeff00u, 0xf4f8fafcu, nibbles & 0x7777u);
  return k3_block_permute(plus, minus, 0x3210u | (nibbles & 0x8888u) >> 1);
}

/* Four entries of a table of 16 signed bytes. */
K3_BLOCK_INLINE uint32_t k3_block_table16(const uint32_t table[4], uint32_t nibbles)
{
  uint32_t low = k3_block_permute(table[0], table[1], nibbles & 0x7777u);
  uint32_t high = k3_block_permute(table[2], table[3], nibbles & 0x7777u);
  return k3_block_permute(low, high, 0x3210u | (nibbles & 0x8888u) >> 1);
}

/* Of the four bytes of `word`: the values of their low (run 0) or high (run 1) nibbles. */
K3_BLOCK_INLINE uint32_t k3_block_iq4(const K3BlockBook *book, uint32_t word, int run)
{
  uint32_t a = k3_block_table16(book->grid, word), b = k3_block_table16(book->grid, word >> 16);
  return k3_block_permute(a, b, run ? 0x7531u : 0x6420u);
}

/* iq1: eight values of -1, 0, 1 with a shift of 1/8 (minus: 0) or -1/8 (4), times eight. */
K3_BLOCK_INLINE void k3_block_iq1(const K3BlockBook *book, uint32_t index, uint32_t minus, uint32_t code[2])
{
  uint32_t entry = k3_block_look(book->grid, book->grid_step, index) + minus * 0x11111111u; /* nibbles of at most 2 */
  code[0] = k3_block_permute(0x000901f9u, 0x0007fff7u, entry);
  code[1] = k3_block_permute(0x000901f9u, 0x0007fff7u, entry >> 16);
}

/* iq2: eight values of 8, 25, 43, and their signs. */
K3_BLOCK_INLINE void k3_block_iq2(const K3BlockBook *book, uint32_t index, uint32_t signs, uint32_t code[2])
{
  uint32_t entry = k3_block_look(book->grid, book->grid_step, index) | k3_block_look(book->signs, book->sign_step, signs);
  code[0] = k3_block_permute(0x002b1908u, 0x00d5e7f8u, entry);
  code[1] = k3_block_permute(0x002b1908u, 0x00d5e7f8u, entry >> 16);
}

/* iq3: four values out of eight; `minus`: their sign selectors. levels: the values, then their negatives. */
K3_BLOCK_INLINE uint32_t k3_block_iq3(const uint32_t levels[4], uint32_t entry, uint32_t minus)
{
  uint32_t plus = k3_block_permute(levels[0], levels[1], entry), negative = k3_block_permute(levels[2], levels[3], entry);
  return k3_block_permute(plus, negative, 0x3210u | minus);
}

/* q4_k, q5_k: six-bit scale and minimum of sub-block `sub`, from the three words behind d and dmin. */
K3_BLOCK_INLINE void k3_block_k_scale(const uint32_t head[4], int sub, K3BlockRun *run)
{
  uint32_t a = k3_block_byte(head[1], sub & 3), b = k3_block_byte(head[2], sub & 3), c = k3_block_byte(head[3], sub & 3);
  uint32_t scale = sub < 4 ? a & 63u : (c & 15u) | (a >> 2 & 0x30u);
  uint32_t minimum = sub < 4 ? b & 63u : c >> 4 | (b >> 2 & 0x30u);
  run->scale = k3_block_half(head[0]) * (float)scale;
  run->offset = -(k3_block_half(head[0] >> 16) * (float)minimum);
}

/* ---- one run ---- */

K3_BLOCK_INLINE void k3_block_decode(K3Type type, const uint32_t word[K3_BLOCK_WORDS], int unit, int r, const K3BlockBook *book,
                                     K3BlockRun *run)
{
  const int half = unit >> 1, odd = unit & 1;
  run->scale = 0.0f;
  run->offset = -0.0f;
  switch (type) {
  case K3_TYPE_Q8_0:
    for (int k = 0; k < 4; k++) run->code[k] = r ? word[4 + k] : word[k];
    run->scale = k3_block_half(word[8]);
    break;
  case K3_TYPE_MXFP4: {
    for (int k = 0; k < 4; k++) run->code[k] = k3_block_e2m1((r ? word[2 + (k >> 1)] : word[k >> 1]) >> 16 * (k & 1));
    uint32_t s = word[4]; /* 2^(s-127): float32's own exponent, save 0, the subnormal 2^-127; 255 stands for NaN */
    run->scale = 0.5f * k3_float_from_bits(s == 255u ? 0x7fc00000u : s ? s << 23 : 0x00400000u);
    break;
  }
  case K3_TYPE_Q4_0:
    for (int k = 0; k < 4; k++) run->code[k] = k3_block_less(word[k] >> 4 * r & 0x0f0f0f0fu, 0x08080808u);
    run->scale = k3_block_half(word[4]);
    break;
  case K3_TYPE_Q4_1:
    for (int k = 0; k < 4; k++) run->code[k] = word[k] >> 4 * r & 0x0f0f0f0fu;
    run->scale = k3_block_half(word[4]);
    run->offset = k3_block_half(word[4] >> 16);
    break;
  case K3_TYPE_Q5_0:
    for (int k = 0; k < 4; k++)
      run->code[k] = k3_block_less((word[k] >> 4 * r & 0x0f0f0f0fu) | k3_block_spread(word[5] >> (16 * r + 4 * k)) << 4, 0x10101010u);
    run->scale = k3_block_half(word[4]);
    break;
  case K3_TYPE_Q5_1:
    for (int k = 0; k < 4; k++)
      run->code[k] = (word[k] >> 4 * r & 0x0f0f0f0fu) | k3_block_spread(word[5] >> (16 * r + 4 * k)) << 4;
    run->scale = k3_block_half(word[4]);
    run->offset = k3_block_half(word[4] >> 16);
    break;
  case K3_TYPE_IQ4_NL:
    for (int k = 0; k < 4; k++) run->code[k] = k3_block_iq4(book, word[k], r);
    run->scale = k3_block_half(word[4]);
    break;
  case K3_TYPE_Q2_K: {
    for (int k = 0; k < 4; k++) run->code[k] = word[k] >> 2 * r & 0x03030303u;
    uint32_t scale = k3_block_byte(r < 2 ? word[4] : word[5], 2 * (r & 1) + odd);
    run->scale = k3_block_half(word[6]) * (float)(scale & 15u);
    run->offset = -(k3_block_half(word[6] >> 16) * (float)(scale >> 4));
    break;
  }
  case K3_TYPE_Q3_K: {
    for (int k = 0; k < 4; k++)
      run->code[k] = k3_block_less((word[k] >> 2 * r & 0x03030303u) | (word[4 + k] >> (4 * half + r) & 0x01010101u) << 2, 0x04040404u);
    const int s = 8 * half + 2 * r + odd;
    uint32_t low = k3_block_byte(s & 4 ? word[9] : word[8], s & 3) >> 4 * half & 15u;
    uint32_t high = k3_block_byte(word[10], s & 3) >> 2 * (s >> 2) & 3u;
    run->scale = k3_block_half(word[11]) * (float)((int)(low | high << 4) - 32);
    break;
  }
  case K3_TYPE_Q4_K:
    for (int k = 0; k < 4; k++) run->code[k] = (r & 1 ? word[4 + k] : word[k]) >> 4 * (r >> 1) & 0x0f0f0f0fu;
    k3_block_k_scale(word + 8, 2 * unit + (r >> 1), run);
    break;
  case K3_TYPE_Q5_K:
    for (int k = 0; k < 4; k++)
      run->code[k] = ((r & 1 ? word[4 + k] : word[k]) >> 4 * (r >> 1) & 0x0f0f0f0fu) |
                     ((r & 1 ? word[16 + k] : word[12 + k]) >> (2 * unit + (r >> 1)) & 0x01010101u) << 4;
    k3_block_k_scale(word + 8, 2 * unit + (r >> 1), run);
    break;
  case K3_TYPE_Q6_K:
    for (int k = 0; k < 4; k++)
      run->code[k] = k3_block_less(((r & 1 ? word[4 + k] : word[k]) >> 4 * (r >> 1) & 0x0f0f0f0fu) |
                                     (word[8 + k] >> 2 * r & 0x03030303u) << 4, 0x20202020u);
    run->scale = k3_block_half(word[14]) * (float)(int8_t)k3_block_byte(r < 2 ? word[12] : word[13], 2 * (r & 1) + odd);
    break;
  case K3_TYPE_IQ1_S: {
    uint32_t qs = r < 2 ? word[0] : word[1], qh = word[2] >> 16 * (r >> 1);
    for (int i = 0; i < 2; i++) {
      const int l = 2 * (r & 1) + i;
      k3_block_iq1(book, k3_block_byte(qs, l) + (qh >> 3 * l & 7u) * 256u, qh >> 13 & 4u, run->code + 2 * i);
    }
    run->scale = k3_block_half(word[3]) * (float)(2 * (qh >> 12 & 7u) + 1) * 0.125f;
    break;
  }
  case K3_TYPE_IQ1_M: {
    for (int i = 0; i < 2; i++) {
      const int l = 2 * (r & 1) + i;
      const int at = 4 * (2 * r + i);
      k3_block_iq1(book, k3_block_byte(r < 2 ? word[0] : word[1], l) + (word[2] >> at & 7u) * 256u, word[2] >> (at + 1) & 4u, run->code + 2 * i);
    }
    uint32_t d = (word[3] >> 12 & 0xfu) | (word[3] >> 24 & 0xf0u) | (word[4] >> 4 & 0xf00u) | (word[4] >> 16 & 0xf000u);
    uint32_t scale = (half ? word[4] : word[3]) >> (16 * odd + 3 * r) & 7u;
    run->scale = k3_block_half(d) * (float)(2 * scale + 1) * 0.125f;
    break;
  }
  case K3_TYPE_IQ2_XXS: {
    uint32_t index = r < 2 ? word[0] : word[2], rest = r < 2 ? word[1] : word[3];
    for (int i = 0; i < 2; i++) {
      const int l = 2 * (r & 1) + i;
      k3_block_iq2(book, k3_block_byte(index, l), rest >> 7 * l & 127u, run->code + 2 * i);
    }
    run->scale = k3_block_half(word[4]) * (0.5f + (float)(rest >> 28)) * 0.25f;
    break;
  }
  case K3_TYPE_IQ2_XS:
    for (int i = 0; i < 2; i++)
      k3_block_iq2(book, word[r] >> 16 * i & 511u, word[r] >> (16 * i + 9) & 127u, run->code + 2 * i);
    run->scale = k3_block_half(word[5]) * (0.5f + (float)(word[4] >> 4 * r & 15u)) * 0.25f;
    break;
  case K3_TYPE_IQ2_S:
    for (int i = 0; i < 2; i++) {
      const int l = 2 * (r & 1) + i;
      k3_block_iq2(book, k3_block_byte(r < 2 ? word[0] : word[1], l) + (word[4] >> 2 * (2 * r + i) & 3u) * 256u,
                   k3_block_byte(r < 2 ? word[2] : word[3], l), run->code + 2 * i);
    }
    run->scale = k3_block_half(word[6]) * (0.5f + (float)(word[5] >> 4 * r & 15u)) * 0.25f;
    break;
  case K3_TYPE_IQ3_XXS: {
    const uint32_t levels[4] = {0x1c140c04u, 0x3e342c24u, 0xe4ecf4fcu, 0xc2ccd4dcu};
    uint32_t rest = r < 2 ? word[4] : word[5];
    for (int k = 0; k < 4; k++) {
      uint32_t signs = k3_block_look(book->signs, book->sign_step, rest >> 7 * (2 * (r & 1) + (k >> 1)) & 127u);
      run->code[k] = k3_block_iq3(levels, k3_block_look(book->grid, book->grid_step, k3_block_byte(word[r], k)), signs >> 16 * (k & 1));
    }
    run->scale = k3_block_half(word[6]) * (0.5f + (float)(rest >> 28)) * 0.5f;
    break;
  }
  case K3_TYPE_IQ3_S: {
    const uint32_t levels[4] = {0x07050301u, 0x0f0d0b09u, 0xf9fbfdffu, 0xf1f3f5f7u};
    for (int k = 0; k < 4; k++) {
      uint32_t index = k3_block_byte(word[r], k) + (word[4] >> (4 * r + k) & 1u) * 256u;
      uint32_t signs = k3_block_look(book->signs, book->sign_step, k3_block_byte(r < 2 ? word[5] : word[6], 2 * (r & 1) + (k >> 1)));
      run->code[k] = k3_block_iq3(levels, k3_block_look(book->grid, book->grid_step, index), signs >> 16 * (k & 1));
    }
    run->scale = k3_block_half(word[8]) * (float)(2 * (word[7] >> 4 * (r >> 1) & 15u) + 1);
    break;
  }
  case K3_TYPE_IQ4_XS:
    for (int k = 0; k < 4; k++) run->code[k] = k3_block_iq4(book, r < 2 ? word[k] : word[4 + k], r & 1);
    run->scale = k3_block_half(word[8]) * (float)((int)((word[9] >> 4 * (2 * unit + (r >> 1)) & 15u) |
                                                        (word[8] >> (16 + 2 * (2 * unit + (r >> 1))) & 3u) << 4) - 32);
    break;
  default: break;
  }
}

/* Value i of a run. */
K3_BLOCK_INLINE float k3_block_value(const K3BlockRun *run, int i)
{
#ifdef __CUDA_ARCH__
  return __fadd_rn(__fmul_rn(run->scale, (float)(int8_t)k3_block_byte(run->code[i >> 2], i & 3)), run->offset);
#else
  return run->scale * (float)(int8_t)k3_block_byte(run->code[i >> 2], i & 3) + run->offset;
#endif
}

#endif
