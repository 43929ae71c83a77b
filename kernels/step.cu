/* One token through the model on the device: the layer of model.md with the collectives where design.md ("Who owns what") puts
 * them. See backend.h. Layer: backend (CUDA), host code only: it enqueues, and never waits but for K3Cuda.waits.
 * Follows src/host/host_step.c function by function.
 *
 * The residual stream p is brought up to date by the norm that reads it: a sublayer leaves its output in `branch`, and the
 * next norm adds it to p (or replaces p where a block of the attention residual begins anew). The normed input of sublayer s
 * (attention of layer i: 2i, feed-forward: 2i + 1, head: 2 · layers) leaves a trace in row s of `watch`: its scales, or
 * its values. A NaN anywhere reaches the next row, and a step that hangs leaves its last rows poisoned. */
#include "kernels/head.h"
#include "kernels/norm.h"
#include "kernels/step.h"

/* --- phases ------------------------------------------------------------------------------------------------ */

static K3Status begin_phase(K3Cuda *cuda, int64_t layer, K3Phase phase)
{
  cuda->launch.layer = layer;
  cuda->launch.phase = k3_phase_names[phase];
  cuda->phase = phase;
  return k3_cuda_mark(cuda, phase, 0);
}

/* Eagerly: errors of this phase's kernels are reported here, not at a later collective. In a captured step the next phase's
 * mark ends this one. */
static K3Status end_phase(K3Cuda *cuda)
{
  if (!cuda->waits) return K3_OK;
  K3_TRY(k3_cuda_mark(cuda, cuda->phase, 1));
  return k3_cuda_wait(cuda);
}

/* --- norms ---------------------------------------------------------------------------------------------------- */

/* The normed input of sublayer s. */
static K3CudaVector watched(const K3Cuda *cuda, int64_t s)
{
  K3CudaVector x = cuda->x;
  if (x.codes) x.scales = cuda->watch + s * cuda->watch_width;
  else x.values = cuda->watch + s * cuda->watch_width;
  return x;
}

/* Whether a norm sums its branch over the ranks itself. Where phases are timed the sums are kernels of their own, to the same bits:
 * what the phase comm is said to be, waiting for other ranks included, would otherwise be in the sublayers. */
static int norm_sums(const K3Cuda *cuda)
{
  return cuda->communicates && cuda->collectives.all_reduce_norm && !cuda->timer;
}

/* The end of a sublayer: `branch` is summed over the ranks here unless the norm that follows does. */
static K3Status reduce_branch(K3Cuda *cuda, int norm_follows)
{
  return norm_follows && norm_sums(cuda) ? K3_OK : k3_step_reduce(cuda, cuda->branch, cuda->config->hidden_size);
}

/* What the norm of sublayer s does to the residual stream besides. */
typedef struct {
  int64_t banked;
  int first;   /* p is the embedding: there is no branch yet */
  int replace; /* the branch takes p's place */
  int append;  /* p joins the bank */
  int late;    /* the kernels since the last norm are products alone: see launch.h */
} Residual;

static K3Status mix_and_norm(K3Cuda *cuda, int64_t layer, int64_t s, const float *score, K3Role norm, Residual residual)
{
  K3CudaNorm a;
  memset(&a, 0, sizeof a);
  a.n = cuda->config->hidden_size;
  if (residual.banked) {
    a.mixed = cuda->mixed + s * a.n;
    a.mix = cuda->mix + s * K3_NORM_MIX;
  }
  if (residual.append) a.banked = cuda->bank + residual.banked * a.n;
  a.p = cuda->p;
  a.branch = residual.first ? NULL : cuda->branch;
  a.replace = residual.replace;
  a.early = !residual.first && !residual.late; /* the kernel before wrote the branch alone */
  a.score = score;
  a.norm = k3_cuda_tensor(cuda, layer, norm)->vector;
  a.res_eps = a.eps = (float)cuda->config->rms_norm_eps;
  a.x = watched(cuda, s);
  return a.branch && norm_sums(cuda) ? cuda->collectives.all_reduce_norm(cuda, &a) : k3_cuda_norm(&cuda->launch, &a);
}

