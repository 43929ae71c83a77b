/* Fused matrix-vector products. See linear.h. Layer: backend (CUDA).
 *
 * linear_q8_kernel …: grid = SMs x blocks_per_sm, 384 to 512 threads, as many as registers allow two blocks an SM; a block takes
 * rows worth its share of all bytes. One matrix of q8_0: linear_columns_kernel (input quantised, K3's norms before it),
 * linear_rows_kernel (o_proj, routed_up), else linear_stream_kernel.
 * Reads: every weight once, the input once a block (L2). Bound: memory, then the start and end of a launch.
 * linear_scalar_kernel: rows whose bytes are no multiple of 16 (plain floats of odd width); a warp a row, untuned.
 * Twin: k3_host_linear. */
#include "kernels/linear.h"

#include "kernels/attention.cuh"
#include "kernels/mma_rows.cuh"
#include "kernels/q8_stream.cuh"
#include "kernels/wait.cuh"

namespace {

using namespace k3;

enum { THREADS = 512, Q8_THREADS = 448, RMS_THREADS = 256, DEPTH = 6, STREAM_DEPTH = 4, TWO_BLOCKS_FROM = 10000000 /* bytes: measured */ };
enum { COLUMN_THREADS = 448, COLUMN_PITCH = 17, COLUMN_DEPTH = 8, COLUMN_ROWS = 128 /* of a block of linear_columns_kernel, at most */ };
enum { ROW_AHEAD = 4 }; /* loads of a longer vector a thread in linear_rows_kernel */

struct Item {
  K3CudaMatrix matrix;
  float *y;
  int add;
  int rows;
  uint32_t cost;  /* of a row, in 16 bytes */
  uint64_t magic; /* 2^64 / cost + 1 */
  uint64_t before; /* the cost of the items before it */
  Tiling tiling;
};

struct Arguments {
  K3CudaInput input;
  SharedPlan shared;
  int count, exact;
  const uint32_t *codebook;
  uint64_t share, rest; /* the cost of all rows = share · blocks + rest; linear_columns_kernel: the number of rows */
  Item items[K3_LINEAR_ITEMS];
};

/* The first row of `item` that block `block` owns. */
__device__ __forceinline__ int first_row(const Arguments &a, const Item &item, unsigned block)
{
  uint64_t at = a.share * block + (block < a.rest ? block : a.rest);
  if (at <= item.before) return 0;
  uint64_t row = __umul64hi(at - item.before + item.cost - 1, item.magic); /* no 64-bit division: each takes about 500 cycles */
  return row < (uint64_t)item.rows ? (int)row : item.rows;
}

template <class F, int D>
__device__ __forceinline__ typename RowsOf<F, D, PlainMap>::Type plain_gemv(const Item &item, int begin, int end)
{
  return typename RowsOf<F, D, PlainMap>::Type(PlainMap{parts_of(item.matrix), item.tiling.pieces}, item.tiling, begin, end);
}

/* The wait, and the input in shared memory. */
__device__ __forceinline__ void wait_and_fill(const Arguments &a, const SharedInput &in, float *scratch)
{
  if (a.input.kind == K3_INPUT_RMS) warm_norm(a.input);
  k3_wait_early();
  fill_input(a.input, in, scratch);
  __syncthreads();
}

/* The item's rows of this block, loads already under way, and their sums out. */
template <class G>
__device__ __forceinline__ void finish(G &gemv, const SharedInput &in, const Item &item, float *segments, int begin, int end)
{
  int i = threadIdx.x;
  float before = item.add && i < end - begin ? __ldcg(item.y + begin + i) : 0.0f; /* under way while the rows are summed */
  gemv.run(in, segments);
  __syncthreads();
  for (; i < end - begin; i += blockDim.x) {
    if (item.add && i != (int)threadIdx.x) before = __ldcg(item.y + begin + i);
    item.y[begin + i] = gemv.row_sum(segments, i) + before;
  }
  __syncthreads();
}

/* One matrix of q8_0 whose rows fill whole warps, integer activations: most of the trunk. Its first loads start before the wait. */
__global__ void __launch_bounds__(THREADS, 2) linear_stream_kernel(const __grid_constant__ Arguments a)
{
  extern __shared__ __align__(128) char memory[];
  __shared__ float scratch[33];
  SharedInput in = shared_input(memory, a.shared);
  const Item &item = a.items[0];
  int begin = first_row(a, item, blockIdx.x), end = first_row(a, item, blockIdx.x + 1);
  Q8Stream<STREAM_DEPTH> gemv(item.matrix, item.tiling.chunks, begin, end);
  gemv.preload();
  wait_and_fill(a, in, scratch);
  finish(gemv, in, item, (float *)(memory + a.shared.segments), begin, end);
}

/* One matrix of q8_0 so small that the warps of one grid hold it at once, all loads before the wait: a warp has ROWS rows, a lane CHUNKS
 * cells of 16 columns of each. The block makes the codes of its input, a cell of four values a thread. RMS: the norm's scale is a factor of
 * the sums, so that codes and squares need one trip to the L2 and one barrier. */
template <int KIND, int ROWS, int CHUNKS, int MOST_THREADS>
__global__ void __launch_bounds__(MOST_THREADS, 2) linear_rows_kernel(const __grid_constant__ Arguments a)
{
  constexpr int MOST_WARPS = MOST_THREADS / 32;
  __shared__ __align__(16) uint32_t high[128 * CHUNKS], low[128 * CHUNKS];
  __shared__ __align__(16) float scales[16 * CHUNKS], squares[MOST_WARPS];
  const Item &item = a.items[0];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, cols = (int)a.input.n, pieces = cols / 16, full = (int)a.input.full;
  const int row = (int)(blockIdx.x * (blockDim.x >> 5) + warp) * ROWS, own = row + lane * ROWS / 32; /* own: whose sum this lane stores */
  const bool owns = lane % (32 / ROWS) == 0 && own < item.rows;
  const uint8_t *codes = (const uint8_t *)item.matrix.codes + (int64_t)row * cols + 16 * lane;
  const uint8_t *scale = (const uint8_t *)item.matrix.scale + ((int64_t)row * cols + 16 * lane) / 32 * 2;
  Q8Raw raw[ROWS][CHUNKS];
#pragma unroll
  for (int i = 0; i < ROWS; i++, codes += cols, scale += cols / 16)
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      raw[i][c].w = make_uint4(0, 0, 0, 0);
      load_if(raw[i][c], codes + 512 * c, scale + 32 * c, lane + 32 * c < pieces && row + i < item.rows);
    }
  const int offset = KIND == K3_INPUT_RMS ? (int)a.input.offset : 0;
  const float4 norm = KIND == K3_INPUT_RMS ? fetch_cell(a.input.norm + offset, threadIdx.x, cols) : make_float4(1, 1, 1, 1);
  k3_wait_early();
  const float4 x = fetch_cell(a.input.vector.values + offset, threadIdx.x, cols);
  float4 all[ROW_AHEAD];
  if (KIND == K3_INPUT_RMS)
#pragma unroll
    for (int r = 0; r < ROW_AHEAD; r++) all[r] = fetch_cell(a.input.vector.values, threadIdx.x + r * blockDim.x, full);
  const float before = item.add && owns ? __ldcg(item.y + own) : 0.0f;
  const float v[4] = {x.x * norm.x, x.y * norm.y, x.z * norm.z, x.w * norm.w};
  float block_scale, unused;
  const Codes4 four = quantise4(v, false, &block_scale, &unused);
  if (threadIdx.x < cols / 4) {
    high[threadIdx.x] = four.high;
    low[threadIdx.x] = four.low;
    if ((threadIdx.x & 7) == 0) scales[threadIdx.x / 8] = block_scale;
  }
  if (KIND == K3_INPUT_RMS) {
    float sum = 0.0f;
#pragma unroll
    for (int r = 0; r < ROW_AHEAD; r++)
      sum = fmaf(all[r].x, all[r].x, fmaf(all[r].y, all[r].y, fmaf(all[r].z, all[r].z, fmaf(all[r].w, all[r].w, sum))));
    /* exact is 0: a use that keeps the load of `before` among the others; it would go out last and be waited for with the weights */
    sum = warp_sum(__uint_as_float(__float_as_uint(sum) | (__float_as_uint(before) & (uint32_t)a.exact)));
    if (lane == 0) squares[warp] = sum;
  }
  __syncthreads();
  const SharedInput none = {};
  float part[ROWS] = {0};
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    const int piece = min(lane + 32 * c, pieces - 1); /* the weights beyond are 0 */
    const Q8Int::X cell{((const int4 *)high)[piece], ((const int4 *)low)[piece], scales[piece / 2]};
#pragma unroll
    for (int i = 0; i < ROWS; i++) part[i] += Q8Int::dot(raw[i][c], cell, none);
  }
  float one = warp_sum_of_one<ROWS>(part);
  if (KIND == K3_INPUT_RMS) {
    float square = 0.0f;
#pragma unroll
    for (int w = 0; w < MOST_WARPS; w++) square += w < (int)(blockDim.x >> 5) ? squares[w] : 0.0f;
    one *= rsqrtf(__fdividef(square, (float)full) + a.input.eps);
  }
  if (owns) item.y[own] = one + before;
}

