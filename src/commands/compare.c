/* `k3decode compare A.h5 B.h5`: parity of two runs, row by row of their logits. Layer: commands.
 *
 * A is the reference. Everything is computed in float64 from the float32 logits; the log-softmax subtracts the
 * largest logit first. With x = log p_B - log p_A a row's divergence is Σ p_A (e^x - 1 - x): the same sum as
 * Σ p_A (log p_A - log p_B), without the cancellation that would drown divergences below 1e-12. */
#include <float.h>
#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "commands/arguments.h"
#include "commands/commands.h"
#include "store/run_reader.h"

enum { TOP_OVERLAP = 5 };

typedef struct {
  double mean_kl, kl, top1, logit_error, relative_l2; /* NaN: no threshold */
  int64_t steps;                                      /* 0: all common ones */
} Thresholds;

/* What one row of both runs gives. */
typedef struct {
  int64_t bad_a, bad_b; /* values that are NaN or infinite; the others are meaningless then */
  double kl, delta_p, logit_error, relative_l2;
  int64_t logit_error_at;
  int same_top1;
  double overlap; /* of the top 5, 0 … 1 */
} Row;

typedef struct {
  int64_t rows, finite_rows;
  int64_t bad_a, bad_b, bad_step;
  double kl_sum, kl_max, delta_p_squares, overlap_sum, logit_error, relative_l2;
  int64_t kl_max_step, logit_error_step, logit_error_at, relative_l2_step, top1, top1_first_miss;
} Sums;

static const char usage[] =
    "usage: k3decode compare A.h5 B.h5 [options]\n"
    "\n"
    "Parity of two run files; A is the reference. Exit status 0: within every threshold, 1: beyond one,\n"
    "3: the files cannot be compared (other vocabulary, other prompt, no whole step, no logits).\n"
    "\n"
    "  --max-mean-kl X      mean KL divergence of a step, in nats (1e-5)\n"
    "  --max-kl X           the largest KL divergence of a step (none)\n"
    "  --min-top1 X         share of steps with the same most likely token, 0 to 1 (1)\n"
    "  --max-logit-error X  largest difference of a logit (none)\n"
    "  --max-relative-l2 X  largest |A - B| / |A| of a step's logits (none)\n"
    "  --steps N            compare the first N steps; both runs must hold them\n"
    "  --help\n";

/* ---------------------------------------------------------------- one row */

static int64_t count_bad(const float *x, int64_t n)
{
  int64_t bad = 0;
  for (int64_t i = 0; i < n; i++) bad += !isfinite(x[i]);
  return bad;
}

/* log Σ e^x, stable. */
static double log_sum(const float *x, int64_t n)
{
  double largest = x[0], sum = 0;
  for (int64_t i = 1; i < n; i++)
    if (x[i] > largest) largest = x[i];
  for (int64_t i = 0; i < n; i++) sum += exp(x[i] - largest);
  return largest + log(sum);
}

/* The `count` largest, descending, ties to the lower id. */
static void largest(const float *x, int64_t n, int count, int64_t *ids)
{
  int have = 0;
  for (int64_t i = 0; i < n; i++) {
    int at = have;
    while (at > 0 && x[i] > x[ids[at - 1]]) at--;
    if (at >= count) continue;
    if (have < count) have++;
    for (int j = have - 1; j > at; j--) ids[j] = ids[j - 1];
    ids[at] = i;
  }
}

/* a, b [n]; token: A's choice. */
static Row compare_row(const float *a, const float *b, int64_t n, int64_t token)
{
  Row row = {.bad_a = count_bad(a, n), .bad_b = count_bad(b, n)};
  if (row.bad_a || row.bad_b) return row;
  double log_a = log_sum(a, n), log_b = log_sum(b, n), squares = 0, reference = 0;
  for (int64_t i = 0; i < n; i++) {
    double p = exp(a[i] - log_a), x = (b[i] - log_b) - (a[i] - log_a), error = (double)a[i] - b[i];
    row.kl += fabs(x) < 1 ? p * (expm1(x) - x) : exp(b[i] - log_b) - p - p * x;
    squares += error * error;
    reference += (double)a[i] * a[i];
    if (fabs(error) > row.logit_error) {
      row.logit_error = fabs(error);
      row.logit_error_at = i;
    }
  }
  row.relative_l2 = squares == 0 ? 0 : reference > 0 ? sqrt(squares / reference) : INFINITY;
  row.delta_p = exp(b[token] - log_b) - exp(a[token] - log_a);

  int64_t top_a[TOP_OVERLAP], top_b[TOP_OVERLAP];
  int count = n < TOP_OVERLAP ? (int)n : TOP_OVERLAP, shared = 0;
  largest(a, n, count, top_a);
  largest(b, n, count, top_b);
  for (int i = 0; i < count; i++)
    for (int j = 0; j < count; j++) shared += top_a[i] == top_b[j];
  row.overlap = (double)shared / count;
  row.same_top1 = top_a[0] == top_b[0];
  return row;
}

