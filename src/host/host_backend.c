/* The host backend: a rank's weights and state in main memory. Layer: host backend.
 * The reference that the CUDA backend is compared with: readable before fast. The step is host_step.c. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "base/breakage.h"
#include "host/host_state.h"
#include "host/mla.h"
#include "plan/synth_values.h"

const K3HostMatrix *k3_host_matrix_of(const K3Host *host, int64_t layer, K3Role role)
{
  return &host->tensors[k3_tensors_find(&host->source->table, layer, role)].matrix;
}

const float *k3_host_vector_of(const K3Host *host, int64_t layer, K3Role role)
{
  return host->tensors[k3_tensors_find(&host->source->table, layer, role)].vector;
}

int64_t k3_host_own(const K3Host *host, K3Share share)
{
  K3Range range = k3_plan_range(host->plan, host->rank, share);
  return range.end - range.begin;
}

/* --- memory ---------------------------------------------------------------------------------- */

/* `count` numbers of `size` bytes, all NaN (bytes 0xff), so that a forgotten write shows. */
static void *poisoned(int64_t count, size_t size)
{
  void *memory = malloc((size_t)(count > 0 ? count : 1) * size);
  if (memory) memset(memory, 0xff, (size_t)(count > 0 ? count : 1) * size);
  return memory;
}

static int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

/* The longest of the vectors that the step keeps in wide[] and narrow[]. */
static int64_t widest(const K3Host *host)
{
  const K3Config *c = host->config;
  int64_t heads = max64(k3_host_own(host, K3_SHARE_KDA_HEADS), k3_host_own(host, K3_SHARE_MLA_HEADS));
  int64_t most = max64(c->hidden_size, c->q_lora_rank);
  most = max64(most, heads * max64(c->kda_head_dim, k3_config_qk_head_dim(c)));
  most = max64(most, heads * max64(c->v_head_dim, k3_config_cache_width(c)));
  most = max64(most, max64(k3_host_own(host, K3_SHARE_DENSE), k3_host_own(host, K3_SHARE_SHARED)));
  most = max64(most, max64(c->latent_size, c->num_experts));
  most = max64(most, c->moe_intermediate_size);
  return max64(most, max64(k3_host_own(host, K3_SHARE_VOCAB), c->kda_head_dim));
}

static int64_t cache_rows(const K3Host *host)
{
  return k3_plan_cache_rows(host->plan, host->rank, host->options.capacity);
}

static int64_t threads(void)
{
#ifdef _OPENMP
  return omp_get_max_threads();
#else
  return 1;
#endif
}

/* Scores of the un-split arm, where it may be asked for. */
static int64_t whole_count(const K3Host *host)
{
  int wanted = host->options.reconfigures || host->options.attention == K3_ATTENTION_UNSPLIT;
  return wanted ? threads() * cache_rows(host) : 0;
}

static int64_t snapshots(const K3Config *c)
{
  return (c->num_layers + c->attn_res_block_size - 1) / c->attn_res_block_size;
}

static K3Status allocate_scratch(K3Host *host)
{
  const K3Config *c = host->config;
  int world = host->plan->world;
  int64_t wide = widest(host), width = k3_partial_width(c->kv_lora_rank);
  int64_t heads = k3_host_own(host, K3_SHARE_MLA_HEADS);
  int good = 1;
  good &= (host->p = poisoned(c->hidden_size, 4)) != NULL;
  good &= (host->bank = poisoned(snapshots(c) * c->hidden_size, 4)) != NULL;
  good &= (host->h = poisoned(c->hidden_size, 4)) != NULL;
  good &= (host->x = poisoned(c->hidden_size, 4)) != NULL;
  good &= (host->sum = poisoned(c->hidden_size, 8)) != NULL;
  for (int i = 0; i < 5; i++) good &= (host->wide[i] = poisoned(wide, 8)) != NULL;
  for (int i = 0; i < 4; i++) good &= (host->narrow[i] = poisoned(wide, 4)) != NULL;
  good &= (host->queries = poisoned(c->num_heads * k3_config_cache_width(c), 4)) != NULL;
  good &= (host->partials = poisoned(c->num_heads * width, 8)) != NULL;
  host->held_rows = cache_rows(host);
  if (whole_count(host) > 0) good &= (host->whole = poisoned(whole_count(host), 8)) != NULL;
  good &= (host->returned = poisoned(world * heads * width, 8)) != NULL;
  good &= (host->gathered = poisoned(c->latent_size + c->num_experts, 4)) != NULL;
  good &= (host->latent = poisoned(c->latent_size, 4)) != NULL;
  good &= (host->scores = poisoned(c->num_experts, 4)) != NULL;
  good &= (host->routed = poisoned(c->latent_size, 8)) != NULL;
  good &= (host->logits = poisoned(k3_host_own(host, K3_SHARE_VOCAB), 4)) != NULL;
  good &= (host->chosen = poisoned(c->num_experts_per_token, sizeof *host->chosen)) != NULL;
  good &= (host->piece = poisoned(8 * world, 8)) != NULL;
  if (!good) K3_FAIL(K3_ERR_INPUT, "no memory for the scratch of a step");
  return K3_OK;
}

