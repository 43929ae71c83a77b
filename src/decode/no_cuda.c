/* Stands in for the CUDA backend in a build without one (kernels/ provides it otherwise). Layer: decode. */
#include "config.h"
#include "decode/backend.h"
#include "decode/device_versions.h"
#include "decode/tune.h"

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

K3Status k3_tuner_open(const K3Config *config, K3Comm *comm, K3CacheType cache, K3AttentionTuning *here, char *line,
                       size_t line_size, K3Tuner **tuner)
{
  (void)config, (void)comm, (void)cache, (void)here, (void)line, (void)line_size;
  *tuner = NULL;
  K3_FAIL(
      K3_ERR_DEVICE,
      "tune measures on a GPU, and this build has no CUDA backend: %s; install the CUDA Toolkit and build again after "
      "./configure --with-cuda=DIR",
      K3_NO_CUDA_REASON);
}

/* Nobody comes here without a tuner. */
K3Status k3_tuner_shape(K3Tuner *tuner, K3AttentionKernel kernel, int64_t heads, int64_t rows, K3AttentionShape *shape,
                        int *serves)
{
  (void)tuner, (void)kernel, (void)heads, (void)rows, (void)shape, (void)serves;
  K3_FAIL(K3_ERR_DEVICE, "this build has no CUDA backend");
}

K3Status k3_tuner_measure(K3Tuner *tuner, K3AttentionTrial *trial)
{
  (void)tuner, (void)trial;
  K3_FAIL(K3_ERR_DEVICE, "this build has no CUDA backend");
}

void k3_tuner_close(K3Tuner *tuner) { (void)tuner; }
