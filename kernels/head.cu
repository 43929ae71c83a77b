/* Embedding row and argmax. See head.h. Layer: backend (CUDA).
 *
 * embed_kernel: a thread a value; reads one row. argmax_kernel: blocks of 1,024 over up to 8,192 logits each; the last block
 * to finish takes the largest of the blocks' keys. Reads the logits once. Bound: latency.
 * Twins: k3_host_embed, k3_host_argmax. */
#include "kernels/head.h"

#include "kernels/blocks.cuh"
#include "plan/codebook.h"

namespace {

enum { EMBED_THREADS = 256, ARGMAX_THREADS = 1024, ARGMAX_BLOCKS = 128 };

__global__ void __launch_bounds__(EMBED_THREADS) embed_blocks_kernel(const __grid_constant__ K3CudaEmbed a,
                                                                     const __grid_constant__ k3::BlockMatrix blocks, int grid_words)
{
  k3_wait();
  int64_t row = *(const volatile int64_t *)a.token - a.first_row;
  int64_t i = blockIdx.x * (int64_t)EMBED_THREADS + threadIdx.x;
  if (i >= a.matrix.cols) return;
  a.values[i] = row >= 0 && row < a.matrix.rows ? k3::block_element(a.matrix, blocks, grid_words, row, i) : 0.0f;
}

__global__ void __launch_bounds__(EMBED_THREADS) embed_kernel(const __grid_constant__ K3CudaEmbed a)
{
  k3_wait();
  int64_t row = *(const volatile int64_t *)a.token - a.first_row;
  int64_t i = blockIdx.x * (int64_t)EMBED_THREADS + threadIdx.x;
  if (i >= a.matrix.cols) return;
  a.values[i] = row >= 0 && row < a.matrix.rows ? k3::element(a.matrix, row, i) : 0.0f;
}

/* Value in order above, index complemented below: the largest key is the largest value at the lowest index. NaN wins. */
__device__ __forceinline__ uint64_t key_of(float v, uint32_t index)
{
  uint32_t b = __float_as_uint(v + 0.0f); /* -0 to +0: they tie */
  uint32_t ordered = v != v ? 0xffffffffu : b & 0x80000000u ? ~b : b | 0x80000000u;
  return (uint64_t)ordered << 32 | (uint32_t)~index;
}

__device__ __forceinline__ uint64_t larger(uint64_t a, uint64_t b) { return a > b ? a : b; }

/* Largest key of the block, in thread 0. */
__device__ __forceinline__ uint64_t block_largest(uint64_t key, uint64_t *shared)
{
#pragma unroll
  for (int o = 16; o; o >>= 1) key = larger(key, __shfl_xor_sync(0xffffffffu, key, o));
  if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = key;
  __syncthreads();
  if (threadIdx.x < 32) {
    key = threadIdx.x < ARGMAX_THREADS / 32 ? shared[threadIdx.x] : 0;
#pragma unroll
    for (int o = 16; o; o >>= 1) key = larger(key, __shfl_xor_sync(0xffffffffu, key, o));
  }
  return key;
}

__global__ void __launch_bounds__(ARGMAX_THREADS) argmax_kernel(const __grid_constant__ K3CudaArgmax a)
{
  __shared__ uint64_t shared[32];
  __shared__ bool last;
  k3_wait();
  uint64_t key = 0;
  for (int64_t i = blockIdx.x * (int64_t)ARGMAX_THREADS + threadIdx.x; i < a.count; i += gridDim.x * (int64_t)ARGMAX_THREADS)
    key = larger(key, key_of(__ldcg(a.logits + i), (uint32_t)i));
  key = block_largest(key, shared);
  if (threadIdx.x == 0) {
    a.scratch[blockIdx.x] = key;
    __threadfence();
    last = atomicAdd(a.d_count, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  key = threadIdx.x < gridDim.x ? __ldcg((const unsigned long long *)a.scratch + threadIdx.x) : 0;
  key = block_largest(key, shared);
  if (threadIdx.x == 0) {
    uint32_t ordered = (uint32_t)(key >> 32), index = ~(uint32_t)key;
    bool nan = ordered == 0xffffffffu;
    *a.row = nan ? -1 : a.first_row + index;
    *a.value = nan ? __uint_as_float(0x7fffffffu)
                   : __uint_as_float(ordered & 0x80000000u ? ordered & 0x7fffffffu : ~ordered);
    *a.d_count = 0;
  }
}

} /* namespace */

K3Status k3_cuda_embed(const K3CudaLaunch *launch, const K3CudaEmbed *embed)
{
  K3CudaEmbed a = *embed;
  void *arguments[] = {&a};
  unsigned grid = (unsigned)((a.matrix.cols + EMBED_THREADS - 1) / EMBED_THREADS);
  if (k3_cuda_is_blocks(a.matrix.type)) {
    int id = k3_codebook_of(a.matrix.type), grid_words = id < 0 ? 0 : k3_codebook((K3CodebookId)id)->words;
    k3::BlockMatrix blocks = k3::block_matrix(a.matrix);
    void *blocks_arguments[] = {&a, &blocks, &grid_words};
    return k3_cuda_launch_kernel(launch, "embed_blocks_kernel", (const void *)embed_blocks_kernel, grid, EMBED_THREADS, 1, 0,
                                 blocks_arguments);
  }
  return k3_cuda_launch_kernel(launch, "embed_kernel", (const void *)embed_kernel, grid, EMBED_THREADS, 1, 0, arguments);
}

K3Status k3_cuda_argmax(const K3CudaLaunch *launch, const K3CudaArgmax *argmax)
{
  K3CudaArgmax a = *argmax;
  if (a.count < 1 || a.count > INT32_MAX)
    K3_FAIL(K3_ERR_INPUT, "argmax over %lld logits; 1 to 2^31 - 1 are possible", (long long)a.count);
  int64_t blocks = (a.count + ARGMAX_THREADS - 1) / ARGMAX_THREADS;
  void *arguments[] = {&a};
  return k3_cuda_launch_kernel(launch, "argmax_kernel", (const void *)argmax_kernel,
                               blocks < ARGMAX_BLOCKS ? (unsigned)blocks : (unsigned)ARGMAX_BLOCKS, ARGMAX_THREADS, 1, 0,
                               arguments);
}
