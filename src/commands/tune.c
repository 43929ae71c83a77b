/* `k3decode tune`: heads a pass x slices of each attention kernel on this GPU, and a file of what is best. Layer: commands.
 * The measuring is decode/tune.h, what to try and what to choose plan/attention_tuning.h, the table tune_table.c. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "commands/arguments.h"
#include "commands/commands.h"
#include "commands/session.h"
#include "commands/tune_table.h"
#include "commands/version.h"
#include "config.h"
#include "decode/tune.h"

static const char usage[] =
    "usage: k3decode tune MODEL [options]\n"
    "\n"
    "Times the attention kernels on this GPU at this model's sizes: heads a pass x slices, for each number of cached "
    "rows\n"
    "and both ways to keep the cache; with registers, shared memory and resident blocks. MODEL is a model file, or\n"
    "synth:RECIPE; no weights are read. One process, one GPU.\n"
    "\n"
    "  --ranks N              sizes of the ranks of a world of N (default 1) …\n"
    "  --slice r/W            … or of rank r of W alone\n"
    "  --contexts 128,256,…   cached positions (default: powers of two from 64 to 131072, as far as the model goes)\n"
    "  --cache f32|bf16|f16   storage of the MLA cache (default f16)\n"
    "  --output TUNE.h5       for run --tuning and sweep --tuning\n"
    "  --overwrite            replace TUNE.h5\n"
    "  --help\n";

enum { FIRST_CONTEXT = 64, LAST_CONTEXT = 131072, MAX_CONTEXTS = 64, MAX_SIZES = 2 * K3_MAX_WORLD * MAX_CONTEXTS };

/* A size to tune for. */
typedef struct {
  int64_t heads, rows;
} Size;

typedef struct {
  const char *model, *output, *contexts;
  int64_t ranks;
  int overwrite;
  K3SessionOptions session; /* slice, cache type */
  K3Comm *comm;
  K3Source *source;
  int64_t context[MAX_CONTEXTS], count;
  Size size[MAX_SIZES];
  int sizes;
  K3TuningFile file;
  K3Tuner *tuner;
} Tune;

static K3Status parse_option(int letter, const char *value, void *context)
{
  Tune *tune = context;
  switch (letter) {
  case 'N': return k3_parse_count(value, "--ranks", 1, K3_MAX_WORLD, &tune->ranks);
  case 'c': tune->contexts = value; return K3_OK;
  case 'o': tune->output = value; return K3_OK;
  case 'w': tune->overwrite = 1; return K3_OK;
  default: return k3_session_parse(letter, value, &tune->session);
  }
}

static K3Status parse(int argc, char **argv, Tune *tune, int *help)
{
  static const struct option names[] = {{"ranks", required_argument, 0, 'N'},    {"slice", required_argument, 0, 'r'},
                                        {"contexts", required_argument, 0, 'c'}, {"cache", required_argument, 0, 't'},
                                        {"output", required_argument, 0, 'o'},   {"overwrite", no_argument, 0, 'w'},
                                        {"help", no_argument, 0, 'h'},           {0, 0, 0, 0}};
  tune->session = (K3SessionOptions)K3_SESSION_DEFAULTS;
  K3_TRY(k3_parse_model_command("tune", argc, argv, names, parse_option, tune, &tune->model, help));
  if (*help) return K3_OK;
  if (tune->ranks && tune->session.slice_world) K3_FAIL(K3_ERR_USAGE, "--ranks and --slice exclude each other");
  if (tune->contexts) return k3_parse_contexts(tune->contexts, MAX_CONTEXTS, tune->context, &tune->count);
  /* plans are made for these (k3_attention_capacity) */
  for (int64_t context = FIRST_CONTEXT; context <= LAST_CONTEXT; context *= 2) tune->context[tune->count++] = context;
  return K3_OK;
}

/* --- sizes --------------------------------------------------------------------------------------------- */

static K3Status check_model(Tune *tune)
{
  const K3Config *config = &tune->source->config;
  if (k3_config_count_layers(config, K3_LAYER_MLA) == 0)
    K3_FAIL(K3_ERR_INPUT, "%s has no MLA layer: there is nothing to tune", tune->model);
  while (!tune->contexts && tune->count > 1 && tune->context[tune->count - 1] > config->max_context) tune->count--;
  if (tune->context[tune->count - 1] > config->max_context)
    K3_FAIL(K3_ERR_INPUT, "--contexts %lld: the model's max_context is %lld", (long long)tune->context[tune->count - 1],
            (long long)config->max_context);
  return K3_OK;
}

static void add_size(Tune *tune, int64_t heads, int64_t rows)
{
  int at = tune->sizes;
  for (int i = 0; i < tune->sizes; i++)
    if (tune->size[i].heads == heads && tune->size[i].rows == rows) return;
  while (at > 0 &&
         (tune->size[at - 1].heads < heads || (tune->size[at - 1].heads == heads && tune->size[at - 1].rows > rows))) {
    tune->size[at] = tune->size[at - 1];
    at--;
  }
  tune->size[at] = (Size){heads, rows};
  tune->sizes++;
}

