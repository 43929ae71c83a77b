/* The conversion of a released checkpoint. See hf_import.h. Layer: import.
 * First pass: every tensor of the table finds its published one(s), of the right shape and type, and nothing is
 * left over. Second pass: values, in pieces. Little-endian hosts, as the rest of the program. */
#include "config.h"
#include "import/hf_import.h"

#ifdef HAVE_JSON_C

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "import/hf_config.h"
#include "import/hf_names.h"
#include "import/quantise.h"
#include "import/safetensors.h"
#include "plan/config.h"
#include "plan/decode.h"
#include "plan/tensors.h"

typedef struct {
  const char *directory;
  K3HfTrunk trunk;
  K3HfExperts experts;
  K3ImportJob job;
  K3Safetensors *safe;
  const char *prefix; /* of text tensors: "language_model." or "" */
} Import;

/* Where one matrix (a tensor of ours, or one expert of it) comes from. */
typedef struct {
  K3SafeTensor *data;  /* plain values, or packed nibbles */
  K3SafeTensor *scale; /* of packed ones, else NULL */
} Origin;

/* --- first pass: find, check, and choose types --- */

static int64_t matrix_columns(const K3TensorSpec *spec) { return spec->rank == 1 ? 1 : spec->shape[spec->rank - 1]; }

/* Shape against shape; `squeeze` lets published axes of size one come and go. */
static int same_shape(const K3SafeTensor *tensor, int rank, const int64_t *shape, int squeeze)
{
  int at = 0;
  for (int i = 0; i < tensor->rank; i++) {
    if (squeeze && tensor->shape[i] == 1 && !(at < rank && shape[at] == 1)) continue;
    if (at >= rank || tensor->shape[i] != shape[at]) return 0;
    at++;
  }
  while (squeeze && at < rank && shape[at] == 1) at++;
  return at == rank;
}

static K3Status fail_shape(const Import *import, const K3TensorSpec *spec, const K3SafeTensor *tensor, int rank,
                           const int64_t *shape, const char *more)
{
  char got[200], wanted[200];
  K3SafeTensor want = {.rank = rank};
  for (int i = 0; i < rank; i++) want.shape[i] = shape[i];
  k3_safetensors_shape_text(tensor, got, sizeof got);
  k3_safetensors_shape_text(&want, wanted, sizeof wanted);
  K3_FAIL(K3_ERR_INPUT, "%s: tensor %s has shape %s, wanted %s%s by config.json (%s)",
          k3_safetensors_path(import->safe, tensor), tensor->name, got, wanted, more, spec->path);
}

/* What a published tensor may look like, for a tensor of ours that is no expert. */
static K3Status check_shape(const Import *import, const K3TensorSpec *spec, const K3SafeTensor *tensor)
{
  int64_t one_between[3] = {spec->shape[0], 1, spec->shape[1]};
  int64_t by_head[2] = {import->job.config.num_heads, import->job.config.kda_head_dim};
  switch (spec->role) {
  case K3_ROLE_Q_CONV:
  case K3_ROLE_K_CONV:
  case K3_ROLE_V_CONV:
    if (same_shape(tensor, 3, one_between, 0) || same_shape(tensor, 2, spec->shape, 0)) return K3_OK;
    return fail_shape(import, spec, tensor, 3, one_between, " or the same without the 1");
  case K3_ROLE_A_LOG: { /* may be longer than the heads: the tail is looked at with the values */
    int64_t count = 1, larger = 0;
    for (int i = 0; i < tensor->rank; i++) {
      larger += tensor->shape[i] != 1;
      count = tensor->shape[i] != 1 ? tensor->shape[i] : count;
    }
    if (larger > 1) return fail_shape(import, spec, tensor, 1, spec->shape, " or longer with zeros");
    if (count < spec->shape[0])
      K3_FAIL(K3_ERR_INPUT, "%s: tensor %s holds %lld numbers, fewer than the %lld heads",
              k3_safetensors_path(import->safe, tensor), tensor->name, (long long)count, (long long)spec->shape[0]);
    return K3_OK;
  }
  case K3_ROLE_DT_BIAS:
    if (same_shape(tensor, 1, spec->shape, 1) || same_shape(tensor, 2, by_head, 1)) return K3_OK;
    return fail_shape(import, spec, tensor, 1, spec->shape, " or [heads, head_dim]");
  default:
    if (same_shape(tensor, spec->rank, spec->shape, spec->rank == 1)) return K3_OK;
    return fail_shape(import, spec, tensor, spec->rank, spec->shape, "");
  }
}

