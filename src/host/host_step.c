/* One token through the model on the host: the layer of model.md, line by line, with the collectives where
 * design.md ("Who owns what") puts them. Layer: host backend.
 *
 * Activations are stored in float32; every sum is taken in float64, and partial sums cross ranks in float64.
 * So the result is rounded once after the sum, and does not depend on the number of ranks beyond float64. */
#include <math.h>
#include <string.h>
#include <time.h>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "base/clock.h"
#include "base/breakage.h"
#include "host/host_state.h"
#include "host/kda.h"
#include "host/mla.h"
#include "host/residual.h"

/* Books the time since `begin`, less what went to collectives, to `phase`. */
static void book(K3Host *host, K3Phase phase, double begin)
{
  host->phase_ms[phase] += k3_clock_ms() - begin - host->comm_ms;
  host->phase_ms[K3_PHASE_COMM] += host->comm_ms;
  host->comm_ms = 0.0;
}

static void to_float(const double *from, int64_t n, float *to)
{
  for (int64_t i = 0; i < n; i++) to[i] = (float)from[i];
}

static void silence(double *sum, int64_t n)
{
  for (int64_t i = 0; i < n; i++) sum[i] = 0.0;
}

/* --- collectives, timed --------------------------------------------------------------------------- */

static K3Status reduce(K3Host *host, double *data, int64_t count)
{
  double begin = k3_clock_ms();
  K3Status status = host->comm->all_reduce(host->comm, data, count, K3_ELEMENT_F64, K3_REDUCE_SUM);
  host->comm_ms += k3_clock_ms() - begin;
  return status;
}

/* Pieces of an exchange in which rank r's piece is `width` numbers for each element it owns of `share`,
 * plus `width` of `more` (K3_SHARE_NONE: nothing). `slot` picks a pair of arrays of host->piece. */
static K3Pieces share_pieces(K3Host *host, int slot, K3Share share, K3Share more, int64_t width)
{
  int world = host->plan->world;
  int64_t *count = host->piece + 2 * slot * world, *displacement = count + world, at = 0;
  for (int r = 0; r < world; r++) {
    K3Range range = k3_plan_range(host->plan, r, share);
    count[r] = (range.end - range.begin) * width;
    if (more != K3_SHARE_NONE) {
      K3Range second = k3_plan_range(host->plan, r, more);
      count[r] += (second.end - second.begin) * width;
    }
    displacement[r] = at;
    at += count[r];
  }
  return (K3Pieces){count, displacement};
}

static K3Status gather(K3Host *host, float *data, K3Pieces pieces)
{
  double begin = k3_clock_ms();
  K3Status status = host->comm->all_gather(host->comm, data, pieces, K3_ELEMENT_F32);
  host->comm_ms += k3_clock_ms() - begin;
  return status;
}

/* A NaN must not travel on as token 0: every residual is looked at once a sublayer. */
static K3Status check_finite(const K3Host *host, const float *x, int64_t n, int64_t layer, K3Phase phase)
{
  for (int64_t d = 0; d < n; d++)
    if (!isfinite(x[d]))
      K3_FAIL(K3_ERR_DEVICE,
              "a non-finite value at position %lld in layer %lld, phase %s (element %lld): bad weights (try info --check) "
              "or an overflow",
              (long long)host->position, (long long)layer, k3_phase_names[phase], (long long)d);
  return K3_OK;
}

/* --- attention ------------------------------------------------------------------------------------- */