static void add_row(Sums *sums, const Row *row, int64_t step)
{
  sums->rows++;
  if (row->bad_a || row->bad_b) {
    if (sums->bad_a + sums->bad_b == 0) sums->bad_step = step;
    sums->bad_a += row->bad_a;
    sums->bad_b += row->bad_b;
    return;
  }
  if (sums->finite_rows == 0 || row->kl > sums->kl_max) sums->kl_max = row->kl, sums->kl_max_step = step;
  if (sums->finite_rows == 0 || row->relative_l2 > sums->relative_l2)
    sums->relative_l2 = row->relative_l2, sums->relative_l2_step = step;
  if (sums->finite_rows == 0 || row->logit_error > sums->logit_error) {
    sums->logit_error = row->logit_error;
    sums->logit_error_step = step;
    sums->logit_error_at = row->logit_error_at;
  }
  if (!row->same_top1 && sums->top1 == sums->finite_rows) sums->top1_first_miss = step;
  sums->finite_rows++;
  sums->kl_sum += row->kl;
  sums->delta_p_squares += row->delta_p * row->delta_p;
  sums->overlap_sum += row->overlap;
  sums->top1 += row->same_top1;
}

/* ---------------------------------------------------------------- may the files be compared? */

static K3Status check_one(const K3RunReader *run)
{
  if (strcmp(run->kind, "logits") != 0)
    K3_FAIL(K3_ERR_INPUT, "%s is a run of kind \"%s\": it measures times, its values are no logits", run->path,
            run->kind);
  if (run->logits == K3_LOGITS_NONE)
    K3_FAIL(K3_ERR_INPUT, "%s holds no logits; run again with --logits all", run->path);
  if (run->logits == K3_LOGITS_TOP)
    K3_FAIL(K3_ERR_INPUT, "%s holds the top %lld logits alone, parity needs every one; run again with --logits all",
            run->path, (long long)run->top);
  if (run->steps == 0) K3_FAIL(K3_ERR_INPUT, "%s holds no whole step", run->path);
  return K3_OK;
}

static K3Status check_pair(const K3RunReader *a, const K3RunReader *b, const Thresholds *limit)
{
  K3_TRY(check_one(a));
  K3_TRY(check_one(b));
  if (a->config.vocab_size != b->config.vocab_size)
    K3_FAIL(K3_ERR_INPUT, "different vocabularies: %s has %lld tokens, %s has %lld", a->path,
            (long long)a->config.vocab_size, b->path, (long long)b->config.vocab_size);
  if (a->first_context != b->first_context)
    K3_FAIL(K3_ERR_INPUT, "different starts: %s begins after %lld synthetic positions, %s after %lld", a->path,
            (long long)a->first_context, b->path, (long long)b->first_context);
  int64_t common = a->prompt_count < b->prompt_count ? a->prompt_count : b->prompt_count;
  for (int64_t i = 0; i < common; i++)
    if (a->prompt[i] != b->prompt[i])
      K3_FAIL(K3_ERR_INPUT, "different prompts: token %lld is %lld in %s and %lld in %s", (long long)i,
              (long long)a->prompt[i], a->path, (long long)b->prompt[i], b->path);
  if (a->prompt_count != b->prompt_count)
    K3_FAIL(K3_ERR_INPUT, "different prompts: %s has %lld tokens, %s has %lld", a->path, (long long)a->prompt_count,
            b->path, (long long)b->prompt_count);
  if (limit->steps > a->steps || limit->steps > b->steps)
    K3_FAIL(K3_ERR_INPUT, "--steps %lld: %s holds %lld whole steps, %s holds %lld", (long long)limit->steps, a->path,
            (long long)a->steps, b->path, (long long)b->steps);
  return K3_OK;
}

/* ---------------------------------------------------------------- the table */

/* One line; a limit of NaN means that none is set. Returns 1 when the value is beyond it. A value that is NaN is. */
static int print_line(const char *name, double value, double limit, int at_most, int has_where, const char *where)
{
  int failed = isnan(limit) ? isnan(value) : !(at_most ? value <= limit : value >= limit);
  char text[32] = "";
  if (!isnan(limit)) snprintf(text, sizeof text, "%s %.4g", at_most ? "<=" : ">=", limit);
  const char *verdict = failed ? "FAIL" : isnan(limit) ? "" : "pass";
  printf("%-28s %-12.6g %-12s %-5s %s\n", name, value, text, verdict, has_where ? where : "");
  return failed;
}

