/* One GGUF file: header, metadata, tensor entries. See gguf.h. Layer: import.
 * Every number in a file is foreign: it is checked before it is used for an address, a size or a loop. Little-endian
 * hosts, as the rest of the program. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "import/gguf.h"
#include "import/mapped_file.h"

enum {
  MIN_PAIR = 8 + 1 + 4 + 1,         /* bytes of the smallest key-value pair */
  MIN_INFO = 8 + 1 + 4 + 8 + 4 + 8, /* and tensor entry */
  HEADER_BYTES = 24,                /* magic, version, two counts */
  MAX_KEY = 1024,                   /* bytes; the format allows 65,535, the longest in use is below 64 */
  MAX_ALIGNMENT = 1 << 20,
  DEFAULT_ALIGNMENT = 32
};

static const struct {
  const char *name;
  int bytes; /* of a value; 0: not of fixed size */
} kinds[K3_GGUF_KIND_COUNT] = {
    [K3_GGUF_UINT8] = {"uint8", 1},     [K3_GGUF_INT8] = {"int8", 1},     [K3_GGUF_UINT16] = {"uint16", 2},
    [K3_GGUF_INT16] = {"int16", 2},     [K3_GGUF_UINT32] = {"uint32", 4}, [K3_GGUF_INT32] = {"int32", 4},
    [K3_GGUF_FLOAT32] = {"float32", 4}, [K3_GGUF_BOOL] = {"bool", 1},     [K3_GGUF_STRING] = {"string", 0},
    [K3_GGUF_ARRAY] = {"array", 0},     [K3_GGUF_UINT64] = {"uint64", 8}, [K3_GGUF_INT64] = {"int64", 8},
    [K3_GGUF_FLOAT64] = {"float64", 8},
};

/* gguf.GGML_QUANT_SIZES of the package: values and bytes of a block. */
static const struct {
  const char *name;
  int values, bytes;
} types[] = {
    [0] = {"f32", 1, 4},         [1] = {"f16", 1, 2},         [2] = {"q4_0", 32, 18},      [3] = {"q4_1", 32, 20},
    [6] = {"q5_0", 32, 22},      [7] = {"q5_1", 32, 24},      [8] = {"q8_0", 32, 34},      [9] = {"q8_1", 32, 36},
    [10] = {"q2_k", 256, 84},    [11] = {"q3_k", 256, 110},   [12] = {"q4_k", 256, 144},   [13] = {"q5_k", 256, 176},
    [14] = {"q6_k", 256, 210},   [15] = {"q8_k", 256, 292},   [16] = {"iq2_xxs", 256, 66}, [17] = {"iq2_xs", 256, 74},
    [18] = {"iq3_xxs", 256, 98}, [19] = {"iq1_s", 256, 50},   [20] = {"iq4_nl", 32, 18},   [21] = {"iq3_s", 256, 110},
    [22] = {"iq2_s", 256, 82},   [23] = {"iq4_xs", 256, 136}, [24] = {"i8", 1, 1},         [25] = {"i16", 1, 2},
    [26] = {"i32", 1, 4},        [27] = {"i64", 1, 8},        [28] = {"f64", 1, 8},        [29] = {"iq1_m", 256, 56},
    [30] = {"bf16", 1, 2},       [34] = {"tq1_0", 256, 54},   [35] = {"tq2_0", 256, 66},   [39] = {"mxfp4", 32, 17},
};
enum { TYPE_COUNT = sizeof types / sizeof types[0] };

const char *k3_gguf_type_name(int type) { return type >= 0 && type < TYPE_COUNT ? types[type].name : NULL; }

static uint32_t read_u32(const uint8_t *at)
{
  uint32_t number;
  memcpy(&number, at, sizeof number);
  return number;
}

static uint64_t read_u64(const uint8_t *at)
{
  uint64_t number;
  memcpy(&number, at, sizeof number);
  return number;
}

/* --- moving through the header --- */

typedef struct {
  const K3GgufShard *shard;
  size_t at;
} Cursor;

