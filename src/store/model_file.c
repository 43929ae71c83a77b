/* The model file reader: opens, reads /config and bands. See source.h; tensors are validated by model_check.c. Layer: store.
 * Source: model.md, "The model file".
 *
 * Every rank opens the file read-only with the serial library. A band of a contiguous dataset is read with
 * pread at the dataset's offset, straight into the destination: the bytes of the band and no others. Chunked,
 * compressed, compact and virtual datasets go through H5Dread in bounded pieces. */
#include <errno.h>
#include <hdf5.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "store/digest.h"
#include "store/hdf5_attribute.h"
#include "store/hdf5_error.h"
#include "store/hdf5_input.h"
#include "store/model_check.h"
#include "store/source.h"

enum {
  MAX_CALL = 1 << 30,  /* bytes of one pread */
  MAX_PIECE = 1 << 28, /* bytes of one H5Dread */
  SAMPLE_BYTES = 4096, /* of one sample of a tensor, in the digest */
  SAMPLES = 5,         /* evenly spaced from its first to its last rows */
  MAX_TEXT = 4096
};

typedef struct {
  K3Source base; /* first: a K3Source* is a ModelFile* */
  hid_t file;
} ModelFile;

/* ---------------------------------------------------------------- opening */

static K3Status check_text(const char *origin, hid_t place, const char *name, const char *wanted)
{
  char got[MAX_TEXT];
  K3_TRY(k3_hdf5_read_text(origin, place, "the root group", name, got, sizeof got));
  if (strcmp(got, wanted) != 0)
    K3_FAIL(K3_ERR_INPUT, "%s: attribute %s = \"%.200s\", wanted \"%s\"; name a model file of this program", origin,
            name, got, wanted);
  return K3_OK;
}

static K3Status check_root(ModelFile *model)
{
  const char *origin = model->base.origin;
  int64_t version = 0;
  K3_TRY(check_text(origin, model->file, "format", "k3decode-model"));
  K3_TRY(k3_hdf5_read_number(origin, model->file, "the root group", "format_version", H5T_INTEGER, H5T_NATIVE_INT64,
                             &version));
  if (version != 1)
    K3_FAIL(K3_ERR_INPUT,
            "%s: format_version = %" PRId64 ", wanted 1; write the model again with this program, or use the "
            "program's version that wrote it",
            origin, version);
  return check_text(origin, model->file, "architecture", "kimi-k3");
}

/* ---------------------------------------------------------------- reading */

/* A band as bytes: `run` contiguous bytes at each of outer × inner places. */
typedef struct {
  int64_t first; /* byte offset in the dataset */
  int64_t run, inner, inner_stride, outer, outer_stride;
} Runs;

/* Boxes are seen with three axes, the leading ones of length 1; whole axes are merged into the run. */
static Runs find_runs(const K3TensorSpec *spec, K3Type type, const K3Band *band)
{
  int64_t shape[3] = {1, 1, 1}, begin[3] = {0, 0, 0}, count[3] = {1, 1, 1};
  for (int i = 0; i < spec->rank; i++) {
    int axis = 3 - spec->rank + i;
    shape[axis] = spec->shape[i], begin[axis] = band->begin[i], count[axis] = band->count[i];
  }
  int64_t row = k3_format_bytes(type, shape[2]);
  Runs runs = {(begin[0] * shape[1] + begin[1]) * row + k3_format_bytes(type, begin[2]),
               k3_format_bytes(type, count[2]),
               count[1],
               row,
               count[0],
               shape[1] * row};
  if (runs.run == row) { /* whole rows */
    runs.run *= runs.inner;
    runs.inner = 1;
    if (count[1] == shape[1]) {
      runs.run *= runs.outer;
      runs.outer = 1;
    }
  }
  return runs;
}

static K3Status read_bytes(const char *origin, const char *path, int descriptor, int64_t offset, int64_t bytes,
                           char *to)
{
  int64_t wanted_end = offset + bytes;
  while (bytes > 0) {
    ssize_t got = pread(descriptor, to, (size_t)(bytes < MAX_CALL ? bytes : MAX_CALL), (off_t)offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0)
      K3_FAIL(K3_ERR_INPUT, "%s: dataset %s: cannot read at byte %" PRId64 ": %s", origin, path, offset,
              K3_ERRNO_REASON(errno));
    if (got == 0)
      K3_FAIL(K3_ERR_INPUT,
              "%s: dataset %s: the file is truncated: it ends at byte %" PRId64 ", wanted %" PRId64 " and more; copy "
              "or write it again",
              origin, path, offset, wanted_end);
    to += got;
    offset += got;
    bytes -= got;
  }
  return K3_OK;
}

