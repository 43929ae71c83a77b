/* Partials to one partial a head, and partials to the attention output. Layer: backend (CUDA).
 * Twins: k3_host_mla_merge, and W_v with the gate of the host's MLA layer.
 *
 * combine  Grid heads × ceil(C / 128); 128 threads: three warps add up, 16 bytes of a part a lane, while the fourth makes the parts' weights.
 *          Reads parts · heads · C numbers once (96 heads, 64 slices, 16 bit: 6.3 MB, from L2). Bound: the L2, 1.1 us of it.
 * merge    Grid heads clusters of 8 blocks: a block merges C/8 columns over all parts, gives them to the cluster, then
 *          multiplies v/8 rows of W_v. Reads the parts once, the v rows of kv_b once. Bound: latency. A kernel of its own for the
 *          partials of up to 16 ranks at C 512, v 128.
 * Nothing here is sized by the number of parts. */
#include <cuda_runtime.h>
#include <math.h>

#include "kernels/attention.cuh"
#include "kernels/mla.h"
#include "kernels/wait.cuh"

namespace {

constexpr int BLOCK = 256, WARPS = BLOCK / 32;
constexpr int CLUSTER = 8;

/* Largest m of a head and Σ l · 2^(m - M), by each warp for itself. AT_ONCE · 32 parts go out before the first is used. */
__device__ __forceinline__ void head_totals(const K3CudaPartials &in, int64_t head, float *M, float *L)
{
  constexpr int AT_ONCE = 4;
  const float *m = in.m + head * in.head_stride, *l = in.l + head * in.head_stride;
  float top = K3_CUDA_EMPTY_M, sum = 0.0f; /* of this lane's parts */
  for (int64_t p0 = threadIdx.x % 32; p0 < in.parts; p0 += 32 * AT_ONCE) {
    float ms[AT_ONCE], ls[AT_ONCE], high = top;
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const int64_t p = p0 + 32 * i;
      ms[i] = p < in.parts ? __ldcg(m + p * in.part_stride) : K3_CUDA_EMPTY_M;
      ls[i] = p < in.parts ? __ldcg(l + p * in.part_stride) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) high = fmaxf(high, ms[i]);
    sum *= exp2f(top - high);
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) sum += ls[i] * exp2f(ms[i] - high);
    top = high;
  }
  *M = warp_max(top);
  *L = warp_sum(sum * exp2f(top - *M));
}

/* Four neighbours of acc as stored; loading stands apart from decoding, so that loads go out together. */
template <K3CudaCacheType TYPE>
struct Columns {
  uint32_t word[TYPE == K3_CACHE_F32 ? 4 : 2];

  __device__ __forceinline__ void load(const void *acc, int64_t at, bool there)
  {
    if constexpr (TYPE == K3_CACHE_F32) {
      const uint4 p = there ? __ldcg((const uint4 *)((const float *)acc + at)) : make_uint4(0, 0, 0, 0);
      word[0] = p.x, word[1] = p.y, word[2] = p.z, word[3] = p.w;
    } else {
      const uint2 p = there ? __ldcg((const uint2 *)((const uint16_t *)acc + at)) : make_uint2(0, 0);
      word[0] = p.x, word[1] = p.y;
    }
  }

  __device__ __forceinline__ float4 decode() const
  {
    if constexpr (TYPE == K3_CACHE_F32) {
      return make_float4(__uint_as_float(word[0]), __uint_as_float(word[1]), __uint_as_float(word[2]), __uint_as_float(word[3]));
    } else {
      const float2 low = __half22float2(*(const __half2 *)&word[0]), high = __half22float2(*(const __half2 *)&word[1]);
      return make_float4(low.x, low.y, high.x, high.y);
    }
  }
};

/* Σ over parts first, first + step, … of acc · 2^(m - M), four columns. AHEAD loads at a time; the first AHEAD need no M
 * and are issued before it is known. */
