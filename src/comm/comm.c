/* What all communicators share: agreement on failure, ending all ranks. See comm.h. Layer: comm. */
#include "comm/comm.h"

#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

int64_t k3_element_bytes(K3Element element)
{
  switch (element) {
  case K3_ELEMENT_F32: return 4;
  case K3_ELEMENT_F64:
  case K3_ELEMENT_I64: return 8;
  case K3_ELEMENT_BYTE: break;
  }
  return 1;
}

static void print_message(void)
{
  const char *message = k3_status_message();
  fprintf(stderr, "k3decode: %s%s\n", k3_status_origin(), message[0] ? message : "failed without a message");
  fflush(stderr);
}

K3Status k3_comm_agree(K3Comm *comm, K3Status status)
{
  /* Lowest failing rank and its status in one number: the minimum over ranks. */
  int64_t none = (int64_t)comm->world << 8;
  int64_t mine = status == K3_OK ? none : (((int64_t)comm->rank << 8) | (int64_t)status);
  int64_t first = mine;
  K3Status reduced = comm->all_reduce(comm, &first, 1, K3_ELEMENT_I64, K3_REDUCE_MIN);
  if (reduced != K3_OK) {
    print_message();
    return reduced;
  }
  if (first == none) return K3_OK;
  if (first == mine) print_message();
  return (K3Status)(first & 0xff);
}

_Noreturn void k3_comm_abort(K3Comm *comm, K3Status status)
{
  /* When all ranks fail at once, rank 0 speaks and ends the others: they wait for that, longer than the signal
   * thread (K3_GRACE_MS) takes to end them. */
  if (comm->rank > 0) usleep(600000u + 20000u * (unsigned)comm->rank);
  print_message();
  int initialised = 0;
  if (MPI_Initialized(&initialised) == MPI_SUCCESS && initialised) MPI_Abort(MPI_COMM_WORLD, (int)status);
  _exit((int)status);
}