/* KDA sublayer of x: leaves this rank's partial of o_proj in host->sum. */
static void attend_kda(K3Host *host, int64_t i)
{
  const K3Config *c = host->config;
  K3HostLayer *layer = &host->layers[i];
  int64_t heads = k3_host_own(host, K3_SHARE_KDA_HEADS), channels = heads * c->kda_head_dim;
  static const K3Role project[3] = {K3_ROLE_Q_PROJ, K3_ROLE_K_PROJ, K3_ROLE_V_PROJ};
  static const K3Role conv[3] = {K3_ROLE_Q_CONV, K3_ROLE_K_CONV, K3_ROLE_V_CONV};
  for (int n = 0; n < 3; n++) {
    k3_host_matvec(k3_host_matrix_of(host, i, project[n]), 0, host->x, host->wide[0]);
    k3_host_kda_conv(host->wide[0], k3_host_vector_of(host, i, conv[n]), channels, c->kda_conv_kernel,
                     layer->window[n], host->narrow[n]);
  }
  k3_host_matvec(k3_host_matrix_of(host, i, K3_ROLE_F_A_PROJ), 0, host->x, host->wide[0]);
  to_float(host->wide[0], c->kda_head_dim, host->narrow[3]);
  k3_host_matvec(k3_host_matrix_of(host, i, K3_ROLE_F_B_PROJ), 0, host->narrow[3], host->wide[1]);
  k3_host_matvec(k3_host_matrix_of(host, i, K3_ROLE_B_PROJ), 0, host->x, host->wide[2]);
  k3_host_matvec(k3_host_matrix_of(host, i, K3_ROLE_KDA_G_PROJ), 0, host->x, host->wide[3]);
  k3_host_kda_heads(&(K3KdaArguments){.heads = heads,
                                      .head_dim = c->kda_head_dim,
                                      .gate_lower_bound = c->kda_gate_lower_bound,
                                      .rms_norm_eps = c->rms_norm_eps,
                                      .q = host->narrow[0],
                                      .k = host->narrow[1],
                                      .v = host->narrow[2],
                                      .decay = host->wide[1],
                                      .dt_bias = k3_host_vector_of(host, i, K3_ROLE_DT_BIAS),
                                      .a_log = k3_host_vector_of(host, i, K3_ROLE_A_LOG),
                                      .beta = host->wide[2],
                                      .o_norm = k3_host_vector_of(host, i, K3_ROLE_O_NORM),
                                      .gate = host->wide[3],
                                      .state = layer->kda_state,
                                      .out = host->narrow[3]});
  k3_host_matvec(k3_host_matrix_of(host, i, K3_ROLE_KDA_O_PROJ), 0, host->narrow[3], host->sum);
}

/* Every rank computes the new cache row; its owner keeps it. */
static void append_cache(K3Host *host, int64_t i)
{
  const K3Config *c = host->config;
  int64_t width = k3_config_cache_width(c);
  float *row = host->narrow[0];
  k3_host_matvec(k3_host_matrix_of(host, i, K3_ROLE_KV_A_PROJ), 0, host->x, host->wide[0]);
  to_float(host->wide[0], width, row);
  k3_host_rms(row, k3_host_vector_of(host, i, K3_ROLE_KV_A_NORM), c->low_rank_norm_eps, c->kv_lora_rank, row);
  int owner = k3_plan_cache_owner(host->plan, host->position);
  if (owner < 0 || owner == host->rank)
    memcpy(host->layers[i].cache + k3_plan_cache_row(host->plan, host->position) * width, row, (size_t)width * 4);
}

