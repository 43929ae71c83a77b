/* What stands where in device memory. See backend.h. Layer: backend (CUDA), host code only.
 * Every function runs twice: once over a pool that is not open, to count; then to place. */
#include "kernels/backend.h"
#include "kernels/kda.h"
#include "kernels/norm.h"
#include "kernels/experts.h"

static int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

/* --- limits of the kernels ------------------------------------------------------------------------------ */

static K3Status check_at_most(const K3Cuda *cuda, const char *field, int64_t value, int64_t most)
{
  if (value <= most) return K3_OK;
  K3_FAIL(K3_ERR_INPUT, "%s: the CUDA backend serves %s up to %lld, got %lld; run with --backend host",
          cuda->source->origin, field, (long long)most, (long long)value);
}

static K3Status check_multiple(const K3Cuda *cuda, const char *field, int64_t value, int64_t of)
{
  if (value % of == 0) return K3_OK;
  K3_FAIL(K3_ERR_INPUT, "%s: the CUDA backend wants %s a multiple of %lld, got %lld; run with --backend host",
          cuda->source->origin, field, (long long)of, (long long)value);
}

K3Status k3_cuda_check_limits(const K3Cuda *cuda)
{
  const K3Config *c = cuda->config;
  const K3Source *source = cuda->source;
  K3_TRY(check_multiple(cuda, "hidden_size", c->hidden_size, 4));
  K3_TRY(check_at_most(cuda, "hidden_size", c->hidden_size, 32768));
  K3_TRY(check_at_most(cuda, "num_layers / attn_res_block_size", cuda->snapshots, K3_NORM_BANK));
  K3_TRY(check_at_most(cuda, "kda_head_dim", c->kda_head_dim, K3_KDA_MAX_DIM));
  K3_TRY(check_at_most(cuda, "kda_conv_kernel", c->kda_conv_kernel, K3_KDA_MAX_KERNEL));
  K3_TRY(check_multiple(cuda, "kv_lora_rank", c->kv_lora_rank, 8));
  K3_TRY(check_at_most(cuda, "kv_lora_rank", c->kv_lora_rank, 1024));
  K3_TRY(check_multiple(cuda, "kv_lora_rank + qk_rope_head_dim", k3_config_cache_width(c), 8));
  K3_TRY(check_at_most(cuda, "v_head_dim", c->v_head_dim, 256));
  K3_TRY(check_at_most(cuda, "num_experts", c->num_experts, K3_ROUTER_EXPERTS));
  K3_TRY(check_at_most(cuda, "num_experts_per_token", c->num_experts_per_token, K3_ROUTER_CHOSEN));
  K3_TRY(check_at_most(cuda, "the intermediate band of a rank", k3_cuda_own(cuda, K3_SHARE_EXPERTS), (1 << 13) - 1));
  for (int64_t i = 0; i < source->table.count; i++) {
    const K3TensorSpec *spec = &source->table.specs[i];
    if (spec->role != K3_ROLE_EXPERTS_UP) continue;
    int64_t gate = k3_tensors_find(&source->table, spec->layer, K3_ROLE_EXPERTS_GATE);
    if (!k3_cuda_experts_pair(source->types[gate], source->types[i]))
      K3_FAIL(K3_ERR_INPUT, "%s: the CUDA backend reads experts_gate and experts_up of one format, or of two GGUF block formats that "
              "it keeps as they are (all but q8_0, mxfp4 and iq1_s); got %s (%s) and %s (%s); "
              "run with --backend host", source->origin, source->table.specs[gate].path, k3_format(source->types[gate])->name,
              spec->path, k3_format(source->types[i])->name);
  }
  return K3_OK;
}

/* --- weights -------------------------------------------------------------------------------------------- */

typedef struct {
  int64_t index;
  const K3TensorSpec *spec;
  K3Type type;
  int64_t rows, cols; /* of the band, experts stacked */
} Shape;

