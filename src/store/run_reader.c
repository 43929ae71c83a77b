/* Reads a run file. See run_reader.h. Layer: store. */
#include "store/run_reader.h"

#include <errno.h>
#include <fcntl.h>
#include <hdf5.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "store/hdf5_error.h"
#include "store/snapshot_file.h"
#include "store/sweep_file.h"
#include "store/tuning_file.h"

/* A failure of the HDF5 call just made; an expression. */
#define HDF5_FAIL(format, ...) \
  k3_status_fail(K3_ERR_INPUT, __FILE__, __LINE__, format ": %s", __VA_ARGS__, K3_HDF5_REASON)

enum { TOKEN_IDS, LOGITS, TOP_IDS, TOP_LOGITS, STEP_MS, RANK_STEP_MS, PHASE_MS, COLUMNS };

static const char *const column_path[COLUMNS] = {
  [TOKEN_IDS] = "/decode/token_ids",   [LOGITS] = "/decode/logits",
  [TOP_IDS] = "/decode/top_ids",       [TOP_LOGITS] = "/decode/top_logits",
  [STEP_MS] = "/timings/step_ms",      [RANK_STEP_MS] = "/timings/rank_step_ms",
  [PHASE_MS] = "/timings/phase_ms",
};

struct K3RunReaderState {
  hid_t file;
  hid_t column[COLUMNS]; /* H5I_INVALID_HID: this run has none */
};

/* ---------------------------------------------------------------- opening */

/* Read-only; a file whose writer lives, or was killed, bears a mark that only SWMR readers may ignore. */
static hid_t open_file(const char *path, int *unfinished, K3Hdf5Reason *reason)
{
  *unfinished = 0;
  snprintf(reason->text, sizeof reason->text, "no memory");
  hid_t access = H5Pcreate(H5P_FILE_ACCESS);
  if (access < 0) return access;
#if H5_VERSION_GE(1, 12, 1) || (H5_VERSION_GE(1, 10, 7) && !H5_VERSION_GE(1, 12, 0))
  /* Reading alone needs no lock, and some file systems have none; the mark above still guards. */
  if (H5Pset_file_locking(access, 0, 1) < 0) H5Eclear2(H5E_DEFAULT);
#endif
  hid_t file = H5Fopen(path, H5F_ACC_RDONLY, access);
  /* Only for the mark: SWMR reading would also overlook that a file is truncated. */
  if (file < 0 && strstr(k3_hdf5_reason(reason), "open for writing")) {
    file = H5Fopen(path, H5F_ACC_RDONLY | H5F_ACC_SWMR_READ, access);
    *unfinished = file >= 0;
    if (file < 0) k3_hdf5_reason(reason);
  }
  H5Pclose(access);
  return file;
}

/* A text attribute or scalar text dataset of fixed or variable length, allocated; NULL when it is none. */
static char *read_text(hid_t id, int is_attribute)
{
  char *text = NULL;
  hid_t stored = is_attribute ? H5Aget_type(id) : H5Dget_type(id), memory = H5I_INVALID_HID;
  hid_t space = is_attribute ? H5Aget_space(id) : H5Dget_space(id);
  if (stored < 0 || space < 0 || H5Tget_class(stored) != H5T_STRING || H5Sget_simple_extent_npoints(space) != 1)
    goto done;
  memory = H5Tcopy(H5T_C_S1);
  if (memory < 0 || H5Tset_cset(memory, H5Tget_cset(stored)) < 0) goto done;
  if (H5Tis_variable_str(stored) > 0) {
    char *variable = NULL;
    if (H5Tset_size(memory, H5T_VARIABLE) < 0) goto done;
    if ((is_attribute ? H5Aread(id, memory, &variable)
                      : H5Dread(id, memory, H5S_ALL, H5S_ALL, H5P_DEFAULT, &variable)) >= 0) {
      text = strdup(variable ? variable : "");
      H5Dvlen_reclaim(memory, space, H5P_DEFAULT, &variable);
    }
  } else {
    size_t bytes = H5Tget_size(stored);
    if (bytes == 0 || bytes > ((size_t)1 << 28) || H5Tset_size(memory, bytes + 1) < 0) goto done;
    text = calloc(1, bytes + 1);
    if (text && (is_attribute ? H5Aread(id, memory, text)
                              : H5Dread(id, memory, H5S_ALL, H5S_ALL, H5P_DEFAULT, text)) < 0) {
      free(text);
      text = NULL;
    }
  }
done:
  if (memory >= 0) H5Tclose(memory);
  if (space >= 0) H5Sclose(space);
  if (stored >= 0) H5Tclose(stored);
  return text;
}

