/* Writes a model file tensor by tensor. See model_writer.h. Layer: store.
 *
 * PATH.partial is created exclusively and locked while it grows. A leftover of a killed run bears no lock and
 * is replaced or, when its journal says that it is the same work (model_journal.h), gone on with; one that another
 * process writes is refused. Datasets are contiguous, their place is allocated when they are created, and their bytes
 * are written there past the library, by any number of threads; the library is called again when all is written. So a
 * writer that is killed between its last k3_model_writer_tensor and its finish leaves a file that can be opened. */
#include "store/model_writer.h"

#include <errno.h>
#include <fcntl.h>
#include <hdf5.h>
#include <inttypes.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "store/content_digest.h"
#include "store/disk_space.h"
#include "store/hdf5_error.h"
#include "store/model_journal.h"
#include "store/partial_file.h"
#include "store/row_ranges.h"

enum {
  MAX_CALL = 1 << 30,      /* bytes of one pwrite or of one step of a checksum */
  VERIFY_PIECE = 16 << 20, /* bytes read at a time */
  HEADER_ROOM = 128 << 10, /* more than /config, /codebooks and the groups take beside the tensors */
  TENSOR_ROOM = 2 << 10    /* more than what HDF5 keeps about a dataset */
};

/* What was written of one tensor. */
typedef struct {
  char path[sizeof((K3TensorSpec *)0)->path];
  K3Type type;
  int64_t offset; /* of the dataset in the file */
  K3RowRanges rows;
} Written;

