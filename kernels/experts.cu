/* Routed experts. See experts.h. Layer: backend (CUDA).
 *
 * experts_kernel: one block an SM, in three phases (numbered below). Every block routes for itself with half of its warps. The gate and
 * up rows of all local chosen experts stand in one line, dealt to the blocks, while a few warps take the shared experts' rows; situ
 * of them is posted to all blocks. Then z's rows are dealt to them: a row's pieces run over all local experts (hidden vectors times
 * w_e in shared memory). Where those are many (one rank alone), the pieces are shared among groups of blocks, which post their sums.
 * Reads n * 3 * band * L values' bytes and the shared experts' down. Bound: latency, then shared memory (iq1_s).
 * Twins: k3_host_route, k3_host_experts_gate_up, k3_host_experts_down. */
#include "kernels/experts.h"

#include "kernels/mma_rows.cuh"
#include "kernels/posted.cuh"
#include "kernels/route.cuh"
#include "kernels/wait.cuh"

namespace {

using namespace k3;

enum { THREADS = 2 * ROUTE_THREADS, WARPS = THREADS / 32, MOST_SHARED = 212 << 10 /* of 227 KB; the kernel has 15 of its own */ };
enum { SHARERS = 4 }; /* warps that take the shared experts' rows while the others have gate and up */
enum { MOST_WHOLE = K3_EXPERTS_WHOLE, MOST_GROUPS = K3_EXPERTS_GROUPS };

/* The part of `rows` of block `block`, in whole groups of ROWS; magic: of the number of blocks. */
template <int ROWS>
__device__ __forceinline__ void share_rows(int rows, int block, uint32_t magic, int *begin, int *end)
{
  int groups = (int)((unsigned)(rows + ROWS - 1) / ROWS);
  *begin = min(rows, divide(groups * block, magic) * ROWS);
  *end = min(rows, divide(groups * (block + 1), magic) * ROWS);
}

/* Gate and up, or down twice: read from the arguments where they are used, as they would take registers. */
struct Matrices {
  Parts parts[2];   /* of even and of odd rows */
  int rows, pieces; /* of one expert */
  uint32_t magic;   /* of its pairs, or of its pieces */
};

/* What the kernel reads of K3CudaExperts, close together: each line of the constant cache is a miss at its start. */
struct Arguments {
  K3CudaRouting routing;
  const uint32_t *codebook;
  const float *y, *shared_gate, *shared_up;
  Matrices matrices[2]; /* gate and up; down */
  Parts shared_down;
  int32_t *ids;
  float *weights, *hidden, *z, *shared_y;
  uint32_t *meeting;
  int posts; /* room for what blocks post in a launch */
  int first, local, band, latent, shared_rows, shared_width, shared_add;
  float situ_beta, situ_linear_beta, shared_beta, shared_linear_beta;
  Tiling tiling, shared_tiling; /* of gate and up, of the shared experts' down */
  int pieces;                   /* of an expert's row of down */
  uint32_t band_magic, grid_magic;
  int groups, members;          /* of blocks that share the pieces of a row of down; blocks of a group */
  uint32_t groups_magic, members_magic;
  int first_pass, last_pass;    /* 0: gate and up; 1: down */
  SharedPlan x, shared; /* y, then the hidden vectors; beside them the shared experts' input */
  int slots;            /* experts whose hidden vectors fit at once: further ones take further passes */
};

/* Each warp asks for a line of the arguments, so that all of them come in the time of one miss. */
__device__ __forceinline__ void touch_arguments(const Arguments &a)
{
  const int line = (int)(threadIdx.x / 32) * 16;
  if (line < (int)(sizeof a / 4)) asm volatile("" ::"r"(((const int *)&a)[line]));
}

/* Gate and up: row v is pair v/2 = (slot, row of the band); even: gate, odd: up. Down: rows as they stand, but the pieces of a
 * row are those of all local experts: piece q is of expert q / pieces. */
struct ExpertsMap {
  enum { SORTED = 1 }; /* mma_rows.cuh */
  const bool down;
  const Matrices &its;
  const int32_t *local;
  const int first; /* piece of a row, whose number is 0 here */
  template <class F>
  __device__ __forceinline__ Parts place(int row, int piece, int64_t *index) const
  {
    piece += first;
    int slot = divide(down ? piece : row >> 1, its.magic);
    int64_t base = (int64_t)local[slot] * its.rows;
    *index = down ? F::index(base + row, piece - slot * its.pieces, its.pieces)
                  : F::index(base + (row >> 1) - slot * its.rows, piece, its.pieces);
    return row & 1 ? its.parts[1] : its.parts[0]; /* not indexed: lanes of a warp would read constants one after the other */
  }
  /* Rows `row` and row + 8 of a tile of 16: a gate row and the up row beside it. */
  __device__ __forceinline__ const Parts &of_pair(int r) const { return its.parts[r]; }
  template <class F>
  __device__ __forceinline__ int place_pair(int row, int last, int piece, uint32_t index[2]) const
  {
    piece += first;
    if (down) {
      int slot = divide(piece, its.magic), at = piece - slot * its.pieces;
      index[0] = F::index((uint32_t)local[slot] * its.rows + min(row, last), at, its.pieces);
      index[1] = row + 8 <= last ? index[0] + 8 * its.pieces : index[0];
      return (its.pieces - 1 - at) >> 2;
    }
    int pair = min(row >> 4 << 3 | (row & 7), last >> 1), slot = divide(pair, its.magic);
    index[0] = index[1] = F::index((uint32_t)((local[slot] - slot) * its.rows + pair), piece, its.pieces);
    return (its.pieces - 1 - piece) >> 2;
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

/* code_factor (quantise.cuh) without the branches of a division: rounded alike, by two corrections, up to MOST_VALUE. */
constexpr float MOST_VALUE = 8e37f;
__device__ __forceinline__ float code_factor_fast(float most)
{
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(most));
  r = fmaf(r, fmaf(-most, r, 1.0f), r);
  float q = CODE_MOST * r;
  q = fmaf(r, fmaf(-most, q, CODE_MOST), q);
  return most > 1e-30f ? q : 0.0f;
}

/* The low bytes of four words, and the next bytes. */
__device__ __forceinline__ uint32_t low_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d)
{
  return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}
__device__ __forceinline__ uint32_t next_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d)
{
  return __byte_perm(__byte_perm(a, b, 0x0051), __byte_perm(c, d, 0x0051), 0x5410);
}

