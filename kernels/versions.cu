/* Versions of CUDA and NCCL. See src/decode/device_versions.h. Layer: backend (CUDA), host code only.
 * src/commands asks before anything else is done, so that another library than the headers' is named (known fault F35). */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <cuda_runtime_api.h>

#ifdef HAVE_NCCL
#include <nccl.h>
#endif

extern "C" {
#include "decode/device_versions.h"

void k3_device_versions(K3DeviceVersions *versions)
{
  *versions = {};
  versions->cuda_built = CUDART_VERSION;
  if (cudaRuntimeGetVersion(&versions->cuda_found) != cudaSuccess) versions->cuda_found = 0;
  if (cudaDriverGetVersion(&versions->driver) != cudaSuccess) versions->driver = 0;
#ifdef HAVE_NCCL
  versions->nccl_built = NCCL_VERSION_CODE;
  if (ncclGetVersion(&versions->nccl_found) != ncclSuccess) versions->nccl_found = 0;
#endif
}
}
