/* Checks and times the collectives between GPUs that a step uses, through the backend's own table (kernels/comm_nccl.cu,
 * kernels/comm_device.cu). Host code and CUDA C++; needs CUDA, NCCL and as many GPUs as ranks:
 *
 *     K3_COMM=nccl|device mpirun -n 2 tests/comm_check [--replays 1000] [--check|--time]
 *
 * Known faults F28 (data of the last replay) and F29 (a buffer overwritten while a slow rank still reads). A step here is a list of
 * collectives, odd and even in number, over the same two buffers: each is filled anew (a function of step, collective, rank and index;
 * the step is counted on the device), sent at once, and summed up bit by bit. One rank is delayed by a spin: before it sends, between
 * its reading and the next fill, and (K3_COMM=device) inside the kernel before the end of the round. 1,000 replays of the captured
 * step must give the checksums of 1,000 steps that were not captured, all ranks the same ones where all get the same, and the first
 * steps those that the host computes. Two controls plant a fault, and must be caught. Then the norm that sums its input over the ranks
 * in its own kernel: every bit that it leaves, against the two kernels. Exit status 0, or 1 when a row failed. */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <algorithm>
#include <stdio.h>
#include <stdlib.h>
#include <vector>

#include "kernels/backend.h"
#include "kernels/wait.cuh"

namespace {

enum { MOST = 8, THREADS = 256, MOST_RANKS = 16, HOST_STEPS = 6 };
enum { REDUCE, GATHER, ALL_TO_ALL };
enum { NORM_NONE, NORM_ALONE /* without the all-reduce: for its time */, NORM_APART, NORM_WITH };
enum { SPIN_NONE, SPIN_BEFORE, SPIN_AFTER, SPIN_INSIDE };
enum { CONTROL_NONE, CONTROL_FLIP, CONTROL_SKIP };

/* What a step of Kimi K3 sends, and sizes off every boundary. Pieces are in elements of `size` bytes. */
struct Message {
  const char *name;
  int kind, buffers;
  int64_t size;
  int64_t total[3]; /* elements: of the whole vector; all-to-all: of what each rank gets from one */
  int norm = NORM_NONE; /* of its result, which is left in the place of the message */
};

const Message messages[] = {
    {"all-reduce 7168 f32", REDUCE, 1, 4, {7168}},
    {"gather latent 3584 + scores 896 f32", GATHER, 2, 4, {3584, 896}},
    {"all-reduce 3584 f32", REDUCE, 1, 4, {3584}},
    {"gather queries 96 x 576 f16", GATHER, 1, 2, {96 * 576}},
    {"all-to-all partials 96 x (512 + 2) f32", ALL_TO_ALL, 3, 4, {96 * 512, 96, 96}},
    {"gather pairs of 16 bytes", GATHER, 1, 16, {0}},
    {"all-reduce 1023 f32", REDUCE, 1, 4, {1023}},
    {"gather 1001 + 3 f32, uneven", GATHER, 2, 4, {1001, 3}},
    {"all-reduce 163840 f32", REDUCE, 1, 4, {163840}},
    {"norm 7168 f32", REDUCE, 1, 4, {7168}, NORM_ALONE},
    {"norm behind an all-reduce 7168 f32", REDUCE, 1, 4, {7168}, NORM_APART},
    {"norm with the all-reduce 7168 f32", REDUCE, 1, 4, {7168}, NORM_WITH},
    {"norm with the all-reduce 1000 f32", REDUCE, 1, 4, {1000}, NORM_WITH},
};
enum { MESSAGES = sizeof messages / sizeof *messages };

typedef struct {
  K3Cuda cuda;
  uint32_t *send, *receive; /* [room] words each; all-reduce: in place in `receive` */
  int64_t room;
  int64_t *d_step;
  unsigned long long *d_sums;
  float *norm; /* [NORM_FLOATS]: what norm_of puts there */
  int64_t replays, failed, rows;
  unsigned long long digest; /* of the checksums: the same for all ways of communicating, up to two ranks */
} Check;

/* Word i of what `rank` contributes to collective k of a step. */
__host__ __device__ inline uint32_t word_of(int64_t step, int k, int rank, int64_t i, int kind)
{
  uint32_t x = (uint32_t)step * 0x9e3779b9u ^ (uint32_t)(k * 64 + rank) * 0x85ebca6bu ^ (uint32_t)i * 0xc2b2ae35u;
  x ^= x >> 16, x *= 0x7feb352du, x ^= x >> 15, x *= 0x846ca68bu, x ^= x >> 16;
  if (kind != REDUCE) return x;
  return 0x3f800000u - ((x & 31u) << 23) + (x >> 9) | (x & 32u) << 26; /* a float, of either sign, 2^-31 to 2 */
}

__host__ __device__ inline unsigned long long mix(uint32_t word, int64_t i)
{
  unsigned long long x = ((unsigned long long)word << 32 | (uint32_t)i) * 0x9e3779b97f4a7c15ull;
  return x ^ x >> 29;
}

/* --- kernels of the made-up step ------------------------------------------------------------------------------- */

/* Where this rank's words of a message stand: word i of the contribution goes to at[b] + i. */
typedef struct {
  int kind, k, rank, buffers;
  uint32_t *to[3];
  int64_t count[3]; /* words of this rank's contribution */
  uint32_t *poison; /* [poisoned] becomes 0xffffffff before: received words that never come would show */
  int64_t poisoned;
} Fill;

__global__ void poison_kernel(uint32_t *words, int64_t count)
{
  k3_wait();
  for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < count; i += gridDim.x * (int64_t)blockDim.x)
    words[i] = 0xffffffffu;
}

