/* `k3decode run`: the main job, under mpirun or srun. Layer: commands.
 * Opens the model on every rank, plans, loads, decodes, writes the run file. Ranks agree on failure at each
 * stage, so that one rank's message ends all. */
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "commands/arguments.h"
#include "commands/commands.h"
#include "commands/progress.h"
#include "commands/resume.h"
#include "commands/session.h"
#include "commands/text.h"
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
  "  --prompt-text TEXT     text, encoded with --tokenizer\n"
  "  --tokenizer DIR        a checkpoint's directory with tiktoken.model; the decoded text is printed too\n"
  "  --steps N              tokens to decode (default 16); 0 with --snapshot: read the prompt alone\n"
  "  --output RUN.h5        run file; without it the tokens are only printed\n"
  "  --overwrite            replace RUN.h5\n"
  "  --logits all|none|top:K  what the run file keeps of the logits (default all)\n"
  "  --snapshot F           write the whole state to F at the end, and when a signal stops the run\n"
  "  --snapshot-every N     and whenever N more tokens went through the model\n"
  "  --resume F             begin where F was written, on any number of ranks; --prompt then adds tokens\n"
  "  --continue F           for jobs that are requeued: --resume F if F is there, --snapshot F; --steps counts from the prompt,\n"
  "                         and each run has a run file of its own (RUN.h5, RUN.2.h5 ...)\n"
  "  --context N            begin with a synthetic cache of N positions: for measuring\n"
  "  --attention split|unsplit|core|tensor  how the cache is attended to (default split: as the planner chooses)\n";

