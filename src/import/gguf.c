/* The files of one GGUF model. See gguf.h. Layer: import. */
#include "import/gguf.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "import/mapped_file.h"

#define SUFFIX ".gguf"

enum { MAX_SHARDS = 99999, SPLIT_TAIL = 20 /* "-00001-of-00002.gguf" */ };

void k3_gguf_shape_text(int rank, const int64_t *shape, char *text, size_t size)
{
  size_t at = (size_t)snprintf(text, size, "[");
  for (int i = 0; i < rank && at < size; i++)
    at += (size_t)snprintf(text + at, size - at, "%s%lld", i ? ", " : "", (long long)shape[i]);
  if (at < size) snprintf(text + at, size - at, "]");
}

/* --- file names --- */

/* Whether `path` ends in -NNNNN-of-NNNNN.gguf, and the two numbers. */
static int split_numbers(const char *path, int *number, int *count)
{
  size_t length = strlen(path);
  int end = 0;
  if (length <= SPLIT_TAIL) return 0;
  const char *tail = path + length - SPLIT_TAIL;
  for (int i = 0; i < SPLIT_TAIL; i++)
    if (((i >= 1 && i <= 5) || (i >= 10 && i <= 14)) && (tail[i] < '0' || tail[i] > '9')) return 0;
  return sscanf(tail, "-%5d-of-%5d" SUFFIX "%n", number, count, &end) == 2 && end == SPLIT_TAIL;
}

static int ends_with(const char *text, const char *end)
{
  size_t length = strlen(text), tail = strlen(end);
  return length > tail && strcmp(text + length - tail, end) == 0;
}

/* The one file of a directory that a model begins with; *path is the caller's to free. */
static K3Status find_in_directory(const char *directory, char **path)
{
  K3Status status = K3_OK;
  char *found = NULL;
  int64_t count = 0;
  *path = NULL;
  DIR *list = opendir(directory);
  if (!list) K3_FAIL(K3_ERR_INPUT, "%s: cannot open: %s", directory, strerror(errno));
  for (struct dirent *item; (item = readdir(list));) {
    int number = 1, of = 1;
    if (!ends_with(item->d_name, SUFFIX) || strncmp(item->d_name, "mmproj", 6) == 0) continue;
    if (split_numbers(item->d_name, &number, &of) && number != 1) continue;
    if (count++ > 0) continue;
    found = strdup(item->d_name);
    if (!found) K3_FAIL_DONE(K3_ERR_INPUT, "%s: no memory", directory);
  }
  if (count == 0)
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: holds no whole GGUF file and no first shard (NAME-00001-of-000NN.gguf)", directory);
  if (count > 1)
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: holds %lld GGUF models: name one file, or the first shard of one", directory,
                 (long long)count);
  if (asprintf(path, "%s/%s", directory, found) < 0) {
    *path = NULL;
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: no memory", directory);
  }
done:
  free(found);
  closedir(list);
  return status;
}

/* --- the shards --- */

/* A whole number of the file's own metadata; -1 when absent. */
static K3Status read_split(const K3GgufShard *shard, const char *key, int64_t *number)
{
  K3GgufValue value;
  char text[80];
  *number = -1;
  if (!k3_gguf_file_value(shard, key, &value)) return K3_OK;
  if (value.is_array || !k3_gguf_integer(&value, 0, number) || *number < 0)
    K3_FAIL(K3_ERR_INPUT, "%s: key %s is %s, wanted a whole number from 0", shard->path, key,
            k3_gguf_kind_text(&value, text, sizeof text));
  return K3_OK;
}

static K3Status check_split(const K3GgufShard *shard, int64_t number, int64_t count)
{
  int64_t got_number, got_count;
  K3_TRY(read_split(shard, "split.no", &got_number));
  K3_TRY(read_split(shard, "split.count", &got_count));
  if (count == 1 && got_count <= 1) return K3_OK;
  if (count == 1)
    K3_FAIL(K3_ERR_INPUT,
            "%s: is one of %lld shards by its key split.count, but is not named NAME-00001-of-%05lld.gguf: give the "
            "shards their names back",
            shard->path, (long long)got_count, (long long)got_count);
  if (got_number != number || got_count != count)
    K3_FAIL(K3_ERR_INPUT, "%s: split.no = %lld of split.count = %lld, by its name wanted %lld of %lld (renamed?)",
            shard->path, (long long)got_number, (long long)got_count, (long long)number, (long long)count);
  return K3_OK;
}

