/* A slice of absorbed MLA on CUDA cores: the baseline arm, other shapes, float32 caches, and (one slice) the un-split
 * kernel. Layer: backend (CUDA). Twin: k3_host_mla_slice.
 *
 * Grid    slices × passes blocks (pass fastest). Shared memory: N queries and one tile, whatever the context.
 * Block   256 threads (512 for C > 512): scores a warp 4 rows × N heads, sums a thread 2 columns × N heads.
 * Reads   the slice's rows once a pass, the queries once a block.
 * Bound   arithmetic: 2 · (2 C + R) FLOP a row and head on CUDA cores. */
#include <cuda_runtime.h>
#include <math.h>
#include <string.h>

#include "kernels/attention.cuh"
#include "kernels/mla.h"
#include "kernels/wait.cuh"

namespace {

constexpr int TILE = K3_MLA_SLICE_TILE_ROWS;
constexpr int AT_ONCE = 4; /* rows of a warp's scores */

struct SliceArguments {
  int64_t heads, passes, slices, latent, rope;
  const float *query;
  const void *cache;
  const int64_t *rows;
  float scale_log2;
  float *acc, *m, *l;
};

/* 16 bytes of the cache to floats. */
__device__ __forceinline__ void expand(const float *, const uint4 &p, float *out)
{
  out[0] = __uint_as_float(p.x), out[1] = __uint_as_float(p.y), out[2] = __uint_as_float(p.z), out[3] = __uint_as_float(p.w);
}
__device__ __forceinline__ void expand(const __nv_bfloat16 *, const uint4 &p, float *out)
{
  const uint32_t part[4] = {p.x, p.y, p.z, p.w};
#pragma unroll
  for (int i = 0; i < 4; i++) out[2 * i] = bf16_value(part[i] & 0xffffu), out[2 * i + 1] = __uint_as_float(part[i] & 0xffff0000u);
}
__device__ __forceinline__ void expand(const __half *, const uint4 &p, float *out)
{
  const uint32_t part[4] = {p.x, p.y, p.z, p.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 pair = __half22float2(*(const __half2 *)&part[i]);
    out[2 * i] = pair.x, out[2 * i + 1] = pair.y;
  }
}

/* `count` numbers from a 16-byte boundary to shared memory, zeros up to `whole`; both multiples of 16 bytes. */
template <typename T>
__device__ __forceinline__ void load_tile(const T *cache, int count, int whole, float *tile)
{
  constexpr int VECTOR = 16 / sizeof(T), AHEAD = 4;
  const int step = blockDim.x * VECTOR;
  for (int at = threadIdx.x * VECTOR; at < whole; at += AHEAD * step) {
    uint4 p[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
      p[i] = at + i * step < count ? __ldcg((const uint4 *)(cache + at + i * step)) : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      if (at + i * step >= whole) continue;
      float out[VECTOR];
      expand(cache, p[i], out);
#pragma unroll
      for (int e = 0; e < VECTOR; e += 4)
        *(float4 *)(tile + at + i * step + e) = make_float4(out[e], out[e + 1], out[e + 2], out[e + 3]);
    }
  }
}

/* Shared, floats: query [N][width], tile [TILE][width], p [TILE][N], m, l, keep [N]. */
size_t shared_bytes(int64_t n, int64_t width) { return (size_t)((n + TILE) * width + TILE * n + 3 * n) * sizeof(float); }

template <typename T, int N>
__global__ void __launch_bounds__(512) mla_slice_kernel(const SliceArguments a)
{
  extern __shared__ __align__(16) float shared[];
  const int latent = (int)a.latent, width = (int)(a.latent + a.rope), threads = blockDim.x;
  float *query = shared, *tile = query + N * width, *p = tile + TILE * width, *m = p + TILE * N, *l = m + N, *keep = l + N;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const unsigned passes = (unsigned)a.passes;
  const int pass = (int)(blockIdx.x % passes);
  const int64_t slice = blockIdx.x / passes;
  const int heads = (int)min((int64_t)N, a.heads - (int64_t)pass * N);

  k3_wait();
  const int64_t rows = __ldcg((const long long *)a.rows);
  const int64_t begin = k3_attention_slice_begin(rows, TILE, a.slices, slice);
  const int64_t end = k3_attention_slice_begin(rows, TILE, a.slices, slice + 1);
  for (int i = threadIdx.x; i < N * width; i += threads)
    query[i] = i < heads * width ? __ldcg(a.query + (int64_t)pass * N * width + i) : 0.0f;
  for (int i = threadIdx.x; i < N; i += threads) m[i] = K3_CUDA_EMPTY_M, l[i] = 0.0f;

  float acc[N][2];
#pragma unroll
  for (int h = 0; h < N; h++) acc[h][0] = acc[h][1] = 0.0f;

  for (int64_t row = begin; row < end; row += TILE) {
    const int valid = (int)min((int64_t)TILE, end - row);
    __syncthreads(); /* the last tile and its weights are done with */
    load_tile((const T *)a.cache + row * width, valid * width, TILE * width, tile);
    __syncthreads();

    /* 1. scores: p[t][h] */
    for (int t0 = warp * AT_ONCE; t0 < TILE; t0 += threads / 32 * AT_ONCE) {
      float s[AT_ONCE][N];
#pragma unroll
      for (int t = 0; t < AT_ONCE; t++)
#pragma unroll
        for (int h = 0; h < N; h++) s[t][h] = 0.0f;
      for (int c = lane; c < width; c += 32) {
        float k[AT_ONCE];
#pragma unroll
        for (int t = 0; t < AT_ONCE; t++) k[t] = tile[(t0 + t) * width + c];
#pragma unroll
        for (int h = 0; h < N; h++) {
          const float q = query[h * width + c];
#pragma unroll
          for (int t = 0; t < AT_ONCE; t++) s[t][h] += q * k[t];
        }
      }
#pragma unroll
      for (int t = 0; t < AT_ONCE; t++)
#pragma unroll
        for (int h = 0; h < N; h++) {
          const float sum = warp_sum(s[t][h]);
          if (lane == 0) p[(t0 + t) * N + h] = t0 + t < valid ? sum * a.scale_log2 : -INFINITY;
        }
    }
    __syncthreads();

    /* 2. largest score, weights: a warp a head, a lane a row */
    static_assert(TILE == 32, "a lane a row");
    for (int h = warp; h < N; h += threads / 32) {
      const float s = p[lane * N + h], before = m[h], top = fmaxf(before, warp_max(s)), w = exp2f(s - top);
      const float sum = warp_sum(w);
      p[lane * N + h] = w;
      __syncwarp();
      if (lane == 0) keep[h] = exp2f(before - top), l[h] = l[h] * exp2f(before - top) + sum, m[h] = top;
    }
    __syncthreads();

    /* 3. sums */
    const int c0 = threadIdx.x, c1 = threadIdx.x + threads;
#pragma unroll
    for (int h = 0; h < N; h++) acc[h][0] *= keep[h], acc[h][1] *= keep[h];
#pragma unroll 4
    for (int t = 0; t < TILE; t++) {
      const float v0 = c0 < latent ? tile[t * width + c0] : 0.0f, v1 = c1 < latent ? tile[t * width + c1] : 0.0f;
#pragma unroll
      for (int h = 0; h < N; h++) acc[h][0] += p[t * N + h] * v0, acc[h][1] += p[t * N + h] * v1;
    }
  }
  __syncthreads();
  const int64_t index = slice * a.heads + (int64_t)pass * N;
#pragma unroll
  for (int h = 0; h < N; h++) {
    if (h >= heads) continue;
    float *out = a.acc + (index + h) * a.latent;
    if (threadIdx.x < latent) out[threadIdx.x] = acc[h][0];
    if (threadIdx.x + threads < latent) out[threadIdx.x + threads] = acc[h][1];
  }
  if (threadIdx.x < heads) {
    const int64_t at = ((int64_t)pass * N + threadIdx.x) * a.slices + slice;
    a.m[at] = m[threadIdx.x], a.l[at] = l[threadIdx.x];
  }
}

template <int N>
const void *kernel_of(K3CudaCacheType type)
{
  if (type == K3_CACHE_F32) return (const void *)mla_slice_kernel<float, N>;
  return type == K3_CACHE_BF16 ? (const void *)mla_slice_kernel<__nv_bfloat16, N> : (const void *)mla_slice_kernel<__half, N>;
}

K3Status find_kernel(int64_t width, K3CudaCacheType type, const void **kernel)
{
  if (width != 4 && width != 12)
    K3_FAIL(K3_ERR_INPUT, "mla_slice: %lld heads a pass; built for 4 and 12", (long long)width);
  *kernel = width == 4 ? kernel_of<4>(type) : kernel_of<12>(type);
  return K3_OK;
}

unsigned block_of(int64_t latent) { return latent > 512 ? 512 : 256; }

K3Status check_sizes(int64_t latent, int64_t rope)
{
  if (latent < 1 || latent > 1024 || rope < 0 || latent + rope > 1280 || (latent + rope) % 8 != 0)
    K3_FAIL(K3_ERR_INPUT, "mla_slice: C %lld (at most 1024), R %lld; C + R must be a multiple of 8", (long long)latent,
            (long long)rope);
  return K3_OK;
}

} // namespace

