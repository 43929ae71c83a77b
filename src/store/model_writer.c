/* Writes a model file tensor by tensor. See model_writer.h. Layer: store.
 *
 * PATH.partial is created exclusively and locked while it grows. A leftover of a killed run bears no lock and
 * is replaced; one that another process writes is refused. Datasets are contiguous, allocated at their first
 * write and never filled, so that one that was created but never written can be told by the reader. */
#include "store/model_writer.h"

#include <errno.h>
#include <fcntl.h>
#include <hdf5.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "store/hdf5_error.h"

enum { MAX_PIECE = 1 << 30 }; /* bytes of one H5Dwrite */

/* Rows of one tensor that were written: sorted ranges that do not touch. */
typedef struct {
  char path[sizeof((K3TensorSpec *)0)->path];
  int64_t rows;
  int64_t (*ranges)[2];
  int64_t count, room;
} Written;

struct K3ModelWriter {
  char path[PATH_MAX], partial[PATH_MAX];
  int overwrite;
  int exists; /* the .partial file is ours */
  hid_t file, layers;
  hid_t dataset; /* of tensor written[count-1], -1: none */
  Written *written;
  int64_t count, room;
};

/* ---------------------------------------------------------------- attributes */

static K3Status write_attribute(K3ModelWriter *writer, hid_t place, const char *name, hid_t stored, hid_t given,
                                hid_t space, const void *value)
{
  K3Status status = K3_OK;
  hid_t attribute = H5Acreate2(place, name, stored, space, H5P_DEFAULT, H5P_DEFAULT);
  if (attribute < 0 || H5Awrite(attribute, given, value) < 0)
    status = k3_status_fail(K3_ERR_INPUT, __FILE__, __LINE__, "%s: cannot write attribute %s: %s", writer->partial,
                            name, K3_HDF5_REASON);
  if (attribute >= 0 && H5Aclose(attribute) < 0 && status == K3_OK)
    K3_FAIL(K3_ERR_INPUT, "%s: cannot close attribute %s: %s", writer->partial, name, K3_HDF5_REASON);
  return status;
}

static K3Status write_scalar(K3ModelWriter *writer, hid_t place, const char *name, hid_t stored, hid_t given,
                             const void *value)
{
  hid_t space = H5Screate(H5S_SCALAR);
  if (space < 0) K3_FAIL(K3_ERR_INPUT, "%s: cannot write attribute %s: %s", writer->partial, name, K3_HDF5_REASON);
  K3Status status = write_attribute(writer, place, name, stored, given, space, value);
  H5Sclose(space);
  return status;
}

static K3Status write_text(K3ModelWriter *writer, hid_t place, const char *name, const char *text)
{
  K3Status status = K3_OK;
  hid_t type = H5Tcopy(H5T_C_S1);
  if (type < 0 || H5Tset_size(type, strlen(text) + 1) < 0 || H5Tset_cset(type, H5T_CSET_UTF8) < 0)
    status = k3_status_fail(K3_ERR_INPUT, __FILE__, __LINE__, "%s: cannot write attribute %s: %s", writer->partial,
                            name, K3_HDF5_REASON);
  else status = write_scalar(writer, place, name, type, type, text);
  if (type >= 0) H5Tclose(type);
  return status;
}

