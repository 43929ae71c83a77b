/* kernel_check: the routing, routed experts (gate and up, down) and the shared experts' down: one kernel. */
#include "kernels/experts.h"
#include "tests/kernel_device.h"

static K3Status work_experts(void *context, const K3CudaLaunch *launch, int set)
{
  return k3_cuda_experts(launch, (K3CudaExperts *)context + set);
}

/* Rows [first, first + rows) of a synthetic tensor, in float64 times x. */
static void ref_synth_rows(K3Type type, K3SynthRule rule, int64_t first, int64_t rows, int64_t cols, const double *x,
                           double *y)
{
  int64_t blocks = cols / k3_format(type)->block_values;
  uint8_t *stored = (uint8_t *)malloc((size_t)(rows * k3_format_bytes(type, cols)));
  ref_fill(type, rule, first * blocks, rows * blocks, stored);
  ref_multiply(type, stored, rows, cols, x, y);
  free(stored);
}

/* favoured: that many of the last local experts get a large bias, -1: all local ones get a very low one. */
static void check_experts(K3Table *table, K3Type type, int exact, int experts, int chosen, int64_t first, int64_t local,
                          int64_t band, int64_t latent, int64_t hidden_size, int favoured, int time)
{
  int64_t shared = band;
  float *logits = k3_table_floats(table, experts, 1.0), *bias = k3_table_floats(table, experts, 0.05);
  float *y = k3_table_floats(table, latent, 1.0), *sg = k3_table_floats(table, shared, 1.5),
        *su = k3_table_floats(table, shared, 1.5);
  for (int64_t e = first; e < first + local; e++)
    if (favoured < 0) bias[e] = -10;
    else if (e >= first + local - favoured) bias[e] = 10;
  int32_t ids[K3_ROUTER_CHOSEN];
  double weights[K3_ROUTER_CHOSEN], *yd = (double *)malloc((size_t)latent * 8);
  for (int64_t i = 0; i < latent; i++) yd[i] = y[i];
  ref_route(logits, bias, experts, chosen, ids, weights);
  K3SynthRule rules[3] = {fresh_rule(table, latent), fresh_rule(table, latent), fresh_rule(table, band)};
  RefMatrix shared_down = ref_matrix(table, Q8, hidden_size, shared);
  K3CudaExperts *sets = (K3CudaExperts *)calloc(4, sizeof *sets), *g = &sets[0];
  g->y.kind = K3_INPUT_VALUES;
  g->y.n = latent;
  g->y.vector.values = (float *)k3_table_upload(y, latent * 4);
  g->gate = synth_matrix(type, local * band, latent, rules[0]);
  g->up = synth_matrix(type, local * band, latent, rules[1]);
  g->first = first;
  g->local = local;
  g->band = band;
  g->routing.experts = experts;
  g->routing.chosen = chosen;
  g->routing.logits = (float *)k3_table_upload(logits, experts * 4);
  g->routing.bias = (float *)k3_table_upload(bias, experts * 4);
  g->routing.scaling = 2.5f;
  g->routing.renormalize = 1;
  g->ids = (int32_t *)k3_table_poisoned(chosen * 4);
  g->weights = (float *)k3_table_poisoned(chosen * 4);
  g->hidden = (float *)k3_table_poisoned(chosen * band * 4);
  g->situ_beta = 4;
  g->situ_linear_beta = 25;
  g->exact = exact;
  g->down = synth_matrix(type, local * latent, band, rules[2]);
  g->z = (float *)k3_table_poisoned(latent * 4);
  g->meeting = (uint32_t *)k3_table_poisoned(k3_cuda_meeting_bytes(chosen, band, latent));
  g->shared.matrix = device_matrix(&shared_down);
  g->shared.y = (float *)k3_table_poisoned(hidden_size * 4);
  g->shared_input.kind = K3_INPUT_SITU;
  g->shared_input.n = shared;
  g->shared_input.vector.values = (float *)k3_table_upload(sg, shared * 4);
  g->shared_input.up = (float *)k3_table_upload(su, shared * 4);
  g->shared_input.situ_beta = 4;
  g->shared_input.situ_linear_beta = 25;
  /* gate and up */
  K3CudaUse use;
  K3CudaLaunch launch = plain_launch(table, &use);
  K3_CHECK_STATUS(k3_cuda_experts(&launch, g));
  int32_t *got_ids = (int32_t *)k3_table_download(g->ids, chosen * 4);
  float *hidden = (float *)k3_table_download(g->hidden, chosen * band * 4);
  double *want = (double *)malloc((size_t)(chosen * band) * 8 + 8), *u = (double *)malloc((size_t)band * 8);
  int here = 0;
  double local_weight[K3_ROUTER_CHOSEN];
  int64_t local_id[K3_ROUTER_CHOSEN];
  for (int k = 0; k < chosen; k++)
    if (ids[k] >= first && ids[k] < first + local) {
      double *to = want + here * band;
      local_weight[here] = weights[k];
      local_id[here] = ids[k] - first;
      ref_synth_rows(type, rules[0], local_id[here] * band, band, latent, yd, to);
      ref_synth_rows(type, rules[1], local_id[here] * band, band, latent, yd, u);
      for (int64_t r = 0; r < band; r++) to[r] = ref_situ(to[r], u[r]);
      here++;
    }
  double gate_error = k3_table_error(hidden, want, here * band), control = INFINITY;
  for (int k = 0; k < chosen; k++)
    if (got_ids[k] != ids[k]) gate_error = INFINITY;
  for (int64_t i = here * band; i < chosen * band; i++)
    if (hidden[i] == hidden[i]) gate_error = INFINITY; /* wrote past its experts */
  /* down, from the hidden vectors that the device made */
  float *z = (float *)k3_table_download(g->z, latent * 4),
        *shared_y = (float *)k3_table_download(g->shared.y, hidden_size * 4);
  double *want_z = (double *)calloc((size_t)latent, 8), *part = (double *)malloc((size_t)latent * 8),
         *h = (double *)malloc((size_t)band * 8);
  for (int k = 0; k < here; k++) {
    for (int64_t r = 0; r < band; r++) h[r] = hidden[k * band + r];
    ref_synth_rows(type, rules[2], local_id[k] * latent, latent, band, h, part);
    for (int64_t r = 0; r < latent; r++) want_z[r] += local_weight[k] * part[r];
  }
  double *want_shared = (double *)malloc((size_t)hidden_size * 8), down_error = k3_table_error(z, want_z, latent),
         down_control = INFINITY;
  for (int64_t r = 0; r < shared; r++) h[r] = ref_situ(sg[r], su[r]);
  ref_multiply(Q8, shared_down.stored, hidden_size, shared, h, want_shared);
  double shared_error = k3_table_error(shared_y, want_shared, hidden_size);
  int quantised = k3_format_is_quantised(type), tight = exact || !quantised;
  if (tight && here) { /* controls: a code byte in each of four rows of the first local expert */
    int64_t code_bits = type == K3_TYPE_F32     ? 32
                        : !quantised            ? 16
                        : type == Q8            ? 8
                        : type == K3_TYPE_MXFP4 ? 4
                                                : 1;
    int64_t top = type == K3_TYPE_F32 ? 3 : !quantised ? 1 : 0; /* the byte that holds the exponent */
    int64_t at = local_id[0] * band * latent * code_bits / 8 + top;       /* the same element of gate and of down */
    for (int k = 0; k < 4; k++) flip((const uint8_t *)g->down.codes + at + k * band * code_bits / 8, 0x77);
    K3_CHECK_STATUS(k3_cuda_experts(&launch, g));
    float *again = (float *)k3_table_download(g->z, latent * 4);
    down_control = k3_table_error(again, want_z, latent);
    for (int k = 0; k < 4; k++) flip((const uint8_t *)g->gate.codes + at + k * latent * code_bits / 8, 0x77);
    K3_CHECK_STATUS(k3_cuda_experts(&launch, g));
    free(again);
    again = (float *)k3_table_download(g->hidden, chosen * band * 4);
    control = k3_table_error(again, want, here * band);
    free(again);
  }
  double us = 0;
  if (table->time && time) {
    for (int s = 1; s < 4; s++) {
      sets[s] = *g;
      sets[s].gate = synth_matrix(type, local * band, latent, fresh_rule(table, latent));
      sets[s].up = synth_matrix(type, local * band, latent, fresh_rule(table, latent));
      sets[s].down = synth_matrix(type, local * latent, band, fresh_rule(table, band));
      sets[s].shared.matrix = synth_matrix(Q8, hidden_size, shared, fresh_rule(table, shared));
    }
    us = k3_table_microseconds(table, work_experts, sets, 4, 24);
    for (int s = 1; s < 4; s++) {
      free_matrix(&sets[s].gate), free_matrix(&sets[s].up), free_matrix(&sets[s].down);
      free_matrix(&sets[s].shared.matrix);
    }
  }
  char shape[96];
  double allowed = tight ? FLOAT_ALLOWED : CODES_ALLOWED;
  double gate_bytes = 2.0 * here * (double)k3_cuda_matrix_read_bytes(&g->gate, band);
  double down_bytes = here * (double)k3_cuda_matrix_read_bytes(&g->down, latent);
  double shared_bytes = (double)k3_cuda_matrix_read_bytes(&g->shared.matrix, hidden_size);
  snprintf(shape, sizeof shape, "%s %d/%d of %lld %lldx%lld %s", k3_format(type)->name, here, chosen, (long long)local,
           (long long)band, (long long)latent, tight ? "exact" : "int16");
  k3_table_row(table, shape, gate_error, allowed, control, &use, 0, 0);
  snprintf(shape, sizeof shape, "%s %d x %lldx%lld %s", k3_format(type)->name, here, (long long)latent, (long long)band,
           tight ? "exact" : "int16");
  k3_table_row(table, shape, down_error, allowed, down_control, &use, 0, 0);
  snprintf(shape, sizeof shape, " + shared %lldx%lld (time: all)", (long long)hidden_size, (long long)shared);
  k3_table_row(table, shape, shared_error, exact ? FLOAT_ALLOWED : CODES_ALLOWED, INFINITY, &use, us,
               gate_bytes + down_bytes + shared_bytes);
  free_matrix(&g->gate), free_matrix(&g->up), free_matrix(&g->down), free_matrix(&g->shared.matrix);
  free(logits), free(bias), free(y), free(sg), free(su), free(yd), free(got_ids), free(hidden), free(want), free(u),
      free(z);
  free(shared_y), free(want_z), free(part), free(h), free(want_shared), free(shared_down.stored), free(sets);
}

