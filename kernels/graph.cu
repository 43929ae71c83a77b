/* A step captured and replayed, or run eagerly; waiting with a watchdog; what went wrong where. See backend.h.
 * Layer: backend (CUDA), host code only.
 *
 * Position, token and row count are read from host memory by the step's first kernel, and the choice is written to host memory
 * by its last, so that one graph serves all steps of an attention plan. Two graphs: with the head and without. */
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/clock.h"
#include "kernels/backend.h"

/* --- phase times ------------------------------------------------------------------------------------------- */

K3Status k3_cuda_timer_open(K3CudaTimer *timer, int room)
{
  timer->count = 0;
  timer->marks = (K3CudaMark *)calloc((size_t)room, sizeof *timer->marks);
  if (!timer->marks) K3_FAIL(K3_ERR_DEVICE, "no memory for %d time marks", room);
  timer->room = room;
  K3_CUDA_TRY(cudaHostAlloc((void **)&timer->stamps, (size_t)room * sizeof *timer->stamps, cudaHostAllocMapped));
  return K3_OK;
}

K3Status k3_cuda_timer_close(K3CudaTimer *timer)
{
  free(timer->marks);
  cudaError_t error = timer->stamps ? cudaFreeHost(timer->stamps) : cudaSuccess;
  memset(timer, 0, sizeof *timer);
  return error == cudaSuccess ? K3_OK : k3_cuda_failed(error, "cudaFreeHost", __FILE__, __LINE__);
}

K3Status k3_cuda_mark(K3Cuda *cuda, K3Phase phase, int idle)
{
  K3CudaTimer *timer = cuda->timer;
  if (!timer) return K3_OK;
  if (timer->count == timer->room)
    K3_FAIL(K3_ERR_DEVICE, "more than %d time marks in a step: a fault of k3decode", timer->room);
  timer->marks[timer->count].phase = phase;
  timer->marks[timer->count].idle = idle;
  return k3_cuda_stamp(&cuda->launch, timer->stamps + timer->count++);
}

static void read_times(const K3CudaTimer *timer, K3StepResult *result)
{
  for (int k = 0; k + 1 < timer->count; k++)
    if (!timer->marks[k].idle)
      result->phase_ms[timer->marks[k].phase] += (double)(int64_t)(timer->stamps[k + 1] - timer->stamps[k]) * 1e-6;
}

/* --- where in the step --------------------------------------------------------------------------------------- */

/* Layer and phase of sublayer s; -1: the embedding. */
static void name_sublayer(const K3Cuda *cuda, int64_t s, int64_t *layer, const char **phase)
{
  const K3Config *c = cuda->config;
  K3Phase at = K3_PHASE_EMBED;
  *layer = s < 0 || s >= 2 * c->num_layers ? -1 : s / 2;
  if (s >= 2 * c->num_layers) at = K3_PHASE_HEAD;
  else if (s >= 0 && s % 2 == 0) at = c->layer_types[s / 2] == K3_LAYER_KDA ? K3_PHASE_ATTN_KDA : K3_PHASE_ATTN_MLA;
  else if (s >= 0) at = k3_config_is_dense(c, s / 2) ? K3_PHASE_FFN_DENSE : K3_PHASE_FFN_MOE;
  *phase = k3_phase_names[at];
}

/* The first sublayer whose norm has not run in this step, by the poison in its row; -2 when that cannot be read. */
static int64_t first_unreached(K3Cuda *cuda)
{
  int64_t count = cuda->watch_rows * cuda->watch_width, s = -2;
  float *copy = (float *)malloc((size_t)count * sizeof *copy);
  if (copy &&
      cudaMemcpyAsync(copy, cuda->watch, (size_t)count * sizeof *copy, cudaMemcpyDeviceToHost, cuda->aside) ==
          cudaSuccess &&
      cudaStreamSynchronize(cuda->aside) == cudaSuccess)
    for (s = 0; s < cuda->watch_rows; s++)
      if (k3_float_bits(copy[s * cuda->watch_width]) == 0xffffffffu) break;
  free(copy);
  return s;
}

static K3Status hangs(K3Cuda *cuda)
{
  int64_t layer = cuda->launch.layer;
  const char *phase = cuda->launch.phase;
  if (!cuda->waits && cuda->watch) {
    int64_t s = first_unreached(cuda);
    if (s == -2) layer = -1, phase = "unknown";
    else name_sublayer(cuda, s - 1, &layer, &phase);
  }
  char who[512] = "";
  if (cuda->communicates && cuda->comm->roll_call) cuda->comm->roll_call(cuda->comm, 2.0, who, sizeof who);
  K3_FAIL(K3_ERR_DEVICE,
          "the step at position %lld hangs in layer %lld, phase %s: nothing moved for %.0f s (K3_WATCHDOG_S)%s%s",
          (long long)cuda->position, (long long)layer, phase, cuda->watchdog_s,
          who[0] ? "; a collective there waits for another rank: " : "", who);
}

