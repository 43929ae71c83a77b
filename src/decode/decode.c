/* The decode loop. See decode.h. Layer: decode. */
#include "decode/decode.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "decode/interrupt.h"

enum { TIMES = 1 + K3_PHASE_COUNT }; /* a rank's times of a step: whole, then phases */

/* What rank 0 collects of a step, and the sizes of the pieces. */
typedef struct {
  K3Backend *backend;
  const K3Plan *plan;
  K3Comm *comm;
  const K3DecodeOptions *options;
  K3RunFile *file;
  int64_t vocabulary;
  float *logits;        /* [V] on rank 0, else NULL */
  int64_t *top_ids;     /* [top] */
  float *top_logits;    /* [top] */
  double *times;        /* [ranks, TIMES] on rank 0 */
  double *rank_step_ms; /* [ranks] */
  double *phase_ms;     /* [ranks, phases] */
  int64_t *piece;       /* [4, ranks] counts and displacements: vocabulary, times */
} Loop;

K3Status k3_decode_check_tokens(const K3Config *config, const int64_t *tokens, int64_t count)
{
  for (int64_t n = 0; n < count; n++)
    if (tokens[n] < 0 || tokens[n] >= config->vocab_size)
      K3_FAIL(K3_ERR_INPUT, "prompt token %lld (position %lld) is outside the vocabulary: wanted 0 to %lld",
              (long long)tokens[n], (long long)n, (long long)config->vocab_size - 1);
  return K3_OK;
}

K3Status k3_decode_check_prompt(const K3Config *config, int64_t start, const K3DecodeOptions *options)
{
  if (options->prompt_count < 1) K3_FAIL(K3_ERR_INPUT, "the prompt is empty: give at least one token id");
  K3_TRY(k3_decode_check_tokens(config, options->prompt, options->prompt_count));
  if (options->steps > config->max_context || k3_decode_capacity(start, options) > config->max_context)
    K3_FAIL(K3_ERR_INPUT,
            "%lld positions cached + %lld of the prompt + %lld steps need a context of %lld, the model's max_context is %lld",
            (long long)start, (long long)options->prompt_count, (long long)options->steps,
            (long long)k3_decode_capacity(start, options), (long long)config->max_context);
  return K3_OK;
}

int64_t k3_decode_capacity(int64_t start, const K3DecodeOptions *options)
{
  int64_t fed = start + options->prompt_count + options->steps - 1;
  return fed > 0 ? fed : 1;
}

/* --- collecting a step on rank 0 -------------------------------------------------------------------- */

static K3Status open_loop(Loop *loop)
{
  int world = loop->comm->world;
  size_t top = (size_t)(loop->options->top > 0 ? loop->options->top : 1);
  int good = (loop->piece = calloc(4 * (size_t)world, sizeof *loop->piece)) != NULL;
  if (loop->comm->rank == 0 || loop->comm->alone) {
    if (loop->options->logits != K3_LOGITS_NONE)
      good &= (loop->logits = calloc((size_t)loop->vocabulary, sizeof *loop->logits)) != NULL;
    good &= (loop->top_ids = calloc(top, sizeof *loop->top_ids)) != NULL;
    good &= (loop->top_logits = calloc(top, sizeof *loop->top_logits)) != NULL;
    good &= (loop->times = calloc((size_t)world * TIMES, sizeof *loop->times)) != NULL;
    good &= (loop->rank_step_ms = calloc((size_t)world, sizeof *loop->rank_step_ms)) != NULL;
    good &= (loop->phase_ms = calloc((size_t)world * K3_PHASE_COUNT, sizeof *loop->phase_ms)) != NULL;
  }
  if (!good) K3_FAIL(K3_ERR_INPUT, "no memory to collect logits and times");
  for (int r = 0; r < world; r++) {
    K3Range rows = k3_plan_range(loop->plan, r, K3_SHARE_VOCAB);
    loop->piece[r] = rows.end - rows.begin;
    loop->piece[world + r] = rows.begin;
    loop->piece[2 * world + r] = TIMES;
    loop->piece[3 * world + r] = r * TIMES;
  }
  return K3_OK;
}

static void close_loop(Loop *loop)
{
  free(loop->logits);
  free(loop->top_ids);
  free(loop->top_logits);
  free(loop->times);
  free(loop->rank_step_ms);
  free(loop->phase_ms);
  free(loop->piece);
}

/* The `top` largest logits, descending, ties to the lower id. Insertion into a short sorted list. */
static void pick_top(const float *logits, int64_t count, int64_t top, int64_t *ids, float *values)
{
  int64_t held = 0;
  for (int64_t id = 0; id < count; id++) {
    if (held == top && !(logits[id] > values[top - 1])) continue;
    int64_t at = held < top ? held++ : top - 1;
    for (; at > 0 && logits[id] > values[at - 1]; at--) {
      values[at] = values[at - 1];
      ids[at] = ids[at - 1];
    }
    values[at] = logits[id];
    ids[at] = id;
  }
}

