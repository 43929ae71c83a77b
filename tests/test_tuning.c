/* Measured cuts of attention: what is tried, what is chosen, what a plan takes, whose tuning is refused; and the file. */
#include <hdf5.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "store/run_reader.h"
#include "store/tuning_file.h"

#define COUNT(a) (sizeof(a) / sizeof((a)[0]))

static char directory[] = "/tmp/k3tuningXXXXXX", path[64];

static K3AttentionShape shape_of(K3AttentionKernel kernel, int64_t heads, int64_t rows)
{
  K3AttentionShape s;
  k3_attention_kernel_shape(kernel, heads, 512, &s);
  s.rows = rows;
  s.multiprocessors = 132;
  s.resident_blocks = kernel == K3_ATTENTION_KERNEL_TENSOR ? 1 : 2;
  return s;
}

static K3AttentionTrial trial_of(K3AttentionKernel kernel, int64_t heads, int64_t rows, int64_t width, int64_t slices,
                                 double ms)
{
  return (K3AttentionTrial){.kernel = kernel,
                            .heads = heads,
                            .rows = rows,
                            .heads_per_pass = width,
                            .tile_rows = 64,
                            .passes = (heads + width - 1) / width,
                            .slices = slices,
                            .registers = 100,
                            .shared_bytes = 200000,
                            .blocks_per_sm = 1,
                            .slice_ms = 0.8 * ms,
                            .slice_p10 = 0.7 * ms,
                            .slice_p90 = 0.9 * ms,
                            .ms = ms,
                            .p10 = 0.95 * ms,
                            .p90 = 1.05 * ms,
                            .gbs = 4000};
}

static K3AttentionTuning tuning_of(K3AttentionTrial *trial, int64_t count)
{
  return (K3AttentionTuning){.device = "NVIDIA H200",
                             .kernels = "sources 1, CUDA 13.0",
                             .cache = "f16",
                             .multiprocessors = 132,
                             .num_heads = 96,
                             .latent = 512,
                             .rope = 64,
                             .count = count,
                             .trial = trial};
}

/* --- what is tried --------------------------------------------------------------------------------------- */

static void test_slices_tried_are_ascending_and_hold_the_planner_s(void **state)
{
  (void)state;
  static const int64_t rows[] = {1, 63, 64, 65, 4096, 12289, 131072, 1048576}, heads[] = {1, 8, 12, 96};
  for (size_t r = 0; r < COUNT(rows); r++)
    for (size_t h = 0; h < COUNT(heads); h++)
      for (int kernel = 0; kernel < 2; kernel++) {
        K3AttentionShape s = shape_of((K3AttentionKernel)kernel, heads[h], rows[r]);
        K3AttentionPlan own;
        int64_t widths[K3_ATTENTION_MAX_WIDTHS], slices[K3_ATTENTION_MAX_SLICE_TRIALS];
        int64_t tiles = (s.rows + s.tile_rows - 1) / s.tile_rows;
        int planned = 0, count = k3_attention_trial_widths(&s, widths);
        assert_int_equal(k3_attention_plan(&s, &own), K3_OK);
        for (int w = 0; w < count; w++) {
          int tried = k3_attention_trial_slices(&s, widths[w], slices);
          assert_true(tried >= 1);
          for (int i = 0; i < tried; i++) {
            assert_true(slices[i] >= 1 && slices[i] <= tiles);
            if (i > 0) assert_true(slices[i] > slices[i - 1]);
            planned += widths[w] == own.heads_per_pass && slices[i] == own.slices;
          }
          if (rows[r] >= 131072) assert_true(slices[tried - 1] > slices[0]);
        }
        assert_int_equal(planned, 1);
      }
}