/* One matrix of q8_0 whose rows are whole warps, a quantised input: a warp has 512 columns of every row of its block, so that its part
 * of the input stays in registers. Rows go to the blocks in turn: all blocks read neighbouring rows at a time.
 * WARPS: of a block (Kimi K3: 14), or 0 for any number. HELD: a block has COLUMN_DEPTH rows at most, all under way before the wait. */
template <int WARPS, int HELD>
__global__ void __launch_bounds__(COLUMN_THREADS, 2) linear_columns_kernel(const __grid_constant__ Arguments a)
{
  extern __shared__ __align__(128) char memory[];
  float *parts = (float *)memory; /* [rows of the block][COLUMN_PITCH], a warp each */
  const Item &item = a.items[0];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = WARPS ? WARPS : blockDim.x >> 5, cell = threadIdx.x;
  const int rows = (int)a.share + (blockIdx.x < a.rest), cols = WARPS ? 512 * WARPS : (int)a.input.n, step = gridDim.x * cols;
  const uint8_t *codes = (const uint8_t *)item.matrix.codes + (int64_t)blockIdx.x * cols + 16 * cell;
  const uint8_t *scale = (const uint8_t *)item.matrix.scale + ((int64_t)blockIdx.x * cols + 16 * cell) / 32 * 2;
  Q8Raw ring[COLUMN_DEPTH];
#pragma unroll
  for (int i = 0; i < COLUMN_DEPTH; i++, codes += step, scale += step / 16) {
    ring[i].w = make_uint4(0, 0, 0, 0);
    load_if(ring[i], codes, scale, i < rows);
  }
  k3_wait_early();
  const Q8Int::X x{__ldcg((const int4 *)a.input.vector.codes + cell), __ldcg((const int4 *)(a.input.vector.codes + cols) + cell),
                   __ldcg(a.input.vector.scales + cell / 2)};
  const int own = threadIdx.x; /* a row, at the end */
  float before = item.add && own < rows ? __ldcg(item.y + blockIdx.x + own * gridDim.x) : 0.0f;
  const SharedInput none = {};
  for (int row = 0; row < rows; row += COLUMN_DEPTH) {
    float sum[COLUMN_DEPTH];
#pragma unroll
    for (int i = 0; i < COLUMN_DEPTH; i++, codes += step, scale += step / 16) {
      sum[i] = Q8Int::dot(ring[i], x, none);
      if (!HELD) load_if(ring[i], codes, scale, row + i + COLUMN_DEPTH < rows);
    }
    const int at = row + lane * COLUMN_DEPTH / 32;
    const float one = warp_sum_of_one<COLUMN_DEPTH>(sum);
    if (lane % (32 / COLUMN_DEPTH) == 0 && at < rows) parts[at * COLUMN_PITCH + warp] = one;
  }
  __syncthreads();
  for (int row = own; row < rows; row += blockDim.x) {
    if (item.add && row != own) before = __ldcg(item.y + blockIdx.x + row * gridDim.x);
    float sum = before;
#pragma unroll(WARPS ? WARPS : 4)
    for (int w = 0; w < warps; w++) sum += parts[row * COLUMN_PITCH + w];
    item.y[blockIdx.x + row * gridDim.x] = sum;
  }
}