static K3Status check_float(const Import *import, const K3SafeTensor *tensor)
{
  if (tensor->dtype == K3_SAFE_BF16 || tensor->dtype == K3_SAFE_F16 || tensor->dtype == K3_SAFE_F32) return K3_OK;
  K3_FAIL(K3_ERR_INPUT, "%s: tensor %s has dtype %s, wanted BF16, F16 or F32",
          k3_safetensors_path(import->safe, tensor), tensor->name, k3_safetensors_dtype_name(tensor->dtype));
}

/* Finds the published tensor of one that is no expert. */
static K3Status find_trunk(const Import *import, const K3TensorSpec *spec, Origin *origin)
{
  char name[K3_HF_NAME_SIZE], released[K3_HF_NAME_SIZE];
  *origin = (Origin){NULL, NULL};
  for (int variant = 0; variant < K3_HF_VARIANTS && !origin->data; variant++)
    if (k3_hf_name(spec, variant, import->prefix, name)) origin->data = k3_safetensors_find(import->safe, name);
  k3_hf_name(spec, 0, import->prefix, released);
  if (!origin->data)
    K3_FAIL(K3_ERR_INPUT, "%s: tensor %s is missing (for %s)", import->directory, released, spec->path);
  K3_TRY(check_float(import, origin->data));
  return check_shape(import, spec, origin->data);
}

/* Finds one expert: plain, or nibbles and scales. */
static K3Status find_expert(const Import *import, const K3TensorSpec *spec, int64_t expert, Origin *origin)
{
  char name[K3_HF_NAME_SIZE], plain[K3_HF_NAME_SIZE];
  int64_t rows = spec->shape[1], columns = spec->shape[2];
  k3_hf_expert_name(spec, expert, K3_HF_PLAIN, import->prefix, plain);
  *origin = (Origin){k3_safetensors_find(import->safe, plain), NULL};
  if (origin->data) {
    K3_TRY(check_float(import, origin->data));
    if (same_shape(origin->data, 2, spec->shape + 1, 0)) return K3_OK;
    return fail_shape(import, spec, origin->data, 2, spec->shape + 1, "");
  }
  k3_hf_expert_name(spec, expert, K3_HF_PACKED, import->prefix, name);
  origin->data = k3_safetensors_find(import->safe, name);
  if (!origin->data)
    K3_FAIL(K3_ERR_INPUT, "%s: tensor %s is missing, and so is %s (for %s)", import->directory, name, plain,
            spec->path);
  k3_hf_expert_name(spec, expert, K3_HF_SCALE, import->prefix, name);
  origin->scale = k3_safetensors_find(import->safe, name);
  if (!origin->scale)
    K3_FAIL(K3_ERR_INPUT, "%s: tensor %s is missing, but its %s is there (for %s)", import->directory, name,
            origin->data->name, spec->path);
  if (columns % K3_QUANTISE_BLOCK)
    K3_FAIL(K3_ERR_INPUT, "%s: tensor %s: %s has %lld columns, and packed experts want a multiple of %d",
            k3_safetensors_path(import->safe, origin->data), origin->data->name, spec->path, (long long)columns,
            K3_QUANTISE_BLOCK);
  if (origin->data->dtype != K3_SAFE_U8)
    K3_FAIL(K3_ERR_INPUT, "%s: tensor %s has dtype %s, wanted U8", k3_safetensors_path(import->safe, origin->data),
            origin->data->name, k3_safetensors_dtype_name(origin->data->dtype));
  if (origin->scale->dtype != K3_SAFE_U8 && origin->scale->dtype != K3_SAFE_F8_E8M0)
    K3_FAIL(K3_ERR_INPUT, "%s: tensor %s has dtype %s, wanted U8 or F8_E8M0",
            k3_safetensors_path(import->safe, origin->scale), origin->scale->name,
            k3_safetensors_dtype_name(origin->scale->dtype));
  int64_t packed_shape[2] = {rows, columns / 2}, scale_shape[2] = {rows, columns / K3_QUANTISE_BLOCK};
  if (!same_shape(origin->data, 2, packed_shape, 0)) return fail_shape(import, spec, origin->data, 2, packed_shape, "");
  if (!same_shape(origin->scale, 2, scale_shape, 0)) return fail_shape(import, spec, origin->scale, 2, scale_shape, "");
  return K3_OK;
}