static void test_widths_end_with_the_first_that_takes_all_heads(void **state)
{
  (void)state;
  int64_t widths[K3_ATTENTION_MAX_WIDTHS];
  K3AttentionShape few = shape_of(K3_ATTENTION_KERNEL_TENSOR, 1, 64),
                   many = shape_of(K3_ATTENTION_KERNEL_TENSOR, 1000, 64);
  assert_int_equal(k3_attention_trial_widths(&few, widths), 1);
  int all = k3_attention_trial_widths(&many, widths);
  assert_true(all > 1 && many.widths[all - 1] > 0 && (all == K3_ATTENTION_MAX_WIDTHS || many.widths[all] == 0));
}

/* --- what is chosen --------------------------------------------------------------------------------------- */

static void test_fastest_is_chosen_and_the_planner_s_within_its_spread(void **state)
{
  (void)state;
  K3AttentionTrial t[] = {trial_of(1, 96, 4096, 48, 64, 2.0), trial_of(1, 96, 4096, 48, 32, 1.0),
                          trial_of(1, 96, 4096, 24, 32, 1.5)};
  K3AttentionTuning tuning = tuning_of(t, COUNT(t));
  t[2].planned = 1;
  k3_attention_tuning_conclude(&tuning);
  assert_true(!t[0].chosen && t[1].chosen && !t[2].chosen);
  t[2].ms = 1.04; /* the fastest one's p90 is 1.05 */
  k3_attention_tuning_conclude(&tuning);
  assert_true(!t[0].chosen && !t[1].chosen && t[2].chosen);
  t[2].planned = 0;
  k3_attention_tuning_conclude(&tuning);
  assert_true(t[1].chosen && !t[2].chosen);
}

static void test_occupancy_step_is_where_resident_blocks_drop(void **state)
{
  (void)state;
  K3AttentionTrial t[] = {trial_of(0, 96, 4096, 4, 8, 1.0), trial_of(0, 96, 4096, 12, 8, 1.0),
                          trial_of(0, 96, 4096, 16, 8, 1.0), trial_of(1, 96, 4096, 48, 8, 1.0),
                          trial_of(0, 96, 8192, 12, 8, 1.0)};
  static const int64_t resident[] = {3, 2, 2, 1, 2};
  K3AttentionTuning tuning = tuning_of(t, COUNT(t));
  for (size_t i = 0; i < COUNT(t); i++) t[i].blocks_per_sm = resident[i];
  k3_attention_tuning_conclude(&tuning);
  assert_true(!t[0].step && t[1].step && !t[2].step && !t[3].step && !t[4].step);
}

static void test_bands_part_the_rows(void **state)
{
  (void)state;
  K3AttentionTrial t[] = {trial_of(1, 96, 64, 48, 1, 1.0), trial_of(1, 96, 128, 48, 2, 1.0),
                          trial_of(1, 96, 16384, 48, 66, 1.0), trial_of(1, 12, 128, 16, 2, 1.0),
                          trial_of(0, 96, 128, 12, 4, 1.0)};
  K3AttentionTuning tuning = tuning_of(t, COUNT(t));
  k3_attention_tuning_conclude(&tuning);
  static const struct {
    int64_t heads, rows, slices; /* 0: nothing serves */
  } wanted[] = {{96, 45, 0},     {96, 46, 1},    {96, 64, 1},    {96, 90, 1},     {96, 91, 2},
                {96, 181, 2},    {96, 182, 0},   {96, 11585, 0}, {96, 11586, 66}, {96, 16448, 66},
                {96, 23170, 66}, {96, 23171, 0}, {12, 128, 2},   {12, 90, 0},     {24, 128, 0}};
  for (size_t i = 0; i < COUNT(wanted); i++) {
    const K3AttentionTrial *found =
        k3_attention_tuning_find(&tuning, K3_ATTENTION_KERNEL_TENSOR, wanted[i].heads, wanted[i].rows);
    assert_int_equal(found ? found->slices : 0, wanted[i].slices);
  }
  assert_int_equal(k3_attention_tuning_find(&tuning, K3_ATTENTION_KERNEL_CORE, 96, 128)->slices, 4);
  assert_null(k3_attention_tuning_find(NULL, K3_ATTENTION_KERNEL_CORE, 96, 128));
}