/* All matrices q8_0, of any number and width. */
__global__ void __launch_bounds__(Q8_THREADS, 2) linear_q8_kernel(const __grid_constant__ Arguments a)
{
  extern __shared__ __align__(128) char memory[];
  __shared__ float scratch[33];
  SharedInput in = shared_input(memory, a.shared);
  float *segments = (float *)(memory + a.shared.segments);
  bool filled = false;
  for (int k = 0; k < a.count; k++) {
    const Item &item = a.items[k];
    int begin = first_row(a, item, blockIdx.x), end = first_row(a, item, blockIdx.x + 1);
    if (begin >= end) continue;
    auto gemv = plain_gemv<Q8Int, DEPTH>(item, begin, end);
    gemv.preload();
    if (!filled) {
      wait_and_fill(a, in, scratch);
      filled = true;
    }
    finish(gemv, in, item, segments, begin, end);
  }
  if (!filled) k3_wait_early();
}

template <class F, int D>
__device__ __forceinline__ void one_item(const Item &item, const SharedInput &in, float *segments, int begin, int end)
{
  auto gemv = plain_gemv<F, D>(item, begin, end);
  gemv.preload();
  finish(gemv, in, item, segments, begin, end);
}

/* Any mixture of formats. */
template <int EXACT>
__device__ __forceinline__ void linear_mixed(const Arguments &a)
{
  extern __shared__ __align__(128) char memory[];
  __shared__ float scratch[33];
  SharedInput in = shared_input(memory, a.shared);
  float *segments = (float *)(memory + a.shared.segments);
  fill_codebook(in, a.codebook);
  wait_and_fill(a, in, scratch);
  for (int k = 0; k < a.count; k++) {
    const Item &item = a.items[k];
    int begin = first_row(a, item, blockIdx.x), end = first_row(a, item, blockIdx.x + 1);
    if (begin >= end) continue;
    switch (item.matrix.type) {
    case K3_TYPE_F32: one_item<F32, EXACT ? 2 : 4>(item, in, segments, begin, end); break;
    case K3_TYPE_BF16: one_item<Bf16, EXACT ? 2 : 4>(item, in, segments, begin, end); break;
    case K3_TYPE_F16: one_item<F16, EXACT ? 2 : 4>(item, in, segments, begin, end); break;
    case K3_TYPE_Q8_0:
      if (EXACT) one_item<Q8Exact, 2>(item, in, segments, begin, end);
      else one_item<Q8Int, 4>(item, in, segments, begin, end);
      break;
    case K3_TYPE_MXFP4:
      if (EXACT) one_item<Mxfp4Exact, 2>(item, in, segments, begin, end);
      else one_item<Mxfp4Int, 4>(item, in, segments, begin, end);
      break;
    default:
      if (EXACT) one_item<Iq1Exact, 2>(item, in, segments, begin, end);
      else one_item<Iq1Int, 2>(item, in, segments, begin, end);
      break;
    }
  }
}

