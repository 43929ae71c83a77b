/* Reads a run file: a finished one, one that is being written (SWMR), or one that a crash left. Layer: store.
 * Only whole steps are visible: rows at and beyond /decode/steps do not exist here. */
#ifndef K3_STORE_RUN_READER_H
#define K3_STORE_RUN_READER_H

#include "base/status.h"
#include "plan/config.h"
#include "store/run_file.h"

typedef enum {
  K3_FILE_UNREADABLE, /* no such file, no permission, a directory */
  K3_FILE_NOT_HDF5,
  K3_FILE_DAMAGED,    /* begins as an HDF5 file, but does not open */
  K3_FILE_MODEL,
  K3_FILE_RUN,
  K3_FILE_SNAPSHOT,
  K3_FILE_SWEEP,
  K3_FILE_TUNING,
  K3_FILE_FOREIGN     /* some other HDF5 file */
} K3FileKind;

/* What kind of file stands at `path`, by its root attribute `format`. Records no message. */
K3FileKind k3_run_reader_recognise(const char *path);

typedef struct {
  char path[4096];
  int64_t steps;                /* whole steps; k3_run_reader_refresh renews it */
  int unfinished;               /* being written, or left by a crash */
  char *program_version, *model, *backend, *devices, *command, *start_time, *kind, *plan, *ending; /* never NULL */
  uint64_t model_digest;
  int64_t ranks, first_context;
  char *resumed_from;           /* the snapshot that the run went on from; "": none. Never NULL */
  K3LogitsKind logits;
  int64_t top;                  /* K of top:K */
  K3Config config;              /* checked */
  int64_t prompt_count;
  int64_t *prompt;              /* [prompt_count] */
  int64_t phases;
  char **phase_names;           /* [phases] */
  int64_t parts;
  char **part_names;            /* [parts] of step_bytes */
  int64_t *step_bytes;          /* [ranks, parts] that a step must move, by the plan; NULL: not recorded */
  struct K3RunReaderState *state;
} K3RunReader;

/* Opens and validates everything but the rows. Errors: K3_ERR_INPUT naming the file and the attribute or dataset. */
K3Status k3_run_reader_open(const char *path, K3RunReader **reader);

/* Looks again at a file that is being written: `steps` and `ending` become what they are now. */
K3Status k3_run_reader_refresh(K3RunReader *reader);

/* Whole columns, `steps` rows. tokens [steps]; step_ms [steps]; rank_step_ms [steps, ranks];
 * phase_ms [steps, ranks, phases] (K3_ERR_INPUT when phases is 0). */
K3Status k3_run_reader_tokens(K3RunReader *reader, int64_t *tokens);
K3Status k3_run_reader_step_ms(K3RunReader *reader, double *step_ms);
K3Status k3_run_reader_rank_step_ms(K3RunReader *reader, double *rank_step_ms);
K3Status k3_run_reader_phase_ms(K3RunReader *reader, double *phase_ms);

/* Token and time of steps [first, first + count). */
K3Status k3_run_reader_steps(K3RunReader *reader, int64_t first, int64_t count, int64_t *tokens, double *step_ms);

/* Row `step` of the logits: [V] for K3_LOGITS_ALL; ids, logits [top] for K3_LOGITS_TOP.
 * Errors: K3_ERR_INPUT (no such step, not that kind, unreadable). */
K3Status k3_run_reader_logits(K3RunReader *reader, int64_t step, float *logits);
K3Status k3_run_reader_top(K3RunReader *reader, int64_t step, int64_t *ids, float *logits);

/* Closes and frees. Safe on NULL. */
void k3_run_reader_close(K3RunReader *reader);

#endif