/* The HDF5 type in memory; bytes are passed on as stored. */
static hid_t memory_type(K3Type type)
{
  return type == K3_TYPE_F32 ? H5T_NATIVE_FLOAT : k3_format_is_quantised(type) ? H5T_NATIVE_UINT8 : H5T_NATIVE_UINT16;
}

/* Descriptor and byte offset for reading past the library; *descriptor = -1 where that cannot be done. */
static K3Status find_direct(const char *origin, const K3TensorSpec *spec, K3Type type, hid_t dataset, int *descriptor,
                            int64_t *offset)
{
  K3Status status = K3_OK;
  hid_t creation = -1, stored = -1, file = -1;
  void *handle = NULL;
  *descriptor = -1;
  creation = H5Dget_create_plist(dataset);
  stored = H5Dget_type(dataset);
  file = H5Iget_file_id(dataset); /* may be another file than the model's, behind an external link */
  if (creation < 0 || stored < 0 || file < 0)
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: dataset %s: cannot be examined: %s", origin, spec->path, K3_HDF5_REASON);
  haddr_t at = H5Pget_layout(creation) == H5D_CONTIGUOUS && H5Pget_external_count(creation) == 0
                   ? H5Dget_offset(dataset)
                   : HADDR_UNDEF;
  if (at != HADDR_UNDEF && H5Tequal(stored, memory_type(type)) > 0 &&
      H5Fget_vfd_handle(file, H5P_DEFAULT, &handle) >= 0 && handle) {
    *descriptor = *(int *)handle; /* the files are opened with the default driver, which keeps an int here */
    *offset = (int64_t)at;
  }
done:
  if (file >= 0) H5Fclose(file);
  if (stored >= 0) H5Tclose(stored);
  if (creation >= 0) H5Pclose(creation);
  return status;
}

/* One H5Dread of a box in units of stored elements. */
static K3Status read_box(const char *origin, const K3TensorSpec *spec, K3Type type, hid_t dataset, const hsize_t *begin,
                         const hsize_t *count, void *to)
{
  K3Status status = K3_OK;
  hid_t memory = H5Screate_simple(spec->rank, count, NULL), file = H5Dget_space(dataset);
  if (memory < 0 || file < 0 || H5Sselect_hyperslab(file, H5S_SELECT_SET, begin, NULL, count, NULL) < 0 ||
      H5Dread(dataset, memory_type(type), memory, file, H5P_DEFAULT, to) < 0)
    status = k3_status_fail(K3_ERR_INPUT, __FILE__, __LINE__, "%s: dataset %s: cannot be read: %s", origin, spec->path,
                            K3_HDF5_REASON);
  if (file >= 0) H5Sclose(file);
  if (memory >= 0) H5Sclose(memory);
  return status;
}

/* A band through the library, in pieces along its first axis, and its second where one index is too much. */
static K3Status read_through_library(const char *origin, const K3TensorSpec *spec, K3Type type, hid_t dataset,
                                     const K3Band *band, char *to)
{
  int last = spec->rank - 1;
  int64_t begin[3] = {0, 0, 0}, count[3] = {1, 1, 1};
  int64_t unit = k3_format_is_quantised(type) ? 1 : k3_format(type)->block_bytes; /* bytes of a stored element */
  for (int i = 0; i < spec->rank; i++) begin[i] = band->begin[i], count[i] = band->count[i];
  begin[last] = k3_format_bytes(type, begin[last]) / unit;
  count[last] = k3_format_bytes(type, count[last]) / unit;
  int64_t slab = unit * count[1] * count[2]; /* bytes of one index of axis 0 */
  int64_t step0 = MAX_PIECE / slab > 0 ? MAX_PIECE / slab : 1;
  int64_t step1 = slab <= MAX_PIECE ? count[1] : MAX_PIECE / (unit * count[2]) > 0 ? MAX_PIECE / (unit * count[2]) : 1;
  for (int64_t i = 0; i < count[0]; i += step0)
    for (int64_t j = 0; j < count[1]; j += step1) {
      int64_t n0 = count[0] - i < step0 ? count[0] - i : step0, n1 = count[1] - j < step1 ? count[1] - j : step1;
      hsize_t from[3] = {(hsize_t)(begin[0] + i), (hsize_t)(begin[1] + j), (hsize_t)begin[2]};
      hsize_t box[3] = {(hsize_t)n0, (hsize_t)n1, (hsize_t)count[2]};
      K3_TRY(read_box(origin, spec, type, dataset, from, box, to + i * slab + j * count[2] * unit));
    }
  return K3_OK;
}

