/* The conversion of a GGUF model. See gguf_import.h. Layer: import.
 * First pass: every tensor of the table finds its published one(s), of the right shape and type, and nothing is
 * left over. Second pass: values, in pieces. Little-endian hosts, as the rest of the program. */
#include "import/gguf_import.h"

#include <dirent.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "import/gguf.h"
#include "import/gguf_config.h"
#include "import/gguf_names.h"
#include "import/mapped_file.h"
#include "import/quantise.h"
#include "plan/block_fault.h"
#include "plan/codebook.h"
#include "plan/config.h"
#include "plan/decode.h"

typedef struct {
  const char *path;
  K3ImportJob job;
  K3Gguf *gguf;
  uint32_t *books[K3_CODEBOOK_COUNT]; /* packed, of the types that are decoded here; NULL: not needed */
} Import;

/* The published tensors that one of ours is made of. */
typedef struct {
  int count;
  K3GgufTensor parts[2]; /* kv_b_proj may have two: K and V */
  K3Type types[2];
} Origin;

static int is_named_gguf(const char *name)
{
  size_t length = strlen(name);
  return length > 5 && strcmp(name + length - 5, ".gguf") == 0;
}

K3Status k3_gguf_is_one(const char *path, int *is_one)
{
  int gguf = 0, safetensors = 0;
  *is_one = is_named_gguf(path);
  DIR *list = *is_one ? NULL : opendir(path);
  if (!list) return K3_OK; /* whoever opens it tells what is wrong */
  for (struct dirent *item; (item = readdir(list));) {
    gguf |= is_named_gguf(item->d_name);
    safetensors |=
        strcmp(item->d_name, "model.safetensors.index.json") == 0 || strcmp(item->d_name, "model.safetensors") == 0;
  }
  closedir(list);
  *is_one = gguf;
  if (gguf && safetensors)
    K3_FAIL(K3_ERR_INPUT,
            "%s: holds a GGUF model and a safetensors checkpoint: name the GGUF file (of a split one the first "
            "shard), or move it elsewhere",
            path);
  return K3_OK;
}

/* --- first pass: find, check, and choose types --- */

/* Shape against shape, where axes of size one come and go. */
static int same_shape(const K3GgufTensor *tensor, int rank, const int64_t *shape)
{
  int at = 0;
  for (int i = 0; i < tensor->rank; i++) {
    if (tensor->shape[i] == 1) continue;
    while (at < rank && shape[at] == 1) at++;
    if (at >= rank || tensor->shape[i] != shape[at++]) return 0;
  }
  while (at < rank && shape[at] == 1) at++;
  return at == rank;
}

static K3Status check_shape(const Import *import, const K3TensorSpec *spec, const K3GgufTensor *tensor, int rank,
                            const int64_t *shape)
{
  char got[100], wanted[100];
  if (same_shape(tensor, rank, shape)) return K3_OK;
  k3_gguf_shape_text(tensor->rank, tensor->shape, got, sizeof got);
  k3_gguf_shape_text(rank, shape, wanted, sizeof wanted);
  K3_FAIL(K3_ERR_INPUT, "%s: tensor %s has shape %s (outermost axis first), wanted %s by the metadata (for %s)",
          k3_gguf_path(import->gguf, tensor), tensor->name, got, wanted, spec->path);
}

/* A_log may be padded, as published ones are: the tail is looked at with the values. */
static K3Status check_a_log(const Import *import, const K3TensorSpec *spec, const K3GgufTensor *tensor)
{
  int64_t count = tensor->shape[tensor->rank - 1];
  if (!same_shape(tensor, 1, &count)) return check_shape(import, spec, tensor, 1, spec->shape);
  if (count < spec->shape[0])
    K3_FAIL(K3_ERR_INPUT, "%s: tensor %s holds %lld numbers, fewer than the %lld heads",
            k3_gguf_path(import->gguf, tensor), tensor->name, (long long)count, (long long)spec->shape[0]);
  return K3_OK;
}

