/* Routed experts. See experts.h. Layer: backend (CUDA).
 *
 * gate_up_kernel: one block an SM. The gate and up rows of all local chosen experts stand in one line,
 * dealt to the blocks in pairs; a block ends with situ of its pairs. Reads n * 2 * band * L values' bytes.
 * down_kernel: every block takes a share of the shared experts' rows, whose loads start before the wait, and a share of z's
 * rows, whose pieces run over all local experts (hidden vectors times w_e in shared memory). Reads n * L * band values'
 * bytes and the shared matrix. Bound: memory for q8_0 and bf16; codebook look-ups in shared memory for iq1_s.
 * Twins: k3_host_experts_gate_up, k3_host_experts_down. */
#include "kernels/experts.h"

#include "kernels/iq1_mma.cuh"
#include "kernels/route.cuh"
#include "kernels/wait.cuh"

namespace {

using namespace k3;

enum { THREADS = 512 };

/* n / d for n < 2^18, d < 2^13 with magic = 2^32 / d + 1; 0 stands for d = 1. */
__device__ __forceinline__ int divide(int n, uint32_t magic) { return magic ? (int)__umulhi((uint32_t)n, magic) : n; }
inline uint32_t magic_of(int64_t d) { return d == 1 ? 0 : (uint32_t)((1ull << 32) / (uint64_t)d + 1); }

/* The local experts among the chosen, in order; one thread. */
struct LocalExperts {
  int count;
  int64_t base[K3_ROUTER_CHOSEN]; /* first piece */
  float weight[K3_ROUTER_CHOSEN];
};

/* weights NULL: left out; otherwise ids and weights lie in global memory. */
__device__ __forceinline__ void list_local(LocalExperts &l, const int32_t *ids, const float *weights, int chosen,
                                           int64_t first, int64_t local, int64_t pieces)
{
  if (threadIdx.x < 32) {
    int lane = threadIdx.x;
    int64_t id = -1;
    float w = 0;
    if (lane < chosen) {
      id = (weights ? __ldcg(ids + lane) : ids[lane]) - first;
      if (weights) w = __ldcg(weights + lane);
    }
    bool here = id >= 0 && id < local;
    uint32_t mask = __ballot_sync(0xffffffffu, here);
    int slot = __popc(mask & ((1u << lane) - 1u));
    if (here) {
      l.base[slot] = id * pieces;
      l.weight[slot] = w;
    }
    if (lane == 0) l.count = __popc(mask);
  }
  __syncthreads();
}

/* This block's part of `rows`, in whole groups of ROWS (rows · blocks fits 32 bits). */
template <int ROWS>
__device__ __forceinline__ void share_rows(int rows, int *begin, int *end)
{
  unsigned groups = (unsigned)(rows + ROWS - 1) / ROWS;
  *begin = min(rows, (int)(groups * blockIdx.x / gridDim.x) * ROWS);
  *end = min(rows, (int)(groups * (blockIdx.x + 1) / gridDim.x) * ROWS);
}

/* ---- gate and up ---- */
struct GateUpArguments {
  K3CudaExpertsGateUp e;
  SharedPlan shared;
  Tiling tiling;
  uint32_t magic; /* of the band */
};

/* Row v: pair v/2 = (slot, row of the band); even: gate, odd: up. */
struct GateUpMap {
  Parts gate, up;
  const LocalExperts *local;
  int pieces, band;
  uint32_t magic;
  __device__ __forceinline__ Parts place(int row, int piece, int64_t *index) const
  {
    int pair = row >> 1, slot = divide(pair, magic);
    *index = local->base[slot] + (int64_t)(pair - slot * band) * pieces + piece;
    return Parts{row & 1 ? up.codes : gate.codes, row & 1 ? up.high : gate.high, row & 1 ? up.scale : gate.scale};
  }
};

template <class F, int D>
__global__ void __launch_bounds__(THREADS, 1) gate_up_kernel(const __grid_constant__ GateUpArguments a)
{
  extern __shared__ __align__(128) char memory[];
  __shared__ RouteShared routed;
  __shared__ LocalExperts local;
  __shared__ float scratch[33];
  const K3CudaExpertsGateUp &e = a.e;
  SharedInput in = shared_input(memory, a.shared);
  float *segments = (float *)(memory + a.shared.segments);
  fill_codebook(in, e.gate.codebook);
  float bias[2];
  if (e.route) fetch_bias(e.routing, bias);
  k3_wait_early();
  /* y under way while the experts are chosen */
  float held[2][4];
  int here = threadIdx.x * 4, next = here + blockDim.x * 4, padded = ((int)e.y.n + 127) / 128 * 128;
  bool hold = e.y.kind == K3_INPUT_VALUES && padded <= (int)blockDim.x * 8;
  if (hold) {
    fetch4(e.y.vector.values, here, (int)e.y.n, held[0]);
    fetch4(e.y.vector.values, next, (int)e.y.n, held[1]);
  }
  int chosen = e.routing.chosen;
  int64_t expert_pieces = e.band * a.tiling.pieces;
  if (e.route) {
    route_ids(e.routing, bias, routed);
    list_local(local, routed.ids, NULL, chosen, e.first, e.local, expert_pieces);
    if (blockIdx.x == gridDim.x - 1 && threadIdx.x < 32) {
      float weight = route_weight(e.routing, routed);
      if (threadIdx.x < chosen) {
        e.ids[threadIdx.x] = routed.ids[threadIdx.x];
        e.weights[threadIdx.x] = weight;
      }
    }
  } else {
    list_local(local, e.ids, e.weights, chosen, e.first, e.local, expert_pieces);
  }
  typedef RowsOf<F, D, GateUpMap> Rows;
  int begin, end;
  share_rows<(Rows::ROWS + 1) / 2>(local.count * (int)e.band, &begin, &end);
  if (begin >= end) return;
  GateUpMap map{parts_of(e.gate), parts_of(e.up), &local, a.tiling.pieces, (int)e.band, a.magic};
  typename Rows::Type gemv(map, a.tiling, 2 * begin, 2 * end);
  gemv.preload();
  if (hold) {
    if (here < padded) put4(in, here, held[0]);
    if (next < padded) put4(in, next, held[1]);
  } else {
    fill_input(e.y, in, scratch);
  }
  __syncthreads();
  gemv.run(in, segments);
  __syncthreads();
  for (int i = threadIdx.x; i < end - begin; i += blockDim.x)
    e.hidden[begin + i] = situ(gemv.row_sum(segments, 2 * i), gemv.row_sum(segments, 2 * i + 1), e.situ_beta,
                               e.situ_linear_beta);
}

/* ---- down ---- */
struct DownArguments {
  K3CudaExpertsDown e;
  SharedPlan routed, shared; /* two inputs side by side */
  int pieces;                /* of an expert's row */
  uint32_t magic, band_magic; /* of pieces and of the band */
  Tiling shared_tiling;
};

/* Piece q of row r: expert q / pieces. */
struct DownMap {
  Parts parts;
  const LocalExperts *local;
  int pieces;
  uint32_t magic;
  __device__ __forceinline__ Parts place(int row, int piece, int64_t *index) const
  {
    int slot = divide(piece, magic);
    *index = local->base[slot] + (int64_t)row * pieces + (piece - slot * pieces);
    return parts;
  }
};

/* Four hidden values at i … (n in all): times the weight of their expert, into shared memory. */
__device__ __forceinline__ void put_hidden(const LocalExperts &local, const SharedInput &in, int i, int n, uint32_t band_magic,
                                           float v[4])
{
  float w = i < n ? local.weight[divide(i, band_magic)] : 0.0f;
#pragma unroll
  for (int k = 0; k < 4; k++) v[k] = i < n ? v[k] * w : 0.0f; /* a band is a multiple of four */
  put4(in, i, v);
}

/* The first rounds of the hidden vectors, under way before it is known how many of them count. */
enum { HELD_ROUNDS = 3 };

template <class F, int D, class S>
__global__ void __launch_bounds__(THREADS, 1) down_kernel(const __grid_constant__ DownArguments a)
{
  extern __shared__ __align__(128) char memory[];
  __shared__ LocalExperts local;
  __shared__ float scratch[33];
  const K3CudaExpertsDown &e = a.e;
  SharedInput in = shared_input(memory, a.routed), shared_in = shared_input(memory, a.shared);
  float *segments = (float *)(memory + a.routed.segments), *shared_segments = (float *)(memory + a.shared.segments);

  /* 1. Before the wait: the codebook, and the first of the shared experts' weights. */
  fill_codebook(in, e.down.codebook);
  int shared_begin = 0, shared_end = 0, begin, end;
  if (e.shared.y) share_rows<1>((int)e.shared.matrix.rows, &shared_begin, &shared_end);
  typedef RowsOf<F, D, DownMap> Rows;
  share_rows<Rows::ROWS>((int)e.latent, &begin, &end);
  Gemv<S, 4, PlainMap> shared(PlainMap{parts_of(e.shared.matrix), a.shared_tiling.pieces}, a.shared_tiling, shared_begin,
                              shared_end);
  shared.preload();
  k3_wait();

  /* 2. Which experts; their first weights; both inputs. */
  float held[HELD_ROUNDS][4];
  int round = blockDim.x * 4, all = e.chosen * (int)e.band;
#pragma unroll
  for (int r = 0; r < HELD_ROUNDS; r++) fetch4(e.hidden, threadIdx.x * 4 + r * round, all, held[r]);
  float situ_held[2][2];
  if (shared_begin < shared_end && e.shared_input.kind == K3_INPUT_SITU) fetch_situ(e.shared_input, threadIdx.x, situ_held);
  list_local(local, e.ids, e.weights, e.chosen, e.first, e.local, e.latent * a.pieces);
  if (local.count == 0) {
    for (int i = begin + threadIdx.x; i < end; i += blockDim.x) e.z[i] = 0.0f;
    end = begin;
  }
  Tiling tiling = tiling_of(max(1, local.count) * a.pieces);
  typename Rows::Type gemv(DownMap{parts_of(e.down), &local, a.pieces, a.magic}, tiling, begin, end);
  gemv.preload();
  if (shared_begin < shared_end) {
    if (e.shared_input.kind == K3_INPUT_SITU) fill_situ(e.shared_input, shared_in, situ_held);
    else fill_input(e.shared_input, shared_in, scratch);
  }
  if (begin < end) { /* the hidden vectors of the local experts, one after another, each times its weight */
    int n = local.count * (int)e.band, padded = (n + 127) / 128 * 128;
#pragma unroll
    for (int r = 0; r < HELD_ROUNDS; r++) {
      int i = threadIdx.x * 4 + r * round;
      if (i < padded) put_hidden(local, in, i, n, a.band_magic, held[r]);
    }
    for (int i = threadIdx.x * 4 + HELD_ROUNDS * round; i < padded; i += round) {
      fetch4(e.hidden, i, n, held[0]);
      put_hidden(local, in, i, n, a.band_magic, held[0]);
    }
  }
  __syncthreads();

  /* 3. Both products, and out. */
  shared.run(shared_in, shared_segments);
  gemv.run(in, segments);
  __syncthreads();
  for (int i = threadIdx.x; i < shared_end - shared_begin; i += blockDim.x) {
    float sum = shared.row_sum(shared_segments, i);
    e.shared.y[shared_begin + i] = e.shared.add ? sum + __ldcg(e.shared.y + shared_begin + i) : sum;
  }
  for (int i = threadIdx.x; i < end - begin; i += blockDim.x) e.z[begin + i] = gemv.row_sum(segments, i);
}

/* ---- choice of the kernel ---- */
int piece_values(K3Type type)
{
  static const int values[K3_TYPE_COUNT] = {4, 8, 16, 32, 128, 8};
  return values[type];
}

const void *gate_up_of(K3Type type, int exact)
{
  switch (type) {
  case K3_TYPE_F32: return (const void *)gate_up_kernel<F32, 4>;
  case K3_TYPE_BF16: return (const void *)gate_up_kernel<Bf16, 4>;
  case K3_TYPE_Q8_0:
    return exact ? (const void *)gate_up_kernel<Q8Exact, 2> : (const void *)gate_up_kernel<Q8Int, 6>;
  case K3_TYPE_MXFP4:
    return exact ? (const void *)gate_up_kernel<Mxfp4Exact, 2> : (const void *)gate_up_kernel<Mxfp4Int, 6>;
  default:
    return exact ? (const void *)gate_up_kernel<Iq1Exact, 2> : (const void *)gate_up_kernel<Iq1Int, 2>;
  }
}

/* With the shared experts in q8_0; other formats take a launch of their own. */
const void *down_of(K3Type type, int exact)
{
  switch (type) {
  case K3_TYPE_F32: return exact ? (const void *)down_kernel<F32, 4, Q8Exact> : (const void *)down_kernel<F32, 4, Q8Int>;
  case K3_TYPE_BF16:
    return exact ? (const void *)down_kernel<Bf16, 4, Q8Exact> : (const void *)down_kernel<Bf16, 4, Q8Int>;
  case K3_TYPE_Q8_0:
    return exact ? (const void *)down_kernel<Q8Exact, 2, Q8Exact> : (const void *)down_kernel<Q8Int, 6, Q8Int>;
  case K3_TYPE_MXFP4:
    return exact ? (const void *)down_kernel<Mxfp4Exact, 2, Q8Exact> : (const void *)down_kernel<Mxfp4Int, 6, Q8Int>;
  default:
    return exact ? (const void *)down_kernel<Iq1Exact, 2, Q8Exact> : (const void *)down_kernel<Iq1Int, 2, Q8Int>;
  }
}

K3Status check_threads(const K3CudaLaunch *launch, int threads)
{
  if (threads % 32 || threads < 64 || threads > THREADS)
    K3_FAIL(K3_ERR_INPUT, "experts of layer %lld: %d threads a block; a multiple of 32 from 64 to %d is wanted",
            (long long)launch->layer, threads, THREADS);
  return K3_OK;
}

/* The shared experts' down as a launch of its own. */
K3Status shared_down(const K3CudaLaunch *launch, const K3CudaExpertsDown *e)
{
  if (!e->shared.y) return K3_OK;
  K3CudaLinear linear = {};
  linear.input = e->shared_input;
  linear.count = 1;
  linear.items[0] = e->shared;
  linear.exact = e->exact;
  return k3_cuda_linear(launch, &linear);
}

} /* namespace */

