/* Kimi delta attention, one token. Layer: backend (CUDA). Twins: k3_host_kda_conv, k3_host_kda_heads.
 *
 * Grid    heads clusters of 8 blocks; a block has D/8 channels: their convolutions and decays, and the state of these
 *         value channels against all keys. The cluster exchanges q, k, decay and, at the end, the outputs.
 * Block   4 warps; a warp has VALUES value channels, a lane KEYS of their keys.
 * Reads   state twice (read, written: 2 · heads · D² · 4 bytes), f_b once; at 12 heads of 128: 1.6 MB + 0.2 … 0.8 MB.
 * Bound   latency: two meetings of the cluster. State and weights are loaded before the predecessor ends. */
#include <cuda_runtime.h>
#include <math.h>

#include "kernels/attention.cuh"
#include "kernels/kda.h"
#include "kernels/wait.cuh"

namespace {

constexpr int CLUSTER = 8, WARPS = 4, BLOCK = 32 * WARPS, FIXED_TAPS = 4;

/* A lane's keys: four neighbours from 4 lane, again 128 on … . Four at a time where D is a multiple of 4. */
__device__ __forceinline__ int key_of(int lane, int i) { return 4 * lane + i % 4 + 128 * (i / 4); }

/* `there` of ROWS rows, D floats apart; the rest are 0. One branch on D around all loads: they go out together. */
template <int KEYS, int ROWS>
__device__ __forceinline__ void load_keys(const float *from, int D, int there, int lane, float out[ROWS][KEYS])
{
  if (D % 4 == 0) {
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
      for (int i = 0; i < KEYS; i += 4) {
        const int key = key_of(lane, i);
        float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (r < there && key < D) x = __ldcg((const float4 *)(from + (int64_t)r * D + key));
        out[r][i] = x.x, out[r][i + 1] = x.y, out[r][i + 2] = x.z, out[r][i + 3] = x.w;
      }
  } else {
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
      for (int i = 0; i < KEYS; i++) {
        const int key = key_of(lane, i);
        out[r][i] = r < there && key < D ? __ldcg(from + (int64_t)r * D + key) : 0.0f;
      }
  }
}

template <int KEYS>
__device__ __forceinline__ void store_keys(float *to, int D, int lane, const float *in)
{
#pragma unroll
  for (int i = 0; i < KEYS; i += 4) {
    const int key = key_of(lane, i);
    if (D % 4 == 0) {
      if (key < D) *(float4 *)(to + key) = make_float4(in[i], in[i + 1], in[i + 2], in[i + 3]);
    } else {
#pragma unroll
      for (int e = 0; e < 4; e++)
        if (key + e < D) to[key + e] = in[i + e];
    }
  }
}

/* The same of rows of f_b, as stored: decoding would wait for them. */
template <K3Type TYPE, int KEYS, int ROWS>
__device__ __forceinline__ void load_f_b(const K3CudaMatrix &f_b, int64_t row, int D, int there, int lane,
                                         StoredWeights<TYPE, 4> w[ROWS][KEYS / 4])
{
  if (D % 4 == 0) {
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
      for (int i = 0; i < KEYS / 4; i++)
        w[r][i].load(f_b, row + r, key_of(lane, 4 * i), r < there && key_of(lane, 4 * i) < D);
  } else {
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
      for (int i = 0; i < KEYS; i++) {
        const int key = key_of(lane, i);
        w[r][i / 4].put(i % 4, r < there && key < D ? weight_at(f_b, row + r, key) : 0.0f);
      }
  }
}

/* KEYS: keys of a lane; D <= 32 KEYS. VALUES: channels of a warp; D / 8 <= 4 VALUES. TYPE: of f_b. FIXED: Kimi K3's shape, D = 32 KEYS,
 * FIXED_TAPS taps and f_b here, in half the code. What is of one channel is done by the 32 / VALUES lanes whose channel it is. */
template <int KEYS, int VALUES, K3Type TYPE, int FIXED>
__global__ void __launch_bounds__(BLOCK, VALUES == 4 ? 6 : 2) kda_kernel(const K3CudaKda a)
{
  constexpr int MAX_D = 32 * KEYS, LANES = 32 / VALUES;
  __shared__ float q_all[MAX_D], k_all[MAX_D], keep_all[MAX_D], out_all[MAX_D], v_tile[WARPS * VALUES];
  __shared__ float squares[CLUSTER * WARPS];
  __shared__ __align__(8) uint64_t exchanged[2];
  const uint32_t inputs = shared_address(&exchanged[0]), outputs = shared_address(&exchanged[1]);
  const int D = FIXED ? MAX_D : (int)a.head_dim, taps = FIXED ? FIXED_TAPS : (int)a.kernel;
  if (threadIdx.x == 0) {
    barrier_init(inputs, 1), barrier_init(outputs, 1);
    barrier_init_fence();
    barrier_expect(inputs, 3 * 4 * (uint32_t)D);
    barrier_expect(outputs, 4 * (uint32_t)(D + CLUSTER * WARPS));
  }
  cluster_arrive(); /* all blocks of the cluster run: waited for before the first store to another */

  const int tile = (D + CLUSTER - 1) / CLUSTER;
  const int rank = blockIdx.x % CLUSTER, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t head = blockIdx.x / CLUSTER, channels = a.heads * D;
  const int first = rank * tile, count = FIXED ? tile : max(0, min(tile, D - first)); /* this block's channels of the head */
  const int64_t at = head * D + first;

  /* 1. What no other launch of this step writes: state, windows, weights. Nothing is used before the wait, which would wait for it. */
  float S[VALUES][KEYS];
  StoredWeights<TYPE, 4> f_b[VALUES][KEYS / 4];
  float *state = a.state + (head * D + first) * D;
  const int mine = FIXED ? VALUES : count - warp * VALUES; /* channels of this warp, if positive */
  load_keys<KEYS, VALUES>(state + (int64_t)warp * VALUES * D, D, mine, lane, S);
  if (FIXED || a.f_b.codes) load_f_b<TYPE, KEYS, VALUES>(a.f_b, at + warp * VALUES, D, mine, lane, f_b);
  const int own = warp * VALUES + lane / LANES; /* this lane's channel of the block */
  const bool owns = FIXED || own < count;
  const float bias = owns ? a.dt_bias[at + own] : 0.0f, gain = owns ? a.o_norm[first + own] : 0.0f, log_rate = a.a_log[head];
  const int kind = threadIdx.x / (WARPS * VALUES), channel = threadIdx.x % (WARPS * VALUES); /* q, k, v, none */
  const bool convolves = kind < 3 && (FIXED || channel < count);
  float *window = a.window + (int64_t)kind * (taps - 1) * channels + at + channel;
  float last_tap = 0.0f, past[K3_KDA_MAX_KERNEL - 1] = {0}, tap[K3_KDA_MAX_KERNEL - 1] = {0};
  if (convolves) {
    const float *conv = (kind == 0 ? a.q_conv : kind == 1 ? a.k_conv : a.v_conv) + (at + channel) * taps;
#pragma unroll
    for (int t = 0; t < K3_KDA_MAX_KERNEL - 1; t++)
      if (t < taps - 1) past[t] = __ldcg(window + t * channels), tap[t] = conv[t];
    last_tap = conv[taps - 1];
  }
  const float *in = kind == 0 ? a.q : kind == 1 ? a.k : a.v;
  const float bound = (float)a.gate_lower_bound, eps = (float)a.rms_norm_eps;

  /* 2. Convolutions and decays of this block's channels, to the whole cluster. */
  k3_wait();
  float f_a[1][KEYS], x = 0.0f, activated = 0.0f, z[VALUES] = {0}; /* all loads first: one trip to the L2 */
  if (convolves) x = __ldcg(in + at + channel);
  if (FIXED || a.f_b.codes) load_keys<KEYS, 1>(a.f_a, D, 1, lane, f_a);
  const float decay = !FIXED && owns && !a.f_b.codes ? __ldcg(a.decay + at + own) : 0.0f;
  const float gate = owns ? __ldcg(a.gate + at + own) : 0.0f;
  float beta = __ldcg(a.beta + head);
  if (convolves) {
    float sum = last_tap * x;
#pragma unroll
    for (int t = 0; t < K3_KDA_MAX_KERNEL - 1; t++) sum += tap[t] * past[t];
    activated = sum * sigmoid(sum);
    if (kind == 2) v_tile[channel] = activated;
  }
  if (a.f_b.codes) { /* FIXED too: the branch keeps the decoding, which waits for the weights, behind the loads above */
#pragma unroll
    for (int v = 0; v < VALUES; v++)
#pragma unroll
      for (int i = 0; i < KEYS; i += 4) {
        float w[4];
        f_b[v][i / 4].decode(w);
#pragma unroll
        for (int e = 0; e < 4; e++) z[v] += w[e] * f_a[0][i + e];
      }
  }
  const float keep_own = expf(bound * sigmoid(expf(log_rate) * (warp_sum_of_one<VALUES>(z) + decay + bias)));
  cluster_wait();
  if (convolves && kind < 2)
#pragma unroll
    for (int r = 0; r < CLUSTER; r++) send_to((kind == 0 ? q_all : k_all) + first + channel, inputs, r, activated);
  if (owns)
#pragma unroll
    for (int r = 0; r < CLUSTER; r += LANES) send_to(keep_all + first + own, inputs, r + lane % LANES, keep_own);
  if (convolves) /* while they travel */
#pragma unroll
    for (int t = 0; t < K3_KDA_MAX_KERNEL - 1; t++)
      if (t < taps - 1) window[t * channels] = t == taps - 2 ? x : past[t + 1 < K3_KDA_MAX_KERNEL - 1 ? t + 1 : t];
  beta = sigmoid(beta);
  const float factor = gain * sigmoid(gate);
  __syncthreads(); /* v_tile */
  const float value_own = owns ? v_tile[own] : 0.0f;
  barrier_wait(inputs, 0);

  /* 3. State and readout. o = Σ (S + k δ) q = Σ S q + δ Σ k q, and the norms of q and k are factors: one round of sums. */
  float k[KEYS], norms[3] = {0}, r[VALUES] = {0}, o[VALUES] = {0}; /* q · q, k · k, q · k; S k, S q */
#pragma unroll
  for (int i = 0; i < KEYS; i++) {
    const int key = key_of(lane, i);
    const float q = key < D ? q_all[key] : 0.0f, keep = key < D ? keep_all[key] : 0.0f;
    k[i] = key < D ? k_all[key] : 0.0f;
    norms[0] += q * q, norms[1] += k[i] * k[i], norms[2] += q * k[i];
#pragma unroll
    for (int v = 0; v < VALUES; v++) {
      S[v][i] *= keep;
      r[v] += S[v][i] * k[i], o[v] += S[v][i] * q;
    }
  }
  const float r_own = warp_sum_of_one<VALUES>(r), o_raw = warp_sum_of_one<VALUES>(o);
  warp_sums<3>(norms);
  const float k_scale = rsqrtf(norms[1] + 1e-6f), q_scale = rsqrtf((norms[0] + 1e-6f) * (float)D);
  const float delta_own = beta * (value_own - r_own * k_scale), o_own = o_raw * q_scale + delta_own * (norms[2] * q_scale * k_scale);
  if (owns)
#pragma unroll
    for (int to = 0; to < CLUSTER; to += LANES) send_to(out_all + first + own, outputs, to + lane % LANES, o_own * factor);
  float square = owns ? o_own * o_own : 0.0f;
#pragma unroll
  for (int step = 16; step >= LANES; step /= 2) square += __shfl_xor_sync(~0u, square, step);
  if (lane < CLUSTER) send_to(squares + rank * WARPS + warp, outputs, lane, square);
#pragma unroll
  for (int v = 0; v < VALUES; v++) { /* while they travel */
    const float delta = k_scale * __shfl_sync(~0u, delta_own, v * LANES);
    if (v >= mine) continue;
#pragma unroll
    for (int i = 0; i < KEYS; i++) S[v][i] += k[i] * delta;
    store_keys<KEYS>(state + (int64_t)(warp * VALUES + v) * D, D, lane, S[v]);
  }
  barrier_wait(outputs, 0); /* all that others send to this block has come, so it may end */

  /* 4. The head's norm, and the output: the norm is a positive factor, so largest magnitudes may be taken before it. */
  const float norm = rsqrtf(warp_sum(squares[lane]) / (float)D + eps);
  const int j = threadIdx.x;
  if (j >= count) return;
  const float value = out_all[first + j] * norm;
  a.out.values[at + j] = value;
  if (!a.out.codes) return;
  const int group = (first + j) / 32 * 32;
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < 32; i++) largest = k3::max_nan(largest, fabsf(out_all[group + i] * norm));
  put_code(a.out, channels, at + j, value, largest);
}

