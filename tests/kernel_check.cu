/* kernel_check: every kernel against float64, with a negative control each, and its time. Built only with CUDA.
 *
 *     kernel_check [--seed N] [--no-time] [--pdl 0|1] [--only NAME]  [--tune]
 *
 * Rows named "int16" compare with float64 on the unquantised activation (the format's own error); rows named "codes" or
 * "exact" compare with float64 on the very values that the kernel was given, at float32 level, and bear the control:
 * one perturbed weight or input, which must exceed the bound. Outputs are NaN before each run.
 * Exit status: 0 all rows right, 1 otherwise. */
#include <time.h>

#include "kernels/head.h"
#include "kernels/norm.h"
#include "tests/kernel_device.h"

int8_t ref_grid[K3_CODEBOOK_ENTRIES][8];
uint32_t *d_codebook, *d_books[K3_CODEBOOK_COUNT];
uint32_t ref_books[K3_CODEBOOK_COUNT][K3_CODEBOOK_MOST_WORDS + 256];
cudaStream_t check_stream; /* blocking: in order with the plain copies */

static const uint32_t *codebook_of(K3Type type)
{
  int id = k3_codebook_of(type);
  return id < 0 ? NULL : k3_cuda_is_blocks(type) ? d_books[id] : d_codebook;
}

/* A matrix on the device, by way of repack. */
K3CudaMatrix device_matrix(const RefMatrix *m)
{
  K3CudaMatrix matrix;
  K3CudaLaunch launch;
  K3_CHECK_STATUS(k3_cuda_launch_init(check_stream, 0, &launch));
  void *memory = k3_table_poisoned(k3_cuda_matrix_bytes(m->type, m->rows, m->cols));
  K3_CHECK_STATUS(k3_cuda_matrix_place(m->type, m->rows, m->cols, memory, codebook_of(m->type), &matrix));
  void *staged = k3_table_upload(m->stored, m->rows * m->row_bytes);
  K3CudaRepack repack = {matrix, 0, m->rows, staged};
  K3_CHECK_STATUS(k3_cuda_repack(&launch, &repack));
  K3_CHECK_CUDA(cudaDeviceSynchronize());
  K3_CHECK_CUDA(cudaFree(staged));
  return matrix;
}

/* A matrix on the device, made there. */
K3CudaMatrix synth_matrix(K3Type type, int64_t rows, int64_t cols, K3SynthRule rule)
{
  K3CudaMatrix matrix;
  K3CudaLaunch launch;
  K3_CHECK_STATUS(k3_cuda_launch_init(check_stream, 0, &launch));
  void *memory = k3_table_poisoned(k3_cuda_matrix_bytes(type, rows, cols));
  K3_CHECK_STATUS(k3_cuda_matrix_place(type, rows, cols, memory, codebook_of(type), &matrix));
  K3CudaSynth synth = {matrix, rule, 0, rows, 0, rows, 0, 0, cols};
  K3_CHECK_STATUS(k3_cuda_synth(&launch, &synth));
  K3_CHECK_CUDA(cudaDeviceSynchronize());
  return matrix;
}

K3SynthRule fresh_rule(K3Table *table, int64_t cols)
{
  K3SynthRule rule = {k3_table_bits(table), 0.0f, (float)(1.0 / sqrt((double)cols))};
  return rule;
}

void free_matrix(const K3CudaMatrix *m) { K3_CHECK_CUDA(cudaFree((void *)m->codes)); }

void flip(const void *device, uint8_t mask)
{
  uint8_t byte;
  K3_CHECK_CUDA(cudaMemcpy(&byte, device, 1, cudaMemcpyDeviceToHost));
  byte ^= mask;
  K3_CHECK_CUDA(cudaMemcpy((void *)device, &byte, 1, cudaMemcpyHostToDevice));
}

K3CudaLaunch plain_launch(K3Table *table, K3CudaUse *use)
{
  K3CudaLaunch launch;
  K3_CHECK_STATUS(k3_cuda_launch_init(check_stream, table->pdl, &launch));
  launch.phase = "check";
  launch.use = use;
  return launch;
}

