/* Trials of the attention kernels for `k3decode tune`. See src/decode/tune.h. Layer: backend (CUDA), host code only.
 *
 * A trial is a chain of launches in a graph (dependent launch on, as in a step), each over another copy of the cache, so
 * that none is found in the L2; once the slice kernel alone, once with the merge of its partials behind each. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include <vector>

#include "kernels/backend.h"

extern "C" {
#include "base/statistics.h"
#include "decode/tune.h"
}

namespace {

enum { REPLAYS = 11, WARM = 1, LEAST_NODES = 2, MOST_NODES = 1024 };
constexpr double SHORT_MS = 2.0, LONG_MS = 6.0; /* of a graph: long enough for the clock; longer only to pass the L2 */
constexpr int64_t ROTATE_BYTES = 300 << 20;     /* copies of the cache together, several times the L2 */
constexpr int64_t PASS_BYTES = 75 << 20;        /* read between two uses of a copy: more than the L2 */

struct Memory {
  void *at;
  int64_t bytes;
};

} // namespace

struct K3Tuner {
  K3Cuda cuda; /* device, stream, launch; no model */
  K3CudaCacheType type;
  int64_t latent, rope;
  double scale;
  int wrong; /* test hook K3_TEST_TUNE_WRONG: all trials but the first compute something else */
  Memory cache, query, query16, acc, ml, sum_acc, sum_ml;
  int64_t *rows;
  int64_t filled_heads, filled_rows; /* what query and cache hold; and `first` the outputs' reference for them */
  std::vector<float> *first;
  cudaEvent_t begin, end;
};

