/* `k3decode import`: a published checkpoint into a model file. Layer: commands. */
#include <getopt.h>
#include <inttypes.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "commands/arguments.h"
#include "commands/commands.h"
#include "commands/progress.h"
#include "commands/session.h"
#include "commands/stop_signals.h"
#include "config.h"
#include "import/gguf_import.h"
#include "import/hf_import.h"

static const char usage[] =
    "usage: k3decode import CHECKPOINT --output MODEL.h5 [options]\n"
    "\n"
    "Reads a published Kimi K3 checkpoint and writes one HDF5 model file for `k3decode run`. One process only.\n"
    "CHECKPOINT is a directory with config.json, model.safetensors.index.json and its shards (or one\n"
    "model.safetensors); or a GGUF file of architecture kimi-k3, the first shard of a split one\n"
    "(NAME-00001-of-000NN.gguf), or a directory that holds one such model.\n"
    "\n"
    "  -o, --output FILE      the model file to write (as FILE.partial until it is whole)\n"
    "      --trunk TYPE       of safetensors, matrices outside the experts: bf16 (default: BF16 and F32 as published,\n"
    "                         F16 widened to f32), q8_0 (where a row is a whole number of blocks of 32), f32 "
    "(widened)\n"
    "      --experts TYPE     of safetensors: keep (default: packed ones become mxfp4 bit for bit, others as\n"
    "                         published), q8_0\n"
    "      --overwrite        replace FILE when it is a model file; nothing else is replaced\n"
    "  -h, --help             this text\n"
    "\n"
    "GGUF matrices keep their type and their blocks bit for bit. Norms, convolutions, A_log, biases and residual "
    "scores\n"
    "are always stored as f32. Vision tensors are skipped. An import that is stopped by a signal leaves FILE.partial\n"
    "and its journal; the same command then goes on with the tensors that are whole. OMP_NUM_THREADS limits the\n"
    "threads. The last line tells the content digest, which `k3decode info FILE --check` compares with the file.\n";

typedef struct {
  const char *checkpoint, *output;
  K3HfTrunk trunk;
  K3HfExperts experts;
  const char *conversion; /* the option that asks for another type, NULL: none */
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
  while ((option = getopt_long(argc, argv, ":o:h", options, NULL)) != -1) {
    switch (option) {
    case 'o': arguments->output = optarg; break;
    case TRUNK:
      if (strcmp(optarg, "bf16") == 0) arguments->trunk = K3_TRUNK_KEEP;
      else if (strcmp(optarg, "q8_0") == 0) arguments->trunk = K3_TRUNK_Q8_0;
      else if (strcmp(optarg, "f32") == 0) arguments->trunk = K3_TRUNK_F32;
      else K3_FAIL(K3_ERR_USAGE, "import: --trunk %s: wanted bf16, q8_0 or f32", optarg);
      if (arguments->trunk != K3_TRUNK_KEEP) arguments->conversion = "--trunk";
      break;
    case EXPERTS:
      if (strcmp(optarg, "keep") == 0) arguments->experts = K3_EXPERTS_KEEP;
      else if (strcmp(optarg, "q8_0") == 0) arguments->experts = K3_EXPERTS_Q8_0;
      else K3_FAIL(K3_ERR_USAGE, "import: --experts %s: wanted keep or q8_0", optarg);
      if (arguments->experts != K3_EXPERTS_KEEP) arguments->conversion = "--experts";
      break;
    case OVERWRITE: arguments->overwrite = 1; break;
    case 'h': arguments->help = 1; return K3_OK;
    default: return k3_refuse_option("import", option, argv);
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

/* The first call knows the size of the whole. */
static void show_progress(void *context, int64_t done, int64_t all)
{
  K3ProgressBar *bar = context;
  if (bar->all == 0) k3_progress_start(bar, "importing", K3_PROGRESS_BYTES, all, 1);
  k3_progress_update(bar, done);
}

static void report(const Arguments *arguments, const K3ImportResult *result)
{
  printf("%s: %lld tensors from %lld published ones, %.3f GB read, %.3f GB written", arguments->output,
         (long long)result->tensors, (long long)result->published, (double)result->bytes_read * 1e-9,
         (double)result->bytes_written * 1e-9);
  for (int type = 0; type < K3_TYPE_COUNT; type++)
    if (result->by_type[type]) printf(", %lld %s", (long long)result->by_type[type], k3_format((K3Type)type)->name);
  if (result->vision) printf("; %lld vision tensors skipped", (long long)result->vision);
  if (result->resumed) printf("; %lld tensors were whole already", (long long)result->resumed);
  if (result->replaced) printf("; %s.partial of another run was replaced", arguments->output);
  printf("\n%.1f s, %.3f GB/s; content digest %016" PRIx64 "\n", result->seconds,
         result->seconds > 0 ? (double)result->bytes_read * 1e-9 / result->seconds : 0.0, result->digest);
}

/* Any of the files that such a directory begins with; what is missing beside it is named by the importer. */
static int looks_like_safetensors(const char *directory)
{
  static const char *const names[] = {"config.json", "model.safetensors.index.json", "model.safetensors"};
  char path[PATH_MAX];
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
    snprintf(path, sizeof path, "%s/%s", directory, names[i]);
    if (access(path, F_OK) == 0) return 1;
  }
  return 0;
}

static K3Status import_by_kind(const Arguments *arguments, const K3ImportOptions *options, K3ImportResult *result)
{
  int is_gguf = 0;
  K3_TRY(k3_gguf_is_one(arguments->checkpoint, &is_gguf));
  if (is_gguf) {
    if (arguments->conversion)
      K3_FAIL(K3_ERR_USAGE, "import: %s is for safetensors: the tensors of a GGUF file keep their types",
              arguments->conversion);
    return k3_gguf_import(arguments->checkpoint, arguments->output, options, result);
  }
  if (access(arguments->checkpoint, F_OK) == 0 && !looks_like_safetensors(arguments->checkpoint))
    K3_FAIL(K3_ERR_INPUT,
            "%s is no checkpoint: neither a directory with config.json (safetensors), nor a file or directory of files "
            "whose names end in .gguf",
            arguments->checkpoint);
#ifdef HAVE_JSON_C
  return k3_hf_import(arguments->checkpoint, arguments->output, arguments->trunk, arguments->experts, options, result);
#else
  K3_FAIL(K3_ERR_INPUT,
          "import: this build cannot read JSON, so no safetensors checkpoints (GGUF files it can): install "
          "libjson-c-dev, then run configure and make again");
#endif
}

static K3Status import_checkpoint(const Arguments *arguments, int argc, char **argv)
{
  char *provenance = k3_session_join(argc, argv);
  struct sigaction before[K3_STOP_SIGNALS];
  K3ProgressBar bar = {0};
  K3ImportResult result;
  if (!provenance) K3_FAIL(K3_ERR_INPUT, "import: no memory");
  K3ImportOptions options = {.overwrite = arguments->overwrite,
                             .provenance = provenance,
                             .stopped = &k3_stop_signal,
                             .progress = show_progress,
                             .progress_context = &bar};
  k3_stop_catch(before);
  K3Status status = import_by_kind(arguments, &options, &result);
  k3_progress_finish(&bar);
  k3_stop_release(before);
  free(provenance);
  if (status == K3_OK) report(arguments, &result);
  return status;
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
  return import_checkpoint(&arguments, argc, argv);
}