/* The bank grows in layers 0, B, 2B … of blocks of B; sublayers 2i + 1 … 2(i + B) meet what layer i has left. */
K3Status k3_step_mix_bank(K3Cuda *cuda, int64_t i)
{
  const K3Config *c = cuda->config;
  int64_t block = c->attn_res_block_size, head = 2 * c->num_layers, last = 2 * (i + block) < head ? 2 * (i + block) : head;
  if (i % block != 0) return K3_OK;
  for (int64_t first = 2 * i + 1; first <= last; first += K3_NORM_SUBLAYERS) {
    K3CudaBank a;
    memset(&a, 0, sizeof a);
    a.n = c->hidden_size;
    a.banked = (int)(i / block) + 1;
    a.bank = cuda->bank;
    a.eps = (float)c->rms_norm_eps;
    for (int64_t s = first; s <= last && a.count < K3_NORM_SUBLAYERS; s++)
      a.score[a.count++] = s == head  ? cuda->output_score
                           : s % 2 != 0 ? cuda->layers[s / 2].ffn_score
                                        : cuda->layers[s / 2].attention_score;
    a.mixed = cuda->mixed + first * a.n;
    a.mix = cuda->mix + first * K3_NORM_MIX;
    K3_TRY(k3_cuda_mix_bank(&cuda->launch, &a));
  }
  return K3_OK;
}

/* --- the layer ------------------------------------------------------------------------------------------------------ */

static K3Status attention_sublayer(K3Cuda *cuda, int64_t i, int64_t *banked)
{
  const K3Config *c = cuda->config;
  K3Phase phase = c->layer_types[i] == K3_LAYER_KDA ? K3_PHASE_ATTN_KDA : K3_PHASE_ATTN_MLA;
  K3CudaVector x = watched(cuda, 2 * i);
  Residual residual;
  memset(&residual, 0, sizeof residual);
  residual.banked = *banked;
  residual.first = i == 0;
  residual.append = i % c->attn_res_block_size == 0;
  residual.late = i > 0 && k3_config_is_dense(c, i - 1);
  K3_TRY(begin_phase(cuda, i, phase));
  K3_TRY(mix_and_norm(cuda, i, 2 * i, cuda->layers[i].attention_score, K3_ROLE_INPUT_NORM, residual));
  *banked += residual.append;
  if (phase == K3_PHASE_ATTN_KDA) K3_TRY(k3_step_attend_kda(cuda, i, x));
  else K3_TRY(k3_step_attend_mla(cuda, i, x));
  K3_TRY(reduce_branch(cuda, 1));
  return end_phase(cuda);
}

static K3Status ffn_sublayer(K3Cuda *cuda, int64_t i, int64_t banked, int choose)
{
  const K3Config *c = cuda->config;
  K3Phase phase = k3_config_is_dense(c, i) ? K3_PHASE_FFN_DENSE : K3_PHASE_FFN_MOE;
  K3CudaVector x = watched(cuda, 2 * i + 1);
  Residual residual;
  memset(&residual, 0, sizeof residual);
  residual.banked = banked;
  residual.replace = i % c->attn_res_block_size == 0;
  K3_TRY(begin_phase(cuda, i, phase));
  K3_TRY(mix_and_norm(cuda, i, 2 * i + 1, cuda->layers[i].ffn_score, K3_ROLE_POST_ATTN_NORM, residual));
  if (phase == K3_PHASE_FFN_DENSE) K3_TRY(k3_step_feed_dense(cuda, i, x));
  else K3_TRY(k3_step_feed_moe(cuda, i, x));
  K3_TRY(reduce_branch(cuda, i + 1 < c->num_layers || choose));
  return end_phase(cuda);
}