K3Status k3_cuda_wait(K3Cuda *cuda)
{
  double deadline = 0.0;
  for (uint64_t turn = 1;; turn++) {
    cudaError_t error = cudaStreamQuery(cuda->stream);
    if (error == cudaSuccess) return K3_OK;
    if (error != cudaErrorNotReady) {
      if (cuda->waits)
        K3_FAIL(K3_ERR_DEVICE, "device error in layer %lld, phase %s at position %lld: %s (%s)",
                (long long)cuda->launch.layer, cuda->launch.phase, (long long)cuda->position, cudaGetErrorString(error),
                cudaGetErrorName(error));
      K3_FAIL(K3_ERR_DEVICE,
              "device error in the captured step at position %lld: %s (%s); --graph off names layer and phase",
              (long long)cuda->position, cudaGetErrorString(error), cudaGetErrorName(error));
    }
    if (turn % 1024) continue;
    double now = 1e-3 * k3_clock_ms();
    if (deadline == 0.0) deadline = now + cuda->watchdog_s;
    if (cuda->collectives.poll) K3_TRY(cuda->collectives.poll(cuda));
    if (now > deadline) return hangs(cuda);
  }
}

/* --- the graph ---------------------------------------------------------------------------------------------------- */

K3Status k3_cuda_graph_close(K3CudaGraph *graph)
{
  cudaError_t error = graph->exec ? cudaGraphExecDestroy(graph->exec) : cudaSuccess;
  cudaError_t other = graph->graph ? cudaGraphDestroy(graph->graph) : cudaSuccess;
  if (error == cudaSuccess) error = other;
  K3Status timer = k3_cuda_timer_close(&graph->timer);
  memset(graph, 0, sizeof *graph);
  if (error != cudaSuccess) return k3_cuda_failed(error, "release of a graph", __FILE__, __LINE__);
  return timer;
}

/* Marks: two a sublayer, and two for each collective of up to three. */
static int marks_of_step(const K3Cuda *cuda) { return (int)(16 * cuda->config->num_layers + 16); }

/* K3_VERBOSE: what a step reads, and how long that takes at the streaming rate of the H200. */
static void describe_capture(const K3Cuda *cuda, const K3CudaGraph *graph, int choose)
{
  const double rate = 4.55e12;
  int64_t all = 0;
  for (int p = 0; p < K3_PHASE_COUNT; p++) all += cuda->phase_bytes[p];
  fprintf(
      stderr,
      "# captured a step %s: %lld nodes, %.3f GB read, at least %.3f ms; %lld slices, %lld passes up to %lld rows\n",
      choose ? "with head" : "without head", (long long)graph->kernels, (double)all * 1e-9, (double)all / rate * 1e3,
      (long long)cuda->attention.slices, (long long)cuda->attention.passes, (long long)cuda->attention.rows);
  for (int p = 0; p < K3_PHASE_COUNT; p++)
    if (cuda->phase_bytes[p])
      fprintf(stderr, "# reads %-10s %7.3f GB, at least %.3f ms\n", k3_phase_names[p],
              (double)cuda->phase_bytes[p] * 1e-9, (double)cuda->phase_bytes[p] / rate * 1e3);
}

static K3Status capture(K3Cuda *cuda, int choose)
{
  K3CudaGraph *graph = &cuda->graphs[choose];
  size_t nodes = 0;
  K3_TRY(k3_cuda_graph_close(graph));
  if (cuda->timed) K3_TRY(k3_cuda_timer_open(&graph->timer, marks_of_step(cuda)));
  cuda->timer = cuda->timed ? &graph->timer : NULL;
  K3_CUDA_TRY(cudaStreamBeginCapture(cuda->stream, cudaStreamCaptureModeRelaxed));
  K3Status status = k3_cuda_enqueue_step(cuda, choose);
  cudaError_t error = cudaStreamEndCapture(cuda->stream, &graph->graph);
  cuda->timer = NULL;
  if (status != K3_OK) return status; /* the capture may have ended badly because of it */
  if (error != cudaSuccess) return k3_cuda_failed(error, "cudaStreamEndCapture", __FILE__, __LINE__);
  K3_CUDA_TRY(cudaGraphGetNodes(graph->graph, NULL, &nodes));
  K3_CUDA_TRY(cudaGraphInstantiate(&graph->exec, graph->graph, 0));
  K3_CUDA_TRY(cudaGraphUpload(graph->exec, cuda->stream));
  graph->plan_rows = cuda->attention.rows;
  graph->kernels = (int64_t)nodes;
  if (cuda->verbose) describe_capture(cuda, graph, choose);
  return K3_OK;
}

/* --- the step -------------------------------------------------------------------------------------------------------- */