/* Float64 routing, ids by s + bias with ties to the lower index. */
void ref_route(const float *logits, const float *bias, int experts, int chosen, int32_t *ids, double *weights)
{
  double *score = (double *)malloc((size_t)experts * 8), sum = 0;
  char *taken = (char *)calloc((size_t)experts, 1);
  for (int e = 0; e < experts; e++) score[e] = 1 / (1 + exp(-(double)logits[e]));
  for (int k = 0; k < chosen; k++) {
    int best = -1;
    for (int e = 0; e < experts; e++)
      if (!taken[e] && (best < 0 || (float)((float)score[e] + bias[e]) > (float)((float)score[best] + bias[best]))) best = e;
    taken[best] = 1;
    ids[k] = best;
    sum += score[best];
  }
  for (int k = 0; k < chosen; k++) weights[k] = score[ids[k]] / (sum + 1e-20) * 2.5;
  free(score), free(taken);
}

/* ---------------------------------------------------------------- filling */

/* repack of host blocks and the device's own synthesis give the same bytes, for a band of a larger tensor too. */
static void check_fill(K3Table *table)
{
  for (int t = 0; t < K3_TYPE_COUNT; t++) {
    K3Type type = (K3Type)t;
    int64_t values = k3_format(type)->block_values, unit = values > 1 ? values : 16;
    int64_t full_cols = 5 * unit, cols = 3 * unit, first_col = unit, rows = 14, bytes;
    RefMatrix whole = ref_matrix(table, type, 100, full_cols), band = whole;
    whole.rule.mean = 0.25f;
    ref_fill(type, whole.rule, 0, 100 * full_cols / values, whole.stored);
    band.rows = rows;
    band.cols = cols;
    band.row_bytes = k3_format_bytes(type, cols);
    band.stored = (uint8_t *)malloc((size_t)(rows * band.row_bytes));
    for (int64_t r = 0; r < rows; r++) /* slabs of 7 rows, 20 apart, from row 3 */
      memcpy(band.stored + r * band.row_bytes,
             whole.stored + (3 + r / 7 * 20 + r % 7) * whole.row_bytes + k3_format_bytes(type, first_col),
             (size_t)band.row_bytes);
    K3CudaMatrix repacked = device_matrix(&band), made;
    bytes = k3_cuda_matrix_bytes(type, rows, cols);
    void *memory = k3_table_poisoned(bytes);
    K3_CHECK_STATUS(k3_cuda_matrix_place(type, rows, cols, memory, codebook_of(type), &made));
    K3CudaUse use;
    K3CudaLaunch launch = plain_launch(table, &use);
    K3CudaSynth synth = {made, whole.rule, 0, rows, 3, 7, 20, first_col, full_cols};
    K3_CHECK_STATUS(k3_cuda_synth(&launch, &synth));
    uint8_t *a = (uint8_t *)k3_table_download(repacked.codes, bytes), *b = (uint8_t *)k3_table_download(memory, bytes);
    int64_t wrong = 0, control = 0;
    for (int64_t i = 0; i < bytes; i++) wrong += a[i] != b[i];
    synth.rule.key ^= 1;
    K3_CHECK_STATUS(k3_cuda_synth(&launch, &synth));
    free(b);
    b = (uint8_t *)k3_table_download(memory, bytes);
    for (int64_t i = 0; i < bytes; i++) control += a[i] != b[i];
    char shape[64];
    snprintf(shape, sizeof shape, "%s band 14x%d, wrong bytes", k3_format(type)->name, (int)cols);
    k3_table_row(table, shape, (double)wrong, 0, (double)control, &use, 0, 0);
    free(a), free(b), free(whole.stored), free(band.stored);
    K3_CHECK_CUDA(cudaFree(memory));
    free_matrix(&repacked);
  }
}

/* ---------------------------------------------------------------- norm */

