/* Routed experts in GGUF blocks. See experts.h, blocks.cuh. Layer: backend (CUDA).
 *
 * gate_up_blocks_kernel: a pair is a gate row and the up row beside it, of all local chosen experts in one line; ends with situ.
 * down_blocks_kernel: a pair is two rows of z; its units run over all local experts (hidden vectors times w_e in shared memory).
 * Grid: one block a multiprocessor, 512 threads, each an even share of the pairs. Reads what experts.cu's kernels read. Bound:
 * memory, or the codebook's look-ups in shared memory. The shared experts' down is a launch of its own.
 * Twins: k3_host_experts_gate_up, k3_host_experts_down. */
#include "kernels/blocks.cuh"
#include "kernels/experts.h"
#include "kernels/route.cuh"
#include "plan/codebook.h"

namespace {

using namespace k3;

/* The local experts among the chosen, in order; one thread. */
struct LocalExperts {
  int count;
  int64_t base[K3_ROUTER_CHOSEN]; /* first block */
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
enum Stage { BOTH, GATE_ALONE, UP_ALONE };
struct GateUpArguments {
  K3CudaExperts e; /* its gate: what the plan is made of */
  BlockPlan plan;
  BlockMatrix gate, up; /* twice the same in a stage of one alone */
  Stage stage;
  uint32_t magic; /* of the band */
};

/* Pair (slot, row of the band): gate, up. */
struct GateUpPairs {
  const BlockMatrix gate, up;
  const LocalExperts *local;
  int row_blocks, band;
  uint32_t magic;
  __device__ __forceinline__ void place(int pair, int block, K3BlockParts parts[2]) const
  {
    int slot = divide(pair, magic);
    uint32_t at = (uint32_t)local->base[slot] + (uint32_t)(pair - slot * band) * row_blocks + block;
    parts[0] = gate.place(at);
    parts[1] = up.place(at);
  }
};

template <int TYPE, bool EXACT>
__global__ void __launch_bounds__(BLOCK_THREADS, 1) gate_up_blocks_kernel(const __grid_constant__ GateUpArguments a)
{
  extern __shared__ __align__(128) char memory[];
  __shared__ RouteShared routed;
  __shared__ LocalExperts local;
  __shared__ float scratch[33];
  const K3CudaExperts &e = a.e;
  BlockShared s = block_shared(memory, a.plan);
  fill_book<TYPE>(s, a.plan, e.gate.codebook);
  const bool routes = threadIdx.x < ROUTE_THREADS;
  float bias[ROUTE_KEYS], logit[ROUTE_KEYS];
  if (routes) fetch_keys(e.routing.bias, e.routing.experts, bias);
  k3_wait_early();
  const int row_blocks = a.plan.tiling.pieces >> a.gate.units_log;
  if (routes) {
    fetch_keys(e.routing.logits, e.routing.experts, logit);
    route_ids(e.routing, e.first, e.local, bias, logit, routed);
  }
  __syncthreads();
  list_local(local, routed.ids, NULL, e.routing.chosen, e.first, e.local, e.band * row_blocks);
  if (blockIdx.x == gridDim.x - 1 && threadIdx.x < 32) {
    float weight = route_weight(e.routing, routed);
    if (threadIdx.x < e.routing.chosen) {
      e.ids[threadIdx.x] = routed.ids[threadIdx.x];
      e.weights[threadIdx.x] = weight;
    }
  }
  int begin, end;
  share_rows<1>(local.count * (int)e.band, &begin, &end);
  if (begin >= end) return;
  BlockPairs<TYPE, EXACT, GateUpPairs> core(GateUpPairs{a.gate, a.up, &local, row_blocks, (int)e.band, a.magic}, e.gate.type,
                                            a.gate.units_log, a.plan.tiling, begin, end);
  core.s_grid_words = a.plan.grid_words;
  core.preload();
  fill_input(e.y, s.in, scratch);
  if (EXACT) __syncthreads();
  else fill_sums(s, type_of<TYPE>(e.gate.type), (int)e.y.n);
  core.run(s);
  __syncthreads();
  for (int i = threadIdx.x; i < end - begin; i += blockDim.x) {
    float2 sums = core.pair_sum(s, i);
    float gate = a.stage == UP_ALONE ? __ldcg(e.hidden + begin + i) : sums.x;
    e.hidden[begin + i] = a.stage == GATE_ALONE ? gate : situ(gate, sums.y, e.situ_beta, e.situ_linear_beta);
  }
}

/* ---- down ---- */
struct DownArguments {
  K3CudaExperts e;
  BlockPlan plan; /* its tiling is made by the kernel, which knows how many experts are here */
  BlockMatrix down;
  int row_blocks; /* of an expert's row */
  uint32_t magic, band_magic;
};

/* Pair i: rows 2i and 2i + 1 of z; block q: expert q / blocks of its row. */
struct DownPairs {
  const BlockMatrix down;
  const LocalExperts *local;
  int row_blocks, latent;
  uint32_t magic;
  __device__ __forceinline__ void place(int pair, int block, K3BlockParts parts[2]) const
  {
    int slot = divide(block, magic);
    uint32_t at = (uint32_t)local->base[slot] + (uint32_t)(2 * pair) * row_blocks + (block - slot * row_blocks);
    parts[0] = down.place(at);
    parts[1] = down.place(2 * pair + 1 < latent ? at + row_blocks : at);
  }
};

template <int TYPE, bool EXACT>
__global__ void __launch_bounds__(BLOCK_THREADS, 1) down_blocks_kernel(const __grid_constant__ DownArguments a)
{
  extern __shared__ __align__(128) char memory[];
  __shared__ LocalExperts local;
  const K3CudaExperts &e = a.e;
  BlockShared s = block_shared(memory, a.plan);
  fill_book<TYPE>(s, a.plan, e.down.codebook);
  k3_wait();
  list_local(local, e.ids, e.weights, e.routing.chosen, e.first, e.local, e.y.n * a.row_blocks);
  int begin, end, rows = (int)e.y.n;
  share_rows<1>((rows + 1) / 2, &begin, &end);
  if (local.count == 0) {
    for (int i = 2 * begin + threadIdx.x; i < min(2 * end, rows); i += blockDim.x) e.z[i] = 0.0f;
    end = begin;
  }
  if (begin >= end) return;
  BlockPairs<TYPE, EXACT, DownPairs> core(DownPairs{a.down, &local, a.row_blocks, rows, a.magic}, e.down.type, a.down.units_log,
                                          block_tiling(local.count * a.row_blocks << a.down.units_log), begin, end);
  core.s_grid_words = a.plan.grid_words;
  core.preload();
  int n = local.count * (int)e.band, padded = (n + 127) / 128 * 128;
  for (int i = threadIdx.x * 4; i < padded; i += blockDim.x * 4) { /* a band is a multiple of 32 */
    float v[4], w = i < n ? local.weight[divide(i, a.band_magic)] : 0.0f;
    fetch4(e.hidden, i, n, v);
#pragma unroll
    for (int k = 0; k < 4; k++) v[k] = i < n ? v[k] * w : 0.0f;
    put4(s.in, i, v);
  }
  if (EXACT) __syncthreads();
  else fill_sums(s, type_of<TYPE>(e.down.type), n);
  core.run(s);
  __syncthreads();
  for (int i = threadIdx.x; i < 2 * (end - begin) && 2 * begin + i < rows; i += blockDim.x) {
    float2 sums = core.pair_sum(s, i >> 1);
    e.z[2 * begin + i] = i & 1 ? sums.y : sums.x;
  }
}

/* ---- choice of the kernels ---- */
struct Kernels {
  const void *gate_up, *down;
  int templated;
};

template <int TYPE, bool EXACT>
Kernels kernels_for()
{
  return Kernels{(const void *)gate_up_blocks_kernel<TYPE, EXACT>, (const void *)down_blocks_kernel<TYPE, EXACT>, TYPE != BLOCK_ANY};
}

/* Formats that published experts come in have kernels of their own; the others share one. */
Kernels kernels_of(K3Type type, int exact)
{
  if (exact) return kernels_for<BLOCK_ANY, true>();
  switch (type) {
  case K3_TYPE_Q2_K: return kernels_for<K3_TYPE_Q2_K, false>();
  case K3_TYPE_Q3_K: return kernels_for<K3_TYPE_Q3_K, false>();
  case K3_TYPE_Q4_K: return kernels_for<K3_TYPE_Q4_K, false>();
  case K3_TYPE_Q5_K: return kernels_for<K3_TYPE_Q5_K, false>();
  case K3_TYPE_Q6_K: return kernels_for<K3_TYPE_Q6_K, false>();
  case K3_TYPE_IQ1_M: return kernels_for<K3_TYPE_IQ1_M, false>();
  case K3_TYPE_IQ2_XXS: return kernels_for<K3_TYPE_IQ2_XXS, false>();
  case K3_TYPE_IQ2_XS: return kernels_for<K3_TYPE_IQ2_XS, false>();
  case K3_TYPE_IQ2_S: return kernels_for<K3_TYPE_IQ2_S, false>();
  case K3_TYPE_IQ3_XXS: return kernels_for<K3_TYPE_IQ3_XXS, false>();
  case K3_TYPE_IQ4_XS: return kernels_for<K3_TYPE_IQ4_XS, false>();
  case K3_TYPE_MXFP4: return kernels_for<K3_TYPE_MXFP4, false>();
  default: return kernels_for<BLOCK_ANY, false>();
  }
}

BlockPlan plan_of(K3Type type, int templated, int64_t n, int exact, int segments)
{
  int id = k3_codebook_of(type);
  const K3Codebook *book = id < 0 ? NULL : k3_codebook((K3CodebookId)id);
  return block_plan(type, templated, n, exact, book ? book->words : 0, book ? k3_codebook_words(book) - book->words : 0, segments);
}

/* Formats that differ take a launch each; its warps read a row twice, the second time from a cache. */
K3Status launch_gate_up(const K3CudaLaunch *launch, const K3CudaExperts *e, const K3CudaMatrix *gate,
                        const K3CudaMatrix *up, Stage stage)
{
  Kernels kernels = kernels_of(gate->type, e->exact);
  unsigned grid = (unsigned)launch->sm_count;
  GateUpArguments a;
  Tiling tiling = block_tiling((int)(gate->cols / block_unit_values(gate->type)));
  a.e = *e;
  a.e.gate = *gate;
  a.plan = plan_of(gate->type, kernels.templated, e->y.n, e->exact,
                   block_segment_floats((int)(e->routing.chosen * e->band / grid) + 2, tiling.lanes, BLOCK_THREADS / 32));
  a.plan.tiling = tiling;
  a.gate = block_matrix(*gate);
  a.up = block_matrix(*up);
  a.stage = stage;
  a.magic = magic_of(e->band);
  void *arguments[] = {&a};
  return k3_cuda_launch_kernel(launch, "gate_up_blocks_kernel", kernels.gate_up, grid, BLOCK_THREADS, 1, (size_t)a.plan.bytes, arguments);
}

} /* namespace */

K3Status k3_cuda_experts_gate_up_blocks(const K3CudaLaunch *launch, const K3CudaExperts *e)
{
  if (e->gate.type == e->up.type) return launch_gate_up(launch, e, &e->gate, &e->up, BOTH);
  K3_TRY(launch_gate_up(launch, e, &e->gate, &e->gate, GATE_ALONE));
  return launch_gate_up(launch, e, &e->up, &e->up, UP_ALONE);
}

K3Status k3_cuda_experts_down_blocks(const K3CudaLaunch *launch, const K3CudaExperts *e)
{
  Kernels kernels = kernels_of(e->down.type, e->exact);
  unsigned grid = (unsigned)launch->sm_count;
  DownArguments a;
  a.e = *e;
  a.down = block_matrix(e->down);
  a.row_blocks = (int)(e->band / k3_format(e->down.type)->block_values);
  a.magic = magic_of(a.row_blocks);
  a.band_magic = magic_of(e->band);
  a.plan = plan_of(e->down.type, kernels.templated, e->routing.chosen * e->band, e->exact,
                   block_segment_floats((int)((e->y.n + 1) / 2 / grid) + 2, 8, BLOCK_THREADS / 32)); /* 8: the most rows a step */
  void *arguments[] = {&a};
  return k3_cuda_launch_kernel(launch, "down_blocks_kernel", kernels.down, grid, BLOCK_THREADS, 1, (size_t)a.plan.bytes, arguments);
}