/* Finds a published tensor by name and says of which type it is stored here. */
static K3Status find_part(const Import *import, const K3TensorSpec *spec, const char *name, Origin *origin)
{
  K3GgufTensor *tensor = &origin->parts[origin->count];
  const K3GgufEntry *entry = k3_gguf_find(import->gguf, name);
  if (!entry) K3_FAIL(K3_ERR_INPUT, "%s: tensor %s is missing (for %s)", import->path, name, spec->path);
  k3_gguf_tensor(import->gguf, entry, tensor);
  int type = k3_format_find(k3_gguf_type_name(tensor->type));
  if (type < 0)
    K3_FAIL(K3_ERR_INPUT, "%s: tensor %s is of type %s, which is not implemented", k3_gguf_path(import->gguf, tensor),
            name, k3_gguf_type_name(tensor->type));
  if (k3_format_is_quantised((K3Type)type) && !spec->is_matrix)
    K3_FAIL(K3_ERR_INPUT, "%s: tensor %s is of type %s, wanted f32, f16 or bf16: it is no matrix (for %s)",
            k3_gguf_path(import->gguf, tensor), name, k3_gguf_type_name(tensor->type), spec->path);
  origin->types[origin->count++] = (K3Type)type;
  return K3_OK;
}

static K3Status find_kv_b(const Import *import, const K3TensorSpec *spec, Origin *origin)
{
  const K3Config *config = &import->job.config;
  char name[K3_GGUF_NAME_SIZE];
  int64_t k[3] = {config->num_heads, config->kv_lora_rank, config->qk_nope_head_dim};
  int64_t v[3] = {config->num_heads, config->v_head_dim, config->kv_lora_rank};
  k3_gguf_name(spec, name);
  if (k3_gguf_find(import->gguf, name)) {
    K3_TRY(find_part(import, spec, name, origin));
    return check_shape(import, spec, &origin->parts[0], spec->rank, spec->shape);
  }
  k3_gguf_name_k_b(spec->layer, name);
  K3_TRY(find_part(import, spec, name, origin));
  K3_TRY(check_shape(import, spec, &origin->parts[0], 3, k));
  k3_gguf_name_v_b(spec->layer, name);
  K3_TRY(find_part(import, spec, name, origin));
  return check_shape(import, spec, &origin->parts[1], 3, v);
}

static K3Status find_origin(const Import *import, const K3TensorSpec *spec, Origin *origin)
{
  char name[K3_GGUF_NAME_SIZE];
  origin->count = 0;
  if (k3_gguf_origin(spec->role) == K3_GGUF_KV_B) return find_kv_b(import, spec, origin);
  k3_gguf_name(spec, name);
  K3_TRY(find_part(import, spec, name, origin));
  if (k3_gguf_origin(spec->role) == K3_GGUF_A_LOG) return check_a_log(import, spec, &origin->parts[0]);
  return check_shape(import, spec, &origin->parts[0], spec->rank, spec->shape);
}

/* The codebook that decoding `type` needs. */
static K3Status load_book(Import *import, K3Type type)
{
  int id = k3_codebook_of(type);
  int8_t grid[K3_CODEBOOK_MOST_BYTES];
  if (id < 0 || import->books[id]) return K3_OK;
  const K3Codebook *book = k3_codebook((K3CodebookId)id);
  import->books[id] = malloc((size_t)k3_codebook_words(book) * sizeof **import->books);
  if (!import->books[id]) K3_FAIL(K3_ERR_INPUT, "no memory for codebook %s", book->name);
  k3_codebook_fill(book, grid);
  return k3_codebook_pack(book, book->name, grid, k3_codebook_bytes(book), import->books[id]);
}

static K3Type choose_type(const K3TensorSpec *spec, const Origin *origin)
{
  if (!spec->is_matrix) return K3_TYPE_F32;
  if (origin->count == 1) return origin->types[0];
  int plain = origin->types[0] == origin->types[1] && !k3_format_is_quantised(origin->types[0]);
  return plain ? origin->types[0] : K3_TYPE_F32;
}

