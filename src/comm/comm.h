/* Collectives of the decode step behind one small table of functions. Layer: comm.
 * MPI serves the host backend (mpi_comm.c); the CUDA backend bootstraps NCCL over it. Every call is
 * collective: all ranks call it with matching arguments. */
#ifndef K3_COMM_COMM_H
#define K3_COMM_COMM_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

typedef enum { K3_ELEMENT_BYTE = 0, K3_ELEMENT_F32, K3_ELEMENT_F64, K3_ELEMENT_I64 } K3Element;

typedef enum { K3_REDUCE_SUM = 0, K3_REDUCE_MAX, K3_REDUCE_MIN } K3Reduce;

/* What a piece of an exchange holds: counts[r] elements at displacement[r]. Arrays of `world`. */
typedef struct {
  const int64_t *count;
  const int64_t *displacement;
} K3Pieces;

typedef struct K3Comm K3Comm;

struct K3Comm {
  int rank, world;
  int local_rank, local_world; /* among the ranks of this host (MPI split by shared memory) */
  int alone; /* 1: this process stands for `rank` of `world`, the others are not there (k3_comm_open_local) */
  char host[256];
  double deadline_s; /* above 0: a call that waits longer for another rank fails, and says who is missing */
  void *state;                 /* the implementation's */

  /* In place over `data` [count]. */
  K3Status (*all_reduce)(K3Comm *comm, void *data, int64_t count, K3Element element, K3Reduce reduce);
  /* This rank's piece stands at its displacement in `data` already; afterwards all pieces do. */
  K3Status (*all_gather)(K3Comm *comm, void *data, K3Pieces pieces, K3Element element);
  /* Piece r of `send` goes to rank r; piece r of `receive` came from rank r. */
  K3Status (*all_to_all)(K3Comm *comm, const void *send, K3Pieces sent, void *receive, K3Pieces received,
                         K3Element element);
  /* All ranks' pieces to rank 0; `receive` counts on rank 0 alone. */
  K3Status (*gather)(K3Comm *comm, const void *send, int64_t count, void *receive, K3Pieces pieces,
                     K3Element element);
  K3Status (*broadcast)(K3Comm *comm, void *data, int64_t count, K3Element element, int root);
  K3Status (*barrier)(K3Comm *comm);
  /* Who does not answer within `seconds`, in words; for ranks that have waited too long and will end, all at about the
   * same time. NULL: nobody to ask. */
  void (*roll_call)(K3Comm *comm, double seconds, char *text, size_t size);
  /* Ends the ranks' use of it and frees it. */
  void (*close)(K3Comm *comm);
};

/* Starts MPI (once a process) and fills *comm for MPI_COMM_WORLD. Works without mpirun too (world of 1).
 * Errors: K3_ERR_DEVICE. */
K3Status k3_comm_open_mpi(int *argc, char ***argv, K3Comm **comm);

/* A communicator of this process alone, without MPI. world = 1: every collective is the identity, as it must
 * be. world > 1: stands for `rank` of that world with the collectives LEFT OUT, for timing one rank's slice:
 * reductions keep this rank's partial, and the missing pieces of an all-gather are filled with copies of
 * this rank's own. What it computes is not the model. Errors: K3_ERR_INPUT (no memory). */
K3Status k3_comm_open_local(int rank, int world, K3Comm **comm);

/* Agreement on failure: every rank passes its own status; all get K3_OK only when all did. On failure the
 * lowest failing rank's message is printed by that rank to stderr, and all ranks get its status.
 * Call it where ranks may fail apart (opening, planning, loading). */
K3Status k3_comm_agree(K3Comm *comm, K3Status status);

/* A failure inside a step, where the others wait in a collective: prints this rank's message and ends all
 * ranks with `status` as the exit status. When several ranks fail at once the lowest speaks first. Does not
 * return. */
_Noreturn void k3_comm_abort(K3Comm *comm, K3Status status);

/* Bytes of one element. */
int64_t k3_element_bytes(K3Element element);

#endif
