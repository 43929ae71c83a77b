/* See session.h. Layer: commands. */
#include "commands/session.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#include "base/clock.h"
#include "commands/arguments.h"
#include "commands/progress.h"
#include "store/digest.h"

/* --- options ----------------------------------------------------------------------------------------- */

const char k3_session_usage[] =
    "  --backend auto|host|cuda\n"
    "  --seed N               of the synthetic cache (default 1)\n"
    "  --cache-band context|none  share the MLA cache by context (default), or keep all of it on every rank\n"
    "  --expert-grid GxB      expert groups x intermediate bands (default: chosen; G x B = ranks)\n"
    "  --activations int16|f32 (cuda) vectors that meet quantised weights: 16-bit integers with a scale per 32 values\n"
    "                          (default; integer products, mean KL below 1e-5), or float32 (slower; below 1e-9)\n"
    "  --cache f32|bf16|f16   (cuda) storage of the MLA cache (default f16; f32 with --activations f32)\n"
    "  --graph on|off         (cuda) a step as one captured graph (default), or launched kernel by kernel\n"
    "  --tuning TUNE.h5       (cuda) cut attention as k3decode tune measured it best on this device\n"
    "  --slice r/W            one process stands for rank r of W, collectives left out: times, not logits\n";

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
  if (strcmp(value, first) && strcmp(value, second))
    K3_FAIL(K3_ERR_USAGE, "%s %s: wanted %s or %s", option, value, first, second);
  *chosen = strcmp(value, second) == 0;
  return K3_OK;
}

static K3Status parse_cache_type(const char *value, K3CacheType *type)
{
  *type = strcmp(value, "f32") == 0    ? K3_CACHE_TYPE_F32
          : strcmp(value, "bf16") == 0 ? K3_CACHE_TYPE_BF16
          : strcmp(value, "f16") == 0  ? K3_CACHE_TYPE_F16
                                       : K3_CACHE_TYPE_DEFAULT;
  if (*type == K3_CACHE_TYPE_DEFAULT) K3_FAIL(K3_ERR_USAGE, "--cache %s: wanted f32, bf16 or f16", value);
  return K3_OK;
}

K3Status k3_session_parse(int letter, const char *value, K3SessionOptions *options)
{
  int none = 0;
  switch (letter) {
  case 'b':
    if (strcmp(value, "auto") && strcmp(value, "host") && strcmp(value, "cuda"))
      K3_FAIL(K3_ERR_USAGE, "--backend %s: wanted auto, host or cuda", value);
    options->backend = value;
    return K3_OK;
  case 's': return k3_parse_count(value, "--seed", 0, INT64_MAX, &options->seed);
  case 'e': return parse_pair(value, 'x', "--expert-grid", 1, &options->expert_groups, &options->expert_bands);
  case 'r':
    K3_TRY(parse_pair(value, '/', "--slice", 0, &options->slice_rank, &options->slice_world));
    if (options->slice_rank >= options->slice_world)
      K3_FAIL(K3_ERR_USAGE, "--slice %s: rank %d is not below the world of %d", value, options->slice_rank,
              options->slice_world);
    return K3_OK;
  case 'k':
    K3_TRY(parse_choice("--cache-band", value, "context", "none", &none));
    options->cache_band = none ? K3_CACHE_NONE : K3_CACHE_CONTEXT;
    return K3_OK;
  case 'a': return parse_choice("--activations", value, "int16", "f32", &options->activations_f32);
  case 'g': return parse_choice("--graph", value, "off", "on", &options->graph);
  case 't': return parse_cache_type(value, &options->cache_type);
  case 'u': options->tuning = value; return K3_OK;
  default: K3_FAIL(K3_ERR_USAGE, "unknown option: see --help");
  }
}

K3Status k3_session_check(const K3SessionOptions *options, const K3Comm *comm)
{
  if (options->slice_world && comm->world > 1)
    K3_FAIL(K3_ERR_USAGE, "--slice runs in one process, not under mpirun -n %d", comm->world);
  int world = options->slice_world ? options->slice_world : comm->world;
  if (options->expert_groups && options->expert_groups * options->expert_bands != world)
    K3_FAIL(K3_ERR_USAGE, "--expert-grid %dx%d: groups x bands must be the number of ranks, %d", options->expert_groups,
            options->expert_bands, world);
  return K3_OK;
}