/* Heads and plan rows of the ranks asked for, under both cache bands. */
static K3Status find_sizes(Tune *tune)
{
  static const K3CacheBand bands[] = {K3_CACHE_CONTEXT, K3_CACHE_NONE};
  const K3Config *config = &tune->source->config;
  int slice = tune->session.slice_world > 0;
  int world = slice ? tune->session.slice_world : tune->ranks ? (int)tune->ranks : 1;
  for (int b = 0; b < 2; b++) {
    K3Plan plan;
    K3PlanOptions wanted = {.cache_band = bands[b]};
    K3_TRY(k3_plan_make(config, &tune->source->table, tune->source->types, world, &wanted, &plan));
    int banded = world > 1 && bands[b] == K3_CACHE_CONTEXT;
    for (int rank = slice ? tune->session.slice_rank : 0; rank < (slice ? tune->session.slice_rank + 1 : world);
         rank++) {
      K3Range own = k3_plan_range(&plan, rank, K3_SHARE_MLA_HEADS);
      int64_t limit = k3_plan_cache_rows(&plan, rank, config->max_context);
      for (int64_t c = 0; c < tune->count; c++) {
        int64_t rows = k3_plan_cache_rows(&plan, rank, tune->context[c]);
        add_size(tune, banded ? config->num_heads : own.end - own.begin,
                 k3_attention_capacity(rows > 0 ? rows : 1, limit));
      }
    }
  }
  return K3_OK;
}

/* --- measuring ------------------------------------------------------------------------------------------ */

static K3Status measure_trial(Tune *tune, const K3AttentionShape *shape, int64_t width, int64_t slices, int planned)
{
  K3AttentionTuning *tuning = &tune->file.tuning;
  K3AttentionTrial trial = {.kernel = shape->kernel,
                            .heads = shape->heads,
                            .rows = shape->rows,
                            .heads_per_pass = width,
                            .tile_rows = shape->tile_rows,
                            .slices = slices,
                            .planned = planned};
  trial.passes = (shape->heads + width - 1) / width;
  trial.blocks = trial.passes * slices;
  K3AttentionTrial *more = realloc(tuning->trial, (size_t)(tuning->count + 1) * sizeof *more);
  if (!more) K3_FAIL(K3_ERR_INPUT, "tune: no memory for trial %lld", (long long)tuning->count);
  tuning->trial = more;
  K3_TRY(k3_tuner_measure(tune->tuner, &trial));
  tuning->trial[tuning->count++] = trial;
  return K3_OK;
}

static K3Status measure_kernel(Tune *tune, Size size, K3AttentionKernel kernel)
{
  K3AttentionShape shape;
  K3AttentionPlan own;
  int64_t widths[K3_ATTENTION_MAX_WIDTHS], slices[K3_ATTENTION_MAX_SLICE_TRIALS];
  int serves = 0;
  K3_TRY(k3_tuner_shape(tune->tuner, kernel, size.heads, size.rows, &shape, &serves));
  if (!serves) return K3_OK;
  K3_TRY(k3_attention_plan(&shape, &own));
  int count = k3_attention_trial_widths(&shape, widths);
  for (int w = 0; w < count; w++) {
    int tried = k3_attention_trial_slices(&shape, widths[w], slices);
    for (int s = 0; s < tried; s++)
      K3_TRY(measure_trial(tune, &shape, widths[w], slices[s],
                           widths[w] == own.heads_per_pass && slices[s] == own.slices));
  }
  return K3_OK;
}

static K3Status measure(Tune *tune)
{
  K3TuningFile *file = &tune->file;
  K3CacheType cache = tune->session.cache_type;
  K3_TRY(k3_tuner_open(&tune->source->config, tune->comm, cache, &file->tuning, file->device_line,
                       sizeof file->device_line, &tune->tuner));
  k3_tune_print_head(file);
  for (int i = 0; i < tune->sizes; i++) {
    int64_t first = file->tuning.count;
    K3_TRY(measure_kernel(tune, tune->size[i], K3_ATTENTION_KERNEL_TENSOR));
    K3_TRY(measure_kernel(tune, tune->size[i], K3_ATTENTION_KERNEL_CORE));
    k3_attention_tuning_conclude(&file->tuning);
    k3_tune_print_trials(file, first);
  }
  k3_tune_print_choices(file);
  if (!tune->output) return K3_OK;
  K3_TRY(k3_tuning_file_write(tune->output, tune->overwrite, file));
  printf("# tuning file: %s\n", tune->output);
  return K3_OK;
}

static K3Status stages(Tune *tune)
{
  K3TuningFile *file = &tune->file;
  K3_TRY(k3_source_open(tune->model, &tune->source));
  K3_TRY(check_model(tune));
  K3_TRY(find_sizes(tune));
  if (tune->output) {
    if (k3_session_same_file(tune->model, tune->output))
      K3_FAIL(K3_ERR_INPUT, "%s: --output is the model itself; choose another file", tune->output);
    K3_TRY(k3_tuning_file_check(tune->output, tune->overwrite));
  }
  snprintf(file->version, sizeof file->version, "%s", PACKAGE_VERSION);
  snprintf(file->model, sizeof file->model, "%s", tune->model);
  k3_version_line(file->versions, sizeof file->versions);
  file->model_digest = tune->source->digest;
  K3_TRY(k3_session_start_time(file->start_time));
  return measure(tune);
}

K3Status k3_command_tune(int argc, char **argv, K3Comm *comm)
{
  int help = 0;
  Tune *tune = calloc(1, sizeof *tune);
  if (!tune) K3_FAIL(K3_ERR_INPUT, "no memory for tune");
  tune->comm = comm;
  char *command = k3_session_join(argc, argv); /* before getopt puts the words in another order */
  snprintf(tune->file.command, sizeof tune->file.command, "%s", command ? command : "");
  free(command);
  K3Status status = parse(argc, argv, tune, &help);
  if (status == K3_OK && help) fputs(usage, stdout);
  if (status == K3_OK && !help && comm->world > 1)
    status = k3_status_fail(K3_ERR_USAGE, __FILE__, __LINE__,
                            "tune runs as one process on one GPU, started without mpirun; got %d ranks", comm->world);
  if (status == K3_OK && !help) status = stages(tune);
  k3_tuner_close(tune->tuner);
  if (tune->source) tune->source->close(tune->source);
  free(tune->file.tuning.trial);
  free(tune);
  return status;
}
