/* `k3decode run`: the main job, under mpirun or srun. Layer: commands.
 * Opens the model on every rank, plans, loads, decodes, writes the run file. Ranks agree on failure at each
 * stage, so that one rank's message ends all. */
#include <getopt.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "commands/commands.h"
#include "commands/numbers.h"
#include "commands/progress.h"
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
  "  --backend auto|host|cuda\n"
  "  --context N            begin with a synthetic cache of N positions: for measuring\n"
  "  --seed N               of that cache (default 1)\n"
  "  --cache-band context|none  share the MLA cache by context (default), or keep all of it on every rank\n"
  "  --expert-grid GxB      expert groups x intermediate bands (default: chosen; G x B = ranks)\n"
  "  --activations int8|f32  (cuda) int8 codes where the weights are quantised (default), or float32 throughout\n"
  "  --cache f32|bf16|f16   (cuda) storage of the MLA cache (default f16; f32 with --activations f32)\n"
  "  --graph on|off         (cuda) a step as one captured graph (default), or launched kernel by kernel\n"
  "  --slice r/W            one process stands for rank r of W, collectives left out: times, not logits\n"
  "  --help\n";

typedef struct {
  const char *model, *prompt, *prompt_file, *output, *backend;
  int64_t steps, context, seed;
  int overwrite, expert_groups, expert_bands, slice_rank, slice_world;
  K3LogitsKind logits;
  int64_t top;
  K3CacheBand cache_band;
  int graph, activations_f32;
  K3CacheType cache_type;
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

/* "AxB" or "A/B". */
static K3Status parse_pair(const char *text, char between, const char *option, int low, int *first, int *second)
{
  char *end;
  long a = strtol(text, &end, 10), b = 0;
  int good = end != text && *end == between;
  const char *rest = good ? end + 1 : text;
  if (good) b = strtol(rest, &end, 10);
  if (!good || end == rest || *end != '\0' || a < low || a > K3_MAX_WORLD || b < 1 || b > K3_MAX_WORLD)
    K3_FAIL(K3_ERR_USAGE, "%s %s: wanted two whole numbers like %s", option, text, between == 'x' ? "2x4" : "0/8");
  *first = (int)a;
  *second = (int)b;
  return K3_OK;
}

/* *chosen = 0 for `first`, 1 for `second`. */
static K3Status parse_choice(const char *option, const char *value, const char *first, const char *second, int *chosen)
{
  if (strcmp(value, first) && strcmp(value, second)) K3_FAIL(K3_ERR_USAGE, "%s %s: wanted %s or %s", option, value, first, second);
  *chosen = strcmp(value, second) == 0;
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
  case 'b':
    if (strcmp(value, "auto") && strcmp(value, "host") && strcmp(value, "cuda"))
      K3_FAIL(K3_ERR_USAGE, "--backend %s: wanted auto, host or cuda", value);
    options->backend = value;
    return K3_OK;
  case 'c': return k3_parse_count(value, "--context", 1, INT32_MAX, &options->context);
  case 's': return k3_parse_count(value, "--seed", 0, INT64_MAX, &options->seed);
  case 'e': return parse_pair(value, 'x', "--expert-grid", 1, &options->expert_groups, &options->expert_bands);
  case 'r':
    K3_TRY(parse_pair(value, '/', "--slice", 0, &options->slice_rank, &options->slice_world));
    if (options->slice_rank >= options->slice_world)
      K3_FAIL(K3_ERR_USAGE, "--slice %s: rank %d is not below the world of %d", value, options->slice_rank, options->slice_world);
    return K3_OK;
  case 'k': {
    int none = 0;
    K3_TRY(parse_choice("--cache-band", value, "context", "none", &none));
    options->cache_band = none ? K3_CACHE_NONE : K3_CACHE_CONTEXT;
    return K3_OK;
  }
  case 'a': return parse_choice("--activations", value, "int8", "f32", &options->activations_f32);
  case 'g': return parse_choice("--graph", value, "off", "on", &options->graph);
  case 't':
    options->cache_type = strcmp(value, "f32") == 0    ? K3_CACHE_TYPE_F32
                          : strcmp(value, "bf16") == 0 ? K3_CACHE_TYPE_BF16
                          : strcmp(value, "f16") == 0  ? K3_CACHE_TYPE_F16
                                                       : K3_CACHE_TYPE_DEFAULT;
    if (options->cache_type == K3_CACHE_TYPE_DEFAULT) K3_FAIL(K3_ERR_USAGE, "--cache %s: wanted f32, bf16 or f16", value);
    return K3_OK;
  default: K3_FAIL(K3_ERR_USAGE, "unknown option or missing value: see k3decode run --help");
  }
}

