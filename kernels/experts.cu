/* Routed experts. See experts.h. Layer: backend (CUDA).
 *
 * experts_kernel: one block an SM, in three phases (numbered below). Every block routes for itself with half of its warps. The gate and
 * up rows of all local chosen experts stand in one line, dealt to the blocks; situ of them goes to `hidden`. Then all blocks
 * meet, and z's rows are dealt to them: a row's pieces run over all local experts (hidden vectors times w_e in shared memory).
 * Reads n * 3 * band * L values' bytes and the shared experts' down. Bound: latency, then instructions of the codebook look-ups
 * (iq1_s). Twins: k3_host_route, k3_host_experts_gate_up, k3_host_experts_down. */
#include "kernels/experts.h"

#include "kernels/iq1_mma.cuh"
#include "kernels/route.cuh"
#include "kernels/wait.cuh"

namespace {

using namespace k3;

enum { THREADS = 2 * ROUTE_THREADS, WARPS = THREADS / 32, MOST_SHARED = 218 << 10 /* of 227 KB; the kernel has 9 of its own */ };

/* n / d for n · d < 2^32 with magic = 2^32 / d + 1; 0 stands for d = 1. */
__device__ __forceinline__ int divide(int n, uint32_t magic) { return magic ? (int)__umulhi((uint32_t)n, magic) : n; }
inline uint32_t magic_of(int64_t d) { return d == 1 ? 0 : (uint32_t)((1ull << 32) / (uint64_t)d + 1); }

/* The part of `rows` of block `block`, in whole groups of ROWS; magic: of the number of blocks (rows · blocks² fits 32 bits). */
template <int ROWS>
__device__ __forceinline__ void share_rows(int rows, int block, uint32_t magic, int *begin, int *end)
{
  int groups = (int)((unsigned)(rows + ROWS - 1) / ROWS);
  *begin = min(rows, divide(groups * block, magic) * ROWS);
  *end = min(rows, divide(groups * (block + 1), magic) * ROWS);
}

/* What the kernel reads of K3CudaExperts, close together: each line of the constant cache is a miss at its start. */
struct Arguments {
  K3CudaRouting routing;
  const uint32_t *codebook;
  const float *y, *shared_gate, *shared_up;
  Parts gate, up, down, shared_down;
  int32_t *ids;
  float *weights, *hidden, *z, *shared_y;
  uint32_t *meeting;
  int first, local, band, latent, shared_rows, shared_width, shared_add;
  float situ_beta, situ_linear_beta, shared_beta, shared_linear_beta;
  Tiling tiling, shared_tiling; /* of gate and up, of the shared experts' down */
  int pieces;                   /* of an expert's row of down */
  uint32_t pieces_magic, band_magic, grid_magic;
  int first_pass, last_pass;    /* 0: gate and up; 1: down */
  SharedPlan x, shared; /* y, then the hidden vectors; beside them the shared experts' input */
  int slots;            /* experts whose hidden vectors fit at once: further ones take further passes */
};

/* Gate and up: row v is pair v/2 = (slot, row of the band); even: gate, odd: up. Down: rows as they stand, but the pieces of a
 * row are those of all local experts: piece q is of expert q / pieces. */
struct ExpertsMap {
  bool down;
  Parts parts[2]; /* of even and of odd rows */
  const int32_t *local;
  int rows, pieces; /* of one expert */
  uint32_t magic;   /* of its pairs, or of its pieces */
  __device__ __forceinline__ Parts place(int row, int piece, int64_t *index) const
  {
    int slot = divide(down ? piece : row >> 1, magic);
    int64_t base = (int64_t)local[slot] * rows;
    *index = down ? (base + row) * pieces + (piece - slot * pieces) : (base + (row >> 1) - slot * rows) * pieces + piece;
    return row & 1 ? parts[1] : parts[0];
  }
  /* Rows `row`, which is even, and row + 1. */
  __device__ __forceinline__ void place_pair(int row, int last, int piece, Parts two[2], uint32_t index[2]) const
  {
    two[0] = parts[0], two[1] = parts[1];
    if (down) {
      int slot = divide(piece, magic);
      uint32_t base = (uint32_t)local[slot] * rows;
      index[0] = (base + min(row, last)) * pieces + (piece - slot * pieces);
      index[1] = (base + min(row + 1, last)) * pieces + (piece - slot * pieces);
    } else {
      int pair = min(row, last) >> 1, slot = divide(pair, magic);
      index[0] = index[1] = ((uint32_t)(local[slot] - slot) * rows + pair) * pieces + piece;
    }
  }
};

/* shared_input (gemv.cuh) of what F reads, without a test for each part. */
template <class F>
__device__ __forceinline__ SharedInput input_of(char *memory, const SharedPlan &p)
{
  SharedInput in = {};
  if (F::CODES) {
    in.high = (int4 *)(memory + p.codes), in.low = (int4 *)(memory + p.low);
    in.scales = (float *)(memory + p.scales), in.sums = (float *)(memory + p.sums);
  } else {
    in.values = (float4 *)(memory + p.values);
  }
  return in;
}

/* Four values times `weight`, i … i + 3, into the input: put4 (gemv.cuh) in fewer instructions, for what all blocks do alike. The
 * codes do not know the weight. */
template <class F>
__device__ __forceinline__ void put(const SharedInput &in, int i, const float v[4], float weight)
{
  if (!F::CODES) {
    in.values[cell(i >> 2)] = make_float4(v[0] * weight, v[1] * weight, v[2] * weight, v[3] * weight);
    return;
  }
  float most = max_nan(max_nan(fabsf(v[0]), fabsf(v[1])), max_nan(fabsf(v[2]), fabsf(v[3])));
#pragma unroll
  for (int o = 4; o; o >>= 1) most = max_nan(most, __shfl_xor_sync(0xffffffffu, most, o));
  float factor = code_factor(most);
  constexpr float magic = 12582912.0f; /* 1.5 · 2^23: a sum's low bits are the rounded code */
  uint32_t code[4];
#pragma unroll
  for (int k = 0; k < 4; k++) code[k] = __float_as_uint(__fadd_rn(__fmul_rn(v[k], factor), magic));
  uint32_t low = __byte_perm(__byte_perm(code[0], code[1], 0x0040), __byte_perm(code[2], code[3], 0x0040), 0x5410);
  uint32_t high = __byte_perm(__byte_perm(code[0] + 128, code[1] + 128, 0x0051),
                              __byte_perm(code[2] + 128, code[3] + 128, 0x0051), 0x5410);
  int at = cell(i >> 4) * 4 + ((i >> 2) & 3), sum = 0;
  ((uint32_t *)in.high)[at] = high;
  ((uint32_t *)in.low)[at] = low;
  if (F::BOOK) { /* the sums serve iq1_s alone */
    sum = (int)(code[0] + code[1] + code[2] + code[3] - 4 * 0x4b400000u);
#pragma unroll
    for (int o = 4; o; o >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, o);
  }
  if ((threadIdx.x & 7) == 0) {
    float scale = most * (1.0f / CODE_MOST) * weight;
    in.scales[i >> 5] = scale;
    if (F::BOOK) in.sums[i >> 5] = scale * (float)sum;
  }
}

/* `n` numbers by `threads` threads of which this is number t: all loads of ROUNDS rounds first. Padded with zeros. */
template <class F, int ROUNDS, class Weight>
__device__ __forceinline__ void fill(const SharedInput &in, const float *from, int n, int t, int threads, Weight weight)
{
  const int padded = (n + 127) / 128 * 128;
  const bool fours = n % 4 == 0 && ((uintptr_t)from & 15) == 0;
  for (int first = t * 4; first < padded; first += ROUNDS * threads * 4) {
    float v[ROUNDS][4];
    if (fours) {
#pragma unroll
      for (int r = 0; r < ROUNDS; r++) {
        int i = first + r * threads * 4;
        float4 f = i < n ? __ldcg((const float4 *)(from + i)) : make_float4(0, 0, 0, 0);
        v[r][0] = f.x, v[r][1] = f.y, v[r][2] = f.z, v[r][3] = f.w;
      }
    } else {
#pragma unroll
      for (int r = 0; r < ROUNDS; r++) fetch4(from, first + r * threads * 4, n, v[r]);
    }
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
      int i = first + r * threads * 4;
      if (i < padded) put<F>(in, i, v[r], i < n ? weight(i) : 0.0f);
    }
  }
}

