/* Synthetic weights: every value (or block) is a function of (seed, tensor path, index). Layer: plan.
 * The same inline functions run on the host and in CUDA kernels, so a rank can make its own band in place.
 *
 * Uniform values: offset + scale * u, u uniform in [-1, 1). Block formats draw codes at random and jitter the
 * block scale around `scale`, the standard deviation divided by the codes' own. */
#ifndef K3_PLAN_SYNTH_VALUES_H
#define K3_PLAN_SYNTH_VALUES_H

#include <stdint.h>
#include <string.h>

#include "base/float16.h"
#include "plan/formats.h"

/* How one tensor's values are drawn: mean and standard deviation. */
typedef struct {
  uint64_t key; /* k3_synth_key(seed, path) */
  float mean;
  float deviation;
} K3SynthRule;

/* splitmix64's finaliser (public domain, Vigna). */
static inline K3_HOST_DEVICE uint64_t k3_synth_mix(uint64_t z)
{
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

/* The `index`-th 64 random bits of a tensor. */
static inline K3_HOST_DEVICE uint64_t k3_synth_bits(uint64_t key, uint64_t index)
{
  return k3_synth_mix(key + (index + 1u) * 0x9e3779b97f4a7c15ull);
}

/* Key of a tensor: FNV-1a over its path, mixed with the seed. */
static inline uint64_t k3_synth_key(uint64_t seed, const char *path)
{
  uint64_t hash = 0xcbf29ce484222325ull;
  for (; *path; path++) hash = (hash ^ (uint8_t)*path) * 0x100000001b3ull;
  return k3_synth_mix(hash ^ k3_synth_mix(seed));
}

/* Uniform in [-1, 1) from the upper 24 bits. */
static inline K3_HOST_DEVICE float k3_synth_uniform(uint64_t bits)
{
  return (float)(uint32_t)(bits >> 40) * 1.1920928955078125e-07f - 1.0f;
}

/* Element `index` (row-major in the whole tensor) of a float tensor. sqrt(3) makes the deviation one. */
static inline K3_HOST_DEVICE float k3_synth_float(K3SynthRule rule, uint64_t index)
{
  return rule.mean + rule.deviation * (1.7320508f * k3_synth_uniform(k3_synth_bits(rule.key, index)));
}

/* Scale jitter of a block: 0.75 … 1.25. */
static inline K3_HOST_DEVICE float k3_synth_jitter(uint64_t bits)
{
  return 1.0f + 0.25f * k3_synth_uniform(bits);
}

/* Block `index` of a q8_0 tensor: 34 bytes. Codes are uniform in -127 … 127 (deviation 73.3). */
static inline K3_HOST_DEVICE void k3_synth_q8_0(K3SynthRule rule, uint64_t index, uint8_t *block)
{
  uint16_t d = k3_f16_from_float(rule.deviation / 73.3f * k3_synth_jitter(k3_synth_bits(rule.key, index * 8u)));
  block[0] = (uint8_t)(d & 0xffu);
  block[1] = (uint8_t)(d >> 8);
  for (unsigned i = 0; i < 4u; i++) {
    uint64_t bits = k3_synth_bits(rule.key, index * 8u + 1u + i);
    for (unsigned j = 0; j < 8u; j++) {
      int code = (int)((bits >> (8u * j)) & 0xffu) - 128;
      block[2u + 8u * i + j] = (uint8_t)(int8_t)(code < -127 ? -127 : code);
    }
  }
}

/* Block `index` of an mxfp4 tensor: 17 bytes. Codes are uniform (deviation 2.926); the scale is the power of
 * two at or above deviation/2.926 in three blocks of four, the one below in the fourth. */
static inline K3_HOST_DEVICE void k3_synth_mxfp4(K3SynthRule rule, uint64_t index, uint8_t *block)
{
  uint32_t exponent = k3_float_bits(rule.deviation / 2.926f) >> 23;
  uint64_t choice = k3_synth_bits(rule.key, index * 4u);
  block[0] = (uint8_t)(exponent + ((choice & 3u) ? 1u : 0u));
  for (unsigned i = 0; i < 2u; i++) {
    uint64_t bits = k3_synth_bits(rule.key, index * 4u + 1u + i);
    for (unsigned j = 0; j < 8u; j++) block[1u + 8u * i + j] = (uint8_t)(bits >> (8u * j));
  }
}

/* Block `index` of an iq1_s tensor: 50 bytes = float16 d, 32 bytes qs, 8 uint16 qh. Grid entries are -1, 0, 1
 * with a shift of 1/8, times d (2 s + 1), s uniform in 0 … 7: deviation 7.2 d. */
static inline K3_HOST_DEVICE void k3_synth_iq1_s(K3SynthRule rule, uint64_t index, uint8_t *block)
{
  uint16_t d = k3_f16_from_float(rule.deviation / 7.2f * k3_synth_jitter(k3_synth_bits(rule.key, index * 8u)));
  block[0] = (uint8_t)(d & 0xffu);
  block[1] = (uint8_t)(d >> 8);
  for (unsigned i = 0; i < 6u; i++) {
    uint64_t bits = k3_synth_bits(rule.key, index * 8u + 1u + i);
    for (unsigned j = 0; j < 8u; j++) block[2u + 8u * i + j] = (uint8_t)(bits >> (8u * j));
  }
}

/* How random blocks of a GGUF format are scaled: the deviation of w / d, and the offset (or minimum) over d that makes
 * their mean zero. Measured over random blocks with d = 1 (tests/test_formats.py). */
typedef struct {
  int32_t bytes, scale_at, offset_at; /* as in K3Format; scale_at -1: iq1_m, whose d is spread over four words */
  float unit, centre;
} K3SynthBlock;

/* Of a type of GGUF blocks other than iq1_s (synth_values.c). */
K3SynthBlock k3_synth_block_shape(K3Type type);

/* `half` in the place of bytes at, at + 1 of a block, as far as they are among the eight of `bits` from byte `from`. */
static inline K3_HOST_DEVICE uint64_t k3_synth_place(uint64_t bits, int32_t from, int32_t at, uint16_t half)
{
  for (int32_t i = 0; i < 2; i++) {
    int32_t shift = 8 * (at + i - from);
    if (shift >= 0 && shift < 64) bits = (bits & ~(0xffull << shift)) | (uint64_t)((half >> (8 * i)) & 0xffu) << shift;
  }
  return bits;
}

/* Bytes from … from + 7 (a multiple of eight, the lowest first) of block `index` of such a tensor: random, but for the scales. */
static inline K3_HOST_DEVICE uint64_t k3_synth_bytes(K3SynthRule rule, K3SynthBlock shape, uint64_t index, int32_t from)
{
  uint64_t draw = k3_synth_bits(rule.key, index * 32u), bits = k3_synth_bits(rule.key, index * 32u + 1u + (uint64_t)(from / 8));
  uint16_t d = k3_f16_from_float(rule.deviation / shape.unit * k3_synth_jitter(draw));
  if (shape.offset_at < 0) d = (uint16_t)(d | (draw & 1u) << 15); /* codes are not symmetric about zero: their blocks are */
  if (shape.scale_at >= 0) bits = k3_synth_place(bits, from, shape.scale_at, d);
  else if (from == 48)
    for (int32_t i = 0; i < 4; i++) bits = (bits & ~(0xf000ull << (16 * i))) | (uint64_t)((d >> (4 * i)) & 15u) << (16 * i + 12);
  if (shape.offset_at >= 0)
    bits = k3_synth_place(bits, from, shape.offset_at, k3_f16_from_float(k3_f16_to_float(d) * shape.centre));
  return bits;
}

/* The whole block. */
static inline void k3_synth_block(K3SynthRule rule, K3SynthBlock shape, uint64_t index, uint8_t *block)
{
  for (int32_t from = 0; from < shape.bytes; from += 8) {
    uint64_t bits = k3_synth_bytes(rule, shape, index, from);
    for (int32_t i = 0; i < 8 && from + i < shape.bytes; i++) block[from + i] = (uint8_t)(bits >> (8 * i));
  }
}

#endif
