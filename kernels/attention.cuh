/* What the attention kernels, the norms and the products share: weights of any float or q8_0 type, sums over a warp, 16-bit codes.
 * Layer: backend (CUDA), device code. */
#ifndef K3_KERNELS_ATTENTION_CUH
#define K3_KERNELS_ATTENTION_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "kernels/hopper.cuh"
#include "kernels/quantise.cuh"
#include "kernels/weights.h"

static __device__ __forceinline__ float bf16_value(uint32_t half) { return __uint_as_float(half << 16); }

/* COUNT (4 or 8) neighbours of a row as stored. The type is a template parameter, and loading stands apart from
 * decoding, so that a loop of loads has neither branch nor use between them: they all go out together. */
template <K3Type TYPE, int COUNT>
struct StoredWeights {
  static constexpr int WORDS = TYPE == K3_TYPE_F32 ? COUNT : TYPE == K3_TYPE_BF16 ? COUNT / 2 : COUNT / 4;
  uint32_t word[WORDS];
  uint16_t scale;

  struct Place {
    const char *codes;
    const uint16_t *scale;
  };

  /* Of a multiple of COUNT; columns a multiple of COUNT. */
  static __device__ __forceinline__ Place place(const K3CudaMatrix &w, int64_t row, int64_t col)
  {
    return Place{(const char *)w.codes + (row * w.cols + col) * (4 * WORDS / COUNT), /* 4, 2 or 1 bytes a weight */
                 TYPE == K3_TYPE_Q8_0 ? (const uint16_t *)w.scale + row * (w.cols / 32) + col / 32 : nullptr};
  }

  /* Zeros unless `there`. */
  __device__ __forceinline__ void load(const Place &from, bool there)
  {
#pragma unroll
    for (int i = 0; i < WORDS; i++) word[i] = 0;
    scale = 0;
    if (!there) return;
    if constexpr (WORDS % 4 == 0) {
#pragma unroll
      for (int i = 0; i < WORDS; i += 4) {
        const uint4 p = *(const uint4 *)(from.codes + 4 * i);
        word[i] = p.x, word[i + 1] = p.y, word[i + 2] = p.z, word[i + 3] = p.w;
      }
    } else if constexpr (WORDS == 2) {
      const uint2 p = *(const uint2 *)from.codes;
      word[0] = p.x, word[1] = p.y;
    } else {
      word[0] = *(const uint32_t *)from.codes;
    }
    if constexpr (TYPE == K3_TYPE_Q8_0) scale = *from.scale;
  }
  __device__ __forceinline__ void load(const K3CudaMatrix &w, int64_t row, int64_t col, bool there) { load(place(w, row, col), there); }

  /* Towards the L2. */
  static __device__ __forceinline__ void warm(const Place &from)
  {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from.codes));
    if constexpr (TYPE == K3_TYPE_Q8_0) asm volatile("prefetch.global.L2 [%0];" ::"l"(from.scale));
  }

  /* Weight i of a plain float; what a bfloat16 cannot hold is no weight of one. */
  __device__ __forceinline__ void put(int i, float value)
  {
    if constexpr (TYPE == K3_TYPE_F32) word[i] = __float_as_uint(value);
    else word[i / 2] = i % 2 ? word[i / 2] | (__float_as_uint(value) & 0xffff0000u) : __float_as_uint(value) >> 16;
  }

  __device__ __forceinline__ void decode(float *out) const
  {
    const float d = __half2float(__ushort_as_half(scale));
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      if constexpr (TYPE == K3_TYPE_F32)
        out[i] = __uint_as_float(word[i]);
      else if constexpr (TYPE == K3_TYPE_BF16)
        out[i] = i % 2 ? __uint_as_float(word[i / 2] & 0xffff0000u) : bf16_value(word[i / 2] & 0xffffu);
      else
        out[i] = d * (float)(int8_t)(word[i / 4] >> (8 * (i % 4)));
    }
  }
};

/* One branch on the type, around a whole loop. */
#define K3_BY_TYPE(matrix, function, ...)                                     \
  do {                                                                        \
    if ((matrix).type == K3_TYPE_F32) function<K3_TYPE_F32>(__VA_ARGS__);     \
    else if ((matrix).type == K3_TYPE_BF16) function<K3_TYPE_BF16>(__VA_ARGS__); \
    else function<K3_TYPE_Q8_0>(__VA_ARGS__);                                 \
  } while (0)

/* One float32 or bfloat16 weight, for rows that are no multiple of 4. */
static __device__ __forceinline__ float weight_at(const K3CudaMatrix &w, int64_t row, int64_t col)
{
  const int64_t at = row * w.cols + col;
  return w.type == K3_TYPE_F32 ? ((const float *)w.codes)[at] : bf16_value(((const uint16_t *)w.codes)[at]);
}

static __device__ __forceinline__ float warp_sum(float x)
{
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

/* Sums over the warp, all at once: each of the five exchanges takes as long as one. */
template <int COUNT>
static __device__ __forceinline__ void warp_sums(float *x)
{
#pragma unroll
  for (int step = 16; step > 0; step /= 2)
#pragma unroll
    for (int i = 0; i < COUNT; i++) x[i] += __shfl_xor_sync(~0u, x[i], step);
}

/* x[lane · COUNT / 32] summed over the warp: an exchange sends on only what the other half of the lanes keeps. x is used up. */
template <int COUNT>
static __device__ __forceinline__ float warp_sum_of_one(float *x)
{
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const int kept = COUNT * step / 32; /* 0: one is left */
    if (kept == 0) x[0] += __shfl_xor_sync(~0u, x[0], step);
#pragma unroll
    for (int i = 0; i < kept; i++) {
      const float low = x[i], high = x[i + kept];
      x[i] = (lane & step ? high : low) + __shfl_xor_sync(~0u, lane & step ? low : high, step);
    }
  }
  return x[0];
}

static __device__ __forceinline__ float warp_max(float x)
{
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

/* Within 3 units of the last place: the reciprocal without a branch. */
static __device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + expf(-x)); }

/* Element `at` of a vector of n, whose block of 32 has the largest magnitude `most`. */
static __device__ __forceinline__ void put_code(const K3CudaVector &out, int64_t n, int64_t at, float x, float most)
{
  const int code = k3::code_of(x, k3::code_factor(most));
  out.codes[at] = (int8_t)k3::high_of(code);
  out.codes[n + at] = (int8_t)k3::low_of(code);
  if (at % 32 == 0) out.scales[at / 32] = k3::code_scale(most);
}

#endif