template <int KEYS, int VALUES, int FIXED>
const void *kernel_of(K3Type type)
{
  return type == K3_TYPE_Q8_0   ? (const void *)kda_kernel<KEYS, VALUES, K3_TYPE_Q8_0, FIXED>
         : type == K3_TYPE_BF16 ? (const void *)kda_kernel<KEYS, VALUES, K3_TYPE_BF16, FIXED>
                                : (const void *)kda_kernel<KEYS, VALUES, K3_TYPE_F32, FIXED>;
}

K3Status check(const K3CudaKda *a)
{
  if (a->heads < 1 || a->head_dim < 1 || a->head_dim > K3_KDA_MAX_DIM || a->kernel < 1 || a->kernel > K3_KDA_MAX_KERNEL)
    K3_FAIL(K3_ERR_INPUT, "kda: %lld heads of kda_head_dim %lld (at most %d), kda_conv_kernel %lld (at most %d)",
            (long long)a->heads, (long long)a->head_dim, K3_KDA_MAX_DIM, (long long)a->kernel, K3_KDA_MAX_KERNEL);
  if (a->out.codes && a->head_dim % 32 != 0)
    K3_FAIL(K3_ERR_INPUT, "kda: quantised output needs kda_head_dim a multiple of 32, got %lld", (long long)a->head_dim);
  if (!a->f_b.codes) return K3_OK;
  if (a->f_b.type != K3_TYPE_F32 && a->f_b.type != K3_TYPE_BF16 && a->f_b.type != K3_TYPE_Q8_0)
    K3_FAIL(K3_ERR_INPUT, "kda: f_b_proj is %s; f32, bf16 and q8_0 are served", k3_format(a->f_b.type)->name);
  if (a->f_b.cols != a->head_dim || a->f_b.rows < a->heads * a->head_dim)
    K3_FAIL(K3_ERR_INPUT, "kda: f_b_proj is [%lld, %lld], wanted [%lld, %lld]", (long long)a->f_b.rows,
            (long long)a->f_b.cols, (long long)(a->heads * a->head_dim), (long long)a->head_dim);
  return K3_OK;
}

} // namespace

K3Status k3_cuda_kda(const K3CudaLaunch *launch, const K3CudaKda *arguments)
{
  K3_TRY(check(arguments));
  const int64_t D = arguments->head_dim;
  const int fixed = D == 128 && arguments->kernel == FIXED_TAPS && arguments->f_b.codes;
  const K3Type type = arguments->f_b.type;
  const void *kernel = fixed ? kernel_of<4, 4, 1>(type) : D <= 128 ? kernel_of<4, 4, 0>(type) : kernel_of<8, 8, 0>(type);
  void *parameters[] = {const_cast<K3CudaKda *>(arguments)};
  return k3_cuda_launch_kernel(launch, "kda_kernel", kernel, (unsigned)(arguments->heads * CLUSTER), BLOCK, CLUSTER, 0,
                               parameters);
}
