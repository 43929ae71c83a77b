/* Collectives between GPUs. See backend.h. Layer: backend (CUDA), host code only.
 *
 * NCCL, bootstrapped over the MPI communicator: plain calls on the step's stream, inside the captured graph too.
 * K3_COMM=staged instead copies through host memory and MPI: slow, eager only, but ranks may share a GPU, so that the
 * sharding can be tested on one. Known faults F28, F29: NCCL's own rounds and barriers, nothing of ours is frozen in a graph. */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <stdio.h>
#include <stdlib.h>

#include "kernels/backend.h"

#ifdef HAVE_NCCL
#include <nccl.h>
#endif

static int kind_is(const char *wanted)
{
  const char *kind = getenv("K3_COMM");
  return kind && strcmp(kind, wanted) == 0;
}

int k3_cuda_comm_is_staged(void) { return kind_is("staged"); }

int k3_cuda_comm_is_forced(void) { return kind_is("nccl") || kind_is("device"); }

/* --- NCCL --------------------------------------------------------------------------------------------- */

#ifdef HAVE_NCCL

static K3Status nccl_failed(const K3Cuda *cuda, ncclResult_t result, const char *call)
{
  ncclComm_t comm = (ncclComm_t)cuda->collectives.state;
  const char *last = comm ? ncclGetLastError(comm) : ncclGetLastError(NULL);
  K3_FAIL(K3_ERR_DEVICE,
          "NCCL: %s (%s) from %s in layer %lld, phase %s on GPU %s. If the GPUs of a host cannot reach each other, let "
          "every rank "
          "see all of them (Slurm: --gpu-bind=none); NCCL_DEBUG=INFO says more",
          ncclGetErrorString(result), last ? last : "", call, (long long)cuda->launch.layer, cuda->launch.phase,
          cuda->bus);
}