static K3Status allocate_layers(K3Host *host)
{
  const K3Config *c = host->config;
  int64_t D = c->kda_head_dim, heads = k3_host_own(host, K3_SHARE_KDA_HEADS);
  host->layers = calloc((size_t)c->num_layers, sizeof *host->layers);
  if (!host->layers) K3_FAIL(K3_ERR_INPUT, "no memory for %lld layers", (long long)c->num_layers);
  for (int64_t i = 0; i < c->num_layers; i++) {
    K3HostLayer *layer = &host->layers[i];
    int good = 1;
    if (c->layer_types[i] == K3_LAYER_KDA) {
      good &= (layer->kda_state = poisoned(heads * D * D, 4)) != NULL;
      for (int w = 0; w < 3; w++)
        good &= (layer->window[w] = poisoned((c->kda_conv_kernel - 1) * heads * D, 4)) != NULL;
    } else {
      good &= (layer->cache = poisoned(cache_rows(host) * k3_config_cache_width(c), 4)) != NULL;
    }
    if (!good)
      K3_FAIL(K3_ERR_INPUT, "no memory for the state of layer %lld at %lld positions", (long long)i,
              (long long)host->options.capacity);
  }
  return K3_OK;
}

static int64_t state_bytes(const K3Host *host)
{
  const K3Config *c = host->config;
  int64_t D = c->kda_head_dim, heads = k3_host_own(host, K3_SHARE_KDA_HEADS);
  int64_t kda = heads * D * (D + 3 * (c->kda_conv_kernel - 1)) * 4;
  int64_t mla = cache_rows(host) * k3_config_cache_width(c) * 4;
  return k3_config_count_layers(c, K3_LAYER_KDA) * kda + k3_config_count_layers(c, K3_LAYER_MLA) * mla +
         whole_count(host) * 8;
}

/* MemAvailable of /proc/meminfo; -1 where there is none. */
static int64_t available_memory(void)
{
  FILE *file = fopen("/proc/meminfo", "r");
  char line[256];
  long long kib = -1;
  while (file && fgets(line, sizeof line, file))
    if (sscanf(line, "MemAvailable: %lld kB", &kib) == 1) break;
  if (file) fclose(file);
  return kib < 0 ? -1 : (int64_t)kib * 1024;
}

static K3Status host_memory(K3Backend *backend, int64_t *needed, int64_t *available)
{
  K3Host *host = backend->state;
  *needed = k3_plan_weight_bytes(host->plan, host->rank, &host->source->table, host->source->types) + state_bytes(host);
  *available = available_memory();
  if (*available >= 0) *available /= host->comm->local_world; /* the ranks of a host share it */
  return K3_OK;
}

/* --- loading ------------------------------------------------------------------------------------ */

/* Widens a loaded vector to float32. */
static K3Status widen(K3HostTensor *tensor, K3Type type, int64_t count)
{
  if (type == K3_TYPE_F32) {
    tensor->vector = tensor->memory;
    return K3_OK;
  }
  float *wide = malloc((size_t)count * 4);
  if (!wide) K3_FAIL(K3_ERR_INPUT, "no memory to widen a vector of %lld", (long long)count);
  K3HostMatrix row = {type, 1, 1, count, k3_format_bytes(type, count), tensor->memory, NULL};
  k3_host_decode_row(&row, 0, 0, wide);
  free(tensor->memory);
  tensor->memory = tensor->vector = wide;
  return K3_OK;
}

