/* The attention sublayers: KDA, and MLA over a cache that is banded by context or not. See step.h.
 * Layer: backend (CUDA), host code only. Follows attend_kda and attend_mla of src/host/host_step.c. */
#include <math.h>
#include <stdlib.h>

#include "kernels/kda.h"
#include "kernels/step.h"

/* Attention's outputs, in float32: the product that reads them quantises them as quickly, and keeps NaN (known fault F4). */
static K3CudaVector head_outputs(const K3Cuda *cuda)
{
  K3CudaVector out;
  memset(&out, 0, sizeof out);
  out.values = cuda->heads_out;
  return out;
}

K3Status k3_step_attend_kda(K3Cuda *cuda, int64_t i, K3CudaVector x)
{
  const K3Config *c = cuda->config;
  const K3CudaLayer *layer = &cuda->layers[i];
  int64_t heads = k3_cuda_own(cuda, K3_SHARE_KDA_HEADS), channels = heads * c->kda_head_dim;
  float *y = cuda->projected; /* q, k, v, gate [channels] each, f_a [D], beta [heads] */
  K3_TRY(k3_step_multiply_group(cuda, &layer->attention, k3_step_vector(x, c->hidden_size), y));
  K3_TRY(k3_step_mix_bank(cuda, i));

  K3CudaKda kda;
  memset(&kda, 0, sizeof kda);
  kda.heads = heads;
  kda.head_dim = c->kda_head_dim;
  kda.kernel = c->kda_conv_kernel;
  kda.gate_lower_bound = c->kda_gate_lower_bound;
  kda.rms_norm_eps = c->rms_norm_eps;
  kda.q = y;
  kda.k = y + channels;
  kda.v = y + 2 * channels;
  kda.gate = y + 3 * channels;
  kda.f_a = y + 4 * channels;
  kda.beta = kda.f_a + c->kda_head_dim;
  const K3CudaMatrix *f_b = &k3_cuda_tensor(cuda, i, K3_ROLE_F_B_PROJ)->matrix;
  if (f_b->type == K3_TYPE_F32 || f_b->type == K3_TYPE_BF16 || f_b->type == K3_TYPE_Q8_0) {
    kda.f_b = *f_b;
  } else {
    kda.decay = cuda->projected + k3_cuda_widest_group(cuda);
    K3_TRY(
        k3_step_multiply(cuda, i, K3_ROLE_F_B_PROJ, k3_step_values(kda.f_a, c->kda_head_dim), (float *)kda.decay, 0));
  }
  kda.q_conv = k3_cuda_tensor(cuda, i, K3_ROLE_Q_CONV)->vector;
  kda.k_conv = k3_cuda_tensor(cuda, i, K3_ROLE_K_CONV)->vector;
  kda.v_conv = k3_cuda_tensor(cuda, i, K3_ROLE_V_CONV)->vector;
  kda.dt_bias = k3_cuda_tensor(cuda, i, K3_ROLE_DT_BIAS)->vector;
  kda.a_log = k3_cuda_tensor(cuda, i, K3_ROLE_A_LOG)->vector;
  kda.o_norm = k3_cuda_tensor(cuda, i, K3_ROLE_O_NORM)->vector;
  kda.window = layer->kda_window;
  kda.state = layer->kda_state;
  kda.out = head_outputs(cuda);
  K3_TRY(k3_cuda_kda(&cuda->launch, &kda));
  cuda->phase_bytes[cuda->phase] += channels * (c->kda_head_dim + 3 * (c->kda_conv_kernel - 1)) * 4;
  if (kda.f_b.codes) cuda->phase_bytes[cuda->phase] += k3_cuda_matrix_read_bytes(f_b, f_b->rows);
  return k3_step_multiply(cuda, i, K3_ROLE_KDA_O_PROJ, k3_step_vector(kda.out, channels), cuda->branch, 0);
}

/* Context-banded cache: this rank attends for all heads over its own rows, and partials go back to the heads' owners. */
static int exchanges(const K3Cuda *cuda) { return cuda->world > 1 && cuda->plan->cache_band == K3_CACHE_CONTEXT; }

int64_t k3_cuda_attend_heads(const K3Cuda *cuda, const K3Plan *plan)
{
  int banded = cuda->world > 1 && plan->cache_band == K3_CACHE_CONTEXT;
  return banded ? cuda->config->num_heads : k3_cuda_own(cuda, K3_SHARE_MLA_HEADS);
}