/* The kernels of absorbed attention read kv_b_proj as f32, bf16 or q8_0; of other types it is decoded when it is loaded. */
K3Type k3_cuda_placed_type(const K3Source *source, int64_t index)
{
  K3Type type = source->types[index];
  int served = type == K3_TYPE_F32 || type == K3_TYPE_BF16 || type == K3_TYPE_Q8_0;
  return source->table.specs[index].role == K3_ROLE_KV_B_PROJ && !served ? K3_TYPE_F32 : type;
}

static Shape shape_of(const K3Cuda *cuda, int64_t index)
{
  const K3TensorSpec *spec = &cuda->source->table.specs[index];
  K3Band band = k3_plan_band(cuda->plan, cuda->rank, spec);
  Shape shape;
  shape.index = index;
  shape.spec = spec;
  shape.type = k3_cuda_placed_type(cuda->source, index);
  shape.cols = band.count[spec->rank - 1];
  shape.rows = shape.cols > 0 ? k3_band_elements(&band) / shape.cols : 0;
  return shape;
}

static K3Status place_matrix(K3Cuda *cuda, K3CudaPool *pool, K3Type type, int64_t rows, int64_t cols,
                             K3CudaMatrix *matrix)
{
  void *memory = NULL;
  K3_TRY(k3_cuda_pool_take(pool, k3_cuda_matrix_bytes(type, rows, cols), &memory));
  int book = k3_codebook_of(type);
  return k3_cuda_matrix_place(type, rows, cols, memory, book < 0 ? NULL : k3_cuda_is_blocks(type) ? cuda->books[book] : cuda->codebook,
                              matrix);
}

/* Matrices of one input, in this order; neighbours of one type become one matrix. */
static K3Status place_group(K3Cuda *cuda, K3CudaPool *pool, int64_t layer, const K3Role *roles, int count,
                            K3CudaGroup *group)
{
  memset(group, 0, sizeof *group);
  for (int first = 0; first < count;) {
    Shape shapes[K3_GROUP_PARTS];
    int64_t rows = 0;
    int next = first;
    for (; next < count; next++) {
      shapes[next] = shape_of(cuda, k3_tensors_find(&cuda->source->table, layer, roles[next]));
      if (shapes[next].type != shapes[first].type) break;
      rows += shapes[next].rows;
    }
    if (rows > 0) {
      K3CudaMatrix *matrix = &group->matrix[group->count];
      K3_TRY(place_matrix(cuda, pool, shapes[first].type, rows, shapes[first].cols, matrix));
      int64_t row = 0;
      for (int k = first; k < next; k++) {
        cuda->tensors[shapes[k].index].matrix = *matrix;
        cuda->tensors[shapes[k].index].row = row;
        row += shapes[k].rows;
      }
      group->offset[group->count++] = group->rows;
      group->rows += rows;
    }
    first = next;
  }
  return K3_OK;
}

static K3Status place_groups(K3Cuda *cuda, K3CudaPool *pool, int64_t i)
{
  static const K3Role kda[] = {K3_ROLE_Q_PROJ,     K3_ROLE_K_PROJ,   K3_ROLE_V_PROJ,
                               K3_ROLE_KDA_G_PROJ, K3_ROLE_F_A_PROJ, K3_ROLE_B_PROJ};
  static const K3Role mla[] = {K3_ROLE_Q_A_PROJ, K3_ROLE_KV_A_PROJ, K3_ROLE_MLA_G_PROJ};
  static const K3Role dense[] = {K3_ROLE_GATE_PROJ, K3_ROLE_UP_PROJ};
  static const K3Role moe[] = {K3_ROLE_ROUTED_DOWN_PROJ, K3_ROLE_ROUTER, K3_ROLE_SHARED_GATE_PROJ,
                               K3_ROLE_SHARED_UP_PROJ};
  K3CudaLayer *layer = &cuda->layers[i];
  if (cuda->config->layer_types[i] == K3_LAYER_KDA) K3_TRY(place_group(cuda, pool, i, kda, 6, &layer->attention));
  else K3_TRY(place_group(cuda, pool, i, mla, 3, &layer->attention));
  if (k3_config_is_dense(cuda->config, i)) return place_group(cuda, pool, i, dense, 2, &layer->ffn);
  return place_group(cuda, pool, i, moe, 4, &layer->ffn);
}

