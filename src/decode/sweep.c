/* Two arms over depth. See sweep.h. Layer: decode. */
#include "decode/sweep.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/statistics.h"
#include "decode/interrupt.h"

int64_t k3_sweep_capacity(int64_t context, int64_t steps) { return context + K3_SWEEP_WARM_STEPS + steps; }

int k3_sweep_touches(K3Phase phase) { return phase == K3_PHASE_ATTN_MLA || phase == K3_PHASE_COMM; }

/* --- what follows from the times ------------------------------------------------------------------------- */

/* Statistics of values [n], which are sorted on the way. */
static void summarise(double *values, int64_t n, double *statistic)
{
  k3_sort(values, n);
  statistic[K3_SWEEP_MEDIAN] = k3_quantile(values, n, 0.5);
  statistic[K3_SWEEP_MIN] = values[0];
  statistic[K3_SWEEP_MAX] = values[n - 1];
  statistic[K3_SWEEP_P10] = k3_quantile(values, n, 0.1);
  statistic[K3_SWEEP_P90] = k3_quantile(values, n, 0.9);
}

static double median_of(const double *values, int64_t n, int64_t stride, double *scratch)
{
  for (int64_t i = 0; i < n; i++) scratch[i] = values[i * stride];
  k3_sort(scratch, n);
  return k3_quantile(scratch, n, 0.5);
}

/* Sum of the medians of the control phases. when, arm: as in control_ms. */
static double control_of(const K3Sweep *sweep, int64_t c, int when, int arm)
{
  const double *phase = sweep->control_ms + ((c * K3_SWEEP_WHENS + when) * K3_SWEEP_ARMS + arm) * sweep->phases;
  return phase[K3_PHASE_ATTN_KDA] + phase[K3_PHASE_FFN_DENSE] + phase[K3_PHASE_FFN_MOE];
}

static double *statistics_of(double *all, int64_t c, int arm)
{
  return all + (c * K3_SWEEP_ARMS + arm) * K3_SWEEP_STATISTICS;
}

static void derive_cells(K3Sweep *sweep, int64_t c, double *scratch)
{
  int64_t n = sweep->repeats * K3_SWEEP_BLOCKS * sweep->steps;
  for (int arm = 0; arm < K3_SWEEP_ARMS; arm++) {
    int64_t cell = c * K3_SWEEP_ARMS + arm;
    memcpy(scratch, sweep->same_ms + cell * n, (size_t)n * sizeof *scratch);
    summarise(scratch, n, statistics_of(sweep->same_statistic_ms, c, arm));
    if (sweep->lack[arm]) continue;
    memcpy(scratch, sweep->step_ms + cell * n, (size_t)n * sizeof *scratch);
    summarise(scratch, n, statistics_of(sweep->statistic_ms, c, arm));
    for (int when = 0; when < K3_SWEEP_WHENS; when++)
      for (int64_t p = 0; p < sweep->phases; p++) {
        int64_t at = (c * K3_SWEEP_WHENS + when) * K3_SWEEP_ARMS + arm;
        sweep->control_ms[at * sweep->phases + p] =
            median_of(sweep->phase_ms + at * sweep->steps * sweep->phases + p, sweep->steps, sweep->phases, scratch);
      }
  }
}

/* Medians of the second and the first place of repeat r of times [C, places, R, blocks, N]: their difference. */
static double difference_of(const K3Sweep *sweep, const double *times, int64_t c, int64_t r, double *scratch)
{
  int64_t n = K3_SWEEP_BLOCKS * sweep->steps, first = c * K3_SWEEP_ARMS * sweep->repeats + r;
  return median_of(times + (first + sweep->repeats) * n, n, 1, scratch) - median_of(times + first * n, n, 1, scratch);
}

/* The difference of the arms, and what is known to be noise at this context. */
static void derive_floor(K3Sweep *sweep, int64_t c, double *scratch)
{
  int64_t cell = c * K3_SWEEP_ARMS;
  double floor = 0.0;
  for (int64_t r = 0; r < sweep->repeats; r++) {
    double same = difference_of(sweep, sweep->same_ms, c, r, scratch);
    sweep->same_difference_ms[c * sweep->repeats + r] = same;
    floor = fmax(floor, fabs(same));
    if (!sweep->lack[0] && !sweep->lack[1])
      sweep->repeat_difference_ms[c * sweep->repeats + r] = difference_of(sweep, sweep->step_ms, c, r, scratch);
  }
  if (!sweep->lack[0] && !sweep->lack[1]) {
    double a = statistics_of(sweep->statistic_ms, c, 0)[K3_SWEEP_MEDIAN];
    double b = statistics_of(sweep->statistic_ms, c, 1)[K3_SWEEP_MEDIAN];
    sweep->difference_ms[c] = b - a;
    sweep->same_path[c] = strcmp(sweep->attention[cell], sweep->attention[cell + 1]) == 0;
    if (sweep->same_path[c]) floor = fmax(floor, fabs(b - a));
  }
  sweep->own_floor_ms[c] = floor;
}

