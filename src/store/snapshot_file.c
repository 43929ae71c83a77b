/* Writes snapshots. See snapshot_file.h. Layer: store. */
#include "store/snapshot_file.h"

#include <errno.h>
#include <fcntl.h>
#include <hdf5.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/breakage.h"
#include "store/hdf5_output.h"
#include "store/partial_file.h"
#include "store/seal.h"

enum { METADATA_BYTES = 1 << 18 }; /* more than attributes, groups and headers take */

struct K3SnapshotWriter {
  char path[PATH_MAX], partial[PATH_MAX];
  int exists, overwrite;
  hid_t file, part[K3_STATE_PARTS];
  hid_t memory[K3_STATE_PARTS]; /* predefined types, never closed */
  K3SnapshotInfo info;
};

/* ---------------------------------------------------------------- what both sides share */

const char *const k3_state_path[K3_STATE_PARTS] = {"/state/cache", "/state/kda", "/state/conv"};

int64_t k3_snapshot_position(const K3SnapshotInfo *info) { return info->first_context + info->fed; }

int64_t k3_snapshot_cache_bytes(const char *cache_type)
{
  if (strcmp(cache_type, "f32") == 0) return 4;
  return strcmp(cache_type, "f16") == 0 || strcmp(cache_type, "bf16") == 0 ? 2 : 0;
}

int k3_state_shape(const K3SnapshotInfo *info, K3StatePart part, uint64_t shape[4])
{
  const K3Config *c = &info->config;
  uint64_t kda = (uint64_t)k3_config_count_layers(c, K3_LAYER_KDA), D = (uint64_t)c->kda_head_dim;
  uint64_t heads = (uint64_t)c->num_heads;
  switch (part) {
  case K3_STATE_CACHE:
    shape[0] = (uint64_t)k3_config_count_layers(c, K3_LAYER_MLA);
    shape[1] = (uint64_t)k3_snapshot_position(info);
    shape[2] = (uint64_t)k3_config_cache_width(c);
    return 3;
  case K3_STATE_KDA: shape[0] = kda, shape[1] = heads, shape[2] = shape[3] = D; return 4;
  default: shape[0] = kda, shape[1] = 3, shape[2] = (uint64_t)c->kda_conv_kernel - 1, shape[3] = heads * D; return 4;
  }
}

/* ---------------------------------------------------------------- creating */

static K3Status put_description(K3SnapshotWriter *writer, const int64_t *tokens)
{
  const char *path = writer->partial;
  const K3SnapshotInfo *info = &writer->info;
  hid_t file = writer->file;
  hsize_t count = (hsize_t)info->token_count;
  K3_TRY(k3_hdf5_put_text(path, file, "format", K3_SNAPSHOT_FORMAT));
  K3_TRY(k3_hdf5_put_integer(path, file, "format_version", K3_SNAPSHOT_FORMAT_VERSION));
  K3_TRY(k3_hdf5_put_text(path, file, "program_version", info->program_version));
  K3_TRY(k3_hdf5_put_text(path, file, "model", info->model));
  K3_TRY(k3_hdf5_put_attribute(path, file, "model_digest", H5T_STD_U64LE, H5T_NATIVE_UINT64, &info->model_digest));
  K3_TRY(k3_hdf5_put_text(path, file, "time", info->time));
  K3_TRY(k3_hdf5_put_integer(path, file, "ranks", info->ranks));
  K3_TRY(k3_hdf5_put_text(path, file, "backend", info->backend));
  K3_TRY(k3_hdf5_put_text(path, file, "activations", info->activations));
  K3_TRY(k3_hdf5_put_text(path, file, "cache_type", info->cache_type));
  K3_TRY(k3_hdf5_put_integer(path, file, "first_context", info->first_context));
  K3_TRY(k3_hdf5_put_integer(path, file, "fed", info->fed));
  K3_TRY(k3_hdf5_put_integer(path, file, "position", k3_snapshot_position(info)));
  K3_TRY(k3_hdf5_put_integer(path, file, "prompt_count", info->prompt_count));
  K3_TRY(k3_hdf5_put_group(path, file, "/config"));
  K3_TRY(k3_hdf5_put_config(path, file, &info->config));
  K3_TRY(k3_hdf5_put_group(path, file, "/state"));
  K3_TRY(k3_hdf5_put_dataset(path, file, "/token_ids", H5T_STD_I64LE, H5T_NATIVE_INT64, 1, &count, tokens));
  hid_t made = H5Dopen2(file, "/token_ids", H5P_DEFAULT);
  if (made < 0) return K3_HDF5_FAIL("%s: dataset /token_ids cannot be opened", path);
  K3Status status = k3_hdf5_put_text(path, made, "units", "token id");
  H5Dclose(made);
  return status;
}