static K3Status place_tensor(K3Cuda *cuda, K3CudaPool *pool, int64_t index)
{
  Shape shape = shape_of(cuda, index);
  K3CudaTensor *tensor = &cuda->tensors[index];
  if (tensor->matrix.rows > 0 || shape.rows == 0) return K3_OK; /* in a group, or nothing here */
  if (shape.spec->is_matrix) return place_matrix(cuda, pool, shape.type, shape.rows, shape.cols, &tensor->matrix);
  return k3_cuda_pool_take(pool, shape.rows * shape.cols * 4, (void **)&tensor->vector);
}

K3Status k3_cuda_place_weights(K3Cuda *cuda, K3CudaPool *pool)
{
  int64_t hidden = cuda->config->hidden_size * 4;
  int needed[K3_CODEBOOK_COUNT], needs_codebook = 0;
  memset(cuda->tensors, 0, (size_t)cuda->source->table.count * sizeof *cuda->tensors);
  cuda->codebook = NULL;
  for (int64_t i = 0; i < cuda->source->table.count; i++) needs_codebook |= cuda->source->types[i] == K3_TYPE_IQ1_S;
  k3_codebooks_needed(cuda->source->types, cuda->source->table.count, needed);
  for (int id = 0; id < K3_CODEBOOK_COUNT; id++) {
    cuda->books[id] = NULL;
    if (needed[id])
      K3_TRY(k3_cuda_pool_take(pool, k3_codebook_words(k3_codebook((K3CodebookId)id)) * (int64_t)sizeof(uint32_t), (void **)&cuda->books[id]));
  }
  if (needs_codebook) {
    K3_TRY(k3_cuda_pool_take(pool, K3_CODEBOOK_ENTRIES * 4, (void **)&cuda->codebook));
    K3_TRY(k3_cuda_pool_take(pool, K3_CODEBOOK_ENTRIES * 8, (void **)&cuda->codebook_grid));
  }
  for (int64_t i = 0; i < cuda->config->num_layers; i++) {
    K3_TRY(place_groups(cuda, pool, i));
    K3_TRY(k3_cuda_pool_take(pool, hidden, (void **)&cuda->layers[i].attention_score));
    K3_TRY(k3_cuda_pool_take(pool, hidden, (void **)&cuda->layers[i].ffn_score));
  }
  K3_TRY(k3_cuda_pool_take(pool, hidden, (void **)&cuda->output_score));
  for (int64_t i = 0; i < cuda->source->table.count; i++) K3_TRY(place_tensor(cuda, pool, i));
  return K3_OK;
}

/* --- state and scratch ------------------------------------------------------------------------------------ */

static K3Status take_floats(K3CudaPool *pool, int64_t count, float **memory)
{
  return k3_cuda_pool_take(pool, count * 4, (void **)memory);
}

/* values, codes and scales of a vector of n. */
static K3Status take_vector(K3CudaPool *pool, int64_t n, K3CudaVector *vector)
{
  K3_TRY(take_floats(pool, n, &vector->values));
  K3_TRY(k3_cuda_pool_take(pool, 2 * n, (void **)&vector->codes));
  return take_floats(pool, (n + 31) / 32, &vector->scales);
}

int64_t k3_cuda_most_rows(const K3Cuda *cuda, const K3Plan *plan)
{
  return k3_plan_cache_rows(plan, cuda->rank, cuda->config->max_context);
}

K3Status k3_cuda_most_partials(K3AttentionShape shape, int64_t most, int64_t limit, int64_t *acc, int64_t *ml)
{
  K3AttentionPlan plan;
  for (int64_t rows = 1;; rows = shape.rows + 1) {
    shape.rows = k3_attention_capacity(rows, limit);
    K3_TRY(k3_attention_plan(&shape, &plan));
    *acc = max64(*acc, plan.acc_floats);
    *ml = max64(*ml, plan.ml_floats);
    if (shape.rows >= most) return K3_OK;
  }
}

