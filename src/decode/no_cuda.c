/* Stands in for the CUDA backend in a build without one (kernels/ provides it otherwise). Layer: decode. */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include "decode/backend.h"
#include "decode/device_versions.h"

#ifndef K3_NO_CUDA_REASON
#define K3_NO_CUDA_REASON "configure found no nvcc"
#endif

int k3_backend_has_cuda(void) { return 0; }

void k3_device_versions(K3DeviceVersions *versions) { *versions = (K3DeviceVersions){0}; }

K3Status k3_backend_open_cuda(K3Source *source, const K3Plan *plan, K3Comm *comm, const K3BackendOptions *options,
                              K3Backend **backend)
{
  (void)source, (void)plan, (void)comm, (void)options;
  *backend = NULL;
  K3_FAIL(K3_ERR_DEVICE,
          "this build has no CUDA backend: %s; install the CUDA Toolkit and build again after ./configure "
          "--with-cuda=DIR, or run with --backend host",
          K3_NO_CUDA_REASON);
}
