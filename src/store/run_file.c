/* Writes the run file. See run_file.h. Layer: store.
 *
 * Everything that has a name is made first, then H5Fstart_swmr_write; from there on only rows are added.
 * A step: each dataset grows by a row and is flushed, then /decode/steps is written and flushed. No fsync:
 * what was flushed outlives the process, not the machine.
 *
 * A file that a kill cut short before that point would not open, so until then it is PATH.partial.
 *
 * A full disk must not reach HDF5: after a failed write its H5Fclose fails too, and the library crashes when the
 * process ends (1.10.8). So the room for a step is reserved before the step.
 *
 * Two jobs with one --output: HDF5 gives its lock up once SWMR writing has started, so this file holds its own on
 * a second descriptor: exclusive while creating, shared (as HDF5's readers take it) from then on. */
#include "store/run_file.h"

#include <errno.h>
#include <fcntl.h>
#include <hdf5.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "store/hdf5_error.h"
#include "store/hdf5_output.h"
#include "store/partial_file.h"
#include "store/run_reader.h"

enum { CHUNK_BYTES = 8192, CHUNK_ROWS = 256, CHUNK_ELEMENTS = 262144 };

/* Room for what a step adds beside its rows (chunk indices, new partial chunks), and steps reserved at a time. */
enum { STEP_METADATA_BYTES = 131072, RESERVED_STEPS = 8, CREATION_BYTES = 262144 };

/* A dataset that grows by one row a step. */
typedef struct {
  const char *path;
  hid_t dataset;   /* H5I_INVALID_HID: this run has none */
  hid_t memory;    /* dataspace of one row in memory */
  hid_t type;      /* of the values in memory; a predefined one, never closed */
  int64_t row_bytes;
  int axes;        /* 1 + axes of a row */
  hsize_t size[3]; /* [rows so far, row …] */
} Column;

enum { TOKEN_IDS, LOGITS, TOP_IDS, TOP_LOGITS, STEP_MS, RANK_STEP_MS, PHASE_MS, COLUMNS };

struct K3RunFile {
  char path[4096], partial[4096 + sizeof ".partial"];
  hid_t file, steps, ending; /* H5I_INVALID_HID once ended */
  int lock;                  /* descriptor that holds the lock, -1 */
  Column column[COLUMNS];
  uint64_t count;            /* whole steps */
  int64_t step_bytes;        /* the most that a step adds */
  int64_t reserved;          /* the disk has room up to this size */
  int failed, ended;
};

static pthread_mutex_t run_file_lock = PTHREAD_MUTEX_INITIALIZER;

/* ---------------------------------------------------------------- taking the path */

/* Refuses to replace anything that is not a run file. An empty file may be replaced. */
static K3Status check_replaceable(const char *path, int descriptor)
{
  struct stat info;
  if (fstat(descriptor, &info) != 0) K3_FAIL(K3_ERR_INPUT, "output %s: %s", path, strerror(errno));
  if (!S_ISREG(info.st_mode)) K3_FAIL(K3_ERR_INPUT, "output %s is not a regular file; give another path", path);
  if (info.st_size == 0 || k3_run_reader_recognise(path) == K3_FILE_RUN) return K3_OK;
  K3_FAIL(K3_ERR_INPUT, "output %s is not a run file, and k3decode replaces nothing else; give another path or "
          "remove it", path);
}

/* The exclusive lock. *lockless: the file system has none (ENOLCK, ENOSYS, EOPNOTSUPP), so go without. */
static K3Status take_lock(const char *path, int descriptor, int *lockless)
{
  *lockless = 0;
  if (flock(descriptor, LOCK_EX | LOCK_NB) == 0) return K3_OK;
  if (errno == EWOULDBLOCK)
    K3_FAIL(K3_ERR_INPUT, "output %s: another process has it open (a second job with the same --output?); give "
            "another path, or wait for it", path);
  *lockless = 1;
  return K3_OK;
}

