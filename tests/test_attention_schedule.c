/* The split schedule in float32 (attention_schedule.h) at the model's widths against float64, with the mistakes that the
 * check must catch; splitting against not splitting; and of the plan what test_attention_plan.c leaves: random shapes,
 * ranks, and re-derivation. K3_TEST_SEED repeats a run. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "attention_schedule.h"
#include "plan/attention.h"

#define COUNT(a) ((int64_t)(sizeof(a) / sizeof((a)[0])))

enum { LATENT = 512, ROPE = 64, WIDTH = LATENT + ROPE, V_HEAD = 128 };
enum { MAX_HEADS = 96, MAX_SLICES = 129, MAX_ROWS = 131072, GUARD_ROWS = 64 };

/* Relative L2 that is allowed as long as one accumulator takes at most so many additions: over 3,000 fresh inputs of 256
 * additions the mean was 4e-7, the largest 9.4e-7. Longer sums in float32 lose in proportion to sqrt(additions), whatever
 * the schedule, and the bound grows likewise: 1e-6 is not to be had of one slice of 131,072 rows (6e-6 row by row). That
 * is what splitting is for; the tensor-core arm's plans stay short (test_attention_plan_keeps_sums_short). */
#define ALLOWED 1e-6
enum { ALLOWED_ADDITIONS = 256 };

typedef struct {
  const char *name;
  int64_t tile_rows, step_rows, widths[3], resident_blocks;
} Arm;
/* Tiles, widths and mma depth of kernels/mla_slice.cu and kernels/mla_tensor.cu. */
static const Arm arms[] = {{"CUDA cores", 32, 1, {4, 12, 0}, 3}, {"tensor cores", 64, 16, {16, 24, 48}, 1}};
enum { CORE, TENSOR };

static const int64_t contexts[] = {1, 2, 3, 127, 128, 129, 4095, 4096, 4097, 12288, 12289, 20000, 131071, 131072};
static const int64_t head_counts[] = {8, 12, 96};
static const K3Fault no_fault = {K3_FAULT_NONE, 0};

static struct {
  uint64_t seed, draws;
  float *cache, *query, *w_v, *out; /* [MAX_ROWS + GUARD_ROWS, WIDTH] [MAX_HEADS, WIDTH] [MAX_HEADS, V_HEAD, LATENT] */
  K3Partials partials;              /* MAX_SLICES × MAX_HEADS */
} world;

/* ---- random numbers --------------------------------------------------------------------------------------------- */

