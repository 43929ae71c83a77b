/* Reads snapshots. See snapshot_file.h. Layer: store. */
#include <hdf5.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/breakage.h"
#include "store/hdf5_attribute.h"
#include "store/hdf5_error.h"
#include "store/hdf5_input.h"
#include "store/seal.h"
#include "store/snapshot_file.h"

struct K3Snapshot {
  char path[PATH_MAX];
  hid_t file, part[K3_STATE_PARTS];
  K3SnapshotInfo info;
  int64_t *tokens;
};

K3Status k3_snapshot_sum(const char *path, int part, int parts, uint64_t *sum)
{
  K3Seal seal;
  K3_TRY(k3_seal_read(path, K3_SNAPSHOT_FORMAT, &seal));
  return k3_seal_sum(path, seal.bytes, part, parts, sum);
}

/* ---------------------------------------------------------------- opening */

static K3Status get_integer(K3Snapshot *snapshot, const char *name, int64_t *value)
{
  return k3_hdf5_read_number(snapshot->path, snapshot->file, "the root group", name, H5T_INTEGER, H5T_NATIVE_INT64,
                             value);
}

#define GET_TEXT(name, field)                                                                            \
  K3_TRY(k3_hdf5_read_text(snapshot->path, snapshot->file, "the root group", name, snapshot->info.field, \
                           sizeof snapshot->info.field))

static K3Status read_root(K3Snapshot *snapshot)
{
  K3SnapshotInfo *info = &snapshot->info;
  const char *path = snapshot->path;
  int64_t version = 0, position = 0;
  char format[64];
  K3_TRY(k3_hdf5_read_text(path, snapshot->file, "the root group", "format", format, sizeof format));
  K3_TRY(get_integer(snapshot, "format_version", &version));
  if (strcmp(format, K3_SNAPSHOT_FORMAT) != 0 || version != K3_SNAPSHOT_FORMAT_VERSION)
    K3_FAIL(K3_ERR_INPUT, "%s: format \"%s\" version %" PRId64 ", wanted \"%s\" version %d", path, format, version,
            K3_SNAPSHOT_FORMAT, K3_SNAPSHOT_FORMAT_VERSION);
  GET_TEXT("program_version", program_version);
  GET_TEXT("model", model);
  GET_TEXT("time", time);
  GET_TEXT("backend", backend);
  GET_TEXT("activations", activations);
  GET_TEXT("cache_type", cache_type);
  K3_TRY(k3_hdf5_read_number(path, snapshot->file, "the root group", "model_digest", H5T_INTEGER, H5T_NATIVE_UINT64,
                             &info->model_digest));
  K3_TRY(get_integer(snapshot, "ranks", &info->ranks));
  K3_TRY(get_integer(snapshot, "first_context", &info->first_context));
  K3_TRY(get_integer(snapshot, "fed", &info->fed));
  K3_TRY(get_integer(snapshot, "position", &position));
  K3_TRY(get_integer(snapshot, "prompt_count", &info->prompt_count));
  if (k3_snapshot_cache_bytes(info->cache_type) == 0)
    K3_FAIL(K3_ERR_INPUT, "%s: cache_type \"%s\", wanted f32, f16 or bf16", path, info->cache_type);
  K3_TRY(k3_hdf5_read_config(path, snapshot->file, &info->config));
  if (info->first_context < 0 || info->fed < 0 || position != k3_snapshot_position(info) ||
      position > info->config.max_context)
    K3_FAIL(K3_ERR_INPUT,
            "%s: position %" PRId64 " is not first_context %" PRId64 " + fed %" PRId64 " within max_context", path,
            position, info->first_context, info->fed);
  return K3_OK;
}

