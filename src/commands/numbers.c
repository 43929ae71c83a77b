/* See numbers.h. Layer: commands. */
#include "commands/numbers.h"

#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

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
