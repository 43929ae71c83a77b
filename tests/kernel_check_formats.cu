/* kernel_check: every block format's products and experts against the host's decoder, at the shapes of Kimi K3. */
#include "kernels/experts.h"
#include "tests/kernel_device.h"

enum { MOST_TURNS = 32 };

typedef struct {
  K3CudaExperts experts[MOST_TURNS];
  K3CudaLinear linear[4];
} FormatSets;
static int through_blocks; /* q8_0 and mxfp4, which have kernels of their own, by those of the GGUF blocks */

static K3Status experts(const K3CudaLaunch *launch, const K3CudaExperts *e)
{
  if (!through_blocks) return k3_cuda_experts(launch, e);
  K3_TRY(k3_cuda_experts_gate_up_blocks(launch, e));
  return k3_cuda_experts_down_blocks(launch, e);
}
static K3Status work_experts(void *context, const K3CudaLaunch *launch, int set)
{
  return experts(launch, &((FormatSets *)context)->experts[set]);
}
static K3Status work_linear(void *context, const K3CudaLaunch *launch, int set)
{
  return k3_cuda_linear(launch, &((FormatSets *)context)->linear[set]);
}

/* ---- controls ---- */

/* Wrong order of nibbles in the last 16 bytes of block `block`'s codes. */
static void swap_nibbles(const K3CudaMatrix *m, int64_t block)
{
  uint8_t bytes[16], *at = (uint8_t *)m->codes + (block + 1) * k3_format(m->type)->codes.bytes - 16;
  K3_CHECK_CUDA(cudaMemcpy(bytes, at, 16, cudaMemcpyDeviceToHost));
  for (int i = 0; i < 16; i++) bytes[i] = (uint8_t)(bytes[i] >> 4 | bytes[i] << 4);
  K3_CHECK_CUDA(cudaMemcpy(at, bytes, 16, cudaMemcpyHostToDevice));
}

/* Another exponent in the scale of block `block`. */
static void change_scale(const K3CudaMatrix *m, int64_t block)
{
  const K3Format *f = k3_format(m->type);
  int in_codes = f->scale.bytes == 0; /* q4_k, q5_k */
  const K3BlockPart *part = in_codes ? &f->codes : &f->scale;
  int byte = m->type == K3_TYPE_MXFP4 ? 0 : m->type == K3_TYPE_IQ1_M ? 7 : f->scale_at + 1 - part->at;
  flip((const uint8_t *)(in_codes ? m->codes : m->scale) + block * part->bytes + byte,
       m->type == K3_TYPE_MXFP4 ? 1 : m->type == K3_TYPE_IQ1_M ? 0x10 : 0x04);
}

static double smaller(double a, double b) { return a < b ? a : b; } /* of two controls; a NaN in either counts as caught */

/* ---- products ---- */

static double run_product(const K3CudaLaunch *launch, const K3CudaLinear *linear, const float *before, int64_t rows, const double *want)
{
  K3_CHECK_CUDA(cudaMemcpy(linear->items[0].y, before, (size_t)rows * 4, cudaMemcpyHostToDevice));
  K3_CHECK_STATUS(k3_cuda_linear(launch, linear));
  float *got = (float *)k3_table_download(linear->items[0].y, rows * 4);
  double error = k3_table_error(got, want, rows);
  free(got);
  return error;
}