static void derive_depth(K3Sweep *sweep, int64_t c)
{
  for (int arm = 0; arm < K3_SWEEP_ARMS; arm++) {
    if (sweep->lack[arm]) continue;
    double moved = fabs(control_of(sweep, c, 0, arm) + control_of(sweep, c, 1, arm) -
                        control_of(sweep, 0, 0, arm) - control_of(sweep, 0, 1, arm)) /
                   2.0;
    int64_t cell = c * K3_SWEEP_ARMS + arm;
    sweep->depth_ms[cell] = statistics_of(sweep->statistic_ms, c, arm)[K3_SWEEP_MEDIAN] -
                            statistics_of(sweep->statistic_ms, 0, arm)[K3_SWEEP_MEDIAN];
    sweep->depth_floor_ms[cell] = c == 0 ? 0.0 : sweep->floor_ms[0] + sweep->floor_ms[c] + moved;
  }
}

/* Statistics, differences and own floor of context c. Errors: K3_ERR_INPUT (no memory). */
static K3Status derive(K3Sweep *sweep, int64_t c)
{
  int64_t n = sweep->repeats * K3_SWEEP_BLOCKS * sweep->steps;
  double *scratch = malloc((size_t)n * sizeof *scratch);
  if (!scratch) K3_FAIL(K3_ERR_INPUT, "no memory to sort %lld times", (long long)n);
  derive_cells(sweep, c, scratch);
  derive_floor(sweep, c, scratch);
  free(scratch);
  return K3_OK;
}

/* Has the difference the same sign in every repeat? */
static int repeats_agree(const K3Sweep *sweep, int64_t c)
{
  for (int64_t r = 0; r < sweep->repeats; r++)
    if (!(sweep->repeat_difference_ms[c * sweep->repeats + r] * sweep->difference_ms[c] > 0.0)) return 0;
  return 1;
}

/* What needs all measured contexts: the floor, what exceeds it, the depth-dependent term.
 * Noise of few repeats may look small by luck, so the worst of all contexts counts: as it is (jitter does not grow with
 * the step) or as a share of the step (clocks do), whichever asks less; never less than was seen at the context itself. */
static void conclude(K3Sweep *sweep)
{
  double most = 0.0, share = 0.0;
  for (int64_t c = 0; c < sweep->done; c++) {
    most = fmax(most, sweep->own_floor_ms[c]);
    share = fmax(share, sweep->own_floor_ms[c] / statistics_of(sweep->same_statistic_ms, c, 0)[K3_SWEEP_MEDIAN]);
  }
  for (int64_t c = 0; c < sweep->done; c++) {
    double scaled = share * statistics_of(sweep->same_statistic_ms, c, 0)[K3_SWEEP_MEDIAN];
    sweep->floor_ms[c] = fmax(sweep->own_floor_ms[c], fmin(most, scaled));
    sweep->above_floor[c] = !sweep->same_path[c] && fabs(sweep->difference_ms[c]) > sweep->floor_ms[c] && /* NaN: no */
                            repeats_agree(sweep, c);
  }
  for (int64_t c = 0; c < sweep->done; c++) derive_depth(sweep, c);
}

/* --- a block --------------------------------------------------------------------------------------------- */

typedef struct {
  K3Backend *backend;
  K3Comm *comm;
  const K3SweepSetup *setup;
  K3Sweep *sweep;
  double *row; /* [1 + N · (1 + P)] what a block brings: signal, step times, phase times */
  int64_t steps_done, steps_all;
  int *signal;
} Measure;

/* The steps of a block into measure->row; a failure in one would leave the other ranks waiting, so it ends them. */
static void run_steps(Measure *measure, int64_t *tokens)
{
  K3Sweep *sweep = measure->sweep;
  double *step_ms = measure->row + 1, *phase_ms = step_ms + sweep->steps;
  int64_t token = 0;
  for (int64_t n = -K3_SWEEP_WARM_STEPS; n < sweep->steps; n++) {
    K3StepResult step = {0};
    double begin = k3_clock_ms();
    K3Status status = measure->backend->step(measure->backend, token, 1, 0, &step);
    double end = k3_clock_ms();
    if (status != K3_OK) k3_comm_abort(measure->comm, status);
    token = step.token;
    if (n < 0) continue;
    step_ms[n] = end - begin;
    memcpy(phase_ms + n * sweep->phases, step.phase_ms, (size_t)sweep->phases * sizeof *phase_ms);
    if (tokens) tokens[n] = token;
  }
}

