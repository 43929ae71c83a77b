/* The wait of programmatic dependent launch; see launch.h for the rule. Layer: backend (CUDA), device code. */
#ifndef K3_KERNELS_WAIT_CUH
#define K3_KERNELS_WAIT_CUH

/* Waits for the predecessor's stores, then lets the successor start. Without the launch attribute both are free.
 * Every thread calls it, or the next, before touching anything that a kernel wrote; exceptions: launch.h. */
static __device__ __forceinline__ void k3_wait()
{
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
}

/* The same, but the successor may start at once: its launch takes about 1.5 us from here (measured), as long as a small
 * kernel. Calling the trigger at the top of the kernel instead, before its own loads, was slower (doc/performance.md). */
static __device__ __forceinline__ void k3_wait_early()
{
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
}

/* The same (EARLY: k3_wait_early) as a loop of one round; `never` is false, but the compiler must not know. It moves addresses that are made
 * before a plain wait behind it, where they cost up to half a microsecond. */
template <bool EARLY>
static __device__ __forceinline__ void k3_wait_in_place(bool never)
{
  do {
    if (EARLY) k3_wait_early();
    else k3_wait();
  } while (never);
}

#endif