static K3Status embed(K3Cuda *cuda)
{
  K3CudaEmbed a;
  memset(&a, 0, sizeof a);
  a.matrix = k3_cuda_tensor(cuda, -1, K3_ROLE_EMBED)->matrix;
  a.first_row = k3_plan_range(cuda->plan, cuda->rank, K3_SHARE_VOCAB).begin;
  a.token = cuda->d_step;
  a.values = cuda->p;
  K3_TRY(begin_phase(cuda, -1, K3_PHASE_EMBED));
  K3_TRY(k3_cuda_begin(&cuda->launch, cuda->in, cuda->d_step, cuda->watch, cuda->watch_rows * cuda->watch_width));
  K3_TRY(k3_cuda_embed(&cuda->launch, &a));
  K3_TRY(k3_step_reduce(cuda, cuda->p, cuda->config->hidden_size)); /* all but the owner have zeros */
  return end_phase(cuda);
}

/* Logits of this rank's rows, and its best; then every rank's best. */
static K3Status head(K3Cuda *cuda, int64_t banked)
{
  const K3Config *c = cuda->config;
  int64_t s = 2 * c->num_layers;
  Residual residual;
  memset(&residual, 0, sizeof residual);
  residual.banked = banked;
  residual.late = k3_config_is_dense(c, c->num_layers - 1);
  K3_TRY(mix_and_norm(cuda, -1, s, cuda->output_score, K3_ROLE_FINAL_NORM, residual));
  K3_TRY(
      k3_step_multiply(cuda, -1, K3_ROLE_LM_HEAD, k3_step_vector(watched(cuda, s), c->hidden_size), cuda->logits, 0));
  K3CudaPair *pair = cuda->pairs + (cuda->communicates ? cuda->rank : 0);
  K3CudaArgmax a;
  memset(&a, 0, sizeof a);
  a.logits = cuda->logits;
  a.count = k3_cuda_own(cuda, K3_SHARE_VOCAB);
  a.first_row = k3_plan_range(cuda->plan, cuda->rank, K3_SHARE_VOCAB).begin;
  a.scratch = cuda->argmax_keys;
  a.d_count = cuda->argmax_count;
  a.value = &pair->value;
  a.row = &pair->row;
  K3_TRY(k3_cuda_argmax(&cuda->launch, &a));
  void *pairs = cuda->pairs;
  K3Pieces pieces = k3_step_equal_pieces(cuda, 0, 1);
  const void *mine = pair;
  return k3_step_gather(cuda, 1, &mine, &pairs, &pieces, sizeof *pair);
}

/* The end of a step: what the host is told. */
static K3Status finish_step(K3Cuda *cuda, int choose)
{
  K3CudaFinish finish;
  memset(&finish, 0, sizeof finish);
  finish.watch = cuda->watch;
  finish.rows = choose ? cuda->watch_rows : cuda->watch_rows - 1;
  finish.width = cuda->watch_width;
  finish.tail = choose ? NULL : cuda->branch; /* the last sublayer's output meets no norm */
  finish.tail_count = cuda->config->hidden_size;
  finish.pairs = choose ? cuda->pairs : NULL;
  finish.ranks = cuda->communicates ? cuda->world : 1;
  finish.d_bad = cuda->bad;
  finish.d_count = cuda->finish_count;
  finish.out = cuda->out;
  return k3_cuda_finish(&cuda->launch, &finish);
}

K3Status k3_cuda_enqueue_step(K3Cuda *cuda, int choose)
{
  int64_t banked = 0; /* the bank belongs to a token (known fault F14) */
  memset(cuda->phase_bytes, 0, sizeof cuda->phase_bytes);
  K3_TRY(embed(cuda));
  for (int64_t i = 0; i < cuda->config->num_layers; i++) {
    K3_TRY(attention_sublayer(cuda, i, &banked));
    K3_TRY(ffn_sublayer(cuda, i, banked, choose));
  }
  K3_TRY(begin_phase(cuda, -1, K3_PHASE_HEAD));
  if (choose) K3_TRY(head(cuda, banked));
  K3_TRY(finish_step(cuda, choose));
  if (!cuda->waits) return k3_cuda_mark(cuda, cuda->phase, 1);
  return end_phase(cuda);
}