__global__ void __launch_bounds__(THREADS, 1) linear_mixed_kernel(const __grid_constant__ Arguments a)
{
  linear_mixed<0>(a);
}

__global__ void __launch_bounds__(THREADS, 1) linear_exact_kernel(const __grid_constant__ Arguments a)
{
  linear_mixed<1>(a);
}

/* Plain floats whose rows are no whole number of 16-byte cells. */
__global__ void __launch_bounds__(THREADS) linear_scalar_kernel(const __grid_constant__ Arguments a)
{
  extern __shared__ __align__(128) char memory[];
  __shared__ float scratch[33];
  SharedInput in = shared_input(memory, a.shared);
  wait_and_fill(a, in, scratch);
  int lane = threadIdx.x & 31, warps = gridDim.x * (blockDim.x >> 5);
  for (int k = 0; k < a.count; k++) {
    const Item &item = a.items[k];
    for (int row = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5); row < item.rows; row += warps) {
      float sum = 0;
      for (int col = lane; col < a.input.n; col += 32)
        sum = fmaf(plain_element(item.matrix, row, col), ((const float *)in.values)[cell(col >> 2) * 4 + (col & 3)], sum);
#pragma unroll
      for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, o);
      if (lane == 0) item.y[row] = sum + (item.add ? __ldcg(item.y + row) : 0.0f);
    }
  }
}

} /* namespace */

int64_t k3_cuda_linear_bytes(const K3CudaLinear *linear)
{
  int64_t bytes = 0;
  for (int i = 0; i < linear->count; i++)
    bytes += k3_cuda_matrix_read_bytes(&linear->items[i].matrix, linear->items[i].matrix.rows);
  return bytes;
}

/* GGUF blocks have kernels of their own, a launch a matrix; the others stay together. */
static K3Status multiply_blocks(const K3CudaLaunch *launch, const K3CudaLinear *linear)
{
  K3CudaLinear rest = *linear;
  rest.count = 0;
  for (int i = 0; i < linear->count; i++) {
    const K3CudaLinearItem *item = &linear->items[i];
    if (k3_cuda_is_blocks(item->matrix.type)) K3_TRY(k3_cuda_linear_blocks(launch, &linear->input, item, linear->exact));
    else rest.items[rest.count++] = *item;
  }
  return rest.count ? k3_cuda_linear(launch, &rest) : K3_OK;
}

