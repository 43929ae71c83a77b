/* Text to token ids and back, with the tokenizer that a checkpoint ships (src/helpers/text.py). Layer: commands.
 * Ids remain the exact channel: these serve people. `tokenizer` is the directory with tiktoken.model.
 * Errors: K3_ERR_INPUT (no tokenizer there, an id that it lacks, a missing library). */
#ifndef K3_COMMANDS_TEXT_H
#define K3_COMMANDS_TEXT_H

#include <stdint.h>

#include "base/status.h"

/* `text` (UTF-8) as "1,2,3", allocated; "" when it has no token. */
K3Status k3_text_encode(const char *tokenizer, const char *text, char **ids);

/* ids [count] as UTF-8, allocated. */
K3Status k3_text_decode(const char *tokenizer, const int64_t *ids, int64_t count, char **text);

#endif
