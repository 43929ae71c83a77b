/* Safetensors shards and their index. See safetensors.h. Layer: import.
 * Every number in a header is foreign: it is checked before it is used for an address, a size or a loop. */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include "import/safetensors.h"

#ifdef HAVE_JSON_C

#include <json.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "import/json_file.h"
#include "import/mapped_file.h"

#define INDEX_NAME "model.safetensors.index.json"
#define SINGLE_NAME "model.safetensors"

static const struct {
  const char *name;
  int bits;
} dtypes[K3_SAFE_DTYPE_COUNT] = {
    [K3_SAFE_BOOL] = {"BOOL", 8},       [K3_SAFE_F4] = {"F4", 4},           [K3_SAFE_U8] = {"U8", 8},
    [K3_SAFE_I8] = {"I8", 8},           [K3_SAFE_F8_E5M2] = {"F8_E5M2", 8}, [K3_SAFE_F8_E4M3] = {"F8_E4M3", 8},
    [K3_SAFE_F8_E8M0] = {"F8_E8M0", 8}, [K3_SAFE_U16] = {"U16", 16},        [K3_SAFE_I16] = {"I16", 16},
    [K3_SAFE_F16] = {"F16", 16},        [K3_SAFE_BF16] = {"BF16", 16},      [K3_SAFE_U32] = {"U32", 32},
    [K3_SAFE_I32] = {"I32", 32},        [K3_SAFE_F32] = {"F32", 32},        [K3_SAFE_U64] = {"U64", 64},
    [K3_SAFE_I64] = {"I64", 64},        [K3_SAFE_F64] = {"F64", 64},        [K3_SAFE_C64] = {"C64", 64},
};

const char *k3_safetensors_dtype_name(K3SafeDtype dtype) { return dtypes[dtype].name; }

void k3_safetensors_shape_text(const K3SafeTensor *tensor, char *text, size_t size)
{
  size_t at = (size_t)snprintf(text, size, "[");
  for (int i = 0; i < tensor->rank && at < size; i++)
    at += (size_t)snprintf(text + at, size - at, "%s%lld", i ? ", " : "", (long long)tensor->shape[i]);
  if (at < size) snprintf(text + at, size - at, "]");
}

const char *k3_safetensors_path(const K3Safetensors *safe, const K3SafeTensor *tensor)
{
  return safe->shards[tensor->shard].path;
}

static int compare_name(const void *a, const void *b)
{
  return strcmp(((const K3SafeTensor *)a)->name, ((const K3SafeTensor *)b)->name);
}

static int compare_begin(const void *a, const void *b)
{
  const K3SafeTensor *left = a, *right = b;
  if (left->begin != right->begin) return left->begin < right->begin ? -1 : 1;
  return left->end < right->end ? -1 : left->end > right->end;
}

K3SafeTensor *k3_safetensors_find(const K3Safetensors *safe, const char *name)
{
  K3SafeTensor key = {.name = (char *)(uintptr_t)name};
  if (safe->count == 0) return NULL;
  return bsearch(&key, safe->tensors, (size_t)safe->count, sizeof key, compare_name);
}

void k3_safetensors_release(const K3SafeTensor *tensor, int64_t begin, int64_t end)
{
  k3_mapped_release(tensor->data, begin, end);
}

/* A name that can stand in a message and in a path component. */
static int is_printable(const char *name)
{
  if (name[0] == '\0' || strlen(name) > 1024) return 0;
  for (const unsigned char *c = (const unsigned char *)name; *c; c++)
    if (*c < 0x20 || *c == 0x7f) return 0;
  return 1;
}

/* --- one tensor's entry --- */

