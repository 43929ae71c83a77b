/* `k3decode info FILE`: what is in a model or run file, in words and small tables. Layer: commands.
 * Run files: info_run.c, info_follow.c. Sweep and tuning files: sweep_table.c, tune_table.c. */
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "commands/arguments.h"
#include "commands/commands.h"
#include "commands/info_run.h"
#include "commands/info_snapshot.h"
#include "commands/sweep_table.h"
#include "commands/tune_table.h"
#include "plan/attention.h"
#include "plan/plan.h"
#include "store/run_reader.h"
#include "store/source.h"

typedef struct {
  int check, plan, follow, text;
  const char *tokenizer; /* of --text */
  int64_t patience; /* of --follow, seconds */
  int ranks;
  int64_t context, multiprocessors, memory_gb; /* of --plan; context 0: no attention plan */
} Options;

static const char usage[] =
    "usage: k3decode info FILE [options]\n"
    "       k3decode info --follow RUN.h5\n"
    "       k3decode info --plan --ranks N [--context N] MODEL\n"
    "\n"
    "What is in a run file (also one still being written, or left by a crash), a model, sweep or tuning file.\n"
    "\n"
    "  --follow           run: print each step as it is written, until the run ends\n"
    "  --patience S       with --follow: seconds without a step after which the writer is looked for (default 30); a run whose\n"
    "                     writer is gone ends with exit status 3\n"
    "  --text --tokenizer DIR  run: also prompt and decoded tokens as text; DIR holds a checkpoint's tiktoken.model\n"
    "  --check            model: read every tensor and name the first value that may not be (NaN, infinity)\n"
    "  --plan --ranks N   model, or synth:RECIPE: what each of N ranks would hold\n"
    "  --context N        with --plan: how attention over N cached positions is cut, for both ways to keep the cache\n"
    "  --multiprocessors N  of the GPU that it is cut for (default 132: H200)\n"
    "  --memory GB        of the GPU that it is to fit (default 141: H200)\n"
    "  --help\n";

/* "1.23 GB" */
static const char *bytes_text(int64_t bytes, char text[32])
{
  static const char *const unit[] = {"B", "kB", "MB", "GB", "TB", "PB"};
  double value = (double)bytes;
  int i = 0;
  while (value >= 1000 && i < 5) value /= 1000, i++;
  snprintf(text, 32, i ? "%.2f %s" : "%.0f %s", value, unit[i]);
  return text;
}

/* ---------------------------------------------------------------- model files */

static void print_config(const K3Config *config)
{
  printf("\nconfig\n");
  for (int i = 0; i < k3_config_field_count; i++)
    printf("  %-24s %.10g\n", k3_config_fields[i].name, k3_config_get(config, &k3_config_fields[i]));
  printf("  %-24s ", "layers (K KDA, M MLA)");
  for (int64_t i = 0; i < config->num_layers; i++) putchar(config->layer_types[i] == K3_LAYER_MLA ? 'M' : 'K');
  printf("\n  %-24s ", "FFN (d dense, e experts)");
  for (int64_t i = 0; i < config->num_layers; i++) putchar(k3_config_is_dense(config, i) ? 'd' : 'e');
  printf("\n");
}

static void print_tensors(const K3Source *source)
{
  int64_t count[K3_TYPE_COUNT] = {0}, elements[K3_TYPE_COUNT] = {0}, bytes[K3_TYPE_COUNT] = {0};
  int64_t all_elements = 0, all_bytes = 0;
  char text[32];
  for (int64_t i = 0; i < source->table.count; i++) {
    K3Type type = source->types[i];
    int64_t n = k3_tensor_elements(&source->table.specs[i]);
    count[type]++;
    elements[type] += n;
    bytes[type] += k3_format_bytes(type, n);
  }
  printf("\n%-8s %10s %16s %12s\n", "type", "tensors", "parameters", "size");
  for (int type = 0; type < K3_TYPE_COUNT; type++) {
    all_elements += elements[type];
    all_bytes += bytes[type];
    if (count[type] > 0)
      printf("%-8s %10lld %16lld %12s\n", k3_format((K3Type)type)->name, (long long)count[type],
             (long long)elements[type], bytes_text(bytes[type], text));
  }
  printf("%-8s %10lld %16lld %12s\n", "all", (long long)source->table.count, (long long)all_elements,
         bytes_text(all_bytes, text));
}