typedef struct {
  const char *model, *prompt, *prompt_file, *prompt_text, *tokenizer, *output;
  int64_t steps, context;
  int overwrite;
  K3LogitsKind logits;
  int64_t top;
  K3ResumeOptions keep;
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
  K3Resume resume; /* tokens too */
  K3TuningFile *tuning; /* NULL: none was given */
  K3BackendOptions backend_options;
  K3Backend *backend;
  K3RunFile *file; /* rank 0 */
  char *output;    /* options.output, or with --continue a free name like it */
  K3ProgressBar bar;
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

static K3Status parse_option(int letter, const char *value, void *context)
{
  RunOptions *options = context;
  switch (letter) {
  case 'p': options->prompt = value; return K3_OK;
  case 'f': options->prompt_file = value; return K3_OK;
  case 'x': options->prompt_text = value; return K3_OK;
  case 'T': options->tokenizer = value; return K3_OK;
  case 'n': return k3_parse_count(value, "--steps", 0, INT32_MAX, &options->steps);
  case 'S': options->keep.snapshot = value; return K3_OK;
  case 'E': return k3_parse_count(value, "--snapshot-every", 1, INT32_MAX, &options->keep.every);
  case 'R': options->keep.resume = value; return K3_OK;
  case 'C': options->keep.proceed = value; return K3_OK;
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
  int prompts = (options->prompt != NULL) + (options->prompt_file != NULL) + (options->prompt_text != NULL);
  if (prompts > 1) K3_FAIL(K3_ERR_USAGE, "--prompt, --prompt-file and --prompt-text exclude each other");
  if (options->prompt_text && !options->tokenizer)
    K3_FAIL(K3_ERR_USAGE, "--prompt-text wants --tokenizer DIR, a checkpoint's directory with tiktoken.model");
  if (!prompts && !options->context && !options->keep.resume && !options->keep.proceed)
    K3_FAIL(K3_ERR_USAGE, "a prompt is missing: give --prompt 1,2,3 or --prompt-file F (with --context N it may be left out: token 0)");
  K3_TRY(k3_resume_check(&options->keep, &options->session, options->context, options->steps, options->output));
  return k3_session_check(&options->session, run->comm);
}

static K3Status parse_options(int argc, char **argv, Run *run, int *help)
{
  static const struct option names[] = {
    {"prompt", required_argument, 0, 'p'}, {"prompt-file", required_argument, 0, 'f'},
    {"prompt-text", required_argument, 0, 'x'}, {"tokenizer", required_argument, 0, 'T'},
    {"steps", required_argument, 0, 'n'},  {"output", required_argument, 0, 'o'},
    {"overwrite", no_argument, 0, 'w'},    {"logits", required_argument, 0, 'l'},
    {"context", required_argument, 0, 'c'}, {"attention", required_argument, 0, 'A'},
    {"snapshot", required_argument, 0, 'S'}, {"snapshot-every", required_argument, 0, 'E'},
    {"resume", required_argument, 0, 'R'}, {"continue", required_argument, 0, 'C'},
    K3_SESSION_LONG_OPTIONS,
    {"help", no_argument, 0, 'h'},           {0, 0, 0, 0}};
  RunOptions *options = &run->options;
  *options = (RunOptions){.steps = 16, .session = K3_SESSION_DEFAULTS};
  K3_TRY(k3_parse_model_command("run", argc, argv, names, parse_option, options, &options->model, help));
  return *help ? K3_OK : check_options(run);
}

/* --- snapshots --------------------------------------------------------------------------------------- */

static K3StateOwner owner_of(const Run *run)
{
  return (K3StateOwner){run->backend, &run->source->config, &run->plan, run->ranks};
}

/* As K3DecodeOptions.snapshot. */
static K3Status save_snapshot(void *context, int64_t fed)
{
  Run *run = context;
  K3StateOwner owner = owner_of(run);
  return k3_resume_save(&run->resume, &owner, run->source, fed, run->options.overwrite || run->options.keep.proceed);
}

/* --- stages ------------------------------------------------------------------------------------------ */

/* Rank 0: the prompt as text, through the tokenizer. */
static K3Status encode_prompt(const RunOptions *options, int64_t **prompt, int64_t *count)
{
  char *ids = NULL;
  K3_TRY(k3_text_encode(options->tokenizer, options->prompt_text, &ids));
  K3Status status = k3_prompt_parse(ids, "--prompt-text", prompt, count);
  free(ids);
  return status;
}

/* Rank 0: what was decoded, as text. */
static K3Status print_text(const char *tokenizer, const int64_t *tokens, int64_t count)
{
  char *text = NULL;
  K3_TRY(k3_text_decode(tokenizer, tokens, count, &text));
  printf("text: %s\n", text);
  free(text);
  return K3_OK;
}

/* Rank 0 reads the prompt; the others are told. *count may be 0 where a snapshot holds tokens. The caller frees *prompt. */
static K3Status share_prompt(Run *run, int64_t **prompt, int64_t *count)
{
  const RunOptions *options = &run->options;
  K3Comm *comm = run->comm;
  K3Status status = K3_OK;
  if (comm->rank == 0) {
    if (options->prompt_file) status = k3_prompt_read(options->prompt_file, prompt, count);
    else if (options->prompt_text) status = encode_prompt(options, prompt, count);
    else if (options->prompt) status = k3_prompt_parse(options->prompt, "--prompt", prompt, count);
    else if (options->context && !run->resume.from) status = k3_prompt_parse("0", "--prompt", prompt, count);
  }
  K3_TRY(k3_comm_agree(comm, status));
  K3_TRY(comm->broadcast(comm, count, 1, K3_ELEMENT_I64, 0));
  if (*count == 0) {
    if (!run->resume.from)
      status = k3_status_fail(K3_ERR_USAGE, __FILE__, __LINE__,
                              "a prompt is missing: %s is not there yet, so give --prompt 1,2,3 or --prompt-file F to begin with",
                              options->keep.proceed);
    return k3_comm_agree(comm, status);
  }
  if (comm->rank != 0 && !(*prompt = malloc((size_t)*count * sizeof **prompt)))
    status = k3_status_fail(K3_ERR_INPUT, __FILE__, __LINE__, "no memory for %lld token ids", (long long)*count);
  K3_TRY(k3_comm_agree(comm, status));
  K3_TRY(comm->broadcast(comm, *prompt, *count, K3_ELEMENT_I64, 0));
  return k3_comm_agree(comm, k3_decode_check_tokens(&run->source->config, *prompt, *count));
}

/* What is to be fed and decoded. */
static K3Status settle_tokens(Run *run)
{
  const RunOptions *options = &run->options;
  int64_t *prompt = NULL, count = 0;
  K3Status status = share_prompt(run, &prompt, &count);
  if (status == K3_OK)
    status = k3_comm_agree(run->comm, k3_resume_join(&run->resume, &options->keep, prompt, count, options->steps));
  free(prompt);
  K3_TRY(status);
  run->decode = (K3DecodeOptions){.prompt = run->resume.tokens + run->resume.fed,
                                  .prompt_count = run->resume.count - run->resume.fed,
                                  .steps = run->resume.steps,
                                  .logits = options->logits,
                                  .top = options->top,
                                  .snapshot_every = options->keep.every,
                                  .snapshot = save_snapshot};
  status = k3_decode_check_prompt(&run->source->config, k3_resume_position(&run->resume), &run->decode);
  if (status == K3_OK && options->logits == K3_LOGITS_TOP && options->top > run->source->config.vocab_size)
    status = k3_status_fail(K3_ERR_INPUT, __FILE__, __LINE__, "--logits top:%lld: the vocabulary has only %lld tokens",
                            (long long)options->top, (long long)run->source->config.vocab_size);
  if (status == K3_OK && run->comm->rank == 0)
    status = k3_resume_check_target(&run->resume, &options->keep, options->overwrite, options->model);
  return k3_comm_agree(run->comm, status);
}

static K3Status open_backend(Run *run)
{
  const RunOptions *options = &run->options;
  run->backend_options = k3_session_backend_options(&options->session, run->tuning);
  run->backend_options.capacity = k3_decode_capacity(k3_resume_position(&run->resume), &run->decode);
  run->backend_options.start = run->resume.from ? 0 : options->context; /* a snapshot brings its cache */
  if (run->resume.from && options->session.cache_type == K3_CACHE_TYPE_DEFAULT)
    run->backend_options.cache_type = k3_state_cache_type(run->resume.snapshot);
  K3_TRY(k3_session_open_backend(&options->session, run->comm, run->ranks, run->source, &run->plan,
                                 &run->backend_options, &run->backend));
  K3StateOwner owner = owner_of(run);
  K3Status status =
      run->comm->rank == 0 ? k3_resume_check_room(&run->resume, &owner, run->backend_options.capacity) : K3_OK;
  K3_TRY(k3_comm_agree(run->comm, status));
  if (!run->resume.from) return K3_OK;
  return k3_comm_agree(run->comm, k3_state_check_type(run->resume.snapshot, run->resume.from, run->backend->cache_type));
}

/* With --continue each run of the job has a part of its own, so that none is lost or written over. */
static K3Status name_output(Run *run)
{
  const RunOptions *options = &run->options;
  run->output = options->keep.proceed ? k3_resume_free_name(options->output) : strdup(options->output);
  if (!run->output) K3_FAIL(K3_ERR_INPUT, "no memory for the name of the run file");
  return K3_OK;
}

static K3Status create_output(Run *run)
{
  const RunOptions *options = &run->options;
  char start[32], plan[4096], kind[64] = "logits";
  K3_TRY(k3_session_start_time(start));
  if (options->session.slice_world)
    snprintf(kind, sizeof kind, "slice %d/%d", options->session.slice_rank, options->session.slice_world);
  if (k3_session_same_file(options->model, run->output))
    K3_FAIL(K3_ERR_INPUT, "%s: --output is the model itself; choose another file", run->output);
  k3_plan_describe(&run->plan, &run->source->config, &run->source->table, run->source->types, plan, sizeof plan);
  size_t used = strlen(plan);
  if (run->tuning)
    snprintf(plan + used, sizeof plan - used, "attention              as measured in %.200s (%s, %s)\n",
             options->session.tuning, run->tuning->tuning.device, run->tuning->start_time);
  int64_t positions = run->backend_options.capacity - 1, bytes[K3_MAX_WORLD][K3_STEP_PARTS];
  for (int r = 0; r < run->comm->world; r++)
    k3_plan_step_bytes(&run->plan, options->session.slice_world ? options->session.slice_rank : r, &run->source->config,
                       &run->source->table, run->source->types, positions, k3_cache_type_bytes(run->backend->cache_type), bytes[r]);
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
                    .prompt = run->resume.tokens,
                    .prompt_count = run->resume.count,
                    .first_context = run->resume.first_context,
                    .resumed_from = run->resume.from,
                    .resumed_position = run->resume.from ? k3_resume_position(&run->resume) : 0,
                    .first_step = run->resume.first_step,
                    .logits = run->decode.logits,
                    .top = run->decode.top,
                    .phase_names = k3_phase_names,
                    .phases = K3_PHASE_COUNT,
                    .step_bytes = bytes[0],
                    .step_bytes_at = positions,
                    .overwrite = options->overwrite};
  K3_TRY(k3_run_file_create(run->output, &info, &run->file));
  run->output_made = 1;
  if (run->resume.to && k3_session_same_file(run->resume.to, run->output)) /* under another spelling */
    K3_FAIL(K3_ERR_USAGE, "the snapshot and --output are the same file, %s: give them two names", run->output);
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
    unlink(run->output); /* no step yet: nothing worth keeping */
}

static void observe(void *context, int64_t fed, int64_t all, int64_t token)
{
  Run *run = context;
  (void)all;
  k3_progress_update(&run->bar, fed);
  if (token < 0) return;
  run->resume.tokens[run->resume.count++] = token;
  if (run->comm->rank != 0 || run->bar.shown) return; /* the bar has the line: printed when it ends */
  printf("%lld ", (long long)token);
  fflush(stdout);
}

/* Rank 0: closes the run file; the first failure stands. */
static K3Status close_output(Run *run, const K3DecodeResult *result, const char *ending, K3Status status)
{
  if (!run->file) return status;
  K3Status closed = k3_run_file_close(run->file, status == K3_OK ? ending : k3_status_message());
  run->file = NULL;
  if (result->steps > 0) run->output_made = 0; /* finished steps are worth keeping */
  if (closed != K3_OK) fprintf(stderr, "k3decode: %s\n", k3_status_message());
  return status == K3_OK ? closed : status;
}

static void print_result(const Run *run, const K3DecodeResult *result, const char *ending)
{
  const K3DecodeOptions *decode = &run->decode;
  printf("%s: %lld tokens", ending, (long long)result->steps);
  if (result->steps > 1)
    printf(", %.2f tokens/s (%.3f ms a step)%s", 1e3 * (double)(result->steps - 1) / result->decode_ms,
           result->decode_ms / (double)(result->steps - 1),
           run->options.session.slice_world ? " for one rank, collectives left out: times, not logits" : "");
  if (decode->steps == 0) printf(" decoded, %lld of the prompt read", (long long)result->fed);
  printf("\n");
  if (run->output && result->steps > 0) printf("run file: %s\n", run->output);
}

static K3Status decode(Run *run, int *signal)
{
  K3DecodeResult result;
  int64_t known = run->resume.count;
  k3_progress_start(&run->bar, "decoding", K3_PROGRESS_STEPS, run->decode.prompt_count + run->decode.steps - 1,
                    run->comm->rank == 0);
  atomic_store(&run->decoding, 1);
  K3Status status = k3_decode_run(run->backend, &run->source->config, &run->plan, run->ranks, &run->decode, run->file,
                                  observe, run, &result);
  int barred = run->bar.shown; /* the tokens wait for the end of the bar's line */
  k3_progress_finish(&run->bar);
  k3_interrupt_set_last_words(NULL, NULL);
  *signal = result.signal;
  char ending[96] = "done";
  if (result.signal)
    snprintf(ending, sizeof ending, "stopped by signal %d after %lld steps", result.signal, (long long)result.steps);
  int decoded = status == K3_OK;
  if (run->comm->rank == 0) {
    for (int64_t n = known; barred && n < run->resume.count; n++) printf("%lld ", (long long)run->resume.tokens[n]);
    if (result.steps) printf("\n");
    status = close_output(run, &result, ending, status); /* before the snapshot: a SIGKILL may follow soon */
  }
  if (decoded && run->resume.to) {
    K3Status saved = save_snapshot(run, result.fed);
    k3_interrupt_acknowledge();
    if (status == K3_OK) status = saved;
  }
  if (run->comm->rank != 0 || status != K3_OK) return status;
  print_result(run, &result, ending);
  if (run->resume.to)
    printf("snapshot: %s at position %lld\n", run->resume.to,
           (long long)(k3_resume_position(&run->resume) + result.fed));
  if (!run->options.tokenizer) return K3_OK;
  status = print_text(run->options.tokenizer, run->resume.tokens + known, run->resume.count - known);
  if (status != K3_OK) fprintf(stderr, "k3decode: %s\n", k3_status_message()); /* the run itself is whole */
  return status;
}

static void release(Run *run)
{
  k3_interrupt_set_last_words(NULL, NULL);
  if (run->file) k3_run_file_close(run->file, k3_status_message());
  if (run->output_made) unlink(run->output);
  if (run->backend) run->backend->close(run->backend);
  if (run->source) run->source->close(run->source);
  if (run->ranks && run->ranks != run->comm) run->ranks->close(run->ranks);
  k3_resume_close(&run->resume);
  free(run->output);
  k3_tuning_file_close(run->tuning);
  free(run->devices);
  free(run->command);
}

static K3Status stages(Run *run, int *signal)
{
  K3Status status = K3_OK;
  const K3SessionOptions *session = &run->options.session;
  if (session->slice_world)
    K3_TRY(k3_comm_agree(run->comm, k3_comm_open_local(session->slice_rank, session->slice_world, &run->ranks)));
  K3_TRY(k3_session_open_model(run->comm, run->options.model, &run->source));
  K3_TRY(k3_resume_open(run->comm, &run->options.keep, run->source, run->options.context, &run->resume));
  K3_TRY(k3_session_plan(session, session->cache_band, run->comm, run->ranks, run->source, &run->plan));
  K3_TRY(settle_tokens(run));
  if (k3_resume_is_done(&run->resume)) {
    if (run->comm->rank == 0)
      printf("done before: %s holds %lld decoded tokens, and --steps %lld asks for no more\n", run->resume.from,
             (long long)run->resume.first_step, (long long)run->options.steps);
    return K3_OK;
  }
  K3_TRY(k3_session_read_tuning(session, run->comm, &run->tuning));
  K3_TRY(open_backend(run));
  K3_TRY(k3_session_gather_devices(session, run->comm, run->backend, &run->devices));
  k3_interrupt_set_last_words(last_words, run);
  /* A new file is made before the load, so that a place that cannot be written is found at once; an old one is
   * replaced only when there is something to replace it with. */
  int makes = run->comm->rank == 0 && run->options.output;
  if (makes) status = name_output(run);
  int replaces = makes && run->output && access(run->output, F_OK) == 0;
  if (makes && status == K3_OK && !(replaces && run->options.overwrite)) status = create_output(run);
  K3_TRY(k3_comm_agree(run->comm, status));
  K3_TRY(k3_session_load(run->comm, run->backend));
  K3StateOwner owner = owner_of(run);
  K3_TRY(k3_resume_restore(&run->resume, &owner));
  if (run->resume.from && run->comm->rank == 0)
    printf("resumed from %s at position %lld\n", run->resume.from, (long long)k3_resume_position(&run->resume));
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