enum { SUBLAYERS = 3, OWN = 1 /* the one of them that is normed */ };

/* Scores over the bank and, where `v` is not NULL, over v: h, or the bank's part (most, total, the weighted sum). */
static void ref_mix(const float *bank, int banked, const double *v, const float *w, const float *u, int64_t n, double *most,
                    double *total, double *h)
{
  double score[K3_NORM_BANK + 1];
  int all = banked + (v != NULL);
  *most = -INFINITY, *total = 0;
  for (int j = 0; j < all; j++) {
    double dot = 0, q = 0;
    for (int64_t i = 0; i < n; i++) {
      double x = j < banked ? (double)bank[j * n + i] : v[i];
      dot += (double)u[i] * w[i] * x;
      q += x * x;
    }
    score[j] = dot / sqrt(q / (double)n + 1e-5);
    *most = fmax(*most, score[j]);
  }
  for (int j = 0; j < all; j++) *total += exp(score[j] - *most);
  for (int64_t i = 0; i < n; i++) h[i] = 0;
  for (int j = 0; j < all; j++)
    for (int64_t i = 0; i < n; i++) h[i] += exp(score[j] - *most) * (j < banked ? (double)bank[j * n + i] : v[i]);
}

static K3Status work_bank(void *context, const K3CudaLaunch *launch, int set)
{
  (void)set;
  return k3_cuda_mix_bank(launch, (K3CudaBank *)context);
}

static K3Status work_norm(void *context, const K3CudaLaunch *launch, int set)
{
  (void)set;
  return k3_cuda_norm(launch, (K3CudaNorm *)context);
}

/* The bank's part for all sublayers, left on the device; w, u [SUBLAYERS][n]. */
static void check_bank(K3Table *table, K3CudaBank *mix, const float *bank, const float *w, const float *u, const char *shape)
{
  int64_t n = mix->n;
  double error = 0, control = INFINITY, *h = (double *)malloc((size_t)n * 8), most, total;
  K3CudaUse use;
  K3CudaLaunch launch = plain_launch(table, &use);
  for (int pass = 1; pass >= 0; pass--) { /* control first: one element moved */
    float element = bank[n / 2] + 0.5f * (float)pass;
    K3_CHECK_CUDA(cudaMemcpy((float *)mix->bank + n / 2, &element, 4, cudaMemcpyHostToDevice));
    K3_CHECK_CUDA(cudaMemset(mix->mixed, 0xff, (size_t)(SUBLAYERS * n) * 4));
    K3_CHECK_CUDA(cudaMemset(mix->mix, 0xff, SUBLAYERS * K3_NORM_MIX * 4));
    K3_CHECK_STATUS(k3_cuda_mix_bank(&launch, mix));
    float *got = (float *)k3_table_download(mix->mixed, SUBLAYERS * n * 4);
    float *sums = (float *)k3_table_download(mix->mix, SUBLAYERS * K3_NORM_MIX * 4);
    for (int k = 0; k < SUBLAYERS; k++) {
      double square = 0;
      ref_mix(bank, mix->banked, NULL, w + k * n, u + k * n, n, &most, &total, h);
      for (int64_t i = 0; i < n; i++) square += h[i] * h[i];
      double want[K3_NORM_MIX] = {most, total, square}, e = k3_table_error(got + k * n, h, n);
      for (int i = 0; i < K3_NORM_MIX; i++) e = fmax(e, fabs(sums[k * K3_NORM_MIX + i] - want[i]) / fmax(1, fabs(want[i])));
      if (pass) control = fmin(control, e);
      else if (!(e <= error) || sums[k * K3_NORM_MIX] != sums[k * K3_NORM_MIX]) error = e;
    }
    free(got), free(sums);
  }
  double us = table->time ? k3_table_microseconds(table, work_bank, mix, 1, 20) : 0;
  k3_table_row(table, shape, error, FLOAT_ALLOWED, control, &use, us, (mix->banked + 2.0) * SUBLAYERS * (double)n * 4);
  free(h);
}