static K3Status read_shape(const K3SafeShard *shard, K3SafeTensor *tensor, struct json_object *shape)
{
  if (!json_object_is_type(shape, json_type_array))
    K3_FAIL(K3_ERR_INPUT, "%s: tensor %s has no shape in the header, wanted a list of sizes", shard->path,
            tensor->name);
  size_t rank = json_object_array_length(shape);
  if (rank > K3_SAFE_MAX_AXES)
    K3_FAIL(K3_ERR_INPUT, "%s: tensor %s has %zu axes, at most %d are read", shard->path, tensor->name, rank,
            K3_SAFE_MAX_AXES);
  tensor->rank = (int)rank;
  for (size_t i = 0; i < rank; i++) {
    struct json_object *size = json_object_array_get_idx(shape, i);
    if (!json_object_is_type(size, json_type_int) || json_object_get_int64(size) < 0)
      K3_FAIL(K3_ERR_INPUT, "%s: tensor %s: axis %zu of its shape is %.40s, wanted a whole number from 0", shard->path,
              tensor->name, i, json_object_to_json_string(size));
    tensor->shape[i] = json_object_get_int64(size);
  }
  return K3_OK;
}

/* Bytes that dtype and shape ask for; -1 when they overflow. */
static int64_t wanted_bytes(const K3SafeTensor *tensor)
{
  int64_t bits = dtypes[tensor->dtype].bits;
  for (int i = 0; i < tensor->rank; i++)
    if (tensor->shape[i] == 0) return 0; /* so that 0 x 2^63 x 2^63 is no overflow */
  for (int i = 0; i < tensor->rank; i++)
    if (__builtin_mul_overflow(bits, tensor->shape[i], &bits)) return -1;
  return bits % 8 ? -1 : bits / 8;
}

static K3Status read_offsets(const K3SafeShard *shard, K3SafeTensor *tensor, struct json_object *offsets)
{
  int64_t size = (int64_t)shard->size - shard->data_offset;
  int ok = json_object_is_type(offsets, json_type_array) && json_object_array_length(offsets) == 2;
  for (size_t i = 0; ok && i < 2; i++) {
    struct json_object *offset = json_object_array_get_idx(offsets, i);
    ok = json_object_is_type(offset, json_type_int) && json_object_get_int64(offset) >= 0;
  }
  if (!ok)
    K3_FAIL(K3_ERR_INPUT, "%s: tensor %s has data_offsets %.60s, wanted [begin, end] in bytes from 0", shard->path,
            tensor->name, json_object_to_json_string(offsets));
  tensor->begin = json_object_get_int64(json_object_array_get_idx(offsets, 0));
  tensor->end = json_object_get_int64(json_object_array_get_idx(offsets, 1));
  if (tensor->begin > tensor->end)
    K3_FAIL(K3_ERR_INPUT, "%s: tensor %s has data_offsets [%lld, %lld]: the end lies before the begin", shard->path,
            tensor->name, (long long)tensor->begin, (long long)tensor->end);
  tensor->bytes = tensor->end - tensor->begin;
  int64_t wanted = wanted_bytes(tensor);
  if (wanted != tensor->bytes) {
    char shape[200], count[40];
    k3_safetensors_shape_text(tensor, shape, sizeof shape);
    if (wanted < 0) snprintf(count, sizeof count, "no whole number of");
    else snprintf(count, sizeof count, "%lld", (long long)wanted);
    K3_FAIL(K3_ERR_INPUT, "%s: tensor %s %s %s wants %s bytes, its data_offsets [%lld, %lld] hold %lld", shard->path,
            tensor->name, dtypes[tensor->dtype].name, shape, count, (long long)tensor->begin, (long long)tensor->end,
            (long long)tensor->bytes);
  }
  if (tensor->end > size) {
    int64_t wants = 0;
    if (__builtin_add_overflow(shard->data_offset, tensor->end, &wants)) wants = INT64_MAX;
    K3_FAIL(K3_ERR_INPUT,
            "%s: the file is too short: %lld bytes, but its header puts tensor %s up to byte %lld (cut or partly "
            "downloaded? fetch it again)",
            shard->path, (long long)shard->size, tensor->name, (long long)wants);
  }
  tensor->data = shard->map + shard->data_offset + tensor->begin;
  return K3_OK;
}

