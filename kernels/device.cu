/* Which GPU a rank uses. See backend.h. Layer: backend (CUDA), host code only.
 * Known faults F25 (launchers that narrow the list of GPUs) and F26 (two ranks on one GPU). */
#include <stdio.h>
#include <stdlib.h>

#include "kernels/backend.h"

enum { NEEDED_MAJOR = 9, NEEDED_MINOR = 0 };

/* What each rank tells the others. */
typedef struct {
  char host[256], bus[32];
} Place;

static const char *visible_devices(void)
{
  const char *list = getenv("CUDA_VISIBLE_DEVICES");
  return list ? list : "not set";
}

static K3Status check_count(cudaError_t error, int count)
{
  if (error == cudaErrorInsufficientDriver || error == cudaErrorSystemDriverMismatch)
    K3_FAIL(K3_ERR_DEVICE,
            "the CUDA driver cannot serve this program: %s; update the driver, or run with --backend host",
            cudaGetErrorString(error));
  if (error == cudaSuccess && count > 0) return K3_OK;
  K3_FAIL(K3_ERR_DEVICE,
          "no GPU is visible here (%s; CUDA_VISIBLE_DEVICES is %s): ask the launcher for one GPU a rank (Slurm: "
          "--gpus-per-node "
          "and --gpu-bind=none), unset CUDA_VISIBLE_DEVICES, or run with --backend host",
          error == cudaSuccess ? "the list is empty" : cudaGetErrorString(error), visible_devices());
}

static K3Status choose(K3Cuda *cuda)
{
  int count = 0;
  cudaError_t error = cudaGetDeviceCount(&count);
  K3_TRY(check_count(error, count));
  /* One visible GPU: the launcher chose for us, or there is but one. Otherwise the local rank's. More ranks than GPUs
   * show as two ranks on one bus id. */
  cuda->device = cuda->comm->local_rank % count;
  K3_CUDA_TRY(cudaSetDevice(cuda->device));
  cudaDeviceProp properties;
  K3_CUDA_TRY(cudaGetDeviceProperties(&properties, cuda->device));
  K3_CUDA_TRY(cudaDeviceGetPCIBusId(cuda->bus, sizeof cuda->bus, cuda->device));
  snprintf(cuda->device_name, sizeof cuda->device_name, "%s", properties.name);
  if (properties.major != NEEDED_MAJOR || properties.minor != NEEDED_MINOR)
    K3_FAIL(K3_ERR_DEVICE,
            "GPU %d (%s, %s) has compute capability %d.%d; this build's kernels are for %d.%d (Hopper: H100, H200). "
            "Use such a "
            "GPU, or --backend host",
            cuda->device, properties.name, cuda->bus, properties.major, properties.minor, NEEDED_MAJOR, NEEDED_MINOR);
  return K3_OK;
}

/* All ranks learn all places; ranks that found none have an empty bus id. */
static K3Status compare(K3Cuda *cuda, int share)
{
  K3Comm *comm = cuda->comm;
  Place *places = (Place *)calloc((size_t)comm->world, sizeof *places);
  int64_t *piece = (int64_t *)calloc(2 * (size_t)comm->world, sizeof *piece);
  K3Status status = K3_OK;
  int pair[2] = {-1, -1};
  if (!places || !piece) K3_FAIL_DONE(K3_ERR_DEVICE, "no memory to compare the GPUs of %d ranks", comm->world);
  for (int r = 0; r < comm->world; r++) {
    piece[r] = sizeof *places;
    piece[comm->world + r] = (int64_t)(r * sizeof *places);
  }
  snprintf(places[comm->rank].host, sizeof places->host, "%s", comm->host);
  snprintf(places[comm->rank].bus, sizeof places->bus, "%s", cuda->bus);
  K3Pieces pieces;
  pieces.count = piece;
  pieces.displacement = piece + comm->world;
  K3_TRY_DONE(comm->all_gather(comm, places, pieces, K3_ELEMENT_BYTE));
  cuda->sharing = 0;
  for (int r = 0; r < comm->world; r++) {
    cuda->sharing += places[r].bus[0] && !strcmp(places[r].bus, cuda->bus) && !strcmp(places[r].host, comm->host);
    for (int s = r + 1; s < comm->world && pair[0] < 0; s++)
      if (places[r].bus[0] && !strcmp(places[r].bus, places[s].bus) && !strcmp(places[r].host, places[s].host))
        pair[0] = r, pair[1] = s;
  }
  if (pair[0] >= 0 && !share)
    K3_FAIL_DONE(
        K3_ERR_DEVICE,
        "ranks %d and %d of host %s are both on GPU %s, and NCCL wants one GPU a rank: start no more ranks on a host "
        "than it has GPUs, and let each see all of them (Slurm: --gpu-bind=none; CUDA_VISIBLE_DEVICES is %s here)",
        pair[0], pair[1], places[pair[0]].host, places[pair[0]].bus, visible_devices());
done:
  free(places);
  free(piece);
  return status;
}

K3Status k3_cuda_device_choose(K3Cuda *cuda, int share)
{
  K3Status chosen = choose(cuda);
  cuda->sharing = 1;
  if (!cuda->communicates) return chosen;
  if (chosen != K3_OK) cuda->bus[0] = '\0'; /* the others wait in the comparison */
  K3Status compared = compare(cuda, share);
  return chosen != K3_OK ? chosen : compared;
}