/* opposed: p' nearly cancels the bank's part, so that |h|² is small beside its terms. */
static void check_norm(K3Table *table, int64_t n, int banked, int branch, int replace, int append, int opposed)
{
  float *bank = k3_table_floats(table, (banked + 1) * n, 1.0), *p = k3_table_floats(table, n, 2.0), *b = k3_table_floats(table, n, 1.0);
  float *w = k3_table_floats(table, SUBLAYERS * n, 1.0), *u = k3_table_floats(table, SUBLAYERS * n, (opposed ? 1e-3 : 0.7) / sqrt((double)n));
  float *norm = k3_table_floats(table, n, 1.0);
  double *after = (double *)malloc((size_t)n * 8), *h = (double *)calloc((size_t)n, 8), *x = (double *)malloc((size_t)n * 8);
  double most, total, square = 0;
  for (int64_t i = 0; i < n && opposed; i++) { /* weights are near 1 each: h is about a hundredth of them */
    double sum = 0;
    for (int j = 0; j < banked; j++) sum += bank[j * n + i];
    b[i] = (float)(-sum) + 0.01f * b[i] - (replace ? 0.0f : p[i]);
  }
  for (int64_t i = 0; i < n; i++) after[i] = branch ? (replace ? (double)b[i] : (double)p[i] + b[i]) : p[i];
  ref_mix(bank, banked, after, w + OWN * n, u + OWN * n, n, &most, &total, h);
  for (int64_t i = 0; i < n; i++) h[i] /= total, square += h[i] * h[i];
  for (int64_t i = 0; i < n; i++) x[i] = norm[i] * h[i] / sqrt(square / (double)n + 1e-6);
  char shape[64];
  snprintf(shape, sizeof shape, "%lld bank %d%s%s%s%s", (long long)n, banked, branch ? " +branch" : "", replace ? " replace" : "",
           append ? " append" : "", opposed ? " opposed" : "");
  float *d_w = (float *)k3_table_upload(w, SUBLAYERS * n * 4), *d_u = (float *)k3_table_upload(u, SUBLAYERS * n * 4);
  float *d_score = (float *)k3_table_poisoned(SUBLAYERS * n * 4);
  K3CudaUse use;
  K3CudaLaunch launch = plain_launch(table, &use);
  K3_CHECK_STATUS(k3_cuda_norm_score(&launch, d_w, d_u, SUBLAYERS * n, d_score));
  K3CudaBank mix;
  memset(&mix, 0, sizeof mix);
  mix.n = n, mix.banked = banked, mix.count = SUBLAYERS, mix.eps = 1e-5f;
  mix.bank = (float *)k3_table_upload(bank, (banked + 1) * n * 4);
  mix.mixed = (float *)k3_table_poisoned(SUBLAYERS * n * 4), mix.mix = (float *)k3_table_poisoned(SUBLAYERS * K3_NORM_MIX * 4);
  for (int k = 0; k < SUBLAYERS; k++) mix.score[k] = d_score + k * n;
  if (banked) check_bank(table, &mix, bank, w, u, shape);
  K3CudaNorm a;
  memset(&a, 0, sizeof a);
  a.n = n;
  a.mixed = banked ? mix.mixed + OWN * n : NULL;
  a.mix = banked ? mix.mix + OWN * K3_NORM_MIX : NULL;
  a.p = (float *)k3_table_upload(p, n * 4);
  a.banked = append ? (float *)mix.bank + banked * n : NULL;
  a.branch = branch ? (float *)k3_table_upload(b, n * 4) : NULL;
  a.replace = replace;
  a.early = 1;
  a.score = banked ? d_score + OWN * n : NULL;
  a.norm = (float *)k3_table_upload(norm, n * 4);
  a.res_eps = 1e-5f;
  a.eps = 1e-6f;
  a.x.values = (float *)k3_table_poisoned(n * 4);
  if (n % 32 == 0) {
    a.x.codes = (int8_t *)k3_table_poisoned(2 * n);
    a.x.scales = (float *)k3_table_poisoned(n / 32 * 4);
  }
  double error = 0, code_error = 0, control = 0;
  for (int pass = 0; pass < 2; pass++) {
    K3_CHECK_CUDA(cudaMemcpy(a.p, p, (size_t)n * 4, cudaMemcpyHostToDevice));
    if (pass) { /* control: one input element moved */
      float *at = (branch ? (float *)a.branch : a.p) + n / 2, moved = (branch ? b[n / 2] : p[n / 2]) + 0.5f;
      K3_CHECK_CUDA(cudaMemcpy(at, &moved, 4, cudaMemcpyHostToDevice));
    }
    K3_CHECK_CUDA(cudaDeviceSynchronize());
    K3_CHECK_STATUS(k3_cuda_norm(&launch, &a));
    float *got = (float *)k3_table_download(a.x.values, n * 4), *got_p = (float *)k3_table_download(a.p, n * 4);
    float *got_bank = (float *)k3_table_download(mix.bank, (banked + 1) * n * 4);
    double e = k3_table_error(got, x, n);
    if (pass) control = e;
    else {
      error = e;
      double p_error = k3_table_error(got_p, after, n), kept = append ? k3_table_error(got_bank + banked * n, after, n) : 0;
      if (!(p_error < 1e-6)) error = INFINITY;
      if (!(kept < 1e-6) || memcmp(got_bank, bank, (size_t)(banked * n) * 4)) error = INFINITY;
      if (a.x.codes) {
        int8_t *codes = (int8_t *)k3_table_download(a.x.codes, 2 * n);
        float *scales = (float *)k3_table_download(a.x.scales, n / 32 * 4), *meant = (float *)malloc((size_t)n * 4);
        for (int64_t i = 0; i < n; i++) meant[i] = scales[i / 32] * (float)(256 * codes[i] + codes[n + i]);
        code_error = k3_table_error(meant, x, n);
        free(codes), free(scales), free(meant);
      }
    }
    free(got), free(got_p), free(got_bank);
  }
  double us = table->time ? k3_table_microseconds(table, work_norm, &a, 1, 20) : 0;
  k3_table_row(table, shape, error, opposed ? 100 * FLOAT_ALLOWED : FLOAT_ALLOWED, control, &use, us, 7.0 * (double)n * 4);
  if (a.x.codes) k3_table_row(table, "  its codes", code_error, opposed ? 100 * FLOAT_ALLOWED : CODES_ALLOWED, INFINITY, &use, 0, 0);
  free(bank), free(p), free(b), free(w), free(u), free(norm), free(after), free(h), free(x);
}