static K3Status read_entry(const K3SafeShard *shard, K3SafeTensor *tensor, struct json_object *entry)
{
  struct json_object *dtype = NULL, *shape = NULL, *offsets = NULL;
  if (!json_object_is_type(entry, json_type_object))
    K3_FAIL(K3_ERR_INPUT, "%s: header entry %s is no object", shard->path, tensor->name);
  json_object_object_get_ex(entry, "dtype", &dtype);
  json_object_object_get_ex(entry, "shape", &shape);
  json_object_object_get_ex(entry, "data_offsets", &offsets);
  if (!json_object_is_type(dtype, json_type_string))
    K3_FAIL(K3_ERR_INPUT, "%s: tensor %s has no dtype in the header", shard->path, tensor->name);
  int found = -1;
  for (int i = 0; i < K3_SAFE_DTYPE_COUNT; i++)
    if (strcmp(json_object_get_string(dtype), dtypes[i].name) == 0) found = i;
  if (found < 0)
    K3_FAIL(K3_ERR_INPUT, "%s: tensor %s has unknown dtype %.40s", shard->path, tensor->name,
            json_object_to_json_string(dtype));
  tensor->dtype = (K3SafeDtype)found;
  K3_TRY(read_shape(shard, tensor, shape));
  return read_offsets(shard, tensor, offsets);
}

/* --- one shard --- */

/* Entries in order of place: no overlap, no hole, and the last ends where the file does. */
static K3Status check_cover(const K3SafeShard *shard, K3SafeTensor *tensors, int64_t count)
{
  int64_t at = 0, size = (int64_t)shard->size - shard->data_offset;
  if (count > 0) qsort(tensors, (size_t)count, sizeof *tensors, compare_begin);
  for (int64_t i = 0; i < count; i++) {
    if (tensors[i].begin < at)
      K3_FAIL(K3_ERR_INPUT, "%s: tensors %s and %s overlap at byte %lld of the data", shard->path, tensors[i - 1].name,
              tensors[i].name, (long long)tensors[i].begin);
    if (tensors[i].begin > at)
      K3_FAIL(K3_ERR_INPUT, "%s: bytes %lld to %lld of the data, before tensor %s, belong to no tensor of the header",
              shard->path, (long long)at, (long long)tensors[i].begin, tensors[i].name);
    at = tensors[i].end;
  }
  if (at != size)
    K3_FAIL(K3_ERR_INPUT, "%s: the file is too long: %lld bytes, but by its header %lld are expected", shard->path,
            (long long)shard->size, (long long)(shard->data_offset + at));
  return K3_OK;
}

/* Appends the shard's tensors to safe->tensors. */
static K3Status read_header(K3Safetensors *safe, int number)
{
  K3Status status = K3_OK;
  K3SafeShard *shard = &safe->shards[number];
  struct json_object *header = NULL;
  uint64_t length = 0;
  K3_TRY(k3_mapped_open(shard->path, "a safetensors file", 8, &shard->map, &shard->size));
  for (int i = 7; i >= 0; i--) length = length << 8 | shard->map[i];
  if (length > K3_SAFE_MAX_HEADER)
    K3_FAIL(K3_ERR_INPUT,
            "%s: its header is %llu bytes long by its first 8 bytes, at most %d are read (no safetensors "
            "file?)",
            shard->path, (unsigned long long)length, K3_SAFE_MAX_HEADER);
  if (length > shard->size - 8)
    K3_FAIL(K3_ERR_INPUT, "%s: the file is too short: %zu bytes, but header and its length alone are %llu", shard->path,
            shard->size, (unsigned long long)length + 8);
  shard->data_offset = (int64_t)length + 8;
  K3_TRY(k3_json_parse((const char *)shard->map + 8, (size_t)length, shard->path, &header));

  int64_t first = safe->count, entries = json_object_object_length(header);
  if (entries > 0) {
    K3SafeTensor *grown = realloc(safe->tensors, (size_t)(first + entries) * sizeof *grown);
    if (!grown)
      K3_FAIL_DONE(K3_ERR_INPUT, "%s: no memory for the list of its %lld tensors", shard->path, (long long)entries);
    safe->tensors = grown;
  }
  json_object_object_foreach(header, name, entry)
  {
    if (strcmp(name, "__metadata__") == 0) continue; /* free text; absent or empty is fine */
    if (!is_printable(name))
      K3_FAIL_DONE(K3_ERR_INPUT, "%s: header entry %lld has an empty, over-long or unprintable name", shard->path,
                   (long long)(safe->count - first));
    K3SafeTensor *tensor = &safe->tensors[safe->count];
    memset(tensor, 0, sizeof *tensor);
    tensor->shard = number;
    tensor->name = strdup(name);
    if (!tensor->name) K3_FAIL_DONE(K3_ERR_INPUT, "%s: no memory for the name of a tensor", shard->path);
    safe->count++;
    K3_TRY_DONE(read_entry(shard, tensor, entry));
  }
  K3_TRY_DONE(check_cover(shard, safe->tensors ? safe->tensors + first : NULL, safe->count - first));
done:
  json_object_put(header);
  return status;
}

