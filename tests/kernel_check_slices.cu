/* Slices of MLA, both arms, against float64; then their times, alone and in a layer.
 *
 * Outputs start as NaN, and so do the cache rows past the end. Every row has a negative control where one makes sense:
 * a merge that does not rescale, or a row too few. */
#include <omp.h>

#include "tests/kernel_attention.h"

namespace {

/* --- MLA --- */

constexpr int64_t MASTER_ROWS = 131072, C0 = 512, R0 = 64, W0 = C0 + R0;

/* One cache of random rows, in three types; shapes take its first rows. */
struct Master {
  Floats as[3];    /* what the stored values are: f32, bf16, f16 */
  void *device[3];
};


void make_master(K3Table *t, Master *m)
{
  m->as[0] = random_floats(t, MASTER_ROWS * W0, 1.0);
  m->device[0] = upload(m->as[0]);
  for (int type = 1; type < 3; type++) {
    std::vector<uint16_t> halves(MASTER_ROWS * W0);
    m->as[type].resize(MASTER_ROWS * W0);
#pragma omp parallel for
    for (int64_t i = 0; i < MASTER_ROWS * W0; i++)
      halves[i] = half_of((K3CudaCacheType)type, m->as[0][i]), m->as[type][i] = half_value((K3CudaCacheType)type, halves[i]);
    m->device[type] = upload(halves);
  }
}

enum Kind { RANDOM, LARGE, TIES, PEAK };
const char *const kind_names[] = {"", " one-hot", " ties", " peak last"};
enum Arm { CORE, TENSOR };
enum Timed { UNTIMED, ALONE, COMBINED /* alone, then with the combine */ };

struct SliceCase {
  Arm arm;
  K3CudaCacheType type;
  int64_t heads, rows;
  Kind kind;
  int64_t force, check_heads; /* slices, 0: planned; heads compared, 0: all */
  int64_t latent, rope;
};

int apart = 0;     /* setting of the tensor arm being timed */
int skip_arm = -1; /* arm=tensor and arm=core leave the other one out */

/* softmax(q · rows) rows in float64 for one head. `last`: replaces the last row unless NULL. Rows beyond MASTER_ROWS
 * repeat. */
void attend(const float *cache, int64_t rows, int64_t latent, int64_t rope, const float *query, const float *last,
            double scale, double *out, double *top, double *total)
{
  const int64_t width = latent + rope, chunk = 1024, chunks = (rows + chunk - 1) / chunk;
  Doubles part(chunks * (latent + 2));
#pragma omp parallel for schedule(dynamic)
  for (int64_t p = 0; p < chunks; p++) {
    double *m = &part[p * (latent + 2)], *l = m + 1, *acc = m + 2, score[1024];
    const int64_t begin = p * chunk, count = rows - begin < chunk ? rows - begin : chunk;
    *m = -INFINITY;
    for (int64_t i = 0; i < count; i++) {
      const float *row = last && begin + i == rows - 1 ? last : cache + (begin + i) % MASTER_ROWS * width;
      double sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t c = 0; c < width; c++) sum += (double)query[c] * (double)row[c];
      score[i] = sum * scale, *m = fmax(*m, score[i]);
    }
    for (int64_t i = 0; i < count; i++) {
      const float *row = last && begin + i == rows - 1 ? last : cache + (begin + i) % MASTER_ROWS * width;
      const double w = exp(score[i] - *m);
      *l += w;
      if (w == 0) continue;
      for (int64_t c = 0; c < latent; c++) acc[c] += w * (double)row[c];
    }
  }
  double M = -INFINITY, L = 0;
  for (int64_t p = 0; p < chunks; p++) M = fmax(M, part[p * (latent + 2)]);
  for (int64_t c = 0; c < latent; c++) out[c] = 0;
  for (int64_t p = 0; p < chunks; p++) {
    const double *q = &part[p * (latent + 2)], w = exp(q[0] - M);
    L += q[1] * w;
    for (int64_t c = 0; c < latent; c++) out[c] += q[2 + c] * w;
  }
  for (int64_t c = 0; c < latent; c++) out[c] /= L;
  *top = M * 1.4426950408889634, *total = L; /* m as the kernels keep it */
}

