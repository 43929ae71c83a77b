/* `k3decode info --check`: reads every tensor of a model file and names values that may not be. Layer: commands. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "commands/commands.h"
#include "commands/progress.h"
#include "plan/block_fault.h"
#include "store/content_digest.h"
#include "store/source.h"

enum { PIECE_BYTES = 16 << 20 };

/* What is wrong with a tensor: how often, and where first. */
typedef struct {
  int64_t count;
  int64_t first; /* row-major element */
  const char *what;
} Fault;

/* Scans `values` values whose first is row-major element `first`. */
static void scan(K3Type type, const uint8_t *data, int64_t values, int64_t first, Fault *fault)
{
  const K3Format *format = k3_format(type);
  for (int64_t i = 0; i < values / format->block_values; i++) {
    const char *what = k3_block_fault(type, data + i * format->block_bytes);
    if (!what) continue;
    if (fault->count++ == 0) {
      fault->first = first + i * format->block_values;
      fault->what = what;
    }
  }
}

/* Reads a tensor in the order of its elements; *crc is that of its stored bytes. */
static K3Status scan_tensor(K3Source *source, int64_t tensor, uint8_t *buffer, K3ProgressBar *bar, Fault *fault,
                            uint32_t *crc)
{
  *crc = 0;
  const K3TensorSpec *spec = &source->table.specs[tensor];
  K3Type type = source->types[tensor];
  int last = spec->rank - 1;
  /* A piece is some rows of one slice, or a part of a row. */
  int64_t block = k3_format(type)->block_values, width = spec->shape[last];
  int64_t most = PIECE_BYTES / k3_format(type)->block_bytes * block, wide = width < most ? width : most;
  int64_t slices = spec->rank == 3 ? spec->shape[0] : 1, rows = last > 0 ? spec->shape[last - 1] : 1,
          high = most / wide;
  for (int64_t slice = 0; slice < slices; slice++)
    for (int64_t row = 0; row < rows; row += high)
      for (int64_t column = 0; column < width; column += wide) {
        K3Band band = {{0, 0, 0}, {1, 1, 1}};
        if (spec->rank == 3) band.begin[0] = slice;
        if (last > 0) band.begin[last - 1] = row, band.count[last - 1] = rows - row < high ? rows - row : high;
        band.begin[last] = column, band.count[last] = width - column < wide ? width - column : wide;
        K3_TRY(source->read(source, tensor, &band, buffer));
        int64_t height = last > 0 ? band.count[last - 1] : 1;
        scan(type, buffer, height * band.count[last], (slice * rows + row) * width + column, fault);
        *crc = k3_content_crc(*crc, buffer, k3_source_band_bytes(source, tensor, &band));
        k3_progress_update(bar, source->bytes_read);
      }
  return K3_OK;
}

/* "[1, 2, 3]" of a row-major element. */
static const char *index_text(const K3TensorSpec *spec, int64_t element, char *text, size_t size)
{
  int64_t index[3];
  for (int axis = spec->rank - 1; axis >= 0; axis--)
    index[axis] = element % spec->shape[axis], element /= spec->shape[axis];
  size_t at = 0;
  for (int axis = 0; axis < spec->rank && at < size; axis++)
    at += (size_t)snprintf(text + at, size - at, "%s%" PRId64, axis ? ", " : "[", index[axis]);
  if (at < size) snprintf(text + at, size - at, "]");
  return text;
}

K3Status k3_command_check_model(const char *path)
{
  K3Status status = K3_OK;
  K3Source *source = NULL;
  K3ProgressBar bar = {0};
  int64_t all = 0, bad_tensors = 0;
  char first[256] = "";
  uint32_t *crcs = NULL;
  uint64_t digest = 0, wanted = 0;
  int has_digest = 0;
  uint8_t *buffer = malloc(PIECE_BYTES);
  if (!buffer) K3_FAIL(K3_ERR_INPUT, "%s: no memory to check it", path);
  K3_TRY_DONE(k3_model_file_open(path, &source));
  for (int64_t i = 0; i < source->table.count; i++)
    all += k3_format_bytes(source->types[i], k3_tensor_elements(&source->table.specs[i]));
  crcs = calloc((size_t)source->table.count, sizeof *crcs);
  if (!crcs) K3_FAIL_DONE(K3_ERR_INPUT, "%s: no memory to check it", path);
  K3_TRY_DONE(k3_content_read(path, &source->table, crcs, &wanted, &has_digest));
  digest = k3_content_begin(&source->config);
  k3_progress_start(&bar, "checking", K3_PROGRESS_BYTES, all, 1);
  for (int64_t i = 0; i < source->table.count; i++) {
    Fault fault = {0, 0, NULL};
    char index[80];
    const K3TensorSpec *spec = &source->table.specs[i];
    uint32_t crc;
    K3_TRY_DONE(scan_tensor(source, i, buffer, &bar, &fault, &crc));
    digest = k3_content_add(digest, spec, source->types[i], crc);
    if (has_digest && crc != crcs[i] && !fault.count) {
      k3_progress_finish(&bar);
      printf("%s: its bytes are not those that were written (CRC-32 %08" PRIx32 ", written %08" PRIx32 ")\n", spec->path,
             crc, crcs[i]);
      if (bad_tensors++ == 0)
        snprintf(first, sizeof first, "dataset %s does not hold the bytes that were written", spec->path);
      continue;
    }
    if (!fault.count) continue;
    index_text(spec, fault.first, index, sizeof index);
    k3_progress_finish(&bar);
    printf("%s: %s at %s, %" PRId64 " in all\n", spec->path, fault.what, index, fault.count);
    if (bad_tensors++ == 0)
      snprintf(first, sizeof first, "dataset %s holds %s at index %s", spec->path, fault.what, index);
  }
  k3_progress_finish(&bar);
  if (bad_tensors)
    K3_FAIL_DONE(K3_ERR_INPUT,
                 "%s: %s (%" PRId64 " of %" PRId64 " tensors are bad); import or write the model again", path, first,
                  bad_tensors, source->table.count);
  if (has_digest && digest != wanted)
    K3_FAIL_DONE(K3_ERR_INPUT,
                 "%s: the content digest is %016" PRIx64 ", written %016" PRIx64 ": /config or a type was changed; import "
                 "or write the model again",
                 path, digest, wanted);
  printf("%s: all %" PRId64 " tensors are sound: no NaN, no infinity (%.3f GB read); content digest %016" PRIx64 "%s\n",
         path, source->table.count, (double)all * 1e-9, digest,
         has_digest ? ", as written" : " (the file bears none to compare with)");
done:
  k3_progress_finish(&bar);
  if (source) source->close(source);
  free(crcs);
  free(buffer);
  return status;
}
