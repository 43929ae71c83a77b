/* The CUDA backend's table of operations. See backend.h, src/decode/backend.h. Layer: backend (CUDA), host code only.
 *
 * Environment, for measuring and tests:
 *   K3_VERBOSE=1         figures on stderr: loading, what a step reads phase by phase, launching
 *   K3_PHASE_TIMES=1     phase times in captured steps too (about 190 tiny kernels more in a step of 93 layers,
 *                        and the sums over ranks are kernels apart from the norms that otherwise make them); on all ranks or on none
 *   K3_WATCHDOG_S=60     seconds until a step counts as hung; MPI between steps waits five times as long
 *   K3_PDL=0             no programmatic dependent launch
 *   K3_COMM=nccl|device|staged  comm_nccl.cu, comm_device.cu
 *   K3_POOL=separate     pool.cu
 *   K3_TEST_STOP_AT=POSITION  the last rank stops itself before that step is replayed
 *   K3_TEST_COMM_SPIN_NS=N    comm_device.cu: nanoseconds between a rank's reading and the end of the round
 *   K3_TEST_NORM_APART        comm_device.cu: sums over ranks and norms are two kernels, always
 *   K3_TEST_OVERSIZED_LAUNCH=PHASE  plants a launch that must fail
 *   K3_TEST_SLICES=N          step_attention.cu: so many slices, empty ones included
 *   K3_TEST_TUNE_WRONG        tune.cu: the choice is checked against a wrong reference */
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>

#include "kernels/backend.h"
#include "kernels/experts.h"
#include "plan/attention_tuning.h"
#include "kernels/kda.h"

enum { RESERVED_BYTES = 768 << 20 }; /* context, graphs, staging buffers, NCCL */

static int flag(const char *name, int otherwise)
{
  const char *value = getenv(name);
  return value && value[0] ? strcmp(value, "0") != 0 : otherwise;
}

/* --- opening ------------------------------------------------------------------------------------------------ */

static K3Status read_options(K3Cuda *cuda)
{
  const char *seconds = getenv("K3_WATCHDOG_S");
  cuda->exact = cuda->options.activations_f32;
  switch (cuda->options.cache_type) {
  case K3_CACHE_TYPE_F32: cuda->cache_type = K3_CACHE_F32; break;
  case K3_CACHE_TYPE_BF16: cuda->cache_type = K3_CACHE_BF16; break;
  case K3_CACHE_TYPE_F16: cuda->cache_type = K3_CACHE_F16; break;
  default: cuda->cache_type = cuda->exact ? K3_CACHE_F32 : K3_CACHE_F16;
  }
  cuda->verbose = flag("K3_VERBOSE", 0) && (cuda->rank == 0 || cuda->options.slice_world > 0);
  cuda->timed = cuda->options.phase_times || flag("K3_PHASE_TIMES", 0);
  cuda->watchdog_s = seconds ? atof(seconds) : 60.0;
  if (!(cuda->watchdog_s > 0.0)) K3_FAIL(K3_ERR_USAGE, "K3_WATCHDOG_S=%s: wanted a number of seconds above 0", seconds);
  if (cuda->communicates && k3_cuda_comm_is_staged() && cuda->options.graph) {
    if (cuda->verbose) fprintf(stderr, "# K3_COMM=staged cannot stand in a graph: steps run eagerly\n");
    cuda->options.graph = 0;
  }
  return K3_OK;
}

/* The first layer of a phase, for the planted launch. */
static K3Status plant(K3Cuda *cuda)
{
  const K3Config *c = cuda->config;
  const char *phase = getenv("K3_TEST_OVERSIZED_LAUNCH");
  if (!phase) return K3_OK;
  for (int p = 0; p < K3_PHASE_COUNT; p++) {
    if (strcmp(phase, k3_phase_names[p]) != 0) continue;
    int64_t layer = -1;
    for (int64_t i = 0; i < c->num_layers && layer < 0; i++)
      if ((p == K3_PHASE_ATTN_KDA && c->layer_types[i] == K3_LAYER_KDA) ||
          (p == K3_PHASE_ATTN_MLA && c->layer_types[i] == K3_LAYER_MLA) ||
          (p == K3_PHASE_FFN_DENSE && k3_config_is_dense(c, i)) || (p == K3_PHASE_FFN_MOE && !k3_config_is_dense(c, i)))
        layer = i;
    cuda->launch.plant_phase = k3_phase_names[p];
    cuda->launch.plant_layer = layer;
    return K3_OK;
  }
  K3_FAIL(K3_ERR_USAGE, "K3_TEST_OVERSIZED_LAUNCH=%s: there is no such phase", phase);
}

