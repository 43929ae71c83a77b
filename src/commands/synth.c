/* `k3decode synth RECIPE --output MODEL.h5`: writes a synthetic model file. Layer: commands. */
#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "commands/arguments.h"
#include "commands/commands.h"
#include "commands/progress.h"
#include "commands/stop_signals.h"
#include "store/disk_space.h"
#include "store/model_writer.h"
#include "store/source.h"

enum { PIECE_BYTES = 16 << 20 }; /* written at a time */

static const char usage[] =
    "usage: k3decode synth RECIPE --output MODEL.h5 [--seed N] [--overwrite]\n"
    "\n"
    "Writes a synthetic model with random weights. Every value is a function of the seed, the tensor's name\n"
    "and the index, so `k3decode run synth:RECIPE` makes the same model in place, without a file.\n"
    "\n"
    "A recipe is a name, then overrides: tiny, k3, k3:num_layers=8,num_experts=64,experts=mxfp4\n"
    "  tiny   small, float32, every kind of layer\n"
    "  k3     Kimi K3's sizes, trunk q8_0, experts mxfp4 (1.5 TB: override num_layers and num_experts)\n"
    "Overrides: every field of /config, layer_types=0001… (0 = KDA, 1 = MLA), seed=N,\n"
    "trunk= and experts= f32, f16, bf16, q8_0, mxfp4, or a GGUF block format (q2_k … q6_k, iq1_s … iq4_xs,\n"
    "q4_0 …): rows of whole blocks of 32, for k and i formats of 256.\n"
    "\n"
    "  -o, --output MODEL.h5  the file to write; it appears under this name when it is whole\n"
    "      --seed N           another draw of the weights (the same as seed=N in the recipe)\n"
    "      --overwrite        replace MODEL.h5 when it is a model file\n"
    "  -h, --help             this text\n";

typedef struct {
  char recipe[1024];
  const char *output;
  int overwrite;
  int help;
} Options;

static K3Status parse(int argc, char **argv, Options *options)
{
  static const struct option names[] = {
      {"output", required_argument, NULL, 'o'},
      {"seed", required_argument, NULL, 's'},
      {"overwrite", no_argument, NULL, 'w'},
      {"help", no_argument, NULL, 'h'},
      {NULL, 0, NULL, 0},
  };
  const char *seed = NULL;
  optind = 0;
  for (int option; (option = getopt_long(argc, argv, ":o:h", names, NULL)) != -1;) {
    switch (option) {
    case 'o': options->output = optarg; break;
    case 's': seed = optarg; break;
    case 'w': options->overwrite = 1; break;
    case 'h': options->help = 1; return K3_OK;
    default: return k3_refuse_option("synth", option, argv);
    }
  }
  if (optind + 1 != argc)
    K3_FAIL(K3_ERR_USAGE, "synth: wants one recipe, got %d; see k3decode synth --help", argc - optind);
  if (!options->output || !*options->output) K3_FAIL(K3_ERR_USAGE, "synth: --output MODEL.h5 is missing");
  const char *recipe = argv[optind];
  if (strncmp(recipe, "synth:", 6) == 0) recipe += 6;
  int length = snprintf(options->recipe, sizeof options->recipe, "%s%s%s%s", recipe,
                        !seed                 ? ""
                        : strchr(recipe, ':') ? ","
                                              : ":",
                        seed ? "seed=" : "", seed ? seed : "");
  if (length < 0 || (size_t)length >= sizeof options->recipe)
    K3_FAIL(K3_ERR_USAGE, "synth: the recipe is longer than %zu characters", sizeof options->recipe - 1);
  return K3_OK;
}

static int64_t source_bytes(const K3Source *source)
{
  int64_t bytes = 0;
  for (int64_t i = 0; i < source->table.count; i++)
    bytes += k3_format_bytes(source->types[i], k3_tensor_elements(&source->table.specs[i]));
  return bytes;
}