/* Queries of this rank's heads, absorbed: [Wk_hᵀ q_nope | q_rope], at their place in host->queries. */
static void absorb_queries(K3Host *host, int64_t i)
{
  const K3Config *c = host->config;
  K3Range heads = k3_plan_range(host->plan, host->rank, K3_SHARE_MLA_HEADS);
  int64_t nope = c->qk_nope_head_dim, rope = c->qk_rope_head_dim, latent = c->kv_lora_rank;
  const K3HostMatrix *kv_b = k3_host_matrix_of(host, i, K3_ROLE_KV_B_PROJ);
  k3_host_matvec(k3_host_matrix_of(host, i, K3_ROLE_Q_A_PROJ), 0, host->x, host->wide[0]);
  to_float(host->wide[0], c->q_lora_rank, host->narrow[1]);
  k3_host_rms(host->narrow[1], k3_host_vector_of(host, i, K3_ROLE_Q_A_NORM), c->low_rank_norm_eps, c->q_lora_rank,
              host->narrow[1]);
  k3_host_matvec(k3_host_matrix_of(host, i, K3_ROLE_Q_B_PROJ), 0, host->narrow[1], host->wide[0]);
#pragma omp parallel for schedule(static)
  for (int64_t h = heads.begin; h < heads.end; h++) {
    const double *q = host->wide[0] + (h - heads.begin) * (nope + rope);
    float *out = host->queries + h * (latent + rope);
    double absorbed[latent];
    silence(absorbed, latent);
    for (int64_t n = 0; n < nope; n++)
      k3_host_add_row(kv_b, 0, (h - heads.begin) * (nope + c->v_head_dim) + n, (double)(float)q[n], absorbed);
    to_float(absorbed, latent, out);
    to_float(q + nope, rope, out + latent);
  }
}

/* Attention over this rank's rows, for `heads`: partials (m, l, acc) into host->partials. */
static void attend_rows(K3Host *host, int64_t i, K3Range heads)
{
  const K3Config *c = host->config;
  int64_t width = k3_config_cache_width(c), latent = c->kv_lora_rank;
  int64_t rows = k3_plan_cache_rows(host->plan, host->rank, host->position + 1);
  double scale = 1.0 / sqrt((double)k3_config_qk_head_dim(c));
  if (host->options.attention == K3_ATTENTION_UNSPLIT && K3_BROKEN("slow_unsplit")) /* a sweep must see it */
    nanosleep(&(struct timespec){.tv_nsec = 30000000}, NULL);
#pragma omp parallel for schedule(static)
  for (int64_t h = heads.begin; h < heads.end; h++) {
    const float *query = host->queries + h * width, *cache = host->layers[i].cache;
    double *partial = host->partials + h * k3_partial_width(latent);
    int64_t thread = 0;
#ifdef _OPENMP
    thread = omp_get_thread_num();
#endif
    if (host->options.attention == K3_ATTENTION_UNSPLIT)
      k3_host_mla_attend_whole(query, cache, rows, latent, c->qk_rope_head_dim, scale,
                               host->whole + thread * host->held_rows, partial);
    else
      k3_host_mla_attend(query, cache, rows, latent, c->qk_rope_head_dim, scale, partial);
  }
}

/* Partials go back to each head's owner, which merges them in rank order into its own heads' rows of
 * host->partials. */
static K3Status return_partials(K3Host *host)
{
  int world = host->plan->world;
  int64_t width = k3_partial_width(host->config->kv_lora_rank);
  K3Range heads = k3_plan_range(host->plan, host->rank, K3_SHARE_MLA_HEADS);
  int64_t own = (heads.end - heads.begin) * width;
  K3Pieces sent = share_pieces(host, 0, K3_SHARE_MLA_HEADS, K3_SHARE_NONE, width);
  int64_t *count = host->piece + 2 * world, *displacement = count + world;
  for (int r = 0; r < world; r++) {
    count[r] = own;
    displacement[r] = r * own;
  }
  double begin = k3_clock_ms();
  K3_TRY(host->comm->all_to_all(host->comm, host->partials, sent, host->returned, (K3Pieces){count, displacement},
                                K3_ELEMENT_F64));
  host->comm_ms += k3_clock_ms() - begin;
  for (int64_t h = 0; h < heads.end - heads.begin; h++) {
    double *into = host->partials + (heads.begin + h) * width;
    memcpy(into, host->returned + h * width, (size_t)width * 8);
    for (int r = 1; r < world; r++)
      k3_host_mla_merge(into, host->returned + r * own + h * width, host->config->kv_lora_rank);
  }
  return K3_OK;
}

