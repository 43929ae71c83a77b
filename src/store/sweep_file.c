/* Writes and reads the sweep file. See sweep_file.h. Layer: store. */
#include "store/sweep_file.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "store/hdf5_attribute.h"
#include "store/hdf5_dataset.h"
#include "store/hdf5_image.h"
#include "store/hdf5_output.h"
#include "store/partial_file.h"

/* ---------------------------------------------------------------- memory */

static double *room(int64_t count)
{
  double *values = malloc((size_t)count * sizeof *values);
  for (int64_t i = 0; values && i < count; i++) values[i] = NAN;
  return values;
}

K3Status k3_sweep_open(K3Sweep *sweep, int64_t contexts, int64_t repeats, int64_t steps, int64_t phases)
{
  int64_t cells = contexts * K3_SWEEP_ARMS, block = repeats * K3_SWEEP_BLOCKS * steps;
  int good = 1;
  *sweep = (K3Sweep){.contexts = contexts, .repeats = repeats, .steps = steps, .phases = phases};
  good &= (sweep->context = calloc((size_t)contexts, sizeof *sweep->context)) != NULL;
  good &= (sweep->attention = calloc((size_t)cells, sizeof *sweep->attention)) != NULL;
  good &= (sweep->step_ms = room(cells * block)) != NULL;
  good &= (sweep->same_ms = room(cells * block)) != NULL;
  good &= (sweep->phase_ms = room(cells * K3_SWEEP_WHENS * steps * phases)) != NULL;
  good &= (sweep->token = malloc((size_t)(cells * steps) * sizeof *sweep->token)) != NULL;
  good &= (sweep->statistic_ms = room(cells * K3_SWEEP_STATISTICS)) != NULL;
  good &= (sweep->same_statistic_ms = room(cells * K3_SWEEP_STATISTICS)) != NULL;
  good &= (sweep->difference_ms = room(contexts)) != NULL;
  good &= (sweep->repeat_difference_ms = room(contexts * repeats)) != NULL;
  good &= (sweep->same_difference_ms = room(contexts * repeats)) != NULL;
  good &= (sweep->own_floor_ms = room(contexts)) != NULL;
  good &= (sweep->floor_ms = room(contexts)) != NULL;
  good &= (sweep->same_path = calloc((size_t)contexts, sizeof *sweep->same_path)) != NULL;
  good &= (sweep->above_floor = calloc((size_t)contexts, sizeof *sweep->above_floor)) != NULL;
  good &= (sweep->depth_ms = room(cells)) != NULL;
  good &= (sweep->depth_floor_ms = room(cells)) != NULL;
  good &= (sweep->control_ms = room(cells * K3_SWEEP_WHENS * phases)) != NULL;
  if (!good)
    K3_FAIL(K3_ERR_INPUT, "no memory for the times of a sweep of %lld contexts, %lld repeats, %lld steps",
            (long long)contexts, (long long)repeats, (long long)steps);
  for (int64_t i = 0; i < cells * steps; i++) sweep->token[i] = -1;
  return K3_OK;
}

void k3_sweep_close(K3Sweep *sweep)
{
  void *all[] = {sweep->context,      sweep->attention,          sweep->step_ms,
                 sweep->same_ms,      sweep->phase_ms,           sweep->token,
                 sweep->statistic_ms, sweep->same_statistic_ms,  sweep->difference_ms,
                 sweep->floor_ms,     sweep->same_difference_ms, sweep->same_path,
                 sweep->above_floor,  sweep->depth_ms,           sweep->depth_floor_ms,
                 sweep->control_ms,   sweep->own_floor_ms,       sweep->repeat_difference_ms};
  for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) free(all[i]);
  memset(sweep, 0, sizeof *sweep);
}

/* ---------------------------------------------------------------- the content */

