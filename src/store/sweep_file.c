/* Writes the sweep file. See sweep_file.h. Layer: store. */
#include "store/sweep_file.h"

#include <errno.h>
#include <fcntl.h>
#include <hdf5.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "store/hdf5_attribute.h"
#include "store/hdf5_output.h"

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

/* ---------------------------------------------------------------- the path */

/* Is the file at `path` one of ours? */
static int is_sweep_file(const char *path)
{
  char format[64] = "";
  k3_hdf5_silence();
  hid_t file = H5Fopen(path, H5F_ACC_RDONLY, H5P_DEFAULT);
  if (file < 0) return 0;
  if (H5Aexists(file, "format") > 0 && k3_hdf5_read_text(path, file, "/", "format", format, sizeof format) != K3_OK)
    k3_status_clear();
  H5Fclose(file);
  return strcmp(format, K3_SWEEP_FORMAT) == 0;
}

K3Status k3_sweep_file_check(const char *path, int overwrite)
{
  struct stat info;
  char folder[PATH_MAX];
  if (path[0] == '\0') K3_FAIL(K3_ERR_INPUT, "output: the path is empty");
  if (strlen(path) + sizeof ".partial" > sizeof folder)
    K3_FAIL(K3_ERR_INPUT, "output: a path of %zu bytes is too long", strlen(path));
  if (stat(path, &info) == 0) {
    if (S_ISDIR(info.st_mode)) K3_FAIL(K3_ERR_INPUT, "output %s is a directory; give the path of a file in it", path);
    if (!S_ISREG(info.st_mode)) K3_FAIL(K3_ERR_INPUT, "output %s is not a regular file; give another path", path);
    if (!overwrite) K3_FAIL(K3_ERR_INPUT, "output %s exists; give another path, or --overwrite", path);
    if (info.st_size > 0 && !is_sweep_file(path))
      K3_FAIL(K3_ERR_INPUT,
              "output %s is not a sweep file, and sweep replaces nothing else; give another path or "
              "remove it",
              path);
  }
  strcpy(folder, path);
  char *slash = strrchr(folder, '/');
  if (!slash) strcpy(folder, ".");
  else slash[slash == folder] = '\0';
  if (stat(folder, &info) != 0 || !S_ISDIR(info.st_mode))
    K3_FAIL(K3_ERR_INPUT, "output %s: no such directory; make it first", path);
  if (access(folder, W_OK | X_OK) != 0) K3_FAIL(K3_ERR_INPUT, "output %s cannot be written: %s", path, strerror(errno));
  return K3_OK;
}

/* `bytes` as PATH.partial, then under its name. */
static K3Status write_image(const char *path, const void *image, size_t bytes)
{
  char partial[PATH_MAX];
  snprintf(partial, sizeof partial, "%s.partial", path);
  int descriptor = open(partial, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666), error = 0;
  if (descriptor < 0) K3_FAIL(K3_ERR_INPUT, "output %s cannot be written: %s", partial, K3_ERRNO_REASON(errno));
  for (size_t at = 0; at < bytes && !error;) {
    ssize_t count = write(descriptor, (const char *)image + at, bytes - at);
    if (count < 0 && errno != EINTR) error = errno;
    if (count > 0) at += (size_t)count;
  }
  if (!error && fsync(descriptor) != 0 && errno != EINVAL && errno != EROFS) error = errno;
  if (close(descriptor) != 0 && !error) error = errno;
  if (!error && rename(partial, path) != 0) error = errno;
  if (!error) return K3_OK;
  unlink(partial);
  K3_FAIL(K3_ERR_INPUT, "output %s cannot be written: %s", path, K3_ERRNO_REASON(error));
}

/* ---------------------------------------------------------------- the content */

/* A dataset with its axes named, and its unit (NULL: none). */
static K3Status put(const char *path, hid_t file, const char *name, int real, int axes, const hsize_t *size,
                    const void *value, const char *units, const char *axis_names, const char *meaning)
{
  K3Status status = K3_OK;
  K3_TRY(k3_hdf5_put_dataset(path, file, name, real ? H5T_IEEE_F64LE : H5T_STD_I64LE,
                             real ? H5T_NATIVE_DOUBLE : H5T_NATIVE_INT64, axes, size, value));
  hid_t made = H5Dopen2(file, name, H5P_DEFAULT);
  if (made < 0) return K3_HDF5_FAIL("output %s: dataset %s cannot be opened", path, name);
  if (units) K3_TRY_DONE(k3_hdf5_put_text(path, made, "units", units));
  K3_TRY_DONE(k3_hdf5_put_text(path, made, "axes", axis_names));
  K3_TRY_DONE(k3_hdf5_put_text(path, made, "meaning", meaning));
done:
  H5Dclose(made);
  return status;
}

static K3Status put_description(const char *path, hid_t file, const K3SweepInfo *info, const K3Sweep *sweep)
{
  K3_TRY(k3_hdf5_put_text(path, file, "format", K3_SWEEP_FORMAT));
  K3_TRY(k3_hdf5_put_integer(path, file, "format_version", K3_SWEEP_FORMAT_VERSION));
  K3_TRY(k3_hdf5_put_text(path, file, "program_version", info->version));
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
  K3_TRY(put(path, file, "/contexts", 0, 1, &C, sweep->context, "positions", "context",
             "positions cached before the first, untimed step of a block"));
  K3_TRY(k3_hdf5_put_group(path, file, "/timings"));
  K3_TRY(put(path, file, "/timings/step_ms", 1, 5, steps, sweep->step_ms, "ms", "context, arm, repeat, block, step",
             "wall time of a step on the slowest rank"));
  K3_TRY(put(path, file, "/timings/same_arm_step_ms", 1, 5, steps, sweep->same_ms, "ms",
             "context, of the pair, repeat, block, step", "the A/A pair: one arm interleaved with itself"));
  K3_TRY(put(path, file, "/timings/phase_ms", 1, 5, phases, sweep->phase_ms, "ms",
             "context, before and after, arm, step, phase",
             "time of a phase on the slowest rank, in blocks of their own"));
  K3_TRY(k3_hdf5_put_texts(path, file, "/timings/phase_names", 1, &P, info->phase_names));
  K3_TRY(put(path, file, "/timings/phase_touched", 0, 1, &P, info->phase_touched, NULL, "phase",
             "1: the arms differ in this phase; 0: a control"));
  return put(path, file, "/tokens", 0, 3, tokens, sweep->token, NULL, "context, arm, step",
             "tokens chosen in an arm's first block; -1: no such arm");
}

