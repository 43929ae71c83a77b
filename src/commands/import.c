/* `k3decode import`: a published checkpoint into a model file. Layer: commands. */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <getopt.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "commands/commands.h"
#include "commands/progress.h"
#include "commands/session.h"
#include "commands/stop_signals.h"
#include "import/hf_import.h"

static const char usage[] =
    "usage: k3decode import CHECKPOINT --output MODEL.h5 [options]\n"
    "\n"
    "Reads a published Kimi K3 checkpoint, a directory with config.json, model.safetensors.index.json and its\n"
    "shards (or one model.safetensors), and writes one HDF5 model file for `k3decode run`. One process only.\n"
    "\n"
    "  -o, --output FILE      the model file to write (as FILE.partial until it is whole)\n"
    "      --trunk TYPE       matrices outside the experts: bf16 (default: BF16 and F32 as published, F16 widened\n"
    "                         to f32), q8_0 (where a row is a whole number of blocks of 32), f32 (widened)\n"
    "      --experts TYPE     keep (default: packed ones become mxfp4 bit for bit, others as published), q8_0\n"
    "      --overwrite        replace FILE when it exists\n"
    "  -h, --help             this text\n"
    "\n"
    "Norms, convolutions, A_log, biases and residual scores are always stored as f32. Vision tensors are skipped.\n"
    "An interrupted import leaves no output and is simply run again.\n";

typedef struct {
  const char *checkpoint, *output;
  K3HfTrunk trunk;
  K3HfExperts experts;
  int overwrite, help;
} Arguments;

static K3Status parse(int argc, char **argv, Arguments *arguments)
{
  enum { TRUNK = 256, EXPERTS, OVERWRITE };
  static const struct option options[] = {{"output", required_argument, NULL, 'o'},
                                          {"trunk", required_argument, NULL, TRUNK},
                                          {"experts", required_argument, NULL, EXPERTS},
                                          {"overwrite", no_argument, NULL, OVERWRITE},
                                          {"help", no_argument, NULL, 'h'},
                                          {NULL, 0, NULL, 0}};
  int option;
  optind = 0; /* GNU: start afresh */
  opterr = 0;
  while ((option = getopt_long(argc, argv, ":o:h", options, NULL)) != -1) {
    switch (option) {
    case 'o': arguments->output = optarg; break;
    case TRUNK:
      if (strcmp(optarg, "bf16") == 0) arguments->trunk = K3_TRUNK_KEEP;
      else if (strcmp(optarg, "q8_0") == 0) arguments->trunk = K3_TRUNK_Q8_0;
      else if (strcmp(optarg, "f32") == 0) arguments->trunk = K3_TRUNK_F32;
      else K3_FAIL(K3_ERR_USAGE, "import: --trunk %s: wanted bf16, q8_0 or f32", optarg);
      break;
    case EXPERTS:
      if (strcmp(optarg, "keep") == 0) arguments->experts = K3_EXPERTS_KEEP;
      else if (strcmp(optarg, "q8_0") == 0) arguments->experts = K3_EXPERTS_Q8_0;
      else K3_FAIL(K3_ERR_USAGE, "import: --experts %s: wanted keep or q8_0", optarg);
      break;
    case OVERWRITE: arguments->overwrite = 1; break;
    case 'h': arguments->help = 1; return K3_OK;
    case ':': K3_FAIL(K3_ERR_USAGE, "import: option %s wants a value (see k3decode import --help)", argv[optind - 1]);
    default: K3_FAIL(K3_ERR_USAGE, "import: unknown option %s (see k3decode import --help)", argv[optind - 1]);
    }
  }
  if (argc - optind != 1)
    K3_FAIL(K3_ERR_USAGE, "import: wants one CHECKPOINT, got %d (see k3decode import --help)", argc - optind);
  arguments->checkpoint = argv[optind];
  if (arguments->checkpoint[0] == '\0') K3_FAIL(K3_ERR_USAGE, "import: CHECKPOINT is empty");
  if (!arguments->output || arguments->output[0] == '\0')
    K3_FAIL(K3_ERR_USAGE, "import: wants --output MODEL.h5 (see k3decode import --help)");
  return K3_OK;
}

#ifdef HAVE_JSON_C

/* The first call knows the size of the whole. */
static void show_progress(void *context, int64_t done, int64_t all)
{
  K3ProgressBar *bar = context;
  if (bar->all == 0) k3_progress_start(bar, "importing", K3_PROGRESS_BYTES, all, 1);
  k3_progress_update(bar, done);
}

static void report(const Arguments *arguments, const K3HfImportResult *result)
{
  printf("%s: %lld tensors from %lld published ones, %.3f GB read, %.3f GB written", arguments->output,
         (long long)result->tensors, (long long)result->published, (double)result->bytes_read * 1e-9,
         (double)result->bytes_written * 1e-9);
  for (int type = 0; type < K3_TYPE_COUNT; type++)
    if (result->by_type[type]) printf(", %lld %s", (long long)result->by_type[type], k3_format((K3Type)type)->name);
  printf("; %lld vision tensors skipped\n", (long long)result->vision);
}

static K3Status import_checkpoint(const Arguments *arguments, int argc, char **argv)
{
  char *provenance = k3_session_join(argc, argv);
  struct sigaction before[K3_STOP_SIGNALS];
  K3ProgressBar bar = {0};
  K3HfImportResult result;
  if (!provenance) K3_FAIL(K3_ERR_INPUT, "import: no memory");
  K3HfImportOptions options = {.trunk = arguments->trunk,
                               .experts = arguments->experts,
                               .overwrite = arguments->overwrite,
                               .provenance = provenance,
                               .stopped = &k3_stop_signal,
                               .progress = show_progress,
                               .progress_context = &bar};
  k3_stop_catch(before);
  K3Status status = k3_hf_import(arguments->checkpoint, arguments->output, &options, &result);
  k3_progress_finish(&bar);
  k3_stop_release(before);
  free(provenance);
  if (status == K3_OK) report(arguments, &result);
  return status;
}

#else

static K3Status import_checkpoint(const Arguments *arguments, int argc, char **argv)
{
  (void)arguments, (void)argc, (void)argv;
  K3_FAIL(K3_ERR_INPUT, "import: this build cannot read JSON, so no checkpoints: install libjson-c-dev, then run "
                        "configure and make again");
}

#endif

static int ends_with(const char *text, const char *end)
{
  size_t length = strlen(text), tail = strlen(end);
  return length >= tail && strcmp(text + length - tail, end) == 0;
}

K3Status k3_command_import(int argc, char **argv, K3Comm *comm)
{
  Arguments arguments = {0};
  K3_TRY(parse(argc, argv, &arguments));
  if (arguments.help) {
    if (!comm || comm->rank == 0) fputs(usage, stdout);
    return K3_OK;
  }
  if (comm && comm->world > 1)
    K3_FAIL(K3_ERR_USAGE, "import: runs as one process, got %d: start it without mpirun", comm->world);
  if (ends_with(arguments.checkpoint, ".gguf"))
    K3_FAIL(K3_ERR_INPUT, "%s: GGUF files are not imported yet; give the directory of the safetensors release",
            arguments.checkpoint);
  return import_checkpoint(&arguments, argc, argv);
}