__global__ void fill_kernel(const Fill a, const int64_t *d_step)
{
  k3_wait();
  int64_t step = *(const volatile int64_t *)d_step, base = 0;
  for (int b = 0; b < a.buffers; b++) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < a.count[b];
         i += gridDim.x * (int64_t)blockDim.x)
      a.to[b][i] = word_of(step, a.k, a.rank, base + i, a.kind);
    base += a.count[b];
  }
}

/* sums[step · MOST + k] += the checksum of words [count]. */
__global__ void sum_kernel(const uint32_t *words, int64_t count, int k, const int64_t *d_step, unsigned long long *sums)
{
  k3_wait();
  unsigned long long sum = 0;
  for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < count; i += gridDim.x * (int64_t)blockDim.x)
    sum += mix(__ldcg(words + i), i);
  for (int o = 16; o > 0; o /= 2) sum += __shfl_down_sync(~0u, sum, o);
  if (threadIdx.x % 32 == 0) atomicAdd(&sums[*(const volatile int64_t *)d_step * MOST + k], sum);
}

/* Every third step or so. */
__global__ void spin_kernel(const int64_t *d_step, int k, int64_t ns)
{
  k3_wait();
  uint32_t x = (uint32_t)(*(const volatile int64_t *)d_step * MOST + k) * 2654435761u;
  if ((x >> 16) % 3 != 0) return;
  unsigned long long begin, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin)::"memory");
  do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)::"memory");
  while ((int64_t)(now - begin) < ns);
}

__global__ void flip_kernel(uint32_t *word, const int64_t *d_step)
{
  k3_wait();
  if (*(const volatile int64_t *)d_step == 7) *word ^= 1u;
}

__global__ void tick_kernel(int64_t *d_step)
{
  k3_wait();
  ++*d_step;
}

/* Between timed collectives: reads what the one before left, writes what the next sends. */
__global__ void touch_kernel(uint32_t *words, int64_t count)
{
  k3_wait();
  int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
  if (i < count) words[i] = __ldcg(words + i) & 0x3fffffffu;
}

K3Status launch(Check *check, const char *name, const void *kernel, unsigned grid, unsigned block, void **arguments)
{
  return k3_cuda_launch_kernel(&check->cuda.launch, name, kernel, grid, block, 1, 0, arguments);
}

/* --- messages ----------------------------------------------------------------------------------------------------- */

/* Pieces of a message for this world. Received words stand in `receive` one buffer after the other. */
typedef struct {
  int64_t count[3][MOST_RANKS], displacement[3][MOST_RANKS];         /* gather: pieces; all-to-all: sent */
  int64_t got_count[3][MOST_RANKS], got_displacement[3][MOST_RANKS]; /* all-to-all: received */
  int64_t words[3], sent_words[3];                                   /* received; contributed */
  K3Pieces pieces[3], received[3];
} Shape;