static char *find_text_attribute(hid_t where, const char *name)
{
  if (H5Aexists(where, name) <= 0) return NULL;
  hid_t attribute = H5Aopen(where, name, H5P_DEFAULT);
  if (attribute < 0) return NULL;
  char *text = read_text(attribute, 1);
  H5Aclose(attribute);
  return text;
}

K3FileKind k3_run_reader_recognise(const char *path)
{
  struct stat found;
  int descriptor = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK), unfinished; /* a FIFO without a writer must not hold us */
  if (descriptor < 0) return K3_FILE_UNREADABLE;
  if (fstat(descriptor, &found) == 0 && (S_ISFIFO(found.st_mode) || S_ISCHR(found.st_mode) || S_ISSOCK(found.st_mode))) {
    close(descriptor);
    return K3_FILE_NOT_HDF5;
  }
  char signature[sizeof K3_SNAPSHOT_FORMAT] = "";
  ssize_t count = read(descriptor, signature, sizeof signature - 1);
  close(descriptor);
  if (count < 0) return K3_FILE_UNREADABLE; /* a directory */
  if (strcmp(signature, K3_SNAPSHOT_FORMAT) == 0) return K3_FILE_SNAPSHOT; /* its seal, before HDF5's own beginning */
  k3_hdf5_silence();
  K3Hdf5Reason reason;
  hid_t file = open_file(path, &unfinished, &reason);
  if (file < 0) {
    H5Eclear2(H5E_DEFAULT);
    return memcmp(signature, "\211HDF\r\n\032\n", 8) == 0 ? K3_FILE_DAMAGED : K3_FILE_NOT_HDF5;
  }
  K3FileKind kind = K3_FILE_FOREIGN;
  char *format = find_text_attribute(file, "format");
  if (format && strcmp(format, K3_RUN_FORMAT) == 0) kind = K3_FILE_RUN;
  if (format && strcmp(format, "k3decode-model") == 0) kind = K3_FILE_MODEL;
  if (format && strcmp(format, K3_SNAPSHOT_FORMAT) == 0) kind = K3_FILE_SNAPSHOT;
  if (format && strcmp(format, K3_SWEEP_FORMAT) == 0) kind = K3_FILE_SWEEP;
  if (format && strcmp(format, K3_TUNING_FORMAT) == 0) kind = K3_FILE_TUNING;
  free(format);
  H5Fclose(file);
  H5Eclear2(H5E_DEFAULT);
  return kind;
}

/* ---------------------------------------------------------------- attributes, config, fixed datasets */

static K3Status get_text(K3RunReader *run, const char *name, char **text)
{
  *text = find_text_attribute(run->state->file, name);
  if (!*text) K3_FAIL(K3_ERR_INPUT, "%s: root attribute %s is missing or no text", run->path, name);
  return K3_OK;
}

/* A scalar number; `memory` is a native type. Integers are refused where the file holds reals. */
static K3Status get_number(const char *path, hid_t where, const char *place, const char *name, hid_t memory,
                           void *value)
{
  K3Status status = K3_OK;
  hid_t attribute = H5I_INVALID_HID, type = H5I_INVALID_HID, space = H5I_INVALID_HID;
  if (H5Aexists(where, name) <= 0) K3_FAIL(K3_ERR_INPUT, "%s: attribute %s%s is missing", path, place, name);
  attribute = H5Aopen(where, name, H5P_DEFAULT);
  if (attribute < 0 || (type = H5Aget_type(attribute)) < 0 || (space = H5Aget_space(attribute)) < 0) {
    status = HDF5_FAIL("%s: attribute %s%s cannot be read", path, place, name);
    goto done;
  }
  H5T_class_t class = H5Tget_class(type), wanted = H5Tget_class(memory);
  if ((class != H5T_INTEGER && class != H5T_FLOAT && class != H5T_ENUM) ||
      (wanted == H5T_INTEGER && class == H5T_FLOAT) || H5Sget_simple_extent_npoints(space) != 1)
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: attribute %s%s is no scalar %s", path, place, name,
                 wanted == H5T_INTEGER ? "integer" : "number");
  if (class == H5T_ENUM) { /* h5py's bool */
    signed char flag = 0;
    if (H5Aread(attribute, type, &flag) < 0) status = HDF5_FAIL("%s: attribute %s%s cannot be read", path, place, name);
    memset(value, 0, H5Tget_size(memory));
    *(char *)value = flag;
  } else if (H5Aread(attribute, memory, value) < 0) {
    status = HDF5_FAIL("%s: attribute %s%s cannot be read", path, place, name);
  }