static K3Status put_description(const char *path, hid_t file, const K3SweepInfo *info, const K3Sweep *sweep)
{
  K3_TRY(k3_hdf5_put_text(path, file, "format", K3_SWEEP_FORMAT));
  K3_TRY(k3_hdf5_put_integer(path, file, "format_version", K3_SWEEP_FORMAT_VERSION));
  K3_TRY(k3_hdf5_put_text(path, file, "program_version", info->version));
  K3_TRY(k3_hdf5_put_text(path, file, "versions", info->versions));
  K3_TRY(k3_hdf5_put_text(path, file, "model", info->model));
  K3_TRY(k3_hdf5_put_attribute(path, file, "model_digest", H5T_STD_U64LE, H5T_NATIVE_UINT64, &info->model_digest));
  K3_TRY(k3_hdf5_put_text(path, file, "backend", info->backend));
  K3_TRY(k3_hdf5_put_text(path, file, "devices", info->devices));
  K3_TRY(k3_hdf5_put_text(path, file, "command", info->command));
  K3_TRY(k3_hdf5_put_text(path, file, "start_time", info->start_time));
  K3_TRY(k3_hdf5_put_text(path, file, "kind", info->kind));
  K3_TRY(k3_hdf5_put_integer(path, file, "ranks", info->ranks));
  K3_TRY(k3_hdf5_put_integer(path, file, "seed", info->seed));
  K3_TRY(k3_hdf5_put_integer(path, file, "capacity", info->capacity));
  K3_TRY(k3_hdf5_put_integer(path, file, "steps", sweep->steps));
  K3_TRY(k3_hdf5_put_integer(path, file, "repeats", sweep->repeats));
  K3_TRY(k3_hdf5_put_integer(path, file, "warm_steps", K3_SWEEP_WARM_STEPS));
  K3_TRY(k3_hdf5_put_text(path, file, "order",
                          "at each context: phase times of A, B; repeats of A B B A and, of one arm against itself, "
                          "A A' A' A; phase times of B, A. Every block begins from the same cache, state and token"));
  K3_TRY(k3_hdf5_put_group(path, file, "/config"));
  return k3_hdf5_put_config(path, file, info->config);
}

static K3Status put_arms(const char *path, hid_t file, const K3Sweep *sweep)
{
  hsize_t arms[2] = {(hsize_t)sweep->contexts, K3_SWEEP_ARMS}, two = K3_SWEEP_ARMS;
  const char *lack[K3_SWEEP_ARMS];
  for (int a = 0; a < K3_SWEEP_ARMS; a++) lack[a] = sweep->lack[a] ? sweep->lack[a] : "";
  const char **attention = malloc((size_t)sweep->contexts * K3_SWEEP_ARMS * sizeof *attention);
  if (!attention) K3_FAIL(K3_ERR_INPUT, "output %s: no memory", path);
  for (int64_t i = 0; i < sweep->contexts * K3_SWEEP_ARMS; i++) attention[i] = sweep->attention[i];
  K3Status status = K3_OK;
  K3_TRY_DONE(k3_hdf5_put_group(path, file, "/arms"));
  K3_TRY_DONE(k3_hdf5_put_texts(path, file, "/arms/names", 1, &two, sweep->arm));
  K3_TRY_DONE(k3_hdf5_put_texts(path, file, "/arms/missing_because", 1, &two, lack));
  K3_TRY_DONE(k3_hdf5_put_texts(path, file, "/arms/attention", 2, arms, attention));
done:
  free(attention);
  return status;
}