/* Eight values, i … i + 7, the first four times weight[0], the others times weight[1] (of codes all times weight[0]), into the input
 * if `there`, by whole warps: put4 (gemv.cuh) in fewer instructions, for what all blocks do alike. The codes do not know the weight. */
template <class F>
__device__ __forceinline__ void put(const SharedInput &in, int i, const float v[8], const float weight[2], bool there)
{
  if (!F::CODES) {
    if (!there) return;
    in.values[cell(i >> 2)] = make_float4(v[0] * weight[0], v[1] * weight[0], v[2] * weight[0], v[3] * weight[0]);
    in.values[cell((i >> 2) + 1)] = make_float4(v[4] * weight[1], v[5] * weight[1], v[6] * weight[1], v[7] * weight[1]);
    return;
  }
  float most = 0.0f;
#pragma unroll
  for (int k = 0; k < 8; k++) most = max_nan(most, fabsf(v[k]));
#pragma unroll
  for (int o = 2; o; o >>= 1) most = max_nan(most, __shfl_xor_sync(0xffffffffu, most, o));
  const float factor = code_factor_fast(most);
  uint32_t code[8], up[8];
  int sum = 0;
#pragma unroll
  for (int k = 0; k < 8; k++) {
    code[k] = __float_as_uint(__fadd_rn(__fmul_rn(v[k], factor), MAGIC));
    up[k] = code[k] + 128;
    if (F::SUMS) sum += (int)code[k] - MAGIC_INT;
  }
  if (F::SUMS)
#pragma unroll
    for (int o = 2; o; o >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, o);
  if (!there) return;
  const int c = i >> 4, sorted = (c & ~15) | (c & 6) << 1 | (c >> 2 & 2) | (c & 1); /* SORTED, mma_rows.cuh */
  const int at = (F::BOOK ? sorted : cell(c)) * 2 + ((i >> 3) & 1);
  ((uint2 *)in.low)[at] = make_uint2(low_bytes(code[0], code[1], code[2], code[3]), low_bytes(code[4], code[5], code[6], code[7]));
  ((uint2 *)in.high)[at] = make_uint2(next_bytes(up[0], up[1], up[2], up[3]), next_bytes(up[4], up[5], up[6], up[7]));
  if ((threadIdx.x & 3) == 0) {
    float scale = (most < MOST_VALUE ? most : NAN) * (1.0f / CODE_MOST) * weight[0]; /* NaN too, and what is too large, become NaN */
    if (F::BOOK) { /* the places of `scales` and of `sums` behind them */
      float *to = in.scales + (i >> 7) * 8 + (i >> 5 & 3);
      to[0] = scale, to[4] = scale * (float)sum;
    } else {
      in.scales[i >> 5] = scale;
      if (F::SUMS) in.sums[i >> 5] = __int_as_float(sum * -MXFP4_SHIFT);
    }
  }
}

