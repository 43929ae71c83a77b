/* `k3decode run`: the main job, under mpirun or srun. Layer: commands.
 * Opens the model on every rank, plans, loads, decodes, writes the run file. Ranks agree on failure at each
 * stage, so that one rank's message ends all. */
#include <getopt.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "commands/commands.h"
#include "commands/numbers.h"
#include "commands/progress.h"
#include "commands/session.h"
#include "config.h"
#include "decode/decode.h"
#include "decode/interrupt.h"
#include "plan/plan_text.h"
#include "store/prompt_file.h"
#include "store/source.h"

static const char usage[] =
  "usage: [mpirun -n RANKS] k3decode run MODEL --prompt IDS [options]\n"
  "\n"
  "Decodes greedily after the prompt, one rank to a GPU (or to a processor with the host backend).\n"
  "MODEL is a model file, or synth:RECIPE (see k3decode synth --help): each rank makes its own band in place.\n"
  "\n"
  "  --prompt 1,2,3         token ids\n"
  "  --prompt-file F        text file of ids, or HDF5 with /prompt/token_ids or /token_ids (a run file will do)\n"
  "  --steps N              tokens to decode (default 16)\n"
  "  --output RUN.h5        run file; without it the tokens are only printed\n"
  "  --overwrite            replace RUN.h5\n"
  "  --logits all|none|top:K  what the run file keeps of the logits (default all)\n"
  "  --context N            begin with a synthetic cache of N positions: for measuring\n"
  "  --attention split|unsplit|core|tensor  how the cache is attended to (default split: as the planner chooses)\n";

typedef struct {
  const char *model, *prompt, *prompt_file, *output;
  int64_t steps, context;
  int overwrite;
  K3LogitsKind logits;
  int64_t top;
  K3SessionOptions session;
} RunOptions;

/* Everything a run holds, released in one place. */
typedef struct {
  RunOptions options;
  K3Comm *comm;    /* of the processes */
  K3Comm *ranks;   /* of the decode: comm, or a slice's stand-in */
  K3Source *source;
  K3Plan plan;
  K3DecodeOptions decode;
  int64_t *prompt;
  K3BackendOptions backend_options;
  K3Backend *backend;
  K3RunFile *file; /* rank 0 */
  int output_made; /* rank 0: the file is ours to remove */
  atomic_int decoding; /* the model is read: HDF5 calls go to the run file alone, which has a lock */
  char *devices;   /* rank 0: a line a rank */
  char *command;
} Run;

/* --- options ----------------------------------------------------------------------------------------- */

static K3Status parse_logits(const char *text, RunOptions *options)
{
  if (strcmp(text, "all") == 0) {
    options->logits = K3_LOGITS_ALL;
  } else if (strcmp(text, "none") == 0) {
    options->logits = K3_LOGITS_NONE;
  } else if (strncmp(text, "top:", 4) == 0) {
    options->logits = K3_LOGITS_TOP;
    K3_TRY(k3_parse_count(text + 4, "--logits top:", 1, INT32_MAX, &options->top));
  } else {
    K3_FAIL(K3_ERR_USAGE, "--logits %s: wanted all, none or top:K", text);
  }
  return K3_OK;
}

static K3Status parse_option(int letter, const char *value, RunOptions *options)
{
  switch (letter) {
  case 'p': options->prompt = value; return K3_OK;
  case 'f': options->prompt_file = value; return K3_OK;
  case 'n': return k3_parse_count(value, "--steps", 1, INT32_MAX, &options->steps);
  case 'o': options->output = value; return K3_OK;
  case 'w': options->overwrite = 1; return K3_OK;
  case 'l': return parse_logits(value, options);
  case 'c': return k3_parse_count(value, "--context", 1, INT32_MAX, &options->context);
  case 'A': return k3_session_parse_attention("--attention", value, &options->session.attention);
  default: return k3_session_parse(letter, value, &options->session);
  }
}

static K3Status check_options(const Run *run)
{
  const RunOptions *options = &run->options;
  if (options->prompt && options->prompt_file)
    K3_FAIL(K3_ERR_USAGE, "--prompt and --prompt-file exclude each other");
  if (!options->prompt && !options->prompt_file && !options->context)
    K3_FAIL(K3_ERR_USAGE, "a prompt is missing: give --prompt 1,2,3 or --prompt-file F (with --context N it may be left out: token 0)");
  return k3_session_check(&options->session, run->comm);
}