static K3Status check_all(Import *import)
{
  const K3GgufEntry *surplus = NULL;
  int64_t count = 0;
  for (int64_t i = 0; i < import->job.table.count; i++) {
    const K3TensorSpec *spec = &import->job.table.specs[i];
    Origin origin;
    K3_TRY(find_origin(import, spec, &origin));
    import->job.types[i] = choose_type(spec, &origin);
    if (k3_gguf_origin(spec->role) == K3_GGUF_ONES) continue; /* the projection counts it */
    for (int p = 0; p < origin.count; p++) {
      k3_gguf_find(import->gguf, origin.parts[p].name)->used = 1;
      import->job.source_bytes[i] += origin.parts[p].bytes;
      import->job.result->published++;
      if (origin.count > 1) K3_TRY(load_book(import, origin.types[p])); /* joined ones are decoded */
    }
  }
  for (int64_t i = 0; i < import->gguf->count; i++)
    if (!import->gguf->entries[i].used && count++ == 0) surplus = &import->gguf->entries[i];
  if (surplus) {
    K3GgufTensor tensor;
    k3_gguf_tensor(import->gguf, surplus, &tensor);
    K3_FAIL(K3_ERR_INPUT, "%s: tensor %s is surplus: this model has no place for it (%lld such tensors in all)",
            k3_gguf_path(import->gguf, &tensor), tensor.name, (long long)count);
  }
  return K3_OK;
}

/* --- second pass: values --- */

/* The half-bytes of GGUF's mxfp4 block (byte j holds elements j and j + 16) in the order of model.md (neighbours).
 * Returns the first block whose scale byte is 255, -1: none; it is not stored. */
static int64_t pair_neighbours(const uint8_t *from, int64_t blocks, uint8_t *to)
{
  for (int64_t b = 0; b < blocks; b++, from += K3_MXFP4_BYTES, to += K3_MXFP4_BYTES) {
    if (from[0] == 255) return b;
    to[0] = from[0];
    for (int i = 0; i < K3_MXFP4_NIBBLE_BYTES / 2; i++) { /* elements 2i, 2i + 1 and 16 + 2i, 17 + 2i */
      uint8_t even = from[1 + 2 * i], odd = from[2 + 2 * i];
      to[1 + i] = (uint8_t)((even & 15u) | (unsigned)(odd & 15u) << 4);
      to[1 + K3_MXFP4_NIBBLE_BYTES / 2 + i] = (uint8_t)(even >> 4 | (odd & 0xf0u));
    }
  }
  return -1;
}

/* `count` values from element `first` of a published tensor, as a model file stores them: into `to`, or in place where
 * nothing changes. */
static K3Status take_values(const Import *import, const K3GgufTensor *tensor, K3Type type, int64_t first, int64_t count,
                            uint8_t *to, const uint8_t **values)
{
  const uint8_t *from = tensor->data + k3_format_bytes(type, first);
  const char *path = k3_gguf_path(import->gguf, tensor);
  *values = from;
  if (type == K3_TYPE_MXFP4) {
    int64_t bad = pair_neighbours(from, count / K3_QUANTISE_BLOCK, to);
    *values = to;
    if (bad >= 0)
      K3_FAIL(K3_ERR_INPUT, "%s: tensor %s: the scale of block %lld is 255, not a number", path, tensor->name,
              (long long)(first / K3_QUANTISE_BLOCK + bad));
  } else if (k3_format_is_quantised(type)) {
    const K3Format *format = k3_format(type);
    for (int64_t block = 0; block < count / format->block_values; block++) {
      const char *what = k3_block_fault(type, from + block * format->block_bytes);
      if (what)
        K3_FAIL(K3_ERR_INPUT, "%s: tensor %s: block %lld has %s", path, tensor->name,
                (long long)(first / format->block_values + block), what);
    }
  } else {
    int64_t bad = k3_import_find_not_finite(type, from, count);
    if (bad >= 0)
      K3_FAIL(K3_ERR_INPUT, "%s: tensor %s: element %lld is NaN or infinite", path, tensor->name,
              (long long)(first + bad));
  }
  return K3_OK;
}