/* Numbers that other blocks post (posted.cuh). */
__device__ __forceinline__ void post(float *to, float v)
{
  asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" ::"l"(to), "f"(to_post(v)) : "memory");
}
__device__ __forceinline__ float posted(const float *from)
{
  float v;
  asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(v) : "l"(from) : "memory");
  return v;
}
__device__ __forceinline__ float4 posted4(const float *from)
{
  float4 v;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(from) : "memory");
  return v;
}

/* `n` numbers (by fours, aligned to 16 bytes) into the input by `threads` threads of which this is number t (whole warps), padded with
 * zeros: load(), whose loads may come long before store(). `wait`: until they are posted. */
template <class F>
struct Fill {
  enum { ROUNDS = 2 }; /* whose loads come first */
  const float *const from;
  const int n, threads;
  const bool wait;
  int first;
  float v[ROUNDS][8];

  __device__ __forceinline__ Fill(const float *its_from, int its_n, int t, int its_threads, bool waits)
      : from(its_from), n(its_n), threads(its_threads), wait(waits), first(t * 8)
  {
  }

  __device__ __forceinline__ void fetch(float to[ROUNDS][8], int at) const
  {
#pragma unroll
    for (int r = 0; r < 2 * ROUNDS; r++) {
      const int i = at + (r >> 1) * threads * 8 + (r & 1) * 4;
      float *four = &to[r >> 1][(r & 1) * 4];
      float4 f = i < n ? posted4(from + i) : make_float4(0, 0, 0, 0);
      four[0] = f.x, four[1] = f.y, four[2] = f.z, four[3] = f.w;
    }
  }

  __device__ __forceinline__ void load() { fetch(v, first); }

  template <class Weight>
  __device__ __forceinline__ void store(const SharedInput &in, Weight weight)
  {
    const int whole = F::CODES && F::BOOK ? 512 : 128, padded = (n + whole - 1) / whole * whole, lane = (int)threadIdx.x & 31;
    const int step = ROUNDS * threads * 8;
    while (first - lane * 8 < padded) {
      while (wait) {
        bool again = false;
#pragma unroll
        for (int k = 0; k < 8 * ROUNDS; k++) again |= !is_posted(v[k >> 3][k & 7]);
        if (!__any_sync(0xffffffffu, again)) break;
        if (again) fetch(v, first); /* these lanes alone: all blocks ask for the same lines */
      }
      float next[ROUNDS][8] = {};
      if (first + step - lane * 8 < padded) fetch(next, first + step);
#pragma unroll 1 /* code that runs cold once a layer: short before fast */
      for (int r = 0, i = first; r < ROUNDS && i - lane * 8 < padded; r++, i += threads * 8) {
        const float weights[2] = {i < n ? weight(i) : 0.0f, !F::CODES && i + 4 < n ? weight(i + 4) : 0.0f};
        put<F>(in, i, v[0], weights, i < padded);
#pragma unroll
        for (int k = 0; k < 8 * (ROUNDS - 1); k++) v[k >> 3][k & 7] = v[(k >> 3) + 1][k & 7];
      }
#pragma unroll
      for (int k = 0; k < 8 * ROUNDS; k++) v[k >> 3][k & 7] = next[k >> 3][k & 7];
      first += step;
    }
  }
};