done:
  if (space >= 0) H5Sclose(space);
  if (type >= 0) H5Tclose(type);
  if (attribute >= 0) H5Aclose(attribute);
  return status;
}

/* Opens a dataset and checks its axes: sizes [axes], -1 for any (it is then filled in). */
static K3Status open_dataset(K3RunReader *run, const char *name, int axes, int64_t *sizes, H5T_class_t class,
                             hid_t *dataset)
{
  K3Status status = K3_OK;
  hid_t space = H5I_INVALID_HID, type = H5I_INVALID_HID;
  *dataset = H5Dopen2(run->state->file, name, H5P_DEFAULT);
  if (*dataset < 0) return HDF5_FAIL("%s: dataset %s is missing or cannot be opened", run->path, name);
  hsize_t found[H5S_MAX_RANK];
  if ((space = H5Dget_space(*dataset)) < 0 || (type = H5Dget_type(*dataset)) < 0) {
    status = HDF5_FAIL("%s: dataset %s cannot be read", run->path, name);
    goto done;
  }
  int found_axes = H5Sget_simple_extent_dims(space, found, NULL);
  if (found_axes != axes)
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: dataset %s has %d axes, wanted %d", run->path, name, found_axes, axes);
  if (H5Tget_class(type) != class)
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: dataset %s has the wrong type, wanted %s", run->path, name,
                 class == H5T_INTEGER ? "integers" : class == H5T_FLOAT ? "floating point numbers" : "text");
  for (int i = 0; i < axes; i++) {
    if (sizes[i] >= 0 && found[i] != (hsize_t)sizes[i])
      K3_FAIL_DONE(K3_ERR_INPUT, "%s: dataset %s has %llu along axis %d, wanted %lld", run->path, name,
                   (unsigned long long)found[i], i, (long long)sizes[i]);
    sizes[i] = (int64_t)found[i];
  }
done:
  if (type >= 0) H5Tclose(type);
  if (space >= 0) H5Sclose(space);
  if (status != K3_OK) {
    H5Dclose(*dataset);
    *dataset = H5I_INVALID_HID;
  }
  return status;
}

static K3Status get_config(K3RunReader *run)
{
  K3Status status = K3_OK;
  K3Config *config = &run->config;
  hid_t layers = H5I_INVALID_HID, group = H5Gopen2(run->state->file, "/config", H5P_DEFAULT);
  if (group < 0) return HDF5_FAIL("%s: group /config is missing", run->path);
  for (int i = 0; i < k3_config_field_count; i++) {
    const K3ConfigField *field = &k3_config_fields[i];
    hid_t memory = field->kind == K3_FIELD_INTEGER ? H5T_NATIVE_INT64
                   : field->kind == K3_FIELD_REAL  ? H5T_NATIVE_DOUBLE
                                                   : H5T_NATIVE_UINT8;
    K3_TRY_DONE(get_number(run->path, group, "/config:", field->name, memory, (char *)config + field->offset));
  }
  if (config->num_layers < 1 || config->num_layers > K3_MAX_LAYERS)
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: config field num_layers = %lld, wanted 1 to %d", run->path,
                 (long long)config->num_layers, K3_MAX_LAYERS);
  int64_t count = config->num_layers;
  K3_TRY_DONE(open_dataset(run, "/config/layer_types", 1, &count, H5T_INTEGER, &layers));
  if (H5Dread(layers, H5T_NATIVE_UINT8, H5S_ALL, H5S_ALL, H5P_DEFAULT, config->layer_types) < 0) {
    status = HDF5_FAIL("%s: dataset /config/layer_types cannot be read", run->path);
    goto done;
  }
  status = k3_config_check(config, run->path);
done:
  if (layers >= 0) H5Dclose(layers);
  H5Gclose(group);
  return status;
}

