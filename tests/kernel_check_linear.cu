/* kernel_check: matrix-vector products of every format, input kind and activation mode, and their tuning table. */
#include "kernels/linear.h"
#include "tests/kernel_device.h"

typedef struct {
  const char *name;
  int64_t cols;
  int count;
  int64_t rows[K3_LINEAR_ITEMS];
  K3Type types[K3_LINEAR_ITEMS];
  K3CudaInputKind kind;
  int add, exact, time;
} LinearCase;

enum { MOST_SETS = 24 };
typedef struct {
  K3CudaLinear linear[MOST_SETS];
} LinearSets;

static K3Status work_linear(void *context, const K3CudaLaunch *launch, int set)
{
  return k3_cuda_linear(launch, &((LinearSets *)context)->linear[set]);
}

/* Copies of the weights until they pass the L2 twice over. */
static int make_sets(K3Table *table, const K3CudaLinear *first, LinearSets *sets)
{
  int64_t bytes = k3_cuda_linear_bytes(first);
  int count = (int)(150000000 / (bytes + 1)) + 2;
  if (count > MOST_SETS) count = MOST_SETS;
  sets->linear[0] = *first;
  for (int s = 1; s < count; s++) {
    sets->linear[s] = *first;
    for (int i = 0; i < first->count; i++) {
      const K3CudaMatrix *m = &first->items[i].matrix;
      sets->linear[s].items[i].matrix = synth_matrix(m->type, m->rows, m->cols, fresh_rule(table, m->cols));
    }
  }
  return count;
}

static void free_sets(LinearSets *sets, int count)
{
  for (int s = 1; s < count; s++)
    for (int i = 0; i < sets->linear[s].count; i++) free_matrix(&sets->linear[s].items[i].matrix);
}

/* Where the codes of (row, column) of an iq1_s matrix are (kernels/weights.h). */
static int64_t iq1_s_byte(const K3CudaMatrix *m, int64_t row, int64_t col)
{
  return ((row / 8 * (m->cols / 256) + col / 256) * 16 + row % 8 * 2 + col / 16 % 2) * 16 + col / 32 % 4 * 4 + col / 128 % 2 * 2 + col / 8 % 2;
}

static double run_linear(const K3CudaLaunch *launch, const K3CudaLinear *linear, const float *before, int64_t rows,
                         const double *want)
{
  if (before)
    K3_CHECK_CUDA(cudaMemcpy(linear->items[0].y, before, (size_t)rows * 4, cudaMemcpyHostToDevice));
  else
    K3_CHECK_CUDA(cudaMemset(linear->items[0].y, 0xff, (size_t)rows * 4));
  K3_CHECK_STATUS(k3_cuda_linear(launch, linear));
  float *got = (float *)k3_table_download(linear->items[0].y, rows * 4);
  double error = k3_table_error(got, want, rows);
  free(got);
  return error;
}