K3Status k3_cuda_attention_shape(const K3Cuda *cuda, K3AttentionArm arm, int64_t heads, int *tensor_cores,
                                 K3AttentionShape *shape)
{
  int64_t latent = cuda->config->kv_lora_rank, rope = cuda->config->qk_rope_head_dim;
  *tensor_cores = arm == K3_ATTENTION_TENSOR ||
                  (arm != K3_ATTENTION_CORE && k3_cuda_mla_tensor_serves(latent, rope, cuda->cache_type));
  K3_TRY((*tensor_cores ? k3_cuda_mla_tensor_shape : k3_cuda_mla_slice_shape)(&cuda->launch, heads, latent, rope,
                                                                              cuda->cache_type, shape));
  const char *slices = getenv("K3_TEST_SLICES"); /* test hook: so many, empty ones included */
  if (slices && atoi(slices) > 0) shape->force_slices = atoi(slices);
  if (arm == K3_ATTENTION_UNSPLIT) shape->force_slices = 1;
  shape->tuning = cuda->options.tuning;
  return K3_OK;
}

K3Status k3_cuda_plan_attention(K3Cuda *cuda, int64_t rows)
{
  int64_t ahead = k3_plan_cache_rows(cuda->plan, cuda->rank, cuda->options.horizon);
  if (rows < ahead) rows = ahead;
  cuda->shape.rows = k3_attention_capacity(rows, k3_cuda_most_rows(cuda, cuda->plan));
  return k3_attention_plan(&cuda->shape, &cuda->attention);
}

/* q, absorbed, and the new row of the cache. */
static K3Status prepare_queries(K3Cuda *cuda, int64_t i, const float *q_a, const float *kv)
{
  const K3Config *c = cuda->config;
  K3Range heads = k3_plan_range(cuda->plan, cuda->rank, K3_SHARE_MLA_HEADS);
  int64_t width = k3_config_cache_width(c), at = exchanges(cuda) ? heads.begin * width : 0;
  K3CudaMlaPrepare a;
  memset(&a, 0, sizeof a);
  a.heads = heads.end - heads.begin;
  a.nope = c->qk_nope_head_dim;
  a.rope = c->qk_rope_head_dim;
  a.v_dim = c->v_head_dim;
  a.latent = c->kv_lora_rank;
  a.q_a = q_a;
  a.q_a_norm = k3_cuda_tensor(cuda, i, K3_ROLE_Q_A_NORM)->vector;
  a.q_b = k3_cuda_tensor(cuda, i, K3_ROLE_Q_B_PROJ)->matrix;
  a.kv = kv;
  a.kv_norm = k3_cuda_tensor(cuda, i, K3_ROLE_KV_A_NORM)->vector;
  a.norm_eps = c->low_rank_norm_eps;
  a.kv_b = k3_cuda_tensor(cuda, i, K3_ROLE_KV_B_PROJ)->matrix;
  a.position = cuda->d_step + 1;
  a.page_positions = cuda->plan->page_positions;
  a.world = exchanges(cuda) ? cuda->world : 1;
  a.rank = exchanges(cuda) ? cuda->rank : 0;
  a.capacity = cuda->cache_rows;
  a.cache_type = cuda->cache_type;
  a.cache = cuda->layers[i].cache;
  a.query = cuda->query + at;
  a.query16 = cuda->cache_type == K3_CACHE_F32 ? NULL : (char *)cuda->query16 + 2 * at;
  if (!cuda->exact && k3_cuda_mla_prepare_multiplies(&cuda->launch, &a)) {
    cuda->phase_bytes[cuda->phase] += k3_cuda_matrix_read_bytes(&a.q_b, a.q_b.rows);
  } else {
    a.q = cuda->q;
    K3_TRY(k3_step_multiply(cuda, i, K3_ROLE_Q_B_PROJ,
                            k3_step_rms(q_a, a.q_a_norm, c->low_rank_norm_eps, c->q_lora_rank, 0, c->q_lora_rank), cuda->q, 0));
  }
  return k3_cuda_mla_prepare(&cuda->launch, &a);
}

/* Partials of this rank's rows: a part a slice. */
static K3Status attend_rows(K3Cuda *cuda, int64_t i, K3CudaPartials *parts)
{
  const K3Config *c = cuda->config;
  K3CudaMlaSlice a;
  memset(&a, 0, sizeof a);
  a.heads = cuda->attend_heads;
  a.latent = c->kv_lora_rank;
  a.rope = c->qk_rope_head_dim;
  a.heads_per_pass = cuda->attention.heads_per_pass;
  a.slices = cuda->attention.slices;
  a.scale = 1.0 / sqrt((double)k3_config_qk_head_dim(c));
  a.query = cuda->tensor_cores ? cuda->query16 : cuda->query;
  a.cache = cuda->layers[i].cache;
  a.cache_type = cuda->cache_type;
  a.capacity = cuda->cache_rows;
  a.rows = cuda->d_step + 2;
  a.acc = cuda->acc;
  a.m = cuda->m;
  a.l = cuda->l;
  cuda->phase_bytes[cuda->phase] +=
      cuda->attention.rows * k3_config_cache_width(c) * k3_cuda_cache_element_bytes(cuda->cache_type);
  parts->acc = cuda->acc;
  parts->type = k3_cuda_partial_type(cuda->tensor_cores);
  parts->m = cuda->m;
  parts->l = cuda->l;
  parts->parts = a.slices;
  parts->acc_stride = a.heads * a.latent;
  parts->part_stride = 1;
  parts->head_stride = a.slices;
  return cuda->tensor_cores ? k3_cuda_mla_tensor(&cuda->launch, &a) : k3_cuda_mla_slice(&cuda->launch, &a);
}