static int print_table(const Sums *sums, const Thresholds *limit, int64_t divergence, int64_t token_a, int64_t token_b)
{
  double n = sums->finite_rows > 0 ? (double)sums->finite_rows : NAN; /* NaN: nothing to judge, so nothing passes */
  int rows = sums->finite_rows > 0, failed = 0;
  char where[96];
  printf("%-28s %-12s %-12s\n", "", "value", "threshold");
  failed |= print_line("mean KL divergence", sums->kl_sum / n, limit->mean_kl, 1, 0, "");
  snprintf(where, sizeof where, "step %lld", (long long)sums->kl_max_step);
  failed |= print_line("max KL divergence", rows ? sums->kl_max : NAN, limit->kl, 1, rows, where);
  snprintf(where, sizeof where, "first miss at step %lld", (long long)sums->top1_first_miss);
  failed |= print_line("top-1 agreement", (double)sums->top1 / n, limit->top1, 0, sums->top1 < sums->finite_rows,
                       where);
  failed |= print_line("top-5 overlap", sums->overlap_sum / n, NAN, 0, 0, "");
  failed |= print_line("RMS delta p", sqrt(sums->delta_p_squares / n), NAN, 1, 0, "");
  snprintf(where, sizeof where, "step %lld, token %lld", (long long)sums->logit_error_step,
           (long long)sums->logit_error_at);
  failed |= print_line("largest logit error", rows ? sums->logit_error : NAN, limit->logit_error, 1, rows, where);
  snprintf(where, sizeof where, "step %lld", (long long)sums->relative_l2_step);
  failed |= print_line("relative L2, largest", rows ? sums->relative_l2 : NAN, limit->relative_l2, 1, rows, where);
  if (sums->bad_a + sums->bad_b > 0) {
    failed = 1;
    printf("%-28s %lld in A, %lld in B  FAIL  first at step %lld (%lld of %lld steps left out above)\n",
           "NaN or infinite logits", (long long)sums->bad_a, (long long)sums->bad_b, (long long)sums->bad_step,
           (long long)(sums->rows - sums->finite_rows), (long long)sums->rows);
  }
  if (divergence >= 0) {
    failed = 1;
    printf("%-28s step %lld: A chose %lld, B chose %lld  FAIL  (later steps are not comparable)\n",
           "token histories diverge", (long long)divergence, (long long)token_a, (long long)token_b);
  } else {
    printf("%-28s %-12s %-12s pass\n", "same tokens", "yes", "");
  }
  return failed;
}

static void print_run(const char *letter, const K3RunReader *run)
{
  printf("%s  %s: %s, %lld rank%s, %s, %lld whole step%s%s\n", letter, run->path, run->model, (long long)run->ranks,
         run->ranks == 1 ? "" : "s", run->backend, (long long)run->steps, run->steps == 1 ? "" : "s",
         run->unfinished ? " (unfinished file)" : "");
}

/* ---------------------------------------------------------------- the command */

static K3Status compare_runs(K3RunReader *a, K3RunReader *b, const Thresholds *limit)
{
  K3Status status = K3_OK;
  K3_TRY(check_pair(a, b, limit));
  int64_t vocabulary = a->config.vocab_size, divergence = -1, steps = a->steps < b->steps ? a->steps : b->steps;
  if (limit->steps > 0) steps = limit->steps;
  float *logits_a = malloc((size_t)vocabulary * sizeof *logits_a), *logits_b = malloc((size_t)vocabulary * sizeof *logits_b);
  int64_t *tokens_a = malloc((size_t)a->steps * sizeof *tokens_a), *tokens_b = malloc((size_t)b->steps * sizeof *tokens_b);
  Sums sums = {0};
  if (!logits_a || !logits_b || !tokens_a || !tokens_b)
    K3_FAIL_DONE(K3_ERR_INPUT, "no memory for two rows of %lld logits", (long long)vocabulary);
  K3_TRY_DONE(k3_run_reader_tokens(a, tokens_a));
  K3_TRY_DONE(k3_run_reader_tokens(b, tokens_b));

  print_run("A", a);
  print_run("B", b);
  if (a->model_digest != b->model_digest)
    printf("note: the models differ (digests %016llx and %016llx)\n", (unsigned long long)a->model_digest,
           (unsigned long long)b->model_digest);
  if (a->steps != b->steps && limit->steps == 0)
    printf("note: different numbers of steps, the common %lld are compared\n", (long long)steps);

  /* Row n was computed after tokens 0 … n-1, so the row of the first difference still compares. */
  for (int64_t n = 0; n < steps && divergence < 0; n++) {
    if (tokens_a[n] < 0 || tokens_a[n] >= vocabulary)
      K3_FAIL_DONE(K3_ERR_INPUT, "%s: /decode/token_ids[%lld] = %lld is outside the vocabulary of %lld", a->path,
                   (long long)n, (long long)tokens_a[n], (long long)vocabulary);
    K3_TRY_DONE(k3_run_reader_logits(a, n, logits_a));
    K3_TRY_DONE(k3_run_reader_logits(b, n, logits_b));
    Row row = compare_row(logits_a, logits_b, vocabulary, tokens_a[n]);
    add_row(&sums, &row, n);
    if (tokens_a[n] != tokens_b[n]) divergence = n;
  }
  printf("compared: %lld of %lld steps, %lld logits each\n\n", (long long)sums.rows, (long long)steps,
         (long long)vocabulary);
  int64_t at = divergence >= 0 ? divergence : 0;
  if (print_table(&sums, limit, divergence, tokens_a[at], tokens_b[at]))
    K3_FAIL_DONE(K3_ERR_COMPARE, "%s and %s differ beyond the thresholds", a->path, b->path);
  printf("\nthe runs agree\n");
done:
  fflush(stdout);
  free(logits_a);
  free(logits_b);
  free(tokens_a);
  free(tokens_b);
  return status;
}