struct SliceTime { std::vector<K3CudaMlaSlice> sets; Arm arm; const K3CudaMlaCombine *combine; };
K3Status slice_work(void *context, const K3CudaLaunch *launch, int set)
{
  SliceTime *w = (SliceTime *)context;
  K3_TRY(w->arm == TENSOR ? k3_cuda_mla_tensor(launch, &w->sets[set]) : k3_cuda_mla_slice(launch, &w->sets[set]));
  return w->combine ? k3_cuda_mla_combine(launch, w->combine) : K3_OK;
}

/* acc of `type` as float32. */
Floats download_partials(const void *acc, int64_t count, K3CudaCacheType type)
{
  const Floats words = download((const float *)acc, type == K3_CACHE_F32 ? count : count / 2);
  if (type == K3_CACHE_F32) return words;
  Floats out(count);
  for (int64_t i = 0; i < count; i++) out[i] = half_value(type, ((const uint16_t *)words.data())[i]);
  return out;
}

K3AttentionPlan plan_of(const K3CudaLaunch *launch, const SliceCase &c)
{
  K3AttentionShape shape;
  K3AttentionPlan plan;
  if (c.arm == TENSOR)
    K3_CHECK_STATUS(k3_cuda_mla_tensor_shape(launch, c.heads, c.latent, c.rope, c.type, &shape));
  else
    K3_CHECK_STATUS(k3_cuda_mla_slice_shape(launch, c.heads, c.latent, c.rope, c.type, &shape));
  shape.rows = c.rows, shape.force_slices = c.force;
  K3_CHECK_STATUS(k3_attention_plan(&shape, &plan));
  return plan;
}

