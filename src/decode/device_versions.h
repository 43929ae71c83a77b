/* Versions of CUDA and NCCL, built with and found at run time. Layer: decode (kernels/versions.cu fills it, or no_cuda.c).
 * No GPU is needed, and none is touched. */
#ifndef K3_DECODE_DEVICE_VERSIONS_H
#define K3_DECODE_DEVICE_VERSIONS_H

/* All 0 in a build without CUDA. */
typedef struct {
  int cuda_built, cuda_found; /* 1000 · major + 10 · minor; found: the runtime, linked in or shared */
  int driver;                 /* newest CUDA that the driver serves, in the same form; 0: no driver here */
  int nccl_built,
      nccl_found; /* 10000 · major + 100 · minor + patch; built 0: a build without NCCL; found 0: it does not say */
} K3DeviceVersions;

void k3_device_versions(K3DeviceVersions *versions);

#endif