/* ---------------------------------------------------------------- head */

static K3Status work_argmax(void *context, const K3CudaLaunch *launch, int set)
{
  (void)set;
  return k3_cuda_argmax(launch, (K3CudaArgmax *)context);
}

/* Embedding rows of every format, inside and outside the band. */
static void check_embed(K3Table *table, K3Type type, int64_t cols)
{
  RefMatrix m = ref_matrix(table, type, 50, cols);
  K3CudaEmbed a;
  a.matrix = device_matrix(&m);
  a.first_row = 1000;
  a.values = (float *)k3_table_poisoned(cols * 4);
  int64_t tokens[3] = {1007, 1050, 999}, values = k3_format(type)->block_values;
  double *want = (double *)malloc((size_t)cols * 8), error = 0, control = 0;
  for (int64_t b = 0; b < cols / values; b++)
    ref_decode(type, m.stored + 7 * m.row_bytes + b * k3_format(type)->block_bytes, want + b * values);
  K3CudaUse use;
  K3CudaLaunch launch = plain_launch(table, &use);
  for (int t = 0; t < 3; t++) {
    a.token = (int64_t *)k3_table_upload(&tokens[t], 8);
    K3_CHECK_CUDA(cudaMemset(a.values, 0xff, (size_t)cols * 4));
    K3_CHECK_STATUS(k3_cuda_embed(&launch, &a));
    float *got = (float *)k3_table_download(a.values, cols * 4);
    if (t == 0) error = k3_table_error(got, want, cols);
    for (int64_t i = 0; t > 0 && i < cols; i++)
      if (got[i] != 0) error = INFINITY;
    if (t == 1) control = k3_table_error(got, want, cols);
    free(got);
  }
  char shape[64];
  snprintf(shape, sizeof shape, "%s row of %lld", k3_format(type)->name, (long long)cols);
  k3_table_row(table, shape, error, FLOAT_ALLOWED, control, &use, 0, 0);
  free(want), free(m.stored);
  free_matrix(&a.matrix);
}