/* A later shard repeats some keys of the first (in practice split.* alone): those must be the same. */
static K3Status check_same_model(const K3Gguf *gguf, const K3GgufShard *shard)
{
  const K3GgufShard *first = &gguf->shards[0];
  char key[128];
  for (int64_t i = 0; i < shard->value_count; i++) {
    K3GgufValue ours, theirs;
    k3_gguf_file_pair(shard, i, key, sizeof key, &ours);
    if (strcmp(key, "split.no") == 0 || !k3_gguf_file_value(first, key, &theirs)) continue;
    if (ours.kind != theirs.kind || ours.is_array != theirs.is_array || ours.bytes != theirs.bytes ||
        memcmp(ours.data, theirs.data, (size_t)ours.bytes) != 0)
      K3_FAIL(K3_ERR_INPUT, "%s: key %s differs from that of %s: shards of two models", shard->path, key, first->path);
  }
  return K3_OK;
}

static int compare_name(const void *a, const void *b)
{
  const uint8_t *left = ((const K3GgufEntry *)a)->at, *right = ((const K3GgufEntry *)b)->at;
  uint64_t left_length, right_length;
  memcpy(&left_length, left, 8);
  memcpy(&right_length, right, 8);
  int order = memcmp(left + 8, right + 8, (size_t)(left_length < right_length ? left_length : right_length));
  if (order) return order;
  return left_length < right_length ? -1 : left_length > right_length;
}

/* All shards' entries in one list, sorted by name; the same name twice is an error. */
static K3Status collect_entries(K3Gguf *gguf)
{
  int64_t all = 0, wanted = -1;
  for (int64_t s = 0; s < gguf->shard_count; s++) all += gguf->shards[s].tensor_count;
  for (int64_t s = 0; s < gguf->shard_count && gguf->shard_count > 1; s++) {
    K3_TRY(read_split(&gguf->shards[s], "split.tensors.count", &wanted));
    if (wanted < 0) K3_FAIL(K3_ERR_INPUT, "%s: key split.tensors.count is missing from a shard", gguf->shards[s].path);
    if (wanted != all)
      K3_FAIL(K3_ERR_INPUT,
              "%s: split.tensors.count = %lld, but the %lld shards hold %lld tensors: shards of two models?",
              gguf->shards[s].path, (long long)wanted, (long long)gguf->shard_count, (long long)all);
  }
  if (all == 0) K3_FAIL(K3_ERR_INPUT, "%s: holds no tensors", gguf->path);
  gguf->entries = malloc((size_t)all * sizeof *gguf->entries);
  if (!gguf->entries)
    K3_FAIL(K3_ERR_INPUT, "%s: no memory for the list of its %lld tensors", gguf->path, (long long)all);
  for (int64_t s = 0; s < gguf->shard_count; s++) {
    K3_TRY(k3_gguf_file_entries(&gguf->shards[s], (int)s, gguf->entries + gguf->count));
    gguf->count += gguf->shards[s].tensor_count;
  }
  qsort(gguf->entries, (size_t)all, sizeof *gguf->entries, compare_name);
  for (int64_t i = 1; i < all; i++) {
    const K3GgufEntry *a = &gguf->entries[i - 1], *b = &gguf->entries[i];
    K3GgufTensor tensor;
    if (compare_name(a, b) != 0) continue;
    k3_gguf_tensor(gguf, a, &tensor);
    if (a->shard == b->shard)
      K3_FAIL(K3_ERR_INPUT, "%s: tensor %s stands twice in the header", gguf->shards[a->shard].path, tensor.name);
    K3_FAIL(K3_ERR_INPUT, "tensor %s stands in two shards, %s and %s (of two models?)", tensor.name,
            gguf->shards[a->shard].path, gguf->shards[b->shard].path);
  }
  return K3_OK;
}