/* Error of the worst head; the table's row; returns the error. */
double check_slice(K3Table *t, const Master &master, const SliceCase &c, Timed timed, double allowed)
{
  if (skip_arm == c.arm) return 0;
  const int64_t width = c.latent + c.rope, bytes = k3_cuda_cache_element_bytes(c.type);
  const double scale = 1.0 / sqrt(192.0);
  K3CudaUse use;
  K3CudaLaunch launch;
  K3_CHECK_STATUS(k3_cuda_launch_init(0, t->pdl, &launch));
  launch.use = &use;
  const K3AttentionPlan plan = plan_of(&launch, c);

  /* queries: large ones make the softmax one-hot, zero ones make every score a tie */
  Floats query = random_floats(t, c.heads * width, c.kind == LARGE ? 30.0 : 1.0);
  if (c.kind == TIES)
    for (int64_t h = 1; h < c.heads; h += 2)
      for (int64_t i = 0; i < width; i++) query[h * width + i] = 0.0f;
  std::vector<uint16_t> halves(query.size());
  if (c.arm == TENSOR)
    for (size_t i = 0; i < query.size(); i++) halves[i] = half_of(c.type, query[i]), query[i] = half_value(c.type, halves[i]);

  /* the cache: random rows, NaN past them */
  const int64_t capacity = c.rows + 70;
  char *cache = (char *)k3_table_poisoned(capacity * width * bytes);
  const int64_t row_bytes = width * bytes;
  for (int64_t at = 0; at < c.rows; at += MASTER_ROWS)
    K3_CHECK_CUDA(cudaMemcpy(cache + at * row_bytes, master.device[c.type],
                             (c.rows - at < MASTER_ROWS ? c.rows - at : MASTER_ROWS) * row_bytes, cudaMemcpyDeviceToDevice));
  Floats last(width);
  if (c.kind == PEAK) { /* the row that wins for head 0 is the very last */
    std::vector<uint16_t> last16(width);
    for (int64_t i = 0; i < width; i++)
      last16[i] = half_of(c.type, 2.0f * query[i]), last[i] = c.type == K3_CACHE_F32 ? 2.0f * query[i] : half_value(c.type, last16[i]);
    K3_CHECK_CUDA(cudaMemcpy(cache + (c.rows - 1) * row_bytes, c.type == K3_CACHE_F32 ? (void *)last.data() : (void *)last16.data(),
                             row_bytes, cudaMemcpyHostToDevice));
  }
  std::vector<int64_t> rows(1, c.rows);
  K3CudaMlaSlice s = {};
  s.heads = c.heads, s.latent = c.latent, s.rope = c.rope, s.scale = scale;
  s.heads_per_pass = plan.heads_per_pass, s.slices = plan.slices;
  s.apart = apart;
  s.query = c.arm == TENSOR ? (void *)upload(halves) : (void *)upload(query);
  s.cache = cache, s.cache_type = c.type, s.capacity = capacity, s.rows = upload(rows);
  s.acc = k3_table_poisoned(plan.acc_floats * 4);
  s.m = (float *)k3_table_poisoned(plan.ml_floats * 2), s.l = (float *)k3_table_poisoned(plan.ml_floats * 2);
  K3_CHECK_STATUS(c.arm == TENSOR ? k3_cuda_mla_tensor(&launch, &s) : k3_cuda_mla_slice(&launch, &s));
  launch.use = NULL;
  K3CudaMlaCombine combine = {};
  combine.heads = c.heads, combine.latent = c.latent;
  combine.in = {s.acc, s.m, s.l, plan.slices, c.heads * c.latent, 1, plan.slices, k3_cuda_partial_type(c.arm == TENSOR)};
  combine.acc = (float *)k3_table_poisoned(c.heads * c.latent * 4);
  combine.m = (float *)k3_table_poisoned(c.heads * 4), combine.l = (float *)k3_table_poisoned(c.heads * 4);
  K3_CHECK_STATUS(k3_cuda_mla_combine(&launch, &combine));
  const Floats acc = download(combine.acc, c.heads * c.latent), l = download(combine.l, c.heads), top_m = download(combine.m, c.heads);
  const Floats parts = download_partials(s.acc, plan.acc_floats, combine.in.type), ms = download(s.m, plan.ml_floats / 2),
               ls = download(s.l, plan.ml_floats / 2);

  /* empty slices are neutral, exactly */
  bool neutral = true;
  for (int64_t i = 0; i < plan.slices; i++)
    if (k3_attention_slice_begin(c.rows, plan.tile_rows, plan.slices, i) ==
        k3_attention_slice_begin(c.rows, plan.tile_rows, plan.slices, i + 1))
      for (int64_t h = 0; h < c.heads; h++) {
        neutral = neutral && ls[h * plan.slices + i] == 0.0f && ms[h * plan.slices + i] == -1e30f;
        for (int64_t k = 0; k < c.latent; k++) neutral = neutral && parts[(i * c.heads + h) * c.latent + k] == 0.0f;
      }

  const float *host_cache = master.as[c.type].data(); /* other widths take the numbers as they come */
  double error = 0, control = 0;
  const int64_t compared = c.check_heads ? c.check_heads : c.heads;
  for (int64_t i = 0; i < compared; i++) {
    const int64_t h = compared == c.heads ? i : i * (c.heads / compared);
    Doubles want(c.latent), short_one(c.latent);
    double top, total, other;
    attend(host_cache, c.rows, c.latent, c.rope, &query[h * width], c.kind == PEAK ? last.data() : NULL, scale, want.data(),
           &top, &total);
    Floats got(c.latent), plain(c.latent, 0.0f);
    for (int64_t k = 0; k < c.latent; k++) got[k] = acc[h * c.latent + k] / l[h];
    const double e = error_of(got, want);
    error = e > error || e != e ? e : error;
    if (!(e <= allowed))
      printf("# head %lld: m %g wanted %g, l %g wanted %g, out %g %g … %g wanted %g %g … %g\n", (long long)h, top_m[h], top,
             l[h], total, got[0], got[1], got[c.latent - 1], want[0], want[1], want[c.latent - 1]);
    if (error != error) break;
    /* control: off by one row where the last row matters, else a merge that does not rescale */
    double caught = 0;
    if (c.kind == PEAK && h == 0) {
      attend(host_cache, c.rows - 1, c.latent, c.rope, &query[h * width], NULL, scale, short_one.data(),
             &other, &other);
      caught = error_of(got, short_one);
    } else if (c.kind != PEAK) {
      double sum = 0;
      for (int64_t p = 0; p < plan.slices; p++) {
        sum += ls[h * plan.slices + p];
        for (int64_t k = 0; k < c.latent; k++) plain[k] += parts[(p * c.heads + h) * c.latent + k];
      }
      for (int64_t k = 0; k < c.latent; k++) plain[k] = (float)(plain[k] / sum);
      caught = error_of(plain, want);
    }
    control = fmax(control, caught);
  }
  if (!neutral) error = NAN;
  if (c.kind != PEAK && plan.busy_blocks <= plan.passes) control = INFINITY; /* one slice: nothing to merge */

  double us = 0, combined_us = 0;
  if (timed && t->time) {
    SliceTime work = {{}, c.arm, NULL};
    const double per = (double)c.rows * row_bytes;
    int sets = (int)(300e6 / per) + 1; /* caches rotate past the L2 */
    if (sets > 24) sets = 24;
    work.sets.push_back(s);
    for (int i = 1; i < sets; i++) {
      K3CudaMlaSlice copy = s;
      char *other = (char *)k3_table_poisoned(capacity * row_bytes);
      K3_CHECK_CUDA(cudaMemcpy(other, cache, c.rows * row_bytes, cudaMemcpyDeviceToDevice));
      copy.cache = other;
      work.sets.push_back(copy);
    }
    const int nodes = c.arm == TENSOR ? 24 : 6;
    us = k3_table_microseconds(t, slice_work, &work, sets, nodes);
    work.combine = &combine;
    if (timed == COMBINED) combined_us = k3_table_microseconds(t, slice_work, &work, sets, nodes);
    for (int i = 1; i < sets; i++) cudaFree(const_cast<void *>(work.sets[i].cache));
  }
  static const char *const cache_names[] = {"f32", "bf16", "f16"};
  char shape[96];
  snprintf(shape, sizeof shape, "%lldx%lld %s %lldsl%s%s", (long long)c.heads, (long long)c.rows, cache_names[c.type],
           (long long)plan.slices, kind_names[c.kind], apart ? " apart" : "");
  k3_table_row(t, shape, error, allowed, control, &use, us, (double)c.rows * row_bytes);
  if (combined_us > 0) {
    snprintf(shape + strlen(shape), sizeof shape - strlen(shape), " + combine");
    k3_table_row(t, shape, error, allowed, control, &use, combined_us, (double)c.rows * row_bytes);
  }
  cudaFree(cache), cudaFree(const_cast<void *>(s.query)), cudaFree(const_cast<int64_t *>(s.rows));
  cudaFree(s.acc), cudaFree(s.m), cudaFree(s.l), cudaFree(combine.acc), cudaFree(combine.m), cudaFree(combine.l);
  return error;
}