static K3Status put_times(const char *path, hid_t file, const K3SweepInfo *info, const K3Sweep *sweep)
{
  hsize_t C = (hsize_t)sweep->contexts, R = (hsize_t)sweep->repeats, N = (hsize_t)sweep->steps,
          P = (hsize_t)sweep->phases;
  hsize_t steps[] = {C, K3_SWEEP_ARMS, R, K3_SWEEP_BLOCKS, N}, phases[] = {C, K3_SWEEP_WHENS, K3_SWEEP_ARMS, N, P},
          tokens[] = {C, K3_SWEEP_ARMS, N};
  K3_TRY(k3_hdf5_put_numbers(path, file, "/contexts", 0, 1, &C, sweep->context, "position", "context",
                             "positions cached before the first, untimed step of a block"));
  K3_TRY(k3_hdf5_put_group(path, file, "/timings"));
  K3_TRY(k3_hdf5_put_numbers(path, file, "/timings/step_ms", 1, 5, steps, sweep->step_ms, "ms",
                             "context, arm, repeat, block, step", "wall time of a step on the slowest rank"));
  K3_TRY(k3_hdf5_put_numbers(path, file, "/timings/same_arm_step_ms", 1, 5, steps, sweep->same_ms, "ms",
                             "context, of the pair, repeat, block, step",
                             "the A/A pair: one arm interleaved with itself"));
  K3_TRY(k3_hdf5_put_numbers(path, file, "/timings/phase_ms", 1, 5, phases, sweep->phase_ms, "ms",
                             "context, before and after, arm, step, phase",
                             "time of a phase on the slowest rank, in blocks of their own"));
  K3_TRY(k3_hdf5_put_texts(path, file, "/timings/phase_names", 1, &P, info->phase_names));
  K3_TRY(k3_hdf5_put_numbers(path, file, "/timings/phase_touched", 0, 1, &P, info->phase_touched, NULL, "phase",
                             "1: the arms differ in this phase; 0: a control"));
  return k3_hdf5_put_numbers(path, file, "/tokens", 0, 3, tokens, sweep->token, "token id", "context, arm, step",
                             "tokens chosen in an arm's first block; -1: no such arm");
}

static K3Status put_derived(const char *path, hid_t file, const K3SweepInfo *info, const K3Sweep *sweep)
{
  static const char *const names[K3_SWEEP_STATISTICS] = {"median", "min", "max", "p10", "p90"};
  hsize_t C = (hsize_t)sweep->contexts, P = (hsize_t)sweep->phases, S = K3_SWEEP_STATISTICS;
  hsize_t cells[] = {C, K3_SWEEP_ARMS, S}, repeats[] = {C, (hsize_t)sweep->repeats},
          control[] = {C, K3_SWEEP_WHENS, K3_SWEEP_ARMS, P}, bytes[] = {C, K3_SWEEP_ARMS, K3_STEP_PARTS};
  K3_TRY(k3_hdf5_put_group(path, file, "/curve"));
  K3_TRY(k3_hdf5_put_texts(path, file, "/curve/statistic_names", 1, &S, names));
  K3_TRY(k3_hdf5_put_numbers(path, file, "/curve/step_ms", 1, 3, cells, sweep->statistic_ms, "ms",
                             "context, arm, statistic", "over all repeats, blocks and steps"));
  K3_TRY(k3_hdf5_put_numbers(path, file, "/curve/same_arm_step_ms", 1, 3, cells, sweep->same_statistic_ms, "ms",
                             "context, of the pair, statistic", "the same of the A/A pair"));
  K3_TRY(k3_hdf5_put_numbers(path, file, "/curve/difference_ms", 1, 1, &C, sweep->difference_ms, "ms", "context",
                             "median of B - median of A"));
  K3_TRY(k3_hdf5_put_numbers(path, file, "/curve/repeat_difference_ms", 1, 2, repeats, sweep->repeat_difference_ms,
                             "ms", "context, repeat", "median of B - median of A, repeat by repeat"));
  K3_TRY(k3_hdf5_put_numbers(path, file, "/curve/same_arm_difference_ms", 1, 2, repeats, sweep->same_difference_ms,
                             "ms", "context, repeat", "difference of medians of the A/A pair"));
  K3_TRY(k3_hdf5_put_numbers(
      path, file, "/curve/own_floor_ms", 1, 1, &C, sweep->own_floor_ms, "ms", "context",
      "the largest same_arm_difference_ms without sign; where both arms run the same plan, their difference too"));
  K3_TRY(k3_hdf5_put_numbers(
      path, file, "/curve/floor_ms", 1, 1, &C, sweep->floor_ms, "ms", "context",
      "noise floor: the largest own_floor_ms of all contexts, in ms or as a share of the A/A median, whichever is "
      "less; at least own_floor_ms"));
  K3_TRY(k3_hdf5_put_numbers(path, file, "/curve/same_path", 0, 1, &C, sweep->same_path, NULL, "context",
                             "1: both arms run the same plan, their difference is noise"));
  K3_TRY(k3_hdf5_put_numbers(
      path, file, "/curve/above_floor", 0, 1, &C, sweep->above_floor, NULL, "context",
      "1: the difference is larger than the floor and has one sign in all repeats; 0: no difference"));
  K3_TRY(k3_hdf5_put_numbers(path, file, "/curve/depth_ms", 1, 2, cells, sweep->depth_ms, "ms", "context, arm",
                             "median at this context - median at the first"));
  K3_TRY(k3_hdf5_put_numbers(path, file, "/curve/depth_floor_ms", 1, 2, cells, sweep->depth_floor_ms, "ms",
                             "context, arm",
                             "floors of both contexts + how far the control phases moved between them"));
  K3_TRY(k3_hdf5_put_texts(path, file, "/curve/step_bytes_names", 1, &bytes[2], k3_step_part_names));
  K3_TRY(k3_hdf5_put_numbers(path, file, "/curve/step_bytes", 0, 3, bytes, info->step_bytes, "byte",
                             "context, arm, part",
                             "what a step must move through the busiest rank's memory, by the plan (not measured)"));
  return k3_hdf5_put_numbers(path, file, "/curve/control_ms", 1, 4, control, sweep->control_ms, "ms",
                             "context, before and after, arm, phase", "medians of /timings/phase_ms");
}