static uint64_t bits_of(uint64_t stream, uint64_t index) /* splitmix64 */
{
  uint64_t z = stream + (index + 1) * 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

static uint64_t fresh_stream(void) { return bits_of(world.seed, world.draws++); }

static int64_t draw(int64_t least, int64_t most)
{
  return least + (int64_t)(fresh_stream() % (uint64_t)(most - least + 1));
}

/* About normal: the sum of four uniforms; mean 0, deviation 1. */
static void fill(float *values, int64_t count, double deviation)
{
  uint64_t stream = fresh_stream();
#pragma omp parallel for
  for (int64_t i = 0; i < count; i++) {
    uint64_t b = bits_of(stream, (uint64_t)i);
    int32_t sum = (int32_t)(b & 65535) + (int32_t)(b >> 16 & 65535) + (int32_t)(b >> 32 & 65535) + (int32_t)(b >> 48);
    values[i] = (float)(deviation * 0.8660254037844386 / 32768.0 * (sum - 131070));
  }
}

static void fill_world(int64_t rows)
{
  fill(world.cache, rows * WIDTH, 1.0);
  fill(world.query, MAX_HEADS * WIDTH, 1.0);
}

static int setup(void **state)
{
  (void)state;
  const char *given = getenv("K3_TEST_SEED");
  world.seed = given ? strtoull(given, NULL, 10) : (uint64_t)time(NULL) * 1000003u + (uint64_t)clock();
  printf("# K3_TEST_SEED=%llu\n", (unsigned long long)world.seed);
  size_t pairs = (size_t)MAX_SLICES * MAX_HEADS;
  world.cache = malloc((size_t)(MAX_ROWS + GUARD_ROWS) * WIDTH * sizeof(float));
  world.query = malloc((size_t)MAX_HEADS * WIDTH * sizeof(float));
  world.w_v = malloc((size_t)MAX_HEADS * V_HEAD * LATENT * sizeof(float));
  world.out = malloc((size_t)MAX_HEADS * V_HEAD * sizeof(float));
  world.partials.m = malloc(pairs * sizeof(float));
  world.partials.l = malloc(pairs * sizeof(float));
  world.partials.acc = malloc(pairs * LATENT * sizeof(float));
  if (!world.cache || !world.query || !world.w_v || !world.out || !world.partials.m || !world.partials.l ||
      !world.partials.acc)
    return -1;
  fill_world(MAX_ROWS);
  fill(world.w_v, (int64_t)MAX_HEADS * V_HEAD * LATENT, 1.0 / sqrt(LATENT));
  return 0;
}

static int teardown(void **state)
{
  (void)state;
  free(world.cache), free(world.query), free(world.w_v), free(world.out);
  free(world.partials.m), free(world.partials.l), free(world.partials.acc);
  return 0;
}

/* ---- one schedule and its check --------------------------------------------------------------------------------- */

/* The narrowest width that needs no more passes than the widest, as the plan has it. */
static int64_t width_for(const Arm *arm, int64_t heads)
{
  K3AttentionShape shape = {.heads = heads,
                            .rows = 1,
                            .latent = LATENT,
                            .multiprocessors = 1,
                            .resident_blocks = 1,
                            .tile_rows = arm->tile_rows};
  K3AttentionPlan plan;
  for (int i = 0; i < 3; i++) shape.widths[i] = arm->widths[i];
  assert_int_equal(k3_attention_plan(&shape, &plan), K3_OK);
  return plan.heads_per_pass;
}

static K3Schedule schedule_of(const Arm *arm, int64_t heads, int64_t rows, int64_t slices, const uint8_t *chosen)
{
  K3Schedule s = {.heads = heads,
                  .heads_per_pass = width_for(arm, heads),
                  .rows = rows,
                  .slices = slices,
                  .tile_rows = arm->tile_rows,
                  .step_rows = arm->step_rows,
                  .latent = LATENT,
                  .rope = ROPE,
                  .v_head = V_HEAD,
                  .scale = 1.0 / sqrt(192.0),
                  .query = world.query,
                  .cache = world.cache,
                  .w_v = world.w_v,
                  .chosen = chosen};
  return s;
}

static int64_t begin_of(const K3Schedule *s, int64_t slice)
{
  return k3_attention_slice_begin(s->rows, s->tile_rows, s->slices, slice);
}

/* Float64 values of the chosen heads, some rows of W_v. Only query, cache, W_v and row count matter: one serves all
 * slice counts, widths and tiles. */
typedef struct {
  int64_t v_begin, v_count;
  uint8_t known[MAX_HEADS];
  double value[MAX_HEADS][V_HEAD], top; /* top: the largest |score| of any head */
  int one_row_rules;                    /* nearly all weight on one row: acc is at full size from there on */
  int rows_alike;                       /* equal terms round the same way: errors add up, sqrt no longer holds */
} Reference;

static void refer(Reference *r, const K3Schedule *s, int64_t v_count)
{
  if (r->v_count != v_count) {
    memset(r->known, 0, sizeof r->known);
    r->v_count = v_count, r->v_begin = draw(0, V_HEAD - v_count), r->top = 0.0;
  }
#pragma omp parallel for schedule(dynamic)
  for (int64_t h = 0; h < s->heads; h++) {
    if (r->known[h] || (s->chosen && !s->chosen[h])) continue;
    double top;
    k3_schedule_reference(s, h, r->v_begin, r->v_count, r->value[h], &top);
#pragma omp critical
    r->top = fmax(r->top, top);
    r->known[h] = 1;
  }
}

/* Scratch starts as NaN, so that a forgotten write shows. */
static void poison(const K3Schedule *s)
{
  for (int64_t i = 0; i < s->slices; i++)
    for (int64_t h = 0; h < s->heads; h++) {
      if (s->chosen && !s->chosen[h]) continue;
      world.partials.m[i * s->heads + h] = world.partials.l[i * s->heads + h] = NAN;
      memset(world.partials.acc + (i * s->heads + h) * s->latent, 0xff, (size_t)s->latent * sizeof(float));
    }
  memset(world.out, 0xff, (size_t)(s->heads * s->v_head) * sizeof(float));
}

static void assert_empty_neutral(const K3Schedule *s)
{
  for (int64_t i = 0; i < s->slices; i++) {
    if (begin_of(s, i) < begin_of(s, i + 1)) continue;
    for (int64_t h = 0; h < s->heads; h++) {
      if (s->chosen && !s->chosen[h]) continue;
      const float *acc = world.partials.acc + (i * s->heads + h) * s->latent;
      int zero = 1;
      for (int64_t c = 0; c < s->latent; c++) zero &= acc[c] == 0.0f;
      assert_true(world.partials.m[i * s->heads + h] == K3_SCHEDULE_EMPTY_M);
      assert_true(world.partials.l[i * s->heads + h] == 0.0f);
      assert_true(zero);
    }
  }
}

/* ||got - want|| / ||want|| over the chosen heads; NaN when any number is, so that a comparison with a bound fails. */
static double relative_error(const K3Schedule *s, const Reference *r)
{
  double difference = 0.0, norm = 0.0;
  for (int64_t h = 0; h < s->heads; h++) {
    if (s->chosen && !s->chosen[h]) continue;
    for (int64_t j = 0; j < r->v_count; j++) {
      double want = r->value[h][j], off = (double)world.out[h * s->v_head + r->v_begin + j] - want;
      difference += off * off, norm += want * want;
    }
    for (int64_t j = 0; j < s->v_head; j++)
      if (!isfinite(world.out[h * s->v_head + j])) return NAN;
  }
  return sqrt(difference / norm);
}

/* The check, for right schedules and wrong ones alike: slices, merge, error. Does not poison. */
static double run_step(const K3Schedule *s, K3Fault fault, const Reference *r)
{
  k3_schedule_slices(s, fault, &world.partials);
  k3_schedule_merge(s, fault, &world.partials, world.out);
  return relative_error(s, r);
}

static int64_t additions_of(const K3Schedule *s)
{
  int64_t tiles = (s->rows + s->tile_rows - 1) / s->tile_rows, longest = (tiles + s->slices - 1) / s->slices;
  return longest * s->tile_rows / s->step_rows;
}

/* Each addition rounds at the size acc has by then, on the way up half of the last in square; all of it if one row rules.
 * A score off by its own rounding moves its weight by as much: counts above |score| 16. */
static double allowed_for(const K3Schedule *s, const Reference *r)
{
  double additions = (double)additions_of(s) * (r->one_row_rules ? 2.0 : 1.0) / ALLOWED_ADDITIONS;
  if (r->rows_alike) return fmax(ALLOWED, (double)additions_of(s) * ldexp(1.0, -24));
  return fmax(ALLOWED * fmax(1.0, sqrt(additions)), r->top * ldexp(1.0, -24));
}

static double worst_share;

static double assert_right(const K3Schedule *s, const Reference *r)
{
  poison(s);
  double error = run_step(s, no_fault, r), allowed = allowed_for(s, r);
  if (!(error <= allowed))
    print_error("rows %lld, heads %lld, slices %lld, tile %lld: relative L2 %.3e, allowed %.1e\n", (long long)s->rows,
                (long long)s->heads, (long long)s->slices, (long long)s->tile_rows, error, allowed);
  assert_true(error <= allowed);
  assert_empty_neutral(s);
  worst_share = fmax(worst_share, error / allowed);
  return error;
}

static void choose(uint8_t *chosen, const int64_t *heads, int64_t count)
{
  memset(chosen, 0, MAX_HEADS);
  for (int64_t i = 0; i < count; i++) chosen[heads[i]] = 1;
}

/* The rows after the context are NaN: reading one shows. */
static void guard(float *cache, int64_t rows, float *kept)
{
  memcpy(kept, cache + rows * WIDTH, (size_t)GUARD_ROWS * WIDTH * sizeof(float));
  memset(cache + rows * WIDTH, 0xff, (size_t)GUARD_ROWS * WIDTH * sizeof(float));
}

static void unguard(float *cache, int64_t rows, const float *kept)
{
  memcpy(cache + rows * WIDTH, kept, (size_t)GUARD_ROWS * WIDTH * sizeof(float));
}

/* ---- tiling ------------------------------------------------------------------------------------------------------ */

/* Every row once: with equal scores, l counts rows and acc sums small whole numbers, both exact in float32. */
static void assert_counts(const Arm *arm, int64_t heads, int64_t rows, int64_t slices, const float *cache,
                          const uint8_t *chosen)
{
  static const float query[MAX_HEADS * 2];
  K3Schedule s = schedule_of(arm, heads, rows, slices, chosen);
  s.latent = 2, s.rope = 0, s.v_head = 0, s.query = query, s.cache = cache;
  poison(&s);
  k3_schedule_slices(&s, no_fault, &world.partials);
  for (int64_t h = 0; h < heads; h++) {
    if (chosen && !chosen[h]) continue;
    double count = 0.0, sum[2] = {0.0, 0.0}, whole = (double)(rows / 7 * 21 + (rows % 7) * (rows % 7 - 1) / 2);
    for (int64_t i = 0; i < slices; i++) {
      int64_t held = begin_of(&s, i + 1) - begin_of(&s, i);
      const float *acc = world.partials.acc + (i * heads + h) * 2;
      assert_true(world.partials.l[i * heads + h] == (float)held);
      assert_true(world.partials.m[i * heads + h] == (held ? 0.0f : K3_SCHEDULE_EMPTY_M));
      count += (double)world.partials.l[i * heads + h], sum[0] += (double)acc[0], sum[1] += (double)acc[1];
    }
    assert_true(count == (double)rows && sum[0] == (double)rows && sum[1] == whole);
  }
}

static void test_schedule_tiling_exact(void **state)
{
  (void)state;
  float *cache = malloc((size_t)MAX_ROWS * 2 * sizeof(float));
  uint8_t last[MAX_HEADS];
  assert_non_null(cache);
  for (int64_t t = 0; t < MAX_ROWS; t++) cache[2 * t] = 1.0f, cache[2 * t + 1] = (float)(t % 7);
  for (int64_t c = 0; c < COUNT(contexts); c++)
    for (int64_t h = 0; h < COUNT(head_counts); h++)
      for (int64_t a = 0; a < COUNT(arms); a++)
        for (int64_t slices = 1; slices <= MAX_SLICES; slices++) {
          /* All heads while that is quick, then the last pass's last one; all slice counts throughout. */
          choose(last, (int64_t[]){head_counts[h] - 1}, 1);
          int64_t rows = contexts[c];
          if (rows > 20000 && slices % 4 != 1 && slices < 126 && slices != 64) continue;
          assert_counts(&arms[a], head_counts[h], rows, slices, cache, rows <= 3 ? NULL : last);
        }
  free(cache);
}

/* ---- against float64 --------------------------------------------------------------------------------------------- */

static void test_schedule_small_contexts_every_slice_count(void **state)
{
  (void)state;
  static Reference r;
  static float kept[GUARD_ROWS * WIDTH];
  uint8_t some[MAX_HEADS];
  double worst = 0.0;
  choose(some, (int64_t[]){0, 23, 24, 48, 95}, 5);
  worst_share = 0.0;
  for (int64_t c = 0; contexts[c] <= 129; c++) {
    guard(world.cache, contexts[c], kept);
    r.v_count = 0;
    for (int64_t h = 0; h < COUNT(head_counts); h++)
      for (int64_t slices = 1; slices <= MAX_SLICES; slices++) {
        const Arm *arm = &arms[(slices + h) % 2]; /* the two take turns */
        K3Schedule s = schedule_of(arm, head_counts[h], contexts[c], slices, head_counts[h] == 96 ? some : NULL);
        refer(&r, &s, V_HEAD);
        worst = fmax(worst, assert_right(&s, &r));
      }
    unguard(world.cache, contexts[c], kept);
  }
  printf("# contexts 1 to 129, slices 1 to 129: worst relative L2 %.2e, share of the tolerance used %.2f\n", worst,
         worst_share);
}

static void test_schedule_large_contexts(void **state)
{
  (void)state;
  static const int64_t slice_counts[] = {1, 2, 63, 64, 127, 128, 129, 3, 5, 31, 33, 65, 96, 100};
  static Reference r;
  static float kept[GUARD_ROWS * WIDTH];
  for (int64_t c = 0; c < COUNT(contexts); c++) {
    int64_t rows = contexts[c];
    if (rows <= 129) continue;
    guard(world.cache, rows, kept);
    r.v_count = 0, worst_share = 0.0;
    double worst = 0.0, beyond = 0.0;
    for (int64_t h = 0; h < COUNT(head_counts); h++) {
      uint8_t some[MAX_HEADS];
      int64_t heads = head_counts[h], number = rows < 10000 ? COUNT(slice_counts) : 7;
      choose(some, (int64_t[]){heads - 1, 0}, rows > 20000 ? 1 : 2); /* the pass that is not full, and the first */
      for (int64_t i = 0; i < number; i++) {
        const Arm *arm = &arms[rows > 20000 ? (h + i) % 2 : h == 1 ? CORE : TENSOR];
        K3Schedule s = schedule_of(arm, heads, rows, slice_counts[i], some);
        refer(&r, &s, rows > 20000 ? 8 : 16);
        double error = assert_right(&s, &r);
        if (additions_of(&s) <= ALLOWED_ADDITIONS) worst = fmax(worst, error);
        else beyond = fmax(beyond, error);
      }
    }
    printf("# context %lld: worst relative L2 %.2e; %.2e where one sum has over %d additions; share of the tolerance "
           "used %.2f\n",
           (long long)rows, worst, beyond, ALLOWED_ADDITIONS, worst_share);
    assert_true(worst < ALLOWED);
    unguard(world.cache, rows, kept);
  }
}

/* What the program plans for the tensor cores of an H200 stays where 1e-6 holds, whatever the banding. */
static void test_attention_plan_keeps_sums_short(void **state)
{
  (void)state;
  int64_t longest[2] = {0, 0};
  for (int64_t c = 0; c < COUNT(contexts); c++)
    for (int64_t heads = 1; heads <= MAX_HEADS; heads++)
      for (int64_t a = 0; a < COUNT(arms); a++) {
        const Arm *arm = &arms[a];
        K3AttentionShape shape = {.heads = heads,
                                  .rows = contexts[c],
                                  .latent = LATENT,
                                  .multiprocessors = 132,
                                  .resident_blocks = arm->resident_blocks,
                                  .tile_rows = arm->tile_rows,
                                  .unsplit_rows = K3_ATTENTION_UNSPLIT_ROWS};
        K3AttentionPlan plan;
        for (int i = 0; i < 3; i++) shape.widths[i] = arm->widths[i];
        assert_int_equal(k3_attention_plan(&shape, &plan), K3_OK);
        K3Schedule s = schedule_of(arm, heads, contexts[c], plan.slices, NULL);
        if (additions_of(&s) > longest[a]) longest[a] = additions_of(&s);
      }
  printf("# longest sum that a plan leaves: tensor cores %lld additions, CUDA cores %lld\n", (long long)longest[TENSOR],
         (long long)longest[CORE]);
  assert_true(longest[TENSOR] <= ALLOWED_ADDITIONS);
}

static void test_schedule_empty_slices_change_nothing(void **state)
{
  (void)state;
  uint8_t some[MAX_HEADS];
  float without[12 * V_HEAD];
  choose(some, (int64_t[]){0, 5, 11}, 3);
  for (int64_t a = 0; a < COUNT(arms); a++) {
    K3Schedule s = schedule_of(&arms[a], 12, 129, 16, some); /* more slices than tiles already */
    poison(&s);
    k3_schedule_slices(&s, no_fault, &world.partials);
    k3_schedule_merge(&s, no_fault, &world.partials, world.out);
    memcpy(without, world.out, sizeof without);
    K3Schedule empty = s; /* 64 slices more, of no rows, behind the others */
    K3Partials behind = {world.partials.m + 16 * 12, world.partials.l + 16 * 12, world.partials.acc + 16 * 12 * LATENT};
    empty.rows = 0, empty.slices = 64;
    k3_schedule_slices(&empty, no_fault, &behind); /* the scratch there is an earlier test's */
    s.slices = 80;
    k3_schedule_merge(&s, no_fault, &world.partials, world.out);
    for (int64_t h = 0; h < 12; h++)
      if (some[h]) assert_memory_equal(without + h * V_HEAD, world.out + h * V_HEAD, V_HEAD * sizeof(float));
    k3_schedule_merge(&empty, no_fault, &behind, world.out); /* no row anywhere: 0, not NaN */
    for (int64_t h = 0; h < 12; h++)
      for (int64_t j = 0; j < V_HEAD && some[h]; j++) assert_true(world.out[h * V_HEAD + j] == 0.0f);
  }
}

/* ---- scores ------------------------------------------------------------------------------------------------------ */

/* Moves row t along the head's query until its score is `score`. */
static void set_score(float *cache, int64_t t, int64_t head, double score)
{
  const float *query = world.query + head * WIDTH;
  float *row = cache + t * WIDTH;
  double norm = 0.0, now = 0.0;
  for (int c = 0; c < WIDTH; c++) {
    norm += (double)query[c] * (double)query[c];
    now += (double)query[c] * (double)row[c];
  }
  double step = (score * sqrt(192.0) - now) / norm;
  for (int c = 0; c < WIDTH; c++) row[c] += (float)(step * (double)query[c]);
}

typedef enum {
  ONE_HOT,
  NEARLY_ONE_HOT,
  LAST_PARTIAL_TILE,
  FIRST_ROW,
  RISING,
  FALLING,
  FAR_DOWN,
  TIES,
  ALL_EQUAL
} Scores;
static const char *const score_names[] = {"one-hot, 600",  "nearly one-hot",  "largest in the last tile",
                                          "largest first", "rising to 200",   "falling from 200",
                                          "all near -300", "ties at the top", "all equal"};

static void make_scores(Scores kind, float *cache, int64_t rows, int64_t head)
{
  double ahead =
      log((double)rows) + 4.5; /* a row of this score has about 95 % of the weight: the others e^(1.5 + log n) */
  memcpy(cache, world.cache, (size_t)rows * WIDTH * sizeof(float));
  if (kind == ONE_HOT) set_score(cache, draw(0, rows - 1), head, 600.0);
  if (kind == NEARLY_ONE_HOT) set_score(cache, draw(0, rows - 1), head, ahead);
  if (kind == LAST_PARTIAL_TILE) set_score(cache, rows - 1, head, ahead);
  if (kind == FIRST_ROW) set_score(cache, 0, head, ahead);
  for (int64_t t = 0; t < rows; t++) {
    if (kind == RISING) set_score(cache, t, head, 200.0 * (double)t / (double)rows);
    if (kind == FALLING) set_score(cache, t, head, 200.0 * (double)(rows - 1 - t) / (double)rows);
    if (kind == FAR_DOWN) set_score(cache, t, head, -300.0 - (double)(fresh_stream() >> 44) * 0x1p-17);
    if (kind == ALL_EQUAL && t > 0) memcpy(cache + t * WIDTH, cache, WIDTH * sizeof(float));
  }
  if (kind == TIES) { /* two equal rows share the top */
    int64_t first = draw(0, rows / 2), second = draw(rows / 2 + 1, rows - 1);
    set_score(cache, first, head, ahead);
    memcpy(cache + second * WIDTH, cache + first * WIDTH, WIDTH * sizeof(float));
  }
}

static void test_schedule_scores_extreme(void **state)
{
  (void)state;
  static const int64_t lengths[] = {129, 4097, 12289, 20000};
  static Reference r;
  float *cache = malloc((size_t)20000 * WIDTH * sizeof(float));
  assert_non_null(cache);
  for (int kind = ONE_HOT; kind <= ALL_EQUAL; kind++) {
    double worst = 0.0;
    worst_share = 0.0;
    for (int64_t c = 0; c < COUNT(lengths); c++) {
      int64_t head = draw(0, 11);
      uint8_t some[MAX_HEADS];
      choose(some, &head, 1);
      make_scores((Scores)kind, cache, lengths[c], head);
      r.v_count = 0;
      r.one_row_rules = kind <= FIRST_ROW || kind == TIES;
      r.rows_alike = kind == ALL_EQUAL;
      for (int64_t a = 0; a < COUNT(arms); a++)
        for (int i = 0; i < 3; i++) {
          K3Schedule s = schedule_of(&arms[a], 12, lengths[c], (int64_t[]){7, 64, 129}[i], some);
          s.cache = cache;
          refer(&r, &s, 32);
          worst = fmax(worst, assert_right(&s, &r));
          if (kind == ONE_HOT || kind == FAR_DOWN || kind == ALL_EQUAL)
            continue; /* one row, or rows alike in all that counts: nothing there to weigh wrongly */
          double control = run_step(&s, (K3Fault){K3_FAULT_MERGE_UNSCALED, 0}, &r);
          assert_false(control <= allowed_for(&s, &r));
        }
    }
    printf("# scores %s: worst relative L2 %.2e, share of the tolerance used %.2f\n", score_names[kind], worst,
           worst_share);
  }
  free(cache);
}

/* ---- controls: the same check must fail -------------------------------------------------------------------------- */

typedef struct {
  K3Schedule s;
  Reference r;
  uint8_t some[MAX_HEADS];
} Trial;

static Trial *trial_of(int64_t arm, int64_t heads, int64_t rows, int64_t slices)
{
  static Trial t;
  choose(t.some, (int64_t[]){0, heads / 2, heads - 1}, 3);
  t.s = schedule_of(&arms[arm], heads, rows, slices, t.some);
  t.r.v_count = 0;
  refer(&t.r, &t.s, 16);
  assert_right(&t.s, &t.r); /* passes before it is broken */
  poison(&t.s);
  return &t;
}

static double mildest; /* the smallest error of a control, the hardest to catch */

static void assert_caught(Trial *t, K3Fault fault)
{
  double error = run_step(&t->s, fault, &t->r), allowed = allowed_for(&t->s, &t->r);
  if (error <= allowed)
    print_error("control %d, slice %lld, rows %lld, slices %lld: not caught, relative L2 %.3e\n", (int)fault.kind,
                (long long)fault.slice, (long long)t->s.rows, (long long)t->s.slices, error);
  assert_false(error <= allowed);
  if (error < mildest) mildest = error;
}

static int64_t slice_with_rows(const K3Schedule *s)
{
  for (;;) {
    int64_t slice = draw(0, s->slices - 1);
    if (begin_of(s, slice) < begin_of(s, slice + 1)) return slice;
  }
}

static const int64_t control_rows[] = {129, 4097, 20000};

static void every_split_shape(K3FaultKind kind, const char *name)
{
  mildest = INFINITY;
  for (int64_t c = 0; c < COUNT(control_rows); c++)
    for (int64_t h = 0; h < COUNT(head_counts); h++) {
      Trial *t = trial_of((c + h) % 2, head_counts[h], control_rows[c], draw(2, MAX_SLICES));
      assert_caught(t, (K3Fault){kind, slice_with_rows(&t->s)});
    }
  printf("# control %s: caught, mildest relative L2 %.2e\n", name, mildest);
}

static void test_schedule_merge_unscaled_control(void **state)
{
  (void)state;
  every_split_shape(K3_FAULT_MERGE_UNSCALED, "merge without exp(m_i - m)");
}

static void test_schedule_w_v_before_merge_control(void **state)
{
  (void)state;
  every_split_shape(K3_FAULT_W_V_FIRST, "W_v before the merge");
}

static void test_schedule_slice_off_by_one_control(void **state)
{
  (void)state;
  every_split_shape(K3_FAULT_SLICE_BEGINS_LATE, "slice misses its first row");
  every_split_shape(K3_FAULT_SLICE_ENDS_LATE, "slice takes a row too many");
}

static void test_schedule_empty_slice_uninitialised_control(void **state)
{
  (void)state;
  static const int64_t rows[] = {1, 3, 129, 4097};
  for (int garbage = 0; garbage < 2; garbage++)
    for (int64_t c = 0; c < COUNT(rows); c++)
      for (int64_t h = 0; h < COUNT(head_counts); h++) {
        Trial *t = trial_of(rows[c] > 129 ? TENSOR : (c + h) % 2, head_counts[h], rows[c], MAX_SLICES);
        int64_t pairs = t->s.slices * t->s.heads;
        if (garbage) { /* not NaN: numbers that look like a partial's */
          fill(world.partials.m, pairs, 1.0), fill(world.partials.acc, pairs * LATENT, 1.0);
          for (int64_t i = 0; i < pairs; i++) world.partials.l[i] = 1.0f;
        }
        assert_caught(t, (K3Fault){K3_FAULT_EMPTY_UNWRITTEN, 0});
      }
  printf("# control uninitialised empty slice: caught, as NaN and as garbage\n");
}

/* One slice's scratch is the last step's: a step with another query, and one with the same query and a row less. */
static void test_schedule_stale_scratch_control(void **state)
{
  (void)state;
  mildest = INFINITY;
  for (int other = 0; other < 2; other++)
    for (int64_t c = 0; c < COUNT(control_rows); c++)
      for (int64_t h = 0; h < COUNT(head_counts); h++) {
        Trial *t = trial_of((c + h) % 2, head_counts[h], control_rows[c], draw(2, MAX_SLICES));
        K3Schedule last_step = t->s;
        static float other_query[MAX_HEADS * WIDTH];
        fill(other_query, MAX_HEADS * WIDTH, 1.0);
        last_step.rows--;
        if (other) last_step.query = other_query;
        k3_schedule_slices(&last_step, no_fault, &world.partials);
        int64_t newest = t->s.slices - 1;
        while (begin_of(&t->s, newest) == t->s.rows) newest--;
        assert_caught(t, (K3Fault){K3_FAULT_SLICE_UNWRITTEN, other ? slice_with_rows(&t->s) : newest});
      }
  printf("# control stale scratch: caught, mildest relative L2 %.2e\n", mildest);
}

/* ---- splitting is more accurate ---------------------------------------------------------------------------------- */

static void test_schedule_split_more_accurate(void **state)
{
  (void)state;
  enum { SEEDS = 3, HEADS = 12 };
  static const int64_t lengths[] = {20000, 131072};
  static Reference r;
  double sum[2][2][2] = {{{0.0}}}; /* context, arm, split */
  int64_t count[2] = {0, 0}, slices[2][2];
  for (int seed = 0; seed < SEEDS; seed++) {
    fill_world(lengths[1]);
    for (int c = 0; c < 2; c++)
      for (int i = 0; i < (c ? 2 : 4); i++) {
        int64_t head = i * 3 + seed;
        uint8_t some[MAX_HEADS];
        choose(some, &head, 1);
        count[c]++;
        r.v_count = 0;
        for (int a = 0; a < 2; a++)
          for (int split = 0; split < 2; split++) {
            K3AttentionShape shape = {.heads = HEADS,
                                      .rows = lengths[c],
                                      .latent = LATENT,
                                      .multiprocessors = 132,
                                      .resident_blocks = arms[a].resident_blocks,
                                      .tile_rows = arms[a].tile_rows};
            K3AttentionPlan plan;
            for (int w = 0; w < 3; w++) shape.widths[w] = arms[a].widths[w];
            shape.force_slices = !split;
            assert_int_equal(k3_attention_plan(&shape, &plan), K3_OK);
            assert_true(plan.slices * HEADS <= MAX_SLICES * MAX_HEADS);
            if (split) slices[c][a] = plan.slices;
            K3Schedule s = schedule_of(&arms[a], HEADS, lengths[c], plan.slices, some);
            refer(&r, &s, 8);
            poison(&s);
            sum[c][a][split] += run_step(&s, no_fault, &r);
          }
      }
  }
  for (int c = 0; c < 2; c++)
    for (int a = 0; a < 2; a++) {
      double one = sum[c][a][0] / (double)count[c], many = sum[c][a][1] / (double)count[c];
      printf("# %lld positions, %s: relative L2 against float64, mean of %lld: un-split %.3e, %lld slices %.3e\n",
             (long long)lengths[c], arms[a].name, (long long)count[c], one, (long long)slices[c][a], many);
      assert_true(many <= one);
    }
}

/* ---- the plan ---------------------------------------------------------------------------------------------------- */

typedef struct {
  int64_t heads, ranks, machine, context, resident;
  int arm, band_context; /* 1: all heads, pages of the context; 0: all positions, heads of this rank */
} Setting;

static K3AttentionShape shape_of(const Setting *g)
{
  const Arm *arm = &arms[g->arm];
  K3AttentionShape s = {.latent = LATENT,
                        .multiprocessors = g->machine,
                        .resident_blocks = g->resident,
                        .tile_rows = arm->tile_rows,
                        .unsplit_rows = K3_ATTENTION_UNSPLIT_ROWS};
  for (int i = 0; i < 3; i++) s.widths[i] = arm->widths[i];
  s.heads = g->band_context ? g->heads : (g->heads + g->ranks - 1) / g->ranks;
  s.rows = g->band_context ? k3_attention_rows(g->context, 64, g->ranks, 0) : g->context;
  return s;
}

/* Multiprocessors with work when blocks are dealt one by one; blocks without rows are none. */
static int64_t busy_multiprocessors(const K3AttentionShape *s, const K3AttentionPlan *p)
{
  int64_t busy = 0;
  for (int64_t i = 0; i < p->slices; i++)
    busy += k3_attention_slice_begin(s->rows, s->tile_rows, p->slices, i) <
            k3_attention_slice_begin(s->rows, s->tile_rows, p->slices, i + 1);
  busy *= p->passes;
  return busy < s->multiprocessors ? busy : s->multiprocessors;
}

static int has_enough_work(const K3AttentionShape *s, const K3AttentionPlan *p)
{
  return s->rows > s->unsplit_rows && (s->rows + s->tile_rows - 1) / s->tile_rows * p->passes >= s->multiprocessors;
}

static int fills_machine(const K3AttentionShape *s, const K3AttentionPlan *p)
{
  return busy_multiprocessors(s, p) * 10 >= s->multiprocessors * 9;
}

static Setting random_setting(void)
{
  Setting g = {.heads = draw(1, 200),
               .ranks = draw(1, 16),
               .machine = draw(1, 200),
               .resident = draw(1, 4),
               .arm = (int)draw(0, 1),
               .band_context = (int)draw(0, 1)};
  g.context = draw(1, INT64_C(1) << draw(0, 20));
  return g;
}

/* Heads, ranks, multiprocessors or context of `g` drawn anew: 0 … 3. */
static Setting changed(const Setting *g, int what)
{
  Setting other = random_setting(), next = *g;
  if (what == 0) next.heads = other.heads;
  if (what == 1) next.ranks = other.ranks;
  if (what == 2) next.machine = other.machine;
  if (what == 3) next.context = other.context;
  return next;
}

static void make_plan(const K3AttentionShape *s, K3AttentionPlan *p)
{
  memset(p, 0, sizeof *p);
  assert_int_equal(k3_attention_plan(s, p), K3_OK);
}

/* Random machines, ranks, heads and contexts up to 2^20, each changed in each of its terms: the new plan fills the new
 * machine. Control: the old slice count, pinned, would not always have. */
static void test_attention_plan_rederived_on_any_change(void **state)
{
  (void)state;
  static const char *const names[] = {"heads", "ranks", "multiprocessors", "context"};
  int64_t enough[4] = {0}, differs[4] = {0}, pinned_starves[4] = {0};
  for (int trial = 0; trial < 20000; trial++) {
    Setting g = random_setting();
    K3AttentionShape s = shape_of(&g);
    K3AttentionPlan p, again;
    make_plan(&s, &p);
    assert_int_equal(p.busy_blocks > s.multiprocessors ? s.multiprocessors : p.busy_blocks,
                     busy_multiprocessors(&s, &p));
    for (int what = 0; what < 4; what++) {
      Setting next = changed(&g, what);
      K3AttentionShape t = shape_of(&next);
      K3AttentionPlan q, pinned;
      make_plan(&t, &q);
      if (has_enough_work(&t, &q)) {
        enough[what]++;
        if (!fills_machine(&t, &q))
          print_error("heads %lld, rows %lld, multiprocessors %lld, resident %lld, tile %lld: %lld x %lld blocks\n",
                      (long long)t.heads, (long long)t.rows, (long long)t.multiprocessors, (long long)t.resident_blocks,
                      (long long)t.tile_rows, (long long)q.passes, (long long)q.slices);
        assert_true(fills_machine(&t, &q));
        pinned = q, pinned.slices = p.slices;
        pinned_starves[what] += !fills_machine(&t, &pinned);
      }
      differs[what] += q.slices != p.slices || q.passes != p.passes || q.heads_per_pass != p.heads_per_pass;
      make_plan(&s, &again); /* and back: nothing is remembered */
      assert_memory_equal(&p, &again, sizeof p);
    }
  }
  for (int what = 0; what < 4; what++) {
    printf(
        "# %s changed 20000 times: enough work %lld, another grid %lld, the old slices would starve the machine %lld\n",
        names[what], (long long)enough[what], (long long)differs[what], (long long)pinned_starves[what]);
    assert_true(enough[what] > 5000 && differs[what] > 5000);
    assert_true(pinned_starves[what] > 100);
  }
}

int main(void)
{
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_schedule_tiling_exact),
                                     cmocka_unit_test(test_schedule_small_contexts_every_slice_count),
                                     cmocka_unit_test(test_schedule_large_contexts),
                                     cmocka_unit_test(test_attention_plan_keeps_sums_short),
                                     cmocka_unit_test(test_schedule_empty_slices_change_nothing),
                                     cmocka_unit_test(test_schedule_scores_extreme),
                                     cmocka_unit_test(test_schedule_merge_unscaled_control),
                                     cmocka_unit_test(test_schedule_w_v_before_merge_control),
                                     cmocka_unit_test(test_schedule_slice_off_by_one_control),
                                     cmocka_unit_test(test_schedule_empty_slice_uninitialised_control),
                                     cmocka_unit_test(test_schedule_stale_scratch_control),
                                     cmocka_unit_test(test_schedule_split_more_accurate),
                                     cmocka_unit_test(test_attention_plan_rederived_on_any_change)};
  return cmocka_run_group_tests(tests, setup, teardown);
}
