/* Launching kernels: one checked path for all families. Layer: backend (CUDA).
 *
 * A launcher fills the kernel's argument struct, checks shapes and calls k3_cuda_launch_kernel. A failed launch is
 * reported at once with kernel, grid, block, shared bytes, registers, layer and phase. Nothing here waits for the
 * device, so every launch can be captured in a graph.
 *
 * Programmatic dependent launch (launch->pdl): every kernel of this folder follows one rule,
 *     [weights, tables: never written during a step]  k3_wait();  [everything else]
 * where k3_wait() (kernels/wait.cuh) is cudaGridDependencySynchronize() and then
 * cudaTriggerProgrammaticLaunchCompletion(), in this order and in every block. As the trigger comes after the wait, the
 * successor of such a kernel knows when it starts that all kernels but its immediate predecessor are complete. Kernels whose
 * successors read nothing but weights before their wait (the norm, the products, attention's combine) call k3_wait_early(), the
 * other order, which promises nothing at the start; the wait itself always means that all kernels before are complete. (The merge
 * reads gates too: they are older than the slices' wait, and combine starts behind that.)
 * What may be read before the wait beside weights was written at least two kernels earlier, with a k3_wait() kernel between: the norm's
 * early vectors (K3CudaNorm.early), and what the step before wrote (KDA's state and window, rows of the cache but the newest). Data of a predecessor
 * are read with __ldcg (L2), never through L1 or the read-only path. */
#ifndef K3_KERNELS_LAUNCH_H
#define K3_KERNELS_LAUNCH_H

#include <cuda_runtime_api.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What a launch takes of a multiprocessor: for the table of kernel_check and for `tune`. */
typedef struct {
  const char *kernel;
  int registers;          /* a thread */
  int64_t local_bytes;    /* a thread: spills and local arrays */
  int64_t shared_bytes;   /* a block, static + dynamic */
  int blocks_per_sm;
  unsigned grid, block, cluster;
} K3CudaUse;

/* Where and how to launch; passed to every launcher. */
typedef struct {
  cudaStream_t stream;
  int64_t layer;           /* -1: outside the layers */
  const char *phase;       /* for messages; never NULL */
  int sm_count;            /* multiprocessors that grids are derived from */
  int pdl;                 /* 1: programmatic dependent launch */
  K3CudaUse *use;          /* NULL, or filled by the launch (last launch of a launcher) */
  const char *plant_phase; /* NULL, or: ask for too much shared memory in this phase (test hook) … */
  int64_t plant_layer;     /* … of this layer */
} K3CudaLaunch;

/* sm_count and the rest of a launch for the current device. Errors: K3_ERR_DEVICE. */
K3Status k3_cuda_launch_init(cudaStream_t stream, int pdl, K3CudaLaunch *launch);

/* Launches `function` (a __global__ function) with `arguments` (as cudaLaunchKernel takes them).
 * grid, block: one-dimensional; cluster: blocks of a cluster, 1 for none; shared: dynamic bytes.
 * Errors: K3_ERR_DEVICE with kernel, grid, block, shared bytes, registers, layer and phase. */
K3Status k3_cuda_launch_kernel(const K3CudaLaunch *launch, const char *kernel, const void *function, unsigned grid,
                               unsigned block, unsigned cluster, size_t shared, void **arguments);

/* Registers, shared bytes and resident blocks of a kernel. Errors: K3_ERR_DEVICE. */
K3Status k3_cuda_kernel_use(const char *kernel, const void *function, unsigned grid, unsigned block, unsigned cluster,
                            size_t shared, K3CudaUse *use);

/* Reports a CUDA return code: `call` is the source text. */
K3Status k3_cuda_failed(cudaError_t error, const char *call, const char *file, int line);

/* Errors of launches that a synchronisation or a poll finds, named by layer and phase. `wait`: 1 to synchronise the
 * stream first (eager mode), 0 to poll alone. */
K3Status k3_cuda_poll(const K3CudaLaunch *launch, int wait);

/* Every CUDA return goes through one of these. */
#define K3_CUDA_TRY(call)                                                                          \
  do {                                                                                             \
    cudaError_t k3_cuda_error_ = (call);                                                           \
    if (k3_cuda_error_ != cudaSuccess) return k3_cuda_failed(k3_cuda_error_, #call, __FILE__, __LINE__); \
  } while (0)
#define K3_CUDA_TRY_DONE(call)                                                                     \
  do {                                                                                             \
    cudaError_t k3_cuda_error_ = (call);                                                           \
    if (k3_cuda_error_ != cudaSuccess) {                                                           \
      status = k3_cuda_failed(k3_cuda_error_, #call, __FILE__, __LINE__);                          \
      goto done;                                                                                   \
    }                                                                                              \
  } while (0)

#ifdef __cplusplus
}
#endif
#endif