/* Slices become one partial a head; those of other ranks' heads go to their owners: a part a rank. */
static K3Status return_partials(K3Cuda *cuda, K3CudaPartials *parts)
{
  const K3Config *c = cuda->config;
  int64_t own = k3_cuda_own(cuda, K3_SHARE_MLA_HEADS), C = c->kv_lora_rank;
  K3CudaMlaCombine a;
  memset(&a, 0, sizeof a);
  a.heads = cuda->attend_heads;
  a.latent = C;
  a.in = *parts;
  a.acc = cuda->sum_acc;
  a.m = cuda->sum_m;
  a.l = cuda->sum_l;
  K3_TRY(k3_cuda_mla_combine(&cuda->launch, &a));
  parts->type = K3_CACHE_F32;
  parts->acc_stride = own * C;
  parts->part_stride = own;
  parts->head_stride = 1;
  if (!cuda->communicates) { /* a slice: partials of other ranks' heads pass for those of other ranks' rows */
    parts->acc = cuda->sum_acc;
    parts->m = cuda->sum_m;
    parts->l = cuda->sum_l;
    parts->parts = c->num_heads / own < cuda->world ? c->num_heads / own : cuda->world;
    return K3_OK;
  }
  float *const send[3] = {cuda->sum_acc, cuda->sum_m, cuda->sum_l};
  float *const receive[3] = {cuda->part_acc, cuda->part_m, cuda->part_l};
  K3Pieces acc_sent = k3_step_share_pieces(cuda, 0, K3_SHARE_MLA_HEADS, C),
           ml_sent = k3_step_share_pieces(cuda, 1, K3_SHARE_MLA_HEADS, 1);
  K3Pieces acc_received = k3_step_equal_pieces(cuda, 2, own * C), ml_received = k3_step_equal_pieces(cuda, 3, own);
  const K3Pieces sent[3] = {acc_sent, ml_sent, ml_sent}, received[3] = {acc_received, ml_received, ml_received};
  K3_TRY(k3_cuda_mark(cuda, K3_PHASE_COMM, 0));
  K3_TRY(cuda->collectives.all_to_all(cuda, 3, send, sent, receive, received));
  parts->acc = cuda->part_acc;
  parts->m = cuda->part_m;
  parts->l = cuda->part_l;
  parts->parts = cuda->world;
  return k3_cuda_mark(cuda, cuda->phase, 0);
}

K3Status k3_step_attend_mla(K3Cuda *cuda, int64_t i, K3CudaVector x)
{
  const K3Config *c = cuda->config;
  const K3CudaLayer *layer = &cuda->layers[i];
  int64_t own = k3_cuda_own(cuda, K3_SHARE_MLA_HEADS), width = k3_config_cache_width(c);
  float *q_a = cuda->projected, *kv = q_a + c->q_lora_rank, *gate = kv + width;
  K3_TRY(k3_step_multiply_group(cuda, &layer->attention, k3_step_vector(x, c->hidden_size), cuda->projected));
  K3_TRY(k3_step_mix_bank(cuda, i));
  K3_TRY(prepare_queries(cuda, i, q_a, kv));
  if (exchanges(cuda)) {
    int64_t size = cuda->tensor_cores ? 2 : 4;
    void *queries = cuda->tensor_cores ? cuda->query16 : (void *)cuda->query;
    K3Pieces pieces = k3_step_share_pieces(cuda, 0, K3_SHARE_MLA_HEADS, width);
    const void *mine = (char *)queries + pieces.displacement[cuda->rank] * size;
    K3_TRY(k3_step_gather(cuda, 1, &mine, &queries, &pieces, size));
  }
  K3CudaMlaMerge merge;
  memset(&merge, 0, sizeof merge);
  K3_TRY(attend_rows(cuda, i, &merge.in));
  if (exchanges(cuda)) K3_TRY(return_partials(cuda, &merge.in));
  merge.heads = own;
  merge.nope = c->qk_nope_head_dim;
  merge.v_dim = c->v_head_dim;
  merge.latent = c->kv_lora_rank;
  merge.kv_b = k3_cuda_tensor(cuda, i, K3_ROLE_KV_B_PROJ)->matrix;
  merge.gate = gate;
  merge.out = head_outputs(cuda);
  K3_TRY(k3_cuda_mla_merge(&cuda->launch, &merge));
  cuda->phase_bytes[cuda->phase] += k3_cuda_matrix_read_bytes(&merge.kv_b, merge.kv_b.rows);
  return k3_step_multiply(cuda, i, K3_ROLE_MLA_O_PROJ, k3_step_vector(merge.out, own * c->v_head_dim), cuda->branch, 0);
}
