/* JSON under limits. See json_file.h. Layer: import. */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include "import/json_file.h"

#ifdef HAVE_JSON_C

#include <errno.h>
#include <fcntl.h>
#include <json.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* json-c spends about 72 bytes on a value, so the values are counted before it sees the text. A tensor's
 * entry holds one comma in eight bytes or fewer; text that is denser than one in three is refused once it
 * is long enough to matter. */
static K3Status check_density(const char *text, size_t length, const char *origin)
{
  int64_t commas = 0;
  int in_string = 0;
  for (size_t i = 0; i < length; i++) {
    char c = text[i];
    if (in_string) {
      if (c == '\\') i++;
      else if (c == '"') in_string = 0;
    } else if (c == '"') {
      in_string = 1;
    } else {
      commas += c == ',' || c == '[' || c == '{';
    }
  }
  if (commas > K3_JSON_MAX_VALUES || (commas > 65536 && (size_t)commas > length / 3))
    K3_FAIL(K3_ERR_INPUT, "%s: its JSON holds %lld values in %zu bytes, more than any checkpoint needs: refused",
            origin, (long long)commas, length);
  return K3_OK;
}

K3Status k3_json_parse(const char *text, size_t length, const char *origin, struct json_object **object)
{
  K3Status status = K3_OK;
  struct json_object *root = NULL;
  struct json_tokener *tokener = NULL;
  *object = NULL;
  if (length == 0) K3_FAIL(K3_ERR_INPUT, "%s: no JSON, its text is empty", origin);
  if (length > INT32_MAX - 1) K3_FAIL(K3_ERR_INPUT, "%s: %zu bytes of JSON, at most 2 GB are read", origin, length);
  K3_TRY(check_density(text, length, origin));
  tokener = json_tokener_new_ex(K3_JSON_MAX_DEPTH);
  if (!tokener) K3_FAIL_DONE(K3_ERR_INPUT, "%s: no memory to parse JSON", origin);
  /* trailing characters are judged below: headers are padded with spaces */
  json_tokener_set_flags(tokener, JSON_TOKENER_STRICT | JSON_TOKENER_VALIDATE_UTF8 | JSON_TOKENER_ALLOW_TRAILING_CHARS);
  root = json_tokener_parse_ex(tokener, text, (int)length);
  enum json_tokener_error error = json_tokener_get_error(tokener);
  size_t end = json_tokener_get_parse_end(tokener);
  if (error == json_tokener_continue)
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: no valid JSON: it ends after %zu bytes in the middle of a value", origin, length);
  if (error != json_tokener_success)
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: no valid JSON: %s at byte %zu", origin, json_tokener_error_desc(error), end);
  for (; end < length; end++)
    if (!strchr(" \t\r\n", text[end]) || text[end] == '\0')
      K3_FAIL_DONE(K3_ERR_INPUT, "%s: no valid JSON: more text after its end, at byte %zu", origin, end);
  if (!json_object_is_type(root, json_type_object))
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: its JSON is a %s, wanted an object", origin,
                 json_type_to_name(json_object_get_type(root)));
  *object = root;
  root = NULL;
done:
  json_object_put(root);
  if (tokener) json_tokener_free(tokener);
  return status;
}

K3Status k3_json_load(const char *path, int64_t most, struct json_object **object)
{
  K3Status status = K3_OK;
  char *text = NULL;
  struct stat info;
  *object = NULL;
  int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) K3_FAIL(K3_ERR_INPUT, "%s: cannot open: %s", path, strerror(errno));
  if (fstat(fd, &info) != 0) K3_FAIL_DONE(K3_ERR_INPUT, "%s: cannot stat: %s", path, strerror(errno));
  if (!S_ISREG(info.st_mode)) K3_FAIL_DONE(K3_ERR_INPUT, "%s: no plain file", path);
  if (info.st_size > most)
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: %lld bytes, at most %lld are read", path, (long long)info.st_size, (long long)most);
  size_t length = (size_t)info.st_size, have = 0;
  text = malloc(length + 1);
  if (!text) K3_FAIL_DONE(K3_ERR_INPUT, "%s: no memory for its %zu bytes", path, length);
  while (have < length) {
    ssize_t got = read(fd, text + have, length - have);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0)
      K3_FAIL_DONE(K3_ERR_INPUT, "%s: read %zu of %zu bytes: %s", path, have, length,
                   got < 0 ? strerror(errno) : "the file shrank");
    have += (size_t)got;
  }
  text[length] = '\0';
  K3_TRY_DONE(k3_json_parse(text, length, path, object));
done:
  free(text);
  close(fd);
  return status;
}

#endif /* HAVE_JSON_C */
