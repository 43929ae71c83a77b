/* The collectives over MPI. See comm.h. Layer: comm.
 * MPI counts are int: every count is checked against INT_MAX before a call, so that a message that would
 * not fit is refused rather than cut (known fault F32). */
#include <limits.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "comm/comm.h"

typedef struct {
  int counts[2][64], displacements[2][64]; /* int copies of K3Pieces; K3_MAX_WORLD ranks */
  int started;                             /* this object called MPI_Init */
} MpiState;

enum { MOST_RANKS = 64 };

static K3Status check(int code, const char *call)
{
  if (code == MPI_SUCCESS) return K3_OK;
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  if (MPI_Error_string(code, text, &length) != MPI_SUCCESS) snprintf(text, sizeof text, "error %d", code);
  K3_FAIL(K3_ERR_DEVICE, "%s failed: %s", call, text);
}

static MPI_Datatype datatype(K3Element element)
{
  switch (element) {
  case K3_ELEMENT_F32: return MPI_FLOAT;
  case K3_ELEMENT_F64: return MPI_DOUBLE;
  case K3_ELEMENT_I64: return MPI_INT64_T;
  case K3_ELEMENT_BYTE: break;
  }
  return MPI_BYTE;
}

static K3Status narrow(int64_t value, const char *call, int *out)
{
  if (value < 0 || value > INT_MAX)
    K3_FAIL(K3_ERR_DEVICE, "%s of %lld elements: MPI counts end at %d", call, (long long)value, INT_MAX);
  *out = (int)value;
  return K3_OK;
}

static K3Status narrow_pieces(K3Comm *comm, K3Pieces pieces, int slot, const char *call)
{
  MpiState *state = comm->state;
  for (int r = 0; r < comm->world; r++) {
    K3_TRY(narrow(pieces.count[r], call, &state->counts[slot][r]));
    K3_TRY(narrow(pieces.displacement[r], call, &state->displacements[slot][r]));
  }
  return K3_OK;
}

static K3Status mpi_all_reduce(K3Comm *comm, void *data, int64_t count, K3Element element, K3Reduce reduce)
{
  (void)comm;
  int n = 0;
  K3_TRY(narrow(count, "MPI_Allreduce", &n));
  MPI_Op operation = reduce == K3_REDUCE_SUM ? MPI_SUM : reduce == K3_REDUCE_MAX ? MPI_MAX : MPI_MIN;
  return check(MPI_Allreduce(MPI_IN_PLACE, data, n, datatype(element), operation, MPI_COMM_WORLD), "MPI_Allreduce");
}

static K3Status mpi_all_gather(K3Comm *comm, void *data, K3Pieces pieces, K3Element element)
{
  MpiState *state = comm->state;
  K3_TRY(narrow_pieces(comm, pieces, 0, "MPI_Allgatherv"));
  return check(MPI_Allgatherv(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, data, state->counts[0], state->displacements[0],
                              datatype(element), MPI_COMM_WORLD),
               "MPI_Allgatherv");
}

static K3Status mpi_all_to_all(K3Comm *comm, const void *send, K3Pieces sent, void *receive, K3Pieces received,
                               K3Element element)
{
  MpiState *state = comm->state;
  K3_TRY(narrow_pieces(comm, sent, 0, "MPI_Alltoallv"));
  K3_TRY(narrow_pieces(comm, received, 1, "MPI_Alltoallv"));
  return check(MPI_Alltoallv(send, state->counts[0], state->displacements[0], datatype(element), receive,
                             state->counts[1], state->displacements[1], datatype(element), MPI_COMM_WORLD),
               "MPI_Alltoallv");
}

static K3Status mpi_gather(K3Comm *comm, const void *send, int64_t count, void *receive, K3Pieces pieces,
                           K3Element element)
{
  MpiState *state = comm->state;
  int n = 0;
  K3_TRY(narrow(count, "MPI_Gatherv", &n));
  if (comm->rank == 0) K3_TRY(narrow_pieces(comm, pieces, 0, "MPI_Gatherv"));
  return check(MPI_Gatherv(send, n, datatype(element), receive, state->counts[0], state->displacements[0],
                           datatype(element), 0, MPI_COMM_WORLD),
               "MPI_Gatherv");
}

static K3Status mpi_broadcast(K3Comm *comm, void *data, int64_t count, K3Element element, int root)
{
  (void)comm;
  int n = 0;
  K3_TRY(narrow(count, "MPI_Bcast", &n));
  return check(MPI_Bcast(data, n, datatype(element), root, MPI_COMM_WORLD), "MPI_Bcast");
}

static K3Status mpi_barrier(K3Comm *comm)
{
  (void)comm;
  return check(MPI_Barrier(MPI_COMM_WORLD), "MPI_Barrier");
}

static void mpi_close(K3Comm *comm)
{
  MpiState *state = comm->state;
  if (state->started) MPI_Finalize();
  free(state);
  free(comm);
}

/* Rank among the ranks of this host. */
static K3Status find_local_rank(K3Comm *comm)
{
  MPI_Comm local;
  K3_TRY(check(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &local),
               "MPI_Comm_split_type"));
  K3Status status = check(MPI_Comm_rank(local, &comm->local_rank), "MPI_Comm_rank");
  if (status == K3_OK) status = check(MPI_Comm_size(local, &comm->local_world), "MPI_Comm_size");
  MPI_Comm_free(&local);
  return status;
}

static K3Status start(int *argc, char ***argv, K3Comm *comm)
{
  MpiState *state = comm->state;
  int provided = 0;
  K3_TRY(check(MPI_Init_thread(argc, argv, MPI_THREAD_FUNNELED, &provided), "MPI_Init_thread"));
  state->started = 1;
  K3_TRY(check(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler"));
  K3_TRY(check(MPI_Comm_rank(MPI_COMM_WORLD, &comm->rank), "MPI_Comm_rank"));
  K3_TRY(check(MPI_Comm_size(MPI_COMM_WORLD, &comm->world), "MPI_Comm_size"));
  if (comm->world > MOST_RANKS)
    K3_FAIL(K3_ERR_INPUT, "a world of %d ranks cannot work: wanted 1 to %d", comm->world, MOST_RANKS);
  if (gethostname(comm->host, sizeof comm->host - 1) != 0) strcpy(comm->host, "unknown host");
  return find_local_rank(comm);
}

K3Status k3_comm_open_mpi(int *argc, char ***argv, K3Comm **out)
{
  K3Comm *comm = calloc(1, sizeof *comm);
  MpiState *state = calloc(1, sizeof *state);
  if (!comm || !state) {
    free(comm);
    free(state);
    K3_FAIL(K3_ERR_DEVICE, "no memory for a communicator");
  }
  comm->state = state;
  comm->all_reduce = mpi_all_reduce;
  comm->all_gather = mpi_all_gather;
  comm->all_to_all = mpi_all_to_all;
  comm->gather = mpi_gather;
  comm->broadcast = mpi_broadcast;
  comm->barrier = mpi_barrier;
  comm->close = mpi_close;
  K3Status status = start(argc, argv, comm);
  if (status != K3_OK) {
    mpi_close(comm);
    return status;
  }
  *out = comm;
  return K3_OK;
}