/* W_v after the merge, gate, o_proj: this rank's partial in host->sum. */
static void project_values(K3Host *host, int64_t i)
{
  const K3Config *c = host->config;
  K3Range heads = k3_plan_range(host->plan, host->rank, K3_SHARE_MLA_HEADS);
  const K3HostMatrix *kv_b = k3_host_matrix_of(host, i, K3_ROLE_KV_B_PROJ);
  int64_t nope = c->qk_nope_head_dim, value = c->v_head_dim, latent = c->kv_lora_rank;
  k3_host_matvec(k3_host_matrix_of(host, i, K3_ROLE_MLA_G_PROJ), 0, host->x, host->wide[0]);
#pragma omp parallel for schedule(static)
  for (int64_t h = 0; h < heads.end - heads.begin; h++) {
    const double *partial = host->partials + (heads.begin + h) * k3_partial_width(latent);
    float context[latent];
    double l = partial[1] == 0.0 ? 1.0 : partial[1]; /* 0: a slice (--slice) whose rank caches no position yet */
    for (int64_t n = 0; n < latent; n++) context[n] = (float)(partial[2 + n] / l);
    for (int64_t v = 0; v < value; v++) {
      double o = k3_host_dot_row(kv_b, 0, h * (nope + value) + nope + v, context);
      double gate = K3_BROKEN("no_gate_mla") ? 1.0 : 1.0 / (1.0 + exp(-host->wide[0][h * value + v]));
      host->narrow[0][h * value + v] = (float)(o * gate);
    }
  }
  k3_host_matvec(k3_host_matrix_of(host, i, K3_ROLE_MLA_O_PROJ), 0, host->narrow[0], host->sum);
}

static K3Status attend_mla(K3Host *host, int64_t i)
{
  append_cache(host, i);
  absorb_queries(host, i);
  if (host->plan->cache_band == K3_CACHE_NONE) {
    attend_rows(host, i, k3_plan_range(host->plan, host->rank, K3_SHARE_MLA_HEADS));
  } else {
    K3Range all = {0, host->config->num_heads};
    K3_TRY(gather(host, host->queries,
                  share_pieces(host, 0, K3_SHARE_MLA_HEADS, K3_SHARE_NONE, k3_config_cache_width(host->config))));
    attend_rows(host, i, all);
    K3_TRY(return_partials(host));
  }
  project_values(host, i);
  return K3_OK;
}

/* --- feed-forward ------------------------------------------------------------------------------------- */

/* hidden = situ(Gate y, Up y) of a band of rows, in narrow[1]. */
static void gate_and_up(K3Host *host, const K3HostMatrix *gate, const K3HostMatrix *up, int64_t expert, const float *y)
{
  const K3Config *c = host->config;
  k3_host_matvec(gate, expert, y, host->wide[0]);
  k3_host_matvec(up, expert, y, host->wide[1]);
  for (int64_t n = 0; n < gate->rows; n++)
    host->narrow[1][n] = (float)k3_host_situ(host->wide[0][n], host->wide[1][n], c->situ_beta, c->situ_linear_beta);
}

static void feed_dense(K3Host *host, int64_t i)
{
  gate_and_up(host, k3_host_matrix_of(host, i, K3_ROLE_GATE_PROJ), k3_host_matrix_of(host, i, K3_ROLE_UP_PROJ), 0,
              host->x);
  k3_host_matvec(k3_host_matrix_of(host, i, K3_ROLE_DOWN_PROJ), 0, host->narrow[1], host->sum);
}

