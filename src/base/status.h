/* Status codes and the one error message of a rank.
 * Layer: base (below everything). The message is written once, where the facts are; callers pass
 * the code up with K3_TRY. Only main() ends the process. */
#ifndef K3_BASE_STATUS_H
#define K3_BASE_STATUS_H

#ifdef __cplusplus
extern "C" {
#endif

/* The values are the exit statuses of the program. */
typedef enum {
  K3_OK = 0,          /* done */
  K3_ERR_COMPARE = 1, /* a comparison or a check found a difference */
  K3_ERR_USAGE = 2,   /* wrong command line */
  K3_ERR_INPUT = 3,   /* bad input: a file, a dataset, a value, a size; also an output that cannot be written */
  K3_ERR_DEVICE = 4   /* a device, MPI or NCCL failure; a NaN where none may be */
} K3Status;

/* Records a message and returns `status`. The first message of a process stands; later ones are
 * dropped (they are consequences). `file` and `line` are the source position, printed with
 * K3_DEBUG_ERRORS=1 in the environment. Thread-safe. */
K3Status k3_status_fail(K3Status status, const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/* The recorded message, "" when there is none. */
const char *k3_status_message(void);

/* Forgets the recorded message: for tests, and for callers that handle a failure themselves. */
void k3_status_clear(void);

/* Prefix of every message: "rank 3 on node7: ". Set once after MPI starts. */
void k3_status_set_origin(int rank, int world, const char *host);
const char *k3_status_origin(void);

/* Fail with a message: what, where, got, wanted, mend. */
#define K3_FAIL(status, ...) return k3_status_fail((status), __FILE__, __LINE__, __VA_ARGS__)

/* Pass a failure up. */
#define K3_TRY(call)                          \
  do {                                        \
    K3Status k3_try_status_ = (call);         \
    if (k3_try_status_ != K3_OK) return k3_try_status_; \
  } while (0)

/* Pass a failure up through a release path: needs a local `K3Status status` and a label `done`. */
#define K3_TRY_DONE(call)            \
  do {                               \
    status = (call);                 \
    if (status != K3_OK) goto done;  \
  } while (0)

/* Fail through a release path. */
#define K3_FAIL_DONE(code, ...)                                             \
  do {                                                                      \
    status = k3_status_fail((code), __FILE__, __LINE__, __VA_ARGS__);       \
    goto done;                                                              \
  } while (0)

#ifdef __cplusplus
}
#endif
#endif