K3Status k3_cuda_mla_slice_shape(const K3CudaLaunch *launch, int64_t heads, int64_t latent, int64_t rope,
                                 K3CudaCacheType cache_type, K3AttentionShape *shape)
{
  K3_TRY(check_sizes(latent, rope));
  K3CudaUse use;
  const void *kernel = NULL;
  K3_TRY(find_kernel(12, cache_type, &kernel));
  K3_TRY(k3_cuda_kernel_use("mla_slice_kernel", kernel, 1, block_of(latent), 1, shared_bytes(12, latent + rope), &use));
  if (use.blocks_per_sm < 1)
    K3_FAIL(K3_ERR_DEVICE, "mla_slice: %zu bytes of shared memory do not fit", shared_bytes(12, latent + rope));
  k3_attention_kernel_shape(K3_ATTENTION_KERNEL_CORE, heads, latent, shape);
  shape->multiprocessors = launch->sm_count;
  shape->resident_blocks = use.blocks_per_sm;
  return K3_OK;
}

K3Status k3_cuda_mla_slice(const K3CudaLaunch *launch, const K3CudaMlaSlice *s)
{
  K3_TRY(check_sizes(s->latent, s->rope));
  if (s->heads < 1 || s->slices < 1)
    K3_FAIL(K3_ERR_INPUT, "mla_slice: heads %lld, slices %lld", (long long)s->heads, (long long)s->slices);
  const void *kernel = NULL;
  K3_TRY(find_kernel(s->heads_per_pass, s->cache_type, &kernel));
  SliceArguments arguments;
  arguments.heads = s->heads;
  arguments.passes = (s->heads + s->heads_per_pass - 1) / s->heads_per_pass;
  arguments.slices = s->slices;
  arguments.latent = s->latent, arguments.rope = s->rope;
  arguments.query = (const float *)s->query;
  arguments.cache = s->cache;
  arguments.rows = s->rows;
  arguments.scale_log2 = (float)(s->scale * 1.4426950408889634);
  arguments.acc = (float *)s->acc, arguments.m = s->m, arguments.l = s->l;
  if (arguments.passes * s->slices > INT32_MAX)
    K3_FAIL(K3_ERR_INPUT, "mla_slice: %lld slices are too many for a grid", (long long)s->slices);
  void *parameters[] = {&arguments};
  return k3_cuda_launch_kernel(launch, "mla_slice_kernel", kernel, (unsigned)(arguments.passes * s->slices),
                               block_of(s->latent), 1, shared_bytes(s->heads_per_pass, s->latent + s->rope), parameters);
}
