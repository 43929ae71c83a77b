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

/* --- waiting no longer than the deadline ------------------------------------------------------------- */

enum { ROLL_CALL_TAG = 3003 };

/* Every rank that calls this sends a word to all others; who has sent none in time is missing. What is still under way is
 * left to MPI: the caller ends the ranks. */
static void mpi_roll_call(K3Comm *comm, double seconds, char *text, size_t size)
{
  static int word = 1;
  int world = comm->world, missing = world - 1;
  MPI_Request *requests = calloc(2 * (size_t)world, sizeof *requests);
  int *here = calloc(2 * (size_t)world, sizeof *here),
      *words = here ? here + world : NULL; /* live on with the requests */
  snprintf(text, size, "no memory to ask the other ranks");
  if (!requests || !here) return;
  for (int r = 0; r < world; r++) {
    requests[r] = requests[world + r] = MPI_REQUEST_NULL;
    if (r == comm->rank) continue;
    if (MPI_Irecv(&words[r], 1, MPI_INT, r, ROLL_CALL_TAG, MPI_COMM_WORLD, &requests[r]) != MPI_SUCCESS ||
        MPI_Isend(&word, 1, MPI_INT, r, ROLL_CALL_TAG, MPI_COMM_WORLD, &requests[world + r]) != MPI_SUCCESS)
      return;
  }
  for (double end = MPI_Wtime() + seconds; missing > 0 && MPI_Wtime() < end;)
    for (int r = 0; r < world; r++) {
      int done = 0;
      if (r == comm->rank || here[r] || MPI_Test(&requests[r], &done, MPI_STATUS_IGNORE) != MPI_SUCCESS || !done)
        continue;
      here[r] = 1;
      missing--;
    }
  size_t at =
      (size_t)snprintf(text, size, missing ? "no answer from rank" : "all ranks answer, so no process is missing");
  for (int r = 0; r < world && missing; r++)
    if (r != comm->rank && !here[r] && at < size) at += (size_t)snprintf(text + at, size - at, " %d", r);
}

/* Waits for a call that has begun. */
static K3Status finish(K3Comm *comm, int code, MPI_Request *request, const char *call)
{
  K3_TRY(check(code, call));
  double begin = MPI_Wtime();
  for (int done = 0, turn = 1;; turn = turn % 1024 + 1) {
    K3_TRY(check(MPI_Test(request, &done, MPI_STATUS_IGNORE), call));
    if (done) return K3_OK;
    if (turn < 1024 || MPI_Wtime() - begin < comm->deadline_s) continue;
    char who[512];
    mpi_roll_call(comm, 2.0, who, sizeof who);
    K3_FAIL(K3_ERR_DEVICE, "%s between two steps has waited %.0f s for another rank: %s", call, comm->deadline_s, who);
  }
}

static int waits_forever(const K3Comm *comm) { return !(comm->deadline_s > 0.0); }

/* --- the collectives ---------------------------------------------------------------------------------- */

static K3Status mpi_all_reduce(K3Comm *comm, void *data, int64_t count, K3Element element, K3Reduce reduce)
{
  MPI_Request request;
  int n = 0;
  K3_TRY(narrow(count, "MPI_Allreduce", &n));
  MPI_Op operation = reduce == K3_REDUCE_SUM ? MPI_SUM : reduce == K3_REDUCE_MAX ? MPI_MAX : MPI_MIN;
  if (waits_forever(comm))
    return check(MPI_Allreduce(MPI_IN_PLACE, data, n, datatype(element), operation, MPI_COMM_WORLD), "MPI_Allreduce");
  return finish(comm, MPI_Iallreduce(MPI_IN_PLACE, data, n, datatype(element), operation, MPI_COMM_WORLD, &request),
                &request, "MPI_Allreduce");
}

static K3Status mpi_all_gather(K3Comm *comm, void *data, K3Pieces pieces, K3Element element)
{
  MpiState *state = comm->state;
  MPI_Request request;
  K3_TRY(narrow_pieces(comm, pieces, 0, "MPI_Allgatherv"));
  if (waits_forever(comm))
    return check(MPI_Allgatherv(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, data, state->counts[0], state->displacements[0],
                                datatype(element), MPI_COMM_WORLD),
                 "MPI_Allgatherv");
  return finish(comm,
                MPI_Iallgatherv(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, data, state->counts[0], state->displacements[0],
                                datatype(element), MPI_COMM_WORLD, &request),
                &request, "MPI_Allgatherv");
}

static K3Status mpi_all_to_all(K3Comm *comm, const void *send, K3Pieces sent, void *receive, K3Pieces received,
                               K3Element element)
{
  MpiState *state = comm->state;
  MPI_Request request;
  K3_TRY(narrow_pieces(comm, sent, 0, "MPI_Alltoallv"));
  K3_TRY(narrow_pieces(comm, received, 1, "MPI_Alltoallv"));
  if (waits_forever(comm))
    return check(MPI_Alltoallv(send, state->counts[0], state->displacements[0], datatype(element), receive,
                               state->counts[1], state->displacements[1], datatype(element), MPI_COMM_WORLD),
                 "MPI_Alltoallv");
  return finish(comm,
                MPI_Ialltoallv(send, state->counts[0], state->displacements[0], datatype(element), receive,
                               state->counts[1], state->displacements[1], datatype(element), MPI_COMM_WORLD, &request),
                &request, "MPI_Alltoallv");
}

static K3Status mpi_gather(K3Comm *comm, const void *send, int64_t count, void *receive, K3Pieces pieces,
                           K3Element element)
{
  MpiState *state = comm->state;
  MPI_Request request;
  int n = 0;
  K3_TRY(narrow(count, "MPI_Gatherv", &n));
  if (comm->rank == 0) K3_TRY(narrow_pieces(comm, pieces, 0, "MPI_Gatherv"));
  if (waits_forever(comm))
    return check(MPI_Gatherv(send, n, datatype(element), receive, state->counts[0], state->displacements[0],
                             datatype(element), 0, MPI_COMM_WORLD),
                 "MPI_Gatherv");
  return finish(comm,
                MPI_Igatherv(send, n, datatype(element), receive, state->counts[0], state->displacements[0],
                             datatype(element), 0, MPI_COMM_WORLD, &request),
                &request, "MPI_Gatherv");
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
  comm->roll_call = mpi_roll_call;
  comm->close = mpi_close;
  K3Status status = start(argc, argv, comm);
  if (status != K3_OK) {
    mpi_close(comm);
    return status;
  }
  *out = comm;
  return K3_OK;
}