static K3Type choose_type(const Import *import, const K3TensorSpec *spec, const Origin *origin)
{
  int whole = matrix_columns(spec) % K3_QUANTISE_BLOCK == 0;
  K3Type kept = origin->scale ? K3_TYPE_MXFP4 : origin->data->dtype == K3_SAFE_BF16 ? K3_TYPE_BF16 : K3_TYPE_F32;
  if (!spec->is_matrix) return K3_TYPE_F32;
  if (k3_hf_is_expert(spec)) return import->experts == K3_EXPERTS_Q8_0 && whole ? K3_TYPE_Q8_0 : kept;
  if (import->trunk == K3_TRUNK_F32) return K3_TYPE_F32;
  return import->trunk == K3_TRUNK_Q8_0 && whole ? K3_TYPE_Q8_0 : kept;
}

static void count_origin(Import *import, int64_t tensor, const Origin *origin)
{
  K3SafeTensor *const parts[2] = {origin->data, origin->scale};
  for (int i = 0; i < 2; i++) {
    if (!parts[i]) continue;
    parts[i]->used = 1;
    import->job.source_bytes[tensor] += parts[i]->bytes;
    import->job.result->published++;
  }
}

/* All experts of a tensor must be stored alike: ours is one dataset. */
static K3Status check_experts(Import *import, int64_t tensor)
{
  const K3TensorSpec *spec = &import->job.table.specs[tensor];
  Origin first = {NULL, NULL}, origin;
  for (int64_t expert = 0; expert < spec->shape[0]; expert++) {
    K3_TRY(find_expert(import, spec, expert, &origin));
    if (expert == 0) first = origin;
    if (!first.scale != !origin.scale || (!origin.scale && first.data->dtype != origin.data->dtype))
      K3_FAIL(K3_ERR_INPUT,
              "%s: tensors %s (%s) and %s (%s) are stored differently, but all experts of %s share a type",
              import->directory, first.data->name, k3_safetensors_dtype_name(first.data->dtype), origin.data->name,
              k3_safetensors_dtype_name(origin.data->dtype), spec->path);
    count_origin(import, tensor, &origin);
  }
  import->job.types[tensor] = choose_type(import, spec, &first);
  return K3_OK;
}

static K3Status check_surplus(Import *import)
{
  const K3SafeTensor *surplus = NULL;
  int64_t count = 0;
  for (int64_t i = 0; i < import->safe->count; i++) {
    const K3SafeTensor *tensor = &import->safe->tensors[i];
    if (tensor->used) continue;
    if (k3_hf_is_vision(tensor->name)) {
      import->job.result->vision++;
      continue;
    }
    if (count++ == 0) surplus = tensor;
  }
  if (surplus)
    K3_FAIL(K3_ERR_INPUT, "%s: tensor %s is surplus: this model has no place for it (%lld such tensors in all)",
            k3_safetensors_path(import->safe, surplus), surplus->name, (long long)count);
  return K3_OK;
}

static K3Status check_all(Import *import)
{
  import->prefix = "";
  for (int64_t i = 0; i < import->safe->count; i++)
    if (strncmp(import->safe->tensors[i].name, K3_HF_PREFIX, strlen(K3_HF_PREFIX)) == 0) import->prefix = K3_HF_PREFIX;
  for (int64_t i = 0; i < import->job.table.count; i++) {
    const K3TensorSpec *spec = &import->job.table.specs[i];
    if (k3_hf_is_expert(spec)) {
      K3_TRY(check_experts(import, i));
      continue;
    }
    Origin origin;
    K3_TRY(find_trunk(import, spec, &origin));
    count_origin(import, i, &origin);
    import->job.types[i] = choose_type(import, spec, &origin);
  }
  return check_surplus(import);
}

