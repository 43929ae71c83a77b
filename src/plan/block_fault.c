/* See block_fault.h. Layer: plan (pure). */
#include "plan/block_fault.h"

#include <string.h>

static unsigned half_at(const uint8_t *at) { return (unsigned)at[0] | (unsigned)at[1] << 8; }

static int half_is_finite(unsigned bits) { return (bits & 0x7c00u) != 0x7c00u; }

static const char *name_of(int is_nan, int is_negative) { return is_nan ? "NaN" : is_negative ? "-infinity" : "infinity"; }

const char *k3_block_fault(K3Type type, const uint8_t *at)
{
  uint32_t bits;
  switch (type) {
  case K3_TYPE_F32:
    memcpy(&bits, at, sizeof bits);
    return (bits & 0x7f800000u) != 0x7f800000u ? NULL : name_of((bits & 0x7fffffu) != 0, bits >> 31);
  case K3_TYPE_BF16:
    bits = half_at(at);
    return (bits & 0x7f80u) != 0x7f80u ? NULL : name_of((bits & 0x7fu) != 0, bits >> 15);
  case K3_TYPE_F16:
    bits = half_at(at);
    return half_is_finite(bits) ? NULL : name_of((bits & 0x3ffu) != 0, bits >> 15);
  case K3_TYPE_MXFP4: return at[0] == 255 ? "a block scale of NaN (byte 255)" : NULL;
  case K3_TYPE_IQ1_M: /* its scale is spread over the upper nibbles of four words */
    bits = (uint32_t)(at[49] >> 4 | (at[51] & 0xf0) | (at[53] & 0xf0) << 4 | (at[55] & 0xf0) << 8);
    break;
  default:
    bits = half_at(at + k3_format(type)->scale_at);
    if (k3_format(type)->offset_at >= 0 && half_is_finite(bits)) bits = half_at(at + k3_format(type)->offset_at);
  }
  if (half_is_finite(bits)) return NULL;
  return bits & 0x3ffu ? "a block scale of NaN" : "an infinite block scale";
}