/* All blocks meet: the number at `meeting` gains 2^31 when the last arrives, whatever it was. One thread of each block, after a
 * block barrier behind the block's stores, and before one ahead of its loads. */
__device__ __forceinline__ uint32_t arrive_at_meeting(uint32_t *meeting)
{
  uint32_t before, one = blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1;
  asm volatile("atom.add.release.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(meeting), "r"(one) : "memory");
  return before;
}
__device__ __forceinline__ void await_meeting(const uint32_t *meeting, uint32_t before)
{
  uint32_t now;
  do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(meeting) : "memory");
  while (!((now ^ before) >> 31));
}

/* The weights of the local experts, in the order of their slots, and what the caller gets of the routing; one warp. */
__device__ __forceinline__ void weigh(const Arguments &a, const RouteShared &routed, float *weight)
{
  int lane = threadIdx.x & 31, id = lane < a.routing.chosen ? routed.ids[lane] : -1;
  float w = route_weight(a.routing, routed);
  bool local = id >= a.first && id < a.first + a.local;
  uint32_t mask = __ballot_sync(0xffffffffu, local);
  if (local) weight[__popc(mask & ((1u << lane) - 1u))] = w;
  if (blockIdx.x == gridDim.x - 1 && id >= 0) a.ids[lane] = id, a.weights[lane] = w;
}