/* --- second pass: values --- */

/* The storage type of a plain tensor (check_float). */
static K3Type plain_type(const K3SafeTensor *tensor)
{
  return tensor->dtype == K3_SAFE_F32 ? K3_TYPE_F32 : tensor->dtype == K3_SAFE_BF16 ? K3_TYPE_BF16 : K3_TYPE_F16;
}

static K3Status fail_block(const Import *import, const K3SafeTensor *tensor, int64_t block)
{
  K3_FAIL(K3_ERR_INPUT,
          "%s: tensor %s: block %lld (elements %lld to %lld) is too large for q8_0, whose scale is a float16",
          k3_safetensors_path(import->safe, tensor), tensor->name, (long long)block,
          (long long)block * K3_QUANTISE_BLOCK, (long long)block * K3_QUANTISE_BLOCK + K3_QUANTISE_BLOCK - 1);
}

/* Elements [first, first + count) of a plain tensor into worker->stored. */
static K3Status convert_plain(const Import *import, const K3SafeTensor *tensor, K3Type type, int64_t first,
                              int64_t count, K3ImportWorker *worker)
{
  int64_t size = tensor->dtype == K3_SAFE_F32 ? 4 : 2;
  const uint8_t *data = tensor->data + first * size;
  int64_t bad = k3_import_find_not_finite(plain_type(tensor), data, count);
  if (bad >= 0)
    K3_FAIL(K3_ERR_INPUT, "%s: tensor %s: element %lld is NaN or infinite", k3_safetensors_path(import->safe, tensor),
            tensor->name, (long long)(first + bad));
  if (type == K3_TYPE_BF16) { /* only from BF16 */
    memcpy(worker->stored, data, (size_t)(count * size));
    return K3_OK;
  }
  if (type == K3_TYPE_F32) {
    k3_decode(plain_type(tensor), NULL, data, count, (float *)(void *)worker->stored);
    return K3_OK;
  }
  k3_decode(plain_type(tensor), NULL, data, count, worker->values);
  bad = k3_quantise_q8_0(worker->values, count / K3_QUANTISE_BLOCK, worker->stored);
  return bad < 0 ? K3_OK : fail_block(import, tensor, first / K3_QUANTISE_BLOCK + bad);
}

/* The same for a packed one. */
static K3Status convert_packed(const Import *import, const Origin *origin, K3Type type, int64_t first, int64_t count,
                               K3ImportWorker *worker)
{
  int64_t block = first / K3_QUANTISE_BLOCK, blocks = count / K3_QUANTISE_BLOCK;
  int64_t bad = k3_mxfp4_interleave(origin->data->data + block * K3_MXFP4_NIBBLE_BYTES, origin->scale->data + block,
                                    blocks, worker->stored);
  if (bad >= 0)
    K3_FAIL(K3_ERR_INPUT, "%s: tensor %s: the scale of block %lld (row %lld) is 255, not a number",
            k3_safetensors_path(import->safe, origin->scale), origin->scale->name, (long long)(block + bad),
            (long long)((block + bad) / origin->scale->shape[1]));
  if (type == K3_TYPE_MXFP4) return K3_OK;
  k3_mxfp4_unpack(worker->stored, blocks, worker->values);
  bad = k3_quantise_q8_0(worker->values, blocks, worker->stored);
  return bad < 0 ? K3_OK : fail_block(import, origin->data, block + bad);
}

/* bytes * part / whole, for bytes beyond 2^31. */
static int64_t part_of(int64_t bytes, int64_t part, int64_t whole)
{
  return bytes / whole * part + bytes % whole * part / whole;
}

/* Gives back the pages of rows [row, row + count) of a tensor of `rows` rows (A_log may hold more: unimportant). */
static void release_rows(const K3SafeTensor *tensor, int64_t row, int64_t count, int64_t rows)
{
  int64_t row_bytes = tensor->bytes / rows;
  k3_safetensors_release(tensor, row * row_bytes, (row + count) * row_bytes);
}