static K3Status load_tensor(K3Host *host, int64_t index)
{
  K3Source *source = host->source;
  const K3TensorSpec *spec = &source->table.specs[index];
  K3HostTensor *tensor = &host->tensors[index];
  K3Type type = source->types[index];
  K3Band band = k3_plan_band(host->plan, host->rank, spec);
  int64_t elements = k3_band_elements(&band);
  K3HostMatrix *matrix = &tensor->matrix;
  matrix->type = type;
  matrix->experts = spec->rank == 3 ? band.count[0] : 1;
  matrix->rows = spec->rank == 1 ? 1 : band.count[spec->rank - 2];
  matrix->cols = band.count[spec->rank - 1];
  matrix->row_bytes = k3_format_bytes(type, matrix->cols);
  int book = k3_codebook_of(type);
  matrix->book = book < 0 ? NULL : host->books[book];
  if (elements == 0) return K3_OK;
  if (K3_BROKEN("band_row_off") && spec->role == K3_ROLE_KDA_O_PROJ && band.begin[1] >= spec->share_size)
    band.begin[1] -= spec->share_size;
  tensor->memory = malloc((size_t)k3_format_bytes(type, elements));
  if (!tensor->memory)
    K3_FAIL(K3_ERR_INPUT, "no memory for %s: %lld bytes", spec->path, (long long)k3_format_bytes(type, elements));
  K3_TRY(source->read(source, index, &band, tensor->memory));
  matrix->data = tensor->memory;
  return spec->is_matrix ? K3_OK : widen(tensor, type, elements);
}

static K3Status load_books(K3Host *host)
{
  int needed[K3_CODEBOOK_COUNT];
  k3_codebooks_needed(host->source->types, host->source->table.count, needed);
  for (int id = 0; id < K3_CODEBOOK_COUNT; id++)
    if (needed[id]) K3_TRY(k3_source_codebook(host->source, (K3CodebookId)id, &host->books[id]));
  return K3_OK;
}

static K3Status host_load(K3Backend *backend, K3Progress progress, void *context)
{
  K3Host *host = backend->state;
  K3Source *source = host->source;
  int64_t all = k3_plan_weight_bytes(host->plan, host->rank, &source->table, source->types), done = 0;
  K3_TRY(load_books(host));
  for (int64_t i = 0; i < source->table.count; i++) {
    K3_TRY(load_tensor(host, i));
    K3Band band = k3_plan_band(host->plan, host->rank, &source->table.specs[i]);
    done += k3_source_band_bytes(source, i, &band);
    if (progress) progress(context, done, all);
  }
  K3_TRY(allocate_scratch(host));
  K3_TRY(allocate_layers(host));
  return backend->reset(backend);
}

/* --- state -------------------------------------------------------------------------------------- */

/* Cache rows of the first `start` positions: a function of (seed, layer, position, column), whatever the world. */
static void fill_start(K3Host *host, int64_t layer)
{
  int64_t width = k3_config_cache_width(host->config);
  char path[32];
  snprintf(path, sizeof path, "/cache/%03d", (int)layer);
  K3SynthRule rule = {k3_synth_key(host->options.start_seed, path), 0.0f, 1.0f};
  for (int64_t t = 0; t < host->options.start; t++) {
    int owner = k3_plan_cache_owner(host->plan, t);
    if (owner >= 0 && owner != host->rank) continue;
    float *row = host->layers[layer].cache + k3_plan_cache_row(host->plan, t) * width;
    for (int64_t c = 0; c < width; c++) row[c] = k3_synth_float(rule, (uint64_t)(t * width + c));
  }
}

static K3Status host_reset(K3Backend *backend)
{
  K3Host *host = backend->state;
  const K3Config *c = host->config;
  int64_t D = c->kda_head_dim, channels = k3_host_own(host, K3_SHARE_KDA_HEADS) * D;
  host->position = host->options.start;
  host->banked = 0;
  for (int64_t i = 0; i < c->num_layers; i++) {
    K3HostLayer *layer = &host->layers[i];
    if (c->layer_types[i] == K3_LAYER_MLA) {
      fill_start(host, i);
      continue;
    }
    memset(layer->kda_state, 0, (size_t)(channels * D) * 4);
    for (int w = 0; w < 3; w++) memset(layer->window[w], 0, (size_t)((c->kda_conv_kernel - 1) * channels) * 4);
  }
  return K3_OK;
}