/* Latent rows and router scores of this rank, gathered in one message and put in order. */
static K3Status gather_latent_and_scores(K3Host *host, int64_t i)
{
  K3Pieces pieces = share_pieces(host, 0, K3_SHARE_LATENT_ROWS, K3_SHARE_ROUTER_ROWS, 1);
  int64_t rows = k3_host_own(host, K3_SHARE_LATENT_ROWS), experts = k3_host_own(host, K3_SHARE_ROUTER_ROWS);
  float *own = host->gathered + pieces.displacement[host->rank];
  k3_host_matvec(k3_host_matrix_of(host, i, K3_ROLE_ROUTED_DOWN_PROJ), 0, host->x, host->wide[0]);
  to_float(host->wide[0], rows, own);
  k3_host_matvec(k3_host_matrix_of(host, i, K3_ROLE_ROUTER), 0, host->x, host->wide[0]);
  for (int64_t e = 0; e < experts; e++) own[rows + e] = (float)(1.0 / (1.0 + exp(-host->wide[0][e])));
  K3_TRY(gather(host, host->gathered, pieces));
  int64_t latent_at = 0, score_at = 0;
  for (int r = 0; r < host->plan->world; r++) {
    K3Range piece = k3_plan_range(host->plan, r, K3_SHARE_LATENT_ROWS);
    int64_t count = piece.end - piece.begin;
    const float *from = host->gathered + pieces.displacement[r];
    memcpy(host->latent + latent_at, from, (size_t)count * 4);
    memcpy(host->scores + score_at, from + count, (size_t)(pieces.count[r] - count) * 4);
    latent_at += count;
    score_at += pieces.count[r] - count;
  }
  return K3_OK;
}

/* An expert whose score or bias is NaN would never be chosen, and nobody would know. */
static K3Status check_routing(K3Host *host, int64_t i)
{
  const float *bias = k3_host_vector_of(host, i, K3_ROLE_ROUTER_BIAS);
  float *key = host->narrow[1];
  for (int64_t e = 0; e < host->config->num_experts; e++) key[e] = host->scores[e] + bias[e];
  return check_finite(host, key, host->config->num_experts, i, K3_PHASE_FFN_MOE);
}

/* z = Σ w_e Down_e situ(Gate_e y, Up_e y) over the chosen experts of this rank's group, its own band of rows. */
static void feed_experts(K3Host *host, int64_t i)
{
  const K3Config *c = host->config;
  K3Range group = k3_plan_experts(host->plan, host->rank);
  k3_host_choose_experts(host->scores, k3_host_vector_of(host, i, K3_ROLE_ROUTER_BIAS), c->num_experts,
                         c->num_experts_per_token, c->renormalize, c->routed_scaling_factor, host->chosen);
  silence(host->routed, c->latent_size);
  for (int64_t n = 0; n < c->num_experts_per_token; n++) {
    int64_t e = host->chosen[n].id;
    if (e < group.begin || e >= group.end) continue;
    gate_and_up(host, k3_host_matrix_of(host, i, K3_ROLE_EXPERTS_GATE), k3_host_matrix_of(host, i, K3_ROLE_EXPERTS_UP),
                e - group.begin, host->latent);
    k3_host_matvec_add(k3_host_matrix_of(host, i, K3_ROLE_EXPERTS_DOWN), e - group.begin, host->chosen[n].weight,
                       host->narrow[1], host->routed);
  }
}

static K3Status feed_moe(K3Host *host, int64_t i)
{
  const K3Config *c = host->config;
  K3Range columns = k3_plan_range(host->plan, host->rank, K3_SHARE_LATENT_COLUMNS);
  float *z = host->narrow[2];
  K3_TRY(gather_latent_and_scores(host, i));
  K3_TRY(check_routing(host, i));
  feed_experts(host, i);
  if (K3_BROKEN("norm_before_sum")) { /* known fault F13: rms of a partial sum */
    to_float(host->routed, c->latent_size, z);
    k3_host_rms(z, k3_host_vector_of(host, i, K3_ROLE_ROUTED_NORM), c->rms_norm_eps, c->latent_size, z);
    for (int64_t n = 0; n < c->latent_size; n++) host->routed[n] = (double)z[n];
    K3_TRY(reduce(host, host->routed, c->latent_size));
    to_float(host->routed, c->latent_size, z);
  } else {
    K3_TRY(reduce(host, host->routed, c->latent_size));
    to_float(host->routed, c->latent_size, z);
    k3_host_rms(z, k3_host_vector_of(host, i, K3_ROLE_ROUTED_NORM), c->rms_norm_eps, c->latent_size, z);
  }
  k3_host_matvec(k3_host_matrix_of(host, i, K3_ROLE_ROUTED_UP_PROJ), 0, z + columns.begin, host->sum);
  gate_and_up(host, k3_host_matrix_of(host, i, K3_ROLE_SHARED_GATE_PROJ),
              k3_host_matrix_of(host, i, K3_ROLE_SHARED_UP_PROJ), 0, host->x);
  k3_host_matvec_add(k3_host_matrix_of(host, i, K3_ROLE_SHARED_DOWN_PROJ), 0, 1.0, host->narrow[1], host->sum);
  return K3_OK;
}