/* Steps over `bytes`; *from (may be NULL) is where they begin. `what` stands in the message. */
static K3Status take(Cursor *cursor, uint64_t bytes, const uint8_t **from, const char *what)
{
  if (bytes > cursor->shard->size - cursor->at)
    K3_FAIL(K3_ERR_INPUT,
            "%s: the file is too short: %zu bytes, but %s at byte %zu is %llu bytes long by the header (cut or partly "
            "downloaded? fetch it again)",
            cursor->shard->path, cursor->shard->size, what, cursor->at, (unsigned long long)bytes);
  if (from) *from = cursor->shard->map + cursor->at;
  cursor->at += (size_t)bytes;
  return K3_OK;
}

static K3Status take_u32(Cursor *cursor, uint32_t *number, const char *what)
{
  const uint8_t *at = NULL;
  K3_TRY(take(cursor, 4, &at, what));
  *number = read_u32(at);
  return K3_OK;
}

static K3Status take_u64(Cursor *cursor, uint64_t *number, const char *what)
{
  const uint8_t *at = NULL;
  K3_TRY(take(cursor, 8, &at, what));
  *number = read_u64(at);
  return K3_OK;
}

/* A length and as many bytes, of which there is at most `most` (0: no limit) and at least one where there is a limit. */
static K3Status take_text(Cursor *cursor, uint64_t most, const char *what)
{
  uint64_t length = 0;
  K3_TRY(take_u64(cursor, &length, what));
  if (most && (length == 0 || length > most) && length <= cursor->shard->size - cursor->at)
    K3_FAIL(K3_ERR_INPUT, "%s: %s at byte %zu is %llu bytes long, wanted 1 to %llu", cursor->shard->path, what,
            cursor->at, (unsigned long long)length, (unsigned long long)most);
  return take(cursor, length, NULL, what);
}

/* A name that can stand in a message. */
static K3Status check_printable(const Cursor *cursor, const uint8_t *text, uint64_t length, const char *what)
{
  for (uint64_t i = 0; i < length; i++)
    if (text[i] < 0x20 || text[i] == 0x7f)
      K3_FAIL(K3_ERR_INPUT, "%s: %s before byte %zu has an unprintable name (byte %d)", cursor->shard->path, what,
              cursor->at, text[i]);
  return K3_OK;
}

/* `count` elements of `kind`. */
static K3Status take_elements(Cursor *cursor, uint32_t kind, uint64_t count)
{
  uint64_t least = kinds[kind].bytes ? (uint64_t)kinds[kind].bytes : 8;
  size_t left = cursor->shard->size - cursor->at;
  if (count > left / least)
    K3_FAIL(K3_ERR_INPUT,
            "%s: the file is too short: %zu bytes, but an array of %llu %s begins at byte %zu (cut or partly "
            "downloaded? fetch it again)",
            cursor->shard->path, cursor->shard->size, (unsigned long long)count, kinds[kind].name, cursor->at);
  if (kinds[kind].bytes) return take(cursor, count * least, NULL, "an array");
  for (uint64_t i = 0; i < count; i++) K3_TRY(take_text(cursor, 0, "a string"));
  return K3_OK;
}

static K3Status take_kind(Cursor *cursor, uint32_t *kind, const char *what)
{
  K3_TRY(take_u32(cursor, kind, what));
  if (*kind >= K3_GGUF_KIND_COUNT)
    K3_FAIL(K3_ERR_INPUT, "%s: %s at byte %zu has unknown kind %u", cursor->shard->path, what, cursor->at - 4, *kind);
  return K3_OK;
}

static K3Status take_value(Cursor *cursor)
{
  uint32_t kind = 0;
  uint64_t count = 1;
  K3_TRY(take_kind(cursor, &kind, "a value"));
  if (kind == K3_GGUF_ARRAY) {
    K3_TRY(take_kind(cursor, &kind, "an array"));
    if (kind == K3_GGUF_ARRAY)
      K3_FAIL(K3_ERR_INPUT, "%s: an array at byte %zu holds arrays, which the format does not have",
              cursor->shard->path, cursor->at);
    K3_TRY(take_u64(cursor, &count, "an array"));
  }
  return take_elements(cursor, kind, count);
}