/* The same of situ(gate, up), four neighbours a thread. */
template <class F>
struct FillSitu {
  const float *const gate, *const up;
  const int n, threads;
  int first;
  float g[4], u[4];

  __device__ __forceinline__ FillSitu(const float *its_gate, const float *its_up, int its_n, int t, int its_threads)
      : gate(its_gate), up(its_up), n(its_n), threads(its_threads), first(t * 4)
  {
  }

  __device__ __forceinline__ void load()
  {
    fetch4(gate, first, n, g);
    fetch4(up, first, n, u);
  }

  __device__ __forceinline__ void store(const SharedInput &in, float beta, float linear_beta)
  {
    const int padded = (n + 127) / 128 * 128; /* by whole warps */
#pragma unroll 1
    while (first < padded) {
      float h[4];
#pragma unroll
      for (int k = 0; k < 4; k++) h[k] = situ(g[k], u[k], beta, linear_beta);
      put4(in, first, h);
      first += threads * 4;
      if (first < padded) load();
    }
  }
};

/* Blocks of a launch count down the number at `meeting`, and the last of them its upper half: launches alternate between two places
 * for what blocks post, and the launch between has emptied each. take_turn by one thread of each block; `before`: its result. */
__device__ __forceinline__ uint32_t take_turn(uint32_t *meeting) { return atomicAdd(meeting, 0xffffffffu); }
__device__ __forceinline__ int end_turn(uint32_t *meeting, uint32_t before)
{
  if ((before & 0xffffu) == 0x10000u - gridDim.x) atomicAdd(meeting, gridDim.x - 0x10000u);
  return (int)(before >> 16 & 1u);
}

/* Rows begin … end of a q8_0 matrix to the L2. */
__device__ __forceinline__ void prefetch_q8(const Parts &p, int begin, int end, int width)
{
  const uint8_t *codes = p.codes + (int64_t)begin * width, *scale = p.scale + (int64_t)begin * (width / 16);
  const int bytes = (end - begin) * width;
#pragma unroll 1
  for (int i = threadIdx.x * 128; i < bytes; i += THREADS * 128) prefetch_l2(codes + i);
#pragma unroll 1
  for (int i = threadIdx.x * 128; i < bytes / 16; i += THREADS * 128) prefetch_l2(scale + i);
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

template <class F, int D>
struct ExpertRows : RowsOf<F, D, ExpertsMap> {
};
template <int D>
struct ExpertRows<Mxfp4Int, D> {
  typedef MmaRows<Mxfp4Int, D, D / 2, ExpertsMap> Type;
  enum { ROWS = 16 };
};

/* q8_0 by whole blocks of 32, with fewer instructions than two pieces of 16. */
struct Q8WideRaw {
  uint4 w[2];
  uint32_t d;
};
struct Q8Wide : Rowwise {
  enum { VALUES = 32, BOOK = 0 };
  static constexpr float UNIT = 1.0f;
  typedef Q8WideRaw Raw;
  static __device__ __forceinline__ Raw load(const Parts &p, int64_t i)
  {
    return Raw{{load16(p.codes + i * 32), load16(p.codes + i * 32 + 16)}, load2(p.scale + i * 2)};
  }
  static __device__ __forceinline__ Raw zero() { return Raw{{make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0)}, 0}; }
  static __device__ __forceinline__ uint32_t touch(const Raw &r) { return r.w[0].x | r.w[1].x | r.d; }
};
template <int SORTED>
__device__ __forceinline__ void multiply_pair(const Q8WideRaw raw[2], int first, int pieces, const Lane &lane, const SharedInput &in,
                                              Column &column, float sum[2])
{
  const int piece = min(first + lane.part, pieces - 1);
  column.load(0, lane.plane + cell(2 * piece) * 16), column.load(1, lane.plane + cell(2 * piece + 1) * 16);
  const int zero[4] = {0, 0, 0, 0};
  int c[4];
#pragma unroll
  for (int l = 0; l < 4; l++) {
    const uint4 &a = raw[0].w[l >> 1], &b = raw[1].w[l >> 1];
    const int k = 2 * (l & 1);
    mma_bytes(c, l ? c : zero, word(a, k), word(b, k), word(a, k + 1), word(b, k + 1), word(column.x[l >> 1], k), word(column.x[l >> 1], k + 1));
  }
  const float s = in.scales[piece];
  const float total[2] = {both(c[0], c[1]) * (half_bits(raw[0].d) * s), both(c[2], c[3]) * (half_bits(raw[1].d) * s)};
#pragma unroll
  for (int r = 0; r < 2; r++) sum[r] += first + lane.part < pieces ? total[r] : 0.0f;
}