template <K3CudaCacheType TYPE, int AHEAD>
__device__ __forceinline__ float4 merge_columns(const K3CudaPartials &in, int64_t head, int64_t offset, bool mine,
                                                int64_t first, int64_t step, float *M, float *L)
{
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  Columns<TYPE> stored[AHEAD];
  float m[AHEAD];
  const float *ms = in.m + head * in.head_stride;
  const int64_t end = mine ? in.parts : 0;
  for (int64_t p0 = first;; p0 += step * AHEAD) {
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      const int64_t p = p0 + i * step;
      stored[i].load(in.acc, offset + p * in.acc_stride, p < end);
      m[i] = p < end ? __ldcg(ms + p * in.part_stride) : K3_CUDA_EMPTY_M;
    }
    if (p0 == first) head_totals(in, head, M, L);
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      const float w = exp2f(m[i] - *M);
      const float4 a = stored[i].decode();
      sum.x += a.x * w, sum.y += a.y * w, sum.z += a.z * w, sum.w += a.w * w;
    }
    if (p0 + step * AHEAD >= in.parts) return sum;
  }
}

/* Of the combine: warps that add up, beside one that weighs; columns of a block; parts a thread has at a time: 66 of f16 a block, which is as
 * many slices as two passes of heads leave on 132 multiprocessors. */
constexpr int COMBINE_WARPS = 3, COMBINE_BLOCK = 32 * (COMBINE_WARPS + 1), COMBINE_COLS = COMBINE_BLOCK, COMBINE_AHEAD = 11;
/* Not used: room for three blocks on a multiprocessor. As many as fit would crowd onto the first that the slices leave. */
constexpr int COMBINE_SHARED = 38 << 10;

