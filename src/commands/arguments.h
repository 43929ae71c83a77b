/* Options, numbers and lists on the command line. Layer: commands. */
#ifndef K3_COMMANDS_ARGUMENTS_H
#define K3_COMMANDS_ARGUMENTS_H

#include <getopt.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

/* After getopt_long, with short options that begin with ':', gave `letter` '?' or ':': K3_ERR_USAGE naming the word. */
K3Status k3_refuse_option(const char *command, int letter, char **argv);

/* The words of a command that takes one MODEL: options go to `parse` one by one. *help: --help ended it, *model is not set.
 * Errors: K3_ERR_USAGE (of parse, an unknown option, no MODEL or several). */
K3Status k3_parse_model_command(const char *command, int argc, char **argv, const struct option *names,
                                K3Status (*parse)(int letter, const char *value, void *options), void *options,
                                const char **model, int *help);

/* A whole decimal number in [low, high]. Errors: K3_ERR_USAGE naming the option, what it got and the range; an option
 * that ends in a colon ("--logits top:") is followed by the number without a space. */
K3Status k3_parse_count(const char *text, const char *option, int64_t low, int64_t high, int64_t *value);

/* The next comma-separated word of *list; *found 0 at its end. Errors: K3_ERR_USAGE for one that is too long. */
K3Status k3_next_word(const char **list, const char *option, char *word, size_t size, int *found);

/* --contexts: at most `room` positions, ascending, each once. Errors: K3_ERR_USAGE. */
K3Status k3_parse_contexts(const char *list, int64_t room, int64_t *context, int64_t *contexts);

#endif