/* The shared experts' rows of this block, by its warps from `first` on. */
template <class S>
struct SharedRows {
  typedef Gemv<S, 2, PlainMap> Type;
};
template <>
struct SharedRows<Q8Int> {
  typedef MmaRows<Q8Wide, 2, 1, PlainMap> Type;
};
template <class S>
struct SharedOf {
  int begin, end;
  const Arguments &a;
  const int first;
  __device__ __forceinline__ SharedOf(const Arguments &arguments, int its_first) : a(arguments), first(its_first)
  {
    share_rows<1>(a.shared_rows, blockIdx.x, a.grid_magic, &begin, &end);
  }
  __device__ __forceinline__ typename SharedRows<S>::Type rows() const
  {
    return typename SharedRows<S>::Type(PlainMap{a.shared_down, a.shared_tiling.pieces}, a.shared_tiling, begin, end,
                                        (int)threadIdx.x / 32 - first, WARPS - first);
  }
  /* After a block barrier; by other threads than those of z and of situ. */
  __device__ __forceinline__ void write(const float *segments) const
  {
    const typename SharedRows<S>::Type its = rows();
    for (int i = THREADS - 1 - threadIdx.x; i < end - begin; i += THREADS) {
      float sum = its.row_sum(segments, i);
      a.shared_y[begin + i] = a.shared_add ? sum + __ldcg(a.shared_y + begin + i) : sum;
    }
  }
};

