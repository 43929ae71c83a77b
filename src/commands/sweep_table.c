/* See sweep_table.h. Layer: commands. */
#include "commands/sweep_table.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "decode/sweep.h"

static const double *statistics_of(const double *all, int64_t c, int arm)
{
  return all + (c * K3_SWEEP_ARMS + arm) * K3_SWEEP_STATISTICS;
}

void k3_sweep_print_head(const K3SweepInfo *info, const K3Sweep *sweep)
{
  printf("# %s\n# %s\n", info->command, info->versions);
  printf("# model %s, digest %016llx; %s; backend %s\n", info->model, (unsigned long long)info->model_digest,
         info->kind, info->backend);
  for (const char *line = info->devices; line && *line;) {
    int length = (int)strcspn(line, "\n");
    printf("# %.*s\n", length, line);
    line += length + (line[length] == '\n');
  }
  printf("# settings: %lld steps a block after %d untimed, %lld repeats, seed %lld, room for %lld positions\n",
         (long long)sweep->steps, K3_SWEEP_WARM_STEPS, (long long)sweep->repeats, (long long)info->seed,
         (long long)info->capacity);
  printf("# order at each context: phase times of A, B; repeats of A B B A and %c %c' %c' %c; phase times of B, A\n",
         'A' + sweep->base, 'A' + sweep->base, 'A' + sweep->base, 'A' + sweep->base);
  for (int arm = 0; arm < K3_SWEEP_ARMS; arm++)
    printf("# %c = %s%s%s\n", 'A' + arm, sweep->arm[arm], sweep->lack[arm] ? ": does not exist here: " : "",
           sweep->lack[arm] ? sweep->lack[arm] : "");
  printf("# time of a step on the slowest rank\n#\n");
  printf("# %9s  %-20s %10s %10s %10s %10s %10s  %s\n", "context", "arm", "median", "min", "max", "p10", "p90",
         "attention");
  printf("# %9s  %-20s %10s %10s %10s %10s %10s\n", "positions", "", "ms", "ms", "ms", "ms", "ms");
}

static void print_cell(int64_t context, const char *name, const double *statistic)
{
  printf("%11lld  %-20s %10.4f %10.4f %10.4f %10.4f %10.4f", (long long)context, name, statistic[K3_SWEEP_MEDIAN],
         statistic[K3_SWEEP_MIN], statistic[K3_SWEEP_MAX], statistic[K3_SWEEP_P10], statistic[K3_SWEEP_P90]);
}

void k3_sweep_print_context(const K3Sweep *sweep, int64_t c)
{
  char name[64];
  int64_t context = sweep->context[c];
  for (int arm = 0; arm < K3_SWEEP_ARMS; arm++) {
    snprintf(name, sizeof name, "%c %s", 'A' + arm, sweep->arm[arm]);
    if (sweep->lack[arm]) {
      printf("%11lld  %-20s no such arm here\n", (long long)context, name);
      continue;
    }
    print_cell(context, name, statistics_of(sweep->statistic_ms, c, arm));
    printf("  %s\n", sweep->attention[c * K3_SWEEP_ARMS + arm]);
  }
  for (int place = 0; place < K3_SWEEP_ARMS; place++) {
    snprintf(name, sizeof name, "%c%s (A/A pair)", 'A' + sweep->base, place ? "''" : "'");
    print_cell(context, name, statistics_of(sweep->same_statistic_ms, c, place));
    printf("\n");
  }
  fflush(stdout);
}

static void print_differences(const K3Sweep *sweep)
{
  printf(
      "#\n# difference: B - A of the medians, and its share of A; own floor: the largest A/A difference of a repeat "
      "here;\n"
      "# floor: that of all contexts, in ms or as a share, whichever is less; a difference must have one sign in all "
      "repeats\n");
  printf("# %9s  %10s %10s %10s %8s %9s %9s  %s\n", "context", "A", "B", "B - A", "share", "own floor", "floor",
         "verdict");
  printf("# %9s  %10s %10s %10s %8s %9s %9s\n", "positions", "ms", "ms", "ms", "%", "ms", "ms");
  for (int64_t c = 0; c < sweep->done; c++) {
    double a = statistics_of(sweep->statistic_ms, c, 0)[K3_SWEEP_MEDIAN], b = a + sweep->difference_ms[c];
    printf("%11lld  %10.4f %10.4f", (long long)sweep->context[c], a, b);
    if (sweep->above_floor[c])
      printf(" %10.4f %8.2f %9.4f %9.4f  %s is faster, %.2f times\n", b - a, 100.0 * (b - a) / a,
             sweep->own_floor_ms[c], sweep->floor_ms[c], sweep->arm[b < a], b < a ? a / b : b / a);
    else
      printf(" %10s %8s %9.4f %9.4f  no difference%s\n", "-", "-", sweep->own_floor_ms[c], sweep->floor_ms[c],
             sweep->same_path[c] ? " (both arms run the same plan)" : "");
  }
}