const double ALLOWED_F32 = 2e-5, ALLOWED_BF16 = 4e-3, ALLOWED_F16 = 6e-4;

void check_slices(K3Table *t, const Master &master)
{
  const int64_t rows[] = {4, 63, 4096, 12289, 20000, MASTER_ROWS}, heads[] = {8, 12, 24, 96};
  for (int64_t h : heads)
    for (int64_t r : rows) {
      check_slice(t, master, {TENSOR, K3_CACHE_BF16, h, r, RANDOM, 0, r == MASTER_ROWS ? 4 : h > 12 && r > 5000 ? 6 : 0, C0, R0}, UNTIMED, ALLOWED_BF16);
      if (h != 24 || r == 12289)
        check_slice(t, master, {CORE, h == 96 ? K3_CACHE_BF16 : K3_CACHE_F32, h, r, RANDOM, 0, r == MASTER_ROWS ? 4 : h > 12 && r > 5000 ? 6 : 0, C0, R0},
                    UNTIMED, ALLOWED_F32);
    }
  for (int kind = LARGE; kind <= PEAK; kind++) {
    const Kind k = (Kind)kind;
    /* A one-hot softmax with equal 16-bit inputs on both sides: f32 rounding of scores of some hundreds is left. */
    check_slice(t, master, {TENSOR, K3_CACHE_BF16, 12, 12289, k, 0, 0, C0, R0}, UNTIMED, ALLOWED_BF16);
    check_slice(t, master, {TENSOR, K3_CACHE_F16, 96, 12289, k, 0, 8, C0, R0}, UNTIMED, k == LARGE ? 1e-3 : ALLOWED_F16);
    check_slice(t, master, {TENSOR, K3_CACHE_F16, 24, 63, k, 0, 0, C0, R0}, UNTIMED, k == LARGE ? 1e-3 : ALLOWED_F16);
    check_slice(t, master, {CORE, K3_CACHE_F32, 12, 12289, k, 0, 0, C0, R0}, UNTIMED, k == LARGE ? 2e-4 : ALLOWED_F32);
    check_slice(t, master, {CORE, K3_CACHE_F16, 3, 129, k, 0, 0, 64, 16}, UNTIMED, k == LARGE ? 2e-4 : ALLOWED_F32);
  }
  const int64_t few[] = {1, 2, 5, 63}; /* 64 slices */
  for (int64_t r : few) {
    check_slice(t, master, {TENSOR, K3_CACHE_BF16, 12, r, RANDOM, 64, 0, C0, R0}, UNTIMED, ALLOWED_BF16);
    check_slice(t, master, {TENSOR, K3_CACHE_BF16, 96, r, RANDOM, 64, 0, C0, R0}, UNTIMED, ALLOWED_BF16);
    check_slice(t, master, {CORE, K3_CACHE_F32, 12, r, RANDOM, 64, 0, C0, R0}, UNTIMED, ALLOWED_F32);
  }
  for (int64_t r : {(int64_t)20000, MASTER_ROWS}) { /* splitting is more accurate, not less */
    const double one = check_slice(t, master, {CORE, K3_CACHE_F32, 12, r, RANDOM, 1, 0, C0, R0}, UNTIMED, 1e-4);
    const double split = check_slice(t, master, {CORE, K3_CACHE_F32, 12, r, RANDOM, 0, 0, C0, R0}, UNTIMED, 1e-4);
    printf("# %lld rows, f32: one slice %.2e, split %.2e: %s\n", (long long)r, one, split,
           split <= one ? "splitting is more accurate" : "FAIL splitting is less accurate");
    if (!(split <= one)) t->failures++;
  }
}

