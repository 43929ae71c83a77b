/* `k3decode info RUN.h5`: a page about a run. See info_run.h. Layer: commands. */
#include "commands/info_run.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/statistics.h"
#include "commands/text.h"

/* A step is slow beyond the median by so many standard deviations, as the median absolute deviation has them, and by this
 * share. A rank lags when it is the slowest in this share of the steps. Fewer steps than FEW say nothing. */
static const double slow_deviations = 6, slow_share = 0.01, lagging_share = 0.9;
enum { FEW = 8, SHOWN_STEPS = 8 };

/* Columns of a run, as long as the page takes. */
typedef struct {
  int64_t *tokens;      /* [steps] */
  double *step_ms;      /* [steps] */
  double *sorted_ms;    /* [steps], ascending */
  double *rank_step_ms; /* [steps, ranks] */
  double *phase_ms;     /* [steps, ranks, phases]; NULL: the run has no phases */
} Columns;

/* ---------------------------------------------------------------- what ran */

/* The first and last few ids of a list. */
static void print_tokens(const char *name, const int64_t *ids, int64_t count)
{
  enum { HEAD = 12, TAIL = 4 };
  printf("%-16s %lld token%s:", name, (long long)count, count == 1 ? "" : "s");
  for (int64_t i = 0; i < count; i++) {
    if (count > HEAD + TAIL + 1 && i == HEAD) {
      printf(" …");
      i = count - TAIL;
    }
    printf(" %lld", (long long)ids[i]);
  }
  printf("\n");
}

void k3_info_run_description(const K3RunReader *run)
{
  printf("run file         %s\n", run->path);
  printf("program          k3decode %s\n", run->program_version);
  printf("command          %s\n", run->command);
  printf("started          %s\n", run->start_time);
  printf("model            %s (digest %016llx)\n", run->model, (unsigned long long)run->model_digest);
  const K3Config *c = &run->config;
  printf("                 %lld layers (%lld KDA, %lld MLA), hidden %lld, vocabulary %lld, %lld heads, %lld experts\n",
         (long long)c->num_layers, (long long)k3_config_count_layers(c, K3_LAYER_KDA),
         (long long)k3_config_count_layers(c, K3_LAYER_MLA), (long long)c->hidden_size, (long long)c->vocab_size,
         (long long)c->num_heads, (long long)c->num_experts);
  printf("ranks            %lld, backend %s\n", (long long)run->ranks, run->backend);
  for (const char *line = run->devices; *line;) {
    int length = (int)strcspn(line, "\n");
    if (length > 0) printf("                 %.*s\n", length, line);
    line += length + (line[length] == '\n');
  }
  if (strcmp(run->kind, "logits") == 0) printf("kind             decode\n");
  else printf("kind             %s: measures times, its tokens and values mean nothing\n", run->kind);
  if (run->logits == K3_LOGITS_TOP) printf("logits           the top %lld of each step\n", (long long)run->top);
  else printf("logits           %s\n", run->logits == K3_LOGITS_ALL ? "all of each step" : "none");
  if (run->first_context > 0)
    printf("context          %lld synthetic positions before the prompt\n", (long long)run->first_context);
  if (run->resumed_from[0]) printf("resumed from     %s, whose tokens begin the prompt\n", run->resumed_from);
  print_tokens("prompt", run->prompt, run->prompt_count);
}

/* ---------------------------------------------------------------- times */

static void close_columns(Columns *columns)
{
  free(columns->tokens);
  free(columns->step_ms);
  free(columns->sorted_ms);
  free(columns->rank_step_ms);
  free(columns->phase_ms);
}

