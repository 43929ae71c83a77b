/* The table of kernel_check: random inputs, poisoned outputs, errors, timing by graph replays, one row a check.
 * Included by the sources of kernel_check (CUDA C++, host code). */
#ifndef K3_TESTS_KERNEL_TABLE_H
#define K3_TESTS_KERNEL_TABLE_H

#include <cuda_runtime.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/launch.h"

#define K3_STREAM_GBS 4500.0 /* the streaming rate that the last column refers to */

typedef struct {
  int rows, failures;
  uint64_t random; /* state of the generator */
  int time;        /* 0: checks alone */
  int pdl;
} K3Table;

/* The attention families' rows; in kernel_check_attention.cu. `words`: which, "" for all. */
void k3_check_attention(K3Table *table, const char *words);

#define K3_CHECK_CUDA(call)                                                                              \
  do {                                                                                                   \
    cudaError_t k3_error_ = (call);                                                                      \
    if (k3_error_ != cudaSuccess) {                                                                      \
      printf("FAIL %s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(k3_error_));          \
      exit(1);                                                                                           \
    }                                                                                                    \
  } while (0)
#define K3_CHECK_STATUS(call)                                                              \
  do {                                                                                     \
    if ((call) != K3_OK) {                                                                 \
      printf("FAIL %s:%d: %s: %s\n", __FILE__, __LINE__, #call, k3_status_message());      \
      exit(1);                                                                             \
    }                                                                                      \
  } while (0)

/* splitmix64 */
static inline uint64_t k3_table_bits(K3Table *table)
{
  uint64_t z = (table->random += 0x9e3779b97f4a7c15ull);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

/* Uniform in [-1, 1). */
static inline double k3_table_uniform(K3Table *table)
{
  return (double)(k3_table_bits(table) >> 11) * (2.0 / 9007199254740992.0) - 1.0;
}

/* About normal: mean 0, deviation 1 (sum of four uniforms). */
static inline double k3_table_normal(K3Table *table)
{
  double sum = 0;
  for (int i = 0; i < 4; i++) sum += k3_table_uniform(table);
  return sum * 0.8660254037844386;
}

static inline float *k3_table_floats(K3Table *table, int64_t count, double deviation)
{
  float *values = (float *)malloc((size_t)count * sizeof(float));
  for (int64_t i = 0; i < count; i++) values[i] = (float)(deviation * k3_table_normal(table));
  return values;
}

/* Device memory filled with NaN (0xff bytes are NaN in f32, bf16 and f64). */
static inline void *k3_table_poisoned(int64_t bytes)
{
  void *memory = NULL;
  K3_CHECK_CUDA(cudaMalloc(&memory, (size_t)bytes));
  K3_CHECK_CUDA(cudaMemset(memory, 0xff, (size_t)bytes));
  return memory;
}

static inline void *k3_table_upload(const void *host, int64_t bytes)
{
  void *memory = NULL;
  K3_CHECK_CUDA(cudaMalloc(&memory, (size_t)bytes));
  K3_CHECK_CUDA(cudaMemcpy(memory, host, (size_t)bytes, cudaMemcpyHostToDevice));
  return memory;
}

static inline void *k3_table_download(const void *device, int64_t bytes)
{
  void *host = malloc((size_t)bytes);
  K3_CHECK_CUDA(cudaDeviceSynchronize());
  K3_CHECK_CUDA(cudaMemcpy(host, device, (size_t)bytes, cudaMemcpyDeviceToHost));
  return host;
}

/* ||got - want|| / ||want||; NaN when any is NaN, so that a comparison with a bound fails. */
static inline double k3_table_error(const float *got, const double *want, int64_t count)
{
  double difference = 0, norm = 0;
  for (int64_t i = 0; i < count; i++) {
    difference += (got[i] - want[i]) * (got[i] - want[i]);
    norm += want[i] * want[i];
  }
  return sqrt(difference / (norm > 0 ? norm : 1));
}

/* Launches the work once on `launch`; `set` says which copy of the weights (they rotate past the L2). */
typedef K3Status (*K3TableWork)(void *context, const K3CudaLaunch *launch, int set);

/* Microseconds of one launch: median over replays of a graph of `nodes` launches in a chain. */
static inline double k3_table_microseconds(K3Table *table, K3TableWork work, void *context, int sets, int nodes)
{
  enum { REPLAYS = 15 };
  K3CudaLaunch launch;
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  cudaEvent_t begin, end;
  float milliseconds[REPLAYS];
  K3_CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  K3_CHECK_STATUS(k3_cuda_launch_init(stream, table->pdl, &launch));
  K3_CHECK_CUDA(cudaEventCreate(&begin));
  K3_CHECK_CUDA(cudaEventCreate(&end));
  K3_CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < nodes; i++) K3_CHECK_STATUS(work(context, &launch, i % sets));
  K3_CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
  K3_CHECK_CUDA(cudaGraphInstantiate(&executable, graph, 0));
  for (int i = 0; i < 3; i++) K3_CHECK_CUDA(cudaGraphLaunch(executable, stream));
  K3_CHECK_CUDA(cudaStreamSynchronize(stream));
  for (int i = 0; i < REPLAYS; i++) {
    K3_CHECK_CUDA(cudaEventRecord(begin, stream));
    K3_CHECK_CUDA(cudaGraphLaunch(executable, stream));
    K3_CHECK_CUDA(cudaEventRecord(end, stream));
    K3_CHECK_CUDA(cudaEventSynchronize(end));
    K3_CHECK_CUDA(cudaEventElapsedTime(&milliseconds[i], begin, end));
  }
  for (int i = 1; i < REPLAYS; i++)
    for (int j = i; j > 0 && milliseconds[j] < milliseconds[j - 1]; j--) {
      float swap = milliseconds[j];
      milliseconds[j] = milliseconds[j - 1];
      milliseconds[j - 1] = swap;
    }
  K3_CHECK_CUDA(cudaGraphExecDestroy(executable));
  K3_CHECK_CUDA(cudaGraphDestroy(graph));
  K3_CHECK_CUDA(cudaEventDestroy(begin));
  K3_CHECK_CUDA(cudaEventDestroy(end));
  K3_CHECK_CUDA(cudaStreamDestroy(stream));
  return milliseconds[REPLAYS / 2] * 1000.0 / nodes;
}

static inline void k3_table_header(void)
{
  printf("%-26s %-34s %10s %8s %4s %5s %7s %6s %9s %8s %6s  %s\n", "kernel", "shape", "error", "allowed", "regs",
         "local", "shared", "blk/SM", "us", "GB/s", "%4.5T", "verdict");
}

/* One row. error must be at most `allowed`; control must exceed it (negative control; NaN counts as caught; pass
 * INFINITY when the row has none). bytes: read and written by one launch; microseconds 0: not timed. */
static inline void k3_table_row(K3Table *table, const char *shape, double error, double allowed, double control,
                                const K3CudaUse *use, double microseconds, double bytes)
{
  int right = error <= allowed && !(control <= allowed) && use->local_bytes == 0;
  table->rows++;
  table->failures += !right;
  double rate = microseconds > 0 ? bytes / microseconds * 1e-3 : 0;
  printf("%-26s %-34s %10.2e %8.0e %4d %5lld %7lld %6d %9.2f %8.0f %6.1f  %s\n", use->kernel, shape, error, allowed,
         use->registers, (long long)use->local_bytes, (long long)use->shared_bytes, use->blocks_per_sm, microseconds,
         rate, rate / K3_STREAM_GBS * 100, right ? "ok" : !(error <= allowed) ? "FAIL error"
         : control <= allowed ? "FAIL control not caught" : "FAIL local memory");
  fflush(stdout);
}

#endif