static K3Status model_read(K3Source *source, int64_t tensor, const K3Band *band, void *destination)
{
  K3Status status = K3_OK;
  ModelFile *model = (ModelFile *)source;
  const K3TensorSpec *spec = &source->table.specs[tensor];
  K3Type type = source->types[tensor];
  int64_t bytes = k3_source_band_bytes(source, tensor, band), offset = 0;
  int descriptor = -1, last = spec->rank - 1;
  hid_t dataset = -1;
  for (int i = 0; i < spec->rank; i++) {
    int64_t block = i == last ? k3_format(type)->block_values : 1;
    if (band->begin[i] < 0 || band->count[i] < 0 || band->begin[i] > spec->shape[i] - band->count[i] ||
        band->begin[i] % block || band->count[i] % block)
      K3_FAIL(K3_ERR_INPUT,
              "%s: dataset %s: band %" PRId64 " + %" PRId64 " of axis %d is not inside 0 to %" PRId64
              " or cuts a block",
              source->origin, spec->path, band->begin[i], band->count[i], i, spec->shape[i]);
  }
  if (bytes == 0) return K3_OK;
  dataset = H5Dopen2(model->file, spec->path, H5P_DEFAULT);
  if (dataset < 0)
    K3_FAIL(K3_ERR_INPUT, "%s: dataset %s: cannot be opened: %s", source->origin, spec->path, K3_HDF5_REASON);
  K3_TRY_DONE(find_direct(source->origin, spec, type, dataset, &descriptor, &offset));
  if (descriptor < 0) {
    K3_TRY_DONE(read_through_library(source->origin, spec, type, dataset, band, destination));
  } else {
    Runs runs = find_runs(spec, type, band);
    char *to = destination;
    for (int64_t i = 0; i < runs.outer; i++)
      for (int64_t j = 0; j < runs.inner; j++, to += runs.run)
        K3_TRY_DONE(read_bytes(source->origin, spec->path, descriptor,
                               offset + runs.first + i * runs.outer_stride + j * runs.inner_stride, runs.run, to));
  }
  source->bytes_read += bytes;
done:
  H5Dclose(dataset);
  return status;
}

static K3Status model_codebook(K3Source *source, const char *name, void **data, size_t *bytes)
{
  K3Status status = K3_OK;
  ModelFile *model = (ModelFile *)source;
  char path[64];
  hid_t dataset = -1, type = -1, space = -1;
  *data = NULL;
  *bytes = 0;
  if ((size_t)snprintf(path, sizeof path, "/codebooks/%s", name) >= sizeof path)
    K3_FAIL(K3_ERR_INPUT, "%s: codebook name \"%s\" is too long", source->origin, name);
  K3_TRY(k3_model_open_dataset(source->origin, model->file, path, "the codebook of that format", &dataset));
  type = H5Dget_type(dataset);
  space = type < 0 ? -1 : H5Dget_space(dataset);
  if (space < 0)
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: dataset %s: cannot be examined: %s", source->origin, path, K3_HDF5_REASON);
  hssize_t points = H5Sget_simple_extent_npoints(space);
  size_t size = (size_t)points * H5Tget_size(type);
  if (points < 1 || size > (size_t)1 << 28 || (H5Tget_class(type) != H5T_INTEGER && H5Tget_class(type) != H5T_FLOAT))
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: dataset %s: %" PRId64 " elements of %s, wanted a small table of numbers",
                 source->origin, path, (int64_t)points, k3_hdf5_class_name(H5Tget_class(type)));
  *data = malloc(size);
  if (!*data) K3_FAIL_DONE(K3_ERR_INPUT, "%s: no memory for codebook %s", source->origin, name);
  if (H5Dread(dataset, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, *data) < 0)
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: dataset %s: cannot be read: %s", source->origin, path, K3_HDF5_REASON);
  *bytes = size;