static K3Status print_plan(const K3Source *source, int ranks)
{
  K3Plan plan;
  K3PlanOptions options = {0};
  K3_TRY(k3_plan_make(&source->config, &source->table, source->types, ranks, &options, &plan));
  printf("\nplan for %d rank%s: experts in %d group%s x %d band%s (busiest rank %.2f of an even share)\n", ranks,
         ranks == 1 ? "" : "s", plan.expert_groups, plan.expert_groups == 1 ? "" : "s", plan.expert_bands,
         plan.expert_bands == 1 ? "" : "s", plan.expert_load);
  printf("cache: %s\n", plan.cache_band == K3_CACHE_CONTEXT ? "position pages dealt round-robin to the ranks"
                                                            : "all positions on every rank");
  printf("\n%4s %12s %10s %10s %14s %14s %16s\n", "rank", "weights", "KDA heads", "MLA heads", "experts",
         "intermediate", "vocabulary");
  int64_t least = INT64_MAX, most = 0, sum = 0;
  for (int rank = 0; rank < ranks; rank++) {
    char text[32], experts[40], band[40], rows[40];
    int64_t bytes = k3_plan_weight_bytes(&plan, rank, &source->table, source->types);
    K3Range kda = k3_plan_range(&plan, rank, K3_SHARE_KDA_HEADS), mla = k3_plan_range(&plan, rank, K3_SHARE_MLA_HEADS);
    K3Range expert = k3_plan_experts(&plan, rank), inner = k3_plan_range(&plan, rank, K3_SHARE_EXPERTS);
    K3Range vocabulary = k3_plan_range(&plan, rank, K3_SHARE_VOCAB);
    snprintf(experts, sizeof experts, "%lld-%lld", (long long)expert.begin, (long long)expert.end - 1);
    snprintf(band, sizeof band, "%lld-%lld", (long long)inner.begin, (long long)inner.end - 1);
    snprintf(rows, sizeof rows, "%lld-%lld", (long long)vocabulary.begin, (long long)vocabulary.end - 1);
    printf("%4d %12s %10lld %10lld %14s %14s %16s\n", rank, bytes_text(bytes, text),
           (long long)(kda.end - kda.begin), (long long)(mla.end - mla.begin), experts, band, rows);
    least = bytes < least ? bytes : least;
    most = bytes > most ? bytes : most;
    sum += bytes;
  }
  char text[32];
  printf("\nimbalance: the largest rank holds %s, %.2f %% over the mean, %.2f %% over the smallest\n",
         bytes_text(most, text), 100 * ((double)most * ranks / (double)sum - 1),
         100 * ((double)most / (double)least - 1));
  return K3_OK;
}

/* One line: a kernel's plan for rank 0, which holds most rows. */
static K3Status print_attention_row(const K3Source *source, const K3Plan *plan, const Options *options,
                                    K3AttentionKernel kernel)
{
  const K3Config *c = &source->config;
  int banded = plan->world > 1 && plan->cache_band == K3_CACHE_CONTEXT;
  K3Range own = k3_plan_range(plan, 0, K3_SHARE_MLA_HEADS);
  K3AttentionShape shape;
  K3AttentionPlan cut;
  int64_t rows = k3_plan_cache_rows(plan, 0, options->context);
  k3_attention_kernel_shape(kernel, banded ? c->num_heads : own.end - own.begin, c->kv_lora_rank, &shape);
  shape.multiprocessors = options->multiprocessors;
  shape.resident_blocks = k3_attention_resident_guess(kernel, c->kv_lora_rank, k3_config_cache_width(c));
  shape.rows = k3_attention_capacity(rows, k3_plan_cache_rows(plan, 0, c->max_context));
  K3_TRY(k3_attention_plan(&shape, &cut));
  char text[32], passes[40];
  snprintf(passes, sizeof passes, "%lld x %lld", (long long)cut.passes, (long long)cut.heads_per_pass);
  printf("%-8s %-7s %6lld %9lld %10lld %5lld %7lld %10s %7lld %7lld %9lld %12s\n",
         plan->cache_band == K3_CACHE_CONTEXT ? "context" : "none",
         kernel == K3_ATTENTION_KERNEL_TENSOR ? "tensor" : "core", (long long)cut.heads, (long long)rows,
         (long long)cut.rows, (long long)cut.tile_rows, (long long)cut.slices, passes, (long long)cut.blocks,
         (long long)cut.busy_blocks, (long long)shape.resident_blocks,
         bytes_text((cut.acc_floats + cut.ml_floats) * 4, text));
  return K3_OK;
}