/* Opens the first file and those that belong to it. */
static K3Status open_shards(K3Gguf *gguf, const char *first)
{
  int number = 1, count = 1;
  int stem = (int)strlen(first) - SPLIT_TAIL;
  if (split_numbers(first, &number, &count) && (count < 1 || number != 1))
    K3_FAIL(K3_ERR_INPUT, "%s: is shard %d of %d: name the first one, %.*s-00001-of-%05d" SUFFIX, first, number, count,
            stem, first, count);
  gguf->shards = calloc((size_t)count, sizeof *gguf->shards);
  if (!gguf->shards) K3_FAIL(K3_ERR_INPUT, "%s: no memory for the list of %d shards", gguf->path, count);
  for (int s = 0; s < count; s++) { /* before any is read: the plainest mistake */
    char *path = NULL;
    if (s == 0) path = strdup(first);
    else if (asprintf(&path, "%.*s-%05d-of-%05d" SUFFIX, stem, first, s + 1, count) < 0) path = NULL;
    if (!path) K3_FAIL(K3_ERR_INPUT, "%s: no memory", gguf->path);
    gguf->shards[gguf->shard_count++].path = path;
    if (s > 0 && access(path, F_OK) != 0)
      K3_FAIL(K3_ERR_INPUT, "%s: shard is missing: the model has %d (fetch it again)", path, count);
  }
  for (int s = 0; s < count; s++) {
    K3_TRY(k3_gguf_file_open(&gguf->shards[s]));
    K3_TRY(check_split(&gguf->shards[s], s, count));
    if (s > 0) K3_TRY(check_same_model(gguf, &gguf->shards[s]));
  }
  return collect_entries(gguf);
}

K3Status k3_gguf_open(const char *path, K3Gguf **out)
{
  K3Status status = K3_OK;
  struct stat info;
  char *first = NULL;
  *out = NULL;
  K3Gguf *gguf = calloc(1, sizeof *gguf);
  if (!gguf) K3_FAIL(K3_ERR_INPUT, "%s: no memory", path);
  gguf->path = strdup(path);
  if (!gguf->path) K3_FAIL_DONE(K3_ERR_INPUT, "%s: no memory", path);
  if (stat(path, &info) == 0 && S_ISDIR(info.st_mode)) K3_TRY_DONE(find_in_directory(path, &first));
  K3_TRY_DONE(open_shards(gguf, first ? first : path));
  *out = gguf;
  gguf = NULL;
done:
  free(first);
  k3_gguf_close(gguf);
  return status;
}

int k3_gguf_value(const K3Gguf *gguf, const char *key, K3GgufValue *value)
{
  return k3_gguf_file_value(&gguf->shards[0], key, value);
}

K3GgufEntry *k3_gguf_find(const K3Gguf *gguf, const char *name)
{
  int64_t low = 0, high = gguf->count;
  while (low < high) {
    int64_t middle = low + (high - low) / 2;
    K3GgufTensor tensor;
    k3_gguf_tensor(gguf, &gguf->entries[middle], &tensor);
    int order = strcmp(name, tensor.name);
    if (order == 0) return &gguf->entries[middle];
    if (order < 0) high = middle;
    else low = middle + 1;
  }
  return NULL;
}

void k3_gguf_tensor(const K3Gguf *gguf, const K3GgufEntry *entry, K3GgufTensor *tensor)
{
  k3_gguf_file_tensor(&gguf->shards[entry->shard], entry, tensor);
}

const char *k3_gguf_path(const K3Gguf *gguf, const K3GgufTensor *tensor) { return gguf->shards[tensor->shard].path; }

void k3_gguf_close(K3Gguf *gguf)
{
  if (!gguf) return;
  for (int64_t s = 0; s < gguf->shard_count; s++) {
    k3_mapped_close(gguf->shards[s].map, gguf->shards[s].size);
    free(gguf->shards[s].values);
    free(gguf->shards[s].path);
  }
  free(gguf->shards);
  free(gguf->entries);
  free(gguf->path);
  free(gguf);
}