static const char *lacks_arm(const K3Cuda *cuda, K3AttentionArm arm)
{
  const K3Config *c = cuda->config;
  if (arm != K3_ATTENTION_TENSOR || k3_cuda_mla_tensor_serves(c->kv_lora_rank, c->qk_rope_head_dim, cuda->cache_type))
    return NULL;
  return "the tensor-core kernel serves kv_lora_rank 512, qk_rope_head_dim 64 and a 16-bit cache (--cache f16 or bf16)";
}

/* What attention's planner must know of this device. */
static K3Status find_attention_shape(K3Cuda *cuda)
{
  cuda->attend_heads = k3_cuda_attend_heads(cuda, cuda->plan);
  if (cuda->options.tuning) {
    K3AttentionTuning here;
    k3_cuda_tuning_here(cuda, &here);
    K3_TRY(k3_attention_tuning_check(cuda->options.tuning, &here, cuda->options.tuning_path));
    K3_TRY(k3_attention_tuning_check_heads(cuda->options.tuning, cuda->attend_heads, cuda->options.tuning_path));
  }
  return k3_cuda_attention_shape(cuda, cuda->options.attention, cuda->attend_heads, &cuda->tensor_cores, &cuda->shape);
}

static void count_cache_rows(K3Cuda *cuda)
{
  cuda->cache_rows = k3_plan_cache_rows(cuda->plan, cuda->rank, cuda->options.capacity);
  if (cuda->cache_rows < 1) cuda->cache_rows = 1;
}

static K3Status open_rank(K3Cuda *cuda)
{
  const K3Config *c = cuda->config;
  K3_TRY(read_options(cuda));
  const char *lack = lacks_arm(cuda, cuda->options.attention);
  if (lack) K3_FAIL(K3_ERR_INPUT, "--attention %s: %s", k3_attention_arm_names[cuda->options.attention], lack);
  K3_TRY(k3_cuda_device_choose(cuda, k3_cuda_comm_is_staged()));
  K3_CUDA_TRY(cudaStreamCreateWithFlags(&cuda->stream, cudaStreamNonBlocking));
  K3_CUDA_TRY(cudaStreamCreateWithFlags(&cuda->aside, cudaStreamNonBlocking));
  K3_TRY(k3_cuda_launch_init(cuda->stream, flag("K3_PDL", 1), &cuda->launch));
  K3_TRY(plant(cuda));
  cuda->snapshots = (c->num_layers + c->attn_res_block_size - 1) / c->attn_res_block_size;
  count_cache_rows(cuda);
  K3_TRY(k3_cuda_check_limits(cuda));
  K3_TRY(find_attention_shape(cuda));
  cuda->tensors = (K3CudaTensor *)calloc((size_t)cuda->source->table.count, sizeof *cuda->tensors);
  cuda->layers = (K3CudaLayer *)calloc((size_t)c->num_layers, sizeof *cuda->layers);
  cuda->piece = (int64_t *)calloc(8 * (size_t)cuda->world, sizeof *cuda->piece);
  if (!cuda->tensors || !cuda->layers || !cuda->piece)
    K3_FAIL(K3_ERR_DEVICE, "no memory for the tables of the CUDA backend");
  return K3_OK;
}

/* --- the table --------------------------------------------------------------------------------------------------- */

static K3Status cuda_describe(K3Backend *backend, char *text, size_t size)
{
  static const char *const cache_names[] = {"f32", "bf16", "f16"};
  K3Cuda *cuda = (K3Cuda *)backend->state;
  snprintf(text, size, "%s, %s, %s activations, %s cache, %s%s%s", cuda->device_name, cuda->bus,
           cuda->exact ? "f32" : "int16", cache_names[cuda->cache_type], cuda->options.graph ? "graph" : "eager",
           cuda->communicates ? ", " : "",
           !cuda->communicates        ? ""
           : k3_cuda_comm_is_staged() ? "staged through MPI"
                                      : "nccl");
  return K3_OK;
}

static K3Status cuda_memory(K3Backend *backend, int64_t *needed, int64_t *available)
{
  K3Cuda *cuda = (K3Cuda *)backend->state;
  K3CudaPool weights, state;
  size_t free_bytes = 0, all_bytes = 0;
  memset(&weights, 0, sizeof weights);
  memset(&state, 0, sizeof state);
  K3_TRY(k3_cuda_place_weights(cuda, &weights));
  K3_TRY(k3_cuda_place_state(cuda, &state));
  K3_CUDA_TRY(cudaMemGetInfo(&free_bytes, &all_bytes));
  *needed = weights.used + state.used + RESERVED_BYTES;
  *available = (int64_t)free_bytes / (cuda->sharing > 1 ? cuda->sharing : 1);
  return K3_OK;
}