/* Opens a dataset that must be of this class and shape; axes whose size is UINT64_MAX become what they are. */
static K3Status open_dataset(K3Snapshot *snapshot, const char *name, H5T_class_t class, size_t bytes, int axes,
                             uint64_t *shape, hid_t *dataset)
{
  K3Status status = K3_OK;
  hid_t space = H5I_INVALID_HID, type = H5I_INVALID_HID;
  hsize_t size[8];
  *dataset = H5Dopen2(snapshot->file, name, H5P_DEFAULT);
  if (*dataset >= 0) space = H5Dget_space(*dataset), type = H5Dget_type(*dataset);
  if (space < 0 || type < 0)
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: dataset %s cannot be opened: %s", snapshot->path, name, K3_HDF5_REASON);
  if (H5Tget_class(type) != class || H5Tget_size(type) != bytes || H5Sget_simple_extent_ndims(space) != axes ||
      H5Sget_simple_extent_dims(space, size, NULL) != axes)
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: dataset %s has another type or number of axes than a snapshot's", snapshot->path,
                 name);
  for (int i = 0; i < axes; i++) {
    if (shape[i] == UINT64_MAX) shape[i] = size[i];
    if (shape[i] != size[i])
      K3_FAIL_DONE(K3_ERR_INPUT, "%s: dataset %s has %" PRIu64 " along axis %d, wanted %" PRIu64, snapshot->path, name,
                   (uint64_t)size[i], i, shape[i]);
  }
done:
  if (type >= 0) H5Tclose(type);
  if (space >= 0) H5Sclose(space);
  return status;
}

static K3Status read_tokens(K3Snapshot *snapshot)
{
  K3SnapshotInfo *info = &snapshot->info;
  uint64_t count = UINT64_MAX;
  hid_t dataset;
  K3Status status = open_dataset(snapshot, "/token_ids", H5T_INTEGER, 8, 1, &count, &dataset);
  if (status == K3_OK) {
    info->token_count = (int64_t)count;
    if (info->fed >= info->token_count || info->prompt_count < 1 || info->prompt_count > info->token_count)
      K3_FAIL_DONE(K3_ERR_INPUT, "%s: %" PRId64 " tokens, fed %" PRId64 ", prompt_count %" PRId64 ": these do not fit",
                   snapshot->path, info->token_count, info->fed, info->prompt_count);
    snapshot->tokens = malloc((size_t)count * sizeof *snapshot->tokens);
    if (!snapshot->tokens) K3_FAIL_DONE(K3_ERR_INPUT, "%s: no memory for %" PRIu64 " tokens", snapshot->path, count);
    if (H5Dread(dataset, H5T_NATIVE_INT64, H5S_ALL, H5S_ALL, H5P_DEFAULT, snapshot->tokens) < 0)
      K3_FAIL_DONE(K3_ERR_INPUT, "%s: dataset /token_ids cannot be read: %s", snapshot->path, K3_HDF5_REASON);
  }
done:
  if (dataset >= 0) H5Dclose(dataset);
  return status;
}

static K3Status open_parts(K3Snapshot *snapshot)
{
  const K3SnapshotInfo *info = &snapshot->info;
  for (int part = 0; part < K3_STATE_PARTS; part++) {
    int narrow = part == K3_STATE_CACHE && k3_snapshot_cache_bytes(info->cache_type) == 2;
    uint64_t shape[4];
    int axes = k3_state_shape(info, part, shape);
    K3_TRY(open_dataset(snapshot, k3_state_path[part], narrow ? H5T_INTEGER : H5T_FLOAT, narrow ? 2 : 4, axes, shape,
                        &snapshot->part[part]));
  }
  return K3_OK;
}

K3Status k3_snapshot_open(const char *path, uint64_t sum, K3Snapshot **result)
{
  K3Status status = K3_OK;
  K3Seal seal;
  *result = NULL;
  k3_hdf5_silence();
  K3_TRY(k3_seal_read(path, K3_SNAPSHOT_FORMAT, &seal));
  if (sum != seal.digest && !K3_BROKEN("seal_unchecked"))
    K3_FAIL(K3_ERR_INPUT,
            "%s: the snapshot is damaged: its bytes have the digest %016" PRIx64 ", its seal says %016" PRIx64
            "; copy or write it again",
            path, sum, seal.digest);
  K3Snapshot *snapshot = calloc(1, sizeof *snapshot);
  if (!snapshot) K3_FAIL(K3_ERR_INPUT, "%s: no memory", path);
  snprintf(snapshot->path, sizeof snapshot->path, "%s", path);
  snapshot->file = H5I_INVALID_HID;
  for (int part = 0; part < K3_STATE_PARTS; part++) snapshot->part[part] = H5I_INVALID_HID;
  K3_TRY_DONE(k3_hdf5_open_input(path, &snapshot->file));
  K3_TRY_DONE(read_root(snapshot));
  K3_TRY_DONE(read_tokens(snapshot));
  K3_TRY_DONE(open_parts(snapshot));
  *result = snapshot;
done:
  if (status != K3_OK) k3_snapshot_close(snapshot);
  return status;
}