static void check_linear(K3Table *table, const LinearCase *c)
{
  int64_t n = c->cols, rows = 0, full = c->kind == K3_INPUT_RMS ? n * 8 : n, offset = c->kind == K3_INPUT_RMS ? n * 3 : 0;
  float *x = k3_table_floats(table, full, 1.0), *up = k3_table_floats(table, full, 3.0), *norm = k3_table_floats(table, full, 1.0);
  float *prepared = (float *)malloc((size_t)n * 4);
  double *exact_x = (double *)malloc((size_t)n * 8), *meant = (double *)malloc((size_t)n * 8), mean = 0;
  int8_t *codes = (int8_t *)calloc(2 * (size_t)n + 64, 1);
  float *scales = (float *)calloc((size_t)n / 32 + 4, 4);
  for (int64_t i = 0; i < full; i++) mean += (double)x[i] * x[i] / (double)full;
  int64_t largest = 0;
  for (int64_t i = 0; i < n; i++) {
    exact_x[i] = c->kind == K3_INPUT_SITU ? ref_situ(x[i], up[i])
                 : c->kind == K3_INPUT_RMS ? norm[offset + i] * (double)x[offset + i] / sqrt(mean + 1e-6) : x[i];
    prepared[i] = (float)exact_x[i];
    if (fabs(exact_x[i]) > fabs(exact_x[largest])) largest = i;
  }
  if (n % 32 == 0) ref_quantise(prepared, n, codes, scales, meant);
  RefMatrix matrices[K3_LINEAR_ITEMS];
  K3CudaLinear linear;
  memset(&linear, 0, sizeof linear);
  for (int i = 0; i < c->count; i++) rows += c->rows[i];
  double *want = (double *)malloc((size_t)rows * 8), *want_codes = (double *)malloc((size_t)rows * 8);
  float *before = k3_table_floats(table, rows, 1.0);
  float *y = (float *)k3_table_poisoned(rows * 4);
  linear.count = c->count;
  linear.exact = c->exact;
  linear.input.kind = c->kind;
  linear.input.n = n;
  linear.input.full = full;
  linear.input.offset = offset;
  linear.input.eps = 1e-6f;
  linear.input.situ_beta = 4;
  linear.input.situ_linear_beta = 25;
  linear.input.vector.values = (float *)k3_table_upload(x, full * 4);
  linear.input.vector.codes = (int8_t *)k3_table_upload(codes, 2 * n + 64);
  linear.input.vector.scales = (float *)k3_table_upload(scales, n / 32 * 4 + 16);
  linear.input.up = (float *)k3_table_upload(up, full * 4);
  linear.input.norm = (float *)k3_table_upload(norm, full * 4);
  int64_t at = 0;
  int any_quantised = 0;
  for (int i = 0; i < c->count; at += c->rows[i++]) {
    matrices[i] = ref_matrix(table, c->types[i], c->rows[i], n);
    linear.items[i].matrix = device_matrix(&matrices[i]);
    linear.items[i].y = y + at;
    linear.items[i].add = c->add;
    int quantised = k3_format_is_quantised(c->types[i]) && !c->exact;
    any_quantised |= quantised;
    ref_multiply(c->types[i], matrices[i].stored, c->rows[i], n, exact_x, want + at);
    ref_multiply(c->types[i], matrices[i].stored, c->rows[i], n, quantised ? meant : exact_x, want_codes + at);
    for (int64_t r = at; c->add && r < at + c->rows[i]; r++) want[r] += before[r], want_codes[r] += before[r];
  }
  K3CudaUse use;
  K3CudaLaunch launch = plain_launch(table, &use);
  double error = run_linear(&launch, &linear, c->add ? before : NULL, rows, want), microseconds = 0;
  if (table->time && c->time) {
    LinearSets *sets = (LinearSets *)malloc(sizeof *sets);
    int count = make_sets(table, &linear, sets);
    microseconds = k3_table_microseconds(table, work_linear, sets, count, count * (count < 8 ? 4 : 2));
    free_sets(sets, count);
    free(sets);
  }
  char shape[96];
  double bytes = (double)k3_cuda_linear_bytes(&linear);
  snprintf(shape, sizeof shape, "%s %lldx%lld %s", c->name, (long long)rows, (long long)n,
           any_quantised ? "int16" : c->exact ? "exact" : "float");
  int tight = !any_quantised || c->kind == K3_INPUT_QUANTISED;
  double control = INFINITY;
  for (int pass = any_quantised ? 1 : 0; pass >= 0; pass--) {
    double allowed = rows < 16 ? (!pass ? 10 * FLOAT_ALLOWED : 5e-3) /* a lone row's sum may be near zero */
                               : (!pass ? FLOAT_ALLOWED : CODES_ALLOWED);
    if (!pass && !tight) break;
    if (!pass) {
      error = run_linear(&launch, &linear, c->add ? before : NULL, rows, want_codes);
      /* control: a code of each of the last matrix's last rows, where the input is largest (another codebook entry may agree there) */
      const K3CudaMatrix *m = &linear.items[c->count - 1].matrix;
      for (int64_t row = m->rows > 4 ? m->rows - 4 : 0; row < m->rows; row++) {
        int64_t code = row * m->cols + largest;
        const uint8_t *byte = (const uint8_t *)m->codes + (m->type == K3_TYPE_F32 ? code * 4 + 3
                              : m->type == K3_TYPE_BF16 ? code * 2 + 1 : m->type == K3_TYPE_Q8_0 ? code
                              : m->type == K3_TYPE_MXFP4 ? code / 2 : iq1_s_byte(m, row, largest));
        flip(byte, m->type == K3_TYPE_F32 || m->type == K3_TYPE_BF16 ? 0x80 : m->type == K3_TYPE_Q8_0 ? 0x40 : 0x77);
      }
      control = run_linear(&launch, &linear, c->add ? before : NULL, rows, want_codes);
      if (any_quantised) snprintf(shape + strlen(shape), sizeof shape - strlen(shape), " codes");
    }
    k3_table_row(table, shape, error, allowed, control, &use, pass || !any_quantised ? microseconds : 0, bytes);
  }
  for (int i = 0; i < c->count; i++) {
    free(matrices[i].stored);
    free_matrix(&linear.items[i].matrix);
  }
  void *device[] = {linear.input.vector.values, linear.input.vector.codes, linear.input.vector.scales,
                    (void *)linear.input.up, (void *)linear.input.norm, y};
  for (size_t i = 0; i < sizeof device / sizeof *device; i++) K3_CHECK_CUDA(cudaFree(device[i]));
  free(x), free(up), free(norm), free(prepared), free(exact_x), free(meant), free(codes), free(scales), free(want);
  free(want_codes), free(before);
}


