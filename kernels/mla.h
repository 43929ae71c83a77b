/* Gated MLA on the device, one token: prepare → slice (one of two arms) → [combine → exchange] → merge.
 * Layer: backend (CUDA). Source: model.md, "Gated MLA"; design.md, "Attention at depth"; the cuts: plan/attention.h.
 *
 *   prepare  absorbed queries of this rank's heads, and the new cache row where this rank owns the position
 *   slice    a partial (m, l, acc) for each (slice, head): CUDA cores (any cache) or tensor cores (16-bit cache)
 *   combine  slices → one partial a head, for ranks that attend for others' heads; not needed otherwise
 *   merge    partials (slices of one rank, or one partial of each rank) → W_v → gate → f32 and 16-bit codes for o_proj
 *
 * Units: m is in log2, so that a weight is 2^(s - m) with s = scale · log2(e) · (q · row); partials rescale by
 * 2^(m_i - m). Empty slice: l = 0, m = -1e30, acc = 0.
 * All launchers: nothing waits for the device; errors K3_ERR_INPUT (shape) and K3_ERR_DEVICE (launch). */
#ifndef K3_KERNELS_MLA_H
#define K3_KERNELS_MLA_H

#include "kernels/launch.h"
#include "kernels/weights.h"
#include "plan/attention.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Storage of the latent cache [capacity, C + R], rows contiguous. */
typedef enum { K3_CACHE_F32 = 0, K3_CACHE_BF16, K3_CACHE_F16 } K3CudaCacheType;

static inline int64_t k3_cuda_cache_element_bytes(K3CudaCacheType type) { return type == K3_CACHE_F32 ? 4 : 2; }

#define K3_CUDA_EMPTY_M (-1e30f)

enum {
  K3_MLA_TENSOR_TILE_ROWS = K3_ATTENTION_TENSOR_TILE_ROWS, /* rows of a tile of the tensor-core arm */
  K3_MLA_SLICE_TILE_ROWS = K3_ATTENTION_CORE_TILE_ROWS     /* … of the CUDA-core arm */
};

/* One token's queries and cache row.
 * in   q        [heads, nope + rope] f32   W_qb …, this rank's heads; NULL: made here, where k3_cuda_mla_prepare_multiplies
 * in   q_b      [heads · (nope + rope), Q], q_a [Q] f32, q_a_norm [Q] f32: q = W_qb rms(q_a) by 16-bit codes; where q is NULL
 * in   kv       [C + R] f32                W_kva x
 * in   kv_norm  [C] f32
 * in   kv_b     [heads · (nope + v), C]    per head nope rows, then v rows; f32, bf16 or q8_0
 * in   position one int64 in device memory: the token's position
 * out  query    [heads, C + R] f32         Wk_hᵀ q_nope | q_rope, not scaled
 * out  query16  the same in the cache's 16-bit type; NULL with an f32 cache
 * out  cache    row of `position`, when page mod world == rank (world 1: always)
 * Twin: the query part of k3_host_mla_*; see src/host/mla.h. */
typedef struct {
  int64_t heads, nope, rope, v_dim, latent;
  const float *q, *kv, *kv_norm, *q_a, *q_a_norm;
  double norm_eps; /* of q_a and of kv */
  K3CudaMatrix q_b, kv_b;
  const int64_t *position;
  int64_t page_positions, world, rank;
  int64_t capacity; /* rows of the cache; a position past it is not written (the host checks before) */
  K3CudaCacheType cache_type;
  void *cache;
  float *query;
  void *query16;
} K3CudaMlaPrepare;

K3Status k3_cuda_mla_prepare(const K3CudaLaunch *launch, const K3CudaMlaPrepare *arguments);
/* 1 where q may be NULL: q_b in q8_0 of up to 1,536 columns, in whole 512s, and heads whose clusters run at once. */
int k3_cuda_mla_prepare_multiplies(const K3CudaLaunch *launch, const K3CudaMlaPrepare *arguments);