/* Weights and cache of the rank that holds most, for each cache band, against the GPU's memory. */
static K3Status print_memory(const K3Source *source, const Options *options)
{
  static const K3CacheBand bands[] = {K3_CACHE_CONTEXT, K3_CACHE_NONE};
  const K3Config *c = &source->config;
  printf("\nmemory of the fullest rank at %lld positions, cache in f16 (twice that in f32), %lld GB a GPU\n",
         (long long)options->context, (long long)options->memory_gb);
  printf("\n%-8s %9s %12s %12s %12s  %s\n", "band", "rows", "weights", "cache", "together", "");
  for (int b = 0; b < 2; b++) {
    K3Plan plan;
    K3PlanOptions wanted = {.cache_band = bands[b]};
    K3_TRY(k3_plan_make(c, &source->table, source->types, options->ranks, &wanted, &plan));
    int64_t most = 0, weights = 0, cache = 0;
    for (int rank = 0; rank < options->ranks; rank++) {
      int64_t held = k3_plan_weight_bytes(&plan, rank, &source->table, source->types);
      int64_t rows = k3_plan_cache_rows(&plan, rank, options->context);
      int64_t kept = rows * k3_config_cache_width(c) * 2 * k3_config_count_layers(c, K3_LAYER_MLA);
      if (held + kept > most) most = held + kept, weights = held, cache = kept;
    }
    char text[3][32];
    printf("%-8s %9lld %12s %12s %12s  %s\n", bands[b] == K3_CACHE_CONTEXT ? "context" : "none",
           (long long)k3_plan_cache_rows(&plan, 0, options->context), bytes_text(weights, text[0]),
           bytes_text(cache, text[1]), bytes_text(most, text[2]),
           most <= options->memory_gb * 1000000000 ? "fits" : "does not fit");
  }
  return K3_OK;
}

/* How attention over options->context positions is cut, for each cache band and kernel. */
static K3Status print_attention(const K3Source *source, const Options *options)
{
  static const K3CacheBand bands[] = {K3_CACHE_CONTEXT, K3_CACHE_NONE};
  const K3Config *c = &source->config;
  if (k3_config_count_layers(c, K3_LAYER_MLA) == 0)
    K3_FAIL(K3_ERR_INPUT, "%s has no MLA layer, so --context has nothing to cut", source->origin);
  int tensor = c->kv_lora_rank == 512 && c->qk_rope_head_dim == 64;
  printf("\nattention at %lld positions on %d rank%s, rank 0, %lld multiprocessors\n", (long long)options->context,
         options->ranks, options->ranks == 1 ? "" : "s", (long long)options->multiprocessors);
  printf("one pass over the cache serves that many heads; a block is a slice of a pass\n");
  printf("\n%-8s %-7s %6s %9s %10s %5s %7s %10s %7s %7s %9s %12s\n", "band", "kernel", "heads", "rows", "plan up to",
         "tile", "slices", "passes", "grid", "busy", "blocks/SM", "scratch");
  for (int b = 0; b < 2; b++) {
    K3Plan plan;
    K3PlanOptions wanted = {.cache_band = bands[b]};
    K3_TRY(k3_plan_make(&source->config, &source->table, source->types, options->ranks, &wanted, &plan));
    if (tensor) K3_TRY(print_attention_row(source, &plan, options, K3_ATTENTION_KERNEL_TENSOR));
    K3_TRY(print_attention_row(source, &plan, options, K3_ATTENTION_KERNEL_CORE));
  }
  if (!tensor)
    printf("the tensor-core kernel serves kv_lora_rank 512 and qk_rope_head_dim 64; here %lld and %lld\n",
           (long long)c->kv_lora_rank, (long long)c->qk_rope_head_dim);
  else printf("the tensor-core kernel wants a 16-bit cache (--cache f16 or bf16); with f32 the core kernel runs\n");
  return K3_OK;
}