K3Status k3_cuda_experts_gate_up(const K3CudaLaunch *launch, const K3CudaExpertsGateUp *experts)
{
  GateUpArguments a;
  const K3CudaExpertsGateUp *e = experts;
  int threads = e->threads ? e->threads : THREADS;
  K3_TRY(check_threads(launch, threads));
  int blocks = k3_cuda_is_blocks(e->gate.type), values = blocks ? (int)k3_format(e->gate.type)->block_values : piece_values(e->gate.type);
  int exact = e->exact || !k3_format_is_quantised(e->gate.type);
  if (e->gate.type != e->up.type || e->gate.cols != e->y.n || e->up.cols != e->y.n || e->gate.cols % values ||
      e->gate.rows != e->local * e->band || e->up.rows != e->gate.rows)
    K3_FAIL(K3_ERR_INPUT, "experts of layer %lld: gate %lld x %lld, up %lld x %lld (%s, %s) for %lld experts of %lld rows and a "
            "latent vector of %lld", (long long)launch->layer, (long long)e->gate.rows, (long long)e->gate.cols,
            (long long)e->up.rows, (long long)e->up.cols, k3_format(e->gate.type)->name, k3_format(e->up.type)->name,
            (long long)e->local, (long long)e->band, (long long)e->y.n);
  if (e->band >= 1 << 13 || e->routing.chosen < 1 || e->routing.chosen > K3_ROUTER_CHOSEN)
    K3_FAIL(K3_ERR_INPUT, "experts of layer %lld: %d chosen of band %lld; at most %d and %d are possible",
            (long long)launch->layer, e->routing.chosen, (long long)e->band, K3_ROUTER_CHOSEN, (1 << 13) - 1);
  if (e->route) K3_TRY(k3_cuda_routing_check(launch, &e->routing));
  if (blocks) return k3_cuda_experts_gate_up_blocks(launch, e);
  a.e = *e;
  a.tiling = tiling_of((int)(e->gate.cols / values));
  a.magic = magic_of(e->band);
  unsigned grid = (unsigned)launch->sm_count;
  int iq1 = e->gate.type == K3_TYPE_IQ1_S && !exact;
  int rows = 2 * (int)(e->routing.chosen * e->band / grid + (iq1 ? 16 : 1));
  a.shared = plan_shared(0, e->y.n, !exact, exact, e->gate.type == K3_TYPE_IQ1_S,
                         iq1 ? iq1_segment_floats(rows, a.tiling.pieces) : segment_floats(rows, a.tiling.lanes, threads / 32));
  void *arguments[] = {&a};
  return k3_cuda_launch_kernel(launch, "gate_up_kernel", gate_up_of(e->gate.type, e->exact), grid,
                               (unsigned)threads, 1, (size_t)a.shared.bytes, arguments);
}

