/* `k3decode sweep`: the depth curve of two arms, with its noise floor and control phases. Layer: commands.
 * The measuring is decode/sweep.c, the table sweep_table.c, the file store/sweep_file.c. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "commands/arguments.h"
#include "commands/commands.h"
#include "commands/progress.h"
#include "commands/session.h"
#include "commands/sweep_table.h"
#include "commands/version.h"
#include "config.h"
#include "decode/interrupt.h"
#include "decode/sweep.h"

static const char usage[] =
    "usage: [mpirun -n RANKS] k3decode sweep MODEL [options]\n"
    "\n"
    "The time of a step over depth, for two arms interleaved in one process (A B B A), with a noise floor from an\n"
    "A/A pair, and the phases that the arms do not touch. MODEL is a model file, or synth:RECIPE; caches are "
    "synthetic.\n"
    "\n"
    "  --contexts 128,512,…   cached positions, ascending (default 128,512,4096,8192,32768,131072 as far as the model goes)\n"
    "  --arms A,B             two of: split, unsplit (default), core, tensor (attention kernels; auto means split),\n"
    "                         cache-band:context, cache-band:none\n"
    "  --steps N              timed steps of a block (default 16)\n"
    "  --repeats R            A B B A so many times, at least 2 (default 5)\n"
    "  --output SWEEP.h5      all times and what follows from them; k3decode report draws it\n"
    "  --overwrite            replace SWEEP.h5\n";

enum { MAX_CONTEXTS = 64 };

typedef struct {
  const char *model, *output, *contexts, *arms;
  int64_t steps, repeats;
  int overwrite;
  K3SessionOptions session;
} SweepOptions;

typedef struct {
  K3AttentionArm attention;
  K3CacheBand band;
} Arm;

/* Everything a sweep holds, released in one place. */
typedef struct {
  SweepOptions options;
  int64_t context[MAX_CONTEXTS], contexts;
  Arm arm[K3_SWEEP_ARMS];
  char name[K3_SWEEP_ARMS][32];
  K3Comm *comm;  /* of the processes */
  K3Comm *ranks; /* of the decode: comm, or a slice's stand-in */
  K3Source *source;
  K3Plan plan[K3_SWEEP_ARMS];
  K3TuningFile *tuning; /* NULL: none was given */
  K3BackendOptions backend_options;
  K3Backend *backend;
  K3Sweep sweep;
  int64_t touched[K3_PHASE_COUNT];
  int64_t step_bytes[MAX_CONTEXTS][K3_SWEEP_ARMS][K3_STEP_PARTS];
  char *devices, *command, start_time[32], kind[64], versions[512];
  K3ProgressBar bar;
} Run;

/* --- options ----------------------------------------------------------------------------------------- */

static K3Status parse_arm(Run *run, int a, const char *word)
{
  static const char band[] = "cache-band:";
  Arm *arm = &run->arm[a];
  *arm = (Arm){K3_ATTENTION_SPLIT, run->options.session.cache_band};
  snprintf(run->name[a], sizeof run->name[a], "%s", word);
  if (strcmp(word, "cache-band:context") == 0) arm->band = K3_CACHE_CONTEXT;
  else if (strcmp(word, "cache-band:none") == 0) arm->band = K3_CACHE_NONE;
  else if (strncmp(word, band, sizeof band - 1) == 0)
    K3_FAIL(K3_ERR_USAGE, "--arms %s: wanted cache-band:context or cache-band:none", word);
  else if (strcmp(word, "auto") == 0) snprintf(run->name[a], sizeof run->name[a], "split");
  else {
    for (int i = 0; i < K3_ATTENTION_COUNT; i++)
      if (strcmp(word, k3_attention_arm_names[i]) == 0) {
        arm->attention = (K3AttentionArm)i;
        return K3_OK;
      }
    K3_FAIL(K3_ERR_USAGE,
            "--arms %s: no such arm; there are split, unsplit, core, tensor, cache-band:context and "
            "cache-band:none",
            word);
  }
  return K3_OK;
}