/* A pool of the size that placing needs, and everything placed in it. */
static K3Status open_pool(K3Cuda *cuda, K3CudaPool *pool, K3Status (*place)(K3Cuda *, K3CudaPool *), int poison)
{
  K3CudaPool counted;
  memset(&counted, 0, sizeof counted);
  K3_TRY(place(cuda, &counted));
  K3_TRY(k3_cuda_pool_open(pool, counted.used, poison));
  return place(cuda, pool);
}

static K3Status open_host_memory(K3Cuda *cuda)
{
  K3_CUDA_TRY(cudaHostAlloc((void **)&cuda->in, sizeof *cuda->in, cudaHostAllocMapped));
  K3_CUDA_TRY(cudaHostAlloc((void **)&cuda->out, sizeof *cuda->out, cudaHostAllocMapped));
  memset(cuda->in, 0, sizeof *cuda->in);
  memset(cuda->out, 0, sizeof *cuda->out);
  K3_CUDA_TRY(cudaMallocHost((void **)&cuda->host_logits, (size_t)k3_cuda_own(cuda, K3_SHARE_VOCAB) * 4));
  return K3_OK;
}

/* The few words of scratch that must not begin as NaN. In a slice the pieces of other ranks that no collective brings are
 * plausible constants: router scores spread over all groups, and each layer's bias makes another choice. */
static K3Status start_scratch(K3Cuda *cuda)
{
  const K3Config *c = cuda->config;
  int32_t none = INT32_MAX;
  K3_CUDA_TRY(cudaMemsetAsync(cuda->argmax_count, 0, 4, cuda->stream));
  K3_CUDA_TRY(cudaMemsetAsync(cuda->finish_count, 0, 4, cuda->stream));
  K3_CUDA_TRY(cudaMemsetAsync(cuda->meeting, 0xff,
                              (size_t)k3_cuda_meeting_bytes(c->num_experts_per_token, k3_cuda_own(cuda, K3_SHARE_EXPERTS), c->latent_size),
                              cuda->stream));
  K3_CUDA_TRY(cudaMemcpyAsync(cuda->bad, &none, sizeof none, cudaMemcpyHostToDevice, cuda->stream));
  if (cuda->world > 1 && !cuda->communicates) {
    int64_t queries = c->num_heads * k3_config_cache_width(c);
    K3_TRY(k3_cuda_fill(&cuda->launch, cuda->latent, c->latent_size, 0.0f, 1.0f));
    K3_TRY(k3_cuda_fill(&cuda->launch, cuda->logits_router, c->num_experts, 0.0f, 1.0f));
    K3_TRY(k3_cuda_fill(&cuda->launch, cuda->query, queries, 0.0f, 1.0f));
    K3_CUDA_TRY(cudaMemsetAsync(cuda->query16, 0x2e, (size_t)queries * 2, cuda->stream)); /* f16 0.1, bf16 4e-11 */
  }
  return k3_cuda_wait(cuda);
}

static K3Status cuda_load(K3Backend *backend, K3Progress progress, void *context)
{
  K3Cuda *cuda = (K3Cuda *)backend->state;
  K3_TRY(k3_cuda_comm_open(cuda));
  K3_TRY(open_pool(cuda, &cuda->weights, k3_cuda_place_weights, 0));
  K3_TRY(open_pool(cuda, &cuda->state, k3_cuda_place_state, 1));
  K3_TRY(open_host_memory(cuda));
  K3_TRY(k3_cuda_load_weights(cuda, progress, context));
  if (cuda->verbose)
    fprintf(stderr, "# loaded %.2f GB in %.2f s: %.2f GB/s; %.2f GB of state and scratch\n",
            (double)cuda->load_bytes * 1e-9, cuda->load_seconds, (double)cuda->load_bytes * 1e-9 / cuda->load_seconds,
            (double)cuda->state.used * 1e-9);
  cuda->waits = 1;
  cuda->launch.phase = "start";
  cuda->launch.layer = -1;
  K3_TRY(start_scratch(cuda));
  return backend->reset(backend);
}