/* The shared experts' rows. */
template <class S>
struct SharedOf {
  typedef Gemv<S, 2, PlainMap> Type;
};
template <>
struct SharedOf<Q8Int> {
  typedef MmaRows<Q8Int, 3, PlainMap> Type;
};

template <class F, int D, class S>
__global__ void __launch_bounds__(THREADS, 1) experts_kernel(const __grid_constant__ Arguments a)
{
  extern __shared__ __align__(128) char memory[];
  __shared__ RouteShared routed;
  __shared__ float weight[K3_ROUTER_CHOSEN];
  SharedInput x = input_of<F>(memory, a.x), shared_in = input_of<S>(memory, a.shared);
  float *segments = (float *)(memory + a.x.segments), *shared_segments = (float *)(memory + a.shared.segments);
  if (F::BOOK) x.codebook = (uint32_t *)(memory + a.x.codebook);

  /* 1. Before the wait: the codebook; the shared experts' first weights. */
  fill_codebook(x, a.codebook);
  enum { FILLERS = THREADS - ROUTE_THREADS };
  const int t = (int)threadIdx.x - ROUTE_THREADS, latent = a.latent, band = a.band;
  float bias[ROUTE_KEYS];
  if (t < 0) fetch_keys(a.routing.bias, a.routing.experts, bias);
  int begin = 0, end = 0;
  if (a.shared_y) share_rows<1>(a.shared_rows, blockIdx.x, a.grid_magic, &begin, &end);
  const int shared_begin = begin, shared_end = end;
  typename SharedOf<S>::Type shared(PlainMap{a.shared_down, a.shared_tiling.pieces}, a.shared_tiling, begin, end,
                                    threadIdx.x / 32, WARPS);
  shared.preload();
  k3_wait();

  /* 2. Half of the warps find out which experts; the others prepare both inputs. */
  if (t < 0) {
    float logit[ROUTE_KEYS];
    fetch_keys(a.routing.logits, a.routing.experts, logit);
    route_ids(a.routing, a.first, a.local, bias, logit, routed);
  } else {
    const int n = begin < end ? a.shared_width : 0;
    float g[4], u[4];
    fetch4(a.shared_gate, t * 4, n, g);
    fetch4(a.shared_up, t * 4, n, u);
    fill<F, 4>(x, a.y, latent, t, FILLERS, [](int) { return 1.0f; });
    for (int i = t * 4; i < (n + 127) / 128 * 128; i += FILLERS * 4) {
      if (i != t * 4) fetch4(a.shared_gate, i, n, g), fetch4(a.shared_up, i, n, u);
#pragma unroll
      for (int k = 0; k < 4; k++) g[k] = situ(g[k], u[k], a.shared_beta, a.shared_linear_beta);
      put<S>(shared_in, i, g, 1.0f);
    }
  }
  __syncthreads();
  const int count = routed.local_count;

  /* 3. Two products by the same code, warm in the instruction caches for the second: gate and up; then, after the blocks met,
   * down. */
  typedef RowsOf<F, D, ExpertsMap> Rows;
  enum { PARTS = Rows::ROWS == 1, ROWS = PARTS ? 2 : Rows::ROWS };
  uint32_t arrival = 0;
#pragma unroll 1
  for (int pass = a.first_pass;; pass++) {
    const bool down = PARTS ? pass > 0 : pass == 1;
    /* iq1_s has no register left for more passes, and its hidden vectors as codes need none: 110 KB of Kimi K3 on one rank */
    const int slot = PARTS && down ? (pass - 1) * a.slots : 0, here = PARTS && down ? min(count - slot, a.slots) : count;
    ExpertsMap map{down, {down ? a.down : a.gate, down ? a.down : a.up}, routed.local + slot, down ? latent : band,
                   down ? a.pieces : a.tiling.pieces, down ? a.pieces_magic : a.band_magic};
    share_rows<ROWS>(!down ? 2 * count * band : count ? latent : 0, blockIdx.x, a.grid_magic, &begin, &end);
    Tiling tiling = !down ? a.tiling : Rows::ROWS == 1 ? tiling_of(max(1, here) * a.pieces) : Tiling{here * a.pieces};
    typename Rows::Type gemv(map, tiling, begin, end, threadIdx.x / 32, WARPS);
    gemv.preload();
    if (!down) { /* while the first loads come */
      shared.run(shared_in, shared_segments);
    } else {
      if ((!PARTS || slot == 0) && threadIdx.x / 32 == 1) weigh(a, routed, weight);
      if ((!PARTS || pass == 1) && threadIdx.x == 0 && a.first_pass == 0) await_meeting(a.meeting, arrival);
      __syncthreads();
      fill<F, 4>(x, a.hidden + slot * band, here * band, threadIdx.x, THREADS,
                 [&](int i) { return weight[slot + divide(i, a.band_magic)]; });
      __syncthreads();
    }
    gemv.run(x, segments);
    __syncthreads();
    if (down) {
      for (int i = threadIdx.x; i < end - begin; i += THREADS)
        a.z[begin + i] = PARTS && slot ? a.z[begin + i] + gemv.row_sum(segments, i) : gemv.row_sum(segments, i);
      if (!PARTS || slot + a.slots >= count) break;
      continue;
    }
    for (int i = THREADS - 1 - threadIdx.x; i < shared_end - shared_begin; i += THREADS) { /* other threads than those of situ */
      float sum = shared.row_sum(shared_segments, i);
      a.shared_y[shared_begin + i] = a.shared_add ? sum + __ldcg(a.shared_y + shared_begin + i) : sum;
    }
    for (int i = threadIdx.x; i < (end - begin) / 2; i += THREADS)
      a.hidden[begin / 2 + i] =
          situ(gemv.row_sum(segments, 2 * i), gemv.row_sum(segments, 2 * i + 1), a.situ_beta, a.situ_linear_beta);
    if (count == 0 || a.last_pass == 0) {
      if (threadIdx.x < 32) weigh(a, routed, weight); /* ids and weights are an output */
      break;
    }
    __syncthreads();
    if (threadIdx.x == 0) arrival = arrive_at_meeting(a.meeting);
  }
  if (count == 0 && a.last_pass == 1)
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < latent; i += gridDim.x * THREADS) a.z[i] = 0.0f;
}