template <K3CudaCacheType TYPE>
__global__ void __launch_bounds__(COMBINE_BLOCK, 5) mla_combine_kernel(const __grid_constant__ K3CudaMlaCombine a)
{
  constexpr int BYTES = TYPE == K3_CACHE_F32 ? 4 : 2, PER = 16 / BYTES, LANES = COMBINE_COLS / PER; /* of a part */
  constexpr int BESIDE = 32 / LANES, STEP = COMBINE_WARPS * BESIDE, ROUND = COMBINE_AHEAD * STEP, WEIGHED = (ROUND + 31) / 32;
  __shared__ __align__(16) float partial[COMBINE_WARPS][COMBINE_COLS];
  __shared__ float weights[2][32 * WEIGHED + 1]; /* of a round's parts, and of what is summed already; in turn */
  const unsigned tiles = (unsigned)((a.latent + COMBINE_COLS - 1) / COMBINE_COLS), head = blockIdx.x / tiles, tile = blockIdx.x - head * tiles;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = (int)tile * COMBINE_COLS, parts = (int)a.in.parts;

  if (warp == COMBINE_WARPS) { /* a lane weighs every 32nd part of a round */
    const float *ms = a.in.m + head * a.in.head_stride, *ls = a.in.l + head * a.in.head_stride, *at[WEIGHED];
    const uint32_t stride = (uint32_t)a.in.part_stride;
    float M = K3_CUDA_EMPTY_M, L = 0.0f; /* L: of this lane's parts */
#pragma unroll
    for (int i = 0; i < WEIGHED; i++) at[i] = ms + (uint64_t)stride * (uint32_t)min(lane + 32 * i, parts - 1);
#pragma unroll
    for (int i = 0; i < WEIGHED; i++) asm volatile("" : "+l"(at[i]));
    k3_wait_in_place<true>(parts < 0);
#pragma unroll 1
    for (int base = 0, turn = 0;; turn ^= 1) {
      float m[WEIGHED], l[WEIGHED], top = M;
#pragma unroll
      for (int i = 0; i < WEIGHED; i++) m[i] = __ldcg(at[i]);
#pragma unroll
      for (int i = 0; i < WEIGHED; i++) l[i] = __ldcg(ls + (at[i] - ms));
#pragma unroll
      for (int i = 0; i < WEIGHED; i++) {
        if (lane + 32 * i >= min(parts - base, ROUND)) m[i] = K3_CUDA_EMPTY_M, l[i] = 0.0f;
        top = fmaxf(top, m[i]);
      }
      top = warp_max(top);
      const float keep = exp2f(M - top);
      M = top, L *= keep;
#pragma unroll
      for (int i = 0; i < WEIGHED; i++) {
        m[i] = exp2f(m[i] - top), L += l[i] * m[i];
        weights[turn][lane + 32 * i] = m[i]; /* past the last part: 0 */
      }
      if (lane == 0) weights[turn][32 * WEIGHED] = keep;
      __syncthreads();
      if ((base += ROUND) >= parts) break;
#pragma unroll
      for (int i = 0; i < WEIGHED; i++) at[i] = ms + (uint64_t)stride * (uint32_t)min(base + lane + 32 * i, parts - 1);
    }
    L = warp_sum(L);
    if (lane == 0 && tile == 0) a.m[head] = M, a.l[head] = L;
  } else { /* every STEP-th part; past the last one that again */
    const int part = warp * BESIDE + lane / LANES, col = min(first + lane % LANES * PER, (int)a.latent - PER);
    const char *acc = (const char *)a.in.acc + (head * a.latent + col) * BYTES, *at[COMBINE_AHEAD];
    const uint32_t stride = (uint32_t)a.in.acc_stride * BYTES;
    float sum[PER] = {0.0f};
#pragma unroll
    for (int i = 0; i < COMBINE_AHEAD; i++) at[i] = acc + (uint64_t)stride * (uint32_t)min(part + i * STEP, parts - 1);
#pragma unroll
    for (int i = 0; i < COMBINE_AHEAD; i++) asm volatile("" : "+l"(at[i]));
    k3_wait_in_place<true>(parts < 0);
    for (int base = 0, turn = 0;; turn ^= 1) {
      uint4 stored[COMBINE_AHEAD];
#pragma unroll
      for (int i = 0; i < COMBINE_AHEAD; i++) stored[i] = __ldcg((const uint4 *)at[i]);
      base += ROUND;
      __syncthreads();
      const float *w = weights[turn], keep = w[32 * WEIGHED];
#pragma unroll
      for (int k = 0; k < PER; k++) sum[k] *= keep;
#pragma unroll
      for (int i = 0; i < COMBINE_AHEAD; i++) {
        const float f = w[i * STEP + part];
        const uint32_t word[4] = {stored[i].x, stored[i].y, stored[i].z, stored[i].w};
#pragma unroll
        for (int k = 0; k < 4; k++) {
          if constexpr (TYPE == K3_CACHE_F32) {
            sum[k] += __uint_as_float(word[k]) * f;
          } else {
            const float2 pair = __half22float2(*(const __half2 *)&word[k]);
            sum[2 * k] += pair.x * f, sum[2 * k + 1] += pair.y * f;
          }
        }
      }
      if (base >= parts) break;
#pragma unroll
      for (int i = 0; i < COMBINE_AHEAD; i++) at[i] = acc + (uint64_t)stride * (uint32_t)min(base + part + i * STEP, parts - 1);
    }
#pragma unroll
    for (int step = LANES; step < 32; step *= 2)
#pragma unroll
      for (int k = 0; k < PER; k++) sum[k] += __shfl_xor_sync(~0u, sum[k], step);
    if (lane < LANES)
#pragma unroll
      for (int k = 0; k < PER; k += 4) *(float4 *)&partial[warp][lane * PER + k] = make_float4(sum[k], sum[k + 1], sum[k + 2], sum[k + 3]);
  }
  __syncthreads();
  float all = 0.0f;
#pragma unroll
  for (int i = 0; i < COMBINE_WARPS; i++) all += partial[i][threadIdx.x];
  if (first + (int)threadIdx.x < (int)a.latent) a.acc[head * a.latent + first + threadIdx.x] = all;
}

constexpr int MAX_LATENT = 1024, MAX_V = 256; /* static shared memory of the merge */
constexpr int GROUPS = 16;                    /* 4-column groups of a pass of the merge; 16 parts at a time */
constexpr int RANKS_PARTS = 16, RANKS_LATENT = 512, RANKS_V = 128; /* of mla_merge_ranks_kernel */