static void check_argmax(K3Table *table, int64_t count, int plant)
{
  float *logits = k3_table_floats(table, count, 3.0);
  int64_t want = 0;
  if (plant == 1) logits[count / 3] = logits[count - 1] = 50; /* a tie */
  if (plant == 2) for (int64_t i = 0; i < count; i++) logits[i] = -fabsf(logits[i]) - 1;
  for (int64_t i = 1; i < count; i++) if (logits[i] > logits[want]) want = i;
  if (plant == 3) logits[count / 2] = NAN, want = -1 - 5000;
  K3CudaArgmax a;
  memset(&a, 0, sizeof a);
  a.logits = (float *)k3_table_upload(logits, count * 4);
  a.count = count;
  a.first_row = 5000;
  a.scratch = (uint64_t *)k3_table_poisoned(256 * 8);
  a.d_count = (uint32_t *)k3_table_poisoned(4);
  a.value = (float *)k3_table_poisoned(4);
  a.row = (int64_t *)k3_table_poisoned(8);
  K3_CHECK_CUDA(cudaMemset(a.d_count, 0, 4));
  K3CudaUse use;
  K3CudaLaunch launch = plain_launch(table, &use);
  K3_CHECK_STATUS(k3_cuda_argmax(&launch, &a));
  int64_t *row = (int64_t *)k3_table_download(a.row, 8);
  float *value = (float *)k3_table_download(a.value, 4);
  double error = *row != want + 5000 || (plant == 3 ? *value == *value : *value != logits[want]);
  float moved = 100;
  int64_t other = want == 0 ? count - 1 : 0;
  K3_CHECK_CUDA(cudaMemcpy((float *)a.logits + other, &moved, 4, cudaMemcpyHostToDevice));
  K3_CHECK_STATUS(k3_cuda_argmax(&launch, &a));
  int64_t *changed = (int64_t *)k3_table_download(a.row, 8);
  double control = plant == 3 || *changed != *row;
  double us = table->time ? k3_table_microseconds(table, work_argmax, &a, 1, 20) : 0;
  char shape[64];
  snprintf(shape, sizeof shape, "%lld%s", (long long)count, plant == 1 ? " tie" : plant == 2 ? " negative" : plant == 3 ? " NaN" : "");
  k3_table_row(table, shape, error, 0, control, &use, us, (double)count * 4);
  free(logits), free(row), free(value), free(changed);
}