template <class F, int D, class S>
__global__ void __launch_bounds__(THREADS, 1) experts_kernel(const __grid_constant__ Arguments a)
{
  extern __shared__ __align__(128) char memory[];
  __shared__ RouteShared routed;
  __shared__ float weight[K3_ROUTER_CHOSEN];
  __shared__ int turn;
  SharedInput x = input_of<F>(memory, a.x), shared_in = input_of<S>(memory, a.shared);
  float *segments = (float *)(memory + a.x.segments), *shared_segments = (float *)(memory + a.shared.segments);
  if (F::BOOK) x.codebook = (uint32_t *)memory; /* its plan begins with it, at 0: look-ups add a constant */

  /* 1. Before the wait: the codebook, the router's bias; the shared experts' rows to the L2 alone, as loads come back in order and
   * what all blocks are waiting for would stand behind them. */
  enum { FILLERS = THREADS - ROUTE_THREADS };
  touch_arguments(a);
  const int t = (int)threadIdx.x - ROUTE_THREADS, latent = a.latent, band = a.band;
  Book<ROUTE_THREADS> book;
  float bias[ROUTE_KEYS];
  if (t < 0) {
    fetch_keys(a.routing.bias, a.routing.experts, bias);
    if (F::BOOK) book.load(a.codebook, threadIdx.x);
  }
  int begin = 0, end = 0;
  if (a.shared_y) share_rows<1>(a.shared_rows, blockIdx.x, a.grid_magic, &begin, &end);
  const int width = begin < end ? a.shared_width : 0;
  prefetch_q8(a.shared_down, begin, end, width);
  k3_wait();

  /* 2. Half of the warps find out which experts; the others prepare both inputs. */
  const bool meets = a.first_pass < a.last_pass;
  if (t < 0) {
    float logit[ROUTE_KEYS];
    fetch_keys(a.routing.logits, a.routing.experts, logit);
    if (F::BOOK) book.store(x, threadIdx.x); /* while the logits come */
    route_ids(a.routing, a.first, a.local, bias, logit, routed);
  } else {
    Fill<F> y(a.y, latent, t, FILLERS, false);
    FillSitu<S> hidden(a.shared_gate, a.shared_up, width, t, FILLERS);
    uint32_t before = 0;
    y.load();
    hidden.load();
    if (meets && threadIdx.x == THREADS - 1) before = take_turn(a.meeting);
    y.store(x, [](int) { return 1.0f; });
    hidden.store(shared_in, a.shared_beta, a.shared_linear_beta);
    if (meets && threadIdx.x == THREADS - 1) turn = end_turn(a.meeting, before);
    for (int i = 0; i < ROUTE_MEETINGS; i++) group_sync(2, FILLERS); /* racecheck counts the barriers of each thread */
  }
  __syncthreads();
  const int count = routed.local_count;
  float *const posts = (float *)a.meeting + 4 + turn * a.posts, *const sums = posts + a.routing.chosen * band; /* [groups][latent] */
  const bool cut = a.groups > 1 && count * band > MOST_WHOLE; /* rows of down: groups of blocks share their pieces */

  /* 3. Two products by the same code, warm in the instruction caches for the second: gate and up, while some warps take the shared
   * experts' rows; then down. */
  const int warp = (int)threadIdx.x / 32;
  const int its_warps = a.shared_y && count > 0 && count * band <= MOST_WHOLE ? WARPS - SHARERS : WARPS; /* of gate and up */
  typedef ExpertRows<F, D> Rows;
  enum { ROWS = Rows::ROWS == 1 ? 2 : Rows::ROWS };
#pragma unroll 1
  for (int pass = a.first_pass;; pass++) {
    const bool down = pass > 0;
    const int slot = down ? (pass - 1) * a.slots : 0, slots = down ? min(count - slot, a.slots) : count;
    int group = 0, members = 0, first = 0, last = slots * a.pieces;
    if (down && cut) {
      group = divide(blockIdx.x, a.members_magic), members = a.members;
      share_rows<512 / F::VALUES>(slots * a.pieces, group, a.groups_magic, &first, &last);
    }
    ExpertsMap map{down, a.matrices[pass > 0], routed.local + slot, first};
    share_rows<ROWS>(!down ? 2 * count * band : count ? latent : 0, blockIdx.x - group * members, down && cut ? a.members_magic : a.grid_magic,
                     &begin, &end);
    Tiling tiling = !down ? a.tiling : Rows::ROWS == 1 ? tiling_of(max(1, last - first)) : Tiling{last - first};
    typename Rows::Type gemv(map, tiling, begin, end, warp, down ? (int)WARPS : its_warps);
    if (!down) {
      gemv.preload(); /* here and below: shorter where it is known which of the two it is */
      if (meets) /* empties the other place for the next launch */
        for (int i = blockIdx.x * THREADS + threadIdx.x; i < a.posts; i += gridDim.x * THREADS) a.meeting[4 + (turn ^ 1) * a.posts + i] = NOT_POSTED;
    } else {
      if (pass == a.first_pass) {
        if (warp == 0) weigh(a, routed, weight);
        __syncthreads();
      }
      const int from = slot * band + first * F::VALUES;
      Fill<F> hidden((meets ? posts : a.hidden) + from, (last - first) * F::VALUES, threadIdx.x, THREADS, meets);
      hidden.load();
      hidden.store(x, [&](int i) { return weight[divide(from + i, a.band_magic)]; });
      gemv.preload();
      __syncthreads();
    }
    gemv.run(x, segments);
    SharedOf<S> shared(a, its_warps == WARPS ? 0 : its_warps);
    if (!down) {
      if (a.shared_y && warp >= shared.first) {
        typename SharedRows<S>::Type rows = shared.rows();
        rows.preload();
        rows.run(shared_in, shared_segments);
      }
      if (warp == its_warps - 1) weigh(a, routed, weight);
    }
    __syncthreads();
    if (down) {
      for (int i = threadIdx.x; i < end - begin; i += THREADS) {
        const float sum = gemv.row_sum(segments, i);
        if (cut) post(sums + group * latent + begin + i, sum);
        else a.z[begin + i] = slot ? a.z[begin + i] + sum : sum;
      }
      if (slot + a.slots >= count) break;
      continue;
    }
    for (int i = threadIdx.x; i < (end - begin) / 2; i += THREADS) {
      const int gate = ROWS == 16 ? i >> 3 << 4 | (i & 7) : 2 * i, up = ROWS == 16 ? gate + 8 : gate + 1;
      float h = situ(gemv.row_sum(segments, gate), gemv.row_sum(segments, up), a.situ_beta, a.situ_linear_beta);
      if (meets) post(posts + begin / 2 + i, h);
      a.hidden[begin / 2 + i] = h;
    }
    shared.write(shared_segments);
    if (count == 0 || !meets) break;
  }
  if (cut && a.last_pass == 1) { /* the sums of the groups: 16 lanes a row, in whole halves of warps */
    share_rows<1>(latent, blockIdx.x, a.grid_magic, &begin, &end);
    for (int i = threadIdx.x; i < (end - begin) * MOST_GROUPS; i += THREADS) {
      const int of = i & (MOST_GROUPS - 1), at = begin + i / MOST_GROUPS;
      float sum = 0.0f;
      if (of < a.groups) do sum = posted(sums + of * latent + at); while (!is_posted(sum));
      for (int o = MOST_GROUPS / 2; o; o >>= 1) sum += __shfl_xor_sync(0xffffu << (threadIdx.x & 16), sum, o);
      if (of == 0) a.z[at] = sum;
    }
  }
  if (count == 0 && a.last_pass == 1)
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < latent; i += gridDim.x * THREADS) a.z[i] = 0.0f;
}