/* --- the step ------------------------------------------------------------------------------------------- */

static K3Status embed(K3Host *host, int64_t token)
{
  const K3Config *c = host->config;
  int owner = host->plan->world == 1 ? 0 : k3_plan_owner(host->plan, K3_SHARE_VOCAB, token);
  int stand_in = host->options.slice_world > 0; /* a slice embeds a row of its own in place of one it has not */
  K3Range rows = k3_plan_range(host->plan, host->rank, K3_SHARE_VOCAB);
  if (owner == host->rank || stand_in) {
    int64_t row = owner == host->rank ? token - rows.begin : token % (rows.end - rows.begin);
    k3_host_decode_row(k3_host_matrix_of(host, -1, K3_ROLE_EMBED), 0, row, host->p);
  }
  double begin = k3_clock_ms();
  K3_TRY(host->comm->broadcast(host->comm, host->p, c->hidden_size, K3_ELEMENT_F32, owner));
  host->comm_ms += k3_clock_ms() - begin;
  return K3_OK;
}

static void mix_and_norm(K3Host *host, int64_t layer, K3Role norm, K3Role proj, K3Role input_norm)
{
  const K3Config *c = host->config;
  k3_host_attn_res(host->bank, host->banked, host->p, k3_host_vector_of(host, layer, norm),
                   k3_host_vector_of(host, layer, proj), c->rms_norm_eps, c->hidden_size, host->h);
  k3_host_rms(host->h, k3_host_vector_of(host, layer, input_norm), c->rms_norm_eps, c->hidden_size, host->x);
}

static K3Status attention_sublayer(K3Host *host, int64_t i)
{
  const K3Config *c = host->config;
  K3Phase phase = c->layer_types[i] == K3_LAYER_KDA ? K3_PHASE_ATTN_KDA : K3_PHASE_ATTN_MLA;
  double begin = k3_clock_ms();
  mix_and_norm(host, i, K3_ROLE_ATTN_RES_NORM, K3_ROLE_ATTN_RES_PROJ, K3_ROLE_INPUT_NORM);
  int restart = i % c->attn_res_block_size == 0;
  if (restart) memcpy(host->bank + host->banked++ * c->hidden_size, host->p, (size_t)c->hidden_size * 4);
  if (phase == K3_PHASE_ATTN_KDA)
    attend_kda(host, i);
  else
    K3_TRY(attend_mla(host, i));
  K3_TRY(reduce(host, host->sum, c->hidden_size));
  if (K3_BROKEN("restart_rule")) restart = 0;
  for (int64_t d = 0; d < c->hidden_size; d++)
    host->p[d] = restart ? (float)host->sum[d] : (float)((double)host->p[d] + host->sum[d]);
  K3_TRY(check_finite(host, host->p, c->hidden_size, i, phase));
  book(host, phase, begin);
  return K3_OK;
}