static K3Status parse_options(int argc, char **argv, Run *run, int *help)
{
  static const struct option names[] = {
    {"prompt", required_argument, 0, 'p'}, {"prompt-file", required_argument, 0, 'f'},
    {"steps", required_argument, 0, 'n'},  {"output", required_argument, 0, 'o'},
    {"overwrite", no_argument, 0, 'w'},    {"logits", required_argument, 0, 'l'},
    {"context", required_argument, 0, 'c'}, {"attention", required_argument, 0, 'A'},
    K3_SESSION_LONG_OPTIONS,
    {"help", no_argument, 0, 'h'},           {0, 0, 0, 0}};
  RunOptions *options = &run->options;
  *options = (RunOptions){.steps = 16, .session = K3_SESSION_DEFAULTS};
  int letter;
  optind = 0;
  opterr = 0;
  while ((letter = getopt_long(argc, argv, "", names, NULL)) != -1) {
    if (letter == 'h') {
      *help = 1;
      return K3_OK;
    }
    if (letter == '?') K3_FAIL(K3_ERR_USAGE, "%s: unknown option or missing value; see k3decode run --help", argv[optind - 1]);
    K3_TRY(parse_option(letter, optarg, options));
  }
  if (optind != argc - 1)
    K3_FAIL(K3_ERR_USAGE, optind >= argc ? "a model is missing: k3decode run MODEL …; see k3decode run --help"
                                         : "more than one model given; see k3decode run --help");
  options->model = argv[optind];
  return check_options(run);
}

/* --- stages ------------------------------------------------------------------------------------------ */

/* Rank 0 reads the prompt; the others are told. */
static K3Status share_prompt(Run *run)
{
  const RunOptions *options = &run->options;
  K3Comm *comm = run->comm;
  K3Status status = K3_OK;
  int64_t count = 0;
  if (comm->rank == 0) {
    if (options->prompt_file)
      status = k3_prompt_read(options->prompt_file, &run->prompt, &count);
    else
      status = k3_prompt_parse(options->prompt ? options->prompt : "0", "--prompt", &run->prompt, &count);
  }
  K3_TRY(k3_comm_agree(comm, status));
  K3_TRY(comm->broadcast(comm, &count, 1, K3_ELEMENT_I64, 0));
  if (comm->rank != 0 && !(run->prompt = malloc((size_t)count * sizeof *run->prompt)))
    status = k3_status_fail(K3_ERR_INPUT, __FILE__, __LINE__, "no memory for %lld token ids", (long long)count);
  K3_TRY(k3_comm_agree(comm, status));
  K3_TRY(comm->broadcast(comm, run->prompt, count, K3_ELEMENT_I64, 0));
  run->decode = (K3DecodeOptions){.prompt = run->prompt, .prompt_count = count, .steps = options->steps,
                                  .logits = options->logits, .top = options->top};
  status = k3_decode_check_prompt(&run->source->config, options->context, &run->decode);
  if (status == K3_OK && options->logits == K3_LOGITS_TOP && options->top > run->source->config.vocab_size)
    status = k3_status_fail(K3_ERR_INPUT, __FILE__, __LINE__, "--logits top:%lld: the vocabulary has only %lld tokens",
                            (long long)options->top, (long long)run->source->config.vocab_size);
  return k3_comm_agree(comm, status);
}

static K3Status open_backend(Run *run)
{
  const RunOptions *options = &run->options;
  run->backend_options = k3_session_backend_options(&options->session);
  run->backend_options.capacity = k3_decode_capacity(options->context, &run->decode);
  run->backend_options.start = options->context;
  return k3_session_open_backend(&options->session, run->comm, run->ranks, run->source, &run->plan,
                                 &run->backend_options, &run->backend);
}

static K3Status create_output(Run *run)
{
  const RunOptions *options = &run->options;
  char start[32], plan[4096], kind[64] = "logits";
  K3_TRY(k3_session_start_time(start));
  if (options->session.slice_world)
    snprintf(kind, sizeof kind, "slice %d/%d", options->session.slice_rank, options->session.slice_world);
  if (k3_session_same_file(options->model, options->output))
    K3_FAIL(K3_ERR_INPUT, "%s: --output is the model itself; choose another file", options->output);
  k3_plan_describe(&run->plan, &run->source->config, &run->source->table, run->source->types, plan, sizeof plan);
  K3RunInfo info = {.version = PACKAGE_VERSION,
                    .model = options->model,
                    .model_digest = run->source->digest,
                    .config = &run->source->config,
                    .ranks = run->comm->world,
                    .backend = run->backend->name,
                    .devices = run->devices,
                    .command = run->command,
                    .start_time = start,
                    .plan = plan,
                    .kind = kind,
                    .prompt = run->decode.prompt,
                    .prompt_count = run->decode.prompt_count,
                    .first_context = options->context,
                    .logits = run->decode.logits,
                    .top = run->decode.top,
                    .phase_names = k3_phase_names,
                    .phases = K3_PHASE_COUNT,
                    .overwrite = options->overwrite};
  K3_TRY(k3_run_file_create(options->output, &info, &run->file));
  run->output_made = 1;
  return K3_OK;
}

/* In the signal thread, when the main one does not come round: hung in a collective, or still loading. */
static void last_words(void *context, int signal)
{
  Run *run = context;
  char ending[64];
  snprintf(ending, sizeof ending, "stopped by signal %d", signal);
  if (!run->file) return;
  if (atomic_load(&run->decoding))
    k3_run_file_end(run->file, ending);
  else
    unlink(run->options.output); /* no step yet: nothing worth keeping */
}

