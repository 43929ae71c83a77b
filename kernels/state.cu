/* Bands of a rank's state out of the device and back in, for snapshots. See backend.h. Layer: backend (CUDA), host code only.
 *
 * Cache rows and convolution windows are kept as the snapshot has them. A head's KDA state is not: the kernel keeps a
 * value's keys together (kda.h), the file has [key, value] as the formula does. */
#include <stdlib.h>

#include "kernels/backend.h"

/* Where the band stands on the device, and its bytes. */
static K3Status find_band(const K3Cuda *cuda, const K3StateBand *band, char **at, size_t *bytes)
{
  const K3Config *c = cuda->config;
  const K3CudaLayer *layer = &cuda->layers[band->layer];
  int64_t channels = k3_cuda_own(cuda, K3_SHARE_KDA_HEADS) * c->kda_head_dim;
  int64_t row = k3_config_cache_width(c) * k3_cuda_cache_element_bytes(cuda->cache_type);
  if (band->part == K3_STATE_CACHE) {
    if (band->begin < 0 || band->count < 0 || band->begin + band->count > cuda->cache_rows)
      K3_FAIL(K3_ERR_INPUT, "cache rows %lld to %lld of layer %lld: there is room for %lld", (long long)band->begin,
              (long long)(band->begin + band->count), (long long)band->layer, (long long)cuda->cache_rows);
    *at = (char *)layer->cache + band->begin * row;
    *bytes = (size_t)(band->count * row);
  } else if (band->part == K3_STATE_KDA) {
    *at = (char *)layer->kda_state;
    *bytes = (size_t)(channels * c->kda_head_dim * 4);
  } else {
    *at = (char *)layer->kda_window;
    *bytes = (size_t)(3 * (c->kda_conv_kernel - 1) * channels * 4);
  }
  return K3_OK;
}

static void transpose_heads(const K3Cuda *cuda, const float *from, float *to)
{
  int64_t D = cuda->config->kda_head_dim, heads = k3_cuda_own(cuda, K3_SHARE_KDA_HEADS);
  for (int64_t h = 0; h < heads; h++, from += D * D, to += D * D)
    for (int64_t i = 0; i < D; i++)
      for (int64_t j = 0; j < D; j++) to[j * D + i] = from[i * D + j];
}

/* Copies `bytes` and waits for them. */
static K3Status copy(K3Cuda *cuda, void *to, const void *from, size_t bytes, cudaMemcpyKind kind)
{
  if (bytes == 0) return K3_OK;
  K3_CUDA_TRY(cudaMemcpyAsync(to, from, bytes, kind, cuda->stream));
  return k3_cuda_wait(cuda);
}

K3Status k3_cuda_save(K3Backend *backend, const K3StateBand *band, void *data)
{
  K3Cuda *cuda = (K3Cuda *)backend->state;
  char *at = NULL;
  size_t bytes = 0;
  K3_TRY(find_band(cuda, band, &at, &bytes));
  if (band->part != K3_STATE_KDA) return copy(cuda, data, at, bytes, cudaMemcpyDeviceToHost);
  float *turned = (float *)malloc(bytes);
  if (!turned) K3_FAIL(K3_ERR_INPUT, "no memory for a layer's KDA state, %zu bytes", bytes);
  K3Status status = copy(cuda, turned, at, bytes, cudaMemcpyDeviceToHost);
  if (status == K3_OK) transpose_heads(cuda, turned, (float *)data);
  free(turned);
  return status;
}

K3Status k3_cuda_restore(K3Backend *backend, const K3StateBand *band, const void *data)
{
  K3Cuda *cuda = (K3Cuda *)backend->state;
  char *at = NULL;
  size_t bytes = 0;
  K3_TRY(find_band(cuda, band, &at, &bytes));
  if (band->part != K3_STATE_KDA) return copy(cuda, at, data, bytes, cudaMemcpyHostToDevice);
  float *turned = (float *)malloc(bytes);
  if (!turned) K3_FAIL(K3_ERR_INPUT, "no memory for a layer's KDA state, %zu bytes", bytes);
  transpose_heads(cuda, (const float *)data, turned);
  K3Status status = copy(cuda, at, turned, bytes, cudaMemcpyHostToDevice);
  free(turned);
  return status;
}

K3Status k3_cuda_resume_at(K3Backend *backend, int64_t position)
{
  K3Cuda *cuda = (K3Cuda *)backend->state;
  cuda->position = position;
  cuda->attention.slices = 0; /* planned by the next step */
  return K3_OK;
}