static void print_depth(const K3Sweep *sweep)
{
  printf(
      "#\n# depth: time(context) - time(%lld) and its share of time(context); floor: of both contexts, and how far the "
      "control phases moved\n",
      (long long)sweep->context[0]);
  printf("# %9s  %-20s %10s %10s %8s %9s\n", "context", "arm", "time", "depth", "share", "floor");
  printf("# %9s  %-20s %10s %10s %8s %9s\n", "positions", "", "ms", "ms", "%", "ms");
  for (int64_t c = 1; c < sweep->done; c++)
    for (int arm = 0; arm < K3_SWEEP_ARMS; arm++) {
      if (sweep->lack[arm]) continue;
      int64_t cell = c * K3_SWEEP_ARMS + arm;
      double median = statistics_of(sweep->statistic_ms, c, arm)[K3_SWEEP_MEDIAN], depth = sweep->depth_ms[cell];
      printf("%11lld  %c %-18s %10.4f", (long long)sweep->context[c], 'A' + arm, sweep->arm[arm], median);
      if (fabs(depth) > sweep->depth_floor_ms[cell])
        printf(" %10.4f %8.2f %9.4f\n", depth, 100.0 * depth / median, sweep->depth_floor_ms[cell]);
      else printf(" %10s %8s %9.4f  no difference\n", "-", "-", sweep->depth_floor_ms[cell]);
    }
}

/* Phases before and after, of both arms; a phase that takes no time in this model is left out. */
static void print_control(const K3SweepInfo *info, const K3Sweep *sweep)
{
  double most = 0.0;
  for (int64_t i = 0; i < sweep->done * K3_SWEEP_WHENS * K3_SWEEP_ARMS * sweep->phases; i++)
    if (sweep->control_ms[i] > most) most = sweep->control_ms[i];
  printf("#\n# phases: medians in blocks of their own (time marks included), before and after\n");
  if (!(most > 0.0)) {
    printf("# this backend gave no phase times\n");
    return;
  }
  printf("# %9s  %-20s %10s %10s %10s %10s\n", "context", "phase", "A before", "B before", "B after", "A after");
  printf("# %9s  %-20s %10s %10s %10s %10s\n", "positions", "", "ms", "ms", "ms", "ms");
  for (int64_t c = 0; c < sweep->done; c++)
    for (int64_t p = 0; p < sweep->phases; p++) {
      static const int when[] = {0, 0, 1, 1}, arm[] = {0, 1, 1, 0};
      double values[4], largest = 0.0;
      for (int k = 0; k < 4; k++) {
        values[k] = sweep->control_ms[((c * K3_SWEEP_WHENS + when[k]) * K3_SWEEP_ARMS + arm[k]) * sweep->phases + p];
        if (values[k] > largest) largest = values[k];
      }
      if (!(largest > 0.0)) continue;
      printf("%11lld  %-20s", (long long)sweep->context[c], info->phase_names[p]);
      for (int k = 0; k < 4; k++)
        if (isnan(values[k])) printf(" %10s", "-");
        else printf(" %10.4f", values[k]);
      printf("  %s\n", info->phase_touched[p] ? "the arms differ here" : "control");
    }
}

/* Greedy choices of the arms' first blocks: a wrong arm would be seen here before its time counts. */
static void print_tokens(const K3Sweep *sweep)
{
  int64_t same = 0;
  for (int64_t c = 0; c < sweep->done; c++) {
    const int64_t *a = sweep->token + c * K3_SWEEP_ARMS * sweep->steps;
    same += memcmp(a, a + sweep->steps, (size_t)sweep->steps * sizeof *a) == 0;
  }
  printf("# tokens: both arms chose the same %lld at %lld of %lld contexts\n", (long long)sweep->steps, (long long)same,
         (long long)sweep->done);
}

void k3_sweep_print_tail(const K3SweepInfo *info, const K3Sweep *sweep)
{
  int64_t real = 0, compared = !sweep->lack[0] && !sweep->lack[1] ? sweep->done : 0;
  if (compared) print_differences(sweep);
  print_depth(sweep);
  print_control(info, sweep);
  for (int64_t c = 0; c < compared; c++) real += sweep->above_floor[c];
  printf("#\n");
  if (compared && strncmp(info->kind, "slice", 5) != 0) print_tokens(sweep);
  if (compared)
    printf("# verdict: the arms differ at %lld of %lld contexts; no difference at the others\n", (long long)real,
           (long long)compared);
  else printf("# verdict: one arm does not exist here, nothing to compare\n");
  fflush(stdout);
}

K3Status k3_command_info_sweep(const char *path)
{
  K3SweepPage *page;
  K3_TRY(k3_sweep_file_read(path, &page));
  printf("# sweep file %s, made by k3decode %s, started %s\n", path, page->info.version, page->info.start_time);
  k3_sweep_print_head(&page->info, &page->sweep);
  for (int64_t c = 0; c < page->sweep.contexts; c++) k3_sweep_print_context(&page->sweep, c);
  k3_sweep_print_tail(&page->info, &page->sweep);
  k3_sweep_page_close(page);
  return K3_OK;
}