K3Status k3_session_parse_attention(const char *option, const char *value, K3AttentionArm *arm)
{
  for (int i = 0; i < K3_ATTENTION_COUNT; i++)
    if (strcmp(value, k3_attention_arm_names[i]) == 0) {
      *arm = (K3AttentionArm)i;
      return K3_OK;
    }
  K3_FAIL(K3_ERR_USAGE, "%s %s: wanted split, unsplit, core or tensor", option, value);
}

K3Status k3_session_read_tuning(const K3SessionOptions *options, K3Comm *comm, K3TuningFile **tuning)
{
  *tuning = NULL;
  return k3_comm_agree(comm, options->tuning ? k3_tuning_file_read(options->tuning, tuning) : K3_OK);
}

K3BackendOptions k3_session_backend_options(const K3SessionOptions *options, const K3TuningFile *tuning)
{
  return (K3BackendOptions){.start_seed = (uint64_t)options->seed,
                            .slice_rank = options->slice_rank,
                            .slice_world = options->slice_world,
                            .attention = options->attention,
                            .graph = options->graph,
                            .activations_f32 = options->activations_f32,
                            .cache_type = options->cache_type,
                            .tuning = tuning ? &tuning->tuning : NULL,
                            .tuning_path = options->tuning};
}

char *k3_session_join(int argc, char **argv)
{
  size_t length = strlen("k3decode") + 1;
  for (int i = 0; i < argc; i++) length += strlen(argv[i]) + 1;
  char *text = malloc(length);
  if (!text) return NULL;
  size_t used = (size_t)snprintf(text, length, "k3decode");
  for (int i = 0; i < argc; i++) used += (size_t)snprintf(text + used, length - used, " %s", argv[i]);
  return text;
}

K3Status k3_session_same_words(K3Comm *comm, int count, char **words)
{
  char *mine = k3_session_join(count, words), *first = NULL;
  int64_t length = mine ? (int64_t)strlen(mine) + 1 : 0;
  K3Status status = k3_comm_agree(
      comm, mine ? K3_OK : k3_status_fail(K3_ERR_INPUT, __FILE__, __LINE__, "no memory for the command line"));
  if (status == K3_OK) status = comm->broadcast(comm, &length, 1, K3_ELEMENT_I64, 0);
  if (status == K3_OK) {
    first = calloc((size_t)length, 1);
    if (first && comm->rank == 0) memcpy(first, mine, (size_t)length);
    status = k3_comm_agree(
        comm, first ? K3_OK : k3_status_fail(K3_ERR_INPUT, __FILE__, __LINE__, "no memory for the command line"));
  }
  if (status == K3_OK) status = comm->broadcast(comm, first, length, K3_ELEMENT_BYTE, 0);
  if (status == K3_OK) {
    if (strcmp(first, mine) != 0)
      status = k3_status_fail(K3_ERR_USAGE, __FILE__, __LINE__,
                              "started with '%.300s' here and with '%.300s' on rank 0: give all ranks the same options",
                              mine, first);
    status = k3_comm_agree(comm, status);
  }
  free(first);
  free(mine);
  return status;
}

/* --- opening ------------------------------------------------------------------------------------------ */

K3Status k3_session_start_time(char text[32])
{
  time_t now = time(NULL);
  struct tm utc;
  if (!gmtime_r(&now, &utc) || strftime(text, 32, "%Y-%m-%dT%H:%M:%SZ", &utc) == 0)
    K3_FAIL(K3_ERR_INPUT, "the clock gives no date");
  return K3_OK;
}

int k3_session_same_file(const char *a, const char *b)
{
  struct stat one, two;
  return stat(a, &one) == 0 && stat(b, &two) == 0 && one.st_dev == two.st_dev && one.st_ino == two.st_ino;
}

static K3Status digest_of_program(uint64_t *digest)
{
  static const char path[] = "/proc/self/exe";
  static unsigned char piece[1 << 16];
  FILE *file = fopen(path, "rb");
  if (!file)
    K3_FAIL(K3_ERR_INPUT, "%s: cannot open this program's own file to compare it between the ranks: %s", path,
            strerror(errno));
  *digest = K3_DIGEST_START;
  for (size_t bytes; (bytes = fread(piece, 1, sizeof piece, file)) > 0;)
    *digest = k3_digest_bytes(*digest, piece, bytes);
  int failed = ferror(file);
  fclose(file);
  if (failed) K3_FAIL(K3_ERR_INPUT, "%s: cannot read this program's own file to compare it between the ranks", path);
  return K3_OK;
}

