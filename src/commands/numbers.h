/* Numbers on the command line. Layer: commands. */
#ifndef K3_COMMANDS_NUMBERS_H
#define K3_COMMANDS_NUMBERS_H

#include <stdint.h>

#include "base/status.h"

/* A whole decimal number in [low, high]. Errors: K3_ERR_USAGE naming the option, what it got and the range; an option
 * that ends in a colon ("--logits top:") is followed by the number without a space. */
K3Status k3_parse_count(const char *text, const char *option, int64_t low, int64_t high, int64_t *value);

#endif