/* Ids and weights alone, of tiny experts. levels: many exact ties. */
static void check_routing(K3Table *table, int experts, int chosen, int levels)
{
  enum { WIDTH = 4 };
  float *logits = k3_table_floats(table, experts, 1.5), *bias = k3_table_floats(table, experts, 0.1),
        *y = k3_table_floats(table, WIDTH, 1.0);
  if (levels)
    for (int e = 0; e < experts; e++) logits[e] = rintf(logits[e] * levels / 4) / levels, bias[e] = 0;
  int32_t ids[K3_ROUTER_CHOSEN];
  double weights[K3_ROUTER_CHOSEN];
  ref_route(logits, bias, experts, chosen, ids, weights);
  K3CudaExperts a;
  memset(&a, 0, sizeof a);
  a.y.kind = K3_INPUT_VALUES, a.y.n = WIDTH, a.y.vector.values = (float *)k3_table_upload(y, WIDTH * 4);
  a.gate = synth_matrix(K3_TYPE_F32, experts * WIDTH, WIDTH, fresh_rule(table, WIDTH));
  a.up = synth_matrix(K3_TYPE_F32, experts * WIDTH, WIDTH, fresh_rule(table, WIDTH));
  a.down = synth_matrix(K3_TYPE_F32, experts * WIDTH, WIDTH, fresh_rule(table, WIDTH));
  a.local = experts, a.band = WIDTH;
  a.routing.experts = experts, a.routing.chosen = chosen, a.routing.scaling = 2.5f, a.routing.renormalize = 1;
  a.routing.logits = (float *)k3_table_upload(logits, experts * 4);
  a.routing.bias = (float *)k3_table_upload(bias, experts * 4);
  a.ids = (int32_t *)k3_table_poisoned(chosen * 4);
  a.weights = (float *)k3_table_poisoned(chosen * 4);
  a.hidden = (float *)k3_table_poisoned(chosen * WIDTH * 4);
  a.z = (float *)k3_table_poisoned(WIDTH * 4);
  a.meeting = (uint32_t *)k3_table_poisoned(k3_cuda_meeting_bytes(chosen, WIDTH, WIDTH));
  a.situ_beta = 4, a.situ_linear_beta = 25;
  K3CudaUse use;
  K3CudaLaunch launch = plain_launch(table, &use);
  double error[2];
  for (int pass = 0; pass < 2; pass++) { /* the second pass: the control, one logit raised */
    if (pass) {
      float top = 30.0f;
      K3_CHECK_CUDA(cudaMemcpy((void *)(a.routing.logits + ids[chosen - 1]), &top, 4, cudaMemcpyHostToDevice));
    }
    K3_CHECK_STATUS(k3_cuda_experts(&launch, &a));
    int32_t *got_ids = (int32_t *)k3_table_download(a.ids, chosen * 4);
    float *got = (float *)k3_table_download(a.weights, chosen * 4);
    error[pass] = k3_table_error(got, weights, chosen);
    for (int k = 0; k < chosen; k++)
      if (got_ids[k] != ids[k]) error[pass] = INFINITY;
    free(got_ids), free(got);
  }
  /* a NaN score or bias is not passed over: all weights, and z, are NaN */
  for (int where = 0; where < 2; where++) {
    float bad = NAN, good = where ? bias[experts / 2] : logits[experts / 2];
    float *at = (float *)(where ? a.routing.bias : a.routing.logits) + experts / 2;
    K3_CHECK_CUDA(cudaMemcpy(at, &bad, 4, cudaMemcpyHostToDevice));
    K3_CHECK_STATUS(k3_cuda_experts(&launch, &a));
    float *got = (float *)k3_table_download(a.weights, chosen * 4), *z = (float *)k3_table_download(a.z, WIDTH * 4);
    for (int k = 0; k < chosen; k++)
      if (got[k] == got[k]) error[0] = INFINITY;
    for (int k = 0; k < WIDTH; k++)
      if (z[k] == z[k]) error[0] = INFINITY;
    free(got), free(z);
    K3_CHECK_CUDA(cudaMemcpy(at, &good, 4, cudaMemcpyHostToDevice));
  }
  char shape[64];
  snprintf(shape, sizeof shape, "routing %d of %d%s", chosen, experts, levels ? " tied" : "");
  k3_table_row(table, shape, error[0], FLOAT_ALLOWED, error[1], &use, 0, 0);
  free_matrix(&a.gate), free_matrix(&a.up), free_matrix(&a.down);
  free(logits), free(bias), free(y);
}

