/* Small kernels around the step: its two ends, time stamps, fills. See backend.h. Layer: backend (CUDA).
 *
 * begin_kernel: one block a row of 2,048 watched values; reads 24 bytes of host memory. finish_kernel: a block a watched row
 * (16-bit codes: H/32 scales, float: H values); the last block to finish reports to host memory. Bound: latency.
 * Twins: check_finite and choose_token of src/host/host_step.c, fill_start of src/host/host_backend.c. */
#include <limits.h>

#include "kernels/backend.h"
#include "kernels/wait.cuh"

namespace {

enum { THREADS = 256, BEGIN_VALUES = 2048 };

__global__ void __launch_bounds__(THREADS)
    begin_kernel(const volatile K3CudaStepIn *in, int64_t *d_step, float *watch, int64_t count)
{
  k3_wait();
  int64_t at = (int64_t)blockIdx.x * BEGIN_VALUES;
  if (blockIdx.x == 0 && threadIdx.x < 3)
    d_step[threadIdx.x] = threadIdx.x == 0 ? in->token : threadIdx.x == 1 ? in->position : in->rows;
  for (int64_t i = at + threadIdx.x; i < at + BEGIN_VALUES && i < count; i += THREADS)
    watch[i] = __uint_as_float(0xffffffffu);
}

/* In thread 0: how many of the block's values are not finite. */
__device__ int count_bad(const float *row, int64_t width)
{
  __shared__ int counted[THREADS / 32];
  int bad = 0;
  for (int64_t i = threadIdx.x; i < width; i += THREADS) bad += !isfinite(__ldcg(row + i));
  bad = __reduce_add_sync(~0u, bad);
  if (threadIdx.x % 32 == 0) counted[threadIdx.x / 32] = bad;
  __syncthreads();
  bad = 0;
  for (int w = 0; w < THREADS / 32; w++) bad += counted[w];
  return bad;
}

__global__ void __launch_bounds__(THREADS) finish_kernel(const K3CudaFinish a)
{
  k3_wait();
  bool is_tail = blockIdx.x == a.rows;
  int64_t width = is_tail ? a.tail_count : a.width;
  int bad = count_bad(is_tail ? a.tail : a.watch + blockIdx.x * a.width, width);
  if (threadIdx.x != 0) return;
  if (bad > 0) atomicMin(a.d_bad, (int)(2 * blockIdx.x + (bad < width && !is_tail)));
  __threadfence();
  if (atomicAdd(a.d_count, 1u) != gridDim.x - 1) return;
  __threadfence();
  int lowest = atomicExch(a.d_bad, INT_MAX);
  *a.d_count = 0;
  int64_t token = -1;
  float logit = -INFINITY;
  for (int r = 0; a.pairs && r < a.ranks; r++) {
    int64_t row = __ldcg((const long long *)&a.pairs[r].row);
    float value = __ldcg(&a.pairs[r].value);
    if (row < 0) { /* NaN wins, so that no rank believes in a token */
      token = -1;
      logit = value;
      break;
    }
    if (token < 0 || value > logit) token = row, logit = value;
  }
  volatile K3CudaStepOut *out = a.out;
  out->token = token;
  out->logit = logit;
  out->bad = lowest == INT_MAX ? -1 : lowest;
  __threadfence_system();
}

__global__ void stamp_kernel(volatile unsigned long long *stamp)
{
  k3_wait();
  unsigned long long now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)::"memory");
  *stamp = now;
}

__global__ void __launch_bounds__(THREADS) fill_kernel(float *data, int64_t count, float mean, float deviation)
{
  k3_wait();
  K3SynthRule rule = {0x6b33u, mean, deviation};
  for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; i < count; i += gridDim.x * (int64_t)THREADS)
    data[i] = k3_synth_float(rule, (uint64_t)i);
}

__global__ void __launch_bounds__(THREADS) cache_fill_kernel(const K3CudaCacheFill a)
{
  k3_wait();
  int64_t pages = (a.start + a.page_positions - 1) / a.page_positions, count = pages * a.page_positions * a.width;
  /* Over this rank's pages: index of a value among its own rows. */
  int64_t own = (pages + a.world - 1 - a.rank) / a.world * a.page_positions * a.width;
  for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; i < own && i < count;
       i += gridDim.x * (int64_t)THREADS) {
    int64_t row = i / a.width, column = i - row * a.width, page = row / a.page_positions * a.world + a.rank;
    int64_t position = page * a.page_positions + row % a.page_positions;
    if (position >= a.start) continue;
    float value = k3_synth_float(a.rule, (uint64_t)(position * a.width + column));
    if (a.type == K3_CACHE_F32) ((float *)a.cache)[i] = value;
    else ((uint16_t *)a.cache)[i] = a.type == K3_CACHE_BF16 ? k3_bf16_from_float(value) : k3_f16_from_float(value);
  }
}

unsigned blocks_of(const K3CudaLaunch *launch, int64_t count)
{
  int64_t blocks = (count + THREADS - 1) / THREADS, most = (int64_t)launch->sm_count * 16;
  return (unsigned)(blocks < 1 ? 1 : blocks < most ? blocks : most);
}

} /* namespace */

K3Status k3_cuda_begin(const K3CudaLaunch *launch, const K3CudaStepIn *in, int64_t *d_step, float *watch, int64_t count)
{
  void *arguments[] = {&in, &d_step, &watch, &count};
  int64_t blocks = (count + BEGIN_VALUES - 1) / BEGIN_VALUES;
  return k3_cuda_launch_kernel(launch, "begin_kernel", (const void *)begin_kernel, (unsigned)(blocks < 1 ? 1 : blocks),
                               THREADS, 1, 0, arguments);
}

K3Status k3_cuda_finish(const K3CudaLaunch *launch, const K3CudaFinish *finish)
{
  K3CudaFinish a = *finish;
  void *arguments[] = {&a};
  return k3_cuda_launch_kernel(launch, "finish_kernel", (const void *)finish_kernel,
                               (unsigned)(a.rows + (a.tail != NULL)), THREADS, 1, 0, arguments);
}

K3Status k3_cuda_stamp(const K3CudaLaunch *launch, unsigned long long *stamp)
{
  void *arguments[] = {&stamp};
  return k3_cuda_launch_kernel(launch, "stamp_kernel", (const void *)stamp_kernel, 1, 1, 1, 0, arguments);
}

K3Status k3_cuda_fill(const K3CudaLaunch *launch, float *data, int64_t count, float mean, float deviation)
{
  if (count < 1) return K3_OK;
  void *arguments[] = {&data, &count, &mean, &deviation};
  return k3_cuda_launch_kernel(launch, "fill_kernel", (const void *)fill_kernel, blocks_of(launch, count), THREADS, 1,
                               0, arguments);
}

K3Status k3_cuda_cache_fill(const K3CudaLaunch *launch, const K3CudaCacheFill *fill)
{
  K3CudaCacheFill a = *fill;
  void *arguments[] = {&a};
  return k3_cuda_launch_kernel(launch, "cache_fill_kernel", (const void *)cache_fill_kernel,
                               blocks_of(launch, a.start * a.width / a.world), THREADS, 1, 0, arguments);
}