/* Synthetic rows of the first `start` positions: the host's fill_start. */
static K3Status fill_start(K3Cuda *cuda, int64_t layer)
{
  char path[32];
  K3CudaCacheFill fill;
  if (cuda->options.start == 0) return K3_OK;
  snprintf(path, sizeof path, "/cache/%03d", (int)layer);
  memset(&fill, 0, sizeof fill);
  int banded = cuda->plan->cache_band == K3_CACHE_CONTEXT;
  fill.cache = cuda->layers[layer].cache;
  fill.type = cuda->cache_type;
  fill.start = cuda->options.start;
  fill.width = k3_config_cache_width(cuda->config);
  fill.page_positions = cuda->plan->page_positions;
  fill.world = banded ? cuda->world : 1;
  fill.rank = banded ? cuda->rank : 0;
  fill.rule.key = k3_synth_key(cuda->options.start_seed, path);
  fill.rule.mean = 0.0f;
  fill.rule.deviation = 1.0f;
  return k3_cuda_cache_fill(&cuda->launch, &fill);
}

static K3Status cuda_reset(K3Backend *backend)
{
  K3Cuda *cuda = (K3Cuda *)backend->state;
  const K3Config *c = cuda->config;
  int64_t D = c->kda_head_dim, channels = k3_cuda_own(cuda, K3_SHARE_KDA_HEADS) * D;
  int64_t row = k3_config_cache_width(c) * k3_cuda_cache_element_bytes(cuda->cache_type);
  cuda->waits = 1;
  for (int64_t i = 0; i < c->num_layers; i++) {
    K3CudaLayer *layer = &cuda->layers[i];
    if (c->layer_types[i] == K3_LAYER_MLA) {
      K3_CUDA_TRY(cudaMemsetAsync(layer->cache, 0xff, (size_t)(cuda->cache_rows * row), cuda->stream));
      K3_TRY(fill_start(cuda, i));
      continue;
    }
    K3_CUDA_TRY(cudaMemsetAsync(layer->kda_state, 0, (size_t)(channels * D) * 4, cuda->stream));
    K3_CUDA_TRY(
        cudaMemsetAsync(layer->kda_window, 0, (size_t)(3 * (c->kda_conv_kernel - 1) * channels) * 4, cuda->stream));
  }
  cuda->position = cuda->options.start;
  cuda->attention.slices = 0; /* planned by the next step */
  return k3_cuda_wait(cuda);
}

static const char *cuda_lacks_arm(const K3Backend *backend, K3AttentionArm arm)
{
  return lacks_arm((const K3Cuda *)backend->state, arm);
}

static K3Status cuda_configure(K3Backend *backend, const K3Plan *plan, const K3BackendOptions *options)
{
  K3Cuda *cuda = (K3Cuda *)backend->state;
  const char *lack = lacks_arm(cuda, options->attention);
  int64_t acc = 0, ml = 0;
  if (!cuda->options.reconfigures) K3_FAIL(K3_ERR_INPUT, "the backend was not opened to be configured again");
  if (lack) K3_FAIL(K3_ERR_INPUT, "%s", lack);
  for (int i = 0; i < 2; i++) K3_TRY(k3_cuda_graph_close(&cuda->graphs[i]));
  cuda->plan = plan;
  cuda->options.attention = options->attention;
  cuda->options.start = options->start;
  cuda->options.start_seed = options->start_seed;
  cuda->options.horizon = options->horizon;
  cuda->options.phase_times = options->phase_times;
  cuda->timed = options->phase_times || flag("K3_PHASE_TIMES", 0);
  count_cache_rows(cuda);
  K3_TRY(find_attention_shape(cuda));
  K3_TRY(k3_cuda_most_partials(cuda->shape, cuda->cache_rows, k3_cuda_most_rows(cuda, plan), &acc, &ml));
  if (cuda->cache_rows > cuda->held_rows || acc > cuda->held_acc || ml > cuda->held_ml ||
      options->start >= cuda->options.capacity)
    K3_FAIL(K3_ERR_INPUT,
            "%lld positions of %lld, %lld cache rows, %lld floats of partials: there is room for %lld rows and %lld floats",
            (long long)options->start, (long long)cuda->options.capacity, (long long)cuda->cache_rows, (long long)acc,
            (long long)cuda->held_rows, (long long)cuda->held_acc);
  K3_TRY(backend->reset(backend));
  return k3_cuda_plan_attention(cuda, k3_plan_cache_rows(plan, cuda->rank, cuda->position + 1));
}