done:
  if (status != K3_OK) {
    free(*data);
    *data = NULL;
  }
  if (space >= 0) H5Sclose(space);
  if (type >= 0) H5Tclose(type);
  H5Dclose(dataset);
  return status;
}

/* ---------------------------------------------------------------- opening, once more */

/* SAMPLE_BYTES of a tensor: sample 0 at its beginning, the last at its end, the others between. */
static K3Band sample_band(const K3TensorSpec *spec, K3Type type, int sample)
{
  K3Band band = {{0, 0, 0}, {1, 1, 1}};
  int last = spec->rank - 1, axis = spec->rank > 1 ? last - 1 : last;
  int64_t block = k3_format(type)->block_values;
  int64_t most = SAMPLE_BYTES / k3_format(type)->block_bytes * block; /* values of a sample, whole blocks */
  band.count[last] = spec->shape[last] < most ? spec->shape[last] : most;
  if (axis != last) {
    int64_t rows = most / band.count[last];
    band.count[axis] = rows < spec->shape[axis] ? rows : spec->shape[axis];
  }
  for (int i = 0; i < spec->rank; i++) {
    band.begin[i] = (spec->shape[i] - band.count[i]) * sample / (SAMPLES - 1);
    if (i == last) band.begin[i] -= band.begin[i] % block;
  }
  return band;
}

/* Over config, tensors, file size and samples of the content, so that ranks notice a replaced file. */
static K3Status find_digest(ModelFile *model)
{
  K3Source *source = &model->base;
  hsize_t size = 0;
  uint8_t sample[SAMPLE_BYTES];
  if (H5Fget_filesize(model->file, &size) < 0) K3_FAIL(K3_ERR_INPUT, "%s: no size: %s", source->origin, K3_HDF5_REASON);
  uint64_t digest = k3_digest_number(k3_digest_config(k3_digest_text(K3_DIGEST_START, "file"), &source->config), size);
  for (int64_t i = 0; i < source->table.count; i++) {
    digest = k3_digest_tensor(digest, &source->table.specs[i], source->types[i]);
    for (int n = 0; n < SAMPLES; n++) {
      K3Band band = sample_band(&source->table.specs[i], source->types[i], n);
      K3_TRY(model_read(source, i, &band, sample));
      digest = k3_digest_bytes(digest, sample, (size_t)k3_source_band_bytes(source, i, &band));
    }
  }
  source->digest = digest;
  source->bytes_read = 0;
  return K3_OK;
}

static void model_close(K3Source *source)
{
  ModelFile *model = (ModelFile *)source;
  if (!model) return;
  if (model->file >= 0) H5Fclose(model->file);
  k3_tensors_free(&source->table);
  free(source->types);
  free(model);
}

K3Status k3_model_file_open(const char *path, K3Source **source)
{
  K3Status status = K3_OK;
  int needed[K3_CODEBOOK_COUNT];
  *source = NULL;
  k3_hdf5_silence();
  ModelFile *model = calloc(1, sizeof *model);
  if (!model) K3_FAIL(K3_ERR_INPUT, "%s: no memory", path);
  K3Source *base = &model->base;
  model->file = -1;
  snprintf(base->origin, sizeof base->origin, "%s", path);
  base->read = model_read;
  base->codebook = model_codebook;
  base->close = model_close;
  K3_TRY_DONE(k3_hdf5_open_input(path, &model->file));
  K3_TRY_DONE(check_root(model));
  K3_TRY_DONE(k3_hdf5_read_config(base->origin, model->file, &base->config));
  K3_TRY_DONE(k3_tensors_build(&base->config, &base->table));
  base->types = calloc((size_t)base->table.count, sizeof *base->types);
  if (!base->types) K3_FAIL_DONE(K3_ERR_INPUT, "%s: no memory", path);
  K3_TRY_DONE(k3_model_check_tensors(base, model->file));
  k3_codebooks_needed(base->types, base->table.count, needed);
  for (int id = 0; id < K3_CODEBOOK_COUNT; id++) {
    uint32_t *words = NULL;
    if (needed[id]) K3_TRY_DONE(k3_source_codebook(base, (K3CodebookId)id, &words));
    free(words);
  }
  K3_TRY_DONE(find_digest(model));
  *source = base;
done:
  if (status != K3_OK) model_close(base);
  return status;
}