int main(int argc, char **argv)
{
  K3Table table = {0, 0, (uint64_t)time(NULL), 1, 1};
  const char *only = NULL, *type = NULL;
  int tune = 0;
  for (int i = 1; i < argc; i++) {
    if (strcmp(argv[i], "--seed") == 0 && i + 1 < argc) table.random = strtoull(argv[++i], NULL, 0);
    else if (strcmp(argv[i], "--no-time") == 0) table.time = 0;
    else if (strcmp(argv[i], "--pdl") == 0 && i + 1 < argc) table.pdl = atoi(argv[++i]);
    else if (strcmp(argv[i], "--only") == 0 && i + 1 < argc) only = argv[++i];
    else if (strcmp(argv[i], "--type") == 0 && i + 1 < argc) type = argv[++i];
    else if (strcmp(argv[i], "--tune") == 0) tune = 1;
    else {
      fprintf(stderr, "usage: kernel_check [--seed N] [--no-time] [--pdl 0|1] [--only fill|linear|router|experts|formats|norm|head|attention[:WORD,...]|chain] [--type FORMAT] [--tune]\n");
      return 2;
    }
  }
  struct cudaDeviceProp device;
  K3_CHECK_CUDA(cudaStreamCreate(&check_stream));
  K3_CHECK_CUDA(cudaGetDeviceProperties(&device, 0));
  printf("# kernel_check: seed %llu, dependent launch %d, %s, %d SMs, L2 %d MB\n", (unsigned long long)table.random, table.pdl,
         device.name, device.multiProcessorCount, device.l2CacheSize >> 20);
  for (int i = 0; i < K3_CODEBOOK_ENTRIES * 8; i++) ref_grid[i / 8][i % 8] = (int8_t)(k3_table_bits(&table) % 3) - 1;
  K3CudaLaunch launch = plain_launch(&table, NULL);
  int8_t *d_grid = (int8_t *)k3_table_upload(ref_grid, sizeof ref_grid);
  d_codebook = (uint32_t *)k3_table_poisoned(K3_CODEBOOK_ENTRIES * 4);
  K3_CHECK_STATUS(k3_cuda_codebook_pack(&launch, d_grid, d_codebook));
  for (int id = 0; id < K3_CODEBOOK_COUNT; id++) {
    static int8_t grid[K3_CODEBOOK_MOST_BYTES];
    const K3Codebook *book = k3_codebook((K3CodebookId)id);
    k3_codebook_fill(book, grid);
    K3_CHECK_STATUS(k3_codebook_pack(book, "kernel_check", grid, k3_codebook_bytes(book), ref_books[id]));
    d_books[id] = (uint32_t *)k3_table_upload(ref_books[id], k3_codebook_words(book) * 4);
  }
  K3_CHECK_CUDA(cudaDeviceSynchronize());
  k3_table_header();
  if (!only || strcmp(only, "fill") == 0) check_fill(&table);
  if (!only || strcmp(only, "norm") == 0) {
    check_norm(&table, 7168, 0, 0, 0, 0, 0);
    check_norm(&table, 7168, 0, 1, 0, 1, 0);
    check_norm(&table, 7168, 3, 1, 1, 0, 0);
    check_norm(&table, 7168, 8, 1, 0, 0, 0);
    check_norm(&table, 7168, 11, 1, 0, 1, 0);
    check_norm(&table, 1536, 0, 0, 0, 0, 0);
    check_norm(&table, 512, 1, 1, 1, 0, 0);
    check_norm(&table, 64, 2, 1, 0, 1, 0);
    check_norm(&table, 100, 2, 1, 0, 0, 0);
    check_norm(&table, 7168, 2, 1, 1, 0, 1);
  }
  if (!only || strcmp(only, "linear") == 0)
    check_all_linear(&table);
  if (!only || strcmp(only, "experts") == 0) check_all_experts(&table);
  if (!only || strcmp(only, "formats") == 0) check_all_formats(&table, type);
  if (!only || strcmp(only, "head") == 0) {
    for (int t = 0; t < K3_TYPE_COUNT; t++) check_embed(&table, (K3Type)t, t == K3_TYPE_IQ1_S ? 512 : 7168);
    check_argmax(&table, 20480, 0);
    check_argmax(&table, 20480, 1);
    check_argmax(&table, 163840, 2);
    check_argmax(&table, 20480, 3);
    check_argmax(&table, 7, 0);
  }
  if (!only || strcmp(only, "attention") == 0) k3_check_attention(&table, "");
  if (only && strncmp(only, "attention:", 10) == 0) k3_check_attention(&table, only + 10);
  if (tune && table.time) tune_linear(&table);
  if (table.time && (!only || strcmp(only, "chain") == 0)) time_chain(&table, tune);
  printf("\n%d rows, %d wrong: %s\n", table.rows, table.failures, table.failures ? "FAILED" : "all right");
  return table.failures ? 1 : 0;
}