static K3Status check_options(const Run *run)
{
  const RunOptions *options = &run->options;
  if (options->prompt && options->prompt_file)
    K3_FAIL(K3_ERR_USAGE, "--prompt and --prompt-file exclude each other");
  if (!options->prompt && !options->prompt_file && !options->context)
    K3_FAIL(K3_ERR_USAGE, "a prompt is missing: give --prompt 1,2,3 or --prompt-file F (with --context N it may be left out: token 0)");
  if (options->slice_world && run->comm->world > 1)
    K3_FAIL(K3_ERR_USAGE, "--slice runs in one process, not under mpirun -n %d", run->comm->world);
  int world = options->slice_world ? options->slice_world : run->comm->world;
  if (options->expert_groups && options->expert_groups * options->expert_bands != world)
    K3_FAIL(K3_ERR_USAGE, "--expert-grid %dx%d: groups x bands must be the number of ranks, %d", options->expert_groups,
            options->expert_bands, world);
  return K3_OK;
}

static K3Status parse_options(int argc, char **argv, Run *run, int *help)
{
  static const struct option names[] = {
    {"prompt", required_argument, 0, 'p'},   {"prompt-file", required_argument, 0, 'f'},
    {"steps", required_argument, 0, 'n'},    {"output", required_argument, 0, 'o'},
    {"overwrite", no_argument, 0, 'w'},      {"logits", required_argument, 0, 'l'},
    {"backend", required_argument, 0, 'b'},  {"context", required_argument, 0, 'c'},
    {"seed", required_argument, 0, 's'},     {"cache-band", required_argument, 0, 'k'},
    {"expert-grid", required_argument, 0, 'e'}, {"slice", required_argument, 0, 'r'},
    {"activations", required_argument, 0, 'a'}, {"cache", required_argument, 0, 't'},
    {"graph", required_argument, 0, 'g'},
    {"help", no_argument, 0, 'h'},           {0, 0, 0, 0}};
  RunOptions *options = &run->options;
  *options = (RunOptions){.steps = 16, .seed = 1, .backend = "auto", .graph = 1};
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

/* All ranks must see one model: a file replaced while the ranks start, or different on another host, would
 * decode nonsense. */
static K3Status same_model(K3Comm *comm, const K3Source *source)
{
  int64_t first = (int64_t)source->digest;
  K3_TRY(comm->broadcast(comm, &first, 1, K3_ELEMENT_I64, 0));
  K3Status status = K3_OK;
  if (first != (int64_t)source->digest)
    status = k3_status_fail(K3_ERR_INPUT, __FILE__, __LINE__,
                            "%s is not the model that rank 0 opened (digest %016llx here, %016llx there): was the file "
                            "replaced, or does this host hold another copy? Give all ranks the same file",
                            source->origin, (unsigned long long)source->digest, (unsigned long long)first);
  return k3_comm_agree(comm, status);
}

static K3Status make_plan(Run *run)
{
  const RunOptions *options = &run->options;
  K3PlanOptions plan = {.expert_groups = options->expert_groups, .cache_band = options->cache_band};
  K3Status status = k3_plan_make(&run->source->config, &run->source->table, run->source->types, run->ranks->world,
                                 &plan, &run->plan);
  return k3_comm_agree(run->comm, status);
}

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
  run->backend_options = (K3BackendOptions){.capacity = k3_decode_capacity(options->context, &run->decode),
                                            .start = options->context,
                                            .start_seed = (uint64_t)options->seed,
                                            .slice_rank = options->slice_rank,
                                            .slice_world = options->slice_world,
                                            .graph = options->graph,
                                            .activations_f32 = options->activations_f32,
                                            .cache_type = options->cache_type};
  int cuda = strcmp(options->backend, "cuda") == 0 || (strcmp(options->backend, "auto") == 0 && k3_backend_has_cuda());
  K3Status status = (cuda ? k3_backend_open_cuda : k3_backend_open_host)(run->source, &run->plan, run->ranks,
                                                                         &run->backend_options, &run->backend);
  K3_TRY(k3_comm_agree(run->comm, status));
  int64_t needed = 0, available = 0;
  status = run->backend->memory(run->backend, &needed, &available);
  if (status == K3_OK && available >= 0 && needed > available)
    status = k3_status_fail(K3_ERR_INPUT, __FILE__, __LINE__,
                            "%s needs %.2f GB on each of %d ranks and %.2f GB are free here; use at least %lld ranks of this "
                            "size, a smaller --context, or a smaller storage type",
                            run->source->origin, (double)needed * 1e-9, run->plan.world, (double)available * 1e-9,
                            (long long)((needed * run->plan.world + available - 1) / (available > 0 ? available : 1)));
  return k3_comm_agree(run->comm, status);
}