/* The file that stands at `path`, locked until it is replaced; *old = -1: there is none. */
static K3Status hold_old(const char *path, int overwrite, int *old)
{
  int lockless;
  struct stat found;
  *old = -1;
  if (lstat(path, &found) != 0 && (errno == ENOENT || errno == ENOTDIR)) return K3_OK;
  if (!overwrite) K3_FAIL(K3_ERR_INPUT, "output %s exists; give another path, or --overwrite", path);
  *old = open(path, O_RDWR | O_CLOEXEC);
  if (*old < 0 && errno == EISDIR) K3_FAIL(K3_ERR_INPUT, "output %s is a directory; give the path of a file in it", path);
  if (*old < 0) K3_FAIL(K3_ERR_INPUT, "output %s cannot be written: %s", path, strerror(errno));
  K3_TRY(take_lock(path, *old, &lockless));
  if (!lockless) flock(*old, LOCK_UN); /* HDF5 locks the file too, to look into it */
  K3_TRY(check_replaceable(path, *old));
  return take_lock(path, *old, &lockless);
}

/* Makes PATH.partial and locks it exclusively. */
static K3Status claim(const char *path, const char *partial, int *descriptor, int *lockless)
{
  K3_TRY(k3_partial_remove_leftover(partial));
  int fd = open(partial, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (fd < 0) {
    int reason = errno;
    if (reason == ENOENT || reason == ENOTDIR)
      K3_FAIL(K3_ERR_INPUT, "output %s: no such directory; make it first", path);
    if (reason == ENOSPC || reason == EDQUOT) K3_FAIL(K3_ERR_INPUT, "output %s: the disk is full (%s)", path,
                                                      strerror(reason));
    if (reason == EEXIST)
      K3_FAIL(K3_ERR_INPUT, "output %s: another process has just begun it (a second job with the same --output?)", path);
    K3_FAIL(K3_ERR_INPUT, "output %s cannot be written: %s", path, strerror(reason));
  }
  *descriptor = fd;
  return take_lock(path, fd, lockless);
}

/* ---------------------------------------------------------------- what does not grow */

/* What a step must move, rank by rank. */
static K3Status put_step_bytes(const char *path, hid_t file, const K3RunInfo *info)
{
  static const char name[] = "/timings/step_bytes";
  hsize_t size[2] = {(hsize_t)info->ranks, K3_STEP_PARTS};
  K3_TRY(k3_hdf5_put_texts(path, file, "/timings/step_bytes_names", 1, &size[1], k3_step_part_names));
  K3_TRY(k3_hdf5_put_dataset(path, file, name, H5T_STD_I64LE, H5T_NATIVE_INT64, 2, size, info->step_bytes));
  K3_TRY(k3_hdf5_put_meaning(path, file, name, "byte", "rank, part",
                             "what a step must move through a rank's memory, by the plan (not measured)"));
  hid_t made = H5Dopen2(file, name, H5P_DEFAULT);
  if (made < 0) return K3_HDF5_FAIL("output %s: dataset %s cannot be opened", path, name);
  K3Status status = k3_hdf5_put_integer(path, made, "positions", info->step_bytes_at);
  H5Dclose(made);
  return status;
}

/* Root attributes, groups, prompt, plan: all that does not grow. */
static K3Status put_description(K3RunFile *run, const K3RunInfo *info)
{
  const char *path = run->path;
  hid_t file = run->file;
  K3_TRY(k3_hdf5_put_text(path, file, "format", K3_RUN_FORMAT));
  K3_TRY(k3_hdf5_put_integer(path, file, "format_version", K3_RUN_FORMAT_VERSION));
  K3_TRY(k3_hdf5_put_text(path, file, "program_version", info->version));
  K3_TRY(k3_hdf5_put_text(path, file, "model", info->model));
  K3_TRY(k3_hdf5_put_attribute(path, file, "model_digest", H5T_STD_U64LE, H5T_NATIVE_UINT64, &info->model_digest));
  K3_TRY(k3_hdf5_put_integer(path, file, "ranks", info->ranks));
  K3_TRY(k3_hdf5_put_text(path, file, "backend", info->backend));
  K3_TRY(k3_hdf5_put_text(path, file, "devices", info->devices));
  K3_TRY(k3_hdf5_put_text(path, file, "command", info->command));
  K3_TRY(k3_hdf5_put_text(path, file, "start_time", info->start_time));
  K3_TRY(k3_hdf5_put_text(path, file, "kind", info->kind));
  K3_TRY(k3_hdf5_put_integer(path, file, "first_context", info->first_context));
  K3_TRY(k3_hdf5_put_text(path, file, "resumed_from", info->resumed_from));
  K3_TRY(k3_hdf5_put_integer(path, file, "resumed_position", info->resumed_position));
  K3_TRY(k3_hdf5_put_integer(path, file, "first_step", info->first_step));
  char logits[32] = "none";
  if (info->logits == K3_LOGITS_ALL) strcpy(logits, "all");
  if (info->logits == K3_LOGITS_TOP) snprintf(logits, sizeof logits, "top:%lld", (long long)info->top);
  K3_TRY(k3_hdf5_put_text(path, file, "logits", logits));

  K3_TRY(k3_hdf5_put_group(path, file, "/config"));
  K3_TRY(k3_hdf5_put_group(path, file, "/prompt"));
  K3_TRY(k3_hdf5_put_group(path, file, "/decode"));
  K3_TRY(k3_hdf5_put_group(path, file, "/timings"));
  K3_TRY(k3_hdf5_put_config(path, file, info->config));
  hsize_t prompt = (hsize_t)info->prompt_count;
  K3_TRY(k3_hdf5_put_dataset(path, file, "/prompt/token_ids", H5T_STD_I64LE, H5T_NATIVE_INT64, 1, &prompt, info->prompt));
  K3_TRY(k3_hdf5_put_meaning(path, file, "/prompt/token_ids", "token id", "position", "what was fed"));
  const char *plan = info->plan ? info->plan : "";
  K3_TRY(k3_hdf5_put_text_dataset(path, file, "/plan", plan, strlen(plan) + 1));
  if (info->phases > 0)
    K3_TRY(k3_hdf5_put_texts(path, file, "/timings/phase_names", 1, (hsize_t[]){(hsize_t)info->phases}, info->phase_names));
  if (info->step_bytes) K3_TRY(put_step_bytes(path, file, info));
  K3_TRY(k3_hdf5_put_text_dataset(path, file, "/ending", "running", K3_RUN_ENDING_BYTES));
  uint64_t none = 0;
  K3_TRY(k3_hdf5_put_dataset(path, file, "/decode/steps", H5T_STD_U64LE, H5T_NATIVE_UINT64, 0, NULL, &none));
  return k3_hdf5_put_meaning(path, file, "/decode/steps", "step", NULL, "whole steps: rows at and beyond it are unfinished");
}

/* ---------------------------------------------------------------- datasets that grow */

/* Makes a dataset [0, row …] that may grow. A chunk holds many small rows, or one row or part of a large one. */
static K3Status put_column(K3RunFile *run, int which, const char *name, hid_t stored, hid_t memory, int axes,
                           const hsize_t *row, const char *units, const char *axis_names, const char *meaning)
{
  K3Status status = K3_OK;
  Column *column = &run->column[which];
  *column = (Column){.path = name, .dataset = H5I_INVALID_HID, .memory = H5I_INVALID_HID, .type = memory,
                     .axes = axes, .size = {0, 1, 1}};
  hsize_t limit[3] = {H5S_UNLIMITED, 1, 1}, chunk[3] = {1, 1, 1}, bytes = H5Tget_size(memory);
  column->row_bytes = (int64_t)bytes;
  for (int i = 1; i < axes; i++) {
    column->size[i] = limit[i] = row[i - 1];
    column->row_bytes *= (int64_t)row[i - 1];
    chunk[i] = row[i - 1] < CHUNK_ELEMENTS ? row[i - 1] : CHUNK_ELEMENTS;
    bytes *= chunk[i];
  }
  chunk[0] = CHUNK_BYTES / bytes;
  if (chunk[0] < 1) chunk[0] = 1;
  if (chunk[0] > CHUNK_ROWS) chunk[0] = CHUNK_ROWS;

  hid_t space = H5Screate_simple(axes, column->size, limit), properties = H5Pcreate(H5P_DATASET_CREATE);
  if (space < 0 || properties < 0 || H5Pset_chunk(properties, axes, chunk) < 0 ||
      (column->dataset = H5Dcreate2(run->file, name, stored, space, H5P_DEFAULT, properties, H5P_DEFAULT)) < 0) {
    status = K3_HDF5_FAIL("output %s: dataset %s cannot be made", run->path, name);
    goto done;
  }
  status = k3_hdf5_put_meaning(run->path, run->file, name, units, axis_names, meaning);
done:
  if (properties >= 0) H5Pclose(properties);
  if (space >= 0) H5Sclose(space);
  return status;
}

static K3Status put_columns(K3RunFile *run, const K3RunInfo *info)
{
  hsize_t row[2] = {0, 0};
  K3_TRY(put_column(run, TOKEN_IDS, "/decode/token_ids", H5T_STD_I64LE, H5T_NATIVE_INT64, 1, row, "token id", "step",
                    "what was decoded"));
  if (info->logits == K3_LOGITS_ALL) {
    row[0] = (hsize_t)info->config->vocab_size;
    K3_TRY(put_column(run, LOGITS, "/decode/logits", H5T_IEEE_F32LE, H5T_NATIVE_FLOAT, 2, row, "nat", "step, token id",
                      "row n chose token n"));
  } else if (info->logits == K3_LOGITS_TOP) {
    row[0] = (hsize_t)info->top;
    K3_TRY(put_column(run, TOP_IDS, "/decode/top_ids", H5T_STD_I64LE, H5T_NATIVE_INT64, 2, row, "token id", "step, place",
                      "tokens of the largest logits, descending"));
    K3_TRY(put_column(run, TOP_LOGITS, "/decode/top_logits", H5T_IEEE_F32LE, H5T_NATIVE_FLOAT, 2, row, "nat",
                      "step, place", "the largest logits, descending"));
  }
  K3_TRY(put_column(run, STEP_MS, "/timings/step_ms", H5T_IEEE_F64LE, H5T_NATIVE_DOUBLE, 1, row, "ms", "step",
                    "wall time on the slowest rank; step 0 is the last prompt token's"));
  row[0] = (hsize_t)info->ranks;
  K3_TRY(put_column(run, RANK_STEP_MS, "/timings/rank_step_ms", H5T_IEEE_F64LE, H5T_NATIVE_DOUBLE, 2, row, "ms",
                    "step, rank", "wall time on each rank"));
  row[1] = (hsize_t)info->phases;
  if (info->phases > 0)
    K3_TRY(put_column(run, PHASE_MS, "/timings/phase_ms", H5T_IEEE_F64LE, H5T_NATIVE_DOUBLE, 3, row, "ms",
                      "step, rank, phase", "time of a phase on each rank"));
  return K3_OK;
}

/* Writes one row at the end and flushes the dataset. A column this run lacks is left alone. */
static K3Status append_row(K3RunFile *run, Column *column, const void *row)
{
  if (column->dataset < 0) return K3_OK;
  if (!row) K3_FAIL(K3_ERR_INPUT, "output %s: step %llu brings no %s", run->path, (unsigned long long)run->count,
                    column->path);
  hsize_t begin[3] = {run->count, 0, 0}, count[3] = {1, column->size[1], column->size[2]};
  column->size[0] = run->count + 1;
  hid_t space = H5I_INVALID_HID;
  int good = H5Dset_extent(column->dataset, column->size) >= 0 && (space = H5Dget_space(column->dataset)) >= 0 &&
             H5Sselect_hyperslab(space, H5S_SELECT_SET, begin, NULL, count, NULL) >= 0 &&
             H5Dwrite(column->dataset, column->type, column->memory, space, H5P_DEFAULT, row) >= 0 &&
             H5Dflush(column->dataset) >= 0;
  K3Status status = K3_OK;
  if (!good)
    status = K3_HDF5_FAIL("output %s: step %llu of %s cannot be written; the steps before it are kept",
                          run->path, (unsigned long long)run->count, column->path);
  if (space >= 0) H5Sclose(space);
  return status;
}

/* ---------------------------------------------------------------- life of the file */

/* Closes every identifier. The first failure is reported, all are closed. */
static K3Status close_ids(K3RunFile *run)
{
  int good = 1;
  for (int i = 0; i < COLUMNS; i++) {
    Column *column = &run->column[i];
    if (column->memory >= 0 && H5Sclose(column->memory) < 0) good = 0;
    if (column->dataset >= 0 && H5Dclose(column->dataset) < 0) good = 0;
    column->memory = column->dataset = H5I_INVALID_HID;
  }
  if (run->ending >= 0 && H5Dclose(run->ending) < 0) good = 0;
  if (run->steps >= 0 && H5Dclose(run->steps) < 0) good = 0;
  if (run->file >= 0 && H5Fclose(run->file) < 0) good = 0;
  run->ending = run->steps = run->file = H5I_INVALID_HID;
  return good ? K3_OK : K3_HDF5_FAIL("output %s cannot be closed", run->path);
}

/* Gives back what was reserved beyond the end, and the lock. */
static void let_go(K3RunFile *run)
{
  struct stat info;
  if (run->reserved > 0 && fstat(run->lock, &info) == 0 && ftruncate(run->lock, info.st_size) != 0)
    run->reserved = 0; /* only room is lost */
  if (run->lock >= 0) close(run->lock);
  run->lock = -1;
}

/* Sees to it that the disk has room for step_bytes more. */
static K3Status reserve(K3RunFile *run, const char *what)
{
  struct stat info;
  struct rlimit limit;
  if (fstat(run->lock, &info) != 0)
    K3_FAIL(K3_ERR_INPUT, "output %s: %s", run->path, K3_ERRNO_REASON(errno));
  int64_t size = info.st_size, wanted = size + run->step_bytes;
  int error = 0;
  int64_t batch = RESERVED_STEPS * run->step_bytes;
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && (rlim_t)wanted > limit.rlim_cur)
    error = EFBIG;
  else if (wanted <= run->reserved)
    return K3_OK;
  else if (fallocate(run->lock, FALLOC_FL_KEEP_SIZE, size, batch) == 0)
    run->reserved = size + batch;
  else if (fallocate(run->lock, FALLOC_FL_KEEP_SIZE, size, run->step_bytes) == 0)
    run->reserved = wanted;
  else if (errno == ENOSPC || errno == EDQUOT || errno == EFBIG)
    error = errno;
  else { /* a file system that cannot reserve: ask what is free */
    struct statvfs disk;
    if (fstatvfs(run->lock, &disk) == 0 &&
        (double)disk.f_bavail * (double)disk.f_frsize < (double)run->step_bytes)
      error = ENOSPC;
  }
  if (error)
    K3_FAIL(K3_ERR_INPUT, "output %s: no room for %s, %lld kB: %s", run->path, what,
            (long long)run->step_bytes / 1000, K3_ERRNO_REASON(error));
  return K3_OK;
}