static K3Status get_prompt(K3RunReader *run)
{
  hid_t dataset;
  int64_t count = -1;
  K3_TRY(open_dataset(run, "/prompt/token_ids", 1, &count, H5T_INTEGER, &dataset));
  K3Status status = K3_OK;
  run->prompt_count = count;
  run->prompt = calloc((size_t)count + 1, sizeof *run->prompt);
  if (!run->prompt)
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: no memory for %lld prompt tokens", run->path, (long long)count);
  if (H5Dread(dataset, H5T_NATIVE_INT64, H5S_ALL, H5S_ALL, H5P_DEFAULT, run->prompt) < 0)
    status = HDF5_FAIL("%s: dataset /prompt/token_ids cannot be read", run->path);
done:
  H5Dclose(dataset);
  return status;
}

/* A scalar text dataset, read afresh. */
static K3Status get_text_dataset(K3RunReader *run, const char *name, char **text)
{
  hid_t dataset;
  K3_TRY(open_dataset(run, name, 0, NULL, H5T_STRING, &dataset));
  char *found = read_text(dataset, 0);
  H5Dclose(dataset);
  if (!found) return HDF5_FAIL("%s: dataset %s cannot be read", run->path, name);
  free(*text);
  *text = found;
  return K3_OK;
}

/* Fixed-length names [count], as run_file.c writes them. */
static K3Status get_names(K3RunReader *run, const char *name, char ***names, int64_t *count)
{
  hid_t dataset, memory = H5I_INVALID_HID, stored = H5I_INVALID_HID;
  int64_t found = -1;
  K3_TRY(open_dataset(run, name, 1, &found, H5T_STRING, &dataset));
  K3Status status = K3_OK;
  char *text = NULL;
  size_t bytes = 0;
  stored = H5Dget_type(dataset);
  if (stored >= 0 && H5Tis_variable_str(stored) == 0) bytes = H5Tget_size(stored);
  if (bytes == 0 || bytes > 4096 || found < 1 || found > 4096)
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: dataset %s holds no list of fixed-length names", run->path, name);
  memory = H5Tcopy(stored);
  text = calloc((size_t)found, bytes + 1);
  *names = calloc((size_t)found, sizeof **names);
  if (!text || !*names) K3_FAIL_DONE(K3_ERR_INPUT, "%s: no memory for the names of %s", run->path, name);
  *count = found;
  if (memory < 0 || H5Tset_size(memory, bytes + 1) < 0 || H5Tset_strpad(memory, H5T_STR_NULLTERM) < 0 ||
      H5Dread(dataset, memory, H5S_ALL, H5S_ALL, H5P_DEFAULT, text) < 0) {
    status = HDF5_FAIL("%s: dataset %s cannot be read", run->path, name);
    goto done;
  }
  for (int64_t i = 0; i < found; i++) {
    (*names)[i] = strdup(text + (size_t)i * (bytes + 1));
    if (!(*names)[i]) K3_FAIL_DONE(K3_ERR_INPUT, "%s: no memory for the names of %s", run->path, name);
  }
done:
  free(text);
  if (memory >= 0) H5Tclose(memory);
  if (stored >= 0) H5Tclose(stored);
  H5Dclose(dataset);
  return status;
}

/* What a run without phase times, or of an earlier version, has not. */
static K3Status get_optional(K3RunReader *run)
{
  hid_t file = run->state->file, dataset;
  run->resumed_from = find_text_attribute(file, "resumed_from");
  if (!run->resumed_from && !(run->resumed_from = calloc(1, 1))) K3_FAIL(K3_ERR_INPUT, "%s: no memory", run->path);
  if (H5Lexists(file, "/timings/phase_names", H5P_DEFAULT) > 0)
    K3_TRY(get_names(run, "/timings/phase_names", &run->phase_names, &run->phases));
  if (H5Lexists(file, "/timings/step_bytes", H5P_DEFAULT) <= 0) return K3_OK;
  K3_TRY(get_names(run, "/timings/step_bytes_names", &run->part_names, &run->parts));
  int64_t size[2] = {run->ranks, run->parts};
  K3_TRY(open_dataset(run, "/timings/step_bytes", 2, size, H5T_INTEGER, &dataset));
  K3Status status = K3_OK;
  run->step_bytes = calloc((size_t)(run->ranks * run->parts), sizeof *run->step_bytes);
  if (!run->step_bytes) K3_FAIL_DONE(K3_ERR_INPUT, "%s: no memory for /timings/step_bytes", run->path);
  if (H5Dread(dataset, H5T_NATIVE_INT64, H5S_ALL, H5S_ALL, H5P_DEFAULT, run->step_bytes) < 0)
    status = HDF5_FAIL("%s: dataset /timings/step_bytes cannot be read", run->path);
done:
  H5Dclose(dataset);
  return status;
}