/* The most that any plan up to the whole cache wants: plans change while the context grows, and arms when options say so. */
static K3Status most_partials(K3Cuda *cuda)
{
  static const K3AttentionArm arms[] = {K3_ATTENTION_CORE, K3_ATTENTION_TENSOR};
  static const K3CacheBand bands[] = {K3_CACHE_CONTEXT, K3_CACHE_NONE};
  const K3Config *c = cuda->config;
  K3AttentionShape shape;
  int tensor_cores = 0;
  cuda->held_rows = cuda->cache_rows;
  cuda->held_acc = cuda->held_ml = 0;
  K3_TRY(k3_cuda_most_partials(cuda->shape, cuda->cache_rows, k3_cuda_most_rows(cuda, cuda->plan), &cuda->held_acc,
                               &cuda->held_ml));
  if (!cuda->options.reconfigures) return K3_OK;
  for (int k = 0; k < 4; k++) {
    K3Plan plan = *cuda->plan;
    K3AttentionArm arm = arms[k % 2];
    plan.cache_band = bands[k / 2];
    int64_t rows = k3_plan_cache_rows(&plan, cuda->rank, cuda->options.capacity);
    if (rows > cuda->cache_rows) continue; /* configure refuses that one */
    if (arm == K3_ATTENTION_TENSOR &&
        !k3_cuda_mla_tensor_serves(c->kv_lora_rank, c->qk_rope_head_dim, cuda->cache_type))
      continue;
    K3_TRY(k3_cuda_attention_shape(cuda, arm, k3_cuda_attend_heads(cuda, &plan), &tensor_cores, &shape));
    K3_TRY(k3_cuda_most_partials(shape, max64(rows, 1), k3_cuda_most_rows(cuda, &plan), &cuda->held_acc, &cuda->held_ml));
  }
  return K3_OK;
}

static K3Status place_layers(K3Cuda *cuda, K3CudaPool *pool)
{
  const K3Config *c = cuda->config;
  int64_t D = c->kda_head_dim, channels = k3_cuda_own(cuda, K3_SHARE_KDA_HEADS) * D;
  int64_t row = k3_config_cache_width(c) * k3_cuda_cache_element_bytes(cuda->cache_type);
  for (int64_t i = 0; i < c->num_layers; i++) {
    K3CudaLayer *layer = &cuda->layers[i];
    if (c->layer_types[i] == K3_LAYER_MLA) {
      K3_TRY(k3_cuda_pool_take(pool, cuda->cache_rows * row, &layer->cache));
      continue;
    }
    K3_TRY(take_floats(pool, channels * D, &layer->kda_state));
    K3_TRY(take_floats(pool, 3 * (c->kda_conv_kernel - 1) * channels, &layer->kda_window));
  }
  return K3_OK;
}

static K3Status place_attention_scratch(K3Cuda *cuda, K3CudaPool *pool)
{
  const K3Config *c = cuda->config;
  int64_t own = k3_cuda_own(cuda, K3_SHARE_MLA_HEADS), width = k3_config_cache_width(c);
  int64_t outputs = max64(k3_cuda_own(cuda, K3_SHARE_KDA_HEADS) * c->kda_head_dim, own * c->v_head_dim);
  K3_TRY(most_partials(cuda));
  K3_TRY(take_floats(pool, outputs, &cuda->heads_out));
  K3_TRY(take_floats(pool, own * k3_config_qk_head_dim(c), &cuda->q));
  K3_TRY(take_floats(pool, c->num_heads * width, &cuda->query));
  K3_TRY(k3_cuda_pool_take(pool, c->num_heads * width * 2, &cuda->query16));
  K3_TRY(take_floats(pool, cuda->held_acc, &cuda->acc));
  K3_TRY(take_floats(pool, cuda->held_ml, &cuda->m));
  K3_TRY(take_floats(pool, cuda->held_ml, &cuda->l));
  K3_TRY(take_floats(pool, c->num_heads * c->kv_lora_rank, &cuda->sum_acc));
  K3_TRY(take_floats(pool, c->num_heads, &cuda->sum_m));
  K3_TRY(take_floats(pool, c->num_heads, &cuda->sum_l));
  K3_TRY(take_floats(pool, cuda->world * own * c->kv_lora_rank, &cuda->part_acc));
  K3_TRY(take_floats(pool, cuda->world * own, &cuda->part_m));
  return take_floats(pool, cuda->world * own, &cuda->part_l);
}

