/* See prompt_file.h. Layer: store. */
#include "store/prompt_file.h"

#include <ctype.h>
#include <errno.h>
#include <hdf5.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "store/hdf5_error.h"

static K3Status refuse_word(const char *origin, int64_t position, const char *word, size_t length)
{
  K3_FAIL(K3_ERR_INPUT, "%s: position %lld: '%.*s' is no token id; wanted whole decimal numbers separated by commas",
          origin, (long long)position, (int)(length > 40 ? 40 : length), word);
}

static int is_space(char c) { return isspace((unsigned char)c); }

/* Reads one id at *at and moves past it, and past the separator (at most one comma). */
static K3Status read_id(const char **at, const char *origin, int64_t position, int64_t *id)
{
  const char *begin = *at, *end = begin;
  while (*end && *end != ',' && !is_space(*end)) end++;
  size_t length = (size_t)(end - begin);
  if (length == 0) K3_FAIL(K3_ERR_INPUT, "%s: position %lld: a token id is missing before ','", origin, (long long)position);
  size_t digits = begin[0] == '-' ? 1 : 0; /* negative numbers are numbers: refused by range, with the id */
  for (size_t i = digits; i < length; i++)
    if (!isdigit((unsigned char)begin[i])) return refuse_word(origin, position, begin, length);
  if (length == digits) return refuse_word(origin, position, begin, length);
  errno = 0;
  *id = strtoll(begin, NULL, 10);
  if (errno == ERANGE) return refuse_word(origin, position, begin, length);
  while (is_space(*end)) end++;
  if (*end == ',') {
    end++;
    while (is_space(*end)) end++;
    if (*end == '\0')
      K3_FAIL(K3_ERR_INPUT, "%s: position %lld: a token id is missing after ','", origin, (long long)position + 1);
  }
  *at = end;
  return K3_OK;
}

K3Status k3_prompt_parse(const char *text, const char *origin, int64_t **ids, int64_t *count)
{
  int64_t capacity = (int64_t)strlen(text) / 2 + 1, n = 0;
  int64_t *found = malloc((size_t)capacity * sizeof *found);
  if (!found) K3_FAIL(K3_ERR_INPUT, "%s: no memory for %lld token ids", origin, (long long)capacity);
  const char *at = text;
  while (is_space(*at)) at++;
  K3Status status = K3_OK;
  while (*at && status == K3_OK) {
    status = read_id(&at, origin, n, &found[n]);
    n++;
  }
  if (status == K3_OK && n == 0)
    status = k3_status_fail(K3_ERR_INPUT, __FILE__, __LINE__, "%s: the prompt is empty: give at least one token id", origin);
  if (status != K3_OK) {
    free(found);
    return status;
  }
  *ids = found;
  *count = n;
  return K3_OK;
}

/* More than any prompt needs; a device or an endless pipe stops here. */
enum { MOST_TEXT_BYTES = 1 << 28, PIECE_BYTES = 1 << 16, MAGIC_BYTES = 8 };

/* Reads the rest of `file` after the bytes already taken: a pipe cannot be opened twice. */
static K3Status read_text(FILE *file, const char *path, const char *begin, size_t begin_bytes, int64_t **ids,
                          int64_t *count)
{
  K3Status status = K3_OK;
  size_t length = begin_bytes, got;
  char *text = malloc(begin_bytes + 1);
  if (!text) K3_FAIL(K3_ERR_INPUT, "%s: no memory for the prompt", path);
  memcpy(text, begin, begin_bytes);
  do {
    if (memchr(text, '\0', length)) K3_FAIL_DONE(K3_ERR_INPUT, "%s: the prompt file holds a NUL byte: it is no text", path);
    if (length > MOST_TEXT_BYTES) K3_FAIL_DONE(K3_ERR_INPUT, "%s: over %d bytes: this is no prompt", path, MOST_TEXT_BYTES);
    char *larger = realloc(text, length + PIECE_BYTES + 1);
    if (!larger) K3_FAIL_DONE(K3_ERR_INPUT, "%s: no memory for the prompt", path);
    text = larger;
    got = fread(text + length, 1, PIECE_BYTES, file);
    length += got;
  } while (got > 0);
  if (ferror(file)) K3_FAIL_DONE(K3_ERR_INPUT, "%s: cannot read the prompt file: %s", path, strerror(errno));
  text[length] = '\0';
  status = k3_prompt_parse(text, path, ids, count);
done:
  free(text);
  return status;
}

static K3Status read_hdf5(const char *path, int64_t **ids, int64_t *count)
{
  K3Status status = K3_OK;
  hid_t file = H5Fopen(path, H5F_ACC_RDONLY, H5P_DEFAULT), data = -1, space = -1, type = -1;
  int64_t *found = NULL;
  hssize_t points = 0;
  if (file < 0) file = H5Fopen(path, H5F_ACC_RDONLY | H5F_ACC_SWMR_READ, H5P_DEFAULT);
  if (file < 0) K3_FAIL_DONE(K3_ERR_INPUT, "%s: cannot open the prompt file as HDF5", path);
  if (H5Lexists(file, "/prompt", H5P_DEFAULT) > 0 && H5Lexists(file, "/prompt/token_ids", H5P_DEFAULT) > 0)
    data = H5Dopen2(file, "/prompt/token_ids", H5P_DEFAULT);
  else if (H5Lexists(file, "/token_ids", H5P_DEFAULT) > 0)
    data = H5Dopen2(file, "/token_ids", H5P_DEFAULT);
  if (data < 0) K3_FAIL_DONE(K3_ERR_INPUT, "%s: no dataset /prompt/token_ids or /token_ids", path);
  space = H5Dget_space(data);
  type = H5Dget_type(data);
  if (space < 0 || type < 0) K3_FAIL_DONE(K3_ERR_INPUT, "%s: cannot read the type of token_ids", path);
  if (H5Tget_class(type) != H5T_INTEGER) K3_FAIL_DONE(K3_ERR_INPUT, "%s: token_ids holds no integers", path);
  points = H5Sget_simple_extent_npoints(space);
  if (points < 1) K3_FAIL_DONE(K3_ERR_INPUT, "%s: the prompt is empty: give at least one token id", path);
  found = malloc((size_t)points * sizeof *found);
  if (!found) K3_FAIL_DONE(K3_ERR_INPUT, "%s: no memory for %lld token ids", path, (long long)points);
  if (H5Dread(data, H5T_NATIVE_INT64, H5S_ALL, H5S_ALL, H5P_DEFAULT, found) < 0)
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: cannot read token_ids", path);
  *ids = found;
  *count = (int64_t)points;
  found = NULL;
done:
  free(found);
  if (type >= 0) H5Tclose(type);
  if (space >= 0) H5Sclose(space);
  if (data >= 0) H5Dclose(data);
  if (file >= 0) H5Fclose(file);
  return status;
}

K3Status k3_prompt_read(const char *path, int64_t **ids, int64_t *count)
{
  static const char hdf5_magic[MAGIC_BYTES] = "\x89HDF\r\n\x1a\n";
  char magic[MAGIC_BYTES] = {0};
  FILE *file = fopen(path, "rb");
  if (!file) K3_FAIL(K3_ERR_INPUT, "%s: cannot open the prompt file: %s", path, strerror(errno));
  size_t got = fread(magic, 1, sizeof magic, file);
  K3Status status = got == sizeof magic && memcmp(magic, hdf5_magic, sizeof magic) == 0
                      ? read_hdf5(path, ids, count)
                      : read_text(file, path, magic, got, ids, count);
  fclose(file);
  return status;
}