K3Status k3_cuda_experts_down(const K3CudaLaunch *launch, const K3CudaExpertsDown *experts)
{
  DownArguments a;
  const K3CudaExpertsDown *e = experts;
  int threads = e->threads ? e->threads : THREADS;
  K3_TRY(check_threads(launch, threads));
  int blocks = k3_cuda_is_blocks(e->down.type), values = blocks ? (int)k3_format(e->down.type)->block_values : piece_values(e->down.type);
  int exact = e->exact || !k3_format_is_quantised(e->down.type);
  if (e->down.cols != e->band || e->down.rows != e->local * e->latent || e->band % values)
    K3_FAIL(K3_ERR_INPUT, "experts of layer %lld: down %lld x %lld (%s) for %lld experts of %lld x %lld",
            (long long)launch->layer, (long long)e->down.rows, (long long)e->down.cols, k3_format(e->down.type)->name,
            (long long)e->local, (long long)e->latent, (long long)e->band);
  if (e->band >= 1 << 13 || e->chosen < 1 || e->chosen > K3_ROUTER_CHOSEN)
    K3_FAIL(K3_ERR_INPUT, "experts of layer %lld: %d chosen of band %lld; at most %d and %d are possible",
            (long long)launch->layer, e->chosen, (long long)e->band, K3_ROUTER_CHOSEN, (1 << 13) - 1);
  if (blocks) {
    K3_TRY(k3_cuda_experts_down_blocks(launch, e));
    return shared_down(launch, e);
  }
  a.e = *e;
  a.pieces = (int)(e->band / values);
  a.magic = magic_of(a.pieces);
  a.band_magic = magic_of(e->band);
  a.shared_tiling = tiling_of(1);
  unsigned grid = (unsigned)launch->sm_count;
  int fuse = e->shared.y && e->shared.matrix.type == K3_TYPE_Q8_0, warps = threads / 32;
  /* the tiling of the routed rows depends on the number of local experts: 32 rows a step at most */
  int routed_segments = ((int)(e->latent / grid) + 1 + 31) / 32 * 32 + 32 * warps;
  if (e->down.type == K3_TYPE_IQ1_S && !exact)
    routed_segments = iq1_segment_floats((int)(e->latent / grid) + 32, e->chosen * a.pieces);
  a.routed = plan_shared(0, e->chosen * e->band, !exact, exact, e->down.type == K3_TYPE_IQ1_S, routed_segments);
  a.shared = plan_shared(a.routed.bytes, 0, 0, 0, 0, 1);
  if (fuse) {
    if (e->shared.matrix.cols != e->shared_input.n || e->shared.matrix.cols % 32)
      K3_FAIL(K3_ERR_INPUT, "experts of layer %lld: shared down has %lld columns for %lld hidden values",
              (long long)launch->layer, (long long)e->shared.matrix.cols, (long long)e->shared_input.n);
    a.shared_tiling = tiling_of((int)(e->shared.matrix.cols / 16));
    a.shared = plan_shared(a.routed.bytes, e->shared_input.n, !e->exact, e->exact, 0,
                           segment_floats((int)(e->shared.matrix.rows / grid) + 1, a.shared_tiling.lanes, warps));
  } else {
    a.e.shared.y = NULL;
  }
  void *arguments[] = {&a};
  K3_TRY(k3_cuda_launch_kernel(launch, "down_kernel", down_of(e->down.type, e->exact), grid, (unsigned)threads, 1,
                               (size_t)a.shared.bytes, arguments));
  return fuse ? K3_OK : shared_down(launch, e);
}