Parts parts(const K3CudaMatrix &m)
{
  return Parts{(const uint8_t *)m.codes, (const uint8_t *)m.high, (const uint8_t *)m.scale};
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
                 : (const void *)experts_kernel<Mxfp4Int, 4, Q8Int>;
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
  if (!k3_cuda_experts_pair(e->gate.type, e->up.type) || e->gate.cols != e->y.n || e->up.cols != e->y.n ||
      e->gate.cols % step_of(e->gate.type) || e->gate.cols % step_of(e->up.type) ||
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
  if (((uintptr_t)e->y.vector.values | (uintptr_t)e->hidden | (uintptr_t)e->meeting) & 15 || e->band % 4)
    K3_FAIL(K3_ERR_INPUT, "experts of layer %lld: y at %p, hidden at %p and meeting at %p (aligned to 16 bytes?), a band of %lld (of fours?)",
            (long long)launch->layer, (void *)e->y.vector.values, (void *)e->hidden, (void *)e->meeting, (long long)e->band);
  const K3CudaRouting *r = &e->routing;
  if (r->experts < 1 || r->experts > K3_ROUTER_EXPERTS || r->chosen < 1 || r->chosen > K3_ROUTER_CHOSEN || r->chosen > r->experts)
    K3_FAIL(K3_ERR_INPUT, "router of layer %lld: %d of %d experts; this build does at most %d of %d", (long long)launch->layer,
            r->chosen, r->experts, (int)K3_ROUTER_CHOSEN, (int)K3_ROUTER_EXPERTS);
  return K3_OK;
}

/* Into how many parts to cut rows of down of `width` values, a part for each of as many groups of blocks: the least time of the block that
 * has most, in units of 16 rows × 512 values. Codes of 512 values take about two thirds of one, the meeting about 12. */
int groups_of(int grid, int64_t rows, int64_t width)
{
  int best = 1;
  double least = INFINITY;
  if (width <= MOST_WHOLE) return 1;
  for (int groups = 1; groups <= MOST_GROUPS; groups++) {
    if (grid % groups) continue;
    int64_t tiles = (rows + 15) / 16, members = grid / groups, part = ((width + 511) / 512 + groups - 1) / groups;
    double units = (double)((tiles + members - 1) / members * part) + 0.67 * (double)part + (groups > 1 ? 12 : 0);
    if (units < least) least = units, best = groups;
  }
  return best;
}

/* Passes first … last, whose matrices are all of `type`; `fuse`: with the shared experts' down. */
K3Status launch_passes(const K3CudaLaunch *launch, const K3CudaExperts *e, K3Type type, int first, int last, int fuse)
{
  Arguments a = {};
  int exact = e->exact || !k3_format_is_quantised(type), book = type == K3_TYPE_IQ1_S, mma = (book || type == K3_TYPE_MXFP4) && !exact;
  int values = piece_values(type), chosen = e->routing.chosen;
  unsigned grid = (unsigned)launch->sm_count;
  a.first_pass = first, a.last_pass = last;
  a.routing = e->routing;
  a.codebook = first == 0 ? e->gate.codebook : e->down.codebook;
  a.y = e->y.vector.values;
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
  a.band_magic = magic_of(e->band);
  a.matrices[0] = Matrices{{parts(e->gate), parts(e->up)}, (int)e->band, a.tiling.pieces, a.band_magic};
  a.matrices[1] = Matrices{{parts(e->down), parts(e->down)}, (int)e->y.n, a.pieces, magic_of(a.pieces)};
  a.grid_magic = magic_of(grid);
  /* the tiling of down's rows depends on the number of local experts: 32 rows a step at most */
  int rows = 2 * (int)(chosen * e->band / grid) + 32, down_rows = (int)(e->y.n / grid) + 34;
  int64_t width = chosen * e->band;
  a.groups = exact || first == last ? 1 : groups_of((int)grid, e->y.n, width);
  if (a.groups > 1) { /* a block holds a part of the hidden vectors, or all where they are few */
    int64_t part = ((width + 511) / 512 + a.groups - 1) / a.groups * 512;
    width = part > MOST_WHOLE ? part : (int64_t)MOST_WHOLE;
    down_rows = (int)(e->y.n / (grid / a.groups)) + 34;
  }
  a.posts = (int)(k3_cuda_meeting_bytes(chosen, e->band, e->y.n) - 16) / 8;
  a.members = (int)grid / a.groups;
  a.groups_magic = magic_of(a.groups), a.members_magic = magic_of(a.members);
  int sums = mma ? mma_segment_floats(rows, WARPS) : segment_floats(rows, a.tiling.lanes, WARPS);
  a.shared_tiling = tiling_of(fuse ? (int)(e->shared.matrix.cols / (e->exact ? 16 : 32)) : 1);
  int shared_rows = fuse ? (int)(e->shared.matrix.rows / grid) + 1 : 0;
  for (a.slots = chosen;; a.slots--) { /* as many as fit */
    int down_sums = mma ? mma_segment_floats(down_rows, WARPS) : segment_floats(down_rows, 1, WARPS);
    if (a.groups == 1) width = a.slots * e->band;
    int64_t held = width > e->y.n ? width : e->y.n;
    if (book && mma) held = (held + 511) / 512 * 512; /* SORTED: whole units */
    a.x = plan_shared(0, held, !exact, exact, book, sums > down_sums ? sums : down_sums);
    a.shared = plan_shared(a.x.bytes, fuse ? e->shared_input.n : 0, fuse && !e->exact, fuse && e->exact, 0,
                           e->exact ? segment_floats(shared_rows, a.shared_tiling.lanes, WARPS)
                                    : mma_segment_floats(shared_rows, WARPS));
    if (a.shared.bytes <= MOST_SHARED || a.slots == 1) break;
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
