/* Measuring two arms over depth in one process, one loaded backend. Layer: decode. Source: style.md, "Benchmarks";
 * design.md, "Attention at depth".
 *
 * A block is: configure (arm, context), two untimed steps, N timed ones; always from the same cache, state and token, and
 * always with a fresh capture, whichever arm ran before. At each context
 *     phase times of A, B                      (blocks of their own: time marks cost a little)
 *     R times:  A B B A  then  A A' A' A       (the A/A pair: one arm against itself, interleaved the same way)
 *     phase times of B, A
 * A linear drift cancels in A B B A; what does not cancel shows in the A/A pair, which is the noise floor, together with the
 * contexts at which both arms run the same plan. A few repeats may agree by luck: so the floor is the worst over all
 * contexts, in ms or as a share, whichever asks less. */
#ifndef K3_DECODE_SWEEP_H
#define K3_DECODE_SWEEP_H

#include "base/status.h"
#include "decode/backend.h"
#include "store/sweep_file.h"

/* Told on every rank after each block; may be NULL. */
typedef void (*K3SweepObserver)(void *context, int64_t steps_done, int64_t steps_all);
/* Told on every rank when context `c` is measured and derived; may be NULL. */
typedef void (*K3SweepContextDone)(void *context, const K3Sweep *sweep, int64_t c);

typedef struct {
  const K3Plan *plan[K3_SWEEP_ARMS];
  K3AttentionArm attention[K3_SWEEP_ARMS];
  K3BackendOptions options; /* as the backend was opened with */
  K3SweepObserver observer;
  K3SweepContextDone context_done;
  void *context;
} K3SweepSetup;

/* Positions that a block at `context` needs. */
int64_t k3_sweep_capacity(int64_t context, int64_t steps);

/* Phases that attention arms differ in: attn_mla, and comm where ranks exchange. */
int k3_sweep_touches(K3Phase phase);

/* Measures every context of `sweep` (opened, with contexts, arms and lacks set). `comm`: of the decode. *signal: what
 * stopped it early, else 0; sweep->done contexts are whole. A failure inside a step ends all ranks.
 * Errors: K3_ERR_DEVICE, K3_ERR_INPUT. */
K3Status k3_sweep_measure(K3Backend *backend, K3Comm *comm, const K3SweepSetup *setup, K3Sweep *sweep, int *signal);

#endif
