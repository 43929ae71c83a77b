/* Device memory of a rank. See backend.h. Layer: backend (CUDA), host code only. */
#include <stdlib.h>

#include "kernels/backend.h"

enum { ALIGN = 256 };

static K3Status no_memory(cudaError_t error, int64_t bytes)
{
  size_t available = 0, all = 0;
  if (cudaMemGetInfo(&available, &all) != cudaSuccess) available = 0;
  K3_FAIL(K3_ERR_DEVICE, "device memory: %lld bytes wanted, %zu free: %s", (long long)bytes, available,
          cudaGetErrorString(error));
}

K3Status k3_cuda_pool_open(K3CudaPool *pool, int64_t size, int poison)
{
  const char *kind = getenv("K3_POOL");
  pool->used = 0;
  pool->size = size;
  pool->separate = kind && strcmp(kind, "separate") == 0 ? 1 + poison : 0;
  if (pool->separate) return K3_OK;
  void *memory = NULL;
  cudaError_t error = cudaMalloc(&memory, (size_t)(size > 0 ? size : (int64_t)ALIGN));
  if (error != cudaSuccess) return no_memory(error, size);
  pool->base = (char *)memory;
  if (poison) K3_CUDA_TRY(cudaMemset(memory, 0xff, (size_t)size));
  return K3_OK;
}

static K3Status take_separately(K3CudaPool *pool, int64_t bytes, void **memory)
{
  if (pool->count == pool->room) {
    int64_t room = pool->room ? 2 * pool->room : 256;
    void **pieces = (void **)realloc(pool->pieces, (size_t)room * sizeof *pieces);
    if (!pieces) K3_FAIL(K3_ERR_DEVICE, "no memory for a list of %lld allocations", (long long)room);
    pool->pieces = pieces;
    pool->room = room;
  }
  cudaError_t error = cudaMalloc(memory, (size_t)(bytes > 0 ? bytes : (int64_t)ALIGN));
  if (error != cudaSuccess) return no_memory(error, bytes);
  pool->pieces[pool->count++] = *memory;
  if (pool->separate > 1) K3_CUDA_TRY(cudaMemset(*memory, 0xff, (size_t)bytes));
  return K3_OK;
}

K3Status k3_cuda_pool_take(K3CudaPool *pool, int64_t bytes, void **memory)
{
  int64_t at = pool->used;
  *memory = NULL;
  pool->used += (bytes + ALIGN - 1) / ALIGN * ALIGN;
  if (pool->separate) return take_separately(pool, bytes, memory);
  if (!pool->base) return K3_OK;
  if (pool->used > pool->size)
    K3_FAIL(K3_ERR_DEVICE, "device memory: counted %lld bytes and now need %lld: a fault of k3decode",
            (long long)pool->size, (long long)pool->used);
  *memory = pool->base + at;
  return K3_OK;
}

K3Status k3_cuda_pool_close(K3CudaPool *pool)
{
  K3Status status = K3_OK;
  for (int64_t i = 0; i < pool->count; i++) {
    cudaError_t error = cudaFree(pool->pieces[i]);
    if (error != cudaSuccess && status == K3_OK) status = k3_cuda_failed(error, "cudaFree", __FILE__, __LINE__);
  }
  if (pool->base) {
    cudaError_t error = cudaFree(pool->base);
    if (error != cudaSuccess) status = k3_cuda_failed(error, "cudaFree", __FILE__, __LINE__);
  }
  free(pool->pieces);
  memset(pool, 0, sizeof *pool);
  return status;
}