/* Writes `rows` rows from `origin` to rows [at, at + rows) of the tensor. */
static K3Status write_matrix(const Import *import, const K3TensorSpec *spec, const Origin *origin, K3Type type,
                             int64_t at, int64_t rows, K3ImportWorker *worker)
{
  int64_t columns = matrix_columns(spec), step = 0,
          bytes = origin->data->bytes + (origin->scale ? origin->scale->bytes : 0);
  K3_TRY(k3_import_rows(k3_safetensors_path(import->safe, origin->data), origin->data->name, columns * 4, &step));
  for (int64_t row = 0; row < rows; row += step) {
    int64_t count = rows - row < step ? rows - row : step;
    if (origin->scale) K3_TRY(convert_packed(import, origin, type, row * columns, count * columns, worker));
    else K3_TRY(convert_plain(import, origin->data, type, row * columns, count * columns, worker));
    K3_TRY(k3_import_put(worker, spec, type, at + row, count, worker->stored,
                         part_of(bytes, row + count, rows) - part_of(bytes, row, rows)));
    release_rows(origin->data, row, count, rows);
    if (origin->scale) release_rows(origin->scale, row, count, rows);
  }
  return K3_OK;
}

/* Numbers of A_log beyond the heads must be zero padding: anything else means another head count. */
static K3Status check_tail(const Import *import, const K3TensorSpec *spec, const K3SafeTensor *tensor)
{
  int64_t size = tensor->dtype == K3_SAFE_F32 ? 4 : 2, count = tensor->bytes / size;
  for (int64_t i = spec->shape[0]; i < count; i++) {
    float value;
    k3_decode(plain_type(tensor), NULL, tensor->data + i * size, 1, &value);
    if (value == 0.0f) continue; /* a NaN is not */
    K3_FAIL(K3_ERR_INPUT,
            "%s: tensor %s holds %lld numbers for %lld heads, and element %lld beyond the heads is %g, "
            "wanted zero padding",
            k3_safetensors_path(import->safe, tensor), tensor->name, (long long)count, (long long)spec->shape[0],
            (long long)i, (double)value);
  }
  return K3_OK;
}

static K3Status write_tensor(void *importer, const K3TensorSpec *spec, int64_t tensor, K3ImportWorker *worker)
{
  const Import *import = importer;
  Origin origin;
  K3Type type = import->job.types[tensor];
  if (!k3_hf_is_expert(spec)) {
    K3_TRY(find_trunk(import, spec, &origin));
    if (spec->role == K3_ROLE_A_LOG) K3_TRY(check_tail(import, spec, origin.data));
    return write_matrix(import, spec, &origin, type, 0, spec->shape[0], worker);
  }
  for (int64_t expert = 0; expert < spec->shape[0]; expert++) {
    K3_TRY(find_expert(import, spec, expert, &origin));
    K3_TRY(write_matrix(import, spec, &origin, type, expert * spec->shape[1], spec->shape[1], worker));
  }
  return K3_OK;
}

K3Status k3_hf_import(const char *directory, const char *output, K3HfTrunk trunk, K3HfExperts experts,
                      const K3ImportOptions *options, K3ImportResult *result)
{
  K3Status status = K3_OK;
  Import import = {.directory = directory, .trunk = trunk, .experts = experts};
  import.job = (K3ImportJob){.output = output, .options = options, .importer = &import, .write = write_tensor, .result = result};
  K3_TRY_DONE(k3_hf_config_read(directory, &import.job.config));
  K3_TRY_DONE(k3_safetensors_open(directory, &import.safe));
  K3_TRY_DONE(k3_import_open(&import.job));
  K3_TRY_DONE(check_all(&import));
  for (int64_t s = 0; s < import.safe->shard_count; s++)
    K3_TRY_DONE(k3_import_identify(&import.job, import.safe->shards[s].path));
  status = k3_import_run(&import.job);
done:
  k3_import_close(&import.job);
  k3_safetensors_close(import.safe);
  return status;
}

#endif /* HAVE_JSON_C */