typedef struct {
  const K3SweepInfo *info;
  const K3Sweep *sweep;
} Content;

static K3Status fill(const char *path, hid_t file, const void *context)
{
  const Content *content = context;
  K3_TRY(put_description(path, file, content->info, content->sweep));
  K3_TRY(put_arms(path, file, content->sweep));
  K3_TRY(put_times(path, file, content->info, content->sweep));
  return put_derived(path, file, content->info, content->sweep);
}

K3Status k3_sweep_file_check(const char *path, int overwrite)
{
  return k3_partial_check(path, overwrite, K3_SWEEP_FORMAT, "sweep file");
}

K3Status k3_sweep_file_write(const char *path, const K3SweepInfo *info, const K3Sweep *sweep)
{
  const Content content = {info, sweep};
  K3_TRY(k3_sweep_file_check(path, info->overwrite));
  return k3_hdf5_write_image(path, fill, &content);
}

/* ---------------------------------------------------------------- reading */

enum { DESCRIPTIONS = 7, LONG_TEXT = 4096, SHORT_TEXT = 256 };

static K3Status read_description(const char *path, hid_t file, K3SweepPage *page, int64_t count[3])
{
  K3SweepInfo *info = &page->info;
  const char **const text[DESCRIPTIONS] = {&info->version, &info->model,      &info->backend, &info->devices,
                                           &info->command, &info->start_time, &info->kind};
  static const char *const names[DESCRIPTIONS] = {"program_version", "model",      "backend", "devices",
                                                  "command",         "start_time", "kind"};
  static const char *const counts[3] = {"steps", "repeats", "ranks"};
  for (int i = 0; i < DESCRIPTIONS; i++) {
    *text[i] = page->texts + i * LONG_TEXT;
    K3_TRY(k3_hdf5_read_text(path, file, "/", names[i], page->texts + i * LONG_TEXT, LONG_TEXT));
  }
  for (int i = 0; i < 3; i++) {
    K3_TRY(k3_hdf5_read_number(path, file, "/", counts[i], H5T_INTEGER, H5T_NATIVE_INT64, &count[i]));
    if (count[i] < 1 || count[i] > INT32_MAX)
      K3_FAIL(K3_ERR_INPUT, "%s: attribute %s is %lld, wanted 1 or more", path, counts[i], (long long)count[i]);
  }
  info->ranks = (int)count[2];
  char *versions = page->texts + DESCRIPTIONS * LONG_TEXT;
  snprintf(versions, LONG_TEXT, "k3decode %.64s", info->version); /* the first files say no more */
  info->versions = versions;
  if (H5Aexists(file, "versions") > 0) K3_TRY(k3_hdf5_read_text(path, file, "/", "versions", versions, LONG_TEXT));
  K3_TRY(k3_hdf5_read_number(path, file, "/", "seed", H5T_INTEGER, H5T_NATIVE_INT64, &info->seed));
  K3_TRY(k3_hdf5_read_number(path, file, "/", "capacity", H5T_INTEGER, H5T_NATIVE_INT64, &info->capacity));
  return k3_hdf5_read_number(path, file, "/", "model_digest", H5T_INTEGER, H5T_NATIVE_UINT64, &info->model_digest);
}