/* W_v rows of one warp: row `row` and, 8 on, a second; columns 8 lane + 256 i. */
template <K3Type TYPE>
__device__ __forceinline__ void load_rows(const K3CudaMlaMerge &a, int64_t top, int64_t row, int64_t end, int64_t col0,
                                          float w[2][2][8])
{
  StoredWeights<TYPE, 8> stored[2][2];
#pragma unroll
  for (int r = 0; r < 2; r++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int64_t col = col0 + 8 * (threadIdx.x % 32) + 256 * i;
      stored[r][i].load(a.kv_b, top + row + WARPS * r, col, row + WARPS * r < end && col < a.latent);
    }
#pragma unroll
  for (int r = 0; r < 2; r++)
#pragma unroll
    for (int i = 0; i < 2; i++) stored[r][i].decode(w[r][i]);
}

/* Outputs row_begin … row_end - 1 of a head as codes, per 32 of them. */
__device__ __forceinline__ void put_codes(const K3CudaMlaMerge &a, const float *out_all, int64_t head, int64_t row_begin, int64_t row_end)
{
  for (int64_t at = row_begin + threadIdx.x; at < row_end; at += BLOCK) {
    const int64_t group = at / 32 * 32;
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < 32; i++) largest = k3::max_nan(largest, fabsf(out_all[group + i]));
    put_code(a.out, a.heads * a.v_dim, head * a.v_dim + at, out_all[at], largest);
  }
}

template <K3CudaCacheType TYPE>
__global__ void __launch_bounds__(BLOCK) mla_merge_kernel(const K3CudaMlaMerge a)
{
  __shared__ __align__(16) float merged[MAX_LATENT]; /* the head's Σ softmax · c */
  __shared__ float4 partial[WARPS][GROUPS];
  __shared__ float out_all[MAX_V];
  __shared__ __align__(8) uint64_t exchanged[2];
  const uint32_t inputs = shared_address(&exchanged[0]), outputs = shared_address(&exchanged[1]);
  if (threadIdx.x == 0) {
    barrier_init(inputs, 1), barrier_init(outputs, 1);
    barrier_init_fence();
    barrier_expect(inputs, 4 * (uint32_t)a.latent);
    barrier_expect(outputs, 4 * (uint32_t)a.v_dim);
  }
  cluster_arrive();
  const int rank = blockIdx.x % CLUSTER, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t head = blockIdx.x / CLUSTER;
  const int64_t col_tile = (a.latent / 4 + CLUSTER - 1) / CLUSTER * 4, row_tile = (a.v_dim + CLUSTER - 1) / CLUSTER;
  const int64_t col_begin = rank * col_tile, col_end = min(a.latent, col_begin + col_tile);
  const int64_t row_begin = rank * row_tile, row_end = min(a.v_dim, row_begin + row_tile);
  const int64_t top = head * (a.nope + a.v_dim) + a.nope;

  float w[2][2][8];
  K3_BY_TYPE(a.kv_b, load_rows, a, top, row_begin + warp, row_end, 0, w);
  k3_wait();

  /* 1. this block's columns over all parts, divided by Σ l, to the whole cluster */
  float M, L;
  bool started = false;
  for (int64_t base = col_begin; base < col_end; base += 4 * GROUPS) {
    const int group = threadIdx.x % GROUPS;
    const int64_t col = base + 4 * group;
    float4 sum = merge_columns<TYPE, 8>(a.in, head, head * a.latent + col, col < col_end, threadIdx.x / GROUPS, BLOCK / GROUPS,
                                        &M, &L);
    sum.x += __shfl_xor_sync(~0u, sum.x, 16), sum.y += __shfl_xor_sync(~0u, sum.y, 16);
    sum.z += __shfl_xor_sync(~0u, sum.z, 16), sum.w += __shfl_xor_sync(~0u, sum.w, 16);
    if (lane < GROUPS) partial[warp][lane] = sum;
    __syncthreads();
    if (!started) cluster_wait(), started = true;
    if (threadIdx.x < 4 * GROUPS && base + threadIdx.x < col_end) {
      float total = 0.0f;
#pragma unroll
      for (int i = 0; i < WARPS; i++) total += ((const float *)partial[i])[threadIdx.x];
      const float mean = total * (L == 0.0f ? 0.0f : 1.0f / L); /* no rows at all: 0; NaN stays NaN */
#pragma unroll
      for (int r = 0; r < CLUSTER; r++) send_to(merged + base + threadIdx.x, inputs, r, mean);
    }
    __syncthreads();
  }
  if (!started) cluster_wait();
  barrier_wait(inputs, 0);

  /* 2. rows of W_v, two a warp at a time; the gate; to the cluster for the scale of their codes */
  for (int64_t row = row_begin; row < row_end; row += 2 * WARPS) {
    float sum[2] = {0.0f, 0.0f};
    for (int64_t col0 = 0; col0 < a.latent; col0 += 512) {
      if (row != row_begin || col0 != 0) K3_BY_TYPE(a.kv_b, load_rows, a, top, row + warp, row_end, col0, w);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int64_t col = col0 + 8 * lane + 256 * i;
        if (col >= a.latent) continue;
        const float4 lo = *(const float4 *)(merged + col), hi = *(const float4 *)(merged + col + 4);
#pragma unroll
        for (int r = 0; r < 2; r++) {
          sum[r] += w[r][i][0] * lo.x + w[r][i][1] * lo.y + w[r][i][2] * lo.z + w[r][i][3] * lo.w;
          sum[r] += w[r][i][4] * hi.x + w[r][i][5] * hi.y + w[r][i][6] * hi.z + w[r][i][7] * hi.w;
        }
      }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int64_t at = row + warp + WARPS * r;
      const float o = warp_sum(sum[r]);
      if (at >= row_end) continue;
      const float value = o * sigmoid(__ldcg(a.gate + head * a.v_dim + at));
      if (lane < CLUSTER && a.out.codes) send_to(out_all + at, outputs, lane, value);
      if (lane == 0) a.out.values[head * a.v_dim + at] = value;
    }
  }
  if (!a.out.codes) return; /* what others send came before `inputs` completed */
  barrier_wait(outputs, 0);
  put_codes(a, out_all, head, row_begin, row_end); /* 3. */
}