static K3Status info_model(const char *path, const Options *options)
{
  K3Source *source = NULL;
  K3Status status = K3_OK;
  K3_TRY(k3_source_open(path, &source));
  if (options->context > source->config.max_context)
    K3_FAIL_DONE(K3_ERR_INPUT, "info: --context %lld: the model's max_context is %lld", (long long)options->context,
                 (long long)source->config.max_context);
  printf("%-16s %s\n", strncmp(path, "synth:", 6) == 0 ? "model" : "model file", path);
  printf("digest           %016llx\n", (unsigned long long)source->digest);
  print_tensors(source);
  if (options->plan) status = print_plan(source, options->ranks);
  else print_config(&source->config);
  if (status == K3_OK && options->context > 0) status = print_attention(source, options);
  if (status == K3_OK && options->context > 0) status = print_memory(source, options);
done:
  source->close(source);
  if (status == K3_OK && options->check) {
    printf("\n");
    fflush(stdout);
    status = k3_command_check_model(path);
  }
  return status;
}

/* ---------------------------------------------------------------- the command */

static K3Status parse(int argc, char **argv, Options *options, int *help)
{
  static const struct option long_options[] = {{"check", no_argument, NULL, 'c'},
                                               {"follow", no_argument, NULL, 'f'},
                                               {"patience", required_argument, NULL, 't'},
                                               {"text", no_argument, NULL, 'x'},
                                               {"tokenizer", required_argument, NULL, 'T'},
                                               {"plan", no_argument, NULL, 'p'},
                                               {"ranks", required_argument, NULL, 'r'},
                                               {"context", required_argument, NULL, 'n'},
                                               {"multiprocessors", required_argument, NULL, 'm'},
                                               {"memory", required_argument, NULL, 'g'},
                                               {"help", no_argument, NULL, 'h'},
                                               {NULL, 0, NULL, 0}};
  *options = (Options){.multiprocessors = 132, .memory_gb = 141};
  *help = 0;
  optind = 0; /* getopt begins afresh */
  int letter;
  int64_t ranks;
  while ((letter = getopt_long(argc, argv, ":h", long_options, NULL)) != -1) {
    switch (letter) {
    case 'c': options->check = 1; break;
    case 'f': options->follow = 1; break;
    case 't': K3_TRY(k3_parse_count(optarg, "info: --patience", 1, 86400, &options->patience)); break;
    case 'x': options->text = 1; break;
    case 'T': options->tokenizer = optarg; break;
    case 'p': options->plan = 1; break;
    case 'r':
      K3_TRY(k3_parse_count(optarg, "info: --ranks", 1, K3_MAX_WORLD, &ranks));
      options->ranks = (int)ranks;
      break;
    case 'n': K3_TRY(k3_parse_count(optarg, "info: --context", 1, INT32_MAX, &options->context)); break;
    case 'm': K3_TRY(k3_parse_count(optarg, "info: --multiprocessors", 1, 4096, &options->multiprocessors)); break;
    case 'g': K3_TRY(k3_parse_count(optarg, "info: --memory", 1, 1 << 20, &options->memory_gb)); break;
    case 'h':
      fputs(usage, stdout);
      *help = 1;
      return K3_OK;
    default: return k3_refuse_option("info", letter, argv);
    }
  }
  if (argc - optind != 1)
    K3_FAIL(K3_ERR_USAGE, "info wants one file, got %d (see k3decode info --help)", argc - optind);
  if (options->plan != (options->ranks > 0))
    K3_FAIL(K3_ERR_USAGE, "info: --plan and --ranks N go together");
  if (options->follow && (options->plan || options->check))
    K3_FAIL(K3_ERR_USAGE, "info: --follow is for run files, --plan and --check are for model files");
  if (options->text != (options->tokenizer != NULL))
    K3_FAIL(K3_ERR_USAGE, "info: --text and --tokenizer DIR go together");
  if (options->text && (options->plan || options->check || options->follow))
    K3_FAIL(K3_ERR_USAGE, "info: --text stands without --plan, --check and --follow");
  if (options->patience > 0 && !options->follow) K3_FAIL(K3_ERR_USAGE, "info: --patience S goes with --follow");
  if (options->context > 0 && !options->plan) K3_FAIL(K3_ERR_USAGE, "info: --context N goes with --plan");
  return K3_OK;
}

