/* The step's small collectives over NCCL's device API. See backend.h. Layer: backend (CUDA).
 *
 * For GPUs that can load from and store to each other's memory. Sums go by posted values (posts.cuh): reduce_kernel, a thread four
 * floats (and those every BLOCKS · 512th after them), and sum_norm_kernel, the norm (norm.cuh) of a sum that its own threads make. All
 * ranks send all they have to all; bound: latency.
 *
 * exchange_kernel, the pieces of a gather or of an all-to-all, may carry any bits: low-latency all-to-all sessions. Every 8 bytes travel in
 * a 16-byte store that carries the round's number beside them, into a slot of the receiver's that belongs to sender, block and parity of
 * the round: the receiver polls the slot itself, so there is no barrier. The number lives in device memory and is counted on by the
 * kernel, and nothing of it is frozen in a graph (known fault F28). A slot is written again two rounds later, by a sender that has then
 * received the round between, which its peer's block sent after it had read all of this one (known fault F29): so every block sends at
 * least one slot to every peer, and reads one from it, in every round. Bytes sent: 2 · the message to each peer; bound: latency.
 *
 * What does not fit the cells or slots goes to the plain NCCL call (comm_nccl.cu), the twin. */
#ifdef HAVE_CONFIG_H
#include <config.h>
#endif

#include <stdio.h>
#include <stdlib.h>

#include "kernels/backend.h"

#ifdef HAVE_NCCL
#include <nccl.h>
#endif
#if defined(HAVE_NCCL) && NCCL_VERSION_CODE >= NCCL_VERSION(2, 28, 0)

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter" /* in NCCL's own header */
#include <nccl_device.h>
#pragma GCC diagnostic pop

#include "kernels/norm.cuh"
#include "kernels/posts.cuh"