struct K3ModelWriter {
  char path[PATH_MAX], partial[PATH_MAX];
  K3Config config;
  int overwrite;
  int exists; /* the .partial file is ours */
  hid_t file, layers;
  int descriptor; /* under `file` */
  Written *written;
  int64_t count, room;
  K3ModelJournal *journal; /* NULL: not restartable */
  int keep;                /* an unfinished file is kept for the next run */
  int replaced;            /* an unfinished file of other work gave way */
  uint64_t digest;
  pthread_mutex_t lock; /* of the ranges and the journal */
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

/* A writer for `path` that has no file yet. */
static K3Status new_writer(const char *path, const K3Config *config, int overwrite, K3ModelWriter **result)
{
  *result = NULL;
  k3_hdf5_silence();
  K3_TRY(k3_partial_check(path, overwrite, "k3decode-model", "model file"));
  K3ModelWriter *writer = calloc(1, sizeof *writer);
  if (!writer) K3_FAIL(K3_ERR_INPUT, "%s: no memory", path);
  writer->file = writer->layers = writer->descriptor = -1;
  writer->config = *config;
  writer->overwrite = overwrite;
  pthread_mutex_init(&writer->lock, NULL);
  snprintf(writer->path, sizeof writer->path, "%s", path); /* both fit: k3_partial_check */
  snprintf(writer->partial, sizeof writer->partial, "%s.partial", path);
  *result = writer;
  return K3_OK;
}

static int was_left(const K3ModelWriter *writer)
{
  struct stat found;
  return stat(writer->partial, &found) == 0 && found.st_size > 0;
}

static K3Status remove_leftover(K3ModelWriter *writer)
{
  writer->replaced = was_left(writer);
  K3_TRY(k3_partial_remove_leftover(writer->partial));
  return k3_model_journal_remove(writer->partial);
}

/* The file itself, with root attributes, /config and /layers. */
static K3Status create_file(K3ModelWriter *writer, const char *provenance)
{
  int64_t version = 1;
  K3_TRY(k3_partial_create(writer->partial, H5P_DEFAULT, &writer->file));
  writer->exists = 1;
  K3_TRY(write_text(writer, writer->file, "format", "k3decode-model"));
  K3_TRY(write_scalar(writer, writer->file, "format_version", H5T_STD_I64LE, H5T_NATIVE_INT64, &version));
  K3_TRY(write_text(writer, writer->file, "architecture", "kimi-k3"));
  K3_TRY(write_text(writer, writer->file, "provenance", provenance));
  K3_TRY(write_text(writer, writer->file, K3_CONTENT_DIGEST, "0000000000000000")); /* its place; the end fills it */
  K3_TRY(write_config(writer, &writer->config));
  writer->layers = H5Gcreate2(writer->file, "layers", H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
  if (writer->layers < 0) K3_FAIL(K3_ERR_INPUT, "%s: cannot create /layers: %s", writer->partial, K3_HDF5_REASON);
  writer->descriptor = k3_partial_descriptor(writer->file);
  if (writer->descriptor < 0) K3_FAIL(K3_ERR_INPUT, "%s: no file descriptor: %s", writer->partial, K3_HDF5_REASON);
  return K3_OK;
}

K3Status k3_model_writer_create(const char *path, const K3Config *config, const char *provenance, int overwrite,
                                K3ModelWriter **result)
{
  K3ModelWriter *writer = NULL;
  *result = NULL;
  K3_TRY(new_writer(path, config, overwrite, &writer));
  K3Status status = remove_leftover(writer);
  if (status == K3_OK) status = create_file(writer, provenance);
  if (status != K3_OK) k3_model_writer_close(writer);
  else *result = writer;
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

int64_t k3_model_writer_room(const K3TensorTable *table, const K3Type *types)
{
  int64_t bytes = HEADER_ROOM + table->count * TENSOR_ROOM;
  for (int64_t i = 0; i < table->count; i++)
    bytes += matrix_rows(&table->specs[i]) * row_bytes(&table->specs[i], types[i]);
  return bytes;
}

static hid_t stored_type(K3Type type)
{
  return type == K3_TYPE_F32 ? H5T_IEEE_F32LE : k3_format_is_quantised(type) ? H5T_STD_U8LE : H5T_STD_U16LE;
}

static Written *find_written(const K3ModelWriter *writer, const K3TensorSpec *spec)
{
  for (int64_t i = writer->count - 1; i >= 0; i--) /* writers mostly look for the last one */
    if (strcmp(writer->written[i].path, spec->path) == 0) return &writer->written[i];
  return NULL;
}

static K3Status add_written(K3ModelWriter *writer, const K3TensorSpec *spec, K3Type type, hid_t dataset)
{
  if (writer->count == writer->room) {
    int64_t room = writer->room ? 2 * writer->room : 256;
    Written *larger = realloc(writer->written, (size_t)room * sizeof *larger);
    if (!larger) K3_FAIL(K3_ERR_INPUT, "%s: no memory", writer->partial);
    writer->written = larger;
    writer->room = room;
  }
  haddr_t offset = H5Dget_offset(dataset);
  if (offset == HADDR_UNDEF)
    K3_FAIL(K3_ERR_INPUT, "%s: dataset %s: has no place in the file: %s", writer->partial, spec->path, K3_HDF5_REASON);
  Written *entry = &writer->written[writer->count++];
  memset(entry, 0, sizeof *entry);
  memcpy(entry->path, spec->path, sizeof entry->path);
  entry->type = type;
  entry->rows.rows = matrix_rows(spec);
  entry->rows.row_bytes = row_bytes(spec, type);
  entry->offset = (int64_t)offset;
  return K3_OK;
}

K3Status k3_model_writer_tensor(K3ModelWriter *writer, const K3TensorSpec *spec, K3Type type)
{
  K3Status status = K3_OK;
  hid_t space = -1, creation = -1, links = -1, shape_space = -1, dataset = -1;
  const uint32_t no_crc = 0;
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
  if (find_written(writer, spec)) K3_FAIL(K3_ERR_INPUT, "%s: dataset %s is created twice", writer->partial, spec->path);

  space = H5Screate_simple(spec->rank, dims, NULL);
  creation = H5Pcreate(H5P_DATASET_CREATE);
  links = H5Pcreate(H5P_LINK_CREATE);
  if (space < 0 || creation < 0 || links < 0 || H5Pset_layout(creation, H5D_CONTIGUOUS) < 0 ||
      H5Pset_alloc_time(creation, H5D_ALLOC_TIME_EARLY) < 0 || H5Pset_fill_time(creation, H5D_FILL_TIME_NEVER) < 0 ||
      H5Pset_create_intermediate_group(links, 1) < 0)
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: dataset %s: cannot create: %s", writer->partial, spec->path, K3_HDF5_REASON);
  dataset = H5Dcreate2(writer->file, spec->path, stored_type(type), space, links, creation, H5P_DEFAULT);
  if (dataset < 0)
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: dataset %s: cannot create: %s", writer->partial, spec->path, K3_HDF5_REASON);
  K3_TRY_DONE(write_text(writer, dataset, "units", "1"));
  if (type != K3_TYPE_F32) K3_TRY_DONE(write_text(writer, dataset, "type", k3_format(type)->name));
  if (k3_format_is_quantised(type)) {
    shape_space = H5Screate_simple(1, &rank, NULL);
    if (shape_space < 0)
      K3_FAIL_DONE(K3_ERR_INPUT, "%s: dataset %s: cannot create: %s", writer->partial, spec->path, K3_HDF5_REASON);
    K3_TRY_DONE(write_attribute(writer, dataset, "shape", H5T_STD_I64LE, H5T_NATIVE_INT64, shape_space, spec->shape));
  }
  K3_TRY_DONE(write_scalar(writer, dataset, K3_TENSOR_CRC, H5T_STD_U32LE, H5T_NATIVE_UINT32, &no_crc));
  K3_TRY_DONE(add_written(writer, spec, type, dataset));
done:
  if (dataset >= 0 && H5Dclose(dataset) < 0 && status == K3_OK)
    status = k3_status_fail(K3_ERR_INPUT, __FILE__, __LINE__, "%s: dataset %s: cannot close: %s", writer->partial,
                            spec->path, K3_HDF5_REASON);
  if (shape_space >= 0) H5Sclose(shape_space);
  if (links >= 0) H5Pclose(links);
  if (creation >= 0) H5Pclose(creation);
  if (space >= 0) H5Sclose(space);
  return status;
}

static K3Status write_bytes(const K3ModelWriter *writer, const Written *entry, int64_t row, int64_t count,
                            const void *data)
{
  const char *from = data;
  int64_t left = count * entry->rows.row_bytes, at = entry->offset + row * entry->rows.row_bytes;
  while (left > 0) {
    ssize_t put = pwrite(writer->descriptor, from, (size_t)(left < MAX_CALL ? left : MAX_CALL), (off_t)at);
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0)
      K3_FAIL(K3_ERR_INPUT, "%s: dataset %s: cannot write rows %lld to %lld: %s", writer->partial, entry->path,
              (long long)row, (long long)(row + count), K3_ERRNO_REASON(put < 0 ? errno : EIO));
    from += put;
    at += put;
    left -= put;
  }
  return K3_OK;
}

K3Status k3_model_writer_rows(K3ModelWriter *writer, const K3TensorSpec *spec, K3Type type, int64_t row, int64_t count,
                              const void *data)
{
  if (count == 0) return K3_OK;
  Written *entry = find_written(writer, spec);
  if (!entry || entry->type != type)
    K3_FAIL(K3_ERR_INPUT, "%s: dataset %s was not created, or in another type", writer->partial, spec->path);
  if (row < 0 || row > entry->rows.rows - count)
    K3_FAIL(K3_ERR_INPUT, "%s: dataset %s: rows %lld to %lld of %lld are written twice or do not exist",
            writer->partial, entry->path, (long long)row, (long long)(row + count), (long long)entry->rows.rows);
  uint32_t crc = k3_content_crc(0, data, count * entry->rows.row_bytes);
  K3_TRY(write_bytes(writer, entry, row, count, data));
  pthread_mutex_lock(&writer->lock);
  K3Status status = k3_row_ranges_add(&entry->rows, writer->partial, entry->path, row, row + count, crc);
  pthread_mutex_unlock(&writer->lock);
  return status;
}

static K3Status flush(K3ModelWriter *writer)
{
  if (H5Fflush(writer->file, H5F_SCOPE_GLOBAL) < 0)
    K3_FAIL(K3_ERR_INPUT, "%s: cannot flush: %s", writer->partial, K3_HDF5_REASON);
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
  if (writer->journal && H5Lexists(writer->file, "codebooks", H5P_DEFAULT) > 0 &&
      H5Lexists(writer->file, path, H5P_DEFAULT) > 0)
    return K3_OK; /* of the run that is gone on with */
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
  return status == K3_OK && writer->journal ? flush(writer) : status;
}

/* ---------------------------------------------------------------- all tensors at once, and going on */

/* A tensor of a file that was left: its place, when it is the one that is wanted. */
static K3Status find_again(K3ModelWriter *writer, const K3TensorSpec *spec, K3Type type)
{
  hid_t dataset = H5Dopen2(writer->file, spec->path, H5P_DEFAULT);
  if (dataset < 0) K3_FAIL(K3_ERR_INPUT, "%s: dataset %s: cannot be opened", writer->partial, spec->path);
  K3Status status = add_written(writer, spec, type, dataset);
  if (status == K3_OK && (int64_t)H5Dget_storage_size(dataset) != matrix_rows(spec) * row_bytes(spec, type))
    status = k3_status_fail(K3_ERR_INPUT, __FILE__, __LINE__, "%s: dataset %s: of another size", writer->partial,
                            spec->path);
  H5Dclose(dataset);
  return status;
}

/* Opens what another run left, with its journal. Any failure means that there is nothing to go on with. */
static K3Status open_leftover(K3ModelWriter *writer, const K3TensorTable *table, const K3Type *types, uint64_t identity)
{
  K3Status status = K3_OK;
  if (!was_left(writer)) K3_FAIL(K3_ERR_INPUT, "%s: nothing was left", writer->partial); /* in an empty file HDF5 would begin one */
  hid_t access = H5Pcreate(H5P_FILE_ACCESS);
  if (access < 0 || H5Pset_file_locking(access, 1, 1) < 0) K3_FAIL_DONE(K3_ERR_INPUT, "no access list");
  writer->file = H5Fopen(writer->partial, H5F_ACC_RDWR, access);
  if (writer->file < 0) K3_FAIL_DONE(K3_ERR_INPUT, "%s: cannot be opened", writer->partial);
  writer->descriptor = k3_partial_descriptor(writer->file);
  if (writer->descriptor < 0 || (flock(writer->descriptor, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK))
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: is being written", writer->partial);
  K3_TRY_DONE(k3_model_journal_open(writer->partial, identity, &writer->journal));
  if (!writer->journal) K3_FAIL_DONE(K3_ERR_INPUT, "%s: other work", writer->partial);
  for (int64_t i = 0; i < table->count; i++) K3_TRY_DONE(find_again(writer, &table->specs[i], types[i]));
  writer->exists = 1;
done:
  if (access >= 0) H5Pclose(access);
  if (status == K3_OK) return K3_OK;
  if (writer->file >= 0) H5Fclose(writer->file);
  k3_model_journal_close(writer->journal);
  writer->journal = NULL;
  writer->file = writer->descriptor = -1;
  writer->count = 0;
  return status;
}

K3Status k3_model_writer_create_all(const char *path, const K3Config *config, const K3TensorTable *table,
                                    const K3Type *types, uint64_t identity, const char *provenance, int overwrite,
                                    K3ModelWriter **result)
{
  K3Status status = K3_OK;
  K3ModelWriter *writer = NULL;
  *result = NULL;
  K3_TRY(new_writer(path, config, overwrite, &writer));
  if (open_leftover(writer, table, types, identity) == K3_OK) {
    *result = writer;
    return K3_OK;
  }
  k3_status_clear();                    /* nothing to go on with is no failure */
  K3_TRY_DONE(remove_leftover(writer)); /* before its room is counted */
  K3_TRY_DONE(k3_disk_space_check(path, "model file", k3_model_writer_room(table, types), "choose another output"));
  K3_TRY_DONE(create_file(writer, provenance));
  for (int64_t i = 0; i < table->count; i++) K3_TRY_DONE(k3_model_writer_tensor(writer, &table->specs[i], types[i]));
  K3_TRY_DONE(flush(writer));
  K3_TRY_DONE(k3_model_journal_create(writer->partial, identity, &writer->journal));
  *result = writer;
done:
  if (status != K3_OK) k3_model_writer_close(writer);
  return status;
}

K3Status k3_model_writer_restore(K3ModelWriter *writer, const K3TensorSpec *spec, int *whole)
{
  K3Status status = K3_OK;
  uint32_t wanted = 0, crc = 0;
  Written *entry = find_written(writer, spec);
  *whole = 0;
  if (!entry || !writer->journal || !k3_model_journal_find(writer->journal, spec->path, &wanted)) return K3_OK;
  char *piece = malloc(VERIFY_PIECE);
  if (!piece) K3_FAIL(K3_ERR_INPUT, "%s: no memory to look at dataset %s", writer->partial, spec->path);
  int64_t all = entry->rows.rows * entry->rows.row_bytes;
  for (int64_t at = 0; at < all;) {
    ssize_t got = pread(writer->descriptor, piece, (size_t)(all - at < VERIFY_PIECE ? all - at : VERIFY_PIECE),
                        (off_t)(entry->offset + at));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) goto done; /* shorter than the journal says: written again */
    crc = k3_content_crc(crc, piece, got);
    at += got;
  }
  if (crc != wanted) goto done;
  pthread_mutex_lock(&writer->lock);
  status = k3_row_ranges_add(&entry->rows, writer->partial, entry->path, 0, entry->rows.rows, crc);
  pthread_mutex_unlock(&writer->lock);
  *whole = status == K3_OK;
done:
  free(piece);
  return status;
}

K3Status k3_model_writer_done(K3ModelWriter *writer, const K3TensorSpec *spec)
{
  const Written *entry = find_written(writer, spec);
  if (!writer->journal || !entry || !k3_row_ranges_whole(&entry->rows))
    K3_FAIL(K3_ERR_INPUT, "%s: dataset %s is not whole", writer->partial, spec->path);
  pthread_mutex_lock(&writer->lock);
  K3Status status = k3_model_journal_add(writer->journal, spec->path, entry->rows.ranges[0].crc);
  pthread_mutex_unlock(&writer->lock);
  return status;
}

/* ---------------------------------------------------------------- the end */

/* Every tensor of the table was written whole: stores its CRC, and the digest over all of them. */
static K3Status write_digests(K3ModelWriter *writer, const K3TensorTable *table)
{
  writer->digest = k3_content_begin(&writer->config);
  for (int64_t i = 0; i < table->count; i++) {
    const K3TensorSpec *spec = &table->specs[i];
    const Written *entry = i < writer->count && strcmp(writer->written[i].path, spec->path) == 0
                               ? &writer->written[i] /* writers mostly follow the table's order */
                               : find_written(writer, spec);
    if (!entry) K3_FAIL(K3_ERR_INPUT, "%s: dataset %s was never created", writer->partial, spec->path);
    if (!k3_row_ranges_whole(&entry->rows)) {
      K3_FAIL(K3_ERR_INPUT, "%s: dataset %s: %lld of %lld rows were written", writer->partial, spec->path,
              (long long)k3_row_ranges_count(&entry->rows), (long long)entry->rows.rows);
    }
    K3_TRY(k3_content_put_crc(writer->partial, writer->file, spec->path, entry->rows.ranges[0].crc));
    writer->digest = k3_content_add(writer->digest, spec, entry->type, entry->rows.ranges[0].crc);
  }
  return k3_content_put_digest(writer->partial, writer->file, writer->digest);
}

K3Status k3_model_writer_finish(K3ModelWriter *writer, const K3TensorTable *table)
{
  K3_TRY(write_digests(writer, table));
  if ((writer->layers >= 0 && H5Gclose(writer->layers) < 0) || H5Fflush(writer->file, H5F_SCOPE_GLOBAL) < 0)
    K3_FAIL(K3_ERR_INPUT, "%s: cannot flush: %s", writer->partial, K3_HDF5_REASON);
  writer->layers = -1;
  if (H5Fclose(writer->file) < 0) K3_FAIL(K3_ERR_INPUT, "%s: cannot close: %s", writer->partial, K3_HDF5_REASON);
  writer->file = -1;
  K3_TRY(k3_partial_publish(writer->partial, writer->path, writer->overwrite));
  writer->exists = 0;
  return writer->journal ? k3_model_journal_remove(writer->partial) : K3_OK;
}

int k3_model_writer_replaced(const K3ModelWriter *writer) { return writer->replaced; }

uint64_t k3_model_writer_digest(const K3ModelWriter *writer) { return writer->digest; }

void k3_model_writer_keep(K3ModelWriter *writer) { writer->keep = writer->journal != NULL; }

void k3_model_writer_close(K3ModelWriter *writer)
{
  if (!writer) return;
  int discard = writer->exists && !writer->keep;
  if (discard) unlink(writer->partial);
  if (discard && writer->journal) k3_model_journal_remove(writer->partial);
  if (discard && writer->file >= 0) k3_partial_discard(writer->file);
  if (writer->layers >= 0) H5Gclose(writer->layers);
  if (writer->file >= 0) H5Fclose(writer->file);
  for (int64_t i = 0; i < writer->count; i++) k3_row_ranges_free(&writer->written[i].rows);
  free(writer->written);
  k3_model_journal_close(writer->journal);
  pthread_mutex_destroy(&writer->lock);
  free(writer);
}