const K3SnapshotInfo *k3_snapshot_info(const K3Snapshot *snapshot) { return &snapshot->info; }
const int64_t *k3_snapshot_tokens(const K3Snapshot *snapshot) { return snapshot->tokens; }

void k3_snapshot_close(K3Snapshot *snapshot)
{
  if (!snapshot) return;
  for (int part = 0; part < K3_STATE_PARTS; part++)
    if (snapshot->part[part] >= 0) H5Dclose(snapshot->part[part]);
  if (snapshot->file >= 0) H5Fclose(snapshot->file);
  free(snapshot->tokens);
  free(snapshot);
}

/* ---------------------------------------------------------------- the state */

static K3Status read_box(K3Snapshot *snapshot, K3StatePart part, const hsize_t *start, const hsize_t *count, void *data)
{
  K3Status status = K3_OK;
  uint64_t shape[4];
  int axes = k3_state_shape(&snapshot->info, part, shape);
  int narrow = part == K3_STATE_CACHE && k3_snapshot_cache_bytes(snapshot->info.cache_type) == 2;
  for (int i = 0; i < axes; i++)
    if (count[i] == 0) return K3_OK;
  hid_t space = H5Dget_space(snapshot->part[part]), memory = H5Screate_simple(axes, count, NULL);
  if (space < 0 || memory < 0 || H5Sselect_hyperslab(space, H5S_SELECT_SET, start, NULL, count, NULL) < 0 ||
      H5Dread(snapshot->part[part], narrow ? H5T_NATIVE_UINT16 : H5T_NATIVE_FLOAT, memory, space, H5P_DEFAULT, data) <
          0)
    status = k3_status_fail(K3_ERR_INPUT, __FILE__, __LINE__, "%s: dataset %s cannot be read: %s", snapshot->path,
                            k3_state_path[part], K3_HDF5_REASON);
  if (memory >= 0) H5Sclose(memory);
  if (space >= 0) H5Sclose(space);
  return status;
}

K3Status k3_snapshot_read_cache(K3Snapshot *snapshot, int64_t layer, int64_t position, int64_t positions, void *data)
{
  hsize_t start[4] = {(hsize_t)layer, (hsize_t)position, 0};
  hsize_t count[4] = {1, (hsize_t)positions, (hsize_t)k3_config_cache_width(&snapshot->info.config)};
  return read_box(snapshot, K3_STATE_CACHE, start, count, data);
}

K3Status k3_snapshot_read_kda(K3Snapshot *snapshot, int64_t layer, int64_t head, int64_t heads, float *data)
{
  hsize_t D = (hsize_t)snapshot->info.config.kda_head_dim;
  hsize_t start[4] = {(hsize_t)layer, (hsize_t)head, 0, 0}, count[4] = {1, (hsize_t)heads, D, D};
  return read_box(snapshot, K3_STATE_KDA, start, count, data);
}

K3Status k3_snapshot_read_conv(K3Snapshot *snapshot, int64_t layer, int64_t channel, int64_t channels, float *data)
{
  hsize_t start[4] = {(hsize_t)layer, 0, 0, (hsize_t)channel};
  hsize_t count[4] = {1, 3, (hsize_t)snapshot->info.config.kda_conv_kernel - 1, (hsize_t)channels};
  return read_box(snapshot, K3_STATE_CONV, start, count, data);
}
