/* The wait of programmatic dependent launch; see launch.h for the rule. Layer: backend (CUDA), device code. */
#ifndef K3_KERNELS_WAIT_CUH
#define K3_KERNELS_WAIT_CUH

/* Waits for the predecessor's stores, then lets the successor start. Without the launch attribute both are free.
 * Every thread of every block calls it before touching anything that a kernel wrote. */
static __device__ __forceinline__ void k3_wait()
{
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
}

#endif