static K3Status get_logits_kind(K3RunReader *run)
{
  char *text = NULL;
  K3_TRY(get_text(run, "logits", &text));
  long long top = 0;
  char rest;
  K3Status status = K3_OK;
  if (strcmp(text, "all") == 0) {
    run->logits = K3_LOGITS_ALL;
  } else if (strcmp(text, "none") == 0) {
    run->logits = K3_LOGITS_NONE;
  } else if (sscanf(text, "top:%lld%c", &top, &rest) == 1 && top >= 1 && top <= run->config.vocab_size) {
    run->logits = K3_LOGITS_TOP;
    run->top = top;
  } else {
    status = k3_status_fail(K3_ERR_INPUT, __FILE__, __LINE__,
                            "%s: root attribute logits = \"%s\", wanted all, none or top:K", run->path, text);
  }
  free(text);
  return status;
}

/* Rows that a column holds by now. */
static K3Status check_rows(K3RunReader *run, int which, uint64_t steps)
{
  hid_t dataset = run->state->column[which];
  hsize_t size[3] = {0, 0, 0};
  if (dataset < 0) return K3_OK;
  if (run->unfinished && H5Drefresh(dataset) < 0)
    return HDF5_FAIL("%s: dataset %s cannot be refreshed", run->path, column_path[which]);
  hid_t space = H5Dget_space(dataset);
  if (space < 0 || H5Sget_simple_extent_dims(space, size, NULL) < 0) {
    K3Status status = HDF5_FAIL("%s: dataset %s cannot be read", run->path, column_path[which]);
    if (space >= 0) H5Sclose(space);
    return status;
  }
  H5Sclose(space);
  if (size[0] < steps)
    K3_FAIL(K3_ERR_INPUT, "%s: dataset %s has %llu rows, fewer than the %llu of /decode/steps", run->path,
            column_path[which], (unsigned long long)size[0], (unsigned long long)steps);
  return K3_OK;
}

/* Whole steps. The count is read before the columns are refreshed: what it counts was flushed before it. */
static K3Status get_steps(K3RunReader *run)
{
  hid_t dataset;
  uint64_t steps = 0;
  K3_TRY(open_dataset(run, "/decode/steps", 0, NULL, H5T_INTEGER, &dataset));
  herr_t read = H5Dread(dataset, H5T_NATIVE_UINT64, H5S_ALL, H5S_ALL, H5P_DEFAULT, &steps);
  K3Status status = read < 0 ? HDF5_FAIL("%s: dataset /decode/steps cannot be read", run->path) : K3_OK;
  H5Dclose(dataset);
  if (status != K3_OK) return status;
  for (int i = 0; i < COLUMNS; i++) K3_TRY(check_rows(run, i, steps));
  run->steps = (int64_t)steps;
  return K3_OK;
}

static K3Status open_columns(K3RunReader *run)
{
  hid_t *column = run->state->column;
  int64_t one[1] = {-1}, two[2] = {-1, run->ranks}, three[3] = {-1, run->ranks, run->phases};
  K3_TRY(open_dataset(run, column_path[TOKEN_IDS], 1, one, H5T_INTEGER, &column[TOKEN_IDS]));
  one[0] = -1;
  K3_TRY(open_dataset(run, column_path[STEP_MS], 1, one, H5T_FLOAT, &column[STEP_MS]));
  K3_TRY(open_dataset(run, column_path[RANK_STEP_MS], 2, two, H5T_FLOAT, &column[RANK_STEP_MS]));
  if (run->phases > 0)
    K3_TRY(open_dataset(run, column_path[PHASE_MS], 3, three, H5T_FLOAT, &column[PHASE_MS]));
  two[0] = -1;
  two[1] = run->logits == K3_LOGITS_ALL ? run->config.vocab_size : run->top;
  if (run->logits == K3_LOGITS_ALL)
    return open_dataset(run, column_path[LOGITS], 2, two, H5T_FLOAT, &column[LOGITS]);
  if (run->logits == K3_LOGITS_TOP) {
    K3_TRY(open_dataset(run, column_path[TOP_IDS], 2, two, H5T_INTEGER, &column[TOP_IDS]));
    two[0] = -1;
    K3_TRY(open_dataset(run, column_path[TOP_LOGITS], 2, two, H5T_FLOAT, &column[TOP_LOGITS]));
  }
  return K3_OK;
}

