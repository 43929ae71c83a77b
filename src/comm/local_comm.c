/* Collectives of a process alone. See k3_comm_open_local in comm.h. Layer: comm. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "comm/comm.h"

static K3Status local_all_reduce(K3Comm *comm, void *data, int64_t count, K3Element element, K3Reduce reduce)
{
  (void)comm, (void)data, (void)count, (void)element, (void)reduce;
  return K3_OK;
}

/* Fills the other ranks' pieces with this rank's own, repeated: plausible numbers to work on in a slice. */
static void fill_missing(K3Comm *comm, char *data, K3Pieces pieces, int64_t size)
{
  const char *own = data + pieces.displacement[comm->rank] * size;
  int64_t own_bytes = pieces.count[comm->rank] * size;
  for (int r = 0; r < comm->world; r++) {
    if (r == comm->rank || own_bytes == 0) continue;
    char *piece = data + pieces.displacement[r] * size;
    int64_t bytes = pieces.count[r] * size;
    for (int64_t at = 0; at < bytes; at += own_bytes)
      memcpy(piece + at, own, (size_t)(bytes - at < own_bytes ? bytes - at : own_bytes));
  }
}

static K3Status local_all_gather(K3Comm *comm, void *data, K3Pieces pieces, K3Element element)
{
  fill_missing(comm, data, pieces, k3_element_bytes(element));
  return K3_OK;
}

static K3Status local_all_to_all(K3Comm *comm, const void *send, K3Pieces sent, void *receive, K3Pieces received,
                                 K3Element element)
{
  int64_t size = k3_element_bytes(element);
  if (received.count[comm->rank] > 0)
    memcpy((char *)receive + received.displacement[comm->rank] * size,
           (const char *)send + sent.displacement[comm->rank] * size,
           (size_t)(received.count[comm->rank] * size));
  fill_missing(comm, receive, received, size);
  return K3_OK;
}

static K3Status local_gather(K3Comm *comm, const void *send, int64_t count, void *receive, K3Pieces pieces,
                             K3Element element)
{
  int64_t size = k3_element_bytes(element);
  if (count > 0 && pieces.displacement)
    memcpy((char *)receive + pieces.displacement[comm->rank] * size, send, (size_t)(count * size));
  return K3_OK;
}

static K3Status local_broadcast(K3Comm *comm, void *data, int64_t count, K3Element element, int root)
{
  (void)comm, (void)data, (void)count, (void)element, (void)root;
  return K3_OK;
}

static K3Status local_barrier(K3Comm *comm)
{
  (void)comm;
  return K3_OK;
}

static void local_close(K3Comm *comm) { free(comm); }

K3Status k3_comm_open_local(int rank, int world, K3Comm **out)
{
  K3Comm *comm = calloc(1, sizeof *comm);
  if (!comm) K3_FAIL(K3_ERR_INPUT, "no memory for a communicator");
  comm->rank = rank;
  comm->world = world;
  comm->local_world = 1;
  comm->alone = 1;
  if (gethostname(comm->host, sizeof comm->host - 1) != 0) strcpy(comm->host, "localhost");
  comm->all_reduce = local_all_reduce;
  comm->all_gather = local_all_gather;
  comm->all_to_all = local_all_to_all;
  comm->gather = local_gather;
  comm->broadcast = local_broadcast;
  comm->barrier = local_barrier;
  comm->close = local_close;
  *out = comm;
  return K3_OK;
}