static K3Status parse_arms(Run *run)
{
  const char *list = run->options.arms;
  char word[32];
  int count = 0, found = 1;
  for (;;) {
    K3_TRY(k3_next_word(&list, "--arms", word, sizeof word, &found));
    if (!found) break;
    if (count < K3_SWEEP_ARMS) K3_TRY(parse_arm(run, count, word));
    count++;
  }
  if (count != K3_SWEEP_ARMS) K3_FAIL(K3_ERR_USAGE, "--arms %s: wanted two arms like split,unsplit", run->options.arms);
  const Arm *a = &run->arm[0], *b = &run->arm[1];
  if (a->attention == b->attention && a->band == b->band)
    K3_FAIL(K3_ERR_USAGE, "--arms %s: both are the same arm; the A/A pair is measured anyway", run->options.arms);
  return K3_OK;
}

static K3Status parse_option(int letter, const char *value, void *context)
{
  SweepOptions *options = context;
  switch (letter) {
  case 'c': options->contexts = value; return K3_OK;
  case 'm': options->arms = value; return K3_OK;
  case 'n': return k3_parse_count(value, "--steps", 1, 1000000, &options->steps);
  case 'R': return k3_parse_count(value, "--repeats", 2, 10000, &options->repeats);
  case 'o': options->output = value; return K3_OK;
  case 'w': options->overwrite = 1; return K3_OK;
  default: return k3_session_parse(letter, value, &options->session);
  }
}

static K3Status parse_options(int argc, char **argv, Run *run, int *help)
{
  static const struct option names[] = {{"contexts", required_argument, 0, 'c'},
                                        {"arms", required_argument, 0, 'm'},
                                        {"steps", required_argument, 0, 'n'},
                                        {"repeats", required_argument, 0, 'R'},
                                        {"output", required_argument, 0, 'o'},
                                        {"overwrite", no_argument, 0, 'w'},
                                        K3_SESSION_LONG_OPTIONS,
                                        {"help", no_argument, 0, 'h'},
                                        {0, 0, 0, 0}};
  SweepOptions *options = &run->options;
  *options = (SweepOptions){.arms = "split,unsplit",
                            .steps = 16,
                            .repeats = 5,
                            .session = K3_SESSION_DEFAULTS};
  K3_TRY(k3_parse_model_command("sweep", argc, argv, names, parse_option, options, &options->model, help));
  if (*help) return K3_OK;
  const char *contexts = options->contexts ? options->contexts : "128,512,4096,8192,32768,131072";
  K3_TRY(k3_parse_contexts(contexts, MAX_CONTEXTS, run->context, &run->contexts));
  K3_TRY(parse_arms(run));
  return k3_session_check(&options->session, run->comm);
}

/* --- stages ------------------------------------------------------------------------------------------ */

static K3Status check_contexts(Run *run)
{
  const K3Config *config = &run->source->config;
  while (!run->options.contexts && run->contexts > 1 &&
         k3_sweep_capacity(run->context[run->contexts - 1], run->options.steps) > config->max_context)
    run->contexts--;
  for (int64_t c = 0; c < run->contexts; c++) {
    int64_t needed = k3_sweep_capacity(run->context[c], run->options.steps);
    if (needed > config->max_context)
      K3_FAIL(K3_ERR_INPUT,
              "--contexts %lld: with %d untimed and %lld timed steps it needs a context of %lld, the model's "
              "max_context is "
              "%lld; give smaller ones",
              (long long)run->context[c], K3_SWEEP_WARM_STEPS, (long long)run->options.steps, (long long)needed,
              (long long)config->max_context);
  }
  if (k3_config_count_layers(config, K3_LAYER_MLA) == 0)
    K3_FAIL(K3_ERR_INPUT, "%s has no MLA layer: nothing depends on depth", run->options.model);
  return K3_OK;
}

/* Before anything is loaded. */
static K3Status check_output(const Run *run)
{
  if (run->comm->rank != 0 || !run->options.output) return K3_OK;
  if (k3_session_same_file(run->options.model, run->options.output))
    K3_FAIL(K3_ERR_INPUT, "%s: --output is the model itself; choose another file", run->options.output);
  return k3_sweep_file_check(run->options.output, run->options.overwrite);
}