void shape_of(const Check *check, const Message *m, Shape *s)
{
  int world = check->cuda.world, rank = check->cuda.rank;
  memset(s, 0, sizeof *s);
  for (int b = 0; b < m->buffers; b++) {
    int64_t at = 0, total = m->total[b] ? m->total[b] : world;
    for (int r = 0; r < world; r++) {
      int64_t each = total / world + (r < total % world);
      if (m->kind == GATHER && m->size == 2) each = 576 * (96 / world + (r < 96 % world));
      s->count[b][r] = each;
      s->displacement[b][r] = at;
      at += each;
    }
    int64_t own = s->count[b][rank];
    for (int r = 0; r < world; r++) s->got_count[b][r] = own, s->got_displacement[b][r] = r * own;
    s->pieces[b].count = s->count[b], s->pieces[b].displacement = s->displacement[b];
    s->received[b].count = s->got_count[b], s->received[b].displacement = s->got_displacement[b];
    s->words[b] = (m->kind == ALL_TO_ALL ? own * world : at) * m->size / 4;
    s->sent_words[b] = (m->kind == GATHER ? own : at) * m->size / 4;
  }
}

/* --- the norm ----------------------------------------------------------------------------------------------------- */

enum {
  NORM_MOST = 12288,
  NORM_IN = 4 * NORM_MOST + K3_NORM_MIX + 1,
  NORM_OUT = 4 * NORM_MOST,
  NORM_FLOATS = NORM_IN + NORM_OUT
};

/* A norm of n values whose p is `branch`: read and written in place. In check->norm: bank's part, score, norm, p, mix; outputs behind. */
K3CudaNorm norm_of(const Check *check, float *branch, int64_t n, int early)
{
  K3CudaNorm a;
  memset(&a, 0, sizeof a);
  float *in = check->norm, *out = in + NORM_IN;
  a.n = n;
  a.mixed = in, a.score = in + NORM_MOST, a.norm = in + 2 * NORM_MOST, a.mix = in + 4 * NORM_MOST;
  a.p = branch, a.branch = branch, a.replace = 1;
  a.early = early;
  a.res_eps = a.eps = 1e-5f;
  a.x.scales = out + 2 * NORM_MOST, a.x.codes = (int8_t *)(out + 3 * NORM_MOST);
  if (n % 32) a.x.codes = NULL, a.x.values = out;
  return a;
}

/* As a step does it: in one kernel where the collectives serve that. */
K3Status reduce_and_norm(Check *check, const K3CudaNorm *a, int how)
{
  K3CudaComm *collectives = &check->cuda.collectives;
  if (how == NORM_WITH && collectives->all_reduce_norm) return collectives->all_reduce_norm(&check->cuda, a);
  if (how != NORM_ALONE) K3_TRY(collectives->all_reduce(&check->cuda, (float *)a->branch, a->n));
  return k3_cuda_norm(&check->cuda.launch, a);
}

/* Puts this rank's contribution in place and sends it. early: the kernel before has waited for all before itself. */
K3Status enqueue_message(Check *check, int index, int k, int skip, int early, int *filled)
{
  K3Cuda *cuda = &check->cuda;
  const Message *m = &messages[index];
  Shape s;
  shape_of(check, m, &s);
  Fill fill;
  memset(&fill, 0, sizeof fill);
  fill.kind = m->kind, fill.k = k, fill.rank = cuda->rank, fill.buffers = m->buffers;
  uint32_t *send = m->kind == REDUCE ? check->receive : check->send, *receive = check->receive;
  int64_t sent = 0, got = 0;
  const void *own[3];
  void *data[3];
  float *out[3], *in[3];
  for (int b = 0; b < m->buffers; b++) {
    fill.to[b] = send + sent;
    fill.count[b] = s.sent_words[b];
    own[b] = fill.to[b], data[b] = receive + got;
    out[b] = (float *)fill.to[b], in[b] = (float *)(receive + got);
    sent += s.sent_words[b] + s.sent_words[b] % 2, got += s.words[b];
  }
  if (filled) {
    if (m->kind != REDUCE) {
      uint32_t *words = receive;
      void *arguments[] = {&words, &got};
      K3_TRY(launch(check, "poison_kernel", (const void *)poison_kernel, 64, THREADS, arguments));
    }
    void *arguments[] = {&fill, &check->d_step};
    K3_TRY(launch(check, "fill_kernel", (const void *)fill_kernel, 64, THREADS, arguments));
    *filled = (int)got;
  }
  if (skip) return K3_OK;
  if (m->norm) {
    const K3CudaNorm norm = norm_of(check, (float *)receive, s.words[0], early);
    return reduce_and_norm(check, &norm, m->norm);
  }
  if (m->kind == REDUCE) return cuda->collectives.all_reduce(cuda, (float *)receive, s.words[0]);
  if (m->kind == GATHER) return cuda->collectives.all_gather(cuda, m->buffers, own, data, s.pieces, m->size);
  return cuda->collectives.all_to_all(cuda, m->buffers, out, s.pieces, in, s.received);
}