static K3Status ffn_sublayer(K3Host *host, int64_t i)
{
  const K3Config *c = host->config;
  K3Phase phase = k3_config_is_dense(c, i) ? K3_PHASE_FFN_DENSE : K3_PHASE_FFN_MOE;
  double begin = k3_clock_ms();
  mix_and_norm(host, i, K3_ROLE_MLP_RES_NORM, K3_ROLE_MLP_RES_PROJ, K3_ROLE_POST_ATTN_NORM);
  if (phase == K3_PHASE_FFN_DENSE)
    feed_dense(host, i);
  else
    K3_TRY(feed_moe(host, i));
  K3_TRY(reduce(host, host->sum, c->hidden_size));
  for (int64_t d = 0; d < c->hidden_size; d++) host->p[d] = (float)((double)host->p[d] + host->sum[d]);
  K3_TRY(check_finite(host, host->p, c->hidden_size, i, phase));
  book(host, phase, begin);
  return K3_OK;
}

/* Largest logit of all ranks, ties to the lower id: each rank's best pair, gathered. */
static K3Status choose_token(K3Host *host, int64_t *token)
{
  int world = host->plan->world;
  K3Range rows = k3_plan_range(host->plan, host->rank, K3_SHARE_VOCAB);
  double pairs[2 * K3_MAX_WORLD]; /* [world, 2] value, id */
  int64_t *count = host->piece, *displacement = count + world;
  for (int r = 0; r < world; r++) {
    count[r] = 2;
    displacement[r] = 2 * r;
  }
  pairs[2 * host->rank] = -INFINITY;
  pairs[2 * host->rank + 1] = -1.0;
  for (int64_t n = 0; n < rows.end - rows.begin; n++)
    if (pairs[2 * host->rank + 1] < 0.0 || (double)host->logits[n] > pairs[2 * host->rank]) {
      pairs[2 * host->rank] = (double)host->logits[n];
      pairs[2 * host->rank + 1] = (double)(rows.begin + n);
    }
  double begin = k3_clock_ms();
  K3_TRY(host->comm->all_gather(host->comm, pairs, (K3Pieces){count, displacement}, K3_ELEMENT_F64));
  host->comm_ms += k3_clock_ms() - begin;
  int best = -1;
  for (int r = 0; r < world; r++)
    if (pairs[2 * r + 1] >= 0.0 && (best < 0 || pairs[2 * r] > pairs[2 * best])) best = r;
  *token = (int64_t)pairs[2 * best + 1];
  return K3_OK;
}

static K3Status head(K3Host *host, int64_t *token)
{
  const K3Config *c = host->config;
  double begin = k3_clock_ms();
  mix_and_norm(host, -1, K3_ROLE_OUTPUT_RES_NORM, K3_ROLE_OUTPUT_RES_PROJ, K3_ROLE_FINAL_NORM);
  k3_host_matvec(k3_host_matrix_of(host, -1, K3_ROLE_LM_HEAD), 0, host->x, host->wide[0]);
  to_float(host->wide[0], k3_host_own(host, K3_SHARE_VOCAB), host->logits);
  K3_TRY(check_finite(host, host->logits, k3_host_own(host, K3_SHARE_VOCAB), c->num_layers, K3_PHASE_HEAD));
  K3_TRY(choose_token(host, token));
  book(host, K3_PHASE_HEAD, begin);
  return K3_OK;
}

K3Status k3_host_step(K3Backend *backend, int64_t token, int choose, int want_logits, K3StepResult *result)
{
  K3Host *host = backend->state;
  const K3Config *c = host->config;
  memset(host->phase_ms, 0, sizeof host->phase_ms);
  host->comm_ms = 0.0;
  host->banked = 0; /* the bank belongs to a token (known fault F14) */
  double begin = k3_clock_ms();
  K3_TRY(embed(host, token));
  book(host, K3_PHASE_EMBED, begin);
  for (int64_t i = 0; i < c->num_layers; i++) {
    K3_TRY(attention_sublayer(host, i));
    K3_TRY(ffn_sublayer(host, i));
  }
  result->token = -1;
  if (choose) K3_TRY(head(host, &result->token));
  host->position++;
  result->logits = choose && want_logits ? host->logits : NULL;
  memcpy(result->phase_ms, host->phase_ms, sizeof host->phase_ms);
  return K3_OK;
}
