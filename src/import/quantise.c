/* q8_0 and mxfp4 blocks. See quantise.h. Layer: import. */
#include "import/quantise.h"

#include <math.h>
#include <string.h>

#include "base/float16.h"

/* One block; 0 when its scale exceeds float16. Written without calls, so that compilers make it wide. */
static int quantise_block(const float *x, uint8_t *block)
{
  float largest = 0.0f;
  for (int i = 0; i < K3_QUANTISE_BLOCK; i++) {
    float magnitude = fabsf(x[i]);
    largest = magnitude > largest ? magnitude : largest;
  }
  float d = largest / 127.0f;
  float inverse = d > 0.0f ? 1.0f / d : 0.0f;
  if (!isfinite(inverse)) inverse = 0.0f; /* d below 2^-128 is 0 in float16 anyway */
  uint16_t half = k3_f16_from_float(d);
  if ((half & 0x7c00u) == 0x7c00u) return 0;
  block[0] = (uint8_t)(half & 0xffu);
  block[1] = (uint8_t)(half >> 8);
  for (int i = 0; i < K3_QUANTISE_BLOCK; i++) { /* roundf: the rest of a truncation is exact */
    float scaled = x[i] * inverse;
    int whole = (int)scaled;
    float rest = scaled - (float)whole;
    block[2 + i] = (uint8_t)(int8_t)(whole + (rest >= 0.5f) - (rest <= -0.5f));
  }
  return 1;
}

int64_t k3_quantise_q8_0(const float *values, int64_t blocks, uint8_t *out)
{
  int64_t first_bad = INT64_MAX;
#ifdef _OPENMP
#pragma omp parallel for schedule(static) reduction(min : first_bad) if (blocks > 4096)
#endif
  for (int64_t b = 0; b < blocks; b++)
    if (!quantise_block(values + b * K3_QUANTISE_BLOCK, out + b * K3_Q8_0_BYTES) && b < first_bad) first_bad = b;
  return first_bad == INT64_MAX ? -1 : first_bad;
}

int64_t k3_mxfp4_interleave(const uint8_t *packed, const uint8_t *scales, int64_t blocks, uint8_t *out)
{
  for (int64_t b = 0; b < blocks; b++) {
    if (scales[b] == 255) return b;
    out[b * K3_MXFP4_BYTES] = scales[b];
    memcpy(out + b * K3_MXFP4_BYTES + 1, packed + b * K3_MXFP4_NIBBLE_BYTES, K3_MXFP4_NIBBLE_BYTES);
  }
  return -1;
}

void k3_mxfp4_unpack(const uint8_t *in, int64_t blocks, float *values)
{
  static const float codes[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                  -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
  for (int64_t b = 0; b < blocks; b++) {
    const uint8_t *block = in + b * K3_MXFP4_BYTES;
    int exponent = (int)block[0] - 127;
    for (int i = 0; i < K3_MXFP4_NIBBLE_BYTES; i++) {
      values[b * K3_QUANTISE_BLOCK + 2 * i] = ldexpf(codes[block[1 + i] & 15u], exponent);
      values[b * K3_QUANTISE_BLOCK + 2 * i + 1] = ldexpf(codes[block[1 + i] >> 4], exponent);
    }
  }
}