/* --- key-value pairs, as pointers into the mapping that were walked over once --- */

static const uint8_t *text_of(const uint8_t *pair) { return pair + 8; }
static uint64_t length_of(const uint8_t *pair) { return read_u64(pair); }

/* Two length-prefixed names. */
static int compare_text(const uint8_t *a, uint64_t a_length, const uint8_t *b, uint64_t b_length)
{
  uint64_t common = a_length < b_length ? a_length : b_length;
  int order = memcmp(a, b, (size_t)common);
  if (order) return order;
  return a_length < b_length ? -1 : a_length > b_length;
}

static int compare_pairs(const void *a, const void *b)
{
  const uint8_t *left = *(const uint8_t *const *)a, *right = *(const uint8_t *const *)b;
  return compare_text(text_of(left), length_of(left), text_of(right), length_of(right));
}

static void copy_text(const uint8_t *text, uint64_t length, char *to, size_t size)
{
  size_t bytes = length < size - 1 ? (size_t)length : size - 1;
  memcpy(to, text, bytes);
  to[bytes] = '\0';
}

/* The value behind a key; the pair was walked over before, so nothing can fail. */
static void decode_value(const K3GgufShard *shard, const uint8_t *pair, K3GgufValue *value)
{
  const uint8_t *at = text_of(pair) + length_of(pair);
  Cursor end = {shard, (size_t)(at - shard->map)};
  take_value(&end);
  value->kind = (K3GgufKind)read_u32(at);
  value->is_array = value->kind == K3_GGUF_ARRAY;
  value->count = 1;
  at += 4;
  if (value->is_array) {
    value->kind = (K3GgufKind)read_u32(at);
    value->count = (int64_t)read_u64(at + 4);
    at += 12;
  }
  value->data = at;
  value->bytes = (int64_t)(shard->map + end.at - at);
}

void k3_gguf_file_pair(const K3GgufShard *shard, int64_t index, char *key, size_t size, K3GgufValue *value)
{
  const uint8_t *pair = shard->values[index];
  copy_text(text_of(pair), length_of(pair), key, size);
  decode_value(shard, pair, value);
}

int k3_gguf_file_value(const K3GgufShard *shard, const char *key, K3GgufValue *value)
{
  int64_t low = 0, high = shard->value_count;
  while (low < high) {
    int64_t middle = low + (high - low) / 2;
    const uint8_t *pair = shard->values[middle];
    int order = compare_text((const uint8_t *)key, strlen(key), text_of(pair), length_of(pair));
    if (order == 0) {
      decode_value(shard, pair, value);
      return 1;
    }
    if (order < 0) high = middle;
    else low = middle + 1;
  }
  return 0;
}

int k3_gguf_integer(const K3GgufValue *value, int64_t index, int64_t *number)
{
  if (index < 0 || index >= value->count) return 0;
  const uint8_t *at = value->data;
  switch (value->kind) {
  case K3_GGUF_BOOL:
  case K3_GGUF_UINT8: *number = at[index]; return 1;
  case K3_GGUF_INT8: *number = (int8_t)at[index]; return 1;
  case K3_GGUF_UINT16: *number = at[2 * index] | at[2 * index + 1] << 8; return 1;
  case K3_GGUF_INT16: *number = (int16_t)(at[2 * index] | at[2 * index + 1] << 8); return 1;
  case K3_GGUF_UINT32: *number = read_u32(at + 4 * index); return 1;
  case K3_GGUF_INT32: *number = (int32_t)read_u32(at + 4 * index); return 1;
  case K3_GGUF_INT64: *number = (int64_t)read_u64(at + 8 * index); return 1;
  case K3_GGUF_UINT64: *number = (int64_t)read_u64(at + 8 * index); return *number >= 0;
  default: return 0;
  }
}