/* log(-a), and what follows the heads must be padding: exp(A_log) of zeros, or zeros. */
static K3Status convert_a_log(const Import *import, const K3TensorSpec *spec, const K3GgufTensor *tensor, K3Type type,
                              float *out)
{
  int64_t heads = spec->shape[0], count = tensor->bytes / k3_format_bytes(type, 1);
  for (int64_t i = 0; i < count; i++) {
    float value;
    k3_decode(type, NULL, tensor->data + k3_format_bytes(type, i), 1, &value);
    if (i < heads && !(value < 0.0f && isfinite(value)))
      K3_FAIL(K3_ERR_INPUT, "%s: tensor %s: element %lld is %g, wanted a finite number below zero (-exp(A_log))",
              k3_gguf_path(import->gguf, tensor), tensor->name, (long long)i, (double)value);
    if (i >= heads && value != 0.0f && value != -1.0f)
      K3_FAIL(K3_ERR_INPUT,
              "%s: tensor %s holds %lld numbers for %lld heads, and element %lld beyond the heads is %g, wanted "
              "padding (-1 or 0)",
              k3_gguf_path(import->gguf, tensor), tensor->name, (long long)count, (long long)heads, (long long)i,
              (double)value);
    if (i < heads) out[i] = (float)log(-(double)value);
  }
  return K3_OK;
}

/* A tensor that is one published one. */
static K3Status write_plain(const Import *import, const K3TensorSpec *spec, const K3GgufTensor *tensor, K3Type stored,
                            K3Type type, K3ImportWorker *worker)
{
  int64_t columns = spec->rank == 1 ? 1 : spec->shape[spec->rank - 1], rows = k3_tensor_elements(spec) / columns;
  int64_t row_bytes = k3_format_bytes(stored, columns), step = 0;
  K3_TRY(k3_import_rows(k3_gguf_path(import->gguf, tensor), tensor->name,
                        row_bytes > k3_format_bytes(type, columns) ? row_bytes : k3_format_bytes(type, columns),
                        &step));
  for (int64_t row = 0; row < rows; row += step) {
    int64_t count = rows - row < step ? rows - row : step;
    const uint8_t *values = NULL;
    K3_TRY(take_values(import, tensor, stored, row * columns, count * columns, worker->stored, &values));
    if (stored != type) { /* only to f32 */
      k3_decode(stored, NULL, values, count * columns, worker->values);
      values = (const uint8_t *)worker->values;
    }
    K3_TRY(k3_import_put(worker, spec, type, row, count, values, count * row_bytes));
    k3_mapped_release(tensor->data, row * row_bytes, (row + count) * row_bytes);
  }
  return K3_OK;
}

/* Rows [first, first + count) of `columns` of a published matrix, decoded to f32. */
static K3Status decode_rows(const Import *import, const K3GgufTensor *tensor, K3Type type, int64_t columns,
                            int64_t first, int64_t count, uint8_t *room, float *out)
{
  const uint8_t *values = NULL;
  K3_TRY(take_values(import, tensor, type, first * columns, count * columns, room, &values));
  int book = k3_codebook_of(type);
  k3_decode(type, book < 0 ? NULL : import->books[book], values, count * columns, out);
  int64_t bad = k3_import_find_not_finite(K3_TYPE_F32, (const uint8_t *)out, count * columns);
  if (bad >= 0)
    K3_FAIL(K3_ERR_INPUT, "%s: tensor %s: element %lld is NaN or infinite", k3_gguf_path(import->gguf, tensor),
            tensor->name, (long long)(first * columns + bad));
  return K3_OK;
}