void time_slices(K3Table *t, const Master &master)
{
  for (K3CudaCacheType type : {K3_CACHE_BF16, K3_CACHE_F16}) {
    const double allowed = type == K3_CACHE_BF16 ? ALLOWED_BF16 : ALLOWED_F16;
    check_slice(t, master, {TENSOR, type, 96, 16384, RANDOM, 0, 12, C0, R0}, ALONE, allowed);
    check_slice(t, master, {TENSOR, type, 12, MASTER_ROWS, RANDOM, 0, 0, C0, R0}, ALONE, allowed);
  }
  check_slice(t, master, {TENSOR, K3_CACHE_BF16, 24, MASTER_ROWS, RANDOM, 0, 4, C0, R0}, ALONE, ALLOWED_BF16);
  check_slice(t, master, {TENSOR, K3_CACHE_BF16, 48, 16384, RANDOM, 0, 4, C0, R0}, ALONE, ALLOWED_BF16);
  check_slice(t, master, {TENSOR, K3_CACHE_BF16, 96, MASTER_ROWS, RANDOM, 0, 4, C0, R0}, ALONE, ALLOWED_BF16);
  check_slice(t, master, {CORE, K3_CACHE_BF16, 96, 16384, RANDOM, 0, 4, C0, R0}, ALONE, ALLOWED_F32);
  check_slice(t, master, {CORE, K3_CACHE_BF16, 12, MASTER_ROWS, RANDOM, 0, 4, C0, R0}, ALONE, ALLOWED_F32);
  for (int64_t r : {16, 64, 128, 256, 512, 1024, 4096}) { /* where splitting begins to pay */
    check_slice(t, master, {CORE, K3_CACHE_BF16, 12, r, RANDOM, 1, 2, C0, R0}, ALONE, ALLOWED_F32);
    check_slice(t, master, {TENSOR, K3_CACHE_BF16, 12, r, RANDOM, 1, 2, C0, R0}, ALONE, ALLOWED_BF16);
    if (r > 64) check_slice(t, master, {TENSOR, K3_CACHE_BF16, 12, r, RANDOM, (r + 63) / 64, 2, C0, R0}, ALONE, ALLOWED_BF16);
  }
}

/* The tensor arm's setting: loads shared by a pair of passes or not; and slice counts. */
void tune_slices(K3Table *t, const Master &master)
{
  for (apart = 0; apart < 2; apart++)
    for (int64_t rows : {(int64_t)16384, MASTER_ROWS})
      check_slice(t, master, {TENSOR, K3_CACHE_BF16, 96, rows, RANDOM, 0, 2, C0, R0}, ALONE, ALLOWED_BF16);
  apart = 0;
  for (int64_t slices : {16, 32, 43, 66})
    check_slice(t, master, {TENSOR, K3_CACHE_BF16, 96, 16384, RANDOM, slices, 2, C0, R0}, ALONE, ALLOWED_BF16);
  for (int64_t slices : {32, 64, 132})
    check_slice(t, master, {TENSOR, K3_CACHE_BF16, 12, MASTER_ROWS, RANDOM, slices, 2, C0, R0}, ALONE, ALLOWED_BF16);
}