/* Fields of /config and its dataset layer_types. */
static K3Status write_config(K3ModelWriter *writer, const K3Config *config)
{
  K3Status status = K3_OK;
  hid_t group = -1, space = -1, dataset = -1;
  hsize_t layers = (hsize_t)config->num_layers;
  group = H5Gcreate2(writer->file, "config", H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
  if (group < 0) K3_FAIL_DONE(K3_ERR_INPUT, "%s: cannot create /config: %s", writer->partial, K3_HDF5_REASON);
  for (int i = 0; i < k3_config_field_count; i++) {
    const K3ConfigField *field = &k3_config_fields[i];
    const void *value = (const char *)config + field->offset;
    if (field->kind == K3_FIELD_INTEGER)
      K3_TRY_DONE(write_scalar(writer, group, field->name, H5T_STD_I64LE, H5T_NATIVE_INT64, value));
    else if (field->kind == K3_FIELD_REAL)
      K3_TRY_DONE(write_scalar(writer, group, field->name, H5T_IEEE_F64LE, H5T_NATIVE_DOUBLE, value));
    else K3_TRY_DONE(write_scalar(writer, group, field->name, H5T_STD_U8LE, H5T_NATIVE_UINT8, value));
  }
  space = H5Screate_simple(1, &layers, NULL);
  if (space >= 0)
    dataset = H5Dcreate2(group, "layer_types", H5T_STD_U8LE, space, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
  if (dataset < 0 || H5Dwrite(dataset, H5T_NATIVE_UINT8, H5S_ALL, H5S_ALL, H5P_DEFAULT, config->layer_types) < 0)
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: cannot write /config/layer_types: %s", writer->partial, K3_HDF5_REASON);
  K3_TRY_DONE(write_text(writer, dataset, "units", "1"));
done:
  if (dataset >= 0) H5Dclose(dataset);
  if (space >= 0) H5Sclose(space);
  if (group >= 0) H5Gclose(group);
  return status;
}

/* ---------------------------------------------------------------- the partial file */

/* Removes a .partial file that no process holds. */
static K3Status remove_leftover(const char *partial)
{
  int descriptor = open(partial, O_RDWR | O_CLOEXEC);
  if (descriptor < 0) {
    if (errno == ENOENT) return K3_OK;
    K3_FAIL(K3_ERR_INPUT, "%s: left by another run and cannot be opened: %s", partial, K3_ERRNO_REASON(errno));
  }
  int locked = flock(descriptor, LOCK_EX | LOCK_NB), error = errno;
  if (locked == 0) locked = unlink(partial), error = errno;
  close(descriptor);
  if (locked == 0) return K3_OK;
  if (error == EWOULDBLOCK)
    K3_FAIL(K3_ERR_INPUT, "%s: another process is writing this file; wait for it or choose another output", partial);
  K3_FAIL(K3_ERR_INPUT, "%s: left by another run and cannot be replaced (%s); remove it if nothing writes it", partial,
          strerror(error));
}

/* The file descriptor under an open HDF5 file, -1: none. */
static int descriptor_of(hid_t file)
{
  void *handle = NULL;
  if (H5Fget_vfd_handle(file, H5P_DEFAULT, &handle) < 0 || !handle) return -1;
  return *(int *)handle;
}

static K3Status create_partial(K3ModelWriter *writer)
{
  K3Status status = K3_OK;
  hid_t access = H5Pcreate(H5P_FILE_ACCESS);
  if (access < 0 || H5Pset_file_locking(access, 1, 1) < 0)
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: cannot create: %s", writer->partial, K3_HDF5_REASON);
  writer->file = H5Fcreate(writer->partial, H5F_ACC_EXCL, H5P_DEFAULT, access);
  if (writer->file < 0) {
    int error = k3_hdf5_errno();
    if (error == EEXIST)
      K3_FAIL_DONE(K3_ERR_INPUT, "%s: another process is writing this file; wait for it or choose another output",
                   writer->partial);
    if (error != ENOLCK && error != ENOSYS && error != EOPNOTSUPP)
      K3_FAIL_DONE(K3_ERR_INPUT, "%s: cannot create: %s", writer->partial, K3_HDF5_REASON);
    /* The file system knows no locks: the file was just made, exclusively, by the call that failed. */
    unlink(writer->partial);
    if (H5Pset_file_locking(access, 0, 1) >= 0)
      writer->file = H5Fcreate(writer->partial, H5F_ACC_EXCL, H5P_DEFAULT, access);
    if (writer->file < 0) K3_FAIL_DONE(K3_ERR_INPUT, "%s: cannot create: %s", writer->partial, K3_HDF5_REASON);
  }
  writer->exists = 1;
  /* Held even with HDF5_USE_FILE_LOCKING=FALSE, so that a second writer sees this one; without locks on the
   * file system the exclusive creation is all there is. */
  flock(descriptor_of(writer->file), LOCK_EX | LOCK_NB);
done:
  if (access >= 0) H5Pclose(access);
  return status;
}

K3Status k3_model_writer_create(const char *path, const K3Config *config, const char *provenance, int overwrite,
                                K3ModelWriter **result)
{
  K3Status status = K3_OK;
  int64_t version = 1;
  struct stat found;
  *result = NULL;
  k3_hdf5_silence();
  K3ModelWriter *writer = calloc(1, sizeof *writer);
  if (!writer) K3_FAIL(K3_ERR_INPUT, "%s: no memory", path);
  writer->file = writer->layers = writer->dataset = -1;
  writer->overwrite = overwrite;
  int length = snprintf(writer->path, sizeof writer->path, "%s", path);
  if (length < 1 ||
      (size_t)snprintf(writer->partial, sizeof writer->partial, "%s.partial", path) >= sizeof writer->partial)
    K3_FAIL_DONE(K3_ERR_INPUT, "output path \"%s\" is empty or too long", path);
  if (stat(path, &found) == 0) {
    if (!S_ISREG(found.st_mode))
      K3_FAIL_DONE(K3_ERR_INPUT, "%s: exists and is no plain file; choose another output", path);
    if (!overwrite) K3_FAIL_DONE(K3_ERR_INPUT, "%s: exists already; choose another output or give --overwrite", path);
  }
  K3_TRY_DONE(remove_leftover(writer->partial));
  K3_TRY_DONE(create_partial(writer));
  K3_TRY_DONE(write_text(writer, writer->file, "format", "k3decode-model"));
  K3_TRY_DONE(write_scalar(writer, writer->file, "format_version", H5T_STD_I64LE, H5T_NATIVE_INT64, &version));
  K3_TRY_DONE(write_text(writer, writer->file, "architecture", "kimi-k3"));
  K3_TRY_DONE(write_text(writer, writer->file, "provenance", provenance));
  K3_TRY_DONE(write_config(writer, config));
  writer->layers = H5Gcreate2(writer->file, "layers", H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
  if (writer->layers < 0) K3_FAIL_DONE(K3_ERR_INPUT, "%s: cannot create /layers: %s", writer->partial, K3_HDF5_REASON);
  *result = writer;
done:
  if (status != K3_OK) k3_model_writer_close(writer);
  return status;
}

/* ---------------------------------------------------------------- tensors */

static int64_t matrix_rows(const K3TensorSpec *spec)
{
  int64_t rows = spec->shape[0];
  return spec->rank == 3 ? rows * spec->shape[1] : rows; /* a 1-axis tensor is [n, 1] */
}

static int64_t row_bytes(const K3TensorSpec *spec, K3Type type)
{
  return k3_format_bytes(type, spec->rank == 1 ? 1 : spec->shape[spec->rank - 1]);
}

static hid_t stored_type(K3Type type)
{
  return type == K3_TYPE_F32 ? H5T_IEEE_F32LE : k3_format_is_quantised(type) ? H5T_STD_U8LE : H5T_STD_U16LE;
}

static K3Status add_written(K3ModelWriter *writer, const K3TensorSpec *spec)
{
  for (int64_t i = 0; i < writer->count; i++)
    if (strcmp(writer->written[i].path, spec->path) == 0)
      K3_FAIL(K3_ERR_INPUT, "%s: dataset %s is created twice", writer->partial, spec->path);
  if (writer->count == writer->room) {
    int64_t room = writer->room ? 2 * writer->room : 256;
    Written *larger = realloc(writer->written, (size_t)room * sizeof *larger);
    if (!larger) K3_FAIL(K3_ERR_INPUT, "%s: no memory", writer->partial);
    writer->written = larger;
    writer->room = room;
  }
  Written *entry = &writer->written[writer->count++];
  memset(entry, 0, sizeof *entry);
  memcpy(entry->path, spec->path, sizeof entry->path);
  entry->rows = matrix_rows(spec);
  return K3_OK;
}

static K3Status close_dataset(K3ModelWriter *writer)
{
  hid_t dataset = writer->dataset;
  writer->dataset = -1;
  if (dataset >= 0 && H5Dclose(dataset) < 0)
    K3_FAIL(K3_ERR_INPUT, "%s: cannot close a dataset: %s", writer->partial, K3_HDF5_REASON);
  return K3_OK;
}

K3Status k3_model_writer_tensor(K3ModelWriter *writer, const K3TensorSpec *spec, K3Type type)
{
  K3Status status = K3_OK;
  hid_t space = -1, creation = -1, links = -1, shape_space = -1;
  hsize_t dims[3] = {(hsize_t)spec->shape[0], (hsize_t)spec->shape[1], (hsize_t)spec->shape[2]};
  hsize_t rank = (hsize_t)spec->rank;
  int64_t last = spec->shape[spec->rank - 1];
  if (k3_format_is_quantised(type)) {
    if (!spec->is_matrix || last % k3_format(type)->block_values)
      K3_FAIL(K3_ERR_INPUT, "%s: dataset %s: rows of %lld values cannot be stored as %s (blocks of %lld)",
              writer->partial, spec->path, (long long)last, k3_format(type)->name,
              (long long)k3_format(type)->block_values);
    dims[spec->rank - 1] = (hsize_t)k3_format_bytes(type, last);
  }
  K3_TRY(close_dataset(writer));
  K3_TRY(add_written(writer, spec));

  space = H5Screate_simple(spec->rank, dims, NULL);
  creation = H5Pcreate(H5P_DATASET_CREATE);
  links = H5Pcreate(H5P_LINK_CREATE);
  if (space < 0 || creation < 0 || links < 0 || H5Pset_layout(creation, H5D_CONTIGUOUS) < 0 ||
      H5Pset_alloc_time(creation, H5D_ALLOC_TIME_LATE) < 0 || H5Pset_fill_time(creation, H5D_FILL_TIME_NEVER) < 0 ||
      H5Pset_create_intermediate_group(links, 1) < 0)
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: dataset %s: cannot create: %s", writer->partial, spec->path, K3_HDF5_REASON);
  writer->dataset = H5Dcreate2(writer->file, spec->path, stored_type(type), space, links, creation, H5P_DEFAULT);
  if (writer->dataset < 0)
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: dataset %s: cannot create: %s", writer->partial, spec->path, K3_HDF5_REASON);
  K3_TRY_DONE(write_text(writer, writer->dataset, "units", "1"));
  if (type != K3_TYPE_F32) K3_TRY_DONE(write_text(writer, writer->dataset, "type", k3_format(type)->name));
  if (k3_format_is_quantised(type)) {
    shape_space = H5Screate_simple(1, &rank, NULL);
    if (shape_space < 0)
      K3_FAIL_DONE(K3_ERR_INPUT, "%s: dataset %s: cannot create: %s", writer->partial, spec->path, K3_HDF5_REASON);
    K3_TRY_DONE(
        write_attribute(writer, writer->dataset, "shape", H5T_STD_I64LE, H5T_NATIVE_INT64, shape_space, spec->shape));
  }
done:
  if (shape_space >= 0) H5Sclose(shape_space);
  if (links >= 0) H5Pclose(links);
  if (creation >= 0) H5Pclose(creation);
  if (space >= 0) H5Sclose(space);
  return status;
}

/* Adds rows [begin, end) to what was written; overlap is an error of the caller. */
static K3Status note_rows(K3ModelWriter *writer, Written *entry, int64_t begin, int64_t end)
{
  int64_t at = 0;
  while (at < entry->count && entry->ranges[at][1] < begin) at++;
  if (begin < 0 || end > entry->rows ||
      (at < entry->count && entry->ranges[at][0] < end && entry->ranges[at][1] > begin) ||
      (at + 1 < entry->count && entry->ranges[at + 1][0] < end))
    K3_FAIL(K3_ERR_INPUT, "%s: dataset %s: rows %lld to %lld of %lld are written twice or do not exist",
            writer->partial, entry->path, (long long)begin, (long long)end, (long long)entry->rows);
  if (at < entry->count && entry->ranges[at][1] == begin) { /* extends one, and may meet the next */
    entry->ranges[at][1] = end;
    if (at + 1 < entry->count && entry->ranges[at + 1][0] == end) {
      entry->ranges[at][1] = entry->ranges[at + 1][1];
      memmove(&entry->ranges[at + 1], &entry->ranges[at + 2], (size_t)(entry->count - at - 2) * sizeof *entry->ranges);
      entry->count--;
    }
    return K3_OK;
  }
  if (at < entry->count && entry->ranges[at][0] == end) {
    entry->ranges[at][0] = begin;
    return K3_OK;
  }
  if (entry->count == entry->room) {
    int64_t room = entry->room ? 2 * entry->room : 4;
    int64_t(*larger)[2] = realloc(entry->ranges, (size_t)room * sizeof *larger);
    if (!larger) K3_FAIL(K3_ERR_INPUT, "%s: no memory", writer->partial);
    entry->ranges = larger;
    entry->room = room;
  }
  memmove(&entry->ranges[at + 1], &entry->ranges[at], (size_t)(entry->count - at) * sizeof *entry->ranges);
  entry->ranges[at][0] = begin;
  entry->ranges[at][1] = end;
  entry->count++;
  return K3_OK;
}

/* One H5Dwrite of `bytes` at byte `offset` of the dataset, both whole rows: as a box where the last axis is whole.
 * A 3-axis tensor is written one slice of axis 0 at a time. */
static K3Status write_box(K3ModelWriter *writer, const K3TensorSpec *spec, K3Type type, int64_t row, int64_t count,
                          const void *data)
{
  K3Status status = K3_OK;
  hid_t memory = -1, file = H5Dget_space(writer->dataset);
  hid_t given = type == K3_TYPE_F32 ? H5T_NATIVE_FLOAT : k3_format_is_quantised(type) ? H5T_NATIVE_UINT8 : H5T_NATIVE_UINT16;
  int64_t last = spec->shape[spec->rank - 1];
  if (k3_format_is_quantised(type)) last = k3_format_bytes(type, last);
  hsize_t begin[3] = {(hsize_t)row, 0, 0}, box[3] = {(hsize_t)count, (hsize_t)last, 1};
  if (spec->rank == 3) {
    begin[0] = (hsize_t)(row / spec->shape[1]);
    begin[1] = (hsize_t)(row % spec->shape[1]);
    box[0] = 1;
    box[1] = (hsize_t)count;
    box[2] = (hsize_t)last;
  }
  memory = H5Screate_simple(spec->rank, box, NULL);
  if (file < 0 || memory < 0 || H5Sselect_hyperslab(file, H5S_SELECT_SET, begin, NULL, box, NULL) < 0 ||
      H5Dwrite(writer->dataset, given, memory, file, H5P_DEFAULT, data) < 0)
    status = k3_status_fail(K3_ERR_INPUT, __FILE__, __LINE__, "%s: dataset %s: cannot write rows %lld to %lld: %s",
                            writer->partial, spec->path, (long long)row, (long long)(row + count), K3_HDF5_REASON);
  if (memory >= 0) H5Sclose(memory);
  if (file >= 0) H5Sclose(file);
  return status;
}

K3Status k3_model_writer_rows(K3ModelWriter *writer, const K3TensorSpec *spec, K3Type type, int64_t row, int64_t count,
                              const void *data)
{
  if (count == 0) return K3_OK;
  Written *entry = writer->count ? &writer->written[writer->count - 1] : NULL;
  if (writer->dataset < 0 || !entry || strcmp(entry->path, spec->path) != 0)
    K3_FAIL(K3_ERR_INPUT, "%s: dataset %s is not the one created last", writer->partial, spec->path);
  K3_TRY(note_rows(writer, entry, row, row + count));
  int64_t bytes = row_bytes(spec, type), most = MAX_PIECE / bytes > 0 ? MAX_PIECE / bytes : 1;
  const char *from = data;
  while (count > 0) {
    int64_t piece = count < most ? count : most;
    if (spec->rank == 3) { /* not across a slice of axis 0 */
      int64_t left = spec->shape[1] - row % spec->shape[1];
      if (piece > left) piece = left;
    }
    K3_TRY(write_box(writer, spec, type, row, piece, from));
    from += piece * bytes;
    row += piece;
    count -= piece;
  }
  return K3_OK;
}

K3Status k3_model_writer_codebook(K3ModelWriter *writer, const char *name, const void *data, size_t bytes)
{
  K3Status status = K3_OK;
  char path[64];
  hsize_t size = bytes;
  hid_t space = -1, links = -1, dataset = -1;
  if ((size_t)snprintf(path, sizeof path, "/codebooks/%s", name) >= sizeof path)
    K3_FAIL(K3_ERR_INPUT, "%s: codebook name \"%s\" is too long", writer->partial, name);
  space = H5Screate_simple(1, &size, NULL);
  links = H5Pcreate(H5P_LINK_CREATE);
  if (space >= 0 && links >= 0 && H5Pset_create_intermediate_group(links, 1) >= 0)
    dataset = H5Dcreate2(writer->file, path, H5T_STD_U8LE, space, links, H5P_DEFAULT, H5P_DEFAULT);
  if (dataset < 0 || H5Dwrite(dataset, H5T_NATIVE_UINT8, H5S_ALL, H5S_ALL, H5P_DEFAULT, data) < 0)
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: dataset %s: cannot write: %s", writer->partial, path, K3_HDF5_REASON);
  K3_TRY_DONE(write_text(writer, dataset, "units", "1"));
done:
  if (dataset >= 0) H5Dclose(dataset);
  if (links >= 0) H5Pclose(links);
  if (space >= 0) H5Sclose(space);
  return status;
}

/* ---------------------------------------------------------------- the end */

static K3Status check_whole(const K3ModelWriter *writer, const K3TensorTable *table)
{
  for (int64_t i = 0; i < table->count; i++) {
    const char *path = table->specs[i].path;
    const Written *entry = NULL;
    /* Writers mostly follow the table's order. */
    if (i < writer->count && strcmp(writer->written[i].path, path) == 0) entry = &writer->written[i];
    for (int64_t j = 0; j < writer->count && !entry; j++)
      if (strcmp(writer->written[j].path, path) == 0) entry = &writer->written[j];
    if (!entry) K3_FAIL(K3_ERR_INPUT, "%s: dataset %s was never created", writer->partial, path);
    int64_t rows = 0;
    for (int64_t j = 0; j < entry->count; j++) rows += entry->ranges[j][1] - entry->ranges[j][0];
    if (rows != entry->rows)
      K3_FAIL(K3_ERR_INPUT, "%s: dataset %s: %lld of %lld rows were written", writer->partial, path, (long long)rows,
              (long long)entry->rows);
  }
  return K3_OK;
}

static K3Status sync_path(const char *path, int flags)
{
  int descriptor = open(path, O_RDONLY | O_CLOEXEC | flags);
  if (descriptor < 0) K3_FAIL(K3_ERR_INPUT, "%s: cannot open to flush: %s", path, K3_ERRNO_REASON(errno));
  int failed = fsync(descriptor), error = errno;
  close(descriptor);
  if (failed && error != EINVAL && error != EROFS) /* some file systems cannot flush a directory */
    K3_FAIL(K3_ERR_INPUT, "%s: cannot flush to disk: %s", path, K3_ERRNO_REASON(error));
  return K3_OK;
}

static K3Status rename_into_place(K3ModelWriter *writer)
{
  int failed;
  if (writer->overwrite) {
    failed = rename(writer->partial, writer->path);
  } else { /* a file that appeared meanwhile is kept */
    failed = renameat2(AT_FDCWD, writer->partial, AT_FDCWD, writer->path, RENAME_NOREPLACE);
    if (failed && (errno == EINVAL || errno == ENOSYS)) {
      failed = access(writer->path, F_OK) == 0;
      if (failed) errno = EEXIST;
      else failed = rename(writer->partial, writer->path);
    }
  }
  if (failed)
    K3_FAIL(K3_ERR_INPUT, "%s: cannot be renamed to %s: %s", writer->partial, writer->path, K3_ERRNO_REASON(errno));
  writer->exists = 0;
  char directory[PATH_MAX];
  snprintf(directory, sizeof directory, "%s", writer->path);
  char *slash = strrchr(directory, '/');
  if (!slash) strcpy(directory, ".");
  else slash[slash == directory] = '\0';
  return sync_path(directory, O_DIRECTORY);
}

K3Status k3_model_writer_finish(K3ModelWriter *writer, const K3TensorTable *table)
{
  K3_TRY(close_dataset(writer));
  K3_TRY(check_whole(writer, table));
  if (H5Gclose(writer->layers) < 0 || H5Fflush(writer->file, H5F_SCOPE_GLOBAL) < 0)
    K3_FAIL(K3_ERR_INPUT, "%s: cannot flush: %s", writer->partial, K3_HDF5_REASON);
  writer->layers = -1;
  if (H5Fclose(writer->file) < 0) K3_FAIL(K3_ERR_INPUT, "%s: cannot close: %s", writer->partial, K3_HDF5_REASON);
  writer->file = -1;
  K3_TRY(sync_path(writer->partial, 0));
  return rename_into_place(writer);
}

/* The library cannot close a file whose last flush fails, and complains again when the process ends. An
 * unfinished file is thrown away, so its last writes may go to memory instead of a full disk. */
static void discard_writes(hid_t file)
{
  int descriptor = descriptor_of(file);
  int nowhere = memfd_create("k3decode-discarded", MFD_CLOEXEC);
  if (descriptor >= 0 && nowhere >= 0) dup3(nowhere, descriptor, O_CLOEXEC);
  if (nowhere >= 0) close(nowhere);
}

void k3_model_writer_close(K3ModelWriter *writer)
{
  if (!writer) return;
  if (writer->exists) unlink(writer->partial);
  if (writer->exists && writer->file >= 0) discard_writes(writer->file);
  if (writer->dataset >= 0) H5Dclose(writer->dataset);
  if (writer->layers >= 0) H5Gclose(writer->layers);
  if (writer->file >= 0) H5Fclose(writer->file);
  for (int64_t i = 0; i < writer->count; i++) free(writer->written[i].ranges);
  free(writer->written);
  free(writer);
}