static void cuda_describe_attention(const K3Backend *backend, char *text, size_t size)
{
  const K3Cuda *cuda = (const K3Cuda *)backend->state;
  const K3AttentionPlan *plan = &cuda->attention;
  if (plan->slices == 0) snprintf(text, size, "not planned yet");
  else
    snprintf(text, size, "%s kernel, %lld heads, %lld slice%s x %lld pass%s of %lld = %lld blocks, up to %lld rows%s",
             cuda->tensor_cores ? "tensor" : "core", (long long)plan->heads, (long long)plan->slices,
             plan->slices == 1 ? "" : "s", (long long)plan->passes, plan->passes == 1 ? "" : "es",
             (long long)plan->heads_per_pass, (long long)plan->blocks, (long long)plan->rows,
             plan->tuned ? ", tuned" : "");
}

static void note(cudaError_t error, const char *what)
{
  if (error != cudaSuccess) k3_cuda_failed(error, what, __FILE__, __LINE__);
}

static void cuda_close(K3Backend *backend)
{
  K3Cuda *cuda = (K3Cuda *)backend->state;
  if (cuda) {
    if (cuda->verbose && cuda->launches)
      fprintf(stderr, "# launched %lld steps in %.1f us of host time each\n", (long long)cuda->launches,
              cuda->launch_s / (double)cuda->launches * 1e6);
    cuda->comm->deadline_s = 0.0;
    /* a failure here is recorded; there is nobody left to pass it to */
    for (int i = 0; i < 2; i++) (void)k3_cuda_graph_close(&cuda->graphs[i]);
    /* after the graphs: ncclCommDestroy waits for every captured collective to be released */
    if (cuda->collectives.close) cuda->collectives.close(cuda);
    (void)k3_cuda_timer_close(&cuda->eager_timer);
    (void)k3_cuda_pool_close(&cuda->weights);
    (void)k3_cuda_pool_close(&cuda->state);
    if (cuda->in) note(cudaFreeHost(cuda->in), "cudaFreeHost");
    if (cuda->out) note(cudaFreeHost(cuda->out), "cudaFreeHost");
    if (cuda->host_logits) note(cudaFreeHost(cuda->host_logits), "cudaFreeHost");
    if (cuda->aside) note(cudaStreamDestroy(cuda->aside), "cudaStreamDestroy");
    if (cuda->stream) note(cudaStreamDestroy(cuda->stream), "cudaStreamDestroy");
    free(cuda->tensors);
    free(cuda->layers);
    free(cuda->piece);
  }
  free(cuda);
  free(backend);
}

/* A driver without GPUs counts: that is a mistake to be told (device.cu), not a reason to run on the host. */
extern "C" int k3_backend_has_cuda(void)
{
  int version = 0;
  return cudaDriverGetVersion(&version) == cudaSuccess && version > 0;
}

extern "C" K3Status k3_backend_open_cuda(K3Source *source, const K3Plan *plan, K3Comm *comm,
                                         const K3BackendOptions *options, K3Backend **out)
{
  K3Backend *backend = (K3Backend *)calloc(1, sizeof *backend);
  K3Cuda *cuda = (K3Cuda *)calloc(1, sizeof *cuda);
  *out = NULL;
  if (!backend || !cuda) {
    free(backend);
    free(cuda);
    K3_FAIL(K3_ERR_INPUT, "no memory for the CUDA backend");
  }
  cuda->source = source;
  cuda->config = &source->config;
  cuda->plan = plan;
  cuda->comm = comm;
  cuda->options = *options;
  cuda->rank = comm->rank;
  cuda->world = plan->world;
  cuda->bad_bias_layer = -1;
  cuda->communicates = (plan->world > 1 || k3_cuda_comm_is_forced()) && options->slice_world == 0;
  backend->name = "cuda";
  backend->state = cuda;
  backend->describe = cuda_describe;
  backend->memory = cuda_memory;
  backend->load = cuda_load;
  backend->reset = cuda_reset;
  backend->configure = cuda_configure;
  backend->lacks_arm = cuda_lacks_arm;
  backend->describe_attention = cuda_describe_attention;
  backend->step = k3_cuda_step;
  backend->save = k3_cuda_save;
  backend->restore = k3_cuda_restore;
  backend->resume_at = k3_cuda_resume_at;
  backend->close = cuda_close;
  K3Status status = open_rank(cuda);
  if (status != K3_OK) {
    cuda_close(backend);
    return status;
  }
  backend->cache_type = cuda->cache_type == K3_CACHE_F32    ? K3_CACHE_TYPE_F32
                        : cuda->cache_type == K3_CACHE_BF16 ? K3_CACHE_TYPE_BF16
                                                            : K3_CACHE_TYPE_F16;
  backend->activations = cuda->exact ? "f32" : "int16";
  *out = backend;
  return K3_OK;
}