static K3Status check_info(const char *path, const K3RunInfo *info)
{
  if (strlen(path) == 0) K3_FAIL(K3_ERR_INPUT, "output: the path is empty");
  if (strlen(path) >= sizeof((K3RunFile *)0)->path)
    K3_FAIL(K3_ERR_INPUT, "output: a path of %zu bytes is too long", strlen(path));
  if (info->ranks < 1 || info->phases < 0 || info->prompt_count < 0)
    K3_FAIL(K3_ERR_INPUT, "output %s: %d ranks, %d phases, %lld prompt tokens: wanted at least 1, 0, 0", path,
            info->ranks, info->phases, (long long)info->prompt_count);
  if (info->logits == K3_LOGITS_TOP && (info->top < 1 || info->top > info->config->vocab_size))
    K3_FAIL(K3_ERR_INPUT, "output %s: --logits top:%lld, wanted 1 to the vocabulary's %lld", path,
            (long long)info->top, (long long)info->config->vocab_size);
  return K3_OK;
}

/* HDF5 without its own locks, on file systems that have none. */
static K3Status access_properties(const char *path, int lockless, hid_t *access)
{
  *access = H5Pcreate(H5P_FILE_ACCESS);
  int good = *access >= 0 && H5Pset_libver_bounds(*access, H5F_LIBVER_LATEST, H5F_LIBVER_LATEST) >= 0;
#if H5_VERSION_GE(1, 12, 1) || (H5_VERSION_GE(1, 10, 7) && !H5_VERSION_GE(1, 12, 0))
  if (good && lockless) good = H5Pset_file_locking(*access, 0, 1) >= 0;
#else
  (void)lockless;
#endif
  return good ? K3_OK : K3_HDF5_FAIL("output %s: HDF5 refuses its latest format", path);
}