Parts parts(const K3CudaMatrix &m)
{
  return Parts{(const uint8_t *)m.codes, (const uint8_t *)m.high, (const uint8_t *)m.scale};
}

int piece_values(K3Type type)
{
  static const int values[K3_TYPE_COUNT] = {4, 8, 16, 32, 128, 8};
  return values[type];
}

/* With the shared experts in q8_0; other formats take a launch of their own. */
const void *kernel_of(K3Type type, int exact)
{
  switch (type) {
  case K3_TYPE_F32:
    return exact ? (const void *)experts_kernel<F32, 4, Q8Exact> : (const void *)experts_kernel<F32, 4, Q8Int>;
  case K3_TYPE_BF16:
    return exact ? (const void *)experts_kernel<Bf16, 4, Q8Exact> : (const void *)experts_kernel<Bf16, 4, Q8Int>;
  case K3_TYPE_F16:
    return exact ? (const void *)experts_kernel<F16, 4, Q8Exact> : (const void *)experts_kernel<F16, 4, Q8Int>;
  case K3_TYPE_Q8_0:
    return exact ? (const void *)experts_kernel<Q8Exact, 2, Q8Exact> : (const void *)experts_kernel<Q8Int, 6, Q8Int>;
  case K3_TYPE_MXFP4:
    return exact ? (const void *)experts_kernel<Mxfp4Exact, 2, Q8Exact>
                 : (const void *)experts_kernel<Mxfp4Int, 6, Q8Int>;
  default:
    return exact ? (const void *)experts_kernel<Iq1Exact, 2, Q8Exact> : (const void *)experts_kernel<Iq1Int, 2, Q8Int>;
  }
}