static const LinearCase linear_cases[] = {
  {"kda", 7168, 6, {1536, 1536, 1536, 1536, 128, 12}, {Q8, Q8, Q8, Q8, Q8, Q8}, K3_INPUT_QUANTISED, 0, 0, 1},
  {"kda one", 7168, 1, {6284}, {Q8}, K3_INPUT_QUANTISED, 0, 0, 1},
  {"o_proj", 1536, 1, {7168}, {Q8}, K3_INPUT_VALUES, 0, 0, 1},
  {"o_proj", 1536, 1, {7168}, {Q8}, K3_INPUT_QUANTISED, 0, 0, 0},
  {"moe in", 7168, 4, {112, 448, 768, 768}, {Q8, Q8, Q8, Q8}, K3_INPUT_QUANTISED, 0, 0, 1},
  {"moe in one", 7168, 1, {2096}, {Q8}, K3_INPUT_QUANTISED, 0, 0, 1},
  {"routed_up rms add", 448, 1, {7168}, {Q8}, K3_INPUT_RMS, 1, 0, 1},
  {"routed_up rms add", 448, 1, {7168}, {Q8}, K3_INPUT_RMS, 1, 1, 0},
  {"routed_up odd rms add", 448, 1, {7001}, {Q8}, K3_INPUT_RMS, 1, 0, 0},
  {"routed_up few rms add", 448, 1, {1003}, {Q8}, K3_INPUT_RMS, 1, 0, 0},
  {"few columns rms", 96, 1, {5003}, {Q8}, K3_INPUT_RMS, 0, 0, 0},
  {"o_proj narrow", 1056, 1, {702}, {Q8}, K3_INPUT_VALUES, 0, 0, 0},
  {"o_proj odd add", 1536, 1, {5001}, {Q8}, K3_INPUT_VALUES, 1, 0, 0},
  {"moe in odd add", 7168, 1, {1001}, {Q8}, K3_INPUT_QUANTISED, 1, 0, 0},
  {"half wide add", 3584, 1, {4099}, {Q8}, K3_INPUT_QUANTISED, 1, 0, 0},
  {"shared down situ", 768, 1, {7168}, {Q8}, K3_INPUT_SITU, 0, 0, 1},
  {"shared down situ", 768, 1, {7168}, {Q8}, K3_INPUT_SITU, 0, 1, 0},
  {"dense gate up", 7168, 2, {4224, 4224}, {Q8, Q8}, K3_INPUT_QUANTISED, 0, 0, 1},
  {"dense down situ", 4224, 1, {7168}, {Q8}, K3_INPUT_SITU, 0, 0, 1},
  {"q_b rms", 1536, 1, {2304}, {Q8}, K3_INPUT_RMS, 0, 1, 1},
  {"head", 7168, 1, {20480}, {Q8}, K3_INPUT_QUANTISED, 0, 0, 1},
  {"kda one", 7168, 1, {6284}, {Q8}, K3_INPUT_QUANTISED, 0, 1, 1},
  {"bf16", 7168, 1, {2096}, {K3_TYPE_BF16}, K3_INPUT_QUANTISED, 0, 0, 1},
  {"f32", 7168, 1, {896}, {K3_TYPE_F32}, K3_INPUT_QUANTISED, 0, 0, 1},
  {"mixed", 512, 5, {100, 130, 300, 70, 51}, {K3_TYPE_F32, K3_TYPE_BF16, Q8, K3_TYPE_MXFP4, K3_TYPE_IQ1_S},
   K3_INPUT_QUANTISED, 0, 0, 0},
  {"mixed", 512, 5, {100, 130, 300, 70, 51}, {K3_TYPE_F32, K3_TYPE_BF16, Q8, K3_TYPE_MXFP4, K3_TYPE_IQ1_S},
   K3_INPUT_QUANTISED, 0, 1, 0},
  {"mixed reversed add", 1280, 3, {33, 257, 19}, {K3_TYPE_IQ1_S, K3_TYPE_MXFP4, Q8}, K3_INPUT_QUANTISED, 1, 0, 0},
  {"one block", 32, 1, {37}, {Q8}, K3_INPUT_QUANTISED, 0, 0, 0},
  {"one row", 7168, 1, {1}, {Q8}, K3_INPUT_QUANTISED, 0, 0, 0},
  {"three blocks", 96, 2, {200, 1}, {Q8, Q8}, K3_INPUT_VALUES, 0, 1, 0},
  {"odd f32", 37, 2, {5, 300}, {K3_TYPE_F32, K3_TYPE_BF16}, K3_INPUT_VALUES, 0, 0, 0},
  {"odd f32", 100, 1, {1000}, {K3_TYPE_F32}, K3_INPUT_VALUES, 1, 0, 0},
};