/* Names of arms and phases, and the lines about attention. */
static K3Status read_names(const char *path, hid_t file, K3SweepPage *page)
{
  K3Sweep *sweep = &page->sweep;
  hsize_t two = K3_SWEEP_ARMS, P = (hsize_t)sweep->phases, cells[2] = {(hsize_t)sweep->contexts, K3_SWEEP_ARMS};
  char *arm = page->texts + (DESCRIPTIONS + 1) * LONG_TEXT, *lack = arm + K3_SWEEP_ARMS * SHORT_TEXT,
       *phase = lack + K3_SWEEP_ARMS * SHORT_TEXT;
  K3_TRY(k3_hdf5_read_texts(path, file, "/arms/names", 1, &two, SHORT_TEXT, arm));
  K3_TRY(k3_hdf5_read_texts(path, file, "/arms/missing_because", 1, &two, SHORT_TEXT, lack));
  K3_TRY(k3_hdf5_read_texts(path, file, "/arms/attention", 2, cells, K3_SWEEP_TEXT_BYTES, (char *)sweep->attention));
  K3_TRY(k3_hdf5_read_texts(path, file, "/timings/phase_names", 1, &P, SHORT_TEXT, phase));
  for (int a = 0; a < K3_SWEEP_ARMS; a++) {
    sweep->arm[a] = arm + a * SHORT_TEXT;
    sweep->lack[a] = lack[a * SHORT_TEXT] ? lack + a * SHORT_TEXT : NULL;
  }
  sweep->base = sweep->lack[0] != NULL;
  for (int64_t p = 0; p < sweep->phases; p++) page->phase_names[p] = phase + p * SHORT_TEXT;
  page->info.phase_names = page->phase_names;
  page->info.phase_touched = page->phase_touched;
  return K3_OK;
}