/* Loads for the arm that holds most cache. */
static K3Status open_backend(Run *run)
{
  int most = run->arm[1].band == K3_CACHE_NONE;
  run->backend_options = k3_session_backend_options(&run->options.session, run->tuning);
  run->backend_options.capacity = k3_sweep_capacity(run->context[run->contexts - 1], run->options.steps);
  run->backend_options.start = run->context[0];
  run->backend_options.reconfigures = 1;
  return k3_session_open_backend(&run->options.session, run->comm, run->ranks, run->source, &run->plan[most],
                                 &run->backend_options, &run->backend);
}

/* What a step must move at each context, on the rank that must move most (of a slice: on its own). */
static void count_bytes(Run *run)
{
  const K3SessionOptions *session = &run->options.session;
  int first = session->slice_world ? session->slice_rank : 0,
      last = session->slice_world ? first : run->comm->world - 1;
  for (int64_t c = 0; c < run->contexts; c++)
    for (int a = 0; a < K3_SWEEP_ARMS; a++) {
      int64_t most = -1;
      for (int r = first; r <= last; r++) {
        int64_t bytes[K3_STEP_PARTS], sum = 0;
        k3_plan_step_bytes(&run->plan[a], r, &run->source->config, &run->source->table, run->source->types,
                           run->context[c], k3_cache_type_bytes(run->backend->cache_type), bytes);
        for (int part = 0; part < K3_STEP_PARTS; part++) sum += bytes[part];
        if (sum > most) most = sum, memcpy(run->step_bytes[c][a], bytes, sizeof bytes);
      }
    }
}

/* Arms that exist here; at least one must. */
static K3Status open_sweep(Run *run)
{
  K3Sweep *sweep = &run->sweep;
  K3_TRY(k3_sweep_open(sweep, run->contexts, run->options.repeats, run->options.steps, K3_PHASE_COUNT));
  memcpy(sweep->context, run->context, (size_t)run->contexts * sizeof *sweep->context);
  for (int a = 0; a < K3_SWEEP_ARMS; a++) {
    sweep->arm[a] = run->name[a];
    sweep->lack[a] = run->backend->lacks_arm(run->backend, run->arm[a].attention);
  }
  sweep->base = sweep->lack[0] != NULL;
  for (int p = 0; p < K3_PHASE_COUNT; p++) run->touched[p] = k3_sweep_touches((K3Phase)p);
  count_bytes(run);
  if (sweep->lack[0] && sweep->lack[1])
    K3_FAIL(K3_ERR_INPUT, "--arms %s: neither exists here: %s", run->options.arms, sweep->lack[0]);
  if (run->options.session.slice_world)
    snprintf(run->kind, sizeof run->kind, "slice %d/%d, collectives left out: times, not logits",
             run->options.session.slice_rank, run->options.session.slice_world);
  else snprintf(run->kind, sizeof run->kind, "whole, %d rank%s", run->comm->world, run->comm->world == 1 ? "" : "s");
  k3_version_line(run->versions, sizeof run->versions);
  return k3_session_start_time(run->start_time);
}

static K3SweepInfo info_of(const Run *run)
{
  return (K3SweepInfo){.version = PACKAGE_VERSION,
                       .versions = run->versions,
                       .model = run->options.model,
                       .backend = run->backend->name,
                       .step_bytes = run->step_bytes[0][0],
                       .devices = run->devices ? run->devices : "",
                       .command = run->command,
                       .start_time = run->start_time,
                       .kind = run->kind,
                       .model_digest = run->source->digest,
                       .config = &run->source->config,
                       .ranks = run->comm->world,
                       .seed = run->options.session.seed,
                       .capacity = run->backend_options.capacity,
                       .phase_names = k3_phase_names,
                       .phase_touched = run->touched,
                       .overwrite = run->options.overwrite};
}

static void observe(void *context, int64_t done, int64_t all)
{
  Run *run = context;
  run->bar.all = all;
  k3_progress_update(&run->bar, done);
}