/* y += W x beside a q8_0 matrix in the same call. */
static void check_product(K3Table *table, K3Type type, int exact, int64_t rows, int64_t cols, int time)
{
  RefMatrix m = ref_matrix(table, type, rows, cols), beside = ref_matrix(table, Q8, 33, cols);
  int64_t all = rows + 33, blocks = cols / k3_format(type)->block_values;
  float *x = k3_table_floats(table, cols, 1.0), *before = k3_table_floats(table, all, 1.0), *scales = (float *)malloc((size_t)cols / 8);
  int8_t *codes = (int8_t *)malloc((size_t)cols * 2);
  double *meant = (double *)malloc((size_t)cols * 8), *want = (double *)malloc((size_t)all * 8);
  ref_quantise(x, cols, codes, scales, meant);
  for (int64_t i = 0; exact && i < cols; i++) meant[i] = x[i];
  ref_multiply(type, m.stored, rows, cols, meant, want);
  ref_multiply(Q8, beside.stored, 33, cols, meant, want + rows);
  for (int64_t i = 0; i < all; i++) want[i] += before[i];
  FormatSets *sets = (FormatSets *)calloc(1, sizeof *sets);
  K3CudaLinear *linear = &sets->linear[0];
  float *y = (float *)k3_table_poisoned(all * 4);
  linear->count = 2;
  linear->exact = exact;
  linear->input.kind = K3_INPUT_QUANTISED;
  linear->input.n = cols;
  linear->input.vector.values = (float *)k3_table_upload(x, cols * 4);
  linear->input.vector.codes = (int8_t *)k3_table_upload(codes, cols * 2);
  linear->input.vector.scales = (float *)k3_table_upload(scales, cols / 8);
  linear->items[0] = K3CudaLinearItem{device_matrix(&m), y, 1};
  linear->items[1] = K3CudaLinearItem{device_matrix(&beside), y + rows, 1};
  K3CudaUse use;
  K3CudaLaunch launch = plain_launch(table, &use);
  double error = run_product(&launch, linear, before, all, want), us = 0;
  if (table->time && time) {
    for (int s = 0; s < 4; s++) {
      sets->linear[s] = *linear;
      sets->linear[s].count = 1;
      if (s) sets->linear[s].items[0].matrix = synth_matrix(type, rows, cols, fresh_rule(table, cols));
    }
    us = k3_table_microseconds(table, work_linear, sets, 4, 24);
    for (int s = 1; s < 4; s++) free_matrix(&sets->linear[s].items[0].matrix);
  }
  const K3CudaMatrix *d = &linear->items[0].matrix;
  double bytes = (double)k3_cuda_matrix_read_bytes(d, rows);
  for (int64_t r = 0; r < 4; r++) swap_nibbles(d, (rows - 1 - r) * blocks);
  double control = run_product(&launch, linear, before, all, want);
  for (int64_t r = 0; r < 4; r++) swap_nibbles(d, (rows - 1 - r) * blocks), change_scale(d, (rows - 1 - r) * blocks);
  control = smaller(control, run_product(&launch, linear, before, all, want));
  K3CudaLinear alone = *linear; /* for the row: registers of this format's kernel, not of the q8_0 beside it */
  alone.count = 1;
  K3_CHECK_STATUS(k3_cuda_linear(&launch, &alone));
  char shape[96];
  snprintf(shape, sizeof shape, "%s %lldx%lld %s", k3_format(type)->name, (long long)rows, (long long)cols, exact ? "exact" : "codes");
  k3_table_row(table, shape, error, FLOAT_ALLOWED, control, &use, us, bytes);
  void *device[] = {linear->input.vector.values, linear->input.vector.codes, linear->input.vector.scales, y};
  for (size_t i = 0; i < sizeof device / sizeof *device; i++) K3_CHECK_CUDA(cudaFree(device[i]));
  free_matrix(d), free_matrix(&linear->items[1].matrix);
  free(m.stored), free(beside.stored), free(x), free(before), free(scales), free(codes), free(meant), free(want), free(sets);
}

/* ---- experts ---- */

static void ref_rows(K3Type type, K3SynthRule rule, int64_t first, int64_t rows, int64_t cols, const double *x, double *y)
{
  int64_t blocks = cols / k3_format(type)->block_values;
  uint8_t *stored = (uint8_t *)malloc((size_t)(rows * k3_format_bytes(type, cols)));
  ref_fill(type, rule, first * blocks, rows * blocks, stored);
  ref_multiply(type, stored, rows, cols, x, y);
  free(stored);
}

enum { Z_ROWS = 32 }; /* of z, at both ends each, that are compared */

/* hidden of the first and last local expert, and both ends of z, from the hidden vectors that the device made. */
typedef struct {
  double *hidden, *z;
  int64_t local_id[K3_ROUTER_CHOSEN];
  double weight[K3_ROUTER_CHOSEN];
  int here;
} Wanted;