/* --- snapshots --------------------------------------------------------------------------------------- */

/* The state is kept as the file has it; bytes of `band`, and where it stands. */
static K3Status find_band(const K3Host *host, const K3StateBand *band, int window, char **at, size_t *bytes)
{
  const K3Config *c = host->config;
  const K3HostLayer *layer = &host->layers[band->layer];
  int64_t channels = k3_host_own(host, K3_SHARE_KDA_HEADS) * c->kda_head_dim, row = k3_config_cache_width(c) * 4;
  if (band->part == K3_STATE_CACHE) {
    if (band->begin < 0 || band->count < 0 || band->begin + band->count > cache_rows(host))
      K3_FAIL(K3_ERR_INPUT, "cache rows %lld to %lld of layer %lld: there is room for %lld", (long long)band->begin,
              (long long)(band->begin + band->count), (long long)band->layer, (long long)cache_rows(host));
    *at = (char *)layer->cache + band->begin * row;
    *bytes = (size_t)(band->count * row);
  } else if (band->part == K3_STATE_KDA) {
    *at = (char *)layer->kda_state;
    *bytes = (size_t)(channels * c->kda_head_dim * 4);
  } else {
    *at = (char *)layer->window[window];
    *bytes = (size_t)((c->kda_conv_kernel - 1) * channels * 4);
  }
  return K3_OK;
}

static K3Status host_save(K3Backend *backend, const K3StateBand *band, void *data)
{
  char *at, *to = data;
  size_t bytes;
  for (int w = 0; w < (band->part == K3_STATE_CONV ? 3 : 1); w++, to += bytes) {
    K3_TRY(find_band(backend->state, band, w, &at, &bytes));
    memcpy(to, at, bytes);
  }
  return K3_OK;
}

static K3Status host_restore(K3Backend *backend, const K3StateBand *band, const void *data)
{
  char *at;
  const char *from = data;
  size_t bytes;
  for (int w = 0; w < (band->part == K3_STATE_CONV ? 3 : 1); w++, from += bytes) {
    K3_TRY(find_band(backend->state, band, w, &at, &bytes));
    memcpy(at, from, bytes);
  }
  return K3_OK;
}

static K3Status host_resume_at(K3Backend *backend, int64_t position)
{
  K3Host *host = backend->state;
  host->position = position;
  return K3_OK;
}

/* --- arms of attention ------------------------------------------------------------------------------ */

static const char *host_lacks_arm(const K3Backend *backend, K3AttentionArm arm)
{
  (void)backend;
  if (arm == K3_ATTENTION_SPLIT || arm == K3_ATTENTION_UNSPLIT) return NULL;
  return "core and tensor are kernels of the CUDA backend; the host backend has split and unsplit";
}

static void host_describe_attention(const K3Backend *backend, char *text, size_t size)
{
  const K3Host *host = backend->state;
  int64_t rows = k3_plan_cache_rows(host->plan, host->rank, host->position + 1);
  int banded = host->plan->cache_band == K3_CACHE_CONTEXT;
  long long heads = (long long)(banded ? host->config->num_heads : k3_host_own(host, K3_SHARE_MLA_HEADS));
  long long slices = (long long)((rows + K3_HOST_SLICE_ROWS - 1) / K3_HOST_SLICE_ROWS);
  if (host->options.attention == K3_ATTENTION_UNSPLIT || slices < 2)
    snprintf(text, size, "host, %lld heads, 1 slice of %lld rows", heads, (long long)rows);
  else
    snprintf(text, size, "host, %lld heads, %lld slices of up to %d of %lld rows", heads, slices, K3_HOST_SLICE_ROWS,
             (long long)rows);
}