/* --- what a plan takes ------------------------------------------------------------------------------------- */

static void test_plan_takes_what_was_measured(void **state)
{
  (void)state;
  K3AttentionTrial t[] = {trial_of(1, 96, 16384, 24, 33, 1.0), trial_of(1, 96, 16384, 48, 66, 2.0)};
  K3AttentionTuning tuning = tuning_of(t, COUNT(t));
  K3AttentionShape s = shape_of(K3_ATTENTION_KERNEL_TENSOR, 96, 16384);
  K3AttentionPlan own, tuned;
  k3_attention_tuning_conclude(&tuning);
  assert_int_equal(k3_attention_plan(&s, &own), K3_OK);
  s.tuning = &tuning;
  assert_int_equal(k3_attention_plan(&s, &tuned), K3_OK);
  assert_true(!own.tuned && tuned.tuned && own.heads_per_pass != 24);
  assert_int_equal(tuned.heads_per_pass, 24);
  assert_int_equal(tuned.passes, 4);
  assert_int_equal(tuned.slices, 33);
  assert_int_equal(tuned.blocks, 4 * 33);
  assert_int_equal(tuned.acc_floats, 33 * 96 * 512);
  assert_int_equal(tuned.ml_floats, 2 * 33 * 96);
  /* elsewhere and where slices are forced: the planner's own */
  K3AttentionShape other[4] = {s, s, s, s};
  other[0].rows = 64, other[1].heads = 48, other[2].force_slices = 7, other[3].kernel = K3_ATTENTION_KERNEL_CORE;
  for (int i = 0; i < 4; i++) {
    K3AttentionShape plain = other[i];
    plain.tuning = NULL;
    assert_int_equal(k3_attention_plan(&plain, &own), K3_OK);
    assert_int_equal(k3_attention_plan(&other[i], &tuned), K3_OK);
    assert_memory_equal(&own, &tuned, sizeof own);
  }
  /* never more slices than tiles */
  t[0].rows_from = 1, s.rows = 640; /* as if it had been chosen for these */
  assert_int_equal(k3_attention_plan(&s, &tuned), K3_OK);
  assert_true(tuned.tuned && tuned.slices == 10);
}

/* --- whose it is -------------------------------------------------------------------------------------------- */

static void refuses(const K3AttentionTuning *tuning, const K3AttentionTuning *here, const char *phrase)
{
  k3_status_clear();
  assert_int_equal(k3_attention_tuning_check(tuning, here, "tune.h5"), K3_ERR_INPUT);
  if (!strstr(k3_status_message(), phrase) || strncmp(k3_status_message(), "tune.h5 was tuned", 17) != 0)
    fail_msg("no '%s' in '%s'", phrase, k3_status_message());
  k3_status_clear();
}