/* The identifiers that steps need, beside the columns' datasets. */
static K3Status open_datasets(K3RunFile *run)
{
  run->steps = H5Dopen2(run->file, "/decode/steps", H5P_DEFAULT);
  run->ending = H5Dopen2(run->file, "/ending", H5P_DEFAULT);
  if (run->steps < 0 || run->ending < 0)
    return K3_HDF5_FAIL("output %s: /decode/steps or /ending cannot be opened", run->path);
  run->step_bytes = STEP_METADATA_BYTES;
  for (int i = 0; i < COLUMNS; i++) {
    Column *column = &run->column[i];
    if (!column->path) continue;
    run->step_bytes += column->row_bytes;
    column->memory = column->axes > 1 ? H5Screate_simple(column->axes - 1, column->size + 1, NULL)
                                      : H5Screate(H5S_SCALAR);
    if (column->memory < 0) return K3_HDF5_FAIL("output %s: %s: no dataspace", run->path, column->path);
  }
  return K3_OK;
}

/* More than the new file takes: objects, chunk indices, and the caller's texts, prompt and names. */
static int64_t first_bytes(const K3RunInfo *info)
{
  const char *texts[] = {info->version, info->model, info->backend, info->devices, info->command, info->plan};
  int64_t bytes = CREATION_BYTES + info->prompt_count * 8 + info->config->num_layers;
  for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++)
    if (texts[i]) bytes += 2 * (int64_t)strlen(texts[i]);
  return bytes;
}