/* The same for partials of up to 16 ranks in float32, C 512, v 128: a part a half-warp, and little code behind the wait. */
template <K3Type TYPE>
__global__ void __launch_bounds__(BLOCK, 4) mla_merge_ranks_kernel(const __grid_constant__ K3CudaMlaMerge a)
{
  constexpr int LATENT = RANKS_LATENT, V = RANKS_V, COLS = LATENT / CLUSTER, ROWS = V / CLUSTER;
  static_assert(COLS == 4 * GROUPS && ROWS == 2 * WARPS && RANKS_PARTS == BLOCK / GROUPS && LATENT == 512, "what a thread does");
  __shared__ __align__(16) float merged[LATENT];
  __shared__ float4 partial[WARPS][GROUPS];
  __shared__ float out_all[V];
  __shared__ __align__(8) uint64_t exchanged[2];
  const uint32_t inputs = shared_address(&exchanged[0]), outputs = shared_address(&exchanged[1]);
  if (threadIdx.x == 0) {
    barrier_init(inputs, 1), barrier_init(outputs, 1);
    barrier_init_fence();
    barrier_expect(inputs, 4 * LATENT);
    barrier_expect(outputs, 4 * V);
  }
  cluster_arrive();
  const int rank = blockIdx.x % CLUSTER, head = blockIdx.x / CLUSTER, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int parts = (int)a.in.parts, part = threadIdx.x / GROUPS, row = rank * ROWS + warp + WARPS * (lane % 2);

  /* 1. what does not depend on the launch before: W_v, not decoded before the wait, which would wait for it; the gates; addresses */
  StoredWeights<TYPE, 8> stored[2][2];
#pragma unroll
  for (int r = 0; r < 2; r++)
#pragma unroll
    for (int i = 0; i < 2; i++)
      stored[r][i].load(a.kv_b, head * (a.nope + V) + a.nope + rank * ROWS + warp + WARPS * r, 8 * lane + 256 * i, true);
  const float gate = __ldcg(a.gate + head * V + row);
  const float *acc = (const float *)a.in.acc + part * a.in.acc_stride + head * LATENT + rank * COLS + 4 * (threadIdx.x % GROUPS);
  const float *ms = a.in.m + head * a.in.head_stride + lane * a.in.part_stride, *ls = a.in.l + (ms - a.in.m);
  k3_wait_in_place<false>(parts < 0);

  /* 2. this block's columns over all parts, divided by Σ l, to the whole cluster */
  const float m = lane < parts ? __ldcg(ms) : K3_CUDA_EMPTY_M, l = lane < parts ? __ldcg(ls) : 0.0f;
  float4 sum = part < parts ? __ldcg((const float4 *)acc) : make_float4(0, 0, 0, 0);
  const float w = exp2f(m - warp_max(m)), L = warp_sum(l * w), mine = __shfl_sync(~0u, w, part);
  sum.x *= mine, sum.y *= mine, sum.z *= mine, sum.w *= mine;
  sum.x += __shfl_xor_sync(~0u, sum.x, 16), sum.y += __shfl_xor_sync(~0u, sum.y, 16);
  sum.z += __shfl_xor_sync(~0u, sum.z, 16), sum.w += __shfl_xor_sync(~0u, sum.w, 16);
  if (lane < GROUPS) partial[warp][lane] = sum;
  __syncthreads();
  cluster_wait();
  const int col = threadIdx.x % COLS;
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < WARPS; i++) total += ((const float *)partial[i])[col];
  total *= L == 0.0f ? 0.0f : __fdividef(1.0f, L); /* no rows at all: 0; NaN stays NaN */