/* The dataset of a part, contiguous and not filled: every byte is written later. */
static K3Status put_part(K3SnapshotWriter *writer, K3StatePart part)
{
  static const char *const axes[K3_STATE_PARTS] = {
      "MLA layer, position, latent C then rope R", "KDA layer, head, key channel, value channel",
      "KDA layer, projection (q, k, v), earlier token (oldest first), head and channel"};
  const char *path = writer->partial, *type = part == K3_STATE_CACHE ? writer->info.cache_type : "f32";
  K3Status status = K3_OK;
  uint64_t shape[4];
  hsize_t size[4];
  int count = k3_state_shape(&writer->info, part, shape), narrow = k3_snapshot_cache_bytes(type) == 2;
  for (int i = 0; i < count; i++) size[i] = shape[i];
  writer->memory[part] = narrow ? H5T_NATIVE_UINT16 : H5T_NATIVE_FLOAT;
  hid_t space = H5Screate_simple(count, size, NULL), properties = H5Pcreate(H5P_DATASET_CREATE);
  if (space >= 0 && properties >= 0 && H5Pset_fill_time(properties, H5D_FILL_TIME_NEVER) >= 0 &&
      H5Pset_alloc_time(properties, H5D_ALLOC_TIME_EARLY) >= 0)
    writer->part[part] = H5Dcreate2(writer->file, k3_state_path[part], narrow ? H5T_STD_U16LE : H5T_IEEE_F32LE, space,
                                    H5P_DEFAULT, properties, H5P_DEFAULT);
  if (writer->part[part] < 0) status = K3_HDF5_FAIL("%s: dataset %s cannot be made", path, k3_state_path[part]);
  if (properties >= 0) H5Pclose(properties);
  if (space >= 0) H5Sclose(space);
  K3_TRY(status);
  K3_TRY(k3_hdf5_put_text(path, writer->part[part], "type", type));
  K3_TRY(k3_hdf5_put_text(path, writer->part[part], "units", "1"));
  return k3_hdf5_put_text(path, writer->part[part], "axes", axes[part]);
}

int64_t k3_snapshot_bytes(const K3SnapshotInfo *info)
{
  int64_t bytes = METADATA_BYTES + info->token_count * 8;
  for (int part = 0; part < K3_STATE_PARTS; part++) {
    uint64_t shape[4];
    int count = k3_state_shape(info, part, shape);
    int64_t product = part == K3_STATE_CACHE ? k3_snapshot_cache_bytes(info->cache_type) : 4;
    for (int i = 0; i < count; i++) product *= (int64_t)shape[i];
    bytes += product;
  }
  return bytes;
}

static K3Status create(K3SnapshotWriter *writer, const int64_t *tokens)
{
  K3Status status = K3_OK;
  K3_TRY(k3_partial_remove_leftover(writer->partial));
  hid_t creation = H5Pcreate(H5P_FILE_CREATE);
  if (creation < 0 || H5Pset_userblock(creation, K3_SEAL_BYTES) < 0) {
    status = K3_HDF5_FAIL("%s: no place for a seal", writer->partial);
    goto done;
  }
  K3_TRY_DONE(k3_partial_create(writer->partial, creation, &writer->file));
  writer->exists = 1;
  K3_TRY_DONE(k3_partial_reserve(writer->partial, k3_partial_descriptor(writer->file), k3_snapshot_bytes(&writer->info)));
  K3_TRY_DONE(put_description(writer, tokens));
  for (int part = 0; part < K3_STATE_PARTS; part++) K3_TRY_DONE(put_part(writer, part));
done:
  if (creation >= 0) H5Pclose(creation);
  return status;
}

K3Status k3_snapshot_create(const char *path, const K3SnapshotInfo *info, const int64_t *tokens, int overwrite,
                            K3SnapshotWriter **result)
{
  *result = NULL;
  k3_hdf5_silence();
  K3_TRY(k3_partial_check(path, overwrite, K3_SNAPSHOT_FORMAT, "snapshot"));
  K3SnapshotWriter *writer = calloc(1, sizeof *writer);
  if (!writer) K3_FAIL(K3_ERR_INPUT, "%s: no memory", path);
  writer->info = *info;
  writer->overwrite = overwrite;
  writer->file = H5I_INVALID_HID;
  for (int part = 0; part < K3_STATE_PARTS; part++) writer->part[part] = H5I_INVALID_HID;
  snprintf(writer->path, sizeof writer->path, "%s", path);
  snprintf(writer->partial, sizeof writer->partial, K3_BROKEN("snapshot_in_place") ? "%s" : "%s.partial", path);
  K3Status status = create(writer, tokens);
  if (status != K3_OK) k3_snapshot_writer_close(writer);
  else *result = writer;
  return status;
}

/* ---------------------------------------------------------------- the state */

