/* See tuning_file.h. Layer: store. */
#include "store/tuning_file.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

#include "store/hdf5_attribute.h"
#include "store/hdf5_dataset.h"
#include "store/hdf5_image.h"
#include "store/hdf5_output.h"
#include "store/partial_file.h"

typedef struct {
  const char *name, *units, *meaning;
  int real;
  size_t offset; /* in K3AttentionTrial */
} Column;

#define WHOLE(member, units, meaning)                              \
  {                                                                \
#member, units, meaning, 0, offsetof(K3AttentionTrial, member) \
  }
#define REAL(member, units, meaning)                               \
  {                                                                \
#member, units, meaning, 1, offsetof(K3AttentionTrial, member) \
  }

static const Column columns[] = {
    WHOLE(kernel, NULL, "slice kernel: 0 for CUDA cores, 1 for tensor cores"),
    WHOLE(heads, "head", "heads that the rank attends for"),
    WHOLE(rows, "row", "cached rows of the rank"),
    WHOLE(heads_per_pass, "head", "width of the kernel: heads that one pass over the cache serves"),
    WHOLE(tile_rows, "row", "rows of a tile"),
    WHOLE(passes, NULL, "passes over the cache"),
    WHOLE(slices, NULL, "slices that the rows are cut into"),
    WHOLE(blocks, NULL, "grid: passes x slices"),
    WHOLE(registers, NULL, "registers a thread"),
    WHOLE(shared_bytes, "byte", "shared memory a block"),
    WHOLE(blocks_per_sm, NULL, "blocks resident on a multiprocessor"),
    REAL(slice_ms, "ms", "the slice kernel, median"),
    REAL(slice_p10, "ms", "the slice kernel, 10th percentile"),
    REAL(slice_p90, "ms", "the slice kernel, 90th percentile"),
    REAL(ms, "ms", "slice kernel and merge of its partials, median"),
    REAL(p10, "ms", "slice kernel and merge, 10th percentile"),
    REAL(p90, "ms", "slice kernel and merge, 90th percentile"),
    REAL(gbs, "GB/s", "the cache's rows, each counted once, over slice_ms"),
    WHOLE(planned, NULL, "1: what the planner takes by itself"),
    WHOLE(step, NULL, "1: fewer resident blocks than the next narrower width (occupancy step)"),
    WHOLE(chosen, NULL, "1: plans of rows_from to rows_to rows take this one"),
    WHOLE(rows_from, "row", "first row count that the chosen one serves, 0 of the others"),
    WHOLE(rows_to, "row", "last row count that the chosen one serves, 0 of the others"),
};
enum { COLUMNS = sizeof columns / sizeof columns[0] };

static void column_path(const Column *column, char path[64]) { snprintf(path, 64, "/trials/%s", column->name); }

/* Between a column of 8-byte values and the rows of the table. */
static void copy_column(const Column *column, K3AttentionTuning *tuning, void *values, int into_rows)
{
  for (int64_t i = 0; i < tuning->count; i++) {
    char *member = (char *)&tuning->trial[i] + column->offset, *value = (char *)values + 8 * i;
    memcpy(into_rows ? member : value, into_rows ? value : member, 8);
  }
}

/* --- writing ------------------------------------------------------------------------------------------ */

static K3Status fill(const char *path, hid_t file, const void *context)
{
  const K3TuningFile *content = context;
  const K3AttentionTuning *tuning = &content->tuning;
  K3AttentionTuning rows = *tuning;
  hsize_t count = (hsize_t)tuning->count;
  K3Status status = K3_OK;
  void *values = malloc(8 * (size_t)count + 1);
  if (!values) K3_FAIL(K3_ERR_INPUT, "output %s: no memory", path);
  const struct {
    const char *name, *text;
  } texts[] = {{"format", K3_TUNING_FORMAT},          {"program_version", content->version},
               {"command", content->command},         {"start_time", content->start_time},
               {"versions", content->versions},       {"model", content->model},
               {"device_line", content->device_line}, {"device", tuning->device},
               {"kernels", tuning->kernels},          {"cache", tuning->cache}};
  const struct {
    const char *name;
    int64_t value;
  } numbers[] = {{"format_version", K3_TUNING_FORMAT_VERSION},
                 {"multiprocessors", tuning->multiprocessors},
                 {"num_heads", tuning->num_heads},
                 {"kv_lora_rank", tuning->latent},
                 {"qk_rope_head_dim", tuning->rope}};
  for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++)
    K3_TRY_DONE(k3_hdf5_put_text(path, file, texts[i].name, texts[i].text));
  for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
    K3_TRY_DONE(k3_hdf5_put_integer(path, file, numbers[i].name, numbers[i].value));
  K3_TRY_DONE(
      k3_hdf5_put_attribute(path, file, "model_digest", H5T_STD_U64LE, H5T_NATIVE_UINT64, &content->model_digest));
  K3_TRY_DONE(k3_hdf5_put_group(path, file, "/trials"));
  for (int c = 0; c < COLUMNS; c++) {
    char name[64];
    column_path(&columns[c], name);
    copy_column(&columns[c], &rows, values, 0);
    K3_TRY_DONE(k3_hdf5_put_numbers(path, file, name, columns[c].real, 1, &count, values, columns[c].units, "trial",
                                    columns[c].meaning));
  }
done:
  free(values);
  return status;
}

K3Status k3_tuning_file_check(const char *path, int overwrite)
{
  return k3_partial_check(path, overwrite, K3_TUNING_FORMAT, "tuning file");
}