static K3Status add_shard(K3Safetensors *safe, const char *name)
{
  K3SafeShard *grown = realloc(safe->shards, (size_t)(safe->shard_count + 1) * sizeof *grown);
  if (!grown) K3_FAIL(K3_ERR_INPUT, "%s: no memory for the list of shards", safe->directory);
  safe->shards = grown;
  K3SafeShard *shard = &grown[safe->shard_count];
  memset(shard, 0, sizeof *shard);
  shard->name = strdup(name);
  if (shard->name && asprintf(&shard->path, "%s/%s", safe->directory, name) < 0) shard->path = NULL;
  safe->shard_count++;
  if (!shard->name || !shard->path) K3_FAIL(K3_ERR_INPUT, "%s: no memory for the list of shards", safe->directory);
  return K3_OK;
}

/* Sorts by name; the same name twice is an error. */
static K3Status sort_tensors(K3Safetensors *safe)
{
  if (safe->count > 0) qsort(safe->tensors, (size_t)safe->count, sizeof *safe->tensors, compare_name);
  for (int64_t i = 1; i < safe->count; i++) {
    const K3SafeTensor *a = &safe->tensors[i - 1], *b = &safe->tensors[i];
    if (strcmp(a->name, b->name) == 0)
      K3_FAIL(K3_ERR_INPUT, "%s: tensor %s stands in two shards, %s and %s", safe->directory, a->name,
              safe->shards[a->shard].name, safe->shards[b->shard].name);
  }
  return K3_OK;
}

/* --- the index --- */

static int compare_text(const void *a, const void *b)
{
  return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* The distinct shard names of the index, in order, become safe->shards. */
static K3Status list_shards(K3Safetensors *safe, const char *path, struct json_object *map)
{
  K3Status status = K3_OK;
  int64_t entries = json_object_object_length(map), count = 0;
  const char **names = calloc((size_t)entries, sizeof *names);
  if (!names) K3_FAIL(K3_ERR_INPUT, "%s: no memory for its %lld entries", path, (long long)entries);
  json_object_object_foreach(map, name, value)
  {
    if (!is_printable(name))
      K3_FAIL_DONE(K3_ERR_INPUT, "%s: entry %lld of weight_map has an empty, over-long or unprintable name", path,
                   (long long)count);
    const char *shard = json_object_is_type(value, json_type_string) ? json_object_get_string(value) : "";
    if (!is_printable(shard) || strchr(shard, '/') || shard[0] == '.')
      K3_FAIL_DONE(K3_ERR_INPUT,
                   "%s: weight_map puts tensor %s into %.200s, wanted the name of a file beside the index", path, name,
                   json_object_to_json_string(value));
    names[count++] = shard;
  }
  qsort(names, (size_t)count, sizeof *names, compare_text);
  for (int64_t i = 0; i < count; i++)
    if (i == 0 || strcmp(names[i], names[i - 1]) != 0) K3_TRY_DONE(add_shard(safe, names[i]));
  for (int64_t s = 0; s < safe->shard_count; s++) { /* before any shard is read: the plainest mistake */
    if (access(safe->shards[s].path, F_OK) == 0) continue;
    int64_t listed = 0;
    for (int64_t i = 0; i < count; i++) listed += strcmp(names[i], safe->shards[s].name) == 0;
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: shard is missing, but %s lists %lld tensors in it (fetch it again)",
                 safe->shards[s].path, INDEX_NAME, (long long)listed);
  }
done:
  free(names);
  return status;
}