namespace {

enum { BLOCKS = 56, THREADS = 128, PAIR_SLOTS = 2 * THREADS, MOST_RANKS = 16, MOST_BUFFERS = 3, MOST_GROUPS = 7 };
/* Blocks of posts: the norm's cluster, then reduce_kernel's; cells of a thread of the latter. */
enum { FIRST_REDUCE = k3::CLUSTER, POST_BLOCKS = FIRST_REDUCE + BLOCKS, THREAD_CELLS = k3::POST_CELLS / THREADS };

/* What an exchange needs. */
typedef struct {
  ncclDevComm comm;
  ncclLLA2AHandle handle;
  int64_t spin_ns; /* test hook: how long a rank lingers between reading and the end of the round */
} Session;

typedef struct {
  k3::PostSession session;
  float *data;
  int64_t count;
} Reduce;

/* One buffer of an exchange, in words of 4 bytes: what goes to and comes from each rank. */
typedef struct {
  const uint32_t *send;
  uint32_t *receive;
  uint32_t sent_at[MOST_RANKS], sent[MOST_RANKS], received_at[MOST_RANKS], received[MOST_RANKS];
} Buffer;

typedef struct {
  Session session;
  int buffers;
  Buffer buffer[MOST_BUFFERS];
} Exchange;

typedef ncclLLA2ASession<ncclCoopCta> Slots;

/* Four floats of a vector of `count`, zeros past its end. */
__device__ float4 load_cell(const float *data, int64_t at, int64_t count)
{
  if (at + 4 <= count) return __ldcg((const float4 *)(data + at));
  float x[3];
  for (int i = 0; i < 3; i++) x[i] = at + i < count ? __ldcg(data + at + i) : 0.0f;
  return make_float4(x[0], x[1], x[2], 0.0f);
}

__device__ void store_cell(float *data, int64_t at, int64_t count, float4 x)
{
  if (at + 4 <= count) {
    *(float4 *)(data + at) = x;
    return;
  }
  data[at] = x.x;
  if (at + 1 < count) data[at + 1] = x.y;
  if (at + 2 < count) data[at + 2] = x.z;
}

template <int WORLD> __global__ void __launch_bounds__(THREADS) reduce_kernel(const __grid_constant__ Reduce a)
{
  k3_wait();
  const k3::Posts<WORLD> posts(a.session, FIRST_REDUCE + blockIdx.x);
  float4 mine[THREAD_CELLS];
  const int64_t first = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * 4, stride = (int64_t)gridDim.x * THREADS * 4;
#pragma unroll
  for (int k = 0; k < THREAD_CELLS; k++)
    if (first + k * stride < a.count)
      mine[k] = posts.send(k * THREADS + threadIdx.x, load_cell(a.data, first + k * stride, a.count));
#pragma unroll
  for (int k = 0; k < THREAD_CELLS; k++)
    if (first + k * stride < a.count)
      store_cell(a.data, first + k * stride, a.count, posts.sum(k * THREADS + threadIdx.x, mine[k]));
  k3::linger(a.session.spin_ns);
#pragma unroll
  for (int k = 0; k < THREAD_CELLS; k++)
    if (first + k * stride < a.count) posts.empty(k * THREADS + threadIdx.x);
  __syncthreads();
  if (threadIdx.x == 0) posts.end();
}

/* The branch as the sum of what all ranks have of it. */
template <int WORLD> class Summed {
  const k3::Posts<WORLD> posts;
  const int64_t spin_ns;
  bool used;

public:
  __device__ __forceinline__ explicit Summed(const k3::PostSession &session)
      : posts(session, blockIdx.x), spin_ns(session.spin_ns), used(false)
  {
  }

  __device__ __forceinline__ float4 operator()(const float *from, bool there)
  {
    used = there;
    return there ? posts.sum(threadIdx.x, posts.send(threadIdx.x, __ldcg((const float4 *)from)))
                 : make_float4(0, 0, 0, 0);
  }

  __device__ __forceinline__ ~Summed()
  {
    k3::linger(spin_ns);
    if (used) posts.empty(threadIdx.x);
    if (threadIdx.x == 0) posts.end(); /* the norm's threads have met */
  }
};

typedef struct {
  k3::PostSession session;
  K3CudaNorm norm;
} SumAndNorm;

template <int WORLD>
__global__ void __launch_bounds__(k3::POST_CELLS, 1)
    sum_norm_kernel(const __grid_constant__ SumAndNorm a, const float per_n)
{
  k3::norm_vector<Summed<WORLD>>(a.norm, per_n, a.session);
}

/* When the communicator is made. */
__global__ void empty_posts_kernel(const __grid_constant__ k3::PostSession a)
{
  k3_wait();
  const size_t bytes = k3::post_bytes(a.comm.lsaSize);
  uint32_t *own = (uint32_t *)((char *)ncclGetResourceBufferLocalPointer(a.comm, a.memory) + blockIdx.x * bytes);
  for (size_t i = threadIdx.x; i < bytes / 4; i += blockDim.x) own[i] = i < k3::POST_LINE / 4 ? 0u : k3::NOT_POSTED;
}

/* Units of two words: `count` of each buffer for one rank. */
__device__ int64_t units_of(const Exchange &a, int rank, bool sends)
{
  int64_t units = 0;
  for (int b = 0; b < a.buffers; b++) units += ((sends ? a.buffer[b].sent : a.buffer[b].received)[rank] + 1) / 2;
  return units;
}

/* Which buffer holds unit u, whose first word in it *word is, and how many words from there on. */
__device__ int find_unit(const Exchange &a, int rank, bool sends, int64_t u, uint32_t *word, uint32_t *left)
{
  int b = 0;
  uint32_t at = (uint32_t)u;
  for (; b < a.buffers - 1; b++) {
    uint32_t units = ((sends ? a.buffer[b].sent : a.buffer[b].received)[rank] + 1) / 2;
    if (at < units) break;
    at -= units;
  }
  *left = (sends ? a.buffer[b].sent : a.buffer[b].received)[rank] - 2 * at;
  *word = (sends ? a.buffer[b].sent_at : a.buffer[b].received_at)[rank] + 2 * at;
  return b;
}

__device__ uint2 load_unit(const Exchange &a, int rank, int64_t u)
{
  uint32_t word, left;
  const uint32_t *from = a.buffer[find_unit(a, rank, true, u, &word, &left)].send + word;
  return make_uint2(__ldcg(from), left > 1 ? __ldcg(from + 1) : 0u);
}

__device__ void store_unit(const Exchange &a, int rank, int64_t u, uint2 x)
{
  uint32_t word, left;
  uint32_t *to = a.buffer[find_unit(a, rank, false, u, &word, &left)].receive + word;
  to[0] = x.x;
  if (left > 1) to[1] = x.y;
}

/* Each group of THREADS threads serves one peer at a time, so that the receiving from up to MOST_GROUPS peers overlaps. */
__global__ void __launch_bounds__(THREADS *MOST_GROUPS) exchange_kernel(const __grid_constant__ Exchange a)
{
  k3_wait();
  ncclCoopCta block;
  const ncclDevComm &comm = a.session.comm;
  ncclTeam team = ncclTeamLsa(comm);
  Slots slots(block, comm, team, a.session.handle, blockIdx.x, 0);
  int me = comm.lsaRank, world = comm.lsaSize, thread = threadIdx.x % THREADS;
  int group = threadIdx.x / THREADS, groups = blockDim.x / THREADS;
  int64_t begin = (int64_t)blockIdx.x * THREADS, first = begin + thread, stride = (int64_t)gridDim.x * THREADS;
  for (int step = 1 + group; step < world; step += groups) {
    int rank = (me + step) % world, slot = me * PAIR_SLOTS + thread;
    int64_t units = units_of(a, rank, true);
    for (int64_t u = first; u < units; u += stride, slot += THREADS) slots.send(rank, slot, load_unit(a, rank, u));
    if (units <= begin && thread == 0) slots.send(rank, me * PAIR_SLOTS, make_uint2(0u, 0u)); /* nothing, said */
  }
  int64_t own = units_of(a, me, true);
  if (group == 0)
    for (int64_t u = first; u < own; u += stride) store_unit(a, me, u, load_unit(a, me, u));
  for (int step = 1 + group; step < world; step += groups) {
    int rank = (me + world - step) % world, slot = rank * PAIR_SLOTS + thread;
    int64_t units = units_of(a, rank, false);
    for (int64_t u = first; u < units; u += stride, slot += THREADS) store_unit(a, rank, u, slots.recv<uint2>(slot));
    if (units <= begin && thread == 0) (void)slots.recv<uint2>(rank * PAIR_SLOTS);
  }
  k3::linger(a.session.spin_ns);
  slots.endEpoch(block);
}

typedef struct {
  Session session;
  k3::PostSession posts;
  K3CudaComm plain; /* NCCL's calls, for what does not fit */
} Device;

Device *device_of(K3Cuda *cuda) { return (Device *)cuda->collectives.device; }

/* Blocks for messages of up to `units` to a rank, of which a block serves `most` at most; 0: too long. All ranks find the same. */
unsigned blocks_for(int64_t units, int64_t most)
{
  int64_t blocks = (units + THREADS - 1) / THREADS;
  if (units > BLOCKS * most) return 0;
  return (unsigned)(blocks < 1 ? 1 : blocks < BLOCKS ? blocks : (int64_t)BLOCKS);
}

/* The instance for this number of ranks. */
#define OF_WORLD(kernel, world) \
  ((world) == 2 ? (const void *)kernel<2> : (world) == 8 ? (const void *)kernel<8> : (const void *)kernel<0>)

K3Status device_all_reduce(K3Cuda *cuda, float *data, int64_t count)
{
  Device *device = device_of(cuda);
  unsigned blocks = blocks_for((count + 3) / 4, k3::POST_CELLS);
  if (count < 1) return K3_OK;
  if (blocks == 0) return device->plain.all_reduce(cuda, data, count);
  Reduce a;
  memset(&a, 0, sizeof a);
  a.session = device->posts;
  a.data = data;
  a.count = count;
  void *arguments[] = {&a};
  return k3_cuda_launch_kernel(&cuda->launch, "reduce_kernel", OF_WORLD(reduce_kernel, cuda->world), blocks, THREADS, 1,
                               0, arguments);
}

K3Status device_all_reduce_norm(K3Cuda *cuda, const K3CudaNorm *norm)
{
  if (norm->n > (int64_t)k3::CLUSTER * k3::POST_CELLS * 4) {
    K3_TRY(device_all_reduce(cuda, (float *)norm->branch, norm->n));
    return k3_cuda_norm(&cuda->launch, norm);
  }
  SumAndNorm a;
  memset(&a, 0, sizeof a);
  a.session = device_of(cuda)->posts;
  a.norm = *norm;
  float per_n = 1.0f / (float)norm->n;
  void *arguments[] = {&a, &per_n};
  return k3_cuda_norm_launch(&cuda->launch, "sum_norm_kernel", OF_WORLD(sum_norm_kernel, cuda->world), norm, arguments);
}

/* Words of `count` elements; -1: no whole number. */
int64_t words_of(int64_t count, int64_t size) { return count * size % 4 ? -1 : count * size / 4; }

/* Fills one side of a buffer. Returns 0 when it is not made of whole words. */
int fill_side(const K3Cuda *cuda, K3Pieces pieces, int64_t size, uint32_t *at, uint32_t *count)
{
  for (int r = 0; r < cuda->world; r++) {
    int64_t words = words_of(pieces.count[r], size), begin = words_of(pieces.displacement[r], size);
    if (words < 0 || begin < 0 || words > UINT32_MAX || begin > UINT32_MAX) return 0;
    at[r] = (uint32_t)begin;
    count[r] = (uint32_t)words;
  }
  return 1;
}

/* Units to the rank that gets most. */
int64_t most_units(const K3Cuda *cuda, const Exchange *a, int sends)
{
  int64_t most = 0;
  for (int r = 0; r < cuda->world; r++) {
    int64_t units = 0;
    for (int b = 0; b < a->buffers; b++)
      units += (int64_t)((sends ? a->buffer[b].sent : a->buffer[b].received)[r] + 1) / 2;
    if (units > most) most = units;
  }
  return most;
}

K3Status launch_exchange(K3Cuda *cuda, Exchange *a, unsigned blocks)
{
  a->session = device_of(cuda)->session;
  int peers = cuda->world - 1;
  int groups = peers < 1 ? 1 : peers < MOST_GROUPS ? peers : (int)MOST_GROUPS;
  void *arguments[] = {a};
  return k3_cuda_launch_kernel(&cuda->launch, "exchange_kernel", (const void *)exchange_kernel, blocks,
                               (unsigned)(THREADS * groups), 1, 0, arguments);
}

K3Status device_all_gather(K3Cuda *cuda, int buffers, const void *const *own, void *const *data, const K3Pieces *pieces,
                           int64_t size)
{
  Exchange a;
  memset(&a, 0, sizeof a);
  int fits = buffers <= MOST_BUFFERS;
  a.buffers = fits ? buffers : 0;
  for (int b = 0; b < a.buffers; b++) {
    Buffer *buffer = &a.buffer[b];
    buffer->send = (const uint32_t *)own[b];
    buffer->receive = (uint32_t *)data[b];
    fits &= fill_side(cuda, pieces[b], size, buffer->received_at, buffer->received);
    for (int r = 0; r < cuda->world; r++) buffer->sent[r] = buffer->received[cuda->rank];
  }
  unsigned blocks = fits ? blocks_for(most_units(cuda, &a, 0), PAIR_SLOTS) : 0;
  if (blocks == 0) return device_of(cuda)->plain.all_gather(cuda, buffers, own, data, pieces, size);
  return launch_exchange(cuda, &a, blocks);
}

/* What goes to a rank must be as long from every rank: so it is with partials of all heads. */
K3Status device_all_to_all(K3Cuda *cuda, int buffers, float *const *send, const K3Pieces *sent, float *const *receive,
                           const K3Pieces *received)
{
  Exchange a;
  memset(&a, 0, sizeof a);
  int fits = buffers <= MOST_BUFFERS;
  a.buffers = fits ? buffers : 0;
  for (int b = 0; b < a.buffers; b++) {
    Buffer *buffer = &a.buffer[b];
    buffer->send = (const uint32_t *)send[b];
    buffer->receive = (uint32_t *)receive[b];
    fits &= fill_side(cuda, sent[b], 4, buffer->sent_at, buffer->sent) &&
            fill_side(cuda, received[b], 4, buffer->received_at, buffer->received);
  }
  unsigned blocks = fits ? blocks_for(most_units(cuda, &a, 1), PAIR_SLOTS) : 0;
  if (blocks == 0) return device_of(cuda)->plain.all_to_all(cuda, buffers, send, sent, receive, received);
  return launch_exchange(cuda, &a, blocks);
}

void device_close(K3Cuda *cuda)
{
  Device *device = device_of(cuda);
  K3CudaComm plain = device->plain;
  /* a stream that still hangs would keep it waiting; no window is registered but its own */
  if (cudaStreamQuery(cuda->stream) != cudaErrorNotReady)
    (void)ncclDevCommDestroy((ncclComm_t)cuda->collectives.state, &device->session.comm);
  cuda->collectives.device = NULL;
  free(device);
  plain.close(cuda);
}

/* Nothing is said of a failure here: what NCCL cannot do, the plain calls do. */
int create(K3Cuda *cuda, Device *device)
{
  ncclComm_t comm = (ncclComm_t)cuda->collectives.state;
  ncclDevResourceRequirements_t buffer, posts;
  ncclDevCommRequirements_t wanted;
  memset(&buffer, 0, sizeof buffer);
  memset(&posts, 0, sizeof posts);
  memset(&wanted, 0, sizeof wanted);
  if (ncclLLA2ACreateRequirement(BLOCKS, cuda->world * PAIR_SLOTS, &device->session.handle, &buffer) != ncclSuccess)
    return 0;
  posts.bufferSize = POST_BLOCKS * k3::post_bytes(cuda->world);
  posts.bufferAlign = k3::POST_LINE;
  posts.outBufferHandle = &device->posts.memory;
  buffer.next = &posts;
  wanted.resourceRequirementsList = &buffer;
  if (ncclDevCommCreate(comm, &wanted, &device->session.comm) != ncclSuccess) return 0;
  device->posts.comm = device->session.comm;
  void *arguments[] = {&device->posts};
  if (k3_cuda_launch_kernel(&cuda->launch, "empty_posts_kernel", (const void *)empty_posts_kernel, POST_BLOCKS, 256, 1,
                            0, arguments) == K3_OK &&
      cudaStreamSynchronize(cuda->stream) == cudaSuccess)
    return 1;
  (void)ncclDevCommDestroy(comm, &device->session.comm);
  return 0;
}

/* 1 when all ranks say 1. */
K3Status all_say(K3Cuda *cuda, int good, int *all)
{
  int64_t word = good;
  K3_TRY(cuda->comm->all_reduce(cuda->comm, &word, 1, K3_ELEMENT_I64, K3_REDUCE_MIN));
  *all = word != 0;
  return K3_OK;
}

} /* namespace */