/* One block; every rank gets the slowest rank's times in measure->row. Arms that do not exist are left out. */
static K3Status run_block(Measure *measure, int64_t c, int arm, int phase_times, int64_t *tokens)
{
  K3Sweep *sweep = measure->sweep;
  K3Comm *comm = measure->comm;
  const K3SweepSetup *setup = measure->setup;
  int64_t count = 1 + sweep->steps * (1 + sweep->phases);
  K3BackendOptions options = setup->options;
  options.attention = setup->attention[arm];
  options.start = sweep->context[c];
  options.horizon = k3_sweep_capacity(sweep->context[c], sweep->steps);
  options.phase_times = phase_times;
  K3_TRY(k3_comm_agree(comm, measure->backend->configure(measure->backend, setup->plan[arm], &options)));
  measure->backend->describe_attention(measure->backend, sweep->attention[c * K3_SWEEP_ARMS + arm],
                                       K3_SWEEP_TEXT_BYTES);
  K3_TRY(comm->barrier(comm));
  run_steps(measure, tokens);
  measure->row[0] = (double)k3_interrupt_signal();
  K3Status status = comm->all_reduce(comm, measure->row, count, K3_ELEMENT_F64, K3_REDUCE_MAX);
  if (status != K3_OK) k3_comm_abort(comm, status);
  *measure->signal = (int)measure->row[0];
  if (*measure->signal) k3_interrupt_acknowledge();
  measure->steps_done += K3_SWEEP_WARM_STEPS + sweep->steps;
  if (setup->observer) setup->observer(setup->context, measure->steps_done, measure->steps_all);
  return K3_OK;
}

/* --- a context ------------------------------------------------------------------------------------------- */

/* Phase times of both arms; `when` 0: A, B, before all else; 1: B, A, after. */
static K3Status measure_phases(Measure *measure, int64_t c, int when)
{
  K3Sweep *sweep = measure->sweep;
  int64_t block = sweep->steps * sweep->phases;
  for (int k = 0; k < K3_SWEEP_ARMS && !*measure->signal; k++) {
    int arm = when ? K3_SWEEP_ARMS - 1 - k : k;
    if (sweep->lack[arm]) continue;
    K3_TRY(run_block(measure, c, arm, 1, NULL));
    memcpy(sweep->phase_ms + ((c * K3_SWEEP_WHENS + when) * K3_SWEEP_ARMS + arm) * block,
           measure->row + 1 + sweep->steps, (size_t)block * sizeof *sweep->phase_ms);
  }
  return K3_OK;
}

/* A B B A of repeat r into step_ms; `same`: of one arm against itself, into same_ms. */
static K3Status measure_repeat(Measure *measure, int64_t c, int64_t r, int same)
{
  static const int order[2 * K3_SWEEP_BLOCKS] = {0, 1, 1, 0};
  K3Sweep *sweep = measure->sweep;
  int turn[K3_SWEEP_ARMS] = {0, 0};
  double *into = same ? sweep->same_ms : sweep->step_ms;
  for (int k = 0; k < 2 * K3_SWEEP_BLOCKS && !*measure->signal; k++) {
    int place = order[k], arm = same ? sweep->base : place, block = turn[place]++;
    if (sweep->lack[arm]) continue;
    int64_t cell = c * K3_SWEEP_ARMS + place;
    int64_t *tokens = !same && r == 0 && block == 0 ? sweep->token + cell * sweep->steps : NULL;
    K3_TRY(run_block(measure, c, arm, 0, tokens));
    memcpy(into + ((cell * sweep->repeats + r) * K3_SWEEP_BLOCKS + block) * sweep->steps, measure->row + 1,
           (size_t)sweep->steps * sizeof *into);
  }
  return K3_OK;
}

static K3Status measure_context(Measure *measure, int64_t c)
{
  K3_TRY(measure_phases(measure, c, 0));
  for (int64_t r = 0; r < measure->sweep->repeats; r++) {
    K3_TRY(measure_repeat(measure, c, r, 0));
    K3_TRY(measure_repeat(measure, c, r, 1));
  }
  return measure_phases(measure, c, 1);
}

K3Status k3_sweep_measure(K3Backend *backend, K3Comm *comm, const K3SweepSetup *setup, K3Sweep *sweep, int *signal)
{
  int arms = !sweep->lack[0] + !sweep->lack[1];
  int64_t blocks = sweep->repeats * K3_SWEEP_BLOCKS * (arms + 2) + K3_SWEEP_WHENS * arms;
  Measure measure = {.backend = backend, .comm = comm, .setup = setup, .sweep = sweep, .signal = signal};
  measure.steps_all = sweep->contexts * blocks * (K3_SWEEP_WARM_STEPS + sweep->steps);
  measure.row = malloc((size_t)(1 + sweep->steps * (1 + sweep->phases)) * sizeof *measure.row);
  K3Status status = K3_OK;
  if (!measure.row) status = k3_status_fail(K3_ERR_INPUT, __FILE__, __LINE__, "no memory for the times of a block");
  status = k3_comm_agree(comm, status);
  *signal = 0;
  for (int64_t c = 0; status == K3_OK && c < sweep->contexts && !*signal; c++) {
    status = measure_context(&measure, c);
    if (status != K3_OK || *signal) break;
    status = k3_comm_agree(comm, derive(sweep, c));
    sweep->done = c + 1;
    if (status == K3_OK && setup->context_done) setup->context_done(setup->context, sweep, c);
  }
  if (status == K3_OK) conclude(sweep);
  free(measure.row);
  return status;
}