static K3Status put_derived(const char *path, hid_t file, const K3Sweep *sweep)
{
  static const char *const names[K3_SWEEP_STATISTICS] = {"median", "min", "max", "p10", "p90"};
  hsize_t C = (hsize_t)sweep->contexts, P = (hsize_t)sweep->phases, S = K3_SWEEP_STATISTICS;
  hsize_t cells[] = {C, K3_SWEEP_ARMS, S}, repeats[] = {C, (hsize_t)sweep->repeats},
          control[] = {C, K3_SWEEP_WHENS, K3_SWEEP_ARMS, P};
  K3_TRY(k3_hdf5_put_group(path, file, "/curve"));
  K3_TRY(k3_hdf5_put_texts(path, file, "/curve/statistic_names", 1, &S, names));
  K3_TRY(put(path, file, "/curve/step_ms", 1, 3, cells, sweep->statistic_ms, "ms", "context, arm, statistic",
             "over all repeats, blocks and steps"));
  K3_TRY(put(path, file, "/curve/same_arm_step_ms", 1, 3, cells, sweep->same_statistic_ms, "ms",
             "context, of the pair, statistic", "the same of the A/A pair"));
  K3_TRY(put(path, file, "/curve/difference_ms", 1, 1, &C, sweep->difference_ms, "ms", "context",
             "median of B - median of A"));
  K3_TRY(put(path, file, "/curve/repeat_difference_ms", 1, 2, repeats, sweep->repeat_difference_ms, "ms",
             "context, repeat", "median of B - median of A, repeat by repeat"));
  K3_TRY(put(path, file, "/curve/same_arm_difference_ms", 1, 2, repeats, sweep->same_difference_ms, "ms",
             "context, repeat", "difference of medians of the A/A pair"));
  K3_TRY(
      put(path, file, "/curve/own_floor_ms", 1, 1, &C, sweep->own_floor_ms, "ms", "context",
          "the largest same_arm_difference_ms without sign; where both arms run the same plan, their difference too"));
  K3_TRY(
      put(path, file, "/curve/floor_ms", 1, 1, &C, sweep->floor_ms, "ms", "context",
          "noise floor: the largest own_floor_ms of all contexts, in ms or as a share of the A/A median, whichever is "
          "less; at least own_floor_ms"));
  K3_TRY(put(path, file, "/curve/same_path", 0, 1, &C, sweep->same_path, NULL, "context",
             "1: both arms run the same plan, their difference is noise"));
  K3_TRY(put(path, file, "/curve/above_floor", 0, 1, &C, sweep->above_floor, NULL, "context",
             "1: the difference is larger than the floor and has one sign in all repeats; 0: no difference"));
  K3_TRY(put(path, file, "/curve/depth_ms", 1, 2, cells, sweep->depth_ms, "ms", "context, arm",
             "median at this context - median at the first"));
  K3_TRY(put(path, file, "/curve/depth_floor_ms", 1, 2, cells, sweep->depth_floor_ms, "ms", "context, arm",
             "floors of both contexts + how far the control phases moved between them"));
  return put(path, file, "/curve/control_ms", 1, 4, control, sweep->control_ms, "ms",
             "context, before and after, arm, phase", "medians of /timings/phase_ms");
}

static K3Status fill(const char *path, hid_t file, const K3SweepInfo *info, const K3Sweep *sweep)
{
  K3_TRY(put_description(path, file, info, sweep));
  K3_TRY(put_arms(path, file, sweep));
  K3_TRY(put_times(path, file, info, sweep));
  return put_derived(path, file, sweep);
}

K3Status k3_sweep_file_write(const char *path, const K3SweepInfo *info, const K3Sweep *sweep)
{
  K3Status status = K3_OK;
  void *image = NULL;
  K3_TRY(k3_sweep_file_check(path, info->overwrite));
  k3_hdf5_silence();
  hid_t access = H5Pcreate(H5P_FILE_ACCESS), file = H5I_INVALID_HID;
  if (access >= 0 && H5Pset_fapl_core(access, 1 << 20, 0) >= 0)
    file = H5Fcreate(path, H5F_ACC_TRUNC, H5P_DEFAULT, access); /* in memory: the path is a name alone */
  if (file < 0) {
    status = K3_HDF5_FAIL("output %s: no HDF5 file in memory", path);
    goto done;
  }
  K3_TRY_DONE(fill(path, file, info, sweep));
  ssize_t bytes = H5Fflush(file, H5F_SCOPE_GLOBAL) < 0 ? -1 : H5Fget_file_image(file, NULL, 0);
  if (bytes < 0 || !(image = malloc((size_t)bytes)) || H5Fget_file_image(file, image, (size_t)bytes) < 0) {
    status = K3_HDF5_FAIL("output %s: no image of the HDF5 file", path);
    goto done;
  }
  status = write_image(path, image, (size_t)bytes);
done:
  free(image);
  if (file >= 0) H5Fclose(file);
  if (access >= 0) H5Pclose(access);
  return status;
}
