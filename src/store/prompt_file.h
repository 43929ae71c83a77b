/* Prompts: token ids from a text or a file. Layer: store. */
#ifndef K3_STORE_PROMPT_FILE_H
#define K3_STORE_PROMPT_FILE_H

#include <stdint.h>

#include "base/status.h"

/* Parses decimal ids separated by commas or white space ("1,2,3", "1 2\n3"). `origin` begins messages.
 * *ids is allocated; the caller frees it. Errors: K3_ERR_INPUT: empty, not a whole number, out of int64. */
K3Status k3_prompt_parse(const char *text, const char *origin, int64_t **ids, int64_t *count);

/* Reads a text file, or an HDF5 file with integers in /prompt/token_ids (as run files have) or /token_ids. */
K3Status k3_prompt_read(const char *path, int64_t **ids, int64_t *count);

#endif