#pragma unroll
  for (int r = 0; r < CLUSTER; r += BLOCK / COLS) send_to(merged + rank * COLS + col, inputs, r + threadIdx.x / COLS, total);

  /* 3. rows of W_v, two a warp; the gate; to the cluster for the scale of their codes */
  float weight[2][2][8], o[2] = {0.0f, 0.0f};
#pragma unroll
  for (int r = 0; r < 2; r++)
#pragma unroll
    for (int i = 0; i < 2; i++) stored[r][i].decode(weight[r][i]);
  barrier_wait(inputs, 0);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const float4 lo = *(const float4 *)(merged + 8 * lane + 256 * i), hi = *(const float4 *)(merged + 8 * lane + 256 * i + 4);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      o[r] += weight[r][i][0] * lo.x + weight[r][i][1] * lo.y + weight[r][i][2] * lo.z + weight[r][i][3] * lo.w;
      o[r] += weight[r][i][4] * hi.x + weight[r][i][5] * hi.y + weight[r][i][6] * hi.z + weight[r][i][7] * hi.w;
    }
  }
  warp_sums<2>(o);
  const float value = (lane % 2 ? o[1] : o[0]) * sigmoid(gate);
  if (lane < 2) a.out.values[head * V + row] = value;
  if (!a.out.codes) return; /* what others send came before `inputs` completed */
  if (lane < 2 * CLUSTER) send_to(out_all + row, outputs, lane / 2, value);
  barrier_wait(outputs, 0);
  put_codes(a, out_all, head, rank * ROWS, rank * ROWS + ROWS);
}

K3Status check_partials(const char *name, const K3CudaPartials *in, int64_t heads, int64_t latent)
{
  if (heads < 1 || latent < 4 || latent % 4 != 0 || in->parts < 1 || in->acc_stride % 4 != 0)
    K3_FAIL(K3_ERR_INPUT, "%s: %lld heads, C %lld, %lld parts, stride %lld; C and the stride are multiples of 4", name,
            (long long)heads, (long long)latent, (long long)in->parts, (long long)in->acc_stride);
  if (in->type == K3_CACHE_BF16) K3_FAIL(K3_ERR_INPUT, "%s: partials in bf16; f32 and f16 are served", name);
  return K3_OK;
}

#define K3_KERNEL_OF(kernel, type) ((type) == K3_CACHE_F32 ? (const void *)kernel<K3_CACHE_F32> : (const void *)kernel<K3_CACHE_F16>)

} // namespace