#define NCCL_TRY(call)                                                              \
  do {                                                                              \
    ncclResult_t nccl_result_ = (call);                                             \
    if (nccl_result_ != ncclSuccess) return nccl_failed(cuda, nccl_result_, #call); \
  } while (0)

static K3Status nccl_all_reduce(K3Cuda *cuda, float *data, int64_t count)
{
  NCCL_TRY(ncclAllReduce(data, data, (size_t)count, ncclFloat32, ncclSum, (ncclComm_t)cuda->collectives.state,
                         cuda->stream));
  return K3_OK;
}

static int is_even(K3Pieces pieces, int world)
{
  for (int r = 0; r < world; r++)
    if (pieces.count[r] != pieces.count[0] || pieces.displacement[r] != r * pieces.count[0]) return 0;
  return 1;
}

static K3Status nccl_all_gather(K3Cuda *cuda, int buffers, const void *const *own, void *const *data,
                                const K3Pieces *pieces, int64_t size)
{
  ncclComm_t comm = (ncclComm_t)cuda->collectives.state;
  NCCL_TRY(ncclGroupStart());
  for (int b = 0; b < buffers; b++) {
    char *base = (char *)data[b];
    if (is_even(pieces[b], cuda->world)) {
      int64_t bytes = pieces[b].count[0] * size;
      NCCL_TRY(ncclAllGather(own[b], base, (size_t)bytes, ncclInt8, comm, cuda->stream));
      continue;
    }
    for (int r = 0; r < cuda->world; r++) {
      char *piece = base + pieces[b].displacement[r] * size;
      int64_t bytes = pieces[b].count[r] * size;
      const void *from = r == cuda->rank ? own[b] : piece;
      if (bytes > 0) NCCL_TRY(ncclBroadcast(from, piece, (size_t)bytes, ncclInt8, r, comm, cuda->stream));
    }
  }
  NCCL_TRY(ncclGroupEnd());
  return K3_OK;
}

static K3Status nccl_all_to_all(K3Cuda *cuda, int buffers, float *const *send, const K3Pieces *sent,
                                float *const *receive, const K3Pieces *received)
{
  ncclComm_t comm = (ncclComm_t)cuda->collectives.state;
  NCCL_TRY(ncclGroupStart());
  for (int b = 0; b < buffers; b++)
    for (int r = 0; r < cuda->world; r++) {
      if (sent[b].count[r] > 0)
        NCCL_TRY(
            ncclSend(send[b] + sent[b].displacement[r], (size_t)sent[b].count[r], ncclFloat32, r, comm, cuda->stream));
      if (received[b].count[r] > 0)
        NCCL_TRY(ncclRecv(receive[b] + received[b].displacement[r], (size_t)received[b].count[r], ncclFloat32, r, comm,
                          cuda->stream));
    }
  NCCL_TRY(ncclGroupEnd());
  return K3_OK;
}

static K3Status nccl_poll(K3Cuda *cuda)
{
  ncclResult_t result = ncclSuccess;
  NCCL_TRY(ncclCommGetAsyncError((ncclComm_t)cuda->collectives.state, &result));
  if (result != ncclSuccess && result != ncclInProgress)
    return nccl_failed(cuda, result, "another rank or the network");
  return K3_OK;
}

static void nccl_close(K3Cuda *cuda)
{
  ncclComm_t comm = (ncclComm_t)cuda->collectives.state;
  /* a stream that still hangs would keep ncclCommDestroy waiting */
  if (comm && cudaStreamQuery(cuda->stream) == cudaErrorNotReady) ncclCommAbort(comm);
  else if (comm) ncclCommDestroy(comm);
  cuda->collectives.state = NULL;
}

static K3Status nccl_open(K3Cuda *cuda)
{
  ncclUniqueId id;
  ncclComm_t comm = NULL;
  memset(&id, 0, sizeof id);
  K3Status status = K3_OK;
  if (cuda->rank == 0) {
    ncclResult_t result = ncclGetUniqueId(&id);
    if (result != ncclSuccess) status = nccl_failed(cuda, result, "ncclGetUniqueId");
  }
  K3_TRY(k3_comm_agree(cuda->comm, status));
  K3_TRY(cuda->comm->broadcast(cuda->comm, &id, sizeof id, K3_ELEMENT_BYTE, 0));
  NCCL_TRY(ncclCommInitRank(&comm, cuda->world, id, cuda->rank));
  cuda->collectives.name = "nccl";
  cuda->collectives.captures = 1;
  cuda->collectives.state = comm;
  cuda->collectives.all_reduce = nccl_all_reduce;
  cuda->collectives.all_gather = nccl_all_gather;
  cuda->collectives.all_to_all = nccl_all_to_all;
  cuda->collectives.poll = nccl_poll;
  cuda->collectives.close = nccl_close;
  return kind_is("nccl") ? K3_OK : k3_cuda_comm_device_open(cuda, kind_is("device"));
}

#else

static K3Status nccl_open(K3Cuda *cuda)
{
  K3_FAIL(K3_ERR_DEVICE,
          "%d ranks want NCCL, and this build has none: install NCCL 2.28 or newer and build again (configure "
          "--with-nccl), or "
          "run on one GPU",
          cuda->world);
}

#endif

/* --- through host memory ------------------------------------------------------------------------------- */

/* A grown-as-needed pair of host buffers. */
typedef struct {
  char *memory[2];
  size_t size[2];
} Staging;

static K3Status staging(K3Cuda *cuda, int which, size_t bytes, char **memory)
{
  Staging *s = (Staging *)cuda->collectives.state;
  if (s->size[which] < bytes) {
    char *grown = (char *)realloc(s->memory[which], bytes);
    if (!grown) K3_FAIL(K3_ERR_DEVICE, "no memory for a message of %zu bytes", bytes);
    s->memory[which] = grown;
    s->size[which] = bytes;
  }
  *memory = s->memory[which];
  return K3_OK;
}

static int64_t extent(K3Pieces pieces, int world)
{
  int64_t most = 0;
  for (int r = 0; r < world; r++)
    if (pieces.displacement[r] + pieces.count[r] > most) most = pieces.displacement[r] + pieces.count[r];
  return most;
}

static K3Status fetch(K3Cuda *cuda, char *to, const void *from, size_t bytes)
{
  K3_CUDA_TRY(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, cuda->stream));
  return k3_cuda_wait(cuda);
}

static K3Status deliver(K3Cuda *cuda, void *to, const char *from, size_t bytes)
{
  K3_CUDA_TRY(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, cuda->stream));
  return k3_cuda_wait(cuda);
}

