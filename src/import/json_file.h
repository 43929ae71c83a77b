/* JSON text by json-c under hard limits. Layer: import (between store and commands).
 * Checkpoints come from the network: their JSON is parsed strictly, to a small depth, and only when the
 * number of its values is in proportion to its bytes, so that a few bytes cannot ask for much memory. */
#ifndef K3_IMPORT_JSON_FILE_H
#define K3_IMPORT_JSON_FILE_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

struct json_object;

enum { K3_JSON_MAX_DEPTH = 32, K3_JSON_MAX_VALUES = 16000000 };

/* Parses `length` bytes, which must be one JSON object. `origin` begins messages.
 * *object is released with json_object_put. Errors: K3_ERR_INPUT. */
K3Status k3_json_parse(const char *text, size_t length, const char *origin, struct json_object **object);

/* Reads and parses a whole file of at most `most` bytes. Errors: K3_ERR_INPUT (absent, too long, no JSON). */
K3Status k3_json_load(const char *path, int64_t most, struct json_object **object);

#endif
