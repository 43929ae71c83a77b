/* The attention plan: exact tiling, full machine, neutral surplus, re-derivation, refusals. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "plan/attention.h"

static const int64_t contexts[] = {0, 1, 2, 3, 63, 127, 128, 129, 4095, 4096, 4097, 12288, 12289, 20000, 131071, 131072};
static const int64_t head_counts[] = {1, 8, 12, 24, 96};
static const int64_t machines[] = {1, 16, 108, 132};
#define COUNT(a) (sizeof(a) / sizeof((a)[0]))

static K3AttentionShape shape_of(int64_t heads, int64_t rows, int64_t machine, int core)
{
  K3AttentionShape s = {.heads = heads, .rows = rows, .latent = 512, .multiprocessors = machine,
                        .unsplit_rows = K3_ATTENTION_UNSPLIT_ROWS};
  if (core) { /* CUDA cores: narrow passes, several blocks a multiprocessor */
    s.resident_blocks = 3, s.tile_rows = 16, s.widths[0] = 4, s.widths[1] = 12;
  } else {
    s.resident_blocks = 1, s.tile_rows = 64, s.widths[0] = 16, s.widths[1] = 24, s.widths[2] = 48;
  }
  return s;
}

/* Every row in exactly one slice, for any slice count and any row count up to the plan's. */
static void assert_tiles(int64_t rows, int64_t tile_rows, int64_t slices)
{
  int64_t at = 0, longest = 0, shortest = INT64_MAX;
  for (int64_t s = 0; s < slices; s++) {
    int64_t begin = k3_attention_slice_begin(rows, tile_rows, slices, s);
    int64_t end = k3_attention_slice_begin(rows, tile_rows, slices, s + 1);
    assert_int_equal(begin, at);
    assert_int_equal(k3_attention_slice_begin_narrow((uint32_t)rows, (uint32_t)tile_rows, (uint32_t)slices, (uint32_t)s), begin);
    assert_true(end >= begin);
    assert_true(begin % tile_rows == 0 || begin == rows);
    int64_t tiles = (end - begin + tile_rows - 1) / tile_rows;
    if (tiles > longest) longest = tiles;
    if (tiles < shortest) shortest = tiles;
    at = end;
  }
  assert_int_equal(at, rows);
  assert_true(longest - shortest <= 1);
}

static void test_attention_tiling_exact(void **state)
{
  (void)state;
  for (size_t c = 0; c < COUNT(contexts); c++)
    for (int64_t slices = 1; slices <= 200; slices++)
      for (int64_t tile = 1; tile <= 128; tile = tile * 4) assert_tiles(contexts[c], tile, slices);
}

static void check_plan(const K3AttentionShape *s)
{
  K3AttentionPlan p;
  assert_int_equal(k3_attention_plan(s, &p), K3_OK);
  assert_true(p.passes * p.heads_per_pass >= s->heads);
  assert_true((p.passes - 1) * p.heads_per_pass < s->heads);
  assert_true(p.slices >= 1);
  assert_int_equal(p.blocks, p.passes * p.slices);
  assert_int_equal(p.acc_floats, p.slices * s->heads * s->latent);
  assert_int_equal(p.ml_floats, 2 * p.slices * s->heads);
  assert_int_equal(p.split, p.slices > 1);
  assert_tiles(s->rows, p.tile_rows, p.slices);
  assert_tiles(s->rows / 2, p.tile_rows, p.slices); /* the same grid serves fewer rows */

  int64_t tiles = (s->rows + s->tile_rows - 1) / s->tile_rows, busy = 0;
  for (int64_t i = 0; i < p.slices; i++)
    busy += p.passes * (k3_attention_slice_begin(s->rows, p.tile_rows, p.slices, i) <
                        k3_attention_slice_begin(s->rows, p.tile_rows, p.slices, i + 1));
  assert_int_equal(busy, p.busy_blocks);
  if (s->rows <= s->unsplit_rows)
    assert_int_equal(p.slices, 1);
  else if (p.passes * tiles >= s->multiprocessors)
    assert_true(busy * 10 >= s->multiprocessors * 9);
  else
    assert_int_equal(busy, p.passes * tiles); /* too little work: a block a tile */
}

static void test_attention_plan_all_shapes(void **state)
{
  (void)state;
  for (size_t c = 0; c < COUNT(contexts); c++)
    for (size_t h = 0; h < COUNT(head_counts); h++)
      for (size_t m = 0; m < COUNT(machines); m++)
        for (int core = 0; core < 2; core++) {
          K3AttentionShape s = shape_of(head_counts[h], contexts[c], machines[m], core);
          check_plan(&s);
          s.unsplit_rows = 0;
          check_plan(&s);
          s.resident_blocks = 2;
          check_plan(&s);
        }
}

/* Property over every machine size and many row counts, not only the listed ones. */
static void test_attention_plan_fills_machine(void **state)
{
  (void)state;
  for (int64_t machine = 1; machine <= 148; machine++)
    for (int64_t rows = 65; rows < 40000; rows += 331)
      for (size_t h = 0; h < COUNT(head_counts); h++)
        for (int core = 0; core < 2; core++) {
          K3AttentionShape s = shape_of(head_counts[h], rows, machine, core);
          check_plan(&s);
        }
}