/* How one matrix of q8_0 is launched. */
struct Form {
  const void *function; /* NULL: by the kernels for all */
  const char *name;
  unsigned grid;
  int threads, shared_bytes; /* 0: of the plan for all */
};

/* A form of linear_rows_kernel, where it holds the matrix at once, and its blocks the input in one round. */
template <K3CudaInputKind KIND, int ROWS, int CHUNKS, int MOST_THREADS>
static Form rows_form(const K3CudaLaunch *launch, const Arguments *a)
{
  const K3CudaInput *in = &a->input;
  const int warps = (a->items[0].rows + ROWS - 1) / ROWS, most = MOST_THREADS / 32;
  if (in->kind != KIND || in->n % 32 || in->n > 512 * CHUNKS || in->n <= 512 * (CHUNKS - 1) || warps > launch->sm_count * 2 * most)
    return Form{};
  uintptr_t bits = (uintptr_t)in->vector.values;
  int64_t least = (in->n + 127) / 128; /* warps of a block: 128 values a round each */
  if (KIND == K3_INPUT_RMS) {
    bits |= (uintptr_t)in->norm | (uintptr_t)(in->full % 4 | in->offset % 4) * 4;
    if (least * ROW_AHEAD * 128 < in->full) least = (in->full + ROW_AHEAD * 128 - 1) / (ROW_AHEAD * 128);
  }
  if (least > most || bits % 16) return Form{};
  int each = (warps + launch->sm_count - 1) / launch->sm_count;
  each = 2 * each > most ? most : each < least ? (int)least : each; /* full blocks leave multiprocessors to the successors */
  return Form{(const void *)linear_rows_kernel<KIND, ROWS, CHUNKS, MOST_THREADS>, "linear_rows_kernel",
              (unsigned)((warps + each - 1) / each), 32 * each, 0};
}

/* linear_columns_kernel over `grid` blocks, where their shares are neither too few rows nor too many. */
static Form columns_form(const Arguments *a, unsigned grid)
{
  const int64_t n = a->input.n, rows = (a->items[0].rows + grid - 1) / grid;
  if (a->input.kind != K3_INPUT_QUANTISED || n % 512 || n > 16 * COLUMN_THREADS || n < 8 * COLUMN_THREADS || rows < 2 || rows > COLUMN_ROWS)
    return Form{};
  constexpr int WARPS = COLUMN_THREADS / 32;
  const bool held = rows <= COLUMN_DEPTH;
  if (held) grid = (unsigned)((a->items[0].rows + rows - 1) / rows); /* a whole share a block */
  const void *function = held ? (const void *)linear_columns_kernel<0, 1> : (const void *)linear_columns_kernel<0, 0>;
  if (n == 512 * WARPS) function = held ? (const void *)linear_columns_kernel<WARPS, 1> : (const void *)linear_columns_kernel<WARPS, 0>;
  return Form{function, "linear_columns_kernel", grid, (int)n / 16, (int)rows * COLUMN_PITCH * 4};
}

/* The forms of o_proj, of routed_up and of the products behind a norm of a rank of eight of Kimi K3. */
static Form find_form(const K3CudaLaunch *launch, const Arguments *a, unsigned grid)
{
  Form form = columns_form(a, grid);
  if (!form.function) form = rows_form<K3_INPUT_VALUES, 2, 3, THREADS>(launch, a);
  if (!form.function) form = rows_form<K3_INPUT_RMS, 8, 1, RMS_THREADS>(launch, a);
  return form;
}

