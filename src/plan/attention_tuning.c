/* See attention_tuning.h. Layer: plan. */
#include "plan/attention_tuning.h"

#include <math.h>
#include <stdio.h>

static int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* --- what to try ------------------------------------------------------------------------------------- */

int k3_attention_trial_widths(const K3AttentionShape *shape, int64_t widths[K3_ATTENTION_MAX_WIDTHS])
{
  int count = 0;
  for (int i = 0; i < K3_ATTENTION_MAX_WIDTHS && shape->widths[i] > 0; i++) {
    widths[count++] = shape->widths[i];
    if (shape->widths[i] >= shape->heads) break;
  }
  return count;
}

/* Into the ascending list, unless it is there. */
static int insert(int64_t *list, int count, int64_t value)
{
  int at = count;
  while (at > 0 && list[at - 1] >= value) at--;
  if (count == K3_ATTENTION_MAX_SLICE_TRIALS || (at < count && list[at] == value)) return count;
  for (int i = count; i > at; i--) list[i] = list[i - 1];
  list[at] = value;
  return count + 1;
}

int k3_attention_trial_slices(const K3AttentionShape *shape, int64_t heads_per_pass,
                              int64_t slices[K3_ATTENTION_MAX_SLICE_TRIALS])
{
  enum { EIGHTHS = 8, FEW_ROWS = 4096 };
  static const int64_t eighths[] = {1, 2, 4, 6, 8, 12, 16, 24, 32};
  int64_t tiles = divide_up(shape->rows, shape->tile_rows), passes = divide_up(shape->heads, heads_per_pass);
  int64_t wave = shape->multiprocessors * shape->resident_blocks;
  int count = 0;
  if (tiles < 1) tiles = 1;
  if (shape->rows <= FEW_ROWS) count = insert(slices, count, 1);
  for (size_t i = 0; i < sizeof eighths / sizeof eighths[0]; i++) {
    int64_t n = wave * eighths[i] / (EIGHTHS * passes);
    if (n < 1) n = 1;
    if (n > tiles) n = tiles;
    count = insert(slices, count, n);
    count = insert(slices, count, divide_up(tiles, divide_up(tiles, n)));
  }
  K3AttentionShape own = *shape;
  K3AttentionPlan plan;
  own.tuning = NULL;
  if (k3_attention_plan(&own, &plan) == K3_OK && plan.heads_per_pass == heads_per_pass)
    count = insert(slices, count, plan.slices);
  return count;
}

/* --- what follows ------------------------------------------------------------------------------------- */

static int same_work(const K3AttentionTrial *a, const K3AttentionTrial *b)
{
  return a->kernel == b->kernel && a->heads == b->heads && a->rows == b->rows;
}

static void mark_step(const K3AttentionTuning *tuning, K3AttentionTrial *t)
{
  const K3AttentionTrial *narrower = NULL;
  for (int64_t i = 0; i < tuning->count; i++) {
    const K3AttentionTrial *other = &tuning->trial[i];
    if (same_work(other, t) && other->heads_per_pass < t->heads_per_pass &&
        (!narrower || other->heads_per_pass > narrower->heads_per_pass))
      narrower = other;
  }
  t->step = narrower && t->blocks_per_sm < narrower->blocks_per_sm;
}

/* Only the first trial of a (kernel, heads, rows) does this for all of them. */
static K3AttentionTrial *choose(const K3AttentionTuning *tuning, int64_t first)
{
  K3AttentionTrial *best = &tuning->trial[first], *planned = NULL;
  for (int64_t i = 0; i < tuning->count; i++) {
    K3AttentionTrial *t = &tuning->trial[i];
    if (!same_work(t, best)) continue;
    if (i < first) return NULL;
    if (t->planned) planned = t;
    if (t->ms < best->ms) best = t;
  }
  return planned && planned->ms <= best->p90 ? planned : best;
}

/* The rows at which the bands of neighbours meet belong to the lower one. */
static int64_t between(int64_t low, int64_t high) { return (int64_t)sqrt((double)low * (double)high); }

static void set_band(const K3AttentionTuning *tuning, K3AttentionTrial *t)
{
  t->rows_from = between(t->rows / 2, t->rows) + 1;
  t->rows_to = between(t->rows, 2 * t->rows);
  for (int64_t i = 0; i < tuning->count; i++) {
    const K3AttentionTrial *other = &tuning->trial[i];
    if (other->kernel != t->kernel || other->heads != t->heads || other->rows == t->rows) continue;
    int64_t middle = other->rows < t->rows ? between(other->rows, t->rows) : between(t->rows, other->rows);
    if (other->rows < t->rows && middle + 1 > t->rows_from) t->rows_from = middle + 1;
    if (other->rows > t->rows && middle < t->rows_to) t->rows_to = middle;
  }
}