/* What the checksum of collective k must be, by the host. All-reduce: in rank order; exact for any order up to two ranks. */
unsigned long long expected(const Check *check, int64_t step, int k, const Message *m)
{
  int world = check->cuda.world, rank = check->cuda.rank;
  unsigned long long sum = 0;
  int64_t at = 0;
  Shape s;
  shape_of(check, m, &s);
  for (int b = 0; b < m->buffers; b++) {
    if (m->kind == REDUCE)
      for (int64_t i = 0; i < s.words[0]; i++) {
        float total = k3_float_from_bits(word_of(step, k, 0, i, REDUCE));
        for (int r = 1; r < world; r++) total += k3_float_from_bits(word_of(step, k, r, i, REDUCE));
        sum += mix(k3_float_bits(total), i);
      }
    for (int r = 0; r < world && m->kind != REDUCE; r++) {
      /* Rank r's words of buffer b begin after its words of the buffers before. */
      int64_t base = 0, count = m->kind == GATHER ? s.count[b][r] * m->size / 4 : s.got_count[b][r];
      for (int c = 0; c < b; c++) base += m->kind == GATHER ? s.count[c][r] * m->size / 4 : s.sent_words[c];
      if (m->kind == ALL_TO_ALL) base += s.displacement[b][rank];
      for (int64_t i = 0; i < count; i++) sum += mix(word_of(step, k, r, base + i, m->kind), at++);
    }
  }
  return sum;
}

/* --- steps -------------------------------------------------------------------------------------------------------- */

typedef struct {
  int count, kinds[MOST];
  int spin, spinning; /* where, which rank */
  int control;
} Step;

K3Status enqueue_step(Check *check, const Step *step, int captured)
{
  int64_t ns = 30000;
  int spins = check->cuda.rank == step->spinning;
  for (int k = 0; k < step->count; k++) {
    int got = 0;
    void *spin[] = {&check->d_step, &k, &ns};
    if (spins && step->spin == SPIN_BEFORE) K3_TRY(launch(check, "spin_kernel", (const void *)spin_kernel, 1, 1, spin));
    K3_TRY(enqueue_message(check, step->kinds[k], k, captured && k == 0 && step->control == CONTROL_SKIP, 1, &got));
    if (spins && step->spin == SPIN_AFTER) K3_TRY(launch(check, "spin_kernel", (const void *)spin_kernel, 1, 1, spin));
    if (captured && k == 0 && step->control == CONTROL_FLIP && check->cuda.rank == 0) {
      void *flip[] = {&check->receive, &check->d_step};
      K3_TRY(launch(check, "flip_kernel", (const void *)flip_kernel, 1, 1, flip));
    }
    int64_t words = got;
    void *sum[] = {&check->receive, &words, &k, &check->d_step, &check->d_sums};
    K3_TRY(launch(check, "sum_kernel", (const void *)sum_kernel, 32, THREADS, sum));
  }
  void *tick[] = {&check->d_step};
  return launch(check, "tick_kernel", (const void *)tick_kernel, 1, 1, tick);
}

K3Status restart(Check *check)
{
  cudaStream_t stream = check->cuda.stream;
  K3_CUDA_TRY(cudaMemsetAsync(check->d_step, 0, sizeof *check->d_step, stream));
  K3_CUDA_TRY(cudaMemsetAsync(check->d_sums, 0, (size_t)check->replays * MOST * 8, stream));
  K3_CUDA_TRY(cudaStreamSynchronize(stream));
  return check->cuda.comm->barrier(check->cuda.comm);
}

K3Status read_sums(Check *check, std::vector<int64_t> *sums)
{
  sums->resize((size_t)check->replays * MOST);
  K3_TRY(k3_cuda_wait(&check->cuda));
  K3_CUDA_TRY(cudaMemcpy(sums->data(), check->d_sums, sums->size() * 8, cudaMemcpyDeviceToHost));
  return K3_OK;
}

K3Status run_eager(Check *check, const Step *step, std::vector<int64_t> *sums)
{
  K3_TRY(restart(check));
  for (int64_t n = 0; n < check->replays; n++) K3_TRY(enqueue_step(check, step, 0));
  return read_sums(check, sums);
}

