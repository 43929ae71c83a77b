/* Floats that one thread posts and another waits for: a word of ones, a NaN that is never posted, is none yet. So the values need no
 * barrier and no flag. Users: experts.cu (between blocks), posts.cuh (between ranks). Layer: backend (CUDA), device code. */
#ifndef K3_KERNELS_POSTED_CUH
#define K3_KERNELS_POSTED_CUH

#include <stdint.h>

namespace k3 {

static constexpr uint32_t NOT_POSTED = 0xffffffffu;

static __device__ __forceinline__ bool is_posted(float x) { return __float_as_uint(x) != NOT_POSTED; }
/* x, or another NaN for the one that is none. */
static __device__ __forceinline__ float to_post(float x) { return is_posted(x) ? x : __uint_as_float(0x7fffffffu); }

} /* namespace k3 */
#endif