void check_all_linear(K3Table *table)
{
  for (size_t i = 0; i < sizeof linear_cases / sizeof *linear_cases; i++) check_linear(table, &linear_cases[i]);
}

/* Tuning of the q8_0 kernels: threads, blocks an SM, dependent launch. */
void tune_linear(K3Table *table)
{
  static const int64_t shapes[][2] = {{6284, 7168}, {7168, 1536}, {2096, 7168}, {7168, 448}};
  static const int ways[][2] = {{448, 1}, {448, 2}, {384, 1}, {384, 2}, {256, 1}, {256, 2}};
  printf("\n# q8_0 linear: us (GB/s) without and with dependent launch\n%-14s", "threads/blocks");
  for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) printf("  %8lldx%-20lld", (long long)shapes[s][0], (long long)shapes[s][1]);
  printf("\n");
  LinearSets *sets = (LinearSets *)calloc(sizeof shapes / sizeof *shapes, sizeof *sets);
  int counts[8];
  for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
    K3CudaLinear linear;
    memset(&linear, 0, sizeof linear);
    linear.count = 1;
    linear.input.n = shapes[s][1];
    float *x = k3_table_floats(table, shapes[s][1], 1.0), *scales = (float *)malloc((size_t)shapes[s][1]);
    int8_t *codes = (int8_t *)malloc(2 * (size_t)shapes[s][1]);
    double *meant = (double *)malloc((size_t)shapes[s][1] * 8);
    ref_quantise(x, shapes[s][1], codes, scales, meant);
    linear.input.vector.codes = (int8_t *)k3_table_upload(codes, 2 * shapes[s][1]);
    linear.input.vector.scales = (float *)k3_table_upload(scales, shapes[s][1] / 8);
    linear.items[0].matrix = synth_matrix(Q8, shapes[s][0], shapes[s][1], fresh_rule(table, shapes[s][1]));
    linear.items[0].y = (float *)k3_table_poisoned(shapes[s][0] * 4);
    counts[s] = make_sets(table, &linear, &sets[s]);
    free(x), free(scales), free(codes), free(meant);
  }
  int pdl = table->pdl;
  for (size_t w = 0; w < sizeof ways / sizeof *ways; w++) {
    printf("%7d/%d     ", ways[w][0], ways[w][1]);
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
      double bytes = (double)k3_cuda_linear_bytes(&sets[s].linear[0]), us[2];
      for (int k = 0; k < counts[s]; k++) {
        sets[s].linear[k].threads = ways[w][0];
        sets[s].linear[k].blocks_per_sm = ways[w][1];
      }
      for (table->pdl = 0; table->pdl < 2; table->pdl++)
        us[table->pdl] = k3_table_microseconds(table, work_linear, &sets[s], counts[s], counts[s] * 4);
      printf("  %6.2f (%4.0f) %6.2f (%4.0f) ", us[0], bytes / us[0] * 1e-3, us[1], bytes / us[1] * 1e-3);
    }
    printf("\n");
  }
  table->pdl = pdl;
}