static void test_tuning_of_another_is_refused_with_what_differs(void **state)
{
  (void)state;
  K3AttentionTrial t = trial_of(1, 96, 64, 48, 1, 1.0);
  K3AttentionTuning tuning = tuning_of(&t, 1), here = tuning_of(NULL, 0);
  assert_int_equal(k3_attention_tuning_check(&tuning, &here, "tune.h5"), K3_OK);
  strcpy(here.device, "NVIDIA H100");
  refuses(&tuning, &here, "on another device: NVIDIA H200 with 132 multiprocessors, and this is NVIDIA H100 with 132");
  here = tuning_of(NULL, 0), here.multiprocessors = 114;
  refuses(&tuning, &here, "with 114");
  here = tuning_of(NULL, 0), here.num_heads = 64;
  refuses(&tuning, &here, "num_heads 96, and here it is 64");
  here = tuning_of(NULL, 0), here.latent = 256;
  refuses(&tuning, &here, "kv_lora_rank 512");
  here = tuning_of(NULL, 0), here.rope = 32;
  refuses(&tuning, &here, "qk_rope_head_dim 64");
  here = tuning_of(NULL, 0), strcpy(here.cache, "bf16");
  refuses(&tuning, &here, "a cache in f16, and this run keeps it in bf16");
  here = tuning_of(NULL, 0), strcpy(here.kernels, "sources 2, CUDA 13.0");
  refuses(&tuning, &here, "other kernels (sources 1, CUDA 13.0) than this program's (sources 2");
  here = tuning_of(NULL, 0), t.heads_per_pass = 12;
  refuses(&tuning, &here, "12 heads a pass (trial 0), for which this program has no kernel");
  t.kernel = K3_ATTENTION_KERNEL_CORE;
  assert_int_equal(k3_attention_tuning_check(&tuning, &here, "tune.h5"), K3_OK);
  assert_int_equal(k3_attention_tuning_check_heads(&tuning, 96, "tune.h5"), K3_OK);
  assert_int_equal(k3_attention_tuning_check_heads(&tuning, 12, "tune.h5"), K3_ERR_INPUT);
  assert_non_null(strstr(k3_status_message(), "for 96 heads a rank, and this run's attend for 12"));
  k3_status_clear();
}

/* --- the file ------------------------------------------------------------------------------------------------ */

static void write_file(K3AttentionTrial *t, int64_t count)
{
  K3TuningFile *content = calloc(1, sizeof *content);
  *content = (K3TuningFile){.version = "1.2.3",
                            .command = "k3decode tune synth:k3",
                            .start_time = "2026-01-02T03:04:05Z",
                            .model = "synth:k3",
                            .versions = "HDF5",
                            .device_line = "a GPU",
                            .model_digest = 0xfedcba9876543210u,
                            .tuning = tuning_of(t, count)};
  k3_attention_tuning_conclude(&content->tuning);
  assert_int_equal(k3_tuning_file_write(path, 1, content), K3_OK);
  free(content);
}

/* The file at `path` against doc/file_schema.json, where Python and jsonschema are there (make check says which Python). */
static void check_schema(void)
{
  const char *python = getenv("PYTHON"), *source = getenv("srcdir");
  char command[1024];
  if (!python || !python[0] || !source) return;
  snprintf(command, sizeof command, "'%s' -B '%s/jobs/validate_h5.py' '%s'", python, source, path);
  int ended = system(command);
  if (WIFEXITED(ended) && WEXITSTATUS(ended) == 4) return; /* no jsonschema: it said so */
  assert_int_equal(ended, 0);
}

static void test_file_keeps_everything(void **state)
{
  (void)state;
  K3AttentionTrial t[] = {trial_of(1, 96, 16384, 24, 33, 1.0), trial_of(0, 12, 131072, 12, 66, 2.5)};
  K3TuningFile *read;
  t[1].planned = t[1].step = 1;
  write_file(t, 2);
  check_schema();
  assert_int_equal(k3_run_reader_recognise(path), K3_FILE_TUNING);
  assert_int_equal(k3_tuning_file_read(path, &read), K3_OK);
  assert_string_equal(read->version, "1.2.3");
  assert_string_equal(read->command, "k3decode tune synth:k3");
  assert_string_equal(read->device_line, "a GPU");
  assert_true(read->model_digest == 0xfedcba9876543210u);
  assert_int_equal(read->tuning.count, 2);
  assert_memory_equal(read->tuning.trial, t, sizeof t);
  K3AttentionTuning here = tuning_of(NULL, 0);
  assert_int_equal(k3_attention_tuning_check(&read->tuning, &here, path), K3_OK);
  k3_tuning_file_close(read);
  k3_tuning_file_close(NULL);
}

static void read_fails(const char *phrase)
{
  K3TuningFile *read;
  k3_status_clear();
  assert_int_equal(k3_tuning_file_read(path, &read), K3_ERR_INPUT);
  assert_null(read);
  if (!strstr(k3_status_message(), phrase)) fail_msg("no '%s' in '%s'", phrase, k3_status_message());
  k3_status_clear();
}

