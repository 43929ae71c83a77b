/* The sweep file: what `k3decode sweep` measured, and what follows from it. Layer: store. Rank 0 alone writes it.
 *
 * One self-describing HDF5 file (root attribute format = "k3decode-sweep"), built in memory and written in one go as
 * PATH.partial, which is renamed: under the final name it is always whole. Units and the meaning of each axis are
 * attributes of the datasets. Layout: output/README.md. */
#ifndef K3_STORE_SWEEP_FILE_H
#define K3_STORE_SWEEP_FILE_H

#include "base/status.h"
#include "plan/config.h"
#include "plan/step_bytes.h"

#define K3_SWEEP_FORMAT "k3decode-sweep"

enum {
  K3_SWEEP_FORMAT_VERSION = 1,
  K3_SWEEP_ARMS = 2,   /* A and B */
  K3_SWEEP_BLOCKS = 2, /* of an arm in one A B B A */
  K3_SWEEP_WHENS = 2,  /* phase times: before and after the blocks that count */
  K3_SWEEP_WARM_STEPS = 2,
  K3_SWEEP_TEXT_BYTES = 160
};

typedef enum {
  K3_SWEEP_MEDIAN,
  K3_SWEEP_MIN,
  K3_SWEEP_MAX,
  K3_SWEEP_P10,
  K3_SWEEP_P90,
  K3_SWEEP_STATISTICS
} K3SweepStatistic;

/* Times are milliseconds of the slowest rank; NaN where an arm does not exist. C contexts, R repeats, N steps, P phases;
 * arms 2, blocks 2, whens 2. */
typedef struct {
  int64_t contexts, repeats, steps, phases, done; /* done: contexts measured so far */
  int64_t *context;                               /* [C] positions cached before a block, ascending */
  const char *arm[K3_SWEEP_ARMS];                 /* "split", "cache-band:none" … */
  const char *lack[K3_SWEEP_ARMS];                /* why the arm does not exist here; NULL: it does */
  int base;                                       /* the arm that the A/A pair is made of: the first that exists */
  char (*attention)[K3_SWEEP_TEXT_BYTES];         /* [C, arms] kernel, slices, blocks */
  double *step_ms;                                /* [C, arms, R, blocks, N] */
  double *same_ms;                                /* [C, arms, R, blocks, N] the A/A pair */
  double *phase_ms;                               /* [C, whens, arms, N, P] of blocks of their own, with time marks */
  int64_t *token;                                 /* [C, arms, N] chosen in the first block; -1 where there is no arm */

  /* Derived (decode/sweep.c). */
  double *statistic_ms;         /* [C, arms, statistics] over R · blocks · N steps */
  double *same_statistic_ms;    /* [C, arms, statistics] of the A/A pair */
  double *difference_ms;        /* [C] median B - median A */
  double *repeat_difference_ms; /* [C, R] the same, repeat by repeat */
  double *same_difference_ms;   /* [C, R] the same of the A/A pair, repeat by repeat */
  double *own_floor_ms;         /* [C] the largest of these without sign; where both arms run the same plan, their
                                 difference too */
  double *floor_ms;             /* [C] the largest own floor of all contexts, in ms or as a share of the A/A median,
                                 whichever is less; at least the own */
  int64_t *same_path;           /* [C] 1: both arms run the same plan here, so their difference is noise */
  int64_t *above_floor;         /* [C] 1: the difference is larger than the floor and has one sign in all repeats */
  double *depth_ms;             /* [C, arms] median at this context - median at the first */
  double *depth_floor_ms;       /* [C, arms] floors of both contexts + how far the control phases moved between them */
  double *control_ms;           /* [C, whens, arms, P] medians of phase_ms */
} K3Sweep;

/* What a sweep is told of itself. */
typedef struct {
  const char *version, *versions, *model, *backend, *devices, *command, *start_time,
      *kind; /* versions: of libraries too */
  uint64_t model_digest;
  const K3Config *config;
  int ranks;
  int64_t seed, capacity;
  const char *const *phase_names;
  const int64_t *phase_touched; /* [P] 1: the arms differ in it */
  const int64_t *step_bytes;    /* [C, arms, K3_STEP_PARTS] that a step must move on the busiest rank (k3_plan_step_bytes) */
  int overwrite;
} K3SweepInfo;

/* Room for all arrays, times NaN. Errors: K3_ERR_INPUT (no memory). */
K3Status k3_sweep_open(K3Sweep *sweep, int64_t contexts, int64_t repeats, int64_t steps, int64_t phases);
void k3_sweep_close(K3Sweep *sweep);

/* Whether `path` could be written, asked before anything is measured.
 * Errors: K3_ERR_INPUT (exists and not `overwrite`, or is no sweep file; no such directory; not writable). */
K3Status k3_sweep_file_check(const char *path, int overwrite);

/* What a sweep file says, for its page: a K3Sweep without times of single steps and phases (step_ms, same_ms and phase_ms
 * stay NaN), and what it is told of itself (config NULL). Texts belong to the page. */
typedef struct {
  K3Sweep sweep;
  K3SweepInfo info;
  char *texts; /* what the pointers in sweep and info point into */
  const char **phase_names;
  int64_t *phase_touched;
} K3SweepPage;

/* *page is released by k3_sweep_page_close (safe on NULL). Errors: K3_ERR_INPUT naming attribute or dataset. */
K3Status k3_sweep_file_read(const char *path, K3SweepPage **page);
void k3_sweep_page_close(K3SweepPage *page);

/* Errors: K3_ERR_INPUT; then nothing is left behind. */
K3Status k3_sweep_file_write(const char *path, const K3SweepInfo *info, const K3Sweep *sweep);

#endif