/* One tensor, a piece of rows at a time. A 3-axis tensor goes one slice of axis 0 after the other. */
static K3Status write_tensor(K3Source *source, int64_t tensor, K3ModelWriter *writer, void *buffer, K3ProgressBar *bar)
{
  const K3TensorSpec *spec = &source->table.specs[tensor];
  K3Type type = source->types[tensor];
  int row_axis = spec->rank == 1 ? 0 : spec->rank - 2;
  int64_t row_bytes = k3_format_bytes(type, spec->rank == 1 ? 1 : spec->shape[spec->rank - 1]);
  int64_t slices = spec->rank == 3 ? spec->shape[0] : 1, rows = spec->shape[row_axis];
  int64_t piece = PIECE_BYTES / row_bytes > 0 ? PIECE_BYTES / row_bytes : 1;
  K3_TRY(k3_model_writer_tensor(writer, spec, type));
  for (int64_t slice = 0; slice < slices; slice++)
    for (int64_t row = 0; row < rows; row += piece) {
      K3Band band = {{0, 0, 0}, {spec->shape[0], spec->shape[1], spec->shape[2]}};
      if (spec->rank == 3) band.begin[0] = slice, band.count[0] = 1;
      band.begin[row_axis] = row;
      band.count[row_axis] = rows - row < piece ? rows - row : piece;
      if (k3_stop_signal)
        K3_FAIL(K3_ERR_INPUT, "synth: stopped by signal %d; nothing was left behind", (int)k3_stop_signal);
      K3_TRY(source->read(source, tensor, &band, buffer));
      K3_TRY(k3_model_writer_rows(writer, spec, type, slice * rows + row, band.count[row_axis], buffer));
      k3_progress_update(bar, source->bytes_read);
    }
  return K3_OK;
}

/* Bytes of the buffer that write_tensor needs: a piece, or one row where that is longer. */
static size_t buffer_bytes(const K3Source *source)
{
  int64_t most = PIECE_BYTES;
  for (int64_t i = 0; i < source->table.count; i++) {
    const K3TensorSpec *spec = &source->table.specs[i];
    int64_t row = spec->rank == 1 ? 1 : k3_format_bytes(source->types[i], spec->shape[spec->rank - 1]);
    if (row > most) most = row;
  }
  return (size_t)most;
}

static K3Status write_codebooks(K3Source *source, K3ModelWriter *writer)
{
  int needed[K3_CODEBOOK_COUNT];
  k3_codebooks_needed(source->types, source->table.count, needed);
  for (int id = 0; id < K3_CODEBOOK_COUNT; id++) {
    if (!needed[id]) continue;
    const char *name = k3_codebook((K3CodebookId)id)->name;
    void *data = NULL;
    size_t bytes = 0;
    K3_TRY(source->codebook(source, name, &data, &bytes));
    K3Status status = k3_model_writer_codebook(writer, name, data, bytes);
    free(data);
    K3_TRY(status);
  }
  return K3_OK;
}

static K3Status write_model(const Options *options)
{
  K3Status status = K3_OK;
  K3Source *source = NULL;
  K3ModelWriter *writer = NULL;
  void *buffer = NULL;
  char provenance[1200];
  K3ProgressBar bar = {0};
  struct sigaction before[K3_STOP_SIGNALS];
  k3_stop_catch(before);
  K3_TRY_DONE(k3_synth_source_open(options->recipe, &source));
  K3_TRY_DONE(k3_disk_space_check(options->output, "model file", k3_model_writer_room(&source->table, source->types),
                                  "choose another output or a smaller recipe"));
  buffer = malloc(buffer_bytes(source));
  if (!buffer) K3_FAIL_DONE(K3_ERR_INPUT, "synth: no memory for %zu bytes", buffer_bytes(source));
  snprintf(provenance, sizeof provenance, "k3decode synth %s (random weights)", options->recipe);
  K3_TRY_DONE(k3_model_writer_create(options->output, &source->config, provenance, options->overwrite, &writer));
  K3_TRY_DONE(write_codebooks(source, writer));
  k3_progress_start(&bar, "writing", K3_PROGRESS_BYTES, source_bytes(source), 1);
  for (int64_t i = 0; i < source->table.count; i++) K3_TRY_DONE(write_tensor(source, i, writer, buffer, &bar));
  k3_progress_finish(&bar);
  K3_TRY_DONE(k3_model_writer_finish(writer, &source->table));
  printf("%s: %" PRId64 " tensors, %.3f GB\n", options->output, source->table.count, (double)source->bytes_read * 1e-9);
done:
  k3_stop_release(before);
  k3_progress_finish(&bar);
  k3_model_writer_close(writer);
  if (source) source->close(source);
  free(buffer);
  return status;
}

K3Status k3_command_synth(int argc, char **argv, K3Comm *comm)
{
  Options options = {{0}, NULL, 0, 0};
  K3_TRY(parse(argc, argv, &options));
  if (options.help) {
    if (!comm || comm->rank == 0) fputs(usage, stdout);
    return K3_OK;
  }
  if (comm && comm->world > 1)
    K3_FAIL(K3_ERR_USAGE, "synth: runs as one process, not %d; start it without mpirun", comm->world);
  return write_model(&options);
}