K3Status k3_cuda_comm_device_open(K3Cuda *cuda, int required)
{
  const char *spin = getenv("K3_TEST_COMM_SPIN_NS");
  int version = 0, all = 0;
  /* The structs of the device API are those of one version of NCCL. */
  int good = ncclGetVersion(&version) == ncclSuccess && version == NCCL_VERSION_CODE && cuda->world <= MOST_RANKS &&
             ncclTeamLsa((ncclComm_t)cuda->collectives.state).nRanks == cuda->world;
  Device *device = good ? (Device *)calloc(1, sizeof *device) : NULL;
  K3_TRY(all_say(cuda, device != NULL, &all));
  int created = all && create(cuda, device);
  if (all) K3_TRY(all_say(cuda, created, &all));
  if (!all) {
    if (created) (void)ncclDevCommDestroy((ncclComm_t)cuda->collectives.state, &device->session.comm);
    free(device);
    if (required)
      K3_FAIL(K3_ERR_DEVICE,
              "K3_COMM=device: NCCL's device API does not serve these %d ranks (NCCL %d, built with %d; every GPU must "
              "reach the memory of every other); unset K3_COMM",
              cuda->world, version, NCCL_VERSION_CODE);
    return K3_OK;
  }
  device->session.spin_ns = device->posts.spin_ns = spin ? atoll(spin) : 0;
  device->plain = cuda->collectives;
  cuda->collectives.name = "nccl device API";
  cuda->collectives.device = device;
  cuda->collectives.all_reduce = device_all_reduce;
  if (!getenv("K3_TEST_NORM_APART")) cuda->collectives.all_reduce_norm = device_all_reduce_norm;
  cuda->collectives.all_gather = device_all_gather;
  cuda->collectives.all_to_all = device_all_to_all;
  cuda->collectives.close = device_close;
  return K3_OK;
}

#else

K3Status k3_cuda_comm_device_open(K3Cuda *cuda, int required)
{
  (void)cuda;
  if (required) K3_FAIL(K3_ERR_DEVICE, "K3_COMM=device wants a build with NCCL 2.28 or newer; unset K3_COMM");
  return K3_OK;
}

#endif