static K3Status read_columns(K3RunReader *run, Columns *columns)
{
  size_t steps = (size_t)run->steps, ranks = (size_t)run->ranks, phases = (size_t)run->phases;
  int good = (columns->tokens = calloc(steps, sizeof *columns->tokens)) != NULL;
  good &= (columns->step_ms = calloc(steps, sizeof *columns->step_ms)) != NULL;
  good &= (columns->sorted_ms = calloc(steps, sizeof *columns->sorted_ms)) != NULL;
  good &= (columns->rank_step_ms = calloc(steps * ranks, sizeof *columns->rank_step_ms)) != NULL;
  if (phases > 0) good &= (columns->phase_ms = calloc(steps * ranks * phases, sizeof *columns->phase_ms)) != NULL;
  if (!good) K3_FAIL(K3_ERR_INPUT, "%s: no memory for the timings of %zu steps", run->path, steps);
  K3_TRY(k3_run_reader_tokens(run, columns->tokens));
  K3_TRY(k3_run_reader_step_ms(run, columns->step_ms));
  K3_TRY(k3_run_reader_rank_step_ms(run, columns->rank_step_ms));
  if (phases > 0) K3_TRY(k3_run_reader_phase_ms(run, columns->phase_ms));
  memcpy(columns->sorted_ms, columns->step_ms, steps * sizeof *columns->sorted_ms);
  k3_sort(columns->sorted_ms, run->steps);
  return K3_OK;
}

static double per_second(double ms) { return ms > 0 ? 1000.0 / ms : 0.0; }

static void print_times(const K3RunReader *run, const Columns *columns)
{
  int64_t n = run->steps;
  double sum = 0;
  for (int64_t i = 0; i < n; i++) sum += columns->step_ms[i];
  double median = k3_quantile(columns->sorted_ms, n, 0.5), p10 = k3_quantile(columns->sorted_ms, n, 0.1),
         p90 = k3_quantile(columns->sorted_ms, n, 0.9);
  printf("speed            %.2f tokens/s median, p10 %.2f, p90 %.2f\n", per_second(median), per_second(p90),
         per_second(p10));
  printf("step             median %.3f ms, p10 %.3f ms, p90 %.3f ms, mean %.3f ms; spread (p90 - p10) %.1f %% of the "
         "median\n",
         median, p10, p90, sum / (double)n, median > 0 ? 100 * (p90 - p10) / median : 0.0);
}

/* The rank that must move most, and what its median step makes of it. */
static void print_bytes(const K3RunReader *run, double median_ms)
{
  if (!run->step_bytes) return;
  int64_t worst = 0, most = -1;
  for (int64_t rank = 0; rank < run->ranks; rank++) {
    int64_t sum = 0;
    for (int64_t part = 0; part < run->parts; part++) sum += run->step_bytes[rank * run->parts + part];
    if (sum > most) most = sum, worst = rank;
  }
  printf("bytes a step     %.4g GB on rank %lld by the plan (", (double)most * 1e-9, (long long)worst);
  for (int64_t part = 0; part < run->parts; part++)
    printf("%s%s %.3g", part ? ", " : "", run->part_names[part],
           (double)run->step_bytes[worst * run->parts + part] * 1e-9);
  printf(")");
  if (median_ms > 0) printf(": %.4g GB/s at the median step", (double)most * 1e-6 / median_ms);
  printf("\n");
}

/* rank_step_ms [steps, ranks] */
static void print_slowest_rank(const K3RunReader *run, const double *rank_step_ms)
{
  int64_t slowest = 0;
  double most = -1, all = 0;
  for (int64_t rank = 0; rank < run->ranks; rank++) {
    double sum = 0;
    for (int64_t n = 0; n < run->steps; n++) sum += rank_step_ms[n * run->ranks + rank];
    all += sum;
    if (sum > most) most = sum, slowest = rank;
  }
  printf("slowest rank     %lld with a mean of %.3f ms (mean of all ranks %.3f ms)\n", (long long)slowest,
         most / (double)run->steps, all / (double)(run->steps * run->ranks));
}