/* Index against shard headers, both ways. */
static K3Status compare_index(const K3Safetensors *safe, const char *path, struct json_object *map)
{
  json_object_object_foreach(map, name, value)
  {
    const char *listed = json_object_get_string(value);
    const K3SafeTensor *tensor = k3_safetensors_find(safe, name);
    if (!tensor) K3_FAIL(K3_ERR_INPUT, "%s: lists tensor %s in shard %s, whose header lacks it", path, name, listed);
    if (strcmp(safe->shards[tensor->shard].name, listed) != 0)
      K3_FAIL(K3_ERR_INPUT, "%s: lists tensor %s under the wrong shard %s: it stands in %s", path, name, listed,
              safe->shards[tensor->shard].name);
  }
  for (int64_t i = 0; i < safe->count; i++)
    if (!json_object_object_get_ex(map, safe->tensors[i].name, NULL))
      K3_FAIL(K3_ERR_INPUT, "%s: tensor %s is not listed in %s", k3_safetensors_path(safe, &safe->tensors[i]),
              safe->tensors[i].name, INDEX_NAME);
  return K3_OK;
}

static K3Status open_indexed(K3Safetensors *safe, const char *path)
{
  K3Status status = K3_OK;
  struct json_object *index = NULL, *map = NULL;
  K3_TRY(k3_json_load(path, K3_SAFE_MAX_INDEX, &index));
  json_object_object_get_ex(index, "weight_map", &map);
  if (!json_object_is_type(map, json_type_object) || json_object_object_length(map) == 0)
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: has no weight_map that lists tensors and their shards", path);
  K3_TRY_DONE(list_shards(safe, path, map));
  for (int64_t s = 0; s < safe->shard_count; s++) K3_TRY_DONE(read_header(safe, (int)s));
  K3_TRY_DONE(sort_tensors(safe));
  K3_TRY_DONE(compare_index(safe, path, map));
done:
  json_object_put(index);
  return status;
}

K3Status k3_safetensors_open(const char *directory, K3Safetensors **out)
{
  K3Status status = K3_OK;
  char *index = NULL, *single = NULL;
  *out = NULL;
  K3Safetensors *safe = calloc(1, sizeof *safe);
  if (!safe) K3_FAIL(K3_ERR_INPUT, "%s: no memory", directory);
  safe->directory = strdup(directory);
  if (asprintf(&index, "%s/%s", directory, INDEX_NAME) < 0) index = NULL;
  if (asprintf(&single, "%s/%s", directory, SINGLE_NAME) < 0) single = NULL;
  if (!safe->directory || !index || !single) K3_FAIL_DONE(K3_ERR_INPUT, "%s: no memory", directory);
  if (access(index, F_OK) == 0) {
    K3_TRY_DONE(open_indexed(safe, index));
  } else if (access(single, F_OK) == 0) {
    K3_TRY_DONE(add_shard(safe, SINGLE_NAME));
    K3_TRY_DONE(read_header(safe, 0));
    K3_TRY_DONE(sort_tensors(safe));
  } else {
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: holds neither %s nor %s: no checkpoint, or not all of it", directory, INDEX_NAME,
                 SINGLE_NAME);
  }
  *out = safe;
  safe = NULL;
done:
  free(index);
  free(single);
  k3_safetensors_close(safe);
  return status;
}

void k3_safetensors_close(K3Safetensors *safe)
{
  if (!safe) return;
  for (int64_t i = 0; i < safe->count; i++) free(safe->tensors[i].name);
  for (int64_t s = 0; s < safe->shard_count; s++) {
    k3_mapped_close(safe->shards[s].map, safe->shards[s].size);
    free(safe->shards[s].name);
    free(safe->shards[s].path);
  }
  free(safe->tensors);
  free(safe->shards);
  free(safe->directory);
  free(safe);
}

#endif /* HAVE_JSON_C */