/* A few small shapes, for compute-sanitizer. */
void check_few(K3Table *t, const Master &master)
{
  check_slice(t, master, {TENSOR, K3_CACHE_BF16, 12, 12289, RANDOM, 0, 1, C0, R0}, UNTIMED, ALLOWED_BF16);
  check_slice(t, master, {TENSOR, K3_CACHE_F16, 96, 300, PEAK, 0, 1, C0, R0}, UNTIMED, ALLOWED_F16);
  check_slice(t, master, {TENSOR, K3_CACHE_F16, 24, 5, RANDOM, 4, 1, C0, R0}, UNTIMED, ALLOWED_F16);
  check_slice(t, master, {CORE, K3_CACHE_F32, 12, 12289, RANDOM, 0, 1, C0, R0}, UNTIMED, ALLOWED_F32);
  check_slice(t, master, {CORE, K3_CACHE_F16, 3, 129, RANDOM, 64, 1, 64, 16}, UNTIMED, ALLOWED_F32);
}

/* What a rank of eight streams, alone and with the combine behind it, which is what other libraries' one call does. */
void rate_slices(K3Table *t, const Master &master)
{
  for (Arm arm : {TENSOR, CORE}) {
    const double allowed = arm == TENSOR ? ALLOWED_BF16 : ALLOWED_F32;
    check_slice(t, master, {arm, K3_CACHE_BF16, 96, 16384, RANDOM, 0, 4, C0, R0}, COMBINED, allowed);
    check_slice(t, master, {arm, K3_CACHE_BF16, 12, MASTER_ROWS, RANDOM, 0, 4, C0, R0}, COMBINED, allowed);
  }
  check_slice(t, master, {TENSOR, K3_CACHE_BF16, 96, MASTER_ROWS, RANDOM, 0, 4, C0, R0}, COMBINED, ALLOWED_BF16);
}

/* Past 2^31 bytes, and the last row the one that counts. */
void check_big(K3Table *t, const Master &master)
{
  check_slice(t, master, {TENSOR, K3_CACHE_BF16, 12, 1864140, PEAK, 0, 2, C0, R0}, UNTIMED, ALLOWED_BF16);
  check_slice(t, master, {CORE, K3_CACHE_BF16, 12, 1864140, PEAK, 0, 2, C0, R0}, UNTIMED, 1e-4);
}

/* --- a whole MLA layer's attention, chained: queries, slice, [combine,] merge --- */

struct LayerTime {
  K3CudaMlaPrepare prepare;
  std::vector<K3CudaMlaSlice> slices;
  K3CudaMlaCombine combine;
  K3CudaMlaMerge merge;
  bool combines;
};
K3Status layer_work(void *context, const K3CudaLaunch *launch, int set)
{
  LayerTime *w = (LayerTime *)context;
  K3CudaMlaPrepare prepare = w->prepare;
  prepare.cache = const_cast<void *>(w->slices[set].cache);
  K3_TRY(k3_cuda_mla_prepare(launch, &prepare));
  K3_TRY(k3_cuda_mla_tensor(launch, &w->slices[set]));
  if (w->combines) K3_TRY(k3_cuda_mla_combine(launch, &w->combine));
  return k3_cuda_mla_merge(launch, &w->merge);
}