static K3Status check_program(K3Comm *comm)
{
  if (comm->world == 1) return K3_OK;
  uint64_t digest = 0;
  K3_TRY(k3_comm_agree(comm, digest_of_program(&digest)));
  int64_t first = (int64_t)digest;
  K3_TRY(comm->broadcast(comm, &first, 1, K3_ELEMENT_I64, 0));
  K3Status status = K3_OK;
  if (first != (int64_t)digest)
    status = k3_status_fail(
        K3_ERR_INPUT, __FILE__, __LINE__,
        "this is not the k3decode that rank 0 runs (digest %016llx here, %016llx there): %s", (unsigned long long)digest,
        (unsigned long long)first,
        comm->local_world == comm->world ? "was the file replaced while the ranks were starting? Run the command again"
                                         : "install the same build on all hosts");
  return k3_comm_agree(comm, status);
}

static K3Status check_model(K3Comm *comm, const K3Source *source)
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

K3Status k3_session_open_model(K3Comm *comm, const char *model, K3Source **source)
{
  K3_TRY(check_program(comm));
  K3_TRY(k3_comm_agree(comm, k3_source_open(model, source)));
  return check_model(comm, *source);
}

K3Status k3_session_plan(const K3SessionOptions *options, K3CacheBand cache_band, K3Comm *comm, const K3Comm *ranks,
                         const K3Source *source, K3Plan *plan)
{
  K3PlanOptions wanted = {.expert_groups = options->expert_groups, .cache_band = cache_band};
  return k3_comm_agree(comm, k3_plan_make(&source->config, &source->table, source->types, ranks->world, &wanted, plan));
}

K3Status k3_session_open_backend(const K3SessionOptions *options, K3Comm *comm, K3Comm *ranks, K3Source *source,
                                 const K3Plan *plan, const K3BackendOptions *backend_options, K3Backend **backend)
{
  int cuda = strcmp(options->backend, "cuda") == 0 || (strcmp(options->backend, "auto") == 0 && k3_backend_has_cuda());
  K3Status status = K3_OK;
  if (backend_options->tuning && !cuda)
    status =
        k3_status_fail(K3_ERR_INPUT, __FILE__, __LINE__,
                       "%s was tuned on another device: %s, and this run is on the host backend; leave --tuning out",
                       options->tuning, backend_options->tuning->device);
  if (status == K3_OK)
    status = (cuda ? k3_backend_open_cuda : k3_backend_open_host)(source, plan, ranks, backend_options, backend);
  K3_TRY(k3_comm_agree(comm, status));
  int64_t needed = 0, available = 0;
  status = (*backend)->memory(*backend, &needed, &available);
  if (status == K3_OK && available >= 0 && needed > available)
    status = k3_status_fail(
        K3_ERR_INPUT, __FILE__, __LINE__,
        "%s needs %.2f GB on each of %d ranks and %.2f GB are free here; use at least %lld ranks of this "
        "size, a smaller --context, or a smaller storage type",
        source->origin, (double)needed * 1e-9, plan->world, (double)available * 1e-9,
        (long long)((needed * plan->world + available - 1) / (available > 0 ? available : 1)));
  return k3_comm_agree(comm, status);
}

K3Status k3_session_gather_devices(const K3SessionOptions *options, K3Comm *comm, K3Backend *backend, char **devices)
{
  enum { LINE = 512 };
  char line[LINE] = "", device[LINE / 2] = "";
  K3Status status = backend->describe(backend, device, sizeof device);
  if (options->slice_world)
    snprintf(line, LINE, "slice %d/%d  %.200s  %s\n", options->slice_rank, options->slice_world, comm->host, device);
  else snprintf(line, LINE, "rank %d  %.200s  %s\n", comm->rank, comm->host, device);
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
    *devices = lines;
    lines = NULL;
  }
  free(lines);
  free(piece);
  return status;
}

K3Status k3_session_load(K3Comm *comm, K3Backend *backend)
{
  K3ProgressBar bar;
  const char *verbose = getenv("K3_VERBOSE");
  double start_ms = k3_clock_ms();
  k3_progress_start(&bar, "loading", K3_PROGRESS_BYTES, 0, comm->rank == 0);
  K3Status status = backend->load(backend, k3_progress_callback, &bar);
  k3_progress_finish(&bar);
  double seconds = 1e-3 * (k3_clock_ms() - start_ms);
  if (status == K3_OK && verbose && strcmp(verbose, "1") == 0)
    fprintf(stderr, "rank %d: loaded %.3f GB in %.3f s, %.3f GB/s\n", comm->rank, 1e-9 * (double)bar.done, seconds,
            seconds > 0 ? 1e-9 * (double)bar.done / seconds : 0.0);
  return k3_comm_agree(comm, status);
}
