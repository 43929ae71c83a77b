/* The checked launch. See launch.h. Layer: backend (CUDA), host code only. */
#include "kernels/launch.h"

#include <cuda_runtime.h>
#include <string.h>

/* More dynamic shared memory than any device gives: what the test hook asks for. */
enum { PLANTED_SHARED_BYTES = 8 << 20 };

K3Status k3_cuda_failed(cudaError_t error, const char *call, const char *file, int line)
{
  int device = -1;
  cudaGetDevice(&device);
  return k3_status_fail(K3_ERR_DEVICE, file, line, "CUDA device %d: %s (%s) from %s", device,
                        cudaGetErrorString(error), cudaGetErrorName(error), call);
}

K3Status k3_cuda_launch_init(cudaStream_t stream, int pdl, K3CudaLaunch *launch)
{
  int device = 0;
  memset(launch, 0, sizeof *launch);
  K3_CUDA_TRY(cudaGetDevice(&device));
  K3_CUDA_TRY(cudaDeviceGetAttribute(&launch->sm_count, cudaDevAttrMultiProcessorCount, device));
  launch->stream = stream;
  launch->layer = -1;
  launch->phase = "none";
  launch->pdl = pdl;
  return K3_OK;
}

/* One split of the L1 into cache and shared memory for all kernels that it serves: the driver would choose one for each, and a
 * multiprocessor changes its split only between kernels, so that a successor would not start beside its predecessor. 57 % of 228 KB is the
 * step of 132 KB. The experts' kernel of one of eight ranks needs the most, 111 KB with its codebook; attention on CUDA cores takes 101 KB a
 * block and wants two, so it is left out. */
enum { SPLIT_PERCENT = 57, SPLIT_BYTES = 100 << 10 /* without static memory */ };

/* Above 48 KB, static memory included (12 KB at most), a kernel must be told. */
static cudaError_t allow_shared(const void *function, size_t shared)
{
  if (shared <= SPLIT_BYTES) {
    cudaError_t error = cudaFuncSetAttribute(function, cudaFuncAttributePreferredSharedMemoryCarveout, SPLIT_PERCENT);
    if (error != cudaSuccess) return error;
  }
  if (shared <= 36u << 10) return cudaSuccess;
  return cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
}

K3Status k3_cuda_kernel_use(const char *kernel, const void *function, unsigned grid, unsigned block, unsigned cluster,
                            size_t shared, K3CudaUse *use)
{
  cudaFuncAttributes attributes;
  K3_CUDA_TRY(cudaFuncGetAttributes(&attributes, function));
  K3_CUDA_TRY(allow_shared(function, shared));
  use->kernel = kernel;
  use->registers = attributes.numRegs;
  use->local_bytes = (int64_t)attributes.localSizeBytes;
  use->shared_bytes = (int64_t)(attributes.sharedSizeBytes + shared);
  use->grid = grid;
  use->block = block;
  use->cluster = cluster;
  K3_CUDA_TRY(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&use->blocks_per_sm, function, (int)block, shared));
  return K3_OK;
}

K3Status k3_cuda_launch_kernel(const K3CudaLaunch *launch, const char *kernel, const void *function, unsigned grid,
                               unsigned block, unsigned cluster, size_t shared, void **arguments)
{
  if (launch->plant_phase && launch->plant_layer == launch->layer && strcmp(launch->plant_phase, launch->phase) == 0)
    shared = PLANTED_SHARED_BYTES;
  cudaLaunchAttribute attributes[2];
  unsigned count = 0;
  if (launch->pdl) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = cluster;
    attributes[count].val.clusterDim.y = 1;
    attributes[count++].val.clusterDim.z = 1;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid);
  config.blockDim = dim3(block);
  config.dynamicSmemBytes = shared;
  config.stream = launch->stream;
  config.attrs = attributes;
  config.numAttrs = count;
  cudaError_t error = allow_shared(function, shared);
  if (error == cudaSuccess) error = cudaLaunchKernelExC(&config, function, arguments);
  if (error != cudaSuccess) {
    cudaFuncAttributes kernel_attributes = {};
    cudaError_t asked = cudaFuncGetAttributes(&kernel_attributes, function);
    K3_FAIL(K3_ERR_DEVICE,
            "launch of %s failed in layer %lld, phase %s: %s (grid %u, block %u, cluster %u, %zu bytes of dynamic and "
            "%zu of static shared memory, %d registers a thread)",
            kernel, (long long)launch->layer, launch->phase, cudaGetErrorString(error), grid, block, cluster, shared,
            asked == cudaSuccess ? kernel_attributes.sharedSizeBytes : (size_t)0,
            asked == cudaSuccess ? kernel_attributes.numRegs : -1);
  }
  if (launch->use) return k3_cuda_kernel_use(kernel, function, grid, block, cluster, shared, launch->use);
  return K3_OK;
}

K3Status k3_cuda_poll(const K3CudaLaunch *launch, int wait)
{
  cudaError_t error = wait ? cudaStreamSynchronize(launch->stream) : cudaPeekAtLastError();
  if (error != cudaSuccess)
    K3_FAIL(K3_ERR_DEVICE, "device error in layer %lld, phase %s: %s (%s)", (long long)launch->layer, launch->phase,
            cudaGetErrorString(error), cudaGetErrorName(error));
  return K3_OK;
}