void time_layer(K3Table *t, const Master &master, int64_t attended, int64_t rows, bool combines)
{
  const int64_t own = 12;
  K3CudaLaunch launch;
  K3_CHECK_STATUS(k3_cuda_launch_init(0, t->pdl, &launch));
  SliceCase c = {TENSOR, K3_CACHE_BF16, attended, rows, RANDOM, 0, 0, C0, R0};
  const K3AttentionPlan plan = plan_of(&launch, c);
  Floats w = random_floats(t, own * 256 * C0, 0.05);
  LayerTime l = {};
  l.combines = combines;
  const K3CudaMatrix kv_b = make_matrix(K3_TYPE_Q8_0, own * 256, C0, w);
  K3CudaMlaPrepare &p = l.prepare;
  p.heads = own, p.nope = 128, p.rope = R0, p.v_dim = 128, p.latent = C0, p.norm_eps = 1e-6, p.kv_b = kv_b;
  const int64_t Q = 1536;
  Floats w_q = random_floats(t, own * 192 * Q, 0.03);
  p.q_a = upload(random_floats(t, Q, 1.0)), p.q_a_norm = upload(random_floats(t, Q, 1.0)), p.q_b = make_matrix(K3_TYPE_Q8_0, own * 192, Q, w_q);
  p.kv = upload(random_floats(t, W0, 1.0)), p.kv_norm = upload(random_floats(t, C0, 1.0));
  p.position = upload(std::vector<int64_t>(1, rows - 1)), p.page_positions = 64, p.world = 1, p.rank = 0, p.capacity = rows;
  p.cache_type = K3_CACHE_BF16;
  p.query = (float *)k3_table_poisoned(attended * W0 * 4), p.query16 = upload(std::vector<uint16_t>(attended * W0, 0x3c00));
  K3CudaMlaSlice s = {};
  s.heads = attended, s.latent = C0, s.rope = R0, s.heads_per_pass = plan.heads_per_pass, s.slices = plan.slices;
  s.scale = 1 / sqrt(192.0), s.query = p.query16, s.cache_type = K3_CACHE_BF16, s.capacity = rows;
  s.rows = upload(std::vector<int64_t>(1, rows));
  s.acc = k3_table_poisoned(plan.acc_floats * 4);
  s.m = (float *)k3_table_poisoned(plan.ml_floats * 2), s.l = (float *)k3_table_poisoned(plan.ml_floats * 2);
  for (int i = 0; i < 24; i++) { /* 24 layers' own caches */
    char *cache = (char *)k3_table_poisoned(rows * W0 * 2);
    K3_CHECK_CUDA(cudaMemcpy(cache, master.device[1], rows * W0 * 2, cudaMemcpyDeviceToDevice));
    s.cache = cache;
    l.slices.push_back(s);
  }
  l.combine.heads = attended, l.combine.latent = C0;
  l.combine.in = {s.acc, s.m, s.l, plan.slices, attended * C0, 1, plan.slices, k3_cuda_partial_type(1)};
  l.combine.acc = (float *)k3_table_poisoned(attended * C0 * 4);
  l.combine.m = (float *)k3_table_poisoned(attended * 4), l.combine.l = (float *)k3_table_poisoned(attended * 4);
  l.merge.heads = own, l.merge.nope = 128, l.merge.v_dim = 128, l.merge.latent = C0, l.merge.kv_b = kv_b;
  /* eight ranks' partials of own heads: as many parts as the combined ones hold */
  l.merge.in = l.combine.in;
  if (combines) l.merge.in = {l.combine.acc, l.combine.m, l.combine.l, attended / own, own * C0, own, 1, K3_CACHE_F32};
  l.merge.gate = upload(random_floats(t, own * 128, 1.0)), l.merge.out = make_vector(own * 128, true);
  for (int pdl = 0; pdl < 2; pdl++) {
    K3Table timing = *t;
    timing.pdl = pdl;
    const double us = k3_table_microseconds(&timing, layer_work, &l, 24, 24);
    printf("# layer: queries + tensor%s + merge, %lld heads x %lld rows, pdl %d: %.2f us a layer, %.3f ms for 24\n",
           combines ? " + combine" : "", (long long)attended, (long long)rows, pdl, us, us * 0.024);
  }
  for (auto &x : l.slices) cudaFree(const_cast<void *>(x.cache));
}

} // namespace

void k3_check_slices(K3Table *t, const char *words)
{
  const bool all = !*words;
  const bool checked = all || named(words, "slices"), timed = all || named(words, "time"), big = all || named(words, "big");
  const bool tuned = named(words, "tune"), few = named(words, "few"), rated = named(words, "rate");
  if (!checked && !timed && !big && !tuned && !few && !rated && !named(words, "layer")) return;
  skip_arm = named(words, "tensor") ? CORE : named(words, "core") ? TENSOR : -1;
  Master master;
  make_master(t, &master);
  if (checked) check_slices(t, master);
  if (few) check_few(t, master);
  if (rated) rate_slices(t, master);
  if (timed) time_slices(t, master);
  if ((timed || named(words, "layer")) && t->time && skip_arm != TENSOR) {
    time_layer(t, master, 96, 16384, true);
    time_layer(t, master, 12, MASTER_ROWS, false);
  }
  if (tuned) tune_slices(t, master);
  if (big) check_big(t, master);
}