void k3_attention_tuning_conclude(K3AttentionTuning *tuning)
{
  for (int64_t i = 0; i < tuning->count; i++) {
    K3AttentionTrial *t = &tuning->trial[i];
    mark_step(tuning, t);
    t->chosen = t->rows_from = t->rows_to = 0;
  }
  for (int64_t i = 0; i < tuning->count; i++) {
    K3AttentionTrial *t = choose(tuning, i);
    if (!t) continue;
    t->chosen = 1;
    set_band(tuning, t);
  }
}

const K3AttentionTrial *k3_attention_tuning_find(const K3AttentionTuning *tuning, K3AttentionKernel kernel,
                                                 int64_t heads, int64_t rows)
{
  for (int64_t i = 0; tuning && i < tuning->count; i++) {
    const K3AttentionTrial *t = &tuning->trial[i];
    if (t->chosen && t->kernel == (int64_t)kernel && t->heads == heads && rows >= t->rows_from && rows <= t->rows_to)
      return t;
  }
  return NULL;
}

/* --- whose it is --------------------------------------------------------------------------------------- */

static K3Status check_number(const char *origin, const char *what, int64_t tuned, int64_t here)
{
  if (tuned != here)
    K3_FAIL(K3_ERR_INPUT,
            "%s was tuned for %s %lld, and here it is %lld; tune again for this model: k3decode tune MODEL", origin,
            what, (long long)tuned, (long long)here);
  return K3_OK;
}

static K3Status check_width(const K3AttentionTuning *tuning, int64_t trial, const char *origin)
{
  const K3AttentionTrial *t = &tuning->trial[trial];
  K3AttentionShape built;
  k3_attention_kernel_shape((K3AttentionKernel)t->kernel, t->heads, tuning->latent, &built);
  for (int i = 0; i < K3_ATTENTION_MAX_WIDTHS && built.widths[i] > 0; i++)
    if (built.widths[i] == t->heads_per_pass) return K3_OK;
  K3_FAIL(K3_ERR_INPUT,
          "%s was tuned with %lld heads a pass (trial %lld), for which this program has no kernel; tune again with "
          "this program",
          origin, (long long)t->heads_per_pass, (long long)trial);
}

K3Status k3_attention_tuning_check(const K3AttentionTuning *tuning, const K3AttentionTuning *here, const char *origin)
{
  if (strcmp(tuning->device, here->device) != 0 || tuning->multiprocessors != here->multiprocessors)
    K3_FAIL(K3_ERR_INPUT,
            "%s was tuned on another device: %s with %lld multiprocessors, and this is %s with %lld; tune on this one",
            origin, tuning->device, (long long)tuning->multiprocessors, here->device, (long long)here->multiprocessors);
  K3_TRY(check_number(origin, "num_heads", tuning->num_heads, here->num_heads));
  K3_TRY(check_number(origin, "kv_lora_rank", tuning->latent, here->latent));
  K3_TRY(check_number(origin, "qk_rope_head_dim", tuning->rope, here->rope));
  if (strcmp(tuning->cache, here->cache) != 0)
    K3_FAIL(K3_ERR_INPUT,
            "%s was tuned for a cache in %s, and this run keeps it in %s; tune with --cache %s, or run with --cache %s",
            origin, tuning->cache, here->cache, here->cache, tuning->cache);
  if (strcmp(tuning->kernels, here->kernels) != 0)
    K3_FAIL(K3_ERR_INPUT, "%s was tuned with other kernels (%s) than this program's (%s); tune again with this program",
            origin, tuning->kernels, here->kernels);
  for (int64_t i = 0; i < tuning->count; i++) K3_TRY(check_width(tuning, i, origin));
  return K3_OK;
}

K3Status k3_attention_tuning_check_heads(const K3AttentionTuning *tuning, int64_t heads, const char *origin)
{
  char list[256] = "";
  int64_t last = 0;
  for (int64_t i = 0; i < tuning->count; i++) {
    int64_t tuned = tuning->trial[i].heads;
    if (tuned == heads) return K3_OK;
    size_t used = strlen(list);
    if (tuned != last) snprintf(list + used, sizeof list - used, "%s%lld", used ? ", " : "", (long long)tuned);
    last = tuned;
  }
  K3_FAIL(K3_ERR_INPUT,
          "%s was tuned for %s heads a rank, and this run's attend for %lld; tune with --ranks of the run (with "
          "--slice of it)",
          origin, list, (long long)heads);
}