/* phase_ms [steps, ranks, phases]: means over steps; the share is of all phases, over all ranks. */
static void print_phases(const K3RunReader *run, const double *phase_ms)
{
  int64_t steps = run->steps, ranks = run->ranks, phases = run->phases;
  double total = 0;
  for (int64_t i = 0; i < steps * ranks * phases; i++) total += phase_ms[i];
  if (total <= 0) {
    printf("\nphases           not timed: a captured step (--graph on) is timed whole unless K3_PHASE_TIMES=1\n");
    return;
  }
  printf("\n%-14s %12s %8s %14s  %s\n", "phase", "mean ms", "share", "slowest ms", "of rank");
  for (int64_t phase = 0; phase < phases; phase++) {
    double sum = 0, most = -1;
    int64_t slowest = 0;
    for (int64_t rank = 0; rank < ranks; rank++) {
      double of_rank = 0;
      for (int64_t n = 0; n < steps; n++) of_rank += phase_ms[(n * ranks + rank) * phases + phase];
      sum += of_rank;
      if (of_rank > most) most = of_rank, slowest = rank;
    }
    printf("%-14s %12.4f %6.1f %% %14.4f  %lld\n", run->phase_names[phase], sum / (double)(steps * ranks),
           100 * sum / total, most / (double)steps, (long long)slowest);
  }
  printf("%-14s %12.4f\n", "all", total / (double)(steps * ranks));
}

/* ---------------------------------------------------------------- what was unusual */

/* Steps far beyond the median. Returns how many lines were printed. */
static int say_slow_steps(const K3RunReader *run, const Columns *columns)
{
  int64_t n = run->steps, slow = 0;
  if (n < FEW) return 0;
  double median = k3_quantile(columns->sorted_ms, n, 0.5);
  double *apart = malloc((size_t)n * sizeof *apart);
  if (!apart) return 0; /* a page without this line is better than none */
  for (int64_t i = 0; i < n; i++) apart[i] = fabs(columns->step_ms[i] - median);
  k3_sort(apart, n);
  /* 1.4826 MAD is one standard deviation of a normal distribution */
  double deviation = 1.4826 * k3_quantile(apart, n, 0.5);
  double limit = median + fmax(slow_deviations * deviation, slow_share * median);
  free(apart);
  for (int64_t i = 0; i < n; i++) slow += columns->step_ms[i] > limit;
  if (!slow) return 0;
  printf("  slow steps     %lld of %lld beyond %.3f ms (median + %.0f x 1.4826 MAD):", (long long)slow, (long long)n,
         limit, slow_deviations);
  int shown = 0;
  for (int64_t i = 0; i < n && shown < SHOWN_STEPS; i++)
    if (columns->step_ms[i] > limit) printf("%s %lld (%.3f ms)", shown++ ? "," : "", (long long)i, columns->step_ms[i]);
  printf("%s\n", slow > shown ? ", …" : "");
  return 1;
}

/* Time that a rank spends on its own: without the phase comm, in which it waits for the others. */
static double own_ms(const K3RunReader *run, const Columns *columns, int64_t step, int64_t rank)
{
  double ms = columns->rank_step_ms[step * run->ranks + rank];
  for (int64_t phase = 0; phase < run->phases; phase++)
    if (strcmp(run->phase_names[phase], "comm") == 0)
      ms -= columns->phase_ms[(step * run->ranks + rank) * run->phases + phase];
  return ms;
}

/* A rank that keeps the others waiting in nearly every step. */
static int say_lagging_rank(const K3RunReader *run, const Columns *columns)
{
  int64_t ranks = run->ranks, steps = run->steps, worst = 0;
  if (ranks < 2 || steps < FEW) return 0;
  int64_t *slowest = calloc((size_t)ranks, sizeof *slowest);
  double *sum = calloc((size_t)ranks, sizeof *sum), all = 0;
  for (int64_t n = 0; slowest && sum && n < steps; n++) {
    int64_t at = 0;
    double most = -INFINITY;
    for (int64_t rank = 0; rank < ranks; rank++) {
      double ms = own_ms(run, columns, n, rank);
      sum[rank] += ms;
      all += ms;
      if (ms > most) most = ms, at = rank;
    }
    slowest[at]++;
  }
  int said = 0;
  if (slowest && sum) {
    for (int64_t rank = 1; rank < ranks; rank++)
      if (slowest[rank] > slowest[worst]) worst = rank;
    double others = (all - sum[worst]) / (double)(ranks - 1);
    if ((double)slowest[worst] >= lagging_share * (double)steps && sum[worst] > (1 + slow_share) * others) {
      printf("  rank %-9lld the slowest in %lld of %lld steps: %.3f ms of its own a step, the others %.3f ms\n",
             (long long)worst, (long long)slowest[worst], (long long)steps, sum[worst] / (double)steps,
             others / (double)steps);
      said = 1;
    }
  }
  free(slowest);
  free(sum);
  return said;
}