K3Status k3_cuda_mla_combine(const K3CudaLaunch *launch, const K3CudaMlaCombine *a)
{
  K3_TRY(check_partials("mla_combine", &a->in, a->heads, a->latent));
  const int64_t tiles = (a->latent + COMBINE_COLS - 1) / COMBINE_COLS, per = a->in.type == K3_CACHE_F32 ? 4 : 8;
  if (a->latent % per != 0 || a->in.acc_stride % per != 0 || a->in.acc_stride * 4 > UINT32_MAX || a->in.part_stride > UINT32_MAX ||
      a->in.parts > INT32_MAX)
    K3_FAIL(K3_ERR_INPUT, "mla_combine: C %lld, %lld parts, strides %lld and %lld; C and the first stride are multiples of %lld, all of 32 bits",
            (long long)a->latent, (long long)a->in.parts, (long long)a->in.acc_stride, (long long)a->in.part_stride, (long long)per);
  void *parameters[] = {const_cast<K3CudaMlaCombine *>(a)};
  return k3_cuda_launch_kernel(launch, "mla_combine_kernel", K3_KERNEL_OF(mla_combine_kernel, a->in.type),
                               (unsigned)(a->heads * tiles), COMBINE_BLOCK, 1, COMBINE_SHARED, parameters);
}

K3Status k3_cuda_mla_merge(const K3CudaLaunch *launch, const K3CudaMlaMerge *a)
{
  K3_TRY(check_partials("mla_merge", &a->in, a->heads, a->latent));
  if (a->latent % 8 != 0 || a->latent > MAX_LATENT || a->v_dim < 1 || a->v_dim > MAX_V)
    K3_FAIL(K3_ERR_INPUT, "mla_merge: C %lld (a multiple of 8, at most %d), v_head_dim %lld (at most %d)",
            (long long)a->latent, MAX_LATENT, (long long)a->v_dim, MAX_V);
  if (a->kv_b.type != K3_TYPE_F32 && a->kv_b.type != K3_TYPE_BF16 && a->kv_b.type != K3_TYPE_Q8_0)
    K3_FAIL(K3_ERR_INPUT, "mla_merge: kv_b_proj is %s; f32, bf16 and q8_0 are served", k3_format(a->kv_b.type)->name);
  if (a->kv_b.cols != a->latent || a->kv_b.rows < a->heads * (a->nope + a->v_dim))
    K3_FAIL(K3_ERR_INPUT, "mla_merge: kv_b_proj is [%lld, %lld], wanted [%lld, %lld]", (long long)a->kv_b.rows,
            (long long)a->kv_b.cols, (long long)(a->heads * (a->nope + a->v_dim)), (long long)a->latent);
  if (a->out.codes && a->v_dim % 32 != 0)
    K3_FAIL(K3_ERR_INPUT, "mla_merge: quantised output needs v_head_dim a multiple of 32, got %lld", (long long)a->v_dim);
  void *parameters[] = {const_cast<K3CudaMlaMerge *>(a)};
  if (a->in.type == K3_CACHE_F32 && a->in.parts <= RANKS_PARTS && a->latent == RANKS_LATENT && a->v_dim == RANKS_V) {
    const void *kernel = a->kv_b.type == K3_TYPE_F32    ? (const void *)mla_merge_ranks_kernel<K3_TYPE_F32>
                         : a->kv_b.type == K3_TYPE_BF16 ? (const void *)mla_merge_ranks_kernel<K3_TYPE_BF16>
                                                        : (const void *)mla_merge_ranks_kernel<K3_TYPE_Q8_0>;
    return k3_cuda_launch_kernel(launch, "mla_merge_ranks_kernel", kernel, (unsigned)(a->heads * CLUSTER), BLOCK, CLUSTER, 0, parameters);
  }
  return k3_cuda_launch_kernel(launch, "mla_merge_kernel", K3_KERNEL_OF(mla_merge_kernel, a->in.type),
                               (unsigned)(a->heads * CLUSTER), BLOCK, CLUSTER, 0, parameters);
}