/* The HDF5 file in the claimed PATH.partial, up to SWMR writing. */
static K3Status create_hdf5(K3RunFile *run, const K3RunInfo *info, int lockless)
{
  K3Status status = K3_OK;
  hid_t access = H5I_INVALID_HID;
  run->step_bytes = first_bytes(info);
  if (ftruncate(run->lock, 0) != 0)
    K3_FAIL(K3_ERR_INPUT, "output %s cannot be written: %s", run->path, K3_ERRNO_REASON(errno));
  K3_TRY(reserve(run, "the file's beginning"));
  run->reserved = 0; /* H5Fcreate truncates it away: this was to see whether it would fit */
  K3_TRY_DONE(access_properties(run->path, lockless, &access));
  if (!lockless) flock(run->lock, LOCK_UN); /* HDF5 takes the same lock, until SWMR writing starts */
  run->file = H5Fcreate(run->partial, H5F_ACC_TRUNC, H5P_DEFAULT, access);
  if (run->file < 0) {
    status = K3_HDF5_FAIL("output %s cannot be created", run->path);
    goto done;
  }
  K3_TRY_DONE(put_description(run, info));
  K3_TRY_DONE(put_columns(run, info));
  if (H5Fstart_swmr_write(run->file) < 0) {
    status = K3_HDF5_FAIL("output %s cannot be written", run->path);
    goto done;
  }
  if (!lockless && flock(run->lock, LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK)
    K3_FAIL_DONE(K3_ERR_INPUT, "output %s: another process has it open (a second job with the same --output?)",
                 run->path);
  status = open_datasets(run);
done:
  if (access >= 0) H5Pclose(access);
  return status;
}

static K3Status create_locked(const char *path, const K3RunInfo *info, K3RunFile **file)
{
  K3Status status = K3_OK;
  K3RunFile *run = NULL;
  K3_TRY(check_info(path, info));
  k3_hdf5_silence();
  run = calloc(1, sizeof *run);
  if (!run) K3_FAIL(K3_ERR_INPUT, "output %s: no memory", path);
  strcpy(run->path, path);
  sprintf(run->partial, "%s.partial", path);
  run->file = run->steps = run->ending = H5I_INVALID_HID;
  run->lock = -1;
  for (int i = 0; i < COLUMNS; i++) run->column[i].dataset = run->column[i].memory = H5I_INVALID_HID;

  int old = -1, lockless = 0;
  status = hold_old(path, info->overwrite, &old);
  if (status == K3_OK) status = claim(path, run->partial, &run->lock, &lockless);
  if (status == K3_OK) status = create_hdf5(run, info, lockless);
  if (status == K3_OK) status = k3_partial_rename(run->partial, run->path, info->overwrite);
  if (status != K3_OK) {
    close_ids(run); /* its failure is a consequence: the first message stands */
    if (run->lock >= 0) unlink(run->partial);
    let_go(run);
    free(run);
    run = NULL;
  }
  if (old >= 0) close(old);
  *file = run;
  return status;
}

K3Status k3_run_file_create(const char *path, const K3RunInfo *info, K3RunFile **file)
{
  *file = NULL;
  pthread_mutex_lock(&run_file_lock);
  K3Status status = create_locked(path, info, file);
  pthread_mutex_unlock(&run_file_lock);
  return status;
}

static K3Status append_locked(K3RunFile *run, const K3RunStep *step)
{
  if (run->ended) K3_FAIL(K3_ERR_INPUT, "output %s has ended after %llu steps", run->path,
                          (unsigned long long)run->count);
  if (run->failed) K3_FAIL(K3_ERR_INPUT, "output %s: an earlier step could not be written", run->path);
  const void *rows[COLUMNS] = {[TOKEN_IDS] = &step->token, [LOGITS] = step->logits, [TOP_IDS] = step->top_ids,
                               [TOP_LOGITS] = step->top_logits, [STEP_MS] = &step->step_ms,
                               [RANK_STEP_MS] = step->rank_step_ms, [PHASE_MS] = step->phase_ms};
  run->failed = 1; /* until all is written */
  char what[64];
  snprintf(what, sizeof what, "step %llu (the steps before it are kept)", (unsigned long long)run->count);
  K3_TRY(reserve(run, what));
  for (int i = 0; i < COLUMNS; i++) K3_TRY(append_row(run, &run->column[i], rows[i]));
  uint64_t count = run->count + 1;
  if (H5Dwrite(run->steps, H5T_NATIVE_UINT64, H5S_ALL, H5S_ALL, H5P_DEFAULT, &count) < 0 ||
      H5Dflush(run->steps) < 0)
    return K3_HDF5_FAIL("output %s: /decode/steps cannot be written; %llu steps are kept", run->path,
                        (unsigned long long)run->count);
  run->count = count;
  run->failed = 0;
  return K3_OK;
}

K3Status k3_run_file_append(K3RunFile *file, const K3RunStep *step)
{
  pthread_mutex_lock(&run_file_lock);
  K3Status status = append_locked(file, step);
  pthread_mutex_unlock(&run_file_lock);
  return status;
}

static K3Status end_locked(K3RunFile *run, const char *ending)
{
  if (run->ended) return K3_OK;
  run->ended = 1;
  K3Status status = K3_OK;
  if (ending) {
    char text[K3_RUN_ENDING_BYTES] = "";
    strncpy(text, ending, sizeof text - 1);
    hid_t type = k3_hdf5_text_type(sizeof text);
    if (type < 0 || H5Dwrite(run->ending, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, text) < 0 ||
        H5Dflush(run->ending) < 0)
      status = K3_HDF5_FAIL("output %s: /ending cannot be written", run->path);
    if (type >= 0) H5Tclose(type);
  }
  K3Status closed = close_ids(run);
  let_go(run);
  return status != K3_OK ? status : closed;
}

K3Status k3_run_file_end(K3RunFile *file, const char *ending)
{
  if (!file) return K3_OK;
  pthread_mutex_lock(&run_file_lock);
  K3Status status = end_locked(file, ending);
  pthread_mutex_unlock(&run_file_lock);
  return status;
}

K3Status k3_run_file_close(K3RunFile *file, const char *ending)
{
  K3Status status = k3_run_file_end(file, ending);
  free(file);
  return status;
}