static K3Status parse_limit(const char *name, const char *text, double high, double *value)
{
  char *end;
  *value = strtod(text, &end);
  if (end == text || *end || !(*value >= 0 && *value <= high))
    K3_FAIL(K3_ERR_USAGE, "compare: --%s %s: wanted a number from 0%s", name, text, high == 1 ? " to 1" : " up");
  return K3_OK;
}

/* *help: the usage was printed, nothing is left to do. */
static K3Status parse(int argc, char **argv, Thresholds *limit, int *help)
{
  static const struct option options[] = {
    {"max-mean-kl", required_argument, NULL, 'm'},     {"max-kl", required_argument, NULL, 'k'},
    {"min-top1", required_argument, NULL, 't'},        {"max-logit-error", required_argument, NULL, 'e'},
    {"max-relative-l2", required_argument, NULL, 'l'}, {"steps", required_argument, NULL, 's'},
    {"help", no_argument, NULL, 'h'},                  {NULL, 0, NULL, 0}};
  *limit = (Thresholds){1e-5, NAN, 1.0, NAN, NAN, 0};
  *help = 0;
  optind = 0; /* getopt begins afresh */
  int letter, index = 0;
  while ((letter = getopt_long(argc, argv, ":h", options, &index)) != -1) {
    switch (letter) {
    case 'm': K3_TRY(parse_limit("max-mean-kl", optarg, DBL_MAX, &limit->mean_kl)); break;
    case 'k': K3_TRY(parse_limit("max-kl", optarg, DBL_MAX, &limit->kl)); break;
    case 't': K3_TRY(parse_limit("min-top1", optarg, 1, &limit->top1)); break;
    case 'e': K3_TRY(parse_limit("max-logit-error", optarg, DBL_MAX, &limit->logit_error)); break;
    case 'l': K3_TRY(parse_limit("max-relative-l2", optarg, DBL_MAX, &limit->relative_l2)); break;
    case 's': K3_TRY(k3_parse_count(optarg, "compare: --steps", 1, INT64_MAX, &limit->steps)); break;
    case 'h':
      fputs(usage, stdout);
      *help = 1;
      return K3_OK;
    default: return k3_refuse_option("compare", letter, argv);
    }
  }
  if (argc - optind != 2)
    K3_FAIL(K3_ERR_USAGE, "compare wants two run files, got %d (see k3decode compare --help)", argc - optind);
  return K3_OK;
}

K3Status k3_command_compare(int argc, char **argv, K3Comm *comm)
{
  K3Status status = K3_OK;
  Thresholds limit;
  int help;
  K3_TRY(parse(argc, argv, &limit, &help));
  if (help) return K3_OK;
  if (comm && comm->world > 1)
    K3_FAIL(K3_ERR_USAGE, "compare runs as one process, started without mpirun; got %d ranks", comm->world);
  K3RunReader *a = NULL, *b = NULL;
  K3_TRY_DONE(k3_run_reader_open(argv[optind], &a));
  K3_TRY_DONE(k3_run_reader_open(argv[optind + 1], &b));
  status = compare_runs(a, b, &limit);
done:
  k3_run_reader_close(a);
  k3_run_reader_close(b);
  return status;
}