static K3Status read_numbers(const char *path, hid_t file, K3SweepPage *page)
{
  K3Sweep *sweep = &page->sweep;
  hsize_t C = (hsize_t)sweep->contexts, P = (hsize_t)sweep->phases;
  hsize_t cells[] = {C, K3_SWEEP_ARMS, K3_SWEEP_STATISTICS}, control[] = {C, K3_SWEEP_WHENS, K3_SWEEP_ARMS, P},
          tokens[] = {C, K3_SWEEP_ARMS, (hsize_t)sweep->steps};
  const struct {
    const char *name;
    int real, axes;
    const hsize_t *size;
    void *value;
  } all[] = {{"/contexts", 0, 1, &C, sweep->context},
             {"/timings/phase_touched", 0, 1, &P, page->phase_touched},
             {"/tokens", 0, 3, tokens, sweep->token},
             {"/curve/step_ms", 1, 3, cells, sweep->statistic_ms},
             {"/curve/same_arm_step_ms", 1, 3, cells, sweep->same_statistic_ms},
             {"/curve/difference_ms", 1, 1, &C, sweep->difference_ms},
             {"/curve/own_floor_ms", 1, 1, &C, sweep->own_floor_ms},
             {"/curve/floor_ms", 1, 1, &C, sweep->floor_ms},
             {"/curve/same_path", 0, 1, &C, sweep->same_path},
             {"/curve/above_floor", 0, 1, &C, sweep->above_floor},
             {"/curve/depth_ms", 1, 2, cells, sweep->depth_ms},
             {"/curve/depth_floor_ms", 1, 2, cells, sweep->depth_floor_ms},
             {"/curve/control_ms", 1, 4, control, sweep->control_ms}};
  for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
    K3_TRY(k3_hdf5_read_numbers(path, file, all[i].name, all[i].real, all[i].axes, all[i].size, all[i].value));
  return K3_OK;
}

static K3Status read_page(const char *path, hid_t file, K3SweepPage *page)
{
  enum { MOST = 1 << 16 };
  hsize_t phases = 0, tokens[3] = {0};
  int64_t count[3];
  K3_TRY(k3_hdf5_read_shape(path, file, "/timings/phase_names", 1, &phases));
  K3_TRY(k3_hdf5_read_shape(path, file, "/tokens", 3, tokens));
  if (tokens[0] < 1 || tokens[0] > MOST || tokens[1] != K3_SWEEP_ARMS || tokens[2] > MOST || phases < 1 ||
      phases > 1024)
    K3_FAIL(K3_ERR_INPUT, "%s: tokens of %llu contexts x %llu arms x %llu steps, %llu phases: no sweep is like that",
            path, (unsigned long long)tokens[0], (unsigned long long)tokens[1], (unsigned long long)tokens[2],
            (unsigned long long)phases);
  page->texts = calloc(1, (DESCRIPTIONS + 1) * LONG_TEXT + (2 * K3_SWEEP_ARMS + (size_t)phases) * SHORT_TEXT);
  page->phase_names = calloc((size_t)phases, sizeof *page->phase_names);
  page->phase_touched = calloc((size_t)phases, sizeof *page->phase_touched);
  if (!page->texts || !page->phase_names || !page->phase_touched) K3_FAIL(K3_ERR_INPUT, "%s: no memory", path);
  K3_TRY(read_description(path, file, page, count));
  if ((hsize_t)count[0] != tokens[2])
    K3_FAIL(K3_ERR_INPUT, "%s: attribute steps is %lld, and dataset /tokens has %llu", path, (long long)count[0],
            (unsigned long long)tokens[2]);
  K3_TRY(
      k3_sweep_open(&page->sweep, (int64_t)tokens[0], 1, count[0], (int64_t)phases)); /* no times of single repeats */
  page->sweep.repeats = count[1];
  page->sweep.done = page->sweep.contexts;
  K3_TRY(read_names(path, file, page));
  return read_numbers(path, file, page);
}

K3Status k3_sweep_file_read(const char *path, K3SweepPage **page)
{
  hid_t file;
  *page = NULL;
  K3_TRY(k3_hdf5_open_image(path, K3_SWEEP_FORMAT, "sweep", K3_SWEEP_FORMAT_VERSION, &file));
  K3SweepPage *made = calloc(1, sizeof *made);
  K3Status status =
      made ? read_page(path, file, made) : k3_status_fail(K3_ERR_INPUT, __FILE__, __LINE__, "%s: no memory", path);
  H5Fclose(file);
  if (status == K3_OK) *page = made;
  else k3_sweep_page_close(made);
  return status;
}

void k3_sweep_page_close(K3SweepPage *page)
{
  if (!page) return;
  k3_sweep_close(&page->sweep);
  free(page->texts);
  free(page->phase_names);
  free(page->phase_touched);
  free(page);
}