static void print_unusual(const K3RunReader *run, const Columns *columns)
{
  int said = 0;
  printf("\nunusual\n");
  if (strcmp(run->ending, "running") == 0)
    said +=
        printf("  not finished   still running, or killed: the %lld whole steps are good\n", (long long)run->steps) > 0;
  else if (strcmp(run->ending, "done") != 0) said += printf("  interrupted    %s\n", run->ending) > 0;
  if (strcmp(run->kind, "logits") != 0)
    said += printf("  %-14s one rank alone, collectives left out: times, not logits\n", run->kind) > 0;
  if (run->first_context > 0) said += printf("  context        synthetic: the tokens mean nothing\n") > 0;
  if (columns) {
    said += say_slow_steps(run, columns);
    said += say_lagging_rank(run, columns);
  }
  if (!said) printf("  nothing\n");
}

/* ---------------------------------------------------------------- the page */

K3Status k3_info_run_result(K3RunReader *run)
{
  K3Status status = K3_OK;
  Columns columns = {0};
  if (strcmp(run->ending, "running") != 0) printf("ending           %s\n", run->ending);
  else printf("ending           none recorded: still running, or killed; the whole steps below are good\n");
  printf("whole steps      %lld\n", (long long)run->steps);
  if (run->steps > 0) {
    K3_TRY_DONE(read_columns(run, &columns));
    print_tokens("decoded", columns.tokens, run->steps);
    print_times(run, &columns);
    print_bytes(run, k3_quantile(columns.sorted_ms, run->steps, 0.5));
    print_slowest_rank(run, columns.rank_step_ms);
    if (run->phases > 0) print_phases(run, columns.phase_ms);
  }
  print_unusual(run, run->steps > 0 ? &columns : NULL);
  if (run->plan[0]) printf("\nplan\n%s%s", run->plan, run->plan[strlen(run->plan) - 1] == '\n' ? "" : "\n");
done:
  close_columns(&columns);
  return status;
}

static K3Status print_text(const char *name, const char *tokenizer, const int64_t *ids, int64_t count)
{
  char *text = NULL;
  K3_TRY(k3_text_decode(tokenizer, ids, count, &text));
  printf("\n%s\n%s\n", name, text);
  free(text);
  return K3_OK;
}

static K3Status print_texts(K3RunReader *run, const char *tokenizer)
{
  int64_t *tokens = calloc((size_t)run->steps + 1, sizeof *tokens);
  if (!tokens) K3_FAIL(K3_ERR_INPUT, "%s: no memory for %lld tokens", run->path, (long long)run->steps);
  K3Status status = k3_run_reader_tokens(run, tokens);
  if (status == K3_OK) status = print_text("prompt text", tokenizer, run->prompt, run->prompt_count);
  if (status == K3_OK) status = print_text("decoded text", tokenizer, tokens, run->steps);
  free(tokens);
  return status;
}

K3Status k3_info_run(const char *path, const char *tokenizer)
{
  K3RunReader *run = NULL;
  K3_TRY(k3_run_reader_open(path, &run));
  k3_info_run_description(run);
  K3Status status = k3_info_run_result(run);
  if (status == K3_OK && tokenizer) status = print_texts(run, tokenizer);
  k3_run_reader_close(run);
  return status;
}