static void test_damaged_files_are_refused(void **state)
{
  (void)state;
  K3AttentionTrial t = trial_of(1, 96, 16384, 24, 33, 1.0);
  hsize_t two = 2;
  write_file(&t, 1);
  hid_t file = H5Fopen(path, H5F_ACC_RDWR, H5P_DEFAULT);
  assert_true(H5Ldelete(file, "/trials/slices", H5P_DEFAULT) >= 0);
  H5Fclose(file);
  read_fails("dataset /trials/slices is missing");
  file = H5Fopen(path, H5F_ACC_RDWR, H5P_DEFAULT);
  hid_t space = H5Screate_simple(1, &two, NULL),
        made = H5Dcreate2(file, "/trials/slices", H5T_STD_I64LE, space, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
  H5Dclose(made), H5Sclose(space), H5Fclose(file);
  read_fails("axis 0 is 2 long, wanted 1");
  write_file(&t, 1);
  file = H5Fopen(path, H5F_ACC_RDWR, H5P_DEFAULT);
  assert_true(H5Adelete(file, "kernels") >= 0);
  H5Fclose(file);
  read_fails("attribute kernels is missing");
  K3AttentionTrial bad[] = {t, t, t, t};
  bad[0].heads_per_pass = 0, bad[1].slices = 0, bad[2].heads = 97, bad[3].ms = -1;
  for (int i = 0; i < 4; i++) {
    write_file(&bad[i], 1);
    read_fails("no trial is like that");
  }
  bad[0] = t, bad[0].kernel = 2;
  write_file(bad, 1);
  read_fails("kernel 2, wanted 0 or 1");
  assert_int_equal(truncate(path, 512), 0);
  read_fails("cannot open");
  FILE *text = fopen(path, "w");
  fputs("mine", text), fclose(text);
  read_fails("cannot open");
}

static void test_only_a_tuning_file_is_replaced(void **state)
{
  (void)state;
  K3AttentionTrial t = trial_of(1, 96, 16384, 24, 33, 1.0);
  unlink(path);
  write_file(&t, 1);
  k3_status_clear();
  assert_int_equal(k3_tuning_file_check(path, 0), K3_ERR_INPUT);
  assert_non_null(strstr(k3_status_message(), "exists; give another path, or --overwrite"));
  assert_int_equal(k3_tuning_file_check(path, 1), K3_OK);
  FILE *text = fopen(path, "w");
  fputs("mine", text), fclose(text);
  k3_status_clear();
  assert_int_equal(k3_tuning_file_check(path, 1), K3_ERR_INPUT);
  assert_non_null(strstr(k3_status_message(), "is not a tuning file"));
  k3_status_clear();
}

static int open_directory(void **state)
{
  (void)state;
  if (!mkdtemp(directory)) return -1;
  snprintf(path, sizeof path, "%s/tune.h5", directory);
  return 0;
}

static int close_directory(void **state)
{
  (void)state;
  unlink(path);
  return rmdir(directory);
}

int main(void)
{
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_slices_tried_are_ascending_and_hold_the_planner_s),
      cmocka_unit_test(test_widths_end_with_the_first_that_takes_all_heads),
      cmocka_unit_test(test_fastest_is_chosen_and_the_planner_s_within_its_spread),
      cmocka_unit_test(test_occupancy_step_is_where_resident_blocks_drop),
      cmocka_unit_test(test_bands_part_the_rows),
      cmocka_unit_test(test_plan_takes_what_was_measured),
      cmocka_unit_test(test_tuning_of_another_is_refused_with_what_differs),
      cmocka_unit_test(test_file_keeps_everything),
      cmocka_unit_test(test_damaged_files_are_refused),
      cmocka_unit_test(test_only_a_tuning_file_is_replaced),
  };
  return cmocka_run_group_tests(tests, open_directory, close_directory);
}