static double hidden_error(const K3CudaLaunch *launch, const K3CudaExperts *g, const Wanted *w)
{
  K3_CHECK_STATUS(experts(launch, g));
  float *hidden = (float *)k3_table_download(g->hidden, g->routing.chosen * g->band * 4);
  double first = k3_table_error(hidden, w->hidden, g->band);
  double last = k3_table_error(hidden + (w->here - 1) * g->band, w->hidden + g->band, g->band);
  free(hidden);
  return first > last || first != first ? first : last;
}

static double z_error(const K3CudaLaunch *launch, const K3CudaExperts *g, const Wanted *w)
{
  K3_CHECK_CUDA(cudaMemset(g->z, 0xff, (size_t)g->y.n * 4));
  K3_CHECK_STATUS(experts(launch, g));
  float *z = (float *)k3_table_download(g->z, g->y.n * 4);
  memmove(z + Z_ROWS, z + g->y.n - Z_ROWS, Z_ROWS * 4);
  double error = k3_table_error(z, w->z, 2 * Z_ROWS);
  free(z);
  return error;
}

/* Gate and down of `type`; `here` of `chosen` experts are among the `local` ones. */
static void check_format(K3Table *table, K3Type type, K3Type up_type, int exact, int chosen, int here, int64_t local, int64_t band,
                         int64_t latent, int time)
{
  FormatSets *sets = (FormatSets *)calloc(1, sizeof *sets);
  K3CudaExperts *g = &sets->experts[0];
  Wanted w = {(double *)malloc((size_t)band * 16), (double *)calloc(2 * Z_ROWS, 8), {0}, {0}, 0};
  float *y = k3_table_floats(table, latent, 1.0);
  double *yd = (double *)malloc((size_t)latent * 8), *u = (double *)malloc((size_t)band * 8), *part = (double *)malloc(Z_ROWS * 8);
  int32_t ids[K3_ROUTER_CHOSEN];
  float weights[K3_ROUTER_CHOSEN];
  int routed = (int)(100 + local);
  float *logits = (float *)malloc((size_t)routed * 4), *bias = (float *)calloc((size_t)routed, 4);
  for (int e = 0; e < routed; e++) logits[e] = -10;
  for (int k = 0; k < chosen; k++) { /* distinct, in falling order of their scores */
    int is_local = k * here / chosen != (k + 1) * here / chosen;
    ids[k] = (int32_t)(is_local ? 100 + (int64_t)w.here * local / here : 5 + k);
    logits[ids[k]] = 1.0f - 0.1f * (float)k;
    weights[k] = (float)(1 / (1 + exp(-(double)logits[ids[k]])));
    if (!is_local) continue;
    w.local_id[w.here] = ids[k] - 100;
    w.weight[w.here++] = weights[k];
  }
  for (int64_t i = 0; i < latent; i++) yd[i] = y[i];
  if (!exact) {
    int8_t *codes = (int8_t *)malloc((size_t)latent * 2);
    float *scales = (float *)malloc((size_t)latent / 8);
    ref_quantise(y, latent, codes, scales, yd);
    free(codes), free(scales);
  }
  K3SynthRule rules[3] = {fresh_rule(table, latent), fresh_rule(table, latent), fresh_rule(table, band)};
  g->y.kind = K3_INPUT_VALUES;
  g->y.n = latent;
  g->y.vector.values = (float *)k3_table_upload(y, latent * 4);
  g->gate = synth_matrix(type, local * band, latent, rules[0]);
  g->up = synth_matrix(up_type, local * band, latent, rules[1]);
  g->first = 100;
  g->local = local;
  g->band = band;
  g->routing.experts = routed;
  g->routing.chosen = chosen;
  g->routing.logits = (float *)k3_table_upload(logits, routed * 4);
  g->routing.bias = (float *)k3_table_upload(bias, routed * 4);
  g->routing.scaling = 1;
  g->ids = (int32_t *)k3_table_poisoned(chosen * 4);
  g->weights = (float *)k3_table_poisoned(chosen * 4);
  g->meeting = (uint32_t *)k3_table_poisoned(k3_cuda_meeting_bytes(chosen, band, latent));
  g->hidden = (float *)k3_table_poisoned(chosen * band * 4);
  g->situ_beta = 4;
  g->situ_linear_beta = 25;
  g->exact = exact;
  g->down = synth_matrix(type, local * latent, band, rules[2]);
  g->z = (float *)k3_table_poisoned(latent * 4);
  for (int k = 0; k < 2; k++) {
    int64_t first = w.local_id[k ? w.here - 1 : 0] * band;
    ref_rows(type, rules[0], first, band, latent, yd, w.hidden + k * band);
    ref_rows(up_type, rules[1], first, band, latent, yd, u);
    for (int64_t r = 0; r < band; r++) w.hidden[k * band + r] = ref_situ(w.hidden[k * band + r], u[r]);
  }
  K3CudaUse use;
  K3CudaLaunch launch = plain_launch(table, &use);
  double gate_error = hidden_error(&launch, g, &w);
  float *hidden = (float *)k3_table_download(g->hidden, chosen * band * 4);
  for (int64_t i = here * band; i < chosen * band; i++)
    if (hidden[i] == hidden[i]) gate_error = INFINITY; /* wrote past its experts */
  for (int k = 0; k < w.here; k++)
    for (int end = 0; end < 2; end++) {
      int8_t *codes = (int8_t *)malloc((size_t)band * 2);
      float *scales = (float *)malloc((size_t)band / 8), *scaled = (float *)malloc((size_t)band * 4);
      double *h = (double *)malloc((size_t)band * 8);
      for (int64_t r = 0; r < band; r++) h[r] = scaled[r] = hidden[k * band + r] * (float)w.weight[k];
      if (!exact) ref_quantise(scaled, band, codes, scales, h);
      ref_rows(type, rules[2], w.local_id[k] * latent + (end ? latent - Z_ROWS : 0), Z_ROWS, band, h, part);
      for (int r = 0; r < Z_ROWS; r++) w.z[end * Z_ROWS + r] += part[r];
      free(codes), free(scales), free(scaled), free(h);
    }
  double down_error = z_error(&launch, g, &w), us = 0;
  if (table->time && time) {
    /* each launch takes other experts, local / here times: what they weigh together passes the L2 */
    int turns = (int)(local / here);
    for (int s = 1; s < turns; s++) {
      float *others = (float *)malloc((size_t)routed * 4);
      memcpy(others, logits, (size_t)routed * 4);
      for (int k = 0; k < w.here; k++) others[100 + w.local_id[k]] = -10;
      for (int k = 0; k < w.here; k++) others[100 + w.local_id[k] + s] = logits[100 + w.local_id[k]];
      sets->experts[s] = *g;
      sets->experts[s].routing.logits = (float *)k3_table_upload(others, routed * 4);
      free(others);
    }
    us = k3_table_microseconds(table, work_experts, sets, turns, turns < 24 ? turns * 4 : turns);
    for (int s = 1; s < turns; s++) K3_CHECK_CUDA(cudaFree((void *)sets->experts[s].routing.logits));
  }
  /* controls: blocks of four rows of the last local expert */
  int64_t blocks_u = latent / k3_format(up_type)->block_values, blocks_h = band / k3_format(type)->block_values;
  int64_t last = w.local_id[w.here - 1], up_at = last * band * blocks_u, down_at = last * latent * blocks_h;
  double gate_control = INFINITY, down_control = INFINITY;
  for (int kind = 0; kind < 2; kind++) {
    void (*change)(const K3CudaMatrix *, int64_t) = kind ? change_scale : swap_nibbles;
    for (int r = 0; r < 4; r++) change(&g->down, down_at + r * blocks_h);
    down_control = smaller(down_control, z_error(&launch, g, &w));
    for (int r = 0; r < 4; r++) change(&g->down, down_at + r * blocks_h), change(&g->up, up_at + r * blocks_u);
    gate_control = smaller(gate_control, hidden_error(&launch, g, &w));
    for (int r = 0; r < 4; r++) change(&g->up, up_at + r * blocks_u);
  }
  char shape[96], name[32];
  snprintf(name, sizeof name, "%s%s%s", k3_format(type)->name, type == up_type ? "" : "/", type == up_type ? "" : k3_format(up_type)->name);
  const char *mode = exact ? "exact" : "codes";
  /* hidden vectors are made into codes from the sums of float32, so a code may fall on the other side of a half */
  double allowed = exact ? FLOAT_ALLOWED : 1e-5;
  snprintf(shape, sizeof shape, "%s %d x 2x%lldx%lld %s", name, here, (long long)band, (long long)latent, mode);
  k3_table_row(table, shape, gate_error, FLOAT_ALLOWED, gate_control, &use, 0, 0);
  snprintf(shape, sizeof shape, "%s %d x %lldx%lld %s", name, here, (long long)latent, (long long)band, mode);
  k3_table_row(table, shape, down_error, allowed, down_control, &use, us,
               here * ((double)k3_cuda_matrix_read_bytes(&g->gate, band) + (double)k3_cuda_matrix_read_bytes(&g->up, band) + (double)k3_cuda_matrix_read_bytes(&g->down, latent)));
  free_matrix(&g->gate), free_matrix(&g->up), free_matrix(&g->down);
  void *device[] = {g->y.vector.values, g->ids, g->weights, g->hidden, g->z, g->meeting, (void *)g->routing.logits, (void *)g->routing.bias};
  for (size_t i = 0; i < sizeof device / sizeof *device; i++) K3_CHECK_CUDA(cudaFree(device[i]));
  free(w.hidden), free(w.z), free(y), free(yd), free(u), free(part), free(hidden), free(logits), free(bias), free(sets);
}