int k3_gguf_real(const K3GgufValue *value, int64_t index, double *number)
{
  float single;
  if (index < 0 || index >= value->count) return 0;
  if (value->kind == K3_GGUF_FLOAT64) memcpy(number, value->data + 8 * index, 8);
  if (value->kind != K3_GGUF_FLOAT32) return value->kind == K3_GGUF_FLOAT64;
  memcpy(&single, value->data + 4 * index, 4);
  *number = (double)single;
  return 1;
}

const char *k3_gguf_kind_text(const K3GgufValue *value, char *text, size_t size)
{
  if (value->is_array) snprintf(text, size, "an array of %lld %s", (long long)value->count, kinds[value->kind].name);
  else snprintf(text, size, "a value of kind %s", kinds[value->kind].name);
  return text;
}

/* --- the header --- */

static K3Status read_pairs(K3GgufShard *shard, Cursor *cursor, uint64_t count)
{
  size_t left = shard->size - cursor->at;
  if (count > left / MIN_PAIR)
    K3_FAIL(K3_ERR_INPUT, "%s: the file is too short: %zu bytes, too few for the %llu metadata keys of its header",
            shard->path, shard->size, (unsigned long long)count);
  if (count == 0) return K3_OK;
  shard->values = malloc((size_t)count * sizeof *shard->values);
  if (!shard->values) K3_FAIL(K3_ERR_INPUT, "%s: no memory for the list of its keys", shard->path);
  for (uint64_t i = 0; i < count; i++) {
    const uint8_t *pair = shard->map + cursor->at;
    K3_TRY(take_text(cursor, MAX_KEY, "a metadata key"));
    K3_TRY(check_printable(cursor, text_of(pair), length_of(pair), "a metadata key"));
    K3_TRY(take_value(cursor));
    shard->values[shard->value_count++] = pair;
  }
  qsort(shard->values, (size_t)count, sizeof *shard->values, compare_pairs);
  for (uint64_t i = 1; i < count; i++)
    if (compare_pairs(&shard->values[i - 1], &shard->values[i]) == 0)
      K3_FAIL(K3_ERR_INPUT, "%s: metadata key %.*s stands twice in the header", shard->path,
              (int)length_of(shard->values[i]), text_of(shard->values[i]));
  return K3_OK;
}

static K3Status read_alignment(K3GgufShard *shard)
{
  K3GgufValue value;
  shard->alignment = DEFAULT_ALIGNMENT;
  if (!k3_gguf_file_value(shard, "general.alignment", &value)) return K3_OK;
  int64_t number = 0;
  if (value.is_array || !k3_gguf_integer(&value, 0, &number) || number < 1 || number > MAX_ALIGNMENT ||
      (number & (number - 1)))
    K3_FAIL(K3_ERR_INPUT, "%s: key general.alignment is %lld, wanted a power of two up to %d", shard->path,
            (long long)number, MAX_ALIGNMENT);
  shard->alignment = number;
  return K3_OK;
}

