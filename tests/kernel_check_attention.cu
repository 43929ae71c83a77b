/* Attention kernels against float64: KDA, MLA prepare, slices (both arms), combine, merge; then their times.
 *
 *   make kernel_check, or by itself:
 *   nvcc -gencode arch=compute_90a,code=sm_90a -O3 -std=c++17 -I. -Isrc -Xcompiler -fopenmp -DK3_ATTENTION_MAIN
 *        tests/kernel_check_attention.cu kernels/{kda,mla_*,launch,repack}.cu … (the host twins with -DK3_BREAKAGE)
 *   ./kernel_check_attention [kda|prepare|mla|time|big|tune|few|timefew …] [seed=N] [time=0] [pdl=0] [arm=core|tensor]    no word: all
 *
 * Outputs start as NaN, and so do the cache rows past the end. Every row has a negative control where one makes sense:
 * a reference with one term broken, which the kernel must not match. */
#include <omp.h>

#include <vector>

#include "kernels/kda.h"
#include "kernels/mla.h"
extern "C" {
#include "base/float16.h"
#include "host/kda.h"
}
#include "tests/kernel_table.h"

namespace {

typedef std::vector<float> Floats;
typedef std::vector<double> Doubles;

double normal_at(uint64_t key, uint64_t index)
{
  double sum = 0;
  for (int i = 0; i < 4; i++)
    sum += (double)(k3_synth_bits(key, 4 * index + i) >> 11) * (2.0 / 9007199254740992.0) - 1.0;
  return sum * 0.8660254037844386;
}

Floats random_floats(K3Table *t, int64_t count, double deviation)
{
  const uint64_t key = k3_table_bits(t);
  Floats out(count);
#pragma omp parallel for
  for (int64_t i = 0; i < count; i++) out[i] = (float)(deviation * normal_at(key, i));
  return out;
}

template <typename T>
T *upload(const std::vector<T> &host) { return (T *)k3_table_upload(host.data(), (int64_t)(host.size() * sizeof(T))); }

Floats download(const float *device, int64_t count)
{
  Floats out(count);
  K3_CHECK_CUDA(cudaDeviceSynchronize());
  K3_CHECK_CUDA(cudaMemcpy(out.data(), device, count * sizeof(float), cudaMemcpyDeviceToHost));
  return out;
}

double error_of(const Floats &got, const Doubles &want) { return k3_table_error(got.data(), want.data(), (int64_t)got.size()); }

/* Weights of one type: `values` become what the stored form decodes to. */
K3CudaMatrix make_matrix(K3Type type, int64_t rows, int64_t cols, Floats &values)
{
  K3CudaMatrix m = {};
  m.type = type, m.rows = rows, m.cols = cols;
  if (type == K3_TYPE_F32) {
    m.codes = upload(values);
  } else if (type == K3_TYPE_BF16) {
    std::vector<uint16_t> halves(values.size());
    for (size_t i = 0; i < values.size(); i++)
      halves[i] = k3_bf16_from_float(values[i]), values[i] = k3_bf16_to_float(halves[i]);
    m.codes = upload(halves);
  } else {
    std::vector<int8_t> codes(values.size());
    std::vector<uint16_t> scales(values.size() / 32);
    for (size_t b = 0; b < scales.size(); b++) {
      float largest = 0;
      for (int i = 0; i < 32; i++) largest = fmaxf(largest, fabsf(values[32 * b + i]));
      scales[b] = k3_f16_from_float(largest / 127.0f);
      const float d = k3_f16_to_float(scales[b]);
      for (int i = 0; i < 32; i++) {
        const float code = d > 0 ? fminf(127, fmaxf(-127, rintf(values[32 * b + i] / d))) : 0;
        codes[32 * b + i] = (int8_t)code, values[32 * b + i] = code * d;
      }
    }
    m.codes = upload(codes), m.scale = upload(scales);
  }
  return m;
}

void free_matrix(K3CudaMatrix *m)
{
  cudaFree(const_cast<void *>(m->codes));
  if (m->scale) cudaFree(const_cast<void *>(m->scale));
}

/* Largest |code · scale - value| in units of half a scale; 1 + a rounding is right. NaN if a code is missing. */
double code_error(const K3CudaVector &out, int64_t count)
{
  const Floats values = download(out.values, count), scales = download(out.scales, count / 32);
  std::vector<int8_t> codes(2 * count);
  K3_CHECK_CUDA(cudaMemcpy(codes.data(), out.codes, 2 * count, cudaMemcpyDeviceToHost));
  double worst = 0;
  for (int64_t i = 0; i < count; i++) {
    float largest = 0;
    for (int j = 0; j < 32; j++) largest = fmaxf(largest, fabsf(values[i / 32 * 32 + j]));
    const double scale = scales[i / 32];
    if (!(fabs(scale - largest / 32512.0) <= 1e-6 * scale)) return NAN;
    worst = fmax(worst, fabs((256 * codes[i] + codes[count + i]) * scale - values[i]) / (0.5 * scale));
  }
  return worst;
}

K3CudaVector make_vector(int64_t count, bool quantised)
{
  K3CudaVector v = {};
  v.values = (float *)k3_table_poisoned(count * 4);
  if (quantised) v.codes = (int8_t *)k3_table_poisoned(2 * count), v.scales = (float *)k3_table_poisoned(count / 8);
  return v;
}

void free_vector(K3CudaVector *v) { cudaFree(v->values), cudaFree(v->codes), cudaFree(v->scales); }

const char *const type_names[] = {"f32", "bf16", "q8_0"};

/* --- KDA --- */

struct KdaCase { int64_t heads, dim; K3Type type; bool quantised, fresh; };

/* The host twin, two steps; `broken` plants a fault. */
Doubles kda_reference(const KdaCase &c, const Floats (&x)[6], const Floats &f_b, const Floats (&conv)[3],
                      const Floats &dt_bias, const Floats &a_log, const Floats &o_norm, Floats &window, Floats &state,
                      const char *broken)
{
  const int64_t n = c.heads * c.dim;
  setenv("K3_BREAK", broken, 1);
  Floats act[3];
  for (int kind = 0; kind < 3; kind++) {
    Doubles in(x[kind].begin(), x[kind].end());
    act[kind].resize(n);
    k3_host_kda_conv(in.data(), conv[kind].data(), n, 4, window.data() + kind * 3 * n, act[kind].data());
  }
  Doubles decay(n, 0.0), gate(x[3].begin(), x[3].end()), beta(x[5].begin(), x[5].end());
  for (int64_t i = 0; i < n; i++)
    for (int64_t j = 0; j < c.dim; j++) decay[i] += (double)f_b[i * c.dim + j] * x[4][j];
  Floats out(n);
  K3KdaArguments a = {c.heads, c.dim, -5.0, 1e-5, act[0].data(), act[1].data(), act[2].data(), decay.data(),
                      dt_bias.data(), a_log.data(), beta.data(), o_norm.data(), gate.data(), state.data(), out.data()};
  k3_host_kda_heads(&a);
  setenv("K3_BREAK", "", 1);
  return Doubles(out.begin(), out.end());
}

struct KdaTime { std::vector<K3CudaKda> sets; };
K3Status kda_work(void *context, const K3CudaLaunch *launch, int set)
{
  return k3_cuda_kda(launch, &((KdaTime *)context)->sets[set]);
}

void check_kda(K3Table *t, const KdaCase &c)
{
  const int64_t n = c.heads * c.dim, D = c.dim;
  Floats f_b = random_floats(t, n * D, 1.0 / sqrt((double)D)), conv[3], dt_bias = random_floats(t, n, 2.0),
         a_log = random_floats(t, c.heads, 0.5), o_norm = random_floats(t, D, 0.3), state(n * D, 0.0f),
         window(9 * n, 0.0f);
  for (auto &v : o_norm) v += 1.0f;
  for (auto &k : conv) k = random_floats(t, n * 4, 0.5);
  if (!c.fresh) state = random_floats(t, n * D, 0.3), window = random_floats(t, 9 * n, 1.0);
  K3CudaKda a = {};
  a.heads = c.heads, a.head_dim = D, a.kernel = 4, a.gate_lower_bound = -5.0, a.rms_norm_eps = 1e-5;
  a.f_b = make_matrix(c.type, n, D, f_b);
  float *d_x[6];
  const int64_t sizes[6] = {n, n, n, n, D, c.heads}; /* q k v gate f_a beta */
  for (int i = 0; i < 6; i++) d_x[i] = (float *)k3_table_poisoned(sizes[i] * 4);
  a.q = d_x[0], a.k = d_x[1], a.v = d_x[2], a.gate = d_x[3], a.f_a = d_x[4], a.beta = d_x[5];
  a.q_conv = upload(conv[0]), a.k_conv = upload(conv[1]), a.v_conv = upload(conv[2]);
  a.dt_bias = upload(dt_bias), a.a_log = upload(a_log), a.o_norm = upload(o_norm);
  Floats transposed(n * D);
  for (int64_t h = 0; h < c.heads; h++)
    for (int64_t i = 0; i < D; i++)
      for (int64_t j = 0; j < D; j++) transposed[(h * D + j) * D + i] = state[(h * D + i) * D + j];
  a.state = upload(transposed), a.window = upload(window);
  a.out = make_vector(n, c.quantised);

  K3CudaUse use;
  K3CudaLaunch launch;
  K3_CHECK_STATUS(k3_cuda_launch_init(0, t->pdl, &launch));
  launch.use = &use;
  double error = 0, control = INFINITY, quantised = 0;
  Floats state_broken[2] = {state, state}, window_broken[2] = {window, window};
  for (int step = 0; step < 3; step++) { /* the window shifts, the state carries on */
    Floats x[6];
    for (int i = 0; i < 6; i++) {
      x[i] = random_floats(t, sizes[i], 1.0);
      K3_CHECK_CUDA(cudaMemcpy(d_x[i], x[i].data(), sizes[i] * 4, cudaMemcpyHostToDevice));
    }
    K3_CHECK_STATUS(k3_cuda_kda(&launch, &a));
    const Floats got = download(a.out.values, n);
    const Doubles want = kda_reference(c, x, f_b, conv, dt_bias, a_log, o_norm, window, state, "");
    error = fmax(error, error_of(got, want));
    if (c.quantised) quantised = fmax(quantised, code_error(a.out, n));
    const char *const faults[2] = {"conv_tap_order", "decay_axis"};
    for (int f = 0; f < 2; f++) {
      const double e = error_of(got, kda_reference(c, x, f_b, conv, dt_bias, a_log, o_norm, window_broken[f],
                                                   state_broken[f], faults[f]));
      if (step == 2) control = fmin(control, e);
    }
    if (error != error) break;
  }
  const Floats got_state = download(a.state, n * D), got_window = download(a.window, 9 * n);
  Doubles want_state(n * D), want_window(window.begin(), window.end());
  for (int64_t h = 0; h < c.heads; h++)
    for (int64_t i = 0; i < D; i++)
      for (int64_t j = 0; j < D; j++) want_state[(h * D + j) * D + i] = state[(h * D + i) * D + j];
  error = fmax(error, fmax(error_of(got_state, want_state), error_of(got_window, want_window)));
  if (!(quantised <= 1.01)) error = NAN;

  double us = 0;
  if (t->time) {
    KdaTime work; /* 69 layers' worth of states, past the L2 */
    for (int i = 0; i < 69; i++) {
      K3CudaKda copy = a;
      copy.state = upload(transposed);
      copy.window = upload(window);
      work.sets.push_back(copy);
    }
    us = k3_table_microseconds(t, kda_work, &work, 69, 138);
    for (auto &w : work.sets) cudaFree(w.state), cudaFree(w.window);
  }
  char shape[80];
  snprintf(shape, sizeof shape, "%lld heads, D %lld, f_b %s%s", (long long)c.heads, (long long)D, type_names[c.type],
           c.fresh ? ", zero state" : "");
  const double f_b_bytes = (double)n * D * (c.type == K3_TYPE_F32 ? 4 : c.type == K3_TYPE_BF16 ? 2 : 34.0 / 32);
  k3_table_row(t, shape, error, 2e-5, control, &use, us, 8.0 * n * D + f_b_bytes + 4.0 * n * 30);
  free_matrix(&a.f_b), free_vector(&a.out);
  for (float *x : d_x) cudaFree(x);
  cudaFree(a.state), cudaFree(a.window);
}

/* --- MLA --- */

constexpr int64_t MASTER_ROWS = 131072, C0 = 512, R0 = 64, W0 = C0 + R0;

/* One cache of random rows, in three types; shapes take its first rows. */
struct Master {
  Floats as[3];    /* what the stored values are: f32, bf16, f16 */
  void *device[3];
};

uint16_t half_of(K3CudaCacheType type, float x) { return type == K3_CACHE_BF16 ? k3_bf16_from_float(x) : k3_f16_from_float(x); }
float half_value(K3CudaCacheType type, uint16_t x) { return type == K3_CACHE_BF16 ? k3_bf16_to_float(x) : k3_f16_to_float(x); }

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

struct SliceCase {
  Arm arm;
  K3CudaCacheType type;
  int64_t heads, rows;
  Kind kind;
  int64_t force, check_heads; /* slices, 0: planned; heads compared, 0: all */
  int64_t latent, rope;
};

int apart = 0, ahead = 0; /* settings of the tensor arm being timed */
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

struct SliceTime { std::vector<K3CudaMlaSlice> sets; Arm arm; };
K3Status slice_work(void *context, const K3CudaLaunch *launch, int set)
{
  SliceTime *w = (SliceTime *)context;
  return w->arm == TENSOR ? k3_cuda_mla_tensor(launch, &w->sets[set]) : k3_cuda_mla_slice(launch, &w->sets[set]);
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
double check_slice(K3Table *t, const Master &master, const SliceCase &c, bool timed, double allowed)
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
  s.apart = apart, s.ahead = ahead;
  s.query = c.arm == TENSOR ? (void *)upload(halves) : (void *)upload(query);
  s.cache = cache, s.cache_type = c.type, s.capacity = capacity, s.rows = upload(rows);
  s.acc = (float *)k3_table_poisoned(plan.acc_floats * 4);
  s.m = (float *)k3_table_poisoned(plan.ml_floats * 2), s.l = (float *)k3_table_poisoned(plan.ml_floats * 2);
  K3_CHECK_STATUS(c.arm == TENSOR ? k3_cuda_mla_tensor(&launch, &s) : k3_cuda_mla_slice(&launch, &s));
  launch.use = NULL;
  K3CudaMlaCombine combine = {};
  combine.heads = c.heads, combine.latent = c.latent;
  combine.in = {s.acc, s.m, s.l, plan.slices, c.heads * c.latent, 1, plan.slices};
  combine.acc = (float *)k3_table_poisoned(c.heads * c.latent * 4);
  combine.m = (float *)k3_table_poisoned(c.heads * 4), combine.l = (float *)k3_table_poisoned(c.heads * 4);
  K3_CHECK_STATUS(k3_cuda_mla_combine(&launch, &combine));
  const Floats acc = download(combine.acc, c.heads * c.latent), l = download(combine.l, c.heads), top_m = download(combine.m, c.heads);
  const Floats parts = download(s.acc, plan.acc_floats), ms = download(s.m, plan.ml_floats / 2),
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

  double us = 0;
  if (timed && t->time) {
    SliceTime work;
    work.arm = c.arm;
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
    us = k3_table_microseconds(t, slice_work, &work, sets, c.arm == TENSOR ? 24 : 6);
    for (int i = 1; i < sets; i++) cudaFree(const_cast<void *>(work.sets[i].cache));
  }
  static const char *const cache_names[] = {"f32", "bf16", "f16"};
  char shape[96];
  snprintf(shape, sizeof shape, "%lldx%lld %s %lldsl%s%s", (long long)c.heads, (long long)c.rows, cache_names[c.type],
           (long long)plan.slices, kind_names[c.kind], apart ? " apart" : "");
  if (ahead) snprintf(shape + strlen(shape), sizeof shape - strlen(shape), " ahead %d", ahead);
  k3_table_row(t, shape, error, allowed, control, &use, us, (double)c.rows * row_bytes);
  cudaFree(cache), cudaFree(const_cast<void *>(s.query)), cudaFree(const_cast<int64_t *>(s.rows));
  cudaFree(s.acc), cudaFree(s.m), cudaFree(s.l), cudaFree(combine.acc), cudaFree(combine.m), cudaFree(combine.l);
  return error;
}

const double ALLOWED_F32 = 2e-5, ALLOWED_BF16 = 4e-3, ALLOWED_F16 = 6e-4;

void check_slices(K3Table *t, const Master &master)
{
  const int64_t rows[] = {4, 63, 4096, 12289, 20000}, heads[] = {8, 12, 24, 96};
  for (int64_t h : heads)
    for (int64_t r : rows) {
      check_slice(t, master, {TENSOR, K3_CACHE_BF16, h, r, RANDOM, 0, h > 12 && r > 5000 ? 6 : 0, C0, R0}, false, ALLOWED_BF16);
      if (h != 24 || r == 12289)
        check_slice(t, master, {CORE, h == 96 ? K3_CACHE_BF16 : K3_CACHE_F32, h, r, RANDOM, 0, h > 12 && r > 5000 ? 6 : 0, C0, R0},
                    false, ALLOWED_F32);
    }
  for (int kind = LARGE; kind <= PEAK; kind++) {
    const Kind k = (Kind)kind;
    /* A one-hot softmax with equal 16-bit inputs on both sides: f32 rounding of scores of some hundreds is left. */
    check_slice(t, master, {TENSOR, K3_CACHE_BF16, 12, 12289, k, 0, 0, C0, R0}, false, ALLOWED_BF16);
    check_slice(t, master, {TENSOR, K3_CACHE_F16, 96, 12289, k, 0, 8, C0, R0}, false, k == LARGE ? 1e-3 : ALLOWED_F16);
    check_slice(t, master, {TENSOR, K3_CACHE_F16, 24, 63, k, 0, 0, C0, R0}, false, k == LARGE ? 1e-3 : ALLOWED_F16);
    check_slice(t, master, {CORE, K3_CACHE_F32, 12, 12289, k, 0, 0, C0, R0}, false, k == LARGE ? 2e-4 : ALLOWED_F32);
    check_slice(t, master, {CORE, K3_CACHE_F16, 3, 129, k, 0, 0, 64, 16}, false, k == LARGE ? 2e-4 : ALLOWED_F32);
  }
  const int64_t few[] = {1, 2, 5, 63}; /* 64 slices */
  for (int64_t r : few) {
    check_slice(t, master, {TENSOR, K3_CACHE_BF16, 12, r, RANDOM, 64, 0, C0, R0}, false, ALLOWED_BF16);
    check_slice(t, master, {TENSOR, K3_CACHE_BF16, 96, r, RANDOM, 64, 0, C0, R0}, false, ALLOWED_BF16);
    check_slice(t, master, {CORE, K3_CACHE_F32, 12, r, RANDOM, 64, 0, C0, R0}, false, ALLOWED_F32);
  }
  for (int64_t r : {(int64_t)20000, MASTER_ROWS}) { /* splitting is more accurate, not less */
    const double one = check_slice(t, master, {CORE, K3_CACHE_F32, 12, r, RANDOM, 1, 0, C0, R0}, false, 1e-4);
    const double split = check_slice(t, master, {CORE, K3_CACHE_F32, 12, r, RANDOM, 0, 0, C0, R0}, false, 1e-4);
    printf("# %lld rows, f32: one slice %.2e, split %.2e: %s\n", (long long)r, one, split,
           split <= one ? "splitting is more accurate" : "FAIL splitting is less accurate");
    if (!(split <= one)) t->failures++;
  }
}

void time_slices(K3Table *t, const Master &master)
{
  for (K3CudaCacheType type : {K3_CACHE_BF16, K3_CACHE_F16}) {
    const double allowed = type == K3_CACHE_BF16 ? ALLOWED_BF16 : ALLOWED_F16;
    check_slice(t, master, {TENSOR, type, 96, 16384, RANDOM, 0, 12, C0, R0}, true, allowed);
    check_slice(t, master, {TENSOR, type, 12, MASTER_ROWS, RANDOM, 0, 0, C0, R0}, true, allowed);
  }
  check_slice(t, master, {TENSOR, K3_CACHE_BF16, 24, MASTER_ROWS, RANDOM, 0, 4, C0, R0}, true, ALLOWED_BF16);
  check_slice(t, master, {TENSOR, K3_CACHE_BF16, 48, 16384, RANDOM, 0, 4, C0, R0}, true, ALLOWED_BF16);
  check_slice(t, master, {TENSOR, K3_CACHE_BF16, 96, MASTER_ROWS, RANDOM, 0, 4, C0, R0}, true, ALLOWED_BF16);
  check_slice(t, master, {CORE, K3_CACHE_BF16, 96, 16384, RANDOM, 0, 4, C0, R0}, true, ALLOWED_F32);
  check_slice(t, master, {CORE, K3_CACHE_BF16, 12, MASTER_ROWS, RANDOM, 0, 4, C0, R0}, true, ALLOWED_F32);
  for (int64_t r : {16, 64, 128, 256, 512, 1024, 4096}) { /* where splitting begins to pay */
    check_slice(t, master, {CORE, K3_CACHE_BF16, 12, r, RANDOM, 1, 2, C0, R0}, true, ALLOWED_F32);
    check_slice(t, master, {TENSOR, K3_CACHE_BF16, 12, r, RANDOM, 1, 2, C0, R0}, true, ALLOWED_BF16);
    if (r > 64) check_slice(t, master, {TENSOR, K3_CACHE_BF16, 12, r, RANDOM, (r + 63) / 64, 2, C0, R0}, true, ALLOWED_BF16);
  }
}

/* The tensor arm's two settings: loads shared by a pair of passes, tiles asked of the L2 ahead; and slice counts. */
void tune_slices(K3Table *t, const Master &master)
{
  for (apart = 0; apart < 2; apart++)
    for (int a : {0, 1, 2, 4}) {
      ahead = a;
      check_slice(t, master, {TENSOR, K3_CACHE_BF16, 96, 16384, RANDOM, 0, 2, C0, R0}, true, ALLOWED_BF16);
      if (a < 4) check_slice(t, master, {TENSOR, K3_CACHE_BF16, 96, MASTER_ROWS, RANDOM, 0, 2, C0, R0}, true, ALLOWED_BF16);
    }
  apart = 0;
  for (int a : {0, 1, 4}) {
    ahead = a;
    check_slice(t, master, {TENSOR, K3_CACHE_BF16, 12, MASTER_ROWS, RANDOM, 0, 2, C0, R0}, true, ALLOWED_BF16);
    check_slice(t, master, {TENSOR, K3_CACHE_BF16, 48, 16384, RANDOM, 0, 2, C0, R0}, true, ALLOWED_BF16);
  }
  ahead = 0;
  for (int64_t slices : {16, 32, 43, 66})
    check_slice(t, master, {TENSOR, K3_CACHE_BF16, 96, 16384, RANDOM, slices, 2, C0, R0}, true, ALLOWED_BF16);
  for (int64_t slices : {32, 64, 132})
    check_slice(t, master, {TENSOR, K3_CACHE_BF16, 12, MASTER_ROWS, RANDOM, slices, 2, C0, R0}, true, ALLOWED_BF16);
}

/* A few small shapes, for compute-sanitizer. */
void check_few(K3Table *t, const Master &master)
{
  check_slice(t, master, {TENSOR, K3_CACHE_BF16, 12, 12289, RANDOM, 0, 1, C0, R0}, false, ALLOWED_BF16);
  check_slice(t, master, {TENSOR, K3_CACHE_F16, 96, 300, PEAK, 0, 1, C0, R0}, false, ALLOWED_F16);
  check_slice(t, master, {TENSOR, K3_CACHE_F16, 24, 5, RANDOM, 4, 1, C0, R0}, false, ALLOWED_F16);
  check_slice(t, master, {CORE, K3_CACHE_F32, 12, 12289, RANDOM, 0, 1, C0, R0}, false, ALLOWED_F32);
  check_slice(t, master, {CORE, K3_CACHE_F16, 3, 129, RANDOM, 64, 1, 64, 16}, false, ALLOWED_F32);
}

/* The two shapes of a rank of eight alone. */
void time_few(K3Table *t, const Master &master)
{
  check_slice(t, master, {TENSOR, K3_CACHE_BF16, 96, 16384, RANDOM, 0, 1, C0, R0}, true, ALLOWED_BF16);
  check_slice(t, master, {TENSOR, K3_CACHE_BF16, 96, MASTER_ROWS, RANDOM, 0, 1, C0, R0}, true, ALLOWED_BF16);
  check_slice(t, master, {TENSOR, K3_CACHE_BF16, 12, MASTER_ROWS, RANDOM, 0, 1, C0, R0}, true, ALLOWED_BF16);
}

/* Past 2^31 bytes, and the last row the one that counts. */
void check_big(K3Table *t, const Master &master)
{
  check_slice(t, master, {TENSOR, K3_CACHE_BF16, 12, 1864140, PEAK, 0, 2, C0, R0}, false, ALLOWED_BF16);
  check_slice(t, master, {CORE, K3_CACHE_BF16, 12, 1864140, PEAK, 0, 2, C0, R0}, false, 1e-4);
}

/* --- prepare and merge --- */

struct PrepareTime { std::vector<K3CudaMlaPrepare> sets; };
K3Status prepare_work(void *context, const K3CudaLaunch *launch, int set)
{
  return k3_cuda_mla_prepare(launch, &((PrepareTime *)context)->sets[set]);
}

void check_prepare(K3Table *t, int64_t heads, int64_t nope, int64_t rope, int64_t v, int64_t latent, K3Type type,
                   K3CudaCacheType cache_type, int64_t world, int64_t rank, int64_t position, bool timed)
{
  const int64_t width = latent + rope, rows = heads * (nope + v), page = 64, capacity = position / world + 2 * page;
  Floats w = random_floats(t, rows * latent, 0.05), q = random_floats(t, heads * (nope + rope), 1.0),
         kv = random_floats(t, width, 3.0), norm = random_floats(t, latent, 0.3);
  for (auto &x : norm) x += 1.0f;
  K3CudaMlaPrepare a = {};
  a.heads = heads, a.nope = nope, a.rope = rope, a.v_dim = v, a.latent = latent, a.norm_eps = 1e-6;
  a.q = upload(q), a.kv = upload(kv), a.kv_norm = upload(norm);
  a.kv_b = make_matrix(type, rows, latent, w);
  a.position = upload(std::vector<int64_t>(1, position));
  a.page_positions = page, a.world = world, a.rank = rank, a.capacity = capacity, a.cache_type = cache_type;
  const int64_t element = k3_cuda_cache_element_bytes(cache_type);
  a.cache = k3_table_poisoned(capacity * width * element);
  a.query = (float *)k3_table_poisoned(heads * width * 4);
  if (cache_type != K3_CACHE_F32) a.query16 = k3_table_poisoned(heads * width * 2);
  K3CudaUse use;
  K3CudaLaunch launch;
  K3_CHECK_STATUS(k3_cuda_launch_init(0, t->pdl, &launch));
  launch.use = &use;
  K3_CHECK_STATUS(k3_cuda_mla_prepare(&launch, &a));

  Doubles want(heads * width), wrong(heads * width); /* control: the v rows in place of the nope rows */
  for (int64_t h = 0; h < heads; h++) {
    for (int64_t n = 0; n < nope; n++)
      for (int64_t c = 0; c < latent; c++) {
        want[h * width + c] += (double)w[(h * (nope + v) + n) * latent + c] * q[h * (nope + rope) + n];
        wrong[h * width + c] += (double)w[(h * (nope + v) + (n + v) % (nope + v)) * latent + c] * q[h * (nope + rope) + n];
      }
    for (int64_t r = 0; r < rope; r++) want[h * width + latent + r] = wrong[h * width + latent + r] = q[h * (nope + rope) + nope + r];
  }
  const Floats got = download(a.query, heads * width);
  double error = error_of(got, want), control = error_of(got, wrong);
  if (a.query16) {
    std::vector<uint16_t> halves(heads * width);
    K3_CHECK_CUDA(cudaMemcpy(halves.data(), a.query16, halves.size() * 2, cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < halves.size(); i++)
      if (halves[i] != half_of(cache_type, got[i])) error = NAN;
  }
  /* the new row, and only on its owner */
  double square = 0;
  for (int64_t c = 0; c < latent; c++) square += (double)kv[c] * kv[c];
  const double factor = 1.0 / sqrt(square / latent + 1e-6);
  const bool owner = position / page % world == rank;
  const int64_t row = position / page / world * page + position % page;
  std::vector<char> cache(capacity * width * element);
  K3_CHECK_CUDA(cudaMemcpy(cache.data(), a.cache, cache.size(), cudaMemcpyDeviceToHost));
  for (int64_t i = 0; i < capacity * width; i++) {
    if (owner && i / width == row) {
      const int64_t c = i % width;
      const double value = c < latent ? kv[c] * factor * norm[c] : kv[c];
      const double stored = cache_type == K3_CACHE_F32 ? ((float *)cache.data())[i] : half_value(cache_type, ((uint16_t *)cache.data())[i]);
      const double step = cache_type == K3_CACHE_F32 ? 1e-6 : cache_type == K3_CACHE_BF16 ? 1.0 / 255 : 1.0 / 2040;
      if (!(fabs(stored - value) <= step * fabs(value) + 1e-7)) error = NAN;
    } else
      for (int64_t b = 0; b < element; b++)
        if ((unsigned char)cache[i * element + b] != 0xff) error = NAN;
  }
  double us = 0;
  if (timed && t->time) {
    PrepareTime work;
    std::vector<K3CudaMatrix> copies;
    for (int i = 0; i < 48; i++) {
      K3CudaMlaPrepare copy = a;
      Floats again = w;
      copy.kv_b = make_matrix(type, rows, latent, again);
      work.sets.push_back(copy);
    }
    us = k3_table_microseconds(t, prepare_work, &work, 48, 96);
    for (auto &s : work.sets) free_matrix(&s.kv_b);
  }
  char shape[96];
  snprintf(shape, sizeof shape, "%lld heads, C %lld %s, %lld/%lld%s", (long long)heads, (long long)latent, type_names[type],
           (long long)rank, (long long)world, owner ? " owner" : "");
  k3_table_row(t, shape, error, 2e-6, control, &use, us,
               (double)heads * nope * latent * (type == K3_TYPE_F32 ? 4 : type == K3_TYPE_BF16 ? 2 : 34.0 / 32));
  free_matrix(&a.kv_b);
  cudaFree(a.cache), cudaFree(a.query), cudaFree(a.query16);
}

struct MergeTime { std::vector<K3CudaMlaMerge> sets; };
K3Status merge_work(void *context, const K3CudaLaunch *launch, int set)
{
  return k3_cuda_mla_merge(launch, &((MergeTime *)context)->sets[set]);
}
struct CombineTime { K3CudaMlaCombine a; };
K3Status combine_work(void *context, const K3CudaLaunch *launch, int)
{
  return k3_cuda_mla_combine(launch, &((CombineTime *)context)->a);
}

void check_merge(K3Table *t, int64_t heads, int64_t parts, int64_t nope, int64_t v, int64_t latent, K3Type type, bool timed)
{
  const int64_t rows = heads * (nope + v);
  Floats w = random_floats(t, rows * latent, 0.05), acc = random_floats(t, parts * heads * latent, 20.0),
         m = random_floats(t, parts * heads, 4.0), l = random_floats(t, parts * heads, 0.2),
         gate = random_floats(t, heads * v, 1.0);
  for (auto &x : l) x = 100.0f * fabsf(1.0f + x) + 1.0f;
  for (int64_t p = 0; p < parts; p += 3) /* every third part is empty, unless that leaves none */
    for (int64_t h = 0; h < heads && parts > 1; h++) {
      m[p * heads + h] = -1e30f, l[p * heads + h] = 0.0f;
      for (int64_t c = 0; c < latent; c++) acc[(p * heads + h) * latent + c] = 0.0f;
    }
  const auto by_head = [&](const Floats &x) { /* as the slice kernels leave m and l */
    Floats out(x.size());
    for (int64_t p = 0; p < parts; p++)
      for (int64_t h = 0; h < heads; h++) out[h * parts + p] = x[p * heads + h];
    return out;
  };
  K3CudaMlaMerge a = {};
  a.heads = heads, a.nope = nope, a.v_dim = v, a.latent = latent;
  a.kv_b = make_matrix(type, rows, latent, w);
  a.in = {upload(acc), upload(by_head(m)), upload(by_head(l)), parts, heads * latent, 1, parts};
  a.gate = upload(gate);
  a.out = make_vector(heads * v, v % 32 == 0);
  K3CudaUse use;
  K3CudaLaunch launch;
  K3_CHECK_STATUS(k3_cuda_launch_init(0, t->pdl, &launch));
  launch.use = &use;
  K3_CHECK_STATUS(k3_cuda_mla_merge(&launch, &a));

  Doubles want(heads * v), plain(heads * v), merged_all(heads * latent), totals(heads);
  for (int64_t h = 0; h < heads; h++)
    for (int broken = 0; broken < 2; broken++) { /* control: no rescaling */
      double M = -INFINITY, L = 0;
      Doubles merged(latent, 0.0);
      for (int64_t p = 0; p < parts; p++) M = fmax(M, (double)m[p * heads + h]);
      for (int64_t p = 0; p < parts; p++) {
        const double f = broken ? 1.0 : exp2(m[p * heads + h] - M);
        L += l[p * heads + h] * f;
        for (int64_t c = 0; c < latent; c++) merged[c] += acc[(p * heads + h) * latent + c] * f;
      }
      for (int64_t r = 0; r < v; r++) {
        double sum = 0;
        for (int64_t c = 0; c < latent; c++) sum += (double)w[(h * (nope + v) + nope + r) * latent + c] * merged[c] / L;
        (broken ? plain : want)[h * v + r] = sum / (1.0 + exp(-(double)gate[h * v + r]));
      }
      if (!broken) {
        totals[h] = L;
        for (int64_t c = 0; c < latent; c++) merged_all[h * latent + c] = merged[c];
      }
    }
  const Floats got = download(a.out.values, heads * v);
  double error = error_of(got, want), control = parts > 2 ? error_of(got, plain) : INFINITY, us = 0;
  if (a.out.codes && !(code_error(a.out, heads * v) <= 1.01)) error = NAN;
  char shape[96];
  snprintf(shape, sizeof shape, "%lld heads, %lld parts, v %s", (long long)heads, (long long)parts, type_names[type]);
  if (timed && t->time) {
    MergeTime work;
    for (int i = 0; i < 24; i++) {
      K3CudaMlaMerge copy = a;
      Floats again = w;
      copy.kv_b = make_matrix(type, rows, latent, again);
      work.sets.push_back(copy);
    }
    us = k3_table_microseconds(t, merge_work, &work, 24, 96);
    for (auto &s : work.sets) free_matrix(&s.kv_b);
  }
  k3_table_row(t, shape, error, 5e-6, control, &use, us,
               4.0 * parts * heads * latent + (double)heads * v * latent * (type == K3_TYPE_F32 ? 4 : type == K3_TYPE_BF16 ? 2 : 34.0 / 32));

  K3CudaMlaCombine b = {};
  b.heads = heads, b.latent = latent, b.in = a.in;
  b.acc = (float *)k3_table_poisoned(heads * latent * 4);
  b.m = (float *)k3_table_poisoned(heads * 4), b.l = (float *)k3_table_poisoned(heads * 4);
  K3_CHECK_STATUS(k3_cuda_mla_combine(&launch, &b));
  error = fmax(error_of(download(b.acc, heads * latent), merged_all), error_of(download(b.l, heads), totals));
  CombineTime context = {b};
  us = timed && t->time ? k3_table_microseconds(t, combine_work, &context, 1, 48) : 0;
  k3_table_row(t, shape, error, 5e-6, INFINITY, &use, us, 4.0 * (parts + 1) * heads * latent);
  free_matrix(&a.kv_b), free_vector(&a.out);
  cudaFree(b.acc), cudaFree(b.m), cudaFree(b.l);
  cudaFree(const_cast<float *>(a.in.acc)), cudaFree(const_cast<float *>(a.in.m)), cudaFree(const_cast<float *>(a.in.l));
}

/* --- a whole MLA layer's attention, chained: prepare, slice, [combine,] merge --- */

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
  p.q = upload(random_floats(t, own * 192, 1.0)), p.kv = upload(random_floats(t, W0, 1.0)), p.kv_norm = upload(random_floats(t, C0, 1.0));
  p.position = upload(std::vector<int64_t>(1, rows - 1)), p.page_positions = 64, p.world = 1, p.rank = 0, p.capacity = rows;
  p.cache_type = K3_CACHE_BF16;
  p.query = (float *)k3_table_poisoned(attended * W0 * 4), p.query16 = upload(std::vector<uint16_t>(attended * W0, 0x3c00));
  K3CudaMlaSlice s = {};
  s.heads = attended, s.latent = C0, s.rope = R0, s.heads_per_pass = plan.heads_per_pass, s.slices = plan.slices;
  s.scale = 1 / sqrt(192.0), s.query = p.query16, s.cache_type = K3_CACHE_BF16, s.capacity = rows;
  s.rows = upload(std::vector<int64_t>(1, rows));
  s.acc = (float *)k3_table_poisoned(plan.acc_floats * 4);
  s.m = (float *)k3_table_poisoned(plan.ml_floats * 2), s.l = (float *)k3_table_poisoned(plan.ml_floats * 2);
  for (int i = 0; i < 24; i++) { /* 24 layers' own caches */
    char *cache = (char *)k3_table_poisoned(rows * W0 * 2);
    K3_CHECK_CUDA(cudaMemcpy(cache, master.device[1], rows * W0 * 2, cudaMemcpyDeviceToDevice));
    s.cache = cache;
    l.slices.push_back(s);
  }
  l.combine.heads = attended, l.combine.latent = C0;
  l.combine.in = {s.acc, s.m, s.l, plan.slices, attended * C0, 1, plan.slices};
  l.combine.acc = (float *)k3_table_poisoned(attended * C0 * 4);
  l.combine.m = (float *)k3_table_poisoned(attended * 4), l.combine.l = (float *)k3_table_poisoned(attended * 4);
  l.merge.heads = own, l.merge.nope = 128, l.merge.v_dim = 128, l.merge.latent = C0, l.merge.kv_b = kv_b;
  /* eight ranks' partials of own heads: as many parts as the combined ones hold */
  l.merge.in = l.combine.in;
  if (combines) l.merge.in = {l.combine.acc, l.combine.m, l.combine.l, attended / own, own * C0, own, 1};
  l.merge.gate = upload(random_floats(t, own * 128, 1.0)), l.merge.out = make_vector(own * 128, true);
  for (int pdl = 0; pdl < 2; pdl++) {
    K3Table timing = *t;
    timing.pdl = pdl;
    const double us = k3_table_microseconds(&timing, layer_work, &l, 24, 24);
    printf("# layer: prepare + tensor%s + merge, %lld heads x %lld rows, pdl %d: %.2f us a layer, %.3f ms for 24\n",
           combines ? " + combine" : "", (long long)attended, (long long)rows, pdl, us, us * 0.024);
  }
  for (auto &x : l.slices) cudaFree(const_cast<void *>(x.cache));
}

bool wanted(int argc, char **argv, const char *word)
{
  bool any = false;
  for (int i = 1; i < argc; i++) {
    if (strchr(argv[i], '=')) continue; /* a setting */
    any = true;
    if (strcmp(argv[i], word) == 0) return true;
  }
  return !any;
}

void run(K3Table *t, int argc, char **argv)
{
  if (wanted(argc, argv, "kda"))
    for (const KdaCase &c : {KdaCase{12, 128, K3_TYPE_Q8_0, true, false}, {12, 128, K3_TYPE_BF16, true, true},
                             {12, 128, K3_TYPE_F32, false, false}, {96, 128, K3_TYPE_Q8_0, true, false},
                             {3, 60, K3_TYPE_F32, false, false}, {3, 100, K3_TYPE_BF16, false, false},
                             {2, 9, K3_TYPE_F32, false, false}, {2, 160, K3_TYPE_Q8_0, true, false}})
      check_kda(t, c);
  if (wanted(argc, argv, "prepare")) {
    check_prepare(t, 12, 128, 64, 128, 512, K3_TYPE_Q8_0, K3_CACHE_BF16, 8, 3, 64 * (8 * 5 + 3) + 17, true);
    check_prepare(t, 12, 128, 64, 128, 512, K3_TYPE_BF16, K3_CACHE_F16, 8, 2, 64 * (8 * 5 + 3) + 17, true);
    check_prepare(t, 96, 128, 64, 128, 512, K3_TYPE_Q8_0, K3_CACHE_BF16, 1, 0, 4099, true);
    check_prepare(t, 3, 40, 16, 24, 64, K3_TYPE_F32, K3_CACHE_F32, 1, 0, 129, false);
    check_prepare(t, 5, 160, 8, 72, 200, K3_TYPE_BF16, K3_CACHE_F32, 3, 1, 0, false);
    const int64_t parts[] = {1, 2, 8, 64, 128, 300};
    for (int64_t p : parts) check_merge(t, 12, p, 128, 128, 512, p % 8 ? K3_TYPE_BF16 : K3_TYPE_Q8_0, p == 8 || p >= 64);
    check_merge(t, 96, 64, 128, 128, 512, K3_TYPE_Q8_0, true);
    check_merge(t, 3, 7, 40, 24, 64, K3_TYPE_F32, false);
    check_merge(t, 2, 5, 24, 200, 1024, K3_TYPE_BF16, false);
  }
  const bool mla = wanted(argc, argv, "mla"), timed = wanted(argc, argv, "time"), big = wanted(argc, argv, "big");
  const bool tuned = argc > 1 && wanted(argc, argv, "tune");
  const bool few = argc > 1 && wanted(argc, argv, "few"), timed_few = argc > 1 && wanted(argc, argv, "timefew");
  if (!mla && !timed && !big && !tuned && !few && !timed_few) return;
  Master master;
  make_master(t, &master);
  if (mla) check_slices(t, master);
  if (timed) time_slices(t, master);
  if (timed && t->time && skip_arm != TENSOR) {
    time_layer(t, master, 96, 16384, true);
    time_layer(t, master, 12, MASTER_ROWS, false);
  }
  if (tuned) tune_slices(t, master);
  if (few) check_few(t, master);
  if (timed_few) time_few(t, master);
  if (big) check_big(t, master);
}

} // namespace

void k3_check_attention(K3Table *table)
{
  char name[] = "kernel_check";
  char *argv[] = {name, NULL};
  run(table, 1, argv);
}

#ifdef K3_ATTENTION_MAIN
#include <time.h>
int main(int argc, char **argv)
{
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  K3Table table = {};
  table.random = (uint64_t)now.tv_sec * 1000003u + (uint64_t)now.tv_nsec;
  for (int i = 1; i < argc; i++)
    if (strncmp(argv[i], "seed=", 5) == 0) table.random = strtoull(argv[i] + 5, NULL, 0);
  table.time = 1, table.pdl = 1;
  for (int i = 1; i < argc; i++) {
    if (strcmp(argv[i], "time=0") == 0) table.time = 0;
    if (strcmp(argv[i], "pdl=0") == 0) table.pdl = 0;
    if (strcmp(argv[i], "arm=tensor") == 0) skip_arm = CORE;
    if (strcmp(argv[i], "arm=core") == 0) skip_arm = TENSOR;
  }
  printf("# seed=%llu pdl=%d\n", (unsigned long long)table.random, table.pdl);
  k3_table_header();
  run(&table, argc, argv);
  printf("# %d rows, %d failures\n", table.rows, table.failures);
  return table.failures != 0;
}
#endif