/* Slices of absorbed MLA; both arms.
 * in   query    [heads, C + R]: f32 for the CUDA-core arm, the cache's type for the tensor-core arm
 * in   cache    [capacity, C + R]; rows at and past *rows may hold anything, NaN included
 * in   rows     one int64 in device memory: cached rows. Read before k3_wait(): written at the step's start, at least
 *               two launches earlier. The row *rows - 1 may come from the launch just before; earlier rows may not.
 * out  acc [slices, heads, C], of k3_cuda_partial_type: f32 and not normalised, or f16 and divided by l, which is then 1 with
 *             m + log2 l for m;  m, l [heads, slices] f32
 * heads_per_pass, slices: of a K3AttentionPlan made with k3_cuda_mla_*_shape. */
typedef struct {
  int64_t heads, latent, rope;
  int64_t heads_per_pass, slices;
  double scale; /* 1 / sqrt(qk head dim) */
  const void *query;
  const void *cache;
  K3CudaCacheType cache_type;
  int64_t capacity;
  const int64_t *rows;
  void *acc;
  float *m, *l;
  int apart; /* tensor arm, tuning: 1: two passes of a slice each load the cache for themselves */
} K3CudaMlaSlice;

/* CUDA cores: any cache type, C up to 1024, C + R a multiple of 8. Twin: k3_host_mla_slice. */
K3Status k3_cuda_mla_slice(const K3CudaLaunch *launch, const K3CudaMlaSlice *arguments);
/* Tensor cores (wgmma, sm_90a): C = 512, R = 64, cache bf16 or f16. Twin: k3_host_mla_slice. */
K3Status k3_cuda_mla_tensor(const K3CudaLaunch *launch, const K3CudaMlaSlice *arguments);
/* 1 when the tensor-core arm serves these sizes. */
int k3_cuda_mla_tensor_serves(int64_t latent, int64_t rope, K3CudaCacheType cache_type);

/* What the plan must know of each arm on this device: widths, tile, resident blocks. Fills all of `shape` but rows;
 * thresholds get their defaults. */
K3Status k3_cuda_mla_slice_shape(const K3CudaLaunch *launch, int64_t heads, int64_t latent, int64_t rope,
                                 K3CudaCacheType cache_type, K3AttentionShape *shape);
K3Status k3_cuda_mla_tensor_shape(const K3CudaLaunch *launch, int64_t heads, int64_t latent, int64_t rope,
                                  K3CudaCacheType cache_type, K3AttentionShape *shape);

/* How a slice kernel stores acc. The tensor-core arm's is f16 for either cache, half the bytes of f32: a mean of cached values,
 * so what is past f16's 65,504 becomes an infinity, and bf16 would move a router's choice. */
static inline K3CudaCacheType k3_cuda_partial_type(int tensor_cores) { return tensor_cores ? K3_CACHE_F16 : K3_CACHE_F32; }

/* Partials wherever they lie: element (part, head) of m and l at part · part_stride + head · head_stride, its acc at
 * part · acc_stride + head · C. Strides in elements. A slice kernel's output: acc_stride heads · C, part_stride 1,
 * head_stride slices. */
typedef struct {
  const void *acc; /* of `type` */
  const float *m, *l;
  int64_t parts, acc_stride, part_stride, head_stride;
  K3CudaCacheType type;
} K3CudaPartials;

/* parts → one partial a head: acc [heads, C], m [heads], l [heads]. Twin: k3_host_mla_merge. */
typedef struct {
  int64_t heads, latent;
  K3CudaPartials in;
  float *acc, *m, *l;
} K3CudaMlaCombine;

K3Status k3_cuda_mla_combine(const K3CudaLaunch *launch, const K3CudaMlaCombine *arguments);

/* parts → attention output of this rank's heads.
 * in   in     parts over slices or ranks; heads of this rank
 * in   kv_b   as in prepare: the v rows are used
 * in   gate   [heads, v] f32  W_g x, before the sigmoid. Read before k3_wait(): written at least two launches earlier
 * out  out    values [heads, v] f32: (Wv_h Σ) ⊙ sigmoid(gate);  codes, scales: the same quantised (see weights.h);
 *             NULL: left out. Codes need v a multiple of 32.
 * Twin: k3_host_mla_merge and what follows it in the host's MLA layer. */
typedef struct {
  int64_t heads, nope, v_dim, latent;
  K3CudaPartials in;
  K3CudaMatrix kv_b;
  const float *gate;
  K3CudaVector out;
} K3CudaMlaMerge;

K3Status k3_cuda_mla_merge(const K3CudaLaunch *launch, const K3CudaMlaMerge *arguments);

#ifdef __cplusplus
}
#endif
#endif