/* Brings logits and times to rank 0. A slice (--slice) is alone, whatever its rank, and keeps its own. */
static K3Status collect(Loop *loop, const K3StepResult *step, double step_ms)
{
  K3Comm *comm = loop->comm;
  int world = comm->world;
  double mine[TIMES] = {step_ms};
  memcpy(mine + 1, step->phase_ms, sizeof step->phase_ms);
  K3_TRY(comm->gather(comm, mine, TIMES, loop->times, (K3Pieces){loop->piece + 2 * world, loop->piece + 3 * world},
                      K3_ELEMENT_F64));
  if (loop->options->logits != K3_LOGITS_NONE)
    K3_TRY(comm->gather(comm, step->logits, loop->piece[comm->rank], loop->logits,
                        (K3Pieces){loop->piece, loop->piece + world}, K3_ELEMENT_F32));
  int first = comm->alone ? comm->rank : 0, rows = comm->alone ? 1 : comm->rank == 0 ? world : 0;
  for (int r = 0; r < rows; r++) {
    const double *times = loop->times + (first + r) * TIMES;
    loop->rank_step_ms[r] = times[0];
    memcpy(loop->phase_ms + r * K3_PHASE_COUNT, times + 1, sizeof step->phase_ms);
  }
  return K3_OK;
}

/* Rank 0: one row into the run file. The step took as long as its slowest rank. */
static K3Status append(Loop *loop, int64_t token)
{
  if (!loop->file) return K3_OK;
  K3RunStep row = {.token = token, .rank_step_ms = loop->rank_step_ms, .phase_ms = loop->phase_ms};
  for (int r = 0; r < loop->comm->world; r++)
    if (loop->rank_step_ms[r] > row.step_ms) row.step_ms = loop->rank_step_ms[r];
  if (loop->options->logits == K3_LOGITS_ALL) row.logits = loop->logits;
  if (loop->options->logits == K3_LOGITS_TOP) {
    pick_top(loop->logits, loop->vocabulary, loop->options->top, loop->top_ids, loop->top_logits);
    row.top_ids = loop->top_ids;
    row.top_logits = loop->top_logits;
  }
  return k3_run_file_append(loop->file, &row);
}

/* --- the loop ---------------------------------------------------------------------------------------- */

/* A failure that leaves the other ranks waiting. */
static _Noreturn void end_all(Loop *loop, K3Status status)
{
  if (loop->file) k3_run_file_end(loop->file, k3_status_message());
  k3_comm_abort(loop->comm, status);
}

/* All ranks learn whether any failed at the step's end or was told to stop. */
static K3Status agree_to_go_on(Loop *loop, K3Status status, int *signal)
{
  int64_t word = ((int64_t)(status != K3_OK) << 8) | k3_interrupt_signal();
  K3Status reduced = loop->comm->all_reduce(loop->comm, &word, 1, K3_ELEMENT_I64, K3_REDUCE_MAX);
  if (reduced != K3_OK) end_all(loop, reduced);
  if (word >> 8) return k3_comm_agree(loop->comm, status);
  *signal = (int)(word & 0xff);
  if (*signal) k3_interrupt_acknowledge();
  return K3_OK;
}

/* Feeds one token; a failure here would leave the other ranks waiting, so it ends them. */
static void feed(Loop *loop, int64_t token, int choose, K3StepResult *step, double *step_ms)
{
  double begin = k3_clock_ms();
  K3Status status = loop->backend->step(loop->backend, token, choose, loop->options->logits != K3_LOGITS_NONE, step);
  *step_ms = k3_clock_ms() - begin;
  if (status == K3_OK && choose) status = collect(loop, step, *step_ms);
  if (status != K3_OK) end_all(loop, status);
}

K3Status k3_decode_run(K3Backend *backend, const K3Config *config, const K3Plan *plan, K3Comm *comm,
                       const K3DecodeOptions *options, K3RunFile *file, K3DecodeObserver observer, void *context,
                       K3DecodeResult *result)
{
  Loop loop = {.backend = backend, .plan = plan, .comm = comm, .options = options, .file = file,
               .vocabulary = config->vocab_size};
  K3Status status = k3_comm_agree(comm, open_loop(&loop));
  int64_t all = options->prompt_count + options->steps - 1, token = options->prompt[0];
  memset(result, 0, sizeof *result);
  for (int64_t fed = 0; status == K3_OK && fed < all && !result->signal; fed++) {
    K3StepResult step = {0};
    double step_ms = 0.0;
    int choose = fed >= options->prompt_count - 1;
    if (fed < options->prompt_count) token = options->prompt[fed];
    feed(&loop, token, choose, &step, &step_ms);
    K3Status appended = K3_OK;
    if (choose) {
      token = step.token;
      appended = append(&loop, token);
      if (appended == K3_OK && ++result->steps > 1) result->decode_ms += step_ms;
    }
    status = agree_to_go_on(&loop, appended, &result->signal);
    if (status != K3_OK) break;
    result->fed = fed + 1;
    if (observer) observer(context, result->fed, all, choose ? token : -1);
    if (options->snapshot_every && result->fed % options->snapshot_every == 0 && result->fed < all && !result->signal)
      status = options->snapshot(context, result->fed);
  }
  close_loop(&loop);
  return status;
}
