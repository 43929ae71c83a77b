/* `k3decode text`, and text for the other commands. See text.h. Layer: commands. */
#include "commands/text.h"

#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "commands/arguments.h"
#include "commands/commands.h"
#include "commands/helper.h"

static const char usage[] =
    "usage: k3decode text encode --tokenizer DIR TEXT\n"
    "       k3decode text decode --tokenizer DIR IDS\n"
    "\n"
    "Text to token ids (1,2,3) and back. DIR is a checkpoint's directory with tiktoken.model. A '-' in place of TEXT "
    "or IDS\n"
    "reads standard input. Special tokens that TEXT spells out become their ids; nothing is put before or after it.\n"
    "Encoded by Python's tiktoken (pip install tiktoken).\n"
    "\n"
    "  --tokenizer DIR\n"
    "  --help\n";

static K3Status convert(const char *direction, const char *tokenizer, const char *input, char **output)
{
  const char *words[] = {direction, "--tokenizer", tokenizer, NULL};
  return k3_helper_run("text.py", words, input, output);
}

K3Status k3_text_encode(const char *tokenizer, const char *text, char **ids)
{
  K3_TRY(convert("encode", tokenizer, text, ids));
  (*ids)[strcspn(*ids, "\n")] = '\0';
  return K3_OK;
}

K3Status k3_text_decode(const char *tokenizer, const int64_t *ids, int64_t count, char **text)
{
  enum { DIGITS = 24 };
  char *list = malloc((size_t)count * DIGITS + 1);
  if (!list) K3_FAIL(K3_ERR_INPUT, "no memory for %lld token ids", (long long)count);
  size_t used = 0;
  list[0] = '\0';
  for (int64_t i = 0; i < count; i++)
    used += (size_t)snprintf(list + used, DIGITS, "%s%lld", i ? "," : "", (long long)ids[i]);
  K3Status status = convert("decode", tokenizer, list, text);
  free(list);
  return status;
}

/* All of standard input, allocated. */
static K3Status read_input(char **text)
{
  size_t size = 0, room = 1 << 16;
  char *all = malloc(room);
  while (all) {
    size += fread(all + size, 1, room - size - 1, stdin);
    if (size < room - 1) break;
    char *larger = realloc(all, room *= 2);
    if (!larger) free(all);
    all = larger;
  }
  if (!all) K3_FAIL(K3_ERR_INPUT, "text: no memory for the standard input");
  all[size] = '\0';
  if (ferror(stdin) || strlen(all) != size) {
    free(all);
    K3_FAIL(K3_ERR_INPUT, "text: the standard input cannot be read as text");
  }
  *text = all;
  return K3_OK;
}

K3Status k3_command_text(int argc, char **argv, K3Comm *comm)
{
  static const struct option names[] = {
      {"tokenizer", required_argument, NULL, 't'}, {"help", no_argument, NULL, 'h'}, {NULL, 0, NULL, 0}};
  const char *tokenizer = NULL;
  int letter;
  optind = 0;
  while ((letter = getopt_long(argc, argv, ":h", names, NULL)) != -1) {
    switch (letter) {
    case 't': tokenizer = optarg; break;
    case 'h': fputs(usage, stdout); return K3_OK;
    default: return k3_refuse_option("text", letter, argv);
    }
  }
  const char *direction = optind < argc ? argv[optind] : "";
  int encode = strcmp(direction, "encode") == 0;
  if (!encode && strcmp(direction, "decode") != 0)
    K3_FAIL(K3_ERR_USAGE, "text: wanted encode or decode (see k3decode text --help)");
  if (argc - optind != 2)
    K3_FAIL(K3_ERR_USAGE, "text %s wants one %s, or - for standard input; got %d", direction,
            encode ? "TEXT" : "list of IDS", argc - optind - 1);
  if (!tokenizer) K3_FAIL(K3_ERR_USAGE, "text: --tokenizer DIR is missing");
  if (comm && comm->world > 1)
    K3_FAIL(K3_ERR_USAGE, "text runs as one process, started without mpirun; got %d ranks", comm->world);
  char *input = NULL, *output = NULL;
  int piped = strcmp(argv[optind + 1], "-") == 0;
  if (piped) K3_TRY(read_input(&input));
  K3Status status = convert(direction, tokenizer, piped ? input : argv[optind + 1], &output);
  if (status == K3_OK) printf("%s%s", output, encode ? "" : "\n");
  free(input);
  free(output);
  return status;
}
