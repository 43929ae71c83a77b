/* Measured cuts of attention, and which of them a plan takes in place of its own. Layer: plan (pure: no I/O, no CUDA).
 *
 * `k3decode tune` measures trials: a slice kernel, heads a pass and slices, for given heads and rows. For each (kernel,
 * heads, rows) one of them is chosen; it serves plans of a band of row counts around the one that it was measured at. */
#ifndef K3_PLAN_ATTENTION_TUNING_H
#define K3_PLAN_ATTENTION_TUNING_H

#include "plan/attention.h"

#ifdef __cplusplus
extern "C" {
#endif

/* One configuration, measured. All members are int64_t or double: a column each in the tuning file. */
typedef struct {
  int64_t kernel;      /* K3AttentionKernel */
  int64_t heads, rows; /* as of the plan's */
  int64_t heads_per_pass, tile_rows, passes, slices, blocks;
  int64_t registers, shared_bytes; /* a thread's, a block's */
  int64_t blocks_per_sm;
  double slice_ms, slice_p10, slice_p90; /* the slice kernel */
  double ms, p10, p90;                   /* the slice kernel and the merge of its partials: what the choice goes by */
  double gbs;                            /* the cache's rows, each counted once, over slice_ms */
  int64_t planned;                       /* 1: what the planner takes by itself */
  /* k3_attention_tuning_conclude: */
  int64_t step;               /* 1: fewer resident blocks than the next narrower width (occupancy step) */
  int64_t chosen;             /* 1: plans of [rows_from, rows_to] rows take this one */
  int64_t rows_from, rows_to; /* of the chosen; 0 of the others */
} K3AttentionTrial;

/* Trials, and what they hold for: a tuning of another device, cache type, model shape or kernel is another one's. */
typedef struct K3AttentionTuning {
  char device[256]; /* "NVIDIA H200" */
  char kernels[64]; /* digest of the kernels' sources, and the compiler's version */
  char cache[8];    /* "f32", "bf16", "f16" */
  int64_t multiprocessors;
  int64_t num_heads, latent, rope; /* of the model */
  int64_t count;
  K3AttentionTrial *trial; /* [count]; whoever fills it owns it */
} K3AttentionTuning;

enum { K3_ATTENTION_MAX_SLICE_TRIALS = 24 };

/* Slice counts worth a trial at width `heads_per_pass`, ascending, each once: from an eighth of a wave of blocks to four
 * waves, also rounded down to the fewest with the same longest slice; one slice where rows are few; the planner's own.
 * Returns their number. */
int k3_attention_trial_slices(const K3AttentionShape *shape, int64_t heads_per_pass,
                              int64_t slices[K3_ATTENTION_MAX_SLICE_TRIALS]);

/* Widths worth a trial: those of the kernel up to the first that takes all heads. Returns their number. */
int k3_attention_trial_widths(const K3AttentionShape *shape, int64_t widths[K3_ATTENTION_MAX_WIDTHS]);

/* Fills step, chosen and the bands of all trials. The fastest is chosen (ms), but the planner's own when it is as fast
 * within the fastest one's spread (p90). Bands part the rows of neighbours at their geometric mean, and reach no farther
 * than a factor of √2: what is best for 128 rows is not for 256. */
void k3_attention_tuning_conclude(K3AttentionTuning *tuning);

/* The chosen trial that serves; NULL: none, or no tuning. */
const K3AttentionTrial *k3_attention_tuning_find(const K3AttentionTuning *tuning, K3AttentionKernel kernel,
                                                 int64_t heads, int64_t rows);

/* Refuses a tuning that was not made for `here` (whose count and trial are not read), or has a trial of a width that no
 * kernel is built for. `origin` begins the message.
 * Errors: K3_ERR_INPUT with what differs. */
K3Status k3_attention_tuning_check(const K3AttentionTuning *tuning, const K3AttentionTuning *here, const char *origin);

/* Refuses a tuning without a trial of that many heads. Errors: K3_ERR_INPUT listing those it has. */
K3Status k3_attention_tuning_check_heads(const K3AttentionTuning *tuning, int64_t heads, const char *origin);

#ifdef __cplusplus
}
#endif
#endif