/* Digest of the kernels' sources (Makefile.am) and the compiler's version. */
static void describe_kernels(char text[64])
{
  snprintf(text, 64, "%s, CUDA %d.%d", K3_ATTENTION_SOURCES, CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
}

/* --- memory ------------------------------------------------------------------------------------------------- */

static K3Status hold(Memory *memory, int64_t bytes)
{
  if (memory->bytes >= bytes) return K3_OK;
  if (memory->at) K3_CUDA_TRY(cudaFree(memory->at));
  memory->at = NULL, memory->bytes = 0;
  if (cudaMalloc(&memory->at, (size_t)bytes) != cudaSuccess) {
    (void)cudaGetLastError(); /* the refusal is told below, and nothing was launched */
    K3_FAIL(K3_ERR_INPUT, "tune: %.2f GB more do not fit on this GPU; give smaller --contexts or more --ranks",
            (double)bytes * 1e-9);
  }
  memory->bytes = bytes;
  return K3_OK;
}

static K3Status fill(K3Tuner *t, void *memory, K3CudaCacheType type, int64_t rows, uint64_t seed, const char *what)
{
  K3CudaCacheFill fill;
  memset(&fill, 0, sizeof fill);
  fill.cache = memory;
  fill.type = type;
  fill.start = rows;
  fill.width = t->latent + t->rope;
  fill.page_positions = K3_PAGE_POSITIONS;
  fill.world = 1;
  fill.rule.key = k3_synth_key(seed, what);
  fill.rule.deviation = 1.0f;
  return k3_cuda_cache_fill(&t->cuda.launch, &fill);
}

static int64_t cache_bytes(const K3Tuner *t, const K3AttentionTrial *trial)
{
  return trial->rows * (t->latent + t->rope) * k3_cuda_cache_element_bytes(t->type);
}

static int64_t copies_of(int64_t bytes)
{
  int64_t copies = ROTATE_BYTES / bytes + 1, most = MOST_NODES;
  return copies > most ? most : copies;
}

/* Launches in a graph: past the L2 where that does not take long. */
static int nodes_of(int64_t bytes, double launch_ms)
{
  double ms = fmax(launch_ms, 1e-3), nodes = fmin(LONG_MS / ms, (double)(PASS_BYTES / bytes + 1));
  return (int)fmin(MOST_NODES, fmax(LEAST_NODES, fmax(nodes, SHORT_MS / ms)));
}

/* Queries and copies of the cache for these heads and rows, unless they are there already. */
static K3Status prepare(K3Tuner *t, const K3AttentionTrial *trial)
{
  int64_t width = t->latent + t->rope, bytes = cache_bytes(t, trial);
  if (t->filled_heads == trial->heads && t->filled_rows == trial->rows) return K3_OK;
  t->filled_heads = t->filled_rows = 0;
  t->first->clear();
  K3_TRY(hold(&t->cache, copies_of(bytes) * bytes));
  K3_TRY(hold(&t->query, trial->heads * width * 4));
  K3_TRY(hold(&t->query16, trial->heads * width * 4));
  for (int64_t i = 0; i < copies_of(bytes); i++)
    K3_TRY(fill(t, (char *)t->cache.at + i * bytes, t->type, trial->rows, 1, "/tune/cache"));
  K3_TRY(fill(t, t->query.at, K3_CACHE_F32, trial->heads, 2, "/tune/query"));
  K3_TRY(fill(t, t->query16.at, t->type, trial->heads, 2, "/tune/query"));
  K3_CUDA_TRY(cudaMemcpyAsync(t->rows, &trial->rows, 8, cudaMemcpyHostToDevice, t->cuda.stream));
  K3_TRY(k3_cuda_poll(&t->cuda.launch, 1));
  t->filled_heads = trial->heads, t->filled_rows = trial->rows;
  return K3_OK;
}

/* --- launches ----------------------------------------------------------------------------------------------- */

static K3Status launch_slices(K3Tuner *t, const K3AttentionTrial *trial, int64_t copy, K3CudaUse *use)
{
  int tensor = trial->kernel == K3_ATTENTION_KERNEL_TENSOR;
  K3CudaLaunch launch = t->cuda.launch;
  K3CudaMlaSlice a;
  memset(&a, 0, sizeof a);
  a.heads = trial->heads, a.latent = t->latent, a.rope = t->rope;
  a.heads_per_pass = trial->heads_per_pass, a.slices = trial->slices;
  a.scale = t->wrong && !t->first->empty() ? 2.0 * t->scale : t->scale;
  a.query = tensor ? t->query16.at : t->query.at;
  a.cache = (char *)t->cache.at + copy * cache_bytes(t, trial);
  a.cache_type = t->type, a.capacity = trial->rows, a.rows = t->rows;
  a.acc = t->acc.at, a.m = (float *)t->ml.at, a.l = a.m + trial->heads * trial->slices;
  launch.use = use;
  return tensor ? k3_cuda_mla_tensor(&launch, &a) : k3_cuda_mla_slice(&launch, &a);
}

static K3Status launch_merge(K3Tuner *t, const K3AttentionTrial *trial)
{
  K3CudaMlaCombine a;
  memset(&a, 0, sizeof a);
  a.heads = trial->heads, a.latent = t->latent;
  a.in.acc = t->acc.at, a.in.type = k3_cuda_partial_type(trial->kernel == K3_ATTENTION_KERNEL_TENSOR);
  a.in.m = (float *)t->ml.at, a.in.l = a.in.m + trial->heads * trial->slices;
  a.in.parts = trial->slices, a.in.acc_stride = trial->heads * t->latent, a.in.part_stride = 1,
  a.in.head_stride = trial->slices;
  a.acc = (float *)t->sum_acc.at, a.m = (float *)t->sum_ml.at, a.l = a.m + trial->heads;
  return k3_cuda_mla_combine(&t->cuda.launch, &a);
}

/* --- what it computes ---------------------------------------------------------------------------------------- */

/* The merged output, acc / l; against the first trial's. */
static K3Status check_result(K3Tuner *t, const K3AttentionTrial *trial)
{
  size_t heads = (size_t)trial->heads, latent = (size_t)t->latent;
  double allowed = t->type == K3_CACHE_F32 ? 1e-4 : t->type == K3_CACHE_F16 ? 3e-3 : 2e-2, error = 0, norm = 0;
  std::vector<float> out(heads * latent), ml(2 * heads);
  K3_CUDA_TRY(cudaMemcpyAsync(out.data(), t->sum_acc.at, out.size() * 4, cudaMemcpyDeviceToHost, t->cuda.stream));
  K3_CUDA_TRY(cudaMemcpyAsync(ml.data(), t->sum_ml.at, ml.size() * 4, cudaMemcpyDeviceToHost, t->cuda.stream));
  K3_TRY(k3_cuda_poll(&t->cuda.launch, 1));
  for (size_t i = 0; i < out.size(); i++) out[i] /= ml[heads + i / latent];
  if (t->first->empty()) *t->first = out;
  for (size_t i = 0; i < out.size(); i++) {
    double want = (*t->first)[i], difference = out[i] - want;
    error += difference * difference, norm += want * want;
  }
  error = sqrt(error / norm);
  if (!(error <= allowed))
    K3_FAIL(K3_ERR_DEVICE,
            "tune: %s kernel, %lld heads (%lld a pass) x %lld rows in %lld slices computes something else than the "
            "first trial of "
            "that size: relative L2 %.3g, allowed %.0e; a time of a wrong result is worth nothing",
            trial->kernel == K3_ATTENTION_KERNEL_TENSOR ? "tensor" : "core", (long long)trial->heads,
            (long long)trial->heads_per_pass, (long long)trial->rows, (long long)trial->slices, error, allowed);
  return K3_OK;
}

/* --- times ---------------------------------------------------------------------------------------------------- */

static K3Status capture(K3Tuner *t, const K3AttentionTrial *trial, int nodes, int merge, int64_t copies)
{
  for (int i = 0; i < nodes; i++) {
    K3_TRY(launch_slices(t, trial, i % copies, NULL));
    if (merge) K3_TRY(launch_merge(t, trial));
  }
  return K3_OK;
}

/* Milliseconds of one link of the chain over REPLAYS replays, sorted. */
static K3Status replay(K3Tuner *t, cudaGraphExec_t executable, int nodes, double ms[REPLAYS])
{
  for (int i = 0; i < WARM; i++) K3_CUDA_TRY(cudaGraphLaunch(executable, t->cuda.stream));
  for (int i = 0; i < REPLAYS; i++) {
    float elapsed = 0;
    K3_CUDA_TRY(cudaEventRecord(t->begin, t->cuda.stream));
    K3_CUDA_TRY(cudaGraphLaunch(executable, t->cuda.stream));
    K3_CUDA_TRY(cudaEventRecord(t->end, t->cuda.stream));
    K3_CUDA_TRY(cudaEventSynchronize(t->end));
    K3_CUDA_TRY(cudaEventElapsedTime(&elapsed, t->begin, t->end));
    ms[i] = (double)elapsed / nodes;
  }
  k3_sort(ms, REPLAYS);
  return K3_OK;
}

static K3Status time_chain(K3Tuner *t, const K3AttentionTrial *trial, int nodes, int merge, double *p50, double *p10,
                           double *p90)
{
  int64_t copies = copies_of(cache_bytes(t, trial));
  K3Status status = K3_OK;
  cudaGraph_t graph = NULL;
  cudaGraphExec_t executable = NULL;
  double ms[REPLAYS];
  K3_CUDA_TRY(cudaStreamBeginCapture(t->cuda.stream, cudaStreamCaptureModeThreadLocal));
  status = capture(t, trial, nodes, merge, copies);
  cudaError_t ended = cudaStreamEndCapture(t->cuda.stream, &graph);
  if (status != K3_OK) goto done;
  K3_CUDA_TRY_DONE(ended);
  K3_CUDA_TRY_DONE(cudaGraphInstantiate(&executable, graph, 0));
  K3_TRY_DONE(replay(t, executable, nodes, ms));
  *p50 = k3_quantile(ms, REPLAYS, 0.5), *p10 = k3_quantile(ms, REPLAYS, 0.1), *p90 = k3_quantile(ms, REPLAYS, 0.9);
done:
  if (executable) (void)cudaGraphExecDestroy(executable);
  if (graph) (void)cudaGraphDestroy(graph);
  return status;
}

/* About how long one launch takes: by the second of two, warm. */
static K3Status guess(K3Tuner *t, const K3AttentionTrial *trial, double *ms)
{
  float elapsed = 0;
  K3_CUDA_TRY(cudaEventRecord(t->begin, t->cuda.stream));
  K3_TRY(launch_slices(t, trial, 0, NULL));
  K3_CUDA_TRY(cudaEventRecord(t->end, t->cuda.stream));
  K3_CUDA_TRY(cudaEventSynchronize(t->end));
  K3_CUDA_TRY(cudaEventElapsedTime(&elapsed, t->begin, t->end));
  *ms = elapsed;
  return K3_OK;
}

extern "C" K3Status k3_tuner_measure(K3Tuner *t, K3AttentionTrial *trial)
{
  K3CudaUse use;
  double first_ms = 0;
  K3_TRY(prepare(t, trial));
  K3_TRY(hold(&t->acc, trial->slices * trial->heads * t->latent * 4));
  K3_TRY(hold(&t->ml, 2 * trial->slices * trial->heads * 4));
  K3_TRY(hold(&t->sum_acc, trial->heads * t->latent * 4));
  K3_TRY(hold(&t->sum_ml, 2 * trial->heads * 4));
  K3_CUDA_TRY(
      cudaMemsetAsync(t->acc.at, 0xff, (size_t)t->acc.bytes, t->cuda.stream)); /* NaN: a forgotten write shows */
  K3_CUDA_TRY(cudaMemsetAsync(t->ml.at, 0xff, (size_t)t->ml.bytes, t->cuda.stream));
  K3_TRY(launch_slices(t, trial, 0, &use));
  K3_TRY(launch_merge(t, trial));
  K3_TRY(check_result(t, trial));
  K3_TRY(guess(t, trial, &first_ms));
  int nodes = nodes_of(cache_bytes(t, trial), first_ms);
  K3_TRY(time_chain(t, trial, nodes, 0, &trial->slice_ms, &trial->slice_p10, &trial->slice_p90));
  K3_TRY(time_chain(t, trial, nodes, 1, &trial->ms, &trial->p10, &trial->p90));
  trial->registers = use.registers;
  trial->shared_bytes = use.shared_bytes;
  trial->blocks_per_sm = use.blocks_per_sm;
  trial->gbs = (double)cache_bytes(t, trial) / trial->slice_ms * 1e-6;
  return K3_OK;
}

/* --- opening --------------------------------------------------------------------------------------------------- */

extern "C" K3Status k3_tuner_shape(K3Tuner *t, K3AttentionKernel kernel, int64_t heads, int64_t rows,
                                   K3AttentionShape *shape, int *serves)
{
  int tensor = kernel == K3_ATTENTION_KERNEL_TENSOR;
  *serves = !tensor || k3_cuda_mla_tensor_serves(t->latent, t->rope, t->type);
  if (!*serves) return K3_OK;
  K3_TRY((tensor ? k3_cuda_mla_tensor_shape : k3_cuda_mla_slice_shape)(&t->cuda.launch, heads, t->latent, t->rope,
                                                                       t->type, shape));
  shape->rows = rows;
  return K3_OK;
}

void k3_cuda_tuning_here(const K3Cuda *cuda, K3AttentionTuning *here)
{
  static const char *const names[] = {"f32", "bf16", "f16"};
  memset(here, 0, sizeof *here);
  snprintf(here->device, sizeof here->device, "%s", cuda->device_name);
  describe_kernels(here->kernels);
  snprintf(here->cache, sizeof here->cache, "%s", names[cuda->cache_type]);
  here->multiprocessors = cuda->launch.sm_count;
  here->num_heads = cuda->config->num_heads;
  here->latent = cuda->config->kv_lora_rank;
  here->rope = cuda->config->qk_rope_head_dim;
}

static K3Status open_device(K3Tuner *t, char *line, size_t line_size)
{
  int clock_khz = 0;
  K3_TRY(k3_cuda_device_choose(&t->cuda, 0));
  K3_CUDA_TRY(cudaStreamCreateWithFlags(&t->cuda.stream, cudaStreamNonBlocking));
  K3_CUDA_TRY(cudaEventCreate(&t->begin));
  K3_CUDA_TRY(cudaEventCreate(&t->end));
  K3_TRY(k3_cuda_launch_init(t->cuda.stream, 1, &t->cuda.launch));
  t->cuda.launch.phase = "tune";
  K3_CUDA_TRY(cudaMalloc((void **)&t->rows, 8));
  K3_CUDA_TRY(cudaDeviceGetAttribute(&clock_khz, cudaDevAttrClockRate, t->cuda.device));
  snprintf(line, line_size, "%s, %s, %d multiprocessors, up to %d MHz", t->cuda.device_name, t->cuda.bus,
           t->cuda.launch.sm_count, clock_khz / 1000);
  return K3_OK;
}

extern "C" K3Status k3_tuner_open(const K3Config *config, K3Comm *comm, K3CacheType cache, K3AttentionTuning *here,
                                  char *line, size_t line_size, K3Tuner **out)
{
  K3Tuner *t = (K3Tuner *)calloc(1, sizeof *t);
  *out = NULL;
  if (!t) K3_FAIL(K3_ERR_INPUT, "no memory for the tuner");
  t->first = new std::vector<float>;
  t->cuda.config = config;
  t->cuda.comm = comm;
  t->cuda.world = 1;
  t->type = t->cuda.cache_type = cache == K3_CACHE_TYPE_F32    ? K3_CACHE_F32
                                 : cache == K3_CACHE_TYPE_BF16 ? K3_CACHE_BF16
                                                               : K3_CACHE_F16;
  t->latent = config->kv_lora_rank;
  t->rope = config->qk_rope_head_dim;
  t->wrong = getenv("K3_TEST_TUNE_WRONG") != NULL;
  t->scale = 1.0 / sqrt((double)k3_config_qk_head_dim(config));
  K3Status status = open_device(t, line, line_size);
  if (status != K3_OK) {
    k3_tuner_close(t);
    return status;
  }
  k3_cuda_tuning_here(&t->cuda, here);
  *out = t;
  return K3_OK;
}

extern "C" void k3_tuner_close(K3Tuner *t)
{
  if (!t) return;
  Memory *all[] = {&t->cache, &t->query, &t->query16, &t->acc, &t->ml, &t->sum_acc, &t->sum_ml};
  /* a failure here has nobody left to tell */
  for (Memory *memory : all) (void)cudaFree(memory->at);
  (void)cudaFree(t->rows);
  if (t->begin) (void)cudaEventDestroy(t->begin);
  if (t->end) (void)cudaEventDestroy(t->end);
  if (t->cuda.stream) (void)cudaStreamDestroy(t->cuda.stream);
  delete t->first;
  free(t);
}