static K3Status get_description(K3RunReader *run)
{
  hid_t file = run->state->file;
  int64_t version = 0;
  char *format = find_text_attribute(file, "format");
  int is_run = format && strcmp(format, K3_RUN_FORMAT) == 0, is_model = format && strcmp(format, "k3decode-model") == 0;
  free(format);
  if (!is_run)
    K3_FAIL(K3_ERR_INPUT, "%s is %s, not a run file (root attribute format = \"" K3_RUN_FORMAT "\")", run->path,
            is_model ? "a model file" : "some other HDF5 file");
  K3_TRY(get_number(run->path, file, "/:", "format_version", H5T_NATIVE_INT64, &version));
  if (version != K3_RUN_FORMAT_VERSION)
    K3_FAIL(K3_ERR_INPUT, "%s: format_version %lld, this program reads %d", run->path, (long long)version,
            K3_RUN_FORMAT_VERSION);
  K3_TRY(get_text(run, "program_version", &run->program_version));
  K3_TRY(get_text(run, "model", &run->model));
  K3_TRY(get_number(run->path, file, "/:", "model_digest", H5T_NATIVE_UINT64, &run->model_digest));
  K3_TRY(get_number(run->path, file, "/:", "ranks", H5T_NATIVE_INT64, &run->ranks));
  if (run->ranks < 1 || run->ranks > 1000000)
    K3_FAIL(K3_ERR_INPUT, "%s: root attribute ranks = %lld", run->path, (long long)run->ranks);
  K3_TRY(get_text(run, "backend", &run->backend));
  K3_TRY(get_text(run, "devices", &run->devices));
  K3_TRY(get_text(run, "command", &run->command));
  K3_TRY(get_text(run, "start_time", &run->start_time));
  K3_TRY(get_text(run, "kind", &run->kind));
  K3_TRY(get_number(run->path, file, "/:", "first_context", H5T_NATIVE_INT64, &run->first_context));
  K3_TRY(get_config(run));
  K3_TRY(get_logits_kind(run));
  K3_TRY(get_prompt(run));
  K3_TRY(get_optional(run));
  K3_TRY(get_text_dataset(run, "/plan", &run->plan));
  return K3_OK;
}

K3Status k3_run_reader_open(const char *path, K3RunReader **reader)
{
  K3Status status = K3_OK;
  *reader = NULL;
  k3_hdf5_silence();
  if (path[0] == '\0') K3_FAIL(K3_ERR_INPUT, "the name of a file is empty");
  struct stat found;
  if (stat(path, &found) != 0 || access(path, R_OK) != 0)
    K3_FAIL(K3_ERR_INPUT, "%s cannot be read: %s", path, strerror(errno));
  if (S_ISFIFO(found.st_mode)) K3_FAIL(K3_ERR_INPUT, "%s cannot be read: it is no plain file", path);
  if (strlen(path) >= sizeof((K3RunReader *)0)->path) K3_FAIL(K3_ERR_INPUT, "a path of %zu bytes is too long",
                                                               strlen(path));
  K3RunReader *run = calloc(1, sizeof *run);
  struct K3RunReaderState *state = calloc(1, sizeof *state);
  if (!run || !state) {
    free(run);
    free(state);
    K3_FAIL(K3_ERR_INPUT, "%s: no memory", path);
  }
  strcpy(run->path, path);
  run->state = state;
  for (int i = 0; i < COLUMNS; i++) state->column[i] = H5I_INVALID_HID;
  K3Hdf5Reason reason;
  state->file = open_file(path, &run->unfinished, &reason);
  if (state->file < 0) K3_FAIL_DONE(K3_ERR_INPUT, "%s cannot be opened: %s", path, reason.text);
  K3_TRY_DONE(get_description(run));
  K3_TRY_DONE(open_columns(run));
  K3_TRY_DONE(k3_run_reader_refresh(run));
done:
  if (status != K3_OK)
    k3_run_reader_close(run);
  else
    *reader = run;
  return status;
}

K3Status k3_run_reader_refresh(K3RunReader *run)
{
  K3_TRY(get_text_dataset(run, "/ending", &run->ending));
  return get_steps(run);
}

/* ---------------------------------------------------------------- rows */