/* Steps over one tensor's entry and checks what can be checked without the others. */
static K3Status take_info(Cursor *cursor)
{
  const K3GgufShard *shard = cursor->shard;
  const uint8_t *info = shard->map + cursor->at, *at = NULL;
  uint32_t rank = 0, type = 0;
  int64_t elements = 1;
  char name[K3_GGUF_NAME_SIZE];
  K3_TRY(take_text(cursor, K3_GGUF_NAME_SIZE - 1, "a tensor's name"));
  K3_TRY(check_printable(cursor, text_of(info), length_of(info), "a tensor"));
  copy_text(text_of(info), length_of(info), name, sizeof name);
  K3_TRY(take_u32(cursor, &rank, "a tensor's entry"));
  if (rank < 1 || rank > K3_GGUF_MAX_AXES)
    K3_FAIL(K3_ERR_INPUT, "%s: tensor %s has %u axes, wanted 1 to %d", shard->path, name, rank, K3_GGUF_MAX_AXES);
  K3_TRY(take(cursor, 8 * (uint64_t)rank, &at, "a tensor's entry"));
  for (uint32_t i = 0; i < rank; i++) {
    uint64_t size = read_u64(at + 8 * i);
    if (size < 1 || size > INT64_MAX || __builtin_mul_overflow(elements, (int64_t)size, &elements))
      K3_FAIL(K3_ERR_INPUT, "%s: tensor %s: axis %u of its shape is %llu: none or too many elements", shard->path, name,
              i, (unsigned long long)size);
  }
  K3_TRY(take_u32(cursor, &type, "a tensor's entry"));
  if (type > INT32_MAX || !k3_gguf_type_name((int)type))
    K3_FAIL(K3_ERR_INPUT, "%s: tensor %s has type %u, which is no type of GGUF known here", shard->path, name, type);
  if (read_u64(at) % (uint64_t)types[type].values)
    K3_FAIL(K3_ERR_INPUT, "%s: tensor %s: rows of %llu elements are no whole number of %s blocks (%d)", shard->path,
            name, (unsigned long long)read_u64(at), types[type].name, types[type].values);
  if (elements / types[type].values > INT64_MAX / 2 / types[type].bytes)
    K3_FAIL(K3_ERR_INPUT, "%s: tensor %s has %lld elements: too many", shard->path, name, (long long)elements);
  return take(cursor, 8, NULL, "a tensor's entry");
}

K3Status k3_gguf_file_open(K3GgufShard *shard)
{
  uint64_t tensors = 0, pairs = 0;
  uint32_t version = 0;
  K3_TRY(k3_mapped_open(shard->path, "a GGUF file", HEADER_BYTES, &shard->map, &shard->size));
  Cursor cursor = {shard, 4};
  if (memcmp(shard->map, "GGUF", 4) != 0)
    K3_FAIL(K3_ERR_INPUT, "%s: does not begin with GGUF: no GGUF file", shard->path);
  K3_TRY(take_u32(&cursor, &version, "the version"));
  if (version && !(version & 0xffffu))
    K3_FAIL(K3_ERR_INPUT, "%s: a big-endian GGUF file: only little-endian ones are read", shard->path);
  if (version != 2 && version != 3) K3_FAIL(K3_ERR_INPUT, "%s: GGUF version %u, wanted 2 or 3", shard->path, version);
  K3_TRY(take_u64(&cursor, &tensors, "the header"));
  K3_TRY(take_u64(&cursor, &pairs, "the header"));
  K3_TRY(read_pairs(shard, &cursor, pairs));
  K3_TRY(read_alignment(shard));
  if (tensors > (shard->size - cursor.at) / MIN_INFO)
    K3_FAIL(K3_ERR_INPUT, "%s: the file is too short: %zu bytes, too few for the %llu tensors of its header",
            shard->path, shard->size, (unsigned long long)tensors);
  shard->tensor_count = (int64_t)tensors;
  shard->infos = (int64_t)cursor.at;
  for (uint64_t i = 0; i < tensors; i++) K3_TRY(take_info(&cursor));
  shard->data_offset = ((int64_t)cursor.at + shard->alignment - 1) / shard->alignment * shard->alignment;
  return K3_OK;
}

/* --- tensors --- */

void k3_gguf_file_tensor(const K3GgufShard *shard, const K3GgufEntry *entry, K3GgufTensor *tensor)
{
  const uint8_t *at = text_of(entry->at) + length_of(entry->at);
  int64_t elements = 1;
  copy_text(text_of(entry->at), length_of(entry->at), tensor->name, sizeof tensor->name);
  tensor->shard = entry->shard;
  tensor->rank = (int)read_u32(at);
  at += 4;
  for (int i = 0; i < tensor->rank; i++, at += 8) {
    tensor->shape[tensor->rank - 1 - i] = (int64_t)read_u64(at);
    elements *= (int64_t)read_u64(at);
  }
  for (int i = tensor->rank; i < K3_GGUF_MAX_AXES; i++) tensor->shape[i] = 1;
  tensor->type = (int)read_u32(at);
  tensor->bytes = elements / types[tensor->type].values * types[tensor->type].bytes;
  tensor->offset = (int64_t)read_u64(at + 4);
  int inside = tensor->offset >= 0 && tensor->offset < (int64_t)shard->size - shard->data_offset;
  tensor->data = inside ? shard->map + shard->data_offset + tensor->offset : NULL; /* NULL: check_cover refuses it */
}