void check_all_experts(K3Table *table)
{
  check_routing(table, 896, 16, 0);
  check_routing(table, 896, 16, 3);
  check_routing(table, 1024, 32, 0);
  check_routing(table, 8, 2, 0);
  check_routing(table, 33, 3, 2);
  check_experts(table, K3_TYPE_IQ1_S, 0, 896, 16, 448, 448, 768, 3584, 7168, 8, 1);
  check_experts(table, K3_TYPE_IQ1_S, 1, 896, 16, 448, 448, 768, 3584, 7168, 8, 0);
  check_experts(table, K3_TYPE_MXFP4, 0, 896, 16, 0, 448, 768, 3584, 7168, 8, 1);
  check_experts(table, K3_TYPE_MXFP4, 1, 896, 16, 0, 448, 768, 3584, 7168, 8, 0);
  check_experts(table, Q8, 0, 64, 16, 0, 64, 768, 3584, 7168, 8, 0);
  check_experts(table, Q8, 1, 64, 6, 10, 50, 96, 352, 640, 0, 0);
  check_experts(table, K3_TYPE_BF16, 0, 896, 16, 448, 448, 768, 3584, 7168, 8, 0);
  /* one rank alone: hidden vectors in float32 that do not fit a block's shared memory at once */
  static const K3Type wide[] = {K3_TYPE_F32, K3_TYPE_BF16, K3_TYPE_MXFP4, K3_TYPE_IQ1_S};
  for (size_t i = 0; i < sizeof wide / sizeof *wide; i++) check_experts(table, wide[i], 1, 64, 16, 0, 64, 3072, 512, 7168, 0, 0);
  /* rows of down whose pieces groups of blocks share (K3_EXPERTS_WHOLE); too few experts here for that; none */
  static const K3Type cut[] = {K3_TYPE_IQ1_S, K3_TYPE_MXFP4, Q8};
  for (size_t i = 0; i < sizeof cut / sizeof *cut; i++)
    for (int local = 64; local >= 8; local -= 56) check_experts(table, cut[i], 0, 64, 16, 0, local, 3072, 512, 7168, 0, 0);
  check_experts(table, K3_TYPE_IQ1_S, 0, 64, 16, 0, 32, 3072, 512, 7168, -1, 0);
  check_experts(table, K3_TYPE_F16, 0, 64, 6, 10, 50, 96, 352, 640, 0, 0);
  check_experts(table, K3_TYPE_F32, 0, 12, 3, 4, 8, 32, 64, 96, 0, 0);
  check_experts(table, K3_TYPE_IQ1_S, 0, 12, 5, 0, 12, 256, 512, 96, 0, 0);
  check_experts(table, K3_TYPE_MXFP4, 0, 12, 4, 6, 6, 32, 64, 128, -1, 0);
}