/* Values that a row of a matrix of `type` must be a multiple of. */
int step_of(K3Type type) { return k3_cuda_is_blocks(type) ? (int)k3_format(type)->block_values : piece_values(type); }

K3Status check(const K3CudaLaunch *launch, const K3CudaExperts *e)
{
  if (e->y.kind != K3_INPUT_VALUES || (e->shared.y && e->shared_input.kind != K3_INPUT_SITU))
    K3_FAIL(K3_ERR_INPUT, "experts of layer %lld: inputs of kinds %d and %d; values and situ are wanted",
            (long long)launch->layer, (int)e->y.kind, (int)e->shared_input.kind);
  int alike = e->gate.type == e->up.type || (k3_cuda_is_blocks(e->gate.type) && k3_cuda_is_blocks(e->up.type));
  if (!alike || e->gate.cols != e->y.n || e->up.cols != e->y.n || e->gate.cols % step_of(e->gate.type) ||
      e->gate.cols % step_of(e->up.type) ||
      e->gate.rows != e->local * e->band || e->up.rows != e->gate.rows)
    K3_FAIL(K3_ERR_INPUT, "experts of layer %lld: gate %lld x %lld, up %lld x %lld (%s, %s) for %lld experts of %lld rows and a "
            "latent vector of %lld", (long long)launch->layer, (long long)e->gate.rows, (long long)e->gate.cols,
            (long long)e->up.rows, (long long)e->up.cols, k3_format(e->gate.type)->name, k3_format(e->up.type)->name,
            (long long)e->local, (long long)e->band, (long long)e->y.n);
  if (e->down.cols != e->band || e->down.rows != e->local * e->y.n || e->band % step_of(e->down.type))
    K3_FAIL(K3_ERR_INPUT, "experts of layer %lld: down %lld x %lld (%s) for %lld experts of %lld x %lld",
            (long long)launch->layer, (long long)e->down.rows, (long long)e->down.cols, k3_format(e->down.type)->name,
            (long long)e->local, (long long)e->y.n, (long long)e->band);
  if (e->band >= 1 << 13)
    K3_FAIL(K3_ERR_INPUT, "experts of layer %lld: a band of %lld; at most %d is possible", (long long)launch->layer,
            (long long)e->band, (1 << 13) - 1);
  if (e->shared.y && (e->shared.matrix.cols != e->shared_input.n || e->shared.matrix.cols % 32))
    K3_FAIL(K3_ERR_INPUT, "experts of layer %lld: shared down has %lld columns for %lld hidden values",
            (long long)launch->layer, (long long)e->shared.matrix.cols, (long long)e->shared_input.n);
  const K3CudaRouting *r = &e->routing;
  if (r->experts < 1 || r->experts > K3_ROUTER_EXPERTS || r->chosen < 1 || r->chosen > K3_ROUTER_CHOSEN || r->chosen > r->experts)
    K3_FAIL(K3_ERR_INPUT, "router of layer %lld: %d of %d experts; this build does at most %d of %d", (long long)launch->layer,
            r->chosen, r->experts, (int)K3_ROUTER_CHOSEN, (int)K3_ROUTER_EXPERTS);
  return K3_OK;
}

