/* Activations as 16-bit codes. Layer: backend (CUDA), device code.
 *
 * x ≈ scale · code over a block of 32 values: scale = max|x| / 32512, code = rint(x / scale), held as two signed bytes,
 * code = 256 · high + low, so that dp4a (four byte products) serves each plane: 16 bits of x for the bytes of the weights
 * alone. The error is at most scale / 2, about 2e-5 of the block's norm. 32512 = 127 · 256 keeps `high` within a byte.
 * A NaN in a block makes its scale NaN, and with it every product: nothing hides it. An infinity does the same. */
#ifndef K3_KERNELS_QUANTISE_CUH
#define K3_KERNELS_QUANTISE_CUH

#include <stdint.h>

namespace k3 {

static constexpr float CODE_MOST = 32512.0f;

/* Maximum that keeps NaN, which fmaxf drops. */
static __device__ __forceinline__ float max_nan(float a, float b)
{
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

/* Of a block whose largest magnitude is `most`: most / CODE_MOST, and CODE_MOST / most (0, so that the codes are, where that is not
 * finite, and for NaN). Rounded as divisions are, without their branches; of a quarter, as the reciprocal of the largest floats is 0. */
static __device__ __forceinline__ float code_scale(float most)
{
  const float r = 1.0f / CODE_MOST, q = most * r;
  return fmaf(fmaf(-q, CODE_MOST, most), r, q);
}
static __device__ __forceinline__ float code_factor(float most)
{
  const float quarter = 0.25f * most;
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(quarter));
  r = fmaf(r, fmaf(-quarter, r, 1.0f), r);
  const float q = 0.25f * CODE_MOST * r;
  return most > 1e-30f ? fmaf(r, fmaf(-quarter, q, 0.25f * CODE_MOST), q) : 0.0f;
}
static __device__ __forceinline__ int code_of(float x, float factor) { return __float2int_rn(x * factor); }
static __device__ __forceinline__ int low_of(int code) { return code & 0xff; }
static __device__ __forceinline__ int high_of(int code) { return (code + 128) >> 8 & 0xff; }

} /* namespace k3 */
#endif
