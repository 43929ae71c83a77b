/* The run file: what a decode run leaves behind, growing row by row. Layer: store. Rank 0 alone uses it.
 *
 * Written with the latest HDF5 format in SWMR mode: a reader may follow it, and after a crash or a kill
 * every finished step is there. The scalar /decode/steps is written last in a step: rows at and beyond it
 * are unfinished. The text /ending says "running" until the file is ended: a dataset, since attributes may not
 * change in SWMR mode. Layout: design.md, "A run file"; output/README.md. */
#ifndef K3_STORE_RUN_FILE_H
#define K3_STORE_RUN_FILE_H

#include "base/status.h"
#include "plan/config.h"
#include "plan/step_bytes.h"

#define K3_RUN_FORMAT "k3decode-run"
enum { K3_RUN_FORMAT_VERSION = 1, K3_RUN_ENDING_BYTES = 1024 };

typedef struct K3RunFile K3RunFile;

typedef enum { K3_LOGITS_ALL, K3_LOGITS_NONE, K3_LOGITS_TOP } K3LogitsKind;

typedef struct {
  const char *version;      /* of the program */
  const char *model;        /* path or recipe */
  uint64_t model_digest;
  const K3Config *config;
  int ranks;
  const char *backend;      /* "host", "cuda" */
  const char *devices;      /* one line a rank: "rank 0 host device" */
  const char *command;      /* as typed */
  const char *start_time;   /* ISO 8601, UTC */
  const char *plan;         /* the planner's choices and reasons, text; stored as /plan */
  const char *kind;         /* "logits": a true decode; "slice r/W": times only, not logits */
  const int64_t *prompt;    /* token ids */
  int64_t prompt_count;
  int64_t first_context;    /* positions cached before the prompt (--context N), 0 otherwise */
  const char *resumed_from; /* the snapshot that the run goes on from, "" for none: then `prompt` begins with its tokens */
  int64_t resumed_position; /* positions cached in it */
  int64_t first_step;       /* steps of the same job before this file's first (--continue) */
  K3LogitsKind logits;
  int64_t top;              /* K of top:K */
  const char *const *phase_names;
  int phases;
  const int64_t *step_bytes; /* [ranks, K3_STEP_PARTS] that a step must move (k3_plan_step_bytes); NULL: not known */
  int64_t step_bytes_at;     /* positions cached, that they are counted for */
  int overwrite;
} K3RunInfo;

/* One decode step. logits [V] f32 for K3_LOGITS_ALL; top_ids, top_logits [K], descending, for K3_LOGITS_TOP. */
typedef struct {
  int64_t token;
  const float *logits;
  const int64_t *top_ids;
  const float *top_logits;
  double step_ms;
  const double *rank_step_ms; /* [ranks] */
  const double *phase_ms;     /* [ranks, phases] */
} K3RunStep;

/* Creates `path`; `overwrite` replaces a run file, never anything else.
 * Errors: K3_ERR_INPUT (exists, another process has it open, no such directory, not writable, disk full);
 * then no half-made file is left. */
K3Status k3_run_file_create(const char *path, const K3RunInfo *info, K3RunFile **file);

/* Appends a step to every dataset and flushes, /decode/steps last.
 * Errors: K3_ERR_INPUT (disk full …; the file has ended). After a failure the file takes no more steps. */
K3Status k3_run_file_append(K3RunFile *file, const K3RunStep *step);

/* Records why the run ended ("done", "stopped by signal 15 after 3 steps", an error text; NULL: nothing), and
 * closes the HDF5 file. The handle stays valid: later appends are refused, later ends do nothing.
 * Any thread may call it, for example one that watches for signals while the main thread hangs in MPI: one
 * mutex serialises all calls of this file. The HDF5 library itself may be built without thread support, so
 * the main thread must not be inside another HDF5 call (reading the model) at that moment.
 * Safe on NULL. Errors: K3_ERR_INPUT (the last flush failed). */
K3Status k3_run_file_end(K3RunFile *file, const char *ending);

/* k3_run_file_end, then frees the handle. One thread calls it, once. Safe on NULL. */
K3Status k3_run_file_close(K3RunFile *file, const char *ending);

#endif