static void test_attention_plan_known_shapes(void **state)
{
  (void)state;
  K3AttentionPlan p;
  K3AttentionShape s = shape_of(96, 16384, 132, 0); /* one rank of eight, context banded */
  assert_int_equal(k3_attention_plan(&s, &p), K3_OK);
  assert_int_equal(p.heads_per_pass, 48);
  assert_int_equal(p.passes, 2);
  assert_int_equal(p.slices, 64); /* 4 tiles each; 66 slices would be no faster */
  s = shape_of(12, 131072, 132, 0); /* head banded */
  assert_int_equal(k3_attention_plan(&s, &p), K3_OK);
  assert_int_equal(p.heads_per_pass, 16);
  assert_int_equal(p.passes, 1);
  assert_int_equal(p.slices, 128);
}

static void test_attention_plan_rederived(void **state)
{
  (void)state;
  K3AttentionPlan a, b;
  K3AttentionShape s = shape_of(96, 16384, 132, 0), t;
  assert_int_equal(k3_attention_plan(&s, &a), K3_OK);
  t = s, t.heads = 12;
  assert_int_equal(k3_attention_plan(&t, &b), K3_OK);
  assert_int_not_equal(a.slices, b.slices);
  t = s, t.rows = 1024;
  assert_int_equal(k3_attention_plan(&t, &b), K3_OK);
  assert_int_not_equal(a.slices, b.slices);
  t = s, t.multiprocessors = 108;
  assert_int_equal(k3_attention_plan(&t, &b), K3_OK);
  assert_int_not_equal(a.slices, b.slices);
  t = s, t.resident_blocks = 2;
  assert_int_equal(k3_attention_plan(&t, &b), K3_OK);
  assert_int_not_equal(a.slices, b.slices);
  assert_int_equal(k3_attention_plan(&s, &b), K3_OK); /* and back: nothing is remembered */
  assert_int_equal(a.slices, b.slices);
}

static void test_attention_plan_cap_and_threshold(void **state)
{
  (void)state;
  K3AttentionPlan p;
  K3AttentionShape s = shape_of(96, 131072, 132, 0);
  s.max_head_slices = 960;
  assert_int_equal(k3_attention_plan(&s, &p), K3_OK);
  assert_true(p.slices * s.heads <= 960 && p.slices == 10);
  s.max_head_slices = 5; /* below one slice: one slice */
  assert_int_equal(k3_attention_plan(&s, &p), K3_OK);
  assert_int_equal(p.slices, 1);
  s = shape_of(12, 4096, 132, 0);
  s.unsplit_rows = 4095;
  assert_int_equal(k3_attention_plan(&s, &p), K3_OK);
  assert_true(p.split);
  s.unsplit_rows = 4096;
  assert_int_equal(k3_attention_plan(&s, &p), K3_OK);
  assert_false(p.split);
  s.force_slices = 129;
  assert_int_equal(k3_attention_plan(&s, &p), K3_OK);
  assert_int_equal(p.slices, 129);
  assert_int_equal(p.busy_blocks, 64);
}

static void test_attention_capacity_covers(void **state)
{
  (void)state;
  for (int64_t rows = 0; rows < 5000; rows++) {
    int64_t capacity = k3_attention_capacity(rows, 4500);
    assert_true(capacity >= rows);
    if (rows <= 4500) assert_true(capacity <= 4500);
    assert_int_equal(k3_attention_capacity(capacity, 4500), capacity);
  }
}

/* Rows of the ranks: all positions once, in order, whatever the page. */
static void test_attention_rows_dealt(void **state)
{
  (void)state;
  for (int64_t world = 1; world <= 9; world++)
    for (int64_t page = 1; page <= 64; page *= 8)
      for (int64_t context = 0; context <= 1000; context += 7) {
        int64_t held[9] = {0}, sum = 0;
        for (int64_t t = 0; t < context; t++) held[t / page % world]++;
        for (int64_t r = 0; r < world; r++) {
          assert_int_equal(k3_attention_rows(context, page, world, r), held[r]);
          sum += held[r];
        }
        assert_int_equal(sum, context);
      }
}

static void test_attention_plan_refuses(void **state)
{
  (void)state;
  K3AttentionPlan p;
  K3AttentionShape s = shape_of(0, 16, 132, 0);
  assert_int_equal(k3_attention_plan(&s, &p), K3_ERR_INPUT);
  assert_non_null(strstr(k3_status_message(), "heads is 0"));
  k3_status_clear();
  s = shape_of(1, 16, 0, 0);
  assert_int_equal(k3_attention_plan(&s, &p), K3_ERR_INPUT);
  assert_non_null(strstr(k3_status_message(), "multiprocessors"));
  k3_status_clear();
}

int main(void)
{
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_attention_tiling_exact),       cmocka_unit_test(test_attention_plan_all_shapes),
      cmocka_unit_test(test_attention_plan_fills_machine), cmocka_unit_test(test_attention_plan_known_shapes),
      cmocka_unit_test(test_attention_plan_rederived),     cmocka_unit_test(test_attention_plan_cap_and_threshold),
      cmocka_unit_test(test_attention_capacity_covers),    cmocka_unit_test(test_attention_rows_dealt),
      cmocka_unit_test(test_attention_plan_refuses)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