void check_all_formats(K3Table *table, const char *only)
{
  for (int t = 0; t < K3_TYPE_COUNT; t++) {
    K3Type type = (K3Type)t;
    if (!k3_format_is_quantised(type) || (only && strcmp(only, k3_format(type)->name) != 0)) continue;
    for (int exact = 0; exact < 2; exact++) {
      check_product(table, type, exact, 301, 512, 0);
      check_format(table, type, type, exact, 6, 3, 7, 256, 768, 0);
    }
  }
  static const K3Type pairs[][2] = {{K3_TYPE_IQ4_NL, K3_TYPE_Q4_1}, {K3_TYPE_IQ4_XS, K3_TYPE_Q5_K}, {K3_TYPE_Q2_K, K3_TYPE_IQ4_NL}};
  for (size_t i = 0; !only && i < sizeof pairs / sizeof *pairs; i++)
    for (int exact = 0; exact < 2; exact++) check_format(table, pairs[i][0], pairs[i][1], exact, 6, 3, 7, 256, 768, 0);
  /* K3: a trunk product of one of eight ranks; the experts of one of eight ranks (8 of 16 are in its group), and of one rank alone */
  static const K3Type trunk[] = {Q8, K3_TYPE_Q4_K, K3_TYPE_Q5_K, K3_TYPE_Q6_K, K3_TYPE_IQ4_XS};
  for (size_t i = 0; i < sizeof trunk / sizeof *trunk; i++)
    if (!only || strcmp(only, k3_format(trunk[i])->name) == 0) check_product(table, trunk[i], 0, 6284, 7168, 1);
  static const K3Type experts[] = {K3_TYPE_MXFP4, K3_TYPE_IQ1_S, K3_TYPE_IQ1_M, K3_TYPE_IQ2_XXS, K3_TYPE_IQ2_XS, K3_TYPE_IQ2_S,
                                   K3_TYPE_IQ3_XXS, K3_TYPE_IQ4_XS, K3_TYPE_Q2_K, K3_TYPE_Q3_K, K3_TYPE_Q4_K, K3_TYPE_Q5_K,
                                   K3_TYPE_Q6_K, K3_TYPE_Q8_0};
  for (size_t i = 0; i < sizeof experts / sizeof *experts; i++) {
    if (only && strcmp(only, k3_format(experts[i])->name) != 0) continue;
    for (through_blocks = 0; through_blocks <= (experts[i] == K3_TYPE_MXFP4); through_blocks++) {
      check_format(table, experts[i], experts[i], 0, 16, 8, 8 * MOST_TURNS, 768, 3584, 1);
      check_format(table, experts[i], experts[i], 0, 16, 16, 96, 3072, 3584, 1);
    }
    through_blocks = 0;
  }
}