K3Status k3_tuning_file_write(const char *path, int overwrite, const K3TuningFile *content)
{
  K3_TRY(k3_tuning_file_check(path, overwrite));
  return k3_hdf5_write_image(path, fill, content);
}

/* --- reading ------------------------------------------------------------------------------------------ */

/* A plan must be able to take any chosen trial, whoever wrote the file. */
static K3Status check_trial(const char *path, const K3AttentionTuning *tuning, int64_t i)
{
  enum { MOST = 1 << 20 };
  const K3AttentionTrial *t = &tuning->trial[i];
  if (t->kernel != K3_ATTENTION_KERNEL_CORE && t->kernel != K3_ATTENTION_KERNEL_TENSOR)
    K3_FAIL(K3_ERR_INPUT, "%s: trial %lld: kernel %lld, wanted %d or %d", path, (long long)i, (long long)t->kernel,
            K3_ATTENTION_KERNEL_CORE, K3_ATTENTION_KERNEL_TENSOR);
  if (t->heads < 1 || t->heads > tuning->num_heads || t->heads_per_pass < 1 || t->rows < 1 || t->slices < 1 ||
      t->slices > MOST || !(t->ms > 0.0) || t->rows_from < 0 || t->rows_to < t->rows_from)
    K3_FAIL(K3_ERR_INPUT,
            "%s: trial %lld: %lld heads of %lld, %lld a pass, %lld rows (chosen for %lld to %lld), %lld slices, %g ms: "
            "no trial is "
            "like that",
            path, (long long)i, (long long)t->heads, (long long)tuning->num_heads, (long long)t->heads_per_pass,
            (long long)t->rows, (long long)t->rows_from, (long long)t->rows_to, (long long)t->slices, t->ms);
  return K3_OK;
}

static K3Status read_attributes(const char *path, hid_t file, K3TuningFile *content)
{
  K3AttentionTuning *tuning = &content->tuning;
  const struct {
    const char *name;
    char *text;
    size_t size;
  } texts[] = {{"program_version", content->version, sizeof content->version},
               {"command", content->command, sizeof content->command},
               {"start_time", content->start_time, sizeof content->start_time},
               {"versions", content->versions, sizeof content->versions},
               {"model", content->model, sizeof content->model},
               {"device_line", content->device_line, sizeof content->device_line},
               {"device", tuning->device, sizeof tuning->device},
               {"kernels", tuning->kernels, sizeof tuning->kernels},
               {"cache", tuning->cache, sizeof tuning->cache}};
  const struct {
    const char *name;
    int64_t *value;
  } numbers[] = {{"multiprocessors", &tuning->multiprocessors},
                 {"num_heads", &tuning->num_heads},
                 {"kv_lora_rank", &tuning->latent},
                 {"qk_rope_head_dim", &tuning->rope}};
  for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++)
    K3_TRY(k3_hdf5_read_text(path, file, "/", texts[i].name, texts[i].text, texts[i].size));
  for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
    K3_TRY(k3_hdf5_read_number(path, file, "/", numbers[i].name, H5T_INTEGER, H5T_NATIVE_INT64, numbers[i].value));
  return k3_hdf5_read_number(path, file, "/", "model_digest", H5T_INTEGER, H5T_NATIVE_UINT64, &content->model_digest);
}

static K3Status read_trials(const char *path, hid_t file, K3AttentionTuning *tuning)
{
  enum { MOST_TRIALS = 1 << 20 };
  K3Status status = K3_OK;
  hsize_t count = 0;
  K3_TRY(k3_hdf5_read_shape(path, file, "/trials/kernel", 1, &count));
  if (count < 1 || count > MOST_TRIALS)
    K3_FAIL(K3_ERR_INPUT, "%s: %llu trials, wanted 1 to %d", path, (unsigned long long)count, MOST_TRIALS);
  void *values = malloc(8 * (size_t)count);
  tuning->trial = calloc((size_t)count, sizeof *tuning->trial);
  tuning->count = (int64_t)count;
  if (!values || !tuning->trial)
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: no memory for %llu trials", path, (unsigned long long)count);
  for (int c = 0; c < COLUMNS; c++) {
    char name[64];
    column_path(&columns[c], name);
    K3_TRY_DONE(k3_hdf5_read_numbers(path, file, name, columns[c].real, 1, &count, values));
    copy_column(&columns[c], tuning, values, 1);
  }
  for (int64_t i = 0; i < tuning->count; i++) K3_TRY_DONE(check_trial(path, tuning, i));
done:
  free(values);
  return status;
}

K3Status k3_tuning_file_read(const char *path, K3TuningFile **content)
{
  hid_t file;
  *content = NULL;
  K3_TRY(k3_hdf5_open_image(path, K3_TUNING_FORMAT, "tuning", K3_TUNING_FORMAT_VERSION, &file));
  K3TuningFile *made = calloc(1, sizeof *made);
  K3Status status = made ? read_attributes(path, file, made)
                         : k3_status_fail(K3_ERR_INPUT, __FILE__, __LINE__, "%s: no memory", path);
  if (status == K3_OK) status = read_trials(path, file, &made->tuning);
  H5Fclose(file);
  if (status == K3_OK) *content = made;
  else k3_tuning_file_close(made);
  return status;
}

void k3_tuning_file_close(K3TuningFile *content)
{
  if (content) free(content->tuning.trial);
  free(content);
}