/* A line of each rank's device, on rank 0. */
static K3Status gather_devices(Run *run)
{
  enum { LINE = 512 };
  K3Comm *comm = run->comm;
  char line[LINE] = "", device[LINE / 2] = "";
  K3Status status = run->backend->describe(run->backend, device, sizeof device);
  if (run->options.slice_world)
    snprintf(line, LINE, "slice %d/%d  %.200s  %s\n", run->options.slice_rank, run->options.slice_world, comm->host, device);
  else
    snprintf(line, LINE, "rank %d  %.200s  %s\n", comm->rank, comm->host, device);
  int64_t *piece = calloc(2 * (size_t)comm->world, sizeof *piece);
  char *lines = comm->rank == 0 ? calloc((size_t)comm->world + 1, LINE) : NULL;
  if (status == K3_OK && (!piece || (comm->rank == 0 && !lines)))
    status = k3_status_fail(K3_ERR_INPUT, __FILE__, __LINE__, "no memory for the list of devices");
  status = k3_comm_agree(comm, status);
  for (int r = 0; status == K3_OK && r < comm->world; r++) {
    piece[r] = LINE;
    piece[comm->world + r] = (int64_t)r * LINE;
  }
  if (status == K3_OK)
    status = comm->gather(comm, line, LINE, lines, (K3Pieces){piece, piece + comm->world}, K3_ELEMENT_BYTE);
  if (status == K3_OK && comm->rank == 0) { /* close the gaps between the lines */
    size_t used = strlen(lines);
    for (int r = 1; r < comm->world; r++) {
      size_t length = strlen(lines + (size_t)r * LINE);
      memmove(lines + used, lines + (size_t)r * LINE, length);
      used += length;
    }
    lines[used] = '\0';
    run->devices = lines;
    lines = NULL;
  }
  free(lines);
  free(piece);
  return status;
}

static int same_file(const char *a, const char *b)
{
  struct stat one, two;
  return stat(a, &one) == 0 && stat(b, &two) == 0 && one.st_dev == two.st_dev && one.st_ino == two.st_ino;
}