/* Byte offset in the data of an entry that was walked over. */
static uint64_t offset_of(const uint8_t *entry)
{
  const uint8_t *rank = text_of(entry) + length_of(entry);
  return read_u64(rank + 4 + 8 * (size_t)read_u32(rank) + 4);
}

static int compare_offset(const void *a, const void *b)
{
  uint64_t left = offset_of(((const K3GgufEntry *)a)->at), right = offset_of(((const K3GgufEntry *)b)->at);
  return left < right ? -1 : left > right;
}

/* Entries in order of place: aligned, no overlap, no hole, and the file ends where the last one's padding does. */
static K3Status check_cover(const K3GgufShard *shard, const K3GgufEntry *entries)
{
  int64_t at = 0, size = (int64_t)shard->size, alignment = shard->alignment;
  K3GgufTensor tensor = {.name = ""}, before;
  for (int64_t i = 0; i < shard->tensor_count; i++) {
    uint64_t offset = offset_of(entries[i].at);
    before = tensor;
    k3_gguf_file_tensor(shard, &entries[i], &tensor);
    if (offset > INT64_MAX / 4)
      K3_FAIL(K3_ERR_INPUT, "%s: tensor %s begins at byte %llu of the data: beyond any file", shard->path, tensor.name,
              (unsigned long long)offset);
    if (tensor.offset % alignment)
      K3_FAIL(K3_ERR_INPUT, "%s: tensor %s begins at byte %lld of the data, which is no multiple of %lld", shard->path,
              tensor.name, (long long)tensor.offset, (long long)alignment);
    if (tensor.offset < at)
      K3_FAIL(K3_ERR_INPUT, "%s: tensors %s and %s overlap at byte %lld of the data", shard->path, before.name,
              tensor.name, (long long)tensor.offset);
    if (tensor.offset > at)
      K3_FAIL(K3_ERR_INPUT, "%s: bytes %lld to %lld of the data, before tensor %s, belong to no tensor of the header",
              shard->path, (long long)at, (long long)tensor.offset, tensor.name);
    if (tensor.bytes > INT64_MAX / 2 - at)
      K3_FAIL(K3_ERR_INPUT, "%s: tensor %s ends beyond any file", shard->path, tensor.name);
    at += (tensor.bytes + alignment - 1) / alignment * alignment;
  }
  int64_t wanted = shard->data_offset + at;
  if (size < wanted && shard->tensor_count > 0)
    K3_FAIL(K3_ERR_INPUT,
            "%s: the file is too short: %lld bytes, but by its header %lld are expected (tensor %s is the last; cut or "
            "partly downloaded? fetch it again)",
            shard->path, (long long)size, (long long)wanted, tensor.name);
  if (size > wanted)
    K3_FAIL(K3_ERR_INPUT, "%s: the file is too long: %lld bytes, but by its header %lld are expected", shard->path,
            (long long)size, (long long)wanted);
  return K3_OK;
}

K3Status k3_gguf_file_entries(const K3GgufShard *shard, int number, K3GgufEntry *entries)
{
  Cursor cursor = {shard, (size_t)shard->infos};
  for (int64_t i = 0; i < shard->tensor_count; i++) {
    entries[i] = (K3GgufEntry){.at = shard->map + cursor.at, .shard = number};
    K3_TRY(take_info(&cursor));
  }
  if (shard->tensor_count > 0) qsort(entries, (size_t)shard->tensor_count, sizeof *entries, compare_offset);
  return check_cover(shard, entries);
}