K3Status k3_command_info(int argc, char **argv, K3Comm *comm)
{
  Options options;
  int help;
  K3_TRY(parse(argc, argv, &options, &help));
  if (help) return K3_OK;
  if (comm && comm->world > 1)
    K3_FAIL(K3_ERR_USAGE, "info runs as one process, started without mpirun; got %d ranks", comm->world);
  const char *path = argv[optind];
  K3Status status = K3_OK;
  const char *tokenizer = options.tokenizer;
  double patience = options.patience > 0 ? (double)options.patience : K3_INFO_PATIENCE_S;
  if (strncmp(path, "synth:", 6) == 0) {
    if (options.check || options.follow || options.text)
      K3_FAIL(K3_ERR_USAGE, "info: --%s is for %s files, %s is none",
              options.check ? "check" : options.follow ? "follow" : "text", options.check ? "model" : "run", path);
    status = info_model(path, &options);
    fflush(stdout);
    return status;
  }
  if (options.follow) k3_info_wait_for_file(path, patience);
  switch (k3_run_reader_recognise(path)) {
  case K3_FILE_MODEL:
    if (options.follow || options.text)
      K3_FAIL(K3_ERR_USAGE, "info: --%s is for run files, %s is a model file", options.follow ? "follow" : "text", path);
    status = info_model(path, &options);
    break;
  case K3_FILE_SNAPSHOT:
    if (options.follow) K3_FAIL(K3_ERR_USAGE, "info: --follow is for run files, %s is a snapshot", path);
    if (options.check || options.plan)
      K3_FAIL(K3_ERR_USAGE, "info: --check and --plan are for model files, %s is a snapshot", path);
    status = k3_info_snapshot(path);
    break;
  case K3_FILE_NOT_HDF5:
    K3_FAIL(K3_ERR_INPUT, "%s is neither a model file nor a run file: it is no HDF5 file", path);
  case K3_FILE_RUN:
    if (options.check || options.plan)
      K3_FAIL(K3_ERR_USAGE, "info: --check and --plan are for model files, %s is a run file", path);
    status = options.follow ? k3_info_follow(path, patience) : k3_info_run(path, tokenizer);
    break;
  case K3_FILE_SWEEP:
  case K3_FILE_TUNING:
    if (options.follow) K3_FAIL(K3_ERR_USAGE, "info: --follow is for run files, %s is none", path);
    if (options.check || options.plan)
      K3_FAIL(K3_ERR_USAGE, "info: --check and --plan are for model files, %s is none", path);
    status =
        k3_run_reader_recognise(path) == K3_FILE_SWEEP ? k3_command_info_sweep(path) : k3_command_info_tuning(path);
    break;
  case K3_FILE_FOREIGN:
    K3_FAIL(K3_ERR_INPUT, "%s is neither a model file nor a run file: an HDF5 file whose root attribute format names "
            "neither", path);
  default: /* unreadable or damaged: the reader says how */
    status = options.follow ? k3_info_follow(path, patience) : k3_info_run(path, tokenizer);
  }
  fflush(stdout);
  return status;
}