static K3Status create_output(Run *run)
{
  const RunOptions *options = &run->options;
  char start[32], plan[4096], kind[64] = "logits";
  time_t now = time(NULL);
  struct tm utc;
  if (!gmtime_r(&now, &utc) || strftime(start, sizeof start, "%Y-%m-%dT%H:%M:%SZ", &utc) == 0)
    K3_FAIL(K3_ERR_INPUT, "the clock gives no date");
  if (options->slice_world) snprintf(kind, sizeof kind, "slice %d/%d", options->slice_rank, options->slice_world);
  if (same_file(options->model, options->output))
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

static K3Status load(Run *run)
{
  K3ProgressBar bar;
  k3_progress_start(&bar, "loading", K3_PROGRESS_BYTES, 0, run->comm->rank == 0);
  K3Status status = run->backend->load(run->backend, k3_progress_callback, &bar);
  k3_progress_finish(&bar);
  return k3_comm_agree(run->comm, status);
}

typedef struct {
  K3ProgressBar bar;
  int printing; /* rank 0 */
} Watch;

static void observe(void *context, int64_t fed, int64_t all, int64_t token)
{
  Watch *watch = context;
  (void)all;
  k3_progress_update(&watch->bar, fed);
  if (!watch->printing || token < 0 || watch->bar.shown) return;
  printf("%lld ", (long long)token);
  fflush(stdout);
}

static K3Status decode(Run *run, int *signal)
{
  Watch watch = {.printing = run->comm->rank == 0};
  K3DecodeResult result;
  k3_progress_start(&watch.bar, "decoding", K3_PROGRESS_STEPS, run->decode.prompt_count + run->decode.steps - 1,
                    run->comm->rank == 0);
  atomic_store(&run->decoding, 1);
  K3Status status = k3_decode_run(run->backend, &run->source->config, &run->plan, run->ranks, &run->decode, run->file,
                                  observe, &watch, &result);
  k3_progress_finish(&watch.bar);
  k3_interrupt_set_last_words(NULL, NULL);
  *signal = result.signal;
  if (run->comm->rank != 0) return status;
  if (!watch.bar.shown && result.steps) printf("\n");
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
           run->options.slice_world ? " for one rank, collectives left out: times, not logits" : "");
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

static char *join(int argc, char **argv)
{
  size_t length = strlen("k3decode") + 1;
  for (int i = 0; i < argc; i++) length += strlen(argv[i]) + 1;
  char *text = malloc(length);
  if (!text) return NULL;
  size_t used = (size_t)snprintf(text, length, "k3decode");
  for (int i = 0; i < argc; i++) used += (size_t)snprintf(text + used, length - used, " %s", argv[i]);
  return text;
}

static K3Status stages(Run *run, int *signal)
{
  K3Status status = K3_OK;
  if (run->options.slice_world)
    K3_TRY(k3_comm_agree(run->comm, k3_comm_open_local(run->options.slice_rank, run->options.slice_world, &run->ranks)));
  K3_TRY(k3_comm_agree(run->comm, k3_source_open(run->options.model, &run->source)));
  K3_TRY(same_model(run->comm, run->source));
  K3_TRY(make_plan(run));
  K3_TRY(share_prompt(run));
  K3_TRY(open_backend(run));
  K3_TRY(gather_devices(run));
  k3_interrupt_set_last_words(last_words, run);
  if (run->comm->rank == 0 && run->options.output) status = create_output(run);
  K3_TRY(k3_comm_agree(run->comm, status));
  K3_TRY(load(run));
  return decode(run, signal);
}

K3Status k3_command_run(int argc, char **argv, K3Comm *comm, int *signal)
{
  Run run = {.comm = comm, .ranks = comm};
  int help = 0;
  K3Status status = parse_options(argc, argv, &run, &help);
  if (status == K3_OK && !help && !(run.command = join(argc, argv)))
    status = k3_status_fail(K3_ERR_INPUT, __FILE__, __LINE__, "no memory for the command line");
  status = k3_comm_agree(comm, status);
  if (status == K3_OK && help && comm->rank == 0) fputs(usage, stdout);
  if (status == K3_OK && !help) status = stages(&run, signal);
  release(&run);
  return status;
}