/* One head of kv_b_proj from its parts: nope rows (columns of K's [C, nope]), then v rows. The values are f32; plain types
 * are narrowed again, which is exact. */
static K3Status write_kv_b(const Import *import, const K3TensorSpec *spec, const Origin *origin, K3Type type,
                           K3ImportWorker *worker)
{
  const K3Config *config = &import->job.config;
  int64_t heads = config->num_heads, width = config->kv_lora_rank, nope = config->qk_nope_head_dim;
  int64_t v_rows = config->v_head_dim, rows = nope + v_rows, step = 0;
  int64_t bytes = (origin->parts[0].bytes + origin->parts[1].bytes) / heads;
  K3_TRY(k3_import_rows(k3_gguf_path(import->gguf, &origin->parts[0]), origin->parts[0].name, 3 * rows * width * 4,
                        &step)); /* a head fits: K, both parts decoded, and the result */
  float *k = worker->values, *joined = k + nope * width;
  for (int64_t head = 0; head < heads; head++) {
    K3_TRY(decode_rows(import, &origin->parts[0], origin->types[0], nope, head * width, width, worker->stored, k));
    for (int64_t c = 0; c < width; c++)
      for (int64_t n = 0; n < nope; n++) joined[n * width + c] = k[c * nope + n];
    K3_TRY(decode_rows(import, &origin->parts[1], origin->types[1], width, head * v_rows, v_rows, worker->stored,
                       joined + nope * width));
    const void *data = joined;
    if (type != K3_TYPE_F32) {
      k3_import_narrow(type, joined, rows * width, worker->stored);
      data = worker->stored;
    }
    K3_TRY(k3_import_put(worker, spec, type, head * rows, rows, data, bytes));
  }
  return K3_OK;
}

static K3Status write_tensor(void *importer, const K3TensorSpec *spec, int64_t tensor, K3ImportWorker *worker)
{
  const Import *import = importer;
  Origin origin;
  K3Type type = import->job.types[tensor];
  float *vector = worker->values;
  K3_TRY(find_origin(import, spec, &origin));
  const K3GgufTensor *only = &origin.parts[0];
  int64_t rows = 0;
  if (origin.count == 2) return write_kv_b(import, spec, &origin, type, worker);
  if (!spec->is_matrix) /* the whole vector fits */
    K3_TRY(k3_import_rows(k3_gguf_path(import->gguf, only), only->name, 4 * spec->shape[0], &rows));
  switch (k3_gguf_origin(spec->role)) {
  case K3_GGUF_ONES:
    for (int64_t i = 0; i < spec->shape[0]; i++) vector[i] = 1.0f;
    return k3_import_put(worker, spec, type, 0, spec->shape[0], vector, 0);
  case K3_GGUF_A_LOG:
    K3_TRY(convert_a_log(import, spec, only, origin.types[0], vector));
    return k3_import_put(worker, spec, type, 0, spec->shape[0], vector, only->bytes);
  default: return write_plain(import, spec, only, origin.types[0], type, worker);
  }
}

K3Status k3_gguf_import(const char *path, const char *output, const K3ImportOptions *options, K3ImportResult *result)
{
  K3Status status = K3_OK;
  Import import = {.path = path};
  import.job = (K3ImportJob){.output = output, .options = options, .importer = &import, .write = write_tensor, .result = result};
  K3_TRY_DONE(k3_gguf_open(path, &import.gguf));
  K3_TRY_DONE(k3_gguf_config_read(import.gguf, &import.job.config));
  K3_TRY_DONE(k3_import_open(&import.job));
  K3_TRY_DONE(check_all(&import));
  for (int64_t s = 0; s < import.gguf->shard_count; s++)
    K3_TRY_DONE(k3_import_identify(&import.job, import.gguf->shards[s].path));
  status = k3_import_run(&import.job);
done:
  k3_import_close(&import.job);
  k3_gguf_close(import.gguf);
  for (int id = 0; id < K3_CODEBOOK_COUNT; id++) free(import.books[id]);
  return status;
}