static void print_context(void *context, const K3Sweep *sweep, int64_t c)
{
  Run *run = context;
  if (run->comm->rank != 0) return;
  if (run->bar.shown) fputs("\r\033[K", stderr); /* the bar comes back below the rows */
  k3_sweep_print_context(sweep, c);
}

static K3Status measure(Run *run, int *signal)
{
  K3SweepSetup setup = {.plan = {&run->plan[0], &run->plan[1]},
                        .attention = {run->arm[0].attention, run->arm[1].attention},
                        .options = run->backend_options,
                        .observer = observe,
                        .context_done = print_context,
                        .context = run};
  K3SweepInfo info = info_of(run);
  int speaks = run->comm->rank == 0;
  if (speaks) k3_sweep_print_head(&info, &run->sweep);
  k3_progress_start(&run->bar, "sweeping", K3_PROGRESS_STEPS, 1, speaks);
  K3Status status = k3_sweep_measure(run->backend, run->ranks, &setup, &run->sweep, signal);
  k3_progress_finish(&run->bar);
  if (status != K3_OK) return status;
  if (*signal) {
    if (speaks)
      printf("# stopped by signal %d after %lld of %lld contexts; no file is written\n", *signal,
             (long long)run->sweep.done, (long long)run->sweep.contexts);
    return K3_OK;
  }
  if (speaks) k3_sweep_print_tail(&info, &run->sweep);
  if (speaks && run->options.output) status = k3_sweep_file_write(run->options.output, &info, &run->sweep);
  K3_TRY(k3_comm_agree(run->comm, status));
  if (speaks && run->options.output) printf("# sweep file: %s\n", run->options.output);
  return K3_OK;
}

static K3Status stages(Run *run, int *signal)
{
  const K3SessionOptions *session = &run->options.session;
  if (session->slice_world)
    K3_TRY(k3_comm_agree(run->comm, k3_comm_open_local(session->slice_rank, session->slice_world, &run->ranks)));
  K3_TRY(k3_session_open_model(run->comm, run->options.model, &run->source));
  K3_TRY(k3_comm_agree(run->comm, check_contexts(run)));
  for (int a = 0; a < K3_SWEEP_ARMS; a++)
    K3_TRY(k3_session_plan(session, run->arm[a].band, run->comm, run->ranks, run->source, &run->plan[a]));
  K3_TRY(k3_comm_agree(run->comm, check_output(run)));
  K3_TRY(k3_session_read_tuning(session, run->comm, &run->tuning));
  K3_TRY(open_backend(run));
  K3_TRY(k3_session_gather_devices(session, run->comm, run->backend, &run->devices));
  K3_TRY(k3_comm_agree(run->comm, open_sweep(run)));
  K3_TRY(k3_session_load(run->comm, run->backend));
  return measure(run, signal);
}

static void release(Run *run)
{
  if (run->backend) run->backend->close(run->backend);
  if (run->source) run->source->close(run->source);
  if (run->ranks && run->ranks != run->comm) run->ranks->close(run->ranks);
  k3_sweep_close(&run->sweep);
  k3_tuning_file_close(run->tuning);
  free(run->devices);
  free(run->command);
}

K3Status k3_command_sweep(int argc, char **argv, K3Comm *comm, int *signal)
{
  Run run = {.comm = comm, .ranks = comm};
  int help = 0;
  run.command = k3_session_join(argc, argv); /* before getopt puts the words in another order */
  K3Status status = parse_options(argc, argv, &run, &help);
  if (status == K3_OK && !run.command)
    status = k3_status_fail(K3_ERR_INPUT, __FILE__, __LINE__, "no memory for the command line");
  status = k3_comm_agree(comm, status);
  if (status == K3_OK) status = k3_session_same_words(comm, argc - 1, argv); /* the last is the model */
  if (status == K3_OK && help && comm->rank == 0) printf("%s%s  --help\n", usage, k3_session_usage);
  if (status == K3_OK && !help) status = stages(&run, signal);
  release(&run);
  return status;
}