/* Rows [first, first + count) of a column; `axes` and `row` describe one row. */
static K3Status read_rows(K3RunReader *run, int which, int64_t first, int64_t count, int axes, const int64_t *row,
                          hid_t memory_type, void *data)
{
  hid_t dataset = run->state->column[which];
  if (dataset < 0) K3_FAIL(K3_ERR_INPUT, "%s has no %s", run->path, column_path[which]);
  if (first < 0 || first + count > run->steps)
    K3_FAIL(K3_ERR_INPUT, "%s: step %lld of %s asked for, it holds %lld", run->path, (long long)(first + count - 1),
            column_path[which], (long long)run->steps);
  if (count == 0) return K3_OK;
  hsize_t begin[3] = {(hsize_t)first, 0, 0}, size[3] = {(hsize_t)count, 1, 1};
  for (int i = 1; i < axes; i++) size[i] = (hsize_t)row[i - 1];
  hid_t space = H5Dget_space(dataset), memory = H5Screate_simple(axes, size, NULL);
  K3Status status = K3_OK;
  if (space < 0 || memory < 0 || H5Sselect_hyperslab(space, H5S_SELECT_SET, begin, NULL, size, NULL) < 0 ||
      H5Dread(dataset, memory_type, memory, space, H5P_DEFAULT, data) < 0)
    status = HDF5_FAIL("%s: rows %lld to %lld of %s cannot be read", run->path, (long long)first,
                          (long long)(first + count - 1), column_path[which]);
  if (memory >= 0) H5Sclose(memory);
  if (space >= 0) H5Sclose(space);
  return status;
}

K3Status k3_run_reader_tokens(K3RunReader *run, int64_t *tokens)
{
  return read_rows(run, TOKEN_IDS, 0, run->steps, 1, NULL, H5T_NATIVE_INT64, tokens);
}

K3Status k3_run_reader_step_ms(K3RunReader *run, double *step_ms)
{
  return read_rows(run, STEP_MS, 0, run->steps, 1, NULL, H5T_NATIVE_DOUBLE, step_ms);
}

K3Status k3_run_reader_rank_step_ms(K3RunReader *run, double *rank_step_ms)
{
  return read_rows(run, RANK_STEP_MS, 0, run->steps, 2, &run->ranks, H5T_NATIVE_DOUBLE, rank_step_ms);
}

K3Status k3_run_reader_phase_ms(K3RunReader *run, double *phase_ms)
{
  int64_t row[2] = {run->ranks, run->phases};
  return read_rows(run, PHASE_MS, 0, run->steps, 3, row, H5T_NATIVE_DOUBLE, phase_ms);
}

K3Status k3_run_reader_steps(K3RunReader *run, int64_t first, int64_t count, int64_t *tokens, double *step_ms)
{
  K3_TRY(read_rows(run, TOKEN_IDS, first, count, 1, NULL, H5T_NATIVE_INT64, tokens));
  return read_rows(run, STEP_MS, first, count, 1, NULL, H5T_NATIVE_DOUBLE, step_ms);
}

K3Status k3_run_reader_logits(K3RunReader *run, int64_t step, float *logits)
{
  return read_rows(run, LOGITS, step, 1, 2, &run->config.vocab_size, H5T_NATIVE_FLOAT, logits);
}

K3Status k3_run_reader_top(K3RunReader *run, int64_t step, int64_t *ids, float *logits)
{
  K3_TRY(read_rows(run, TOP_IDS, step, 1, 2, &run->top, H5T_NATIVE_INT64, ids));
  return read_rows(run, TOP_LOGITS, step, 1, 2, &run->top, H5T_NATIVE_FLOAT, logits);
}

void k3_run_reader_close(K3RunReader *run)
{
  if (!run) return;
  for (int i = 0; i < COLUMNS; i++)
    if (run->state->column[i] >= 0) H5Dclose(run->state->column[i]);
  if (run->state->file >= 0) H5Fclose(run->state->file);
  free(run->state);
  for (int64_t i = 0; i < run->phases; i++) free(run->phase_names[i]);
  free(run->phase_names);
  for (int64_t i = 0; i < run->parts; i++) free(run->part_names[i]);
  free(run->part_names);
  free(run->step_bytes);
  free(run->prompt);
  char *texts[] = {run->program_version, run->model, run->backend, run->devices, run->command, run->start_time,
                   run->kind, run->plan, run->ending, run->resumed_from};
  for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) free(texts[i]);
  free(run);
}