/* All replays are launched at once: no rank waits for its host between them. */
K3Status run_captured(Check *check, const Step *step, std::vector<int64_t> *sums)
{
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  cudaStream_t stream = check->cuda.stream;
  K3_TRY(restart(check));
  K3_CUDA_TRY(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
  K3Status status = enqueue_step(check, step, 1);
  K3_CUDA_TRY(cudaStreamEndCapture(stream, &graph));
  K3_TRY(status);
  K3_CUDA_TRY(cudaGraphInstantiate(&exec, graph, 0));
  for (int64_t n = 0; n < check->replays; n++) K3_CUDA_TRY(cudaGraphLaunch(exec, stream));
  K3_TRY(read_sums(check, sums));
  K3_CUDA_TRY(cudaGraphExecDestroy(exec));
  K3_CUDA_TRY(cudaGraphDestroy(graph));
  return K3_OK;
}

/* How many collectives differ: captured from eager, between ranks, from the host's. Of all ranks together. */
K3Status count_wrong(Check *check, const Step *step, const std::vector<int64_t> &eager,
                     const std::vector<int64_t> &captured, int64_t wrong[3])
{
  K3Comm *comm = check->cuda.comm;
  std::vector<int64_t> low(captured), high(captured);
  wrong[0] = wrong[1] = wrong[2] = 0;
  K3_TRY(comm->all_reduce(comm, low.data(), (int64_t)low.size(), K3_ELEMENT_I64, K3_REDUCE_MIN));
  K3_TRY(comm->all_reduce(comm, high.data(), (int64_t)high.size(), K3_ELEMENT_I64, K3_REDUCE_MAX));
  for (int64_t n = 0; n < check->replays; n++)
    for (int k = 0; k < step->count; k++) {
      const Message *m = &messages[step->kinds[k]];
      size_t at = (size_t)(n * MOST + k);
      wrong[0] += eager[at] != captured[at];
      wrong[1] += m->kind != ALL_TO_ALL && low[at] != high[at];
      if (n < HOST_STEPS && (m->kind != REDUCE || check->cuda.world <= 2 || check->cuda.collectives.device))
        wrong[2] += (int64_t)expected(check, n, k, m) != captured[at];
    }
  return comm->all_reduce(comm, wrong, 3, K3_ELEMENT_I64, K3_REDUCE_SUM);
}

K3Status check_step(Check *check, Step step)
{
  static const char *const spins[] = {"none", "before sending", "after reading", "inside the round"};
  static const char *const controls[] = {"", "control: a bit flipped", "control: a collective left out"};
  std::vector<int64_t> eager, captured;
  int64_t wrong[3], planted = step.control != CONTROL_NONE;
  K3_TRY(run_eager(check, &step, &eager));
  K3_TRY(run_captured(check, &step, &captured));
  K3_TRY(count_wrong(check, &step, eager, captured, wrong));
  int64_t sum = wrong[0] + wrong[1] + wrong[2];
  if (step.spin == SPIN_NONE && !planted)
    for (int64_t sum_of_one : captured) check->digest = check->digest * 31 + (unsigned long long)sum_of_one;
  int good = planted ? wrong[0] > 0 && (wrong[1] > 0 || check->cuda.world == 1) : sum == 0;
  check->failed += !good;
  check->rows++;
  if (check->cuda.rank == 0)
    printf("%2d  %-17s %4d  %8lld  %14lld %13lld %10lld  %s %s\n", step.count, spins[step.spin], step.spinning,
           (long long)check->replays, (long long)wrong[0], (long long)wrong[1], (long long)wrong[2],
           good ? "ok" : "FAIL", controls[step.control]);
  return K3_OK;
}

/* What a norm of n leaves, with unlike inputs for each seed: its branch is this rank's own. plant: one value of one
 * rank's is moved. */
K3Status run_norm(Check *check, int64_t n, int seed, int how, int plant, std::vector<uint32_t> *left)
{
  K3Cuda *cuda = &check->cuda;
  std::vector<float> in(NORM_IN), branch((size_t)n);
  for (int64_t i = 0; i < NORM_IN; i++) in[i] = k3_float_from_bits(word_of(seed, 8, 0, i, REDUCE));
  in[4 * NORM_MOST + 1] = 3.0f + fabsf(in[4 * NORM_MOST + 1]),
                     in[4 * NORM_MOST + 2] = 2.0f * (float)n; /* Σ exp, |mixed|² */
  for (int64_t i = 0; i < n; i++) branch[i] = k3_float_from_bits(word_of(seed, 9, cuda->rank, i, REDUCE));
  if (plant && cuda->rank == cuda->world - 1) branch[n - 1] += 1.0f;
  K3CudaNorm a = norm_of(check, (float *)check->receive, n, seed % 2);
  if (seed % 4 < 2) a.p = check->norm + 3 * NORM_MOST, a.replace = 0, a.banked = check->norm + NORM_IN + NORM_MOST;
  if (seed % 3 == 0) a.mixed = a.mix = a.score = NULL;
  K3_CUDA_TRY(cudaMemset(check->norm, 0xff, NORM_FLOATS * 4));
  K3_CUDA_TRY(cudaMemcpy(check->norm, in.data(), NORM_IN * 4, cudaMemcpyHostToDevice));
  K3_CUDA_TRY(cudaMemcpy(check->receive, branch.data(), (size_t)n * 4, cudaMemcpyHostToDevice));
  K3_CUDA_TRY(cudaDeviceSynchronize());
  K3_TRY(reduce_and_norm(check, &a, how));
  K3_TRY(k3_cuda_wait(cuda));
  left->resize(NORM_FLOATS + (size_t)n);
  K3_CUDA_TRY(cudaMemcpy(left->data(), check->norm, NORM_FLOATS * 4, cudaMemcpyDeviceToHost));
  if (a.replace)
    K3_CUDA_TRY(cudaMemcpy(left->data() + NORM_FLOATS, check->receive, (size_t)n * 4, cudaMemcpyDeviceToHost));
  return K3_OK;
}

/* One kernel against two. */
K3Status check_norms(Check *check)
{
  enum { SEEDS = 12 };
  static const int64_t sizes[] = {7168, 8192, 4096, 1000, 64, NORM_MOST};
  if (!check->cuda.collectives.all_reduce_norm) return K3_OK;
  if (check->cuda.rank == 0)
    printf("# norm with its all-reduce in one kernel against two, %d inputs: words that differ; with a value of one "
           "rank moved\n",
           SEEDS);
  for (int64_t n : sizes) {
    int64_t wrong[2] = {0, 0}, missed = 0;
    for (int seed = 0; seed < SEEDS; seed++) {
      std::vector<uint32_t> apart, with, planted;
      K3_TRY(run_norm(check, n, seed, NORM_APART, 0, &apart));
      K3_TRY(run_norm(check, n, seed, NORM_WITH, 0, &with));
      K3_TRY(run_norm(check, n, seed, NORM_WITH, 1, &planted));
      int64_t differ[2] = {0, 0};
      for (size_t i = 0; i < apart.size(); i++) differ[0] += apart[i] != with[i], differ[1] += apart[i] != planted[i];
      for (int k = 0; k < 2; k++) wrong[k] += differ[k];
      missed += differ[1] == 0;
    }
    int64_t all[3] = {wrong[0], wrong[1], missed};
    K3_TRY(check->cuda.comm->all_reduce(check->cuda.comm, all, 3, K3_ELEMENT_I64, K3_REDUCE_SUM));
    const int good = all[0] == 0 && all[2] == 0;
    check->failed += !good;
    check->rows++;
    if (check->cuda.rank == 0)
      printf("norm %-6lld %10lld %10lld  %s\n", (long long)n, (long long)all[0], (long long)all[1],
             good ? "ok" : "FAIL");
  }
  return K3_OK;
}

K3Status check_all(Check *check)
{
  static const Step lists[] = {{5, {0, 1, 2, 3, 4}, SPIN_NONE, -1, CONTROL_NONE},
                               {6, {0, 1, 2, 3, 4, 5}, SPIN_NONE, -1, CONTROL_NONE},
                               {1, {0}, SPIN_NONE, -1, CONTROL_NONE},
                               {2, {0, 2}, SPIN_NONE, -1, CONTROL_NONE},
                               {3, {6, 7, 8}, SPIN_NONE, -1, CONTROL_NONE},
                               {1, {11}, SPIN_NONE, -1, CONTROL_NONE},
                               {4, {11, 1, 12, 11}, SPIN_NONE, -1, CONTROL_NONE},
                               {3, {11, 0, 10}, SPIN_NONE, -1, CONTROL_NONE}};
  if (check->cuda.rank == 0)
    printf("# collectives a step, where and which rank is delayed, replays; wrong checksums of all ranks\n"
           "%2s  %-17s %4s  %8s  %14s %13s %10s\n",
           "n", "delay", "rank", "replays", "graph != eager", "between ranks", "!= host");
  for (const Step &list : lists)
    for (int spin = SPIN_NONE; spin <= SPIN_INSIDE; spin++)
      for (int rank = 0; rank < 2 && rank < check->cuda.world; rank++) {
        Step step = list;
        step.spin = spin;
        step.spinning = spin == SPIN_NONE ? -1 : rank == 0 ? 0 : check->cuda.world - 1;
        int inside = check->cuda.collectives.device && getenv("K3_TEST_COMM_SPIN_NS");
        if (spin == SPIN_NONE && rank > 0) continue;
        if (spin == SPIN_INSIDE) { /* set for the last rank when the communicator was opened */
          if (!inside || rank == 0) continue;
        } else if (inside) continue;
        K3_TRY(check_step(check, step));
      }
  Step control = lists[0];
  control.spinning = -1;
  control.control = CONTROL_FLIP;
  K3_TRY(check_step(check, control));
  control.control = CONTROL_SKIP;
  K3_TRY(check_step(check, control));
  return check_norms(check);
}

/* --- times -------------------------------------------------------------------------------------------------------- */

enum { CHAIN = 50, RUNS = 21 };

/* Microseconds of one link of a chain in a captured graph: minimum, median, maximum of RUNS replays. index -1: no collective. */
K3Status time_chain(Check *check, int index, int touched, double us[3])
{
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  cudaEvent_t begin, end;
  cudaStream_t stream = check->cuda.stream;
  std::vector<double> times;
  int64_t words = 132 * THREADS;
  K3Status status = K3_OK;
  K3_CUDA_TRY(cudaMemsetAsync(check->receive, 0, (size_t)check->room * 4, stream));
  K3_CUDA_TRY(cudaMemsetAsync(check->send, 0, (size_t)check->room * 4, stream));
  K3_CUDA_TRY(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
  for (int n = 0; n < CHAIN && status == K3_OK; n++) {
    void *arguments[] = {&check->receive, &words};
    if (touched) status = launch(check, "touch_kernel", (const void *)touch_kernel, 132, THREADS, arguments);
    if (status == K3_OK && index >= 0) status = enqueue_message(check, index, 0, 0, touched, NULL);
  }
  K3_CUDA_TRY(cudaStreamEndCapture(stream, &graph));
  K3_TRY(status);
  K3_CUDA_TRY(cudaGraphInstantiate(&exec, graph, 0));
  K3_CUDA_TRY(cudaEventCreate(&begin));
  K3_CUDA_TRY(cudaEventCreate(&end));
  for (int n = 0; n < RUNS + 3; n++) {
    float ms = 0.0f;
    K3_TRY(check->cuda.comm->barrier(check->cuda.comm));
    K3_CUDA_TRY(cudaGraphLaunch(exec, stream)); /* ranks meet in it */
    K3_CUDA_TRY(cudaEventRecord(begin, stream));
    K3_CUDA_TRY(cudaGraphLaunch(exec, stream));
    K3_CUDA_TRY(cudaEventRecord(end, stream));
    K3_TRY(k3_cuda_wait(&check->cuda));
    K3_CUDA_TRY(cudaEventElapsedTime(&ms, begin, end));
    if (n >= 3) times.push_back((double)ms * 1e3 / CHAIN);
  }
  std::sort(times.begin(), times.end());
  us[0] = times.front(), us[1] = times[RUNS / 2], us[2] = times.back();
  K3_CUDA_TRY(cudaEventDestroy(begin));
  K3_CUDA_TRY(cudaEventDestroy(end));
  K3_CUDA_TRY(cudaGraphExecDestroy(exec));
  K3_CUDA_TRY(cudaGraphDestroy(graph));
  return K3_OK;
}

K3Status time_all(Check *check)
{
  double bare[3];
  K3_TRY(time_chain(check, -1, 1, bare));
  if (check->cuda.rank == 0)
    printf("# us a collective in a captured graph of %d, %d replays: one after the other; and after a kernel of 132 "
           "blocks that "
           "touches the data, less that kernel's %.2f (%.2f to %.2f)\n"
           "%-40s %9s  %7s %7s %7s  %7s %7s %7s\n",
           CHAIN, RUNS, bare[1], bare[0], bare[2], "message", "bytes", "min", "median", "max", "min", "median", "max");
  for (int index = 0; index < MESSAGES; index++) {
    double plain[3], between[3];
    int64_t bytes = 0;
    Shape s;
    shape_of(check, &messages[index], &s);
    for (int b = 0; b < messages[index].buffers; b++) bytes += s.words[b] * 4;
    K3_TRY(time_chain(check, index, 0, plain));
    K3_TRY(time_chain(check, index, 1, between));
    if (check->cuda.rank == 0)
      printf("%-40s %9lld  %7.2f %7.2f %7.2f  %7.2f %7.2f %7.2f\n", messages[index].name, (long long)bytes, plain[0],
             plain[1], plain[2], between[0] - bare[1], between[1] - bare[1], between[2] - bare[1]);
  }
  return K3_OK;
}

/* --- the program ---------------------------------------------------------------------------------------------------- */

K3Status open_check(Check *check, K3Comm *comm)
{
  K3Cuda *cuda = &check->cuda;
  const char *spin = getenv("K3_TEST_COMM_SPIN_NS");
  static char last[32];
  if (spin && comm->rank != comm->world - 1) { /* one rank alone lingers; the others know that it does */
    snprintf(last, sizeof last, "0");
    setenv("K3_TEST_COMM_SPIN_NS", last, 1);
  }
  cuda->comm = comm;
  cuda->rank = comm->rank;
  cuda->world = comm->world;
  cuda->communicates = 1;
  cuda->waits = 1;
  cuda->watchdog_s = 20.0;
  if (comm->world > MOST_RANKS) K3_FAIL(K3_ERR_USAGE, "comm_check serves up to %d ranks", MOST_RANKS);
  K3_TRY(k3_comm_agree(comm, k3_cuda_device_choose(cuda, 0)));
  K3_CUDA_TRY(cudaStreamCreateWithFlags(&cuda->stream, cudaStreamNonBlocking));
  K3_TRY(k3_cuda_launch_init(cuda->stream, 1, &cuda->launch));
  cuda->launch.phase = "check";
  K3_TRY(k3_cuda_comm_open(cuda));
  check->room = 1 << 20;
  K3_CUDA_TRY(cudaMalloc((void **)&check->send, (size_t)check->room * 4));
  K3_CUDA_TRY(cudaMalloc((void **)&check->receive, (size_t)check->room * 4));
  K3_CUDA_TRY(cudaMalloc((void **)&check->norm, NORM_FLOATS * 4));
  K3_CUDA_TRY(cudaMemset(check->norm, 0, NORM_FLOATS * 4));
  K3_CUDA_TRY(cudaMalloc((void **)&check->d_step, 8));
  K3_CUDA_TRY(cudaMalloc((void **)&check->d_sums, (size_t)check->replays * MOST * 8));
  if (comm->rank == 0) printf("# %d ranks, %s, %s\n", comm->world, cuda->device_name, cuda->collectives.name);
  return K3_OK;
}

K3Status run(Check *check, K3Comm *comm, int checks, int times)
{
  K3_TRY(open_check(check, comm));
  if (checks) K3_TRY(check_all(check));
  if (checks && !getenv("K3_TEST_COMM_SPIN_NS") && comm->rank == 0)
    printf("# digest of all checksums %016llx\n", check->digest);
  if (times) K3_TRY(time_all(check));
  check->cuda.collectives.close(&check->cuda);
  if (comm->rank == 0) printf("# %lld of %lld rows failed\n", (long long)check->failed, (long long)check->rows);
  return check->failed ? K3_ERR_COMPARE : K3_OK;
}

} /* namespace */

int main(int argc, char **argv)
{
  static Check check;
  K3Comm *comm = NULL;
  int checks = 1, times = 1;
  check.replays = 1000;
  if (k3_comm_open_mpi(&argc, &argv, &comm) != K3_OK) return K3_ERR_DEVICE;
  k3_status_set_origin(comm->rank, comm->world, comm->host);
  for (int i = 1; i < argc; i++) {
    if (!strcmp(argv[i], "--check")) times = 0;
    else if (!strcmp(argv[i], "--time")) checks = 0;
    else if (!strcmp(argv[i], "--replays") && i + 1 < argc && atoll(argv[i + 1]) > 0) check.replays = atoll(argv[++i]);
    else {
      if (comm->rank == 0) fprintf(stderr, "usage: comm_check [--replays N] [--check|--time]\n");
      comm->close(comm);
      return K3_ERR_USAGE;
    }
  }
  K3Status status = run(&check, comm, checks, times);
  if (status != K3_OK && status != K3_ERR_COMPARE) k3_comm_abort(comm, status);
  comm->close(comm);
  return status;
}