K3Status k3_cuda_linear(const K3CudaLaunch *launch, const K3CudaLinear *linear)
{
  Arguments a;
  int all_q8 = !linear->exact, stream = linear->count == 1, scalar = 0, codes = 0, floats = 0, segments = 1;
  a.input = linear->input;
  a.count = linear->count;
  a.exact = linear->exact;
  a.codebook = NULL;
  uint64_t all_cost = 0;
  if (linear->count < 1 || linear->count > K3_LINEAR_ITEMS)
    K3_FAIL(K3_ERR_INPUT, "linear: %d matrices in one launch; 1 to %d are possible", linear->count, K3_LINEAR_ITEMS);
  for (int i = 0; i < linear->count; i++)
    if (k3_cuda_is_blocks(linear->items[i].matrix.type)) return multiply_blocks(launch, linear);
  for (int i = 0; i < linear->count; i++) {
    const K3CudaMatrix *m = &linear->items[i].matrix;
    Item *item = &a.items[i];
    if (m->cols != linear->input.n || m->rows < 1 || m->rows > INT32_MAX / 2)
      K3_FAIL(K3_ERR_INPUT, "linear: matrix %d of layer %lld, phase %s is %lld x %lld and meets a vector of %lld", i,
              (long long)launch->layer, launch->phase, (long long)m->rows, (long long)m->cols,
              (long long)linear->input.n);
    int values = piece_values(m->type);
    if (m->cols % values) scalar = 1;
    if (m->type != K3_TYPE_Q8_0) all_q8 = 0;
    if (m->type == K3_TYPE_IQ1_S) a.codebook = m->codebook;
    if (k3_format_is_quantised(m->type) && !linear->exact) codes = 1; else floats = 1;
    item->matrix = *m;
    item->y = linear->items[i].y;
    item->add = linear->items[i].add;
    item->rows = (int)m->rows;
    item->tiling = tiling_of((int)((m->cols + values - 1) / values));
    if (item->tiling.lanes != 32 || item->tiling.pieces % 32) stream = 0;
    int64_t cost = k3_cuda_matrix_read_bytes(m, 1) / 16;
    item->cost = (uint32_t)(cost > 2 ? cost : 2);
    item->magic = ~0ull / item->cost + 1;
    item->before = all_cost;
    all_cost += (uint64_t)item->cost * (uint64_t)m->rows;
  }
  const void *function = (const void *)linear_mixed_kernel;
  const char *name = "linear_mixed_kernel";
  int threads = THREADS, blocks = 1;
  if (scalar) function = (const void *)linear_scalar_kernel, name = "linear_scalar_kernel";
  else if (linear->exact) function = (const void *)linear_exact_kernel, name = "linear_exact_kernel";
  else if (all_q8) {
    function = stream ? (const void *)linear_stream_kernel : (const void *)linear_q8_kernel;
    name = stream ? "linear_stream_kernel" : "linear_q8_kernel";
    threads = stream ? THREADS : Q8_THREADS;
    if (k3_cuda_linear_bytes(linear) >= TWO_BLOCKS_FROM) blocks = 2;
  }
  if (linear->threads % 32 || linear->threads < 0 || linear->threads > threads)
    K3_FAIL(K3_ERR_INPUT, "linear: %d threads a block; a multiple of 32 up to %d is wanted", linear->threads, threads);
  if (linear->threads) threads = linear->threads;
  if (linear->blocks_per_sm) blocks = linear->blocks_per_sm;
  unsigned grid = (unsigned)(launch->sm_count * blocks);
  const Form form = linear->count == 1 && all_q8 && !linear->threads && !linear->blocks_per_sm ? find_form(launch, &a, grid) : Form{};
  if (form.function) function = form.function, name = form.name, grid = form.grid, threads = form.threads;
  a.share = all_cost / grid;
  a.rest = all_cost % grid;
  for (int i = 0; i < linear->count; i++) {
    uint64_t share = (a.share + 1) / a.items[i].cost + 2;
    int rows = share < (uint64_t)a.items[i].rows ? (int)share : a.items[i].rows;
    int needed = a.items[i].matrix.type == K3_TYPE_IQ1_S && !linear->exact
                     ? mma_segment_floats(rows, threads / 32)
                     : segment_floats(rows, a.items[i].tiling.lanes, threads / 32);
    if (needed > segments) segments = needed;
  }
  /* rows that are no whole number of cells: only plain floats may have them, as their blocks would not fit otherwise */
  a.shared = scalar ? plan_shared(0, linear->input.n, 0, 1, 0, 1)
                    : plan_shared(0, linear->input.n, codes, floats, a.codebook != NULL, segments);
  if (form.shared_bytes) { /* linear_columns_kernel */
    a.shared.bytes = form.shared_bytes;
    a.share = (uint64_t)a.items[0].rows / grid, a.rest = (uint64_t)a.items[0].rows % grid;
  }
  void *arguments[] = {&a};
  return k3_cuda_launch_kernel(launch, name, function, grid, (unsigned)threads, 1, (size_t)a.shared.bytes, arguments);
}
