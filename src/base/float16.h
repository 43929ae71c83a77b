/* bfloat16 and float16 to float32 and back, round to nearest even. Layer: base.
 * Source: IEEE 754 binary16; bfloat16 is the upper half of binary32. */
#ifndef K3_BASE_FLOAT16_H
#define K3_BASE_FLOAT16_H

#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define K3_HOST_DEVICE __host__ __device__
#else
#define K3_HOST_DEVICE
#endif

static inline K3_HOST_DEVICE float k3_float_from_bits(uint32_t bits)
{
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static inline K3_HOST_DEVICE uint32_t k3_float_bits(float value)
{
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

static inline K3_HOST_DEVICE float k3_bf16_to_float(uint16_t half)
{
  return k3_float_from_bits((uint32_t)half << 16);
}

static inline K3_HOST_DEVICE uint16_t k3_bf16_from_float(float value)
{
  uint32_t bits = k3_float_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 0x40u); /* quiet NaN */
  return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static inline K3_HOST_DEVICE float k3_f16_to_float(uint16_t half)
{
  uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
  uint32_t exponent = (half >> 10) & 0x1fu;
  uint32_t fraction = half & 0x3ffu;
  if (exponent == 0x1fu) return k3_float_from_bits(sign | 0x7f800000u | (fraction << 13));
  if (exponent == 0) { /* zero or subnormal: fraction * 2^-24 is exact in float32 */
    float magnitude = (float)fraction * 5.9604644775390625e-08f;
    return sign ? -magnitude : magnitude;
  }
  return k3_float_from_bits(sign | ((exponent + 112u) << 23) | (fraction << 13));
}

static inline K3_HOST_DEVICE uint16_t k3_f16_from_float(float value)
{
  uint32_t bits = k3_float_bits(value);
  uint16_t sign = (uint16_t)((bits >> 16) & 0x8000u);
  uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* rounds past 65504 */
  if (magnitude < 0x38800000u) { /* subnormal half: multiples of 2^-24 */
    if (magnitude < 0x33000000u) return sign;
    uint32_t shift = 126u - (magnitude >> 23); /* 14 … 24 */
    uint32_t fraction = (magnitude & 0x7fffffu) | 0x800000u;
    uint32_t half = fraction >> shift;
    uint32_t rest = fraction & ((1u << shift) - 1u);
    uint32_t tie = 1u << (shift - 1u);
    if (rest > tie || (rest == tie && (half & 1u))) half++;
    return (uint16_t)(sign | half);
  }
  uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return (uint16_t)(sign | ((rounded - 0x38000000u) >> 13));
}

#endif
