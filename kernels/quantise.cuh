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

/* Of a block whose largest magnitude is `most`. Blocks too small for the division to stay finite, and NaN: codes 0. */
static __device__ __forceinline__ float code_scale(float most) { return most / CODE_MOST; }
static __device__ __forceinline__ float code_factor(float most) { return most > 1e-30f ? CODE_MOST / most : 0.0f; }
static __device__ __forceinline__ int code_of(float x, float factor) { return __float2int_rn(x * factor); }
static __device__ __forceinline__ int low_of(int code) { return code & 0xff; }
static __device__ __forceinline__ int high_of(int code) { return (code + 128) >> 8 & 0xff; }

} /* namespace k3 */
#endif