static K3Status write_box(K3SnapshotWriter *writer, K3StatePart part, const hsize_t *start, const hsize_t *count,
                          const void *data)
{
  K3Status status = K3_OK;
  uint64_t shape[4];
  int axes = k3_state_shape(&writer->info, part, shape);
  for (int i = 0; i < axes; i++)
    if (count[i] == 0) return K3_OK;
  hid_t space = H5Dget_space(writer->part[part]), memory = H5Screate_simple(axes, count, NULL);
  if (space < 0 || memory < 0 || H5Sselect_hyperslab(space, H5S_SELECT_SET, start, NULL, count, NULL) < 0 ||
      H5Dwrite(writer->part[part], writer->memory[part], memory, space, H5P_DEFAULT, data) < 0)
    status = K3_HDF5_FAIL("%s: dataset %s cannot be written", writer->partial, k3_state_path[part]);
  if (memory >= 0) H5Sclose(memory);
  if (space >= 0) H5Sclose(space);
  return status;
}

K3Status k3_snapshot_write_cache(K3SnapshotWriter *writer, int64_t layer, int64_t position, int64_t positions,
                                 const void *data)
{
  hsize_t start[4] = {(hsize_t)layer, (hsize_t)position, 0};
  hsize_t count[4] = {1, (hsize_t)positions, (hsize_t)k3_config_cache_width(&writer->info.config)};
  return write_box(writer, K3_STATE_CACHE, start, count, data);
}

K3Status k3_snapshot_write_kda(K3SnapshotWriter *writer, int64_t layer, int64_t head, int64_t heads, const float *data)
{
  hsize_t D = (hsize_t)writer->info.config.kda_head_dim;
  hsize_t start[4] = {(hsize_t)layer, (hsize_t)head, 0, 0}, count[4] = {1, (hsize_t)heads, D, D};
  return write_box(writer, K3_STATE_KDA, start, count, data);
}

K3Status k3_snapshot_write_conv(K3SnapshotWriter *writer, int64_t layer, int64_t channel, int64_t channels,
                                const float *data)
{
  hsize_t start[4] = {(hsize_t)layer, 0, 0, (hsize_t)channel};
  hsize_t count[4] = {1, 3, (hsize_t)writer->info.config.kda_conv_kernel - 1, (hsize_t)channels};
  return write_box(writer, K3_STATE_CONV, start, count, data);
}

/* ---------------------------------------------------------------- the end */

static int close_ids(K3SnapshotWriter *writer)
{
  int good = 1;
  for (int part = 0; part < K3_STATE_PARTS; part++) {
    if (writer->part[part] >= 0 && H5Dclose(writer->part[part]) < 0) good = 0;
    writer->part[part] = H5I_INVALID_HID;
  }
  if (writer->file >= 0 && H5Fclose(writer->file) < 0) good = 0;
  writer->file = H5I_INVALID_HID;
  return good;
}

/* HDF5 gives its lock up as it closes, and a second job could take the unlocked file for a leftover. */
static K3Status lock_again(const K3SnapshotWriter *writer, int descriptor)
{
  struct stat ours, there;
  int locked = flock(descriptor, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK; /* or there are no locks */
  if (locked && fstat(descriptor, &ours) == 0 && stat(writer->partial, &there) == 0 && ours.st_ino == there.st_ino)
    return K3_OK;
  K3_FAIL(K3_ERR_INPUT, "%s: another process has taken this file; give each job a snapshot of its own",
          writer->partial);
}

K3Status k3_snapshot_finish(K3SnapshotWriter *writer)
{
  K3Status status = K3_OK;
  int descriptor = fcntl(k3_partial_descriptor(writer->file), F_DUPFD_CLOEXEC, 0);
  if (H5Fflush(writer->file, H5F_SCOPE_GLOBAL) < 0 || !close_ids(writer)) {
    status = K3_HDF5_FAIL("%s cannot be written", writer->partial);
    goto done;
  }
  if (descriptor < 0) K3_FAIL_DONE(K3_ERR_INPUT, "%s: %s", writer->partial, K3_ERRNO_REASON(errno));
  K3_TRY_DONE(lock_again(writer, descriptor));
  if (K3_BROKEN("snapshot_in_place")) usleep(20000); /* so that a kill finds it soon */
  K3_TRY_DONE(k3_seal_write(writer->partial, K3_SNAPSHOT_FORMAT));
  if (!K3_BROKEN("snapshot_in_place"))
    K3_TRY_DONE(k3_partial_publish(writer->partial, writer->path, writer->overwrite));
  writer->exists = 0;
done:
  if (descriptor >= 0) close(descriptor);
  return status;
}

void k3_snapshot_writer_close(K3SnapshotWriter *writer)
{
  if (!writer) return;
  if (writer->exists) unlink(writer->partial);
  if (writer->exists && writer->file >= 0) k3_partial_discard(writer->file);
  close_ids(writer);
  free(writer);
}