typedef struct {
  K3ProgressBar bar;
  int64_t *tokens; /* rank 0: what was decoded; NULL elsewhere */
  int64_t count;
} Watch;

static void observe(void *context, int64_t fed, int64_t all, int64_t token)
{
  Watch *watch = context;
  (void)all;
  k3_progress_update(&watch->bar, fed);
  if (!watch->tokens || token < 0) return;
  watch->tokens[watch->count++] = token;
  if (watch->bar.shown) return; /* the bar has the line: printed when it ends */
  printf("%lld ", (long long)token);
  fflush(stdout);
}

static K3Status decode(Run *run, int *signal)
{
  Watch watch = {.count = 0};
  K3DecodeResult result;
  K3Status status = K3_OK;
  if (run->comm->rank == 0 && !(watch.tokens = malloc((size_t)run->decode.steps * sizeof *watch.tokens)))
    status = k3_status_fail(K3_ERR_INPUT, __FILE__, __LINE__, "no memory for %lld tokens", (long long)run->decode.steps);
  K3_TRY(k3_comm_agree(run->comm, status));
  k3_progress_start(&watch.bar, "decoding", K3_PROGRESS_STEPS, run->decode.prompt_count + run->decode.steps - 1,
                    run->comm->rank == 0);
  atomic_store(&run->decoding, 1);
  status = k3_decode_run(run->backend, &run->source->config, &run->plan, run->ranks, &run->decode, run->file,
                         observe, &watch, &result);
  int barred = watch.bar.shown; /* the tokens wait for the end of the bar's line */
  k3_progress_finish(&watch.bar);
  k3_interrupt_set_last_words(NULL, NULL);
  *signal = result.signal;
  if (run->comm->rank != 0) return status;
  for (int64_t n = 0; barred && n < watch.count; n++) printf("%lld ", (long long)watch.tokens[n]);
  if (watch.count) printf("\n");
  free(watch.tokens);
  char ending[96] = "done";
  if (result.signal)
    snprintf(ending, sizeof ending, "stopped by signal %d after %lld steps", result.signal, (long long)result.steps);
  if (run->file) {
    K3Status closed = k3_run_file_close(run->file, status == K3_OK ? ending : k3_status_message());
    run->file = NULL;
    if (result.steps > 0) run->output_made = 0; /* finished steps are worth keeping */
    if (status == K3_OK) status = closed;
    if (closed != K3_OK) fprintf(stderr, "k3decode: %s\n", k3_status_message());
  }
  if (status != K3_OK) return status;
  printf("%s: %lld tokens", ending, (long long)result.steps);
  if (result.steps > 1)
    printf(", %.2f tokens/s (%.3f ms a step)%s", 1e3 * (double)(result.steps - 1) / result.decode_ms,
           result.decode_ms / (double)(result.steps - 1),
           run->options.session.slice_world ? " for one rank, collectives left out: times, not logits" : "");
  printf("\n");
  if (run->options.output) printf("run file: %s\n", run->options.output);
  return K3_OK;
}

static void release(Run *run)
{
  k3_interrupt_set_last_words(NULL, NULL);
  if (run->file) k3_run_file_close(run->file, k3_status_message());
  if (run->output_made) unlink(run->options.output);
  if (run->backend) run->backend->close(run->backend);
  if (run->source) run->source->close(run->source);
  if (run->ranks && run->ranks != run->comm) run->ranks->close(run->ranks);
  free(run->prompt);
  free(run->devices);
  free(run->command);
}

static K3Status stages(Run *run, int *signal)
{
  K3Status status = K3_OK;
  const K3SessionOptions *session = &run->options.session;
  if (session->slice_world)
    K3_TRY(k3_comm_agree(run->comm, k3_comm_open_local(session->slice_rank, session->slice_world, &run->ranks)));
  K3_TRY(k3_comm_agree(run->comm, k3_source_open(run->options.model, &run->source)));
  K3_TRY(k3_session_same_model(run->comm, run->source));
  K3_TRY(k3_session_plan(session, session->cache_band, run->comm, run->ranks, run->source, &run->plan));
  K3_TRY(share_prompt(run));
  K3_TRY(open_backend(run));
  K3_TRY(k3_session_gather_devices(session, run->comm, run->backend, &run->devices));
  k3_interrupt_set_last_words(last_words, run);
  /* A new file is made before the load, so that a place that cannot be written is found at once; an old one is
   * replaced only when there is something to replace it with. */
  int makes = run->comm->rank == 0 && run->options.output, replaces = makes && access(run->options.output, F_OK) == 0;
  if (makes && !(replaces && run->options.overwrite)) status = create_output(run);
  K3_TRY(k3_comm_agree(run->comm, status));
  K3_TRY(k3_session_load(run->comm, run->backend));
  if (makes && !run->file) status = create_output(run);
  K3_TRY(k3_comm_agree(run->comm, status));
  return decode(run, signal);
}

K3Status k3_command_run(int argc, char **argv, K3Comm *comm, int *signal)
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
