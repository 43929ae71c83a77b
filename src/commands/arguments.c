/* See arguments.h. Layer: commands. */
#include "commands/arguments.h"

#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

K3Status k3_refuse_option(const char *command, int letter, char **argv)
{
  const char *word = argv[optind - 1], *next = argv[optind];
  if (letter == ':') K3_FAIL(K3_ERR_USAGE, "%s: %s wants a value; see k3decode %s --help", command, word, command);
  /* getopt goes past a cluster like -xz with its last letter */
  if (optopt && next && next[0] == '-' && next[1] != '-' && strchr(next + 1, optopt)) word = next;
  else if (optopt && strncmp(word, "--", 2) == 0)
    K3_FAIL(K3_ERR_USAGE, "%s: %s takes no value; see k3decode %s --help", command, word, command);
  K3_FAIL(K3_ERR_USAGE, "%s: unknown option %s; see k3decode %s --help", command, word, command);
}

K3Status k3_parse_model_command(const char *command, int argc, char **argv, const struct option *names,
                                K3Status (*parse)(int letter, const char *value, void *options), void *options,
                                const char **model, int *help)
{
  int letter;
  optind = 0; /* getopt begins afresh */
  while ((letter = getopt_long(argc, argv, ":h", names, NULL)) != -1) {
    if (letter == 'h') {
      *help = 1;
      return K3_OK;
    }
    if (letter == '?' || letter == ':') return k3_refuse_option(command, letter, argv);
    K3_TRY(parse(letter, optarg, options));
  }
  if (optind >= argc)
    K3_FAIL(K3_ERR_USAGE, "a model is missing: k3decode %s MODEL …; see k3decode %s --help", command, command);
  if (optind < argc - 1) K3_FAIL(K3_ERR_USAGE, "more than one model given; see k3decode %s --help", command);
  *model = argv[optind];
  return K3_OK;
}

K3Status k3_parse_count(const char *text, const char *option, int64_t low, int64_t high, int64_t *value)
{
  char *end;
  errno = 0;
  long long got = strtoll(text, &end, 10);
  int digit = isdigit((unsigned char)text[0]) || (text[0] == '-' && isdigit((unsigned char)text[1]));
  if (!digit || *end != '\0' || errno == ERANGE || got < low || got > high)
    K3_FAIL(K3_ERR_USAGE, "%s%s%s: wanted a whole number from %lld to %lld", option,
            option[strlen(option) - 1] == ':' ? "" : " ", text, (long long)low, (long long)high);
  *value = got;
  return K3_OK;
}

K3Status k3_next_word(const char **list, const char *option, char *word, size_t size, int *found)
{
  size_t length = strcspn(*list, ",");
  *found = **list != '\0';
  if (!*found) return K3_OK;
  if (length >= size) K3_FAIL(K3_ERR_USAGE, "%s %.40s…: no such value", option, *list);
  memcpy(word, *list, length);
  word[length] = '\0';
  *list += length;
  if (**list == ',' && *++*list == '\0') K3_FAIL(K3_ERR_USAGE, "%s ends in a comma", option);
  return K3_OK;
}

K3Status k3_parse_contexts(const char *list, int64_t room, int64_t *context, int64_t *contexts)
{
  char word[32];
  int found = 1;
  *contexts = 0;
  for (;;) {
    K3_TRY(k3_next_word(&list, "--contexts", word, sizeof word, &found));
    if (!found) break;
    if (*contexts == room) K3_FAIL(K3_ERR_USAGE, "--contexts: more than %lld", (long long)room);
    int64_t *value = &context[*contexts];
    K3_TRY(k3_parse_count(word, "--contexts", 1, INT32_MAX, value));
    if (*contexts > 0 && *value <= value[-1])
      K3_FAIL(K3_ERR_USAGE, "--contexts: %lld after %lld; wanted ascending positions, each once", (long long)*value,
              (long long)value[-1]);
    ++*contexts;
  }
  if (*contexts == 0) K3_FAIL(K3_ERR_USAGE, "--contexts is empty: wanted positions like 128,512,4096");
  return K3_OK;
}