static K3Status staged_all_reduce(K3Cuda *cuda, float *data, int64_t count)
{
  char *host = NULL;
  size_t bytes = (size_t)count * sizeof *data;
  K3_TRY(staging(cuda, 0, bytes, &host));
  K3_TRY(fetch(cuda, host, data, bytes));
  K3_TRY(cuda->comm->all_reduce(cuda->comm, host, count, K3_ELEMENT_F32, K3_REDUCE_SUM));
  return deliver(cuda, data, host, bytes);
}

/* `pieces` in bytes. */
static K3Status staged_gather_bytes(K3Cuda *cuda, const void *own, void *data, K3Pieces pieces)
{
  char *host = NULL;
  size_t bytes = (size_t)extent(pieces, cuda->world);
  K3_TRY(staging(cuda, 0, bytes, &host));
  K3_TRY(fetch(cuda, host + pieces.displacement[cuda->rank], own, (size_t)pieces.count[cuda->rank]));
  K3_TRY(cuda->comm->all_gather(cuda->comm, host, pieces, K3_ELEMENT_BYTE));
  return deliver(cuda, data, host, bytes);
}

static K3Status staged_all_gather(K3Cuda *cuda, int buffers, const void *const *own, void *const *data,
                                  const K3Pieces *pieces, int64_t size)
{
  int64_t count[K3_MAX_WORLD], displacement[K3_MAX_WORLD];
  K3Pieces in_bytes;
  in_bytes.count = count;
  in_bytes.displacement = displacement;
  for (int b = 0; b < buffers; b++) {
    for (int r = 0; r < cuda->world; r++) {
      count[r] = pieces[b].count[r] * size;
      displacement[r] = pieces[b].displacement[r] * size;
    }
    K3_TRY(staged_gather_bytes(cuda, own[b], data[b], in_bytes));
  }
  return K3_OK;
}

static K3Status staged_all_to_all(K3Cuda *cuda, int buffers, float *const *send, const K3Pieces *sent,
                                  float *const *receive, const K3Pieces *received)
{
  for (int b = 0; b < buffers; b++) {
    char *out = NULL, *in = NULL;
    size_t out_bytes = (size_t)extent(sent[b], cuda->world) * 4,
           in_bytes = (size_t)extent(received[b], cuda->world) * 4;
    K3_TRY(staging(cuda, 0, out_bytes, &out));
    K3_TRY(staging(cuda, 1, in_bytes, &in));
    K3_TRY(fetch(cuda, out, send[b], out_bytes));
    K3_TRY(cuda->comm->all_to_all(cuda->comm, out, sent[b], in, received[b], K3_ELEMENT_F32));
    K3_TRY(deliver(cuda, receive[b], in, in_bytes));
  }
  return K3_OK;
}

static void staged_close(K3Cuda *cuda)
{
  Staging *s = (Staging *)cuda->collectives.state;
  for (int i = 0; s && i < 2; i++) free(s->memory[i]);
  free(s);
  cuda->collectives.state = NULL;
}

static K3Status staged_open(K3Cuda *cuda)
{
  Staging *s = (Staging *)calloc(1, sizeof *s);
  if (!s) K3_FAIL(K3_ERR_DEVICE, "no memory for messages");
  cuda->collectives.name = "staged";
  cuda->collectives.captures = 0;
  cuda->collectives.state = s;
  cuda->collectives.all_reduce = staged_all_reduce;
  cuda->collectives.all_gather = staged_all_gather;
  cuda->collectives.all_to_all = staged_all_to_all;
  cuda->collectives.poll = NULL;
  cuda->collectives.close = staged_close;
  return K3_OK;
}

K3Status k3_cuda_comm_open(K3Cuda *cuda)
{
  const char *kind = getenv("K3_COMM");
  if (!cuda->communicates) return K3_OK;
  if (kind && kind[0] && !kind_is("staged") && !kind_is("nccl") && !kind_is("device"))
    K3_FAIL(K3_ERR_USAGE, "K3_COMM=%s: wanted nccl, device or staged, or nothing", kind);
  K3_TRY(k3_cuda_comm_is_staged() ? staged_open(cuda) : nccl_open(cuda));
  if (cuda->verbose) fprintf(stderr, "# collectives: %s\n", cuda->collectives.name);
  return K3_OK;
}