static K3Status host_configure(K3Backend *backend, const K3Plan *plan, const K3BackendOptions *options)
{
  K3Host *host = backend->state;
  if (!host->options.reconfigures) K3_FAIL(K3_ERR_INPUT, "the backend was not opened to be configured again");
  const char *lack = host_lacks_arm(backend, options->attention);
  if (lack) K3_FAIL(K3_ERR_INPUT, "%s", lack);
  int64_t rows = k3_plan_cache_rows(plan, host->rank, host->options.capacity);
  if (rows > host->held_rows || options->start >= host->options.capacity)
    K3_FAIL(K3_ERR_INPUT, "%lld positions of %lld, %lld rows: there is room for %lld rows", (long long)options->start,
            (long long)host->options.capacity, (long long)rows, (long long)host->held_rows);
  host->plan = plan;
  host->options.attention = options->attention;
  host->options.start = options->start;
  host->options.start_seed = options->start_seed;
  return backend->reset(backend);
}

/* --- the rest of the table ---------------------------------------------------------------------- */

static K3Status host_describe(K3Backend *backend, char *text, size_t size)
{
  (void)backend;
  char model[192] = "processor";
  FILE *file = fopen("/proc/cpuinfo", "r");
  char line[256];
  while (file && fgets(line, sizeof line, file))
    if (sscanf(line, "model name : %191[^\n]", model) == 1) break;
  if (file) fclose(file);
  snprintf(text, size, "%s, %d thread%s", model, (int)threads(), threads() == 1 ? "" : "s");
  return K3_OK;
}

static void host_close(K3Backend *backend)
{
  K3Host *host = backend->state;
  if (host) {
    for (int64_t i = 0; host->tensors && i < host->source->table.count; i++) free(host->tensors[i].memory);
    for (int64_t i = 0; host->layers && i < host->config->num_layers; i++) {
      free(host->layers[i].kda_state);
      for (int w = 0; w < 3; w++) free(host->layers[i].window[w]);
      free(host->layers[i].cache);
    }
    for (int i = 0; i < 5; i++) free(host->wide[i]);
    for (int i = 0; i < 4; i++) free(host->narrow[i]);
    for (int i = 0; i < K3_CODEBOOK_COUNT; i++) free(host->books[i]);
    void *rest[] = {host->tensors,  host->layers,   host->p,        host->bank,     host->h,
                    host->x,        host->sum,      host->queries,  host->partials, host->returned, host->gathered,
                    host->latent,   host->scores,   host->routed,   host->logits, host->chosen, host->piece,
                    host->whole};
    for (size_t i = 0; i < sizeof rest / sizeof rest[0]; i++) free(rest[i]);
    free(host);
  }
  free(backend);
}

/* The ranks of a host share its processors; without a word from the user each takes its part of them. */
static void share_processors(const K3Comm *comm)
{
#ifdef _OPENMP
  if (getenv("OMP_NUM_THREADS")) return;
  int threads = omp_get_num_procs() / comm->local_world;
  omp_set_num_threads(threads > 0 ? threads : 1);
#else
  (void)comm;
#endif
}

K3Status k3_backend_open_host(K3Source *source, const K3Plan *plan, K3Comm *comm, const K3BackendOptions *options,
                              K3Backend **out)
{
  const char *lack = host_lacks_arm(NULL, options->attention);
  if (lack) K3_FAIL(K3_ERR_INPUT, "--attention %s: %s", k3_attention_arm_names[options->attention], lack);
  K3Backend *backend = calloc(1, sizeof *backend);
  K3Host *host = calloc(1, sizeof *host);
  K3HostTensor *tensors = calloc((size_t)source->table.count, sizeof *tensors);
  if (!backend || !host || !tensors) {
    free(backend);
    free(host);
    free(tensors);
    K3_FAIL(K3_ERR_INPUT, "no memory for the host backend");
  }
  *host = (K3Host){.source = source, .config = &source->config, .plan = plan, .comm = comm, .options = *options,
                   .rank = comm->rank, .tensors = tensors};
  *backend = (K3Backend){.name = "host",
                         .state = host,
                         .cache_type = K3_CACHE_TYPE_F32,
                         .activations = "f32",
                         .describe = host_describe,
                         .memory = host_memory,
                         .load = host_load,
                         .reset = host_reset,
                         .configure = host_configure,
                         .lacks_arm = host_lacks_arm,
                         .describe_attention = host_describe_attention,
                         .step = k3_host_step,
                         .save = host_save,
                         .restore = host_restore,
                         .resume_at = host_resume_at,
                         .close = host_close};
  share_processors(comm);
  *out = backend;
  return K3_OK;
}