/* Passes first … last, whose matrices are all of `type`; `fuse`: with the shared experts' down. */
K3Status launch_passes(const K3CudaLaunch *launch, const K3CudaExperts *e, K3Type type, int first, int last, int fuse)
{
  Arguments a = {};
  int exact = e->exact || !k3_format_is_quantised(type), book = type == K3_TYPE_IQ1_S, mma = book && !exact;
  int values = piece_values(type), chosen = e->routing.chosen;
  unsigned grid = (unsigned)launch->sm_count;
  a.first_pass = first, a.last_pass = last;
  a.routing = e->routing;
  a.codebook = first == 0 ? e->gate.codebook : e->down.codebook;
  a.y = e->y.vector.values;
  a.gate = parts(e->gate), a.up = parts(e->up), a.down = parts(e->down);
  a.ids = e->ids, a.weights = e->weights, a.hidden = e->hidden, a.z = e->z, a.meeting = e->meeting;
  a.first = (int)e->first, a.local = (int)e->local, a.band = (int)e->band, a.latent = (int)e->y.n;
  a.situ_beta = e->situ_beta, a.situ_linear_beta = e->situ_linear_beta;
  if (fuse) {
    a.shared_y = e->shared.y, a.shared_add = e->shared.add, a.shared_down = parts(e->shared.matrix);
    a.shared_rows = (int)e->shared.matrix.rows, a.shared_width = (int)e->shared_input.n;
    a.shared_gate = e->shared_input.vector.values, a.shared_up = e->shared_input.up;
    a.shared_beta = e->shared_input.situ_beta, a.shared_linear_beta = e->shared_input.situ_linear_beta;
  }
  a.tiling = tiling_of((int)(e->y.n / values));
  a.pieces = e->band >= values ? (int)(e->band / values) : 1;
  a.pieces_magic = magic_of(a.pieces);
  a.band_magic = magic_of(e->band);
  a.grid_magic = magic_of(grid);
  /* the tiling of down's rows depends on the number of local experts: 32 rows a step at most */
  int rows = 2 * (int)(chosen * e->band / grid) + 32, down_rows = (int)(e->y.n / grid) + 34;
  int sums = mma ? mma_segment_floats(rows, a.tiling.pieces) : segment_floats(rows, a.tiling.lanes, WARPS);
  a.shared_tiling = tiling_of(fuse ? (int)(e->shared.matrix.cols / 16) : 1);
  int shared_rows = fuse ? (int)(e->shared.matrix.rows / grid) + 1 : 0;
  for (a.slots = chosen;; a.slots--) { /* as many as fit */
    int down_sums = mma ? mma_segment_floats(down_rows, a.slots * a.pieces) : segment_floats(down_rows, 1, WARPS);
    int64_t width = a.slots * e->band > e->y.n ? a.slots * e->band : e->y.n;
    a.x = plan_shared(0, width, !exact, exact, book, sums > down_sums ? sums : down_sums);
    a.shared = plan_shared(a.x.bytes, fuse ? e->shared_input.n : 0, fuse && !e->exact, fuse && e->exact, 0,
                           e->exact ? segment_floats(shared_rows, a.shared_tiling.lanes, WARPS)
                                    : mma_segment_floats(shared_rows, a.shared_tiling.pieces));
    if (a.shared.bytes <= MOST_SHARED || a.slots == 1 || mma) break;
  }
  void *arguments[] = {&a};
  return k3_cuda_launch_kernel(launch, "experts_kernel", kernel_of(type, e->exact), grid, THREADS, 1, (size_t)a.shared.bytes, arguments);
}

} /* namespace */

K3Status k3_cuda_experts(const K3CudaLaunch *launch, const K3CudaExperts *e)
{
  K3_TRY(check(launch, e));
  int blocks[2] = {k3_cuda_is_blocks(e->gate.type), k3_cuda_is_blocks(e->down.type)}, fuse = 0;
  if (!blocks[0]) {
    int both = e->down.type == e->gate.type;
    fuse = e->shared.y && e->shared.matrix.type == K3_TYPE_Q8_0;
    K3_TRY(launch_passes(launch, e, e->gate.type, 0, both, fuse));
    if (!both && !blocks[1]) K3_TRY(launch_passes(launch, e, e->down.type, 1, 1, 0));
  } else {
    K3_TRY(k3_cuda_experts_gate_up_blocks(launch, e));
    if (!blocks[1]) K3_TRY(launch_passes(launch, e, e->down.type, 1, 1, 0));
  }
  if (blocks[1]) K3_TRY(k3_cuda_experts_down_blocks(launch, e));
  if (!e->shared.y || fuse) return K3_OK;
  K3CudaLinear linear = {};
  linear.input = e->shared_input;
  linear.count = 1;
  linear.items[0] = e->shared;
  linear.exact = e->exact;
  return k3_cuda_linear(launch, &linear);
}