static K3Status place_ffn_scratch(K3Cuda *cuda, K3CudaPool *pool)
{
  const K3Config *c = cuda->config;
  int64_t dense = k3_cuda_own(cuda, K3_SHARE_DENSE), shared = k3_cuda_own(cuda, K3_SHARE_SHARED);
  int64_t band = k3_cuda_own(cuda, K3_SHARE_EXPERTS);
  K3_TRY(take_floats(pool, max64(2 * dense, c->latent_size + c->num_experts + 2 * shared), &cuda->ffn_y));
  K3_TRY(take_floats(pool, c->latent_size, &cuda->latent));
  K3_TRY(take_floats(pool, c->num_experts, &cuda->logits_router));
  if (cuda->world == 1) {
    cuda->latent = cuda->ffn_y;
    cuda->logits_router = cuda->ffn_y + c->latent_size;
  }
  K3_TRY(k3_cuda_pool_take(pool, c->num_experts_per_token * 4, (void **)&cuda->ids));
  K3_TRY(take_floats(pool, c->num_experts_per_token, &cuda->chosen_weights));
  K3_TRY(take_floats(pool, c->num_experts_per_token * band, &cuda->hidden));
  K3_TRY(k3_cuda_pool_take(pool, k3_cuda_meeting_bytes(c->num_experts_per_token, band, c->latent_size), (void **)&cuda->meeting));
  return take_floats(pool, c->latent_size, &cuda->z);
}

int64_t k3_cuda_widest_group(const K3Cuda *cuda)
{
  int64_t most = k3_cuda_own(cuda, K3_SHARE_KDA_HEADS) * cuda->config->kda_head_dim; /* decay on its own */
  for (int64_t i = 0; i < cuda->config->num_layers; i++) most = max64(most, cuda->layers[i].attention.rows);
  return most;
}

/* After k3_cuda_place_weights, which knows the groups. */
K3Status k3_cuda_place_state(K3Cuda *cuda, K3CudaPool *pool)
{
  const K3Config *c = cuda->config;
  int64_t hidden = c->hidden_size;
  K3_TRY(place_layers(cuda, pool));
  K3_TRY(take_floats(pool, hidden, &cuda->p));
  K3_TRY(take_floats(pool, cuda->snapshots * hidden, &cuda->bank));
  K3_TRY(take_floats(pool, (2 * c->num_layers + 1) * hidden, &cuda->mixed));
  K3_TRY(take_floats(pool, (2 * c->num_layers + 1) * K3_NORM_MIX, &cuda->mix));
  K3_TRY(take_floats(pool, hidden, &cuda->branch));
  K3_TRY(take_vector(pool, hidden, &cuda->x));
  if (cuda->exact || hidden % 32) cuda->x.codes = NULL;
  cuda->watch_rows = 2 * c->num_layers + 1;
  cuda->watch_width = cuda->exact || hidden % 32 ? hidden : hidden / 32;
  K3_TRY(take_floats(pool, cuda->watch_rows * cuda->watch_width, &cuda->watch));
  K3_TRY(take_floats(pool, 2 * k3_cuda_widest_group(cuda), &cuda->projected));
  K3_TRY(place_attention_scratch(cuda, pool));
  K3_TRY(place_ffn_scratch(cuda, pool));
  K3_TRY(take_floats(pool, k3_cuda_own(cuda, K3_SHARE_VOCAB), &cuda->logits));
  K3_TRY(k3_cuda_pool_take(pool, 256 * 8, (void **)&cuda->argmax_keys));
  K3_TRY(k3_cuda_pool_take(pool, 4, (void **)&cuda->argmax_count));
  K3_TRY(k3_cuda_pool_take(pool, 4, (void **)&cuda->finish_count));
  K3_TRY(k3_cuda_pool_take(pool, 4, (void **)&cuda->bad));
  K3_TRY(k3_cuda_pool_take(pool, cuda->world * (int64_t)sizeof(K3CudaPair), (void **)&cuda->pairs));
  return k3_cuda_pool_take(pool, 3 * 8, (void **)&cuda->d_step);
}