static K3Status check_input(const K3Cuda *cuda, int64_t token)
{
  if (token < 0 || token >= cuda->config->vocab_size)
    K3_FAIL(K3_ERR_INPUT, "token %lld at position %lld is outside the vocabulary of %lld", (long long)token,
            (long long)cuda->position, (long long)cuda->config->vocab_size);
  if (cuda->position >= cuda->options.capacity)
    K3_FAIL(K3_ERR_INPUT, "position %lld: the cache holds %lld", (long long)cuda->position,
            (long long)cuda->options.capacity);
  return K3_OK;
}

static K3Status run_eagerly(K3Cuda *cuda, int choose)
{
  if (!cuda->eager_timer.marks) K3_TRY(k3_cuda_timer_open(&cuda->eager_timer, marks_of_step(cuda)));
  cuda->timer = &cuda->eager_timer;
  cuda->timer->count = 0;
  cuda->waits = 1;
  K3Status status = k3_cuda_enqueue_step(cuda, choose);
  cuda->timer = NULL;
  return status;
}

/* Test hook: K3_TEST_STOP_AT=POSITION stops the last rank there, so that the others wait for it inside a replay. */
static void stop_if_planted(const K3Cuda *cuda)
{
  const char *at = getenv("K3_TEST_STOP_AT");
  if (at && cuda->communicates && cuda->rank == cuda->world - 1 && atoll(at) == cuda->position) raise(SIGSTOP);
}

static K3Status replay(K3Cuda *cuda, int choose)
{
  K3CudaGraph *graph = &cuda->graphs[choose];
  cuda->waits = 0;
  if (!graph->exec || graph->plan_rows != cuda->attention.rows) K3_TRY(capture(cuda, choose));
  stop_if_planted(cuda);
  double begin = 1e-3 * k3_clock_ms();
  K3_CUDA_TRY(cudaGraphLaunch(graph->exec, cuda->stream));
  cuda->launch_s += 1e-3 * k3_clock_ms() - begin;
  cuda->launches++;
  return K3_OK;
}

/* What the last kernel found. */
static K3Status check_output(const K3Cuda *cuda, int choose)
{
  const volatile K3CudaStepOut *out = cuda->out;
  int64_t layer = -1;
  const char *phase = k3_phase_names[K3_PHASE_HEAD];
  if (cuda->bad_bias_layer >= 0)
    K3_FAIL(K3_ERR_DEVICE, "a non-finite value in layer %lld, phase %s: router_bias holds it (try info --check)",
            (long long)cuda->bad_bias_layer, k3_phase_names[K3_PHASE_FFN_MOE]);
  if (out->bad < 0 && (!choose || (out->token >= 0 && isfinite(out->logit)))) return K3_OK;
  /* A whole row of NaN came in from the sublayer before; single ones are of the row's own norm. */
  if (out->bad >= 0) name_sublayer(cuda, out->bad % 2 ? out->bad / 2 : out->bad / 2 - 1, &layer, &phase);
  K3_FAIL(K3_ERR_DEVICE,
          "a non-finite value at position %lld in layer %lld, phase %s: bad weights (try info --check) or an overflow",
          (long long)cuda->position, (long long)layer, phase);
}

K3Status k3_cuda_step(K3Backend *backend, int64_t token, int choose, int want_logits, K3StepResult *result)
{
  K3Cuda *cuda = (K3Cuda *)backend->state;
  int64_t rows = k3_plan_cache_rows(cuda->plan, cuda->rank, cuda->position + 1);
  choose = choose != 0;
  memset(result, 0, sizeof *result);
  result->token = -1;
  K3_TRY(check_input(cuda, token));
  /* From the first step on, as loading takes ranks unlike times. Between steps rank 0 may wait for a slow file system, longer
   * than a step may hang. */
  if (cuda->communicates) cuda->comm->deadline_s = 5.0 * cuda->watchdog_s;
  if (cuda->attention.slices == 0 || rows > cuda->attention.rows) K3_TRY(k3_cuda_plan_attention(cuda, rows));
  volatile K3CudaStepIn *in = cuda->in;
  in->token = token;
  in->position = cuda->position;
  in->rows = rows;
  cuda->out->bad = 0; /* so that a step that does not finish is none */
  cuda->out->token = -1;
  K3_TRY(cuda->options.graph ? replay(cuda, choose) : run_eagerly(cuda, choose));
  if (choose && want_logits)
    K3_CUDA_TRY(cudaMemcpyAsync(cuda->host_logits, cuda->logits, (size_t)k3_cuda_own(cuda, K3_SHARE_VOCAB) * 4,
                                cudaMemcpyDeviceToHost, cuda->stream));
  K3_TRY(k3_cuda_wait(cuda));
  K3_TRY(check_output(cuda, choose));
  if (!cuda->options.graph) read_times(&cuda->eager_timer, result);
  else if (cuda->timed) read_times(&cuda->graphs[choose].timer, result);
  result->token = choose ? cuda->out->token : -1;
  result->logits = choose && want_logits ? cuda->host_logits : NULL;
  cuda->position++;
  return K3_OK;
}
