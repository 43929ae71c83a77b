/* Attention kernels but the slices against float64: KDA, MLA prepare, combine, merge; and their times.
 *
 *   kernel_check --only attention[:WORD,…]   WORD: kda prepare; of the slices (kernel_check_slices.cu) slices few big time layer
 *                                            rate tune, and tensor or core for that arm alone. No word: all but few, rate,
 *                                            tune
 *
 * Outputs start as NaN. Every row has a negative control where one makes sense: a reference with one term broken, which the
 * kernel must not match. */
#include <omp.h>

#include <vector>

#include "kernels/kda.h"
extern "C" {
#include "host/kda.h"
}
#include "tests/kernel_attention.h"

namespace {

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

/* --- prepare and merge --- */

struct PrepareTime { std::vector<K3CudaMlaPrepare> sets; };
K3Status prepare_work(void *context, const K3CudaLaunch *launch, int set)
{
  return k3_cuda_mla_prepare(launch, &((PrepareTime *)context)->sets[set]);
}

void check_prepare(K3Table *t, int64_t heads, int64_t nope, int64_t rope, int64_t v, int64_t latent, K3Type type,
                   K3CudaCacheType cache_type, int64_t world, int64_t rank, int64_t position, bool timed, int64_t q_cols = 0)
{
  const int64_t width = latent + rope, rows = heads * (nope + v), page = 64, capacity = position / world + 2 * page;
  Floats w = random_floats(t, rows * latent, 0.05), given_q = random_floats(t, heads * (nope + rope), 1.0),
         kv = random_floats(t, width, 3.0), norm = random_floats(t, latent, 0.3);
  for (auto &x : norm) x += 1.0f;
  K3CudaMlaPrepare a = {};
  a.heads = heads, a.nope = nope, a.rope = rope, a.v_dim = v, a.latent = latent, a.norm_eps = 1e-6;
  a.kv = upload(kv), a.kv_norm = upload(norm);
  Doubles q(given_q.begin(), given_q.end());
  Floats q_w = random_floats(t, q_cols * heads * (nope + rope), 0.05), q_a = random_floats(t, q_cols, 2.0), q_norm = random_floats(t, q_cols, 0.3);
  if (q_cols > 0) { /* q of the kernel's own making */
    for (auto &x : q_norm) x += 1.0f;
    a.q_a = upload(q_a), a.q_a_norm = upload(q_norm), a.q_b = make_matrix(K3_TYPE_Q8_0, heads * (nope + rope), q_cols, q_w);
    double square = 0;
    for (float x : q_a) square += (double)x * x;
    const double scale = 1.0 / sqrt(square / q_cols + 1e-6);
    for (int64_t r = 0; r < heads * (nope + rope); r++) {
      q[r] = 0;
      for (int64_t c = 0; c < q_cols; c++) q[r] += (double)q_w[r * q_cols + c] * q_a[c] * scale * q_norm[c];
    }
  } else {
    a.q = upload(given_q);
  }
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
      again = q_w;
      if (q_cols > 0) copy.q_b = make_matrix(K3_TYPE_Q8_0, heads * (nope + rope), q_cols, again);
      work.sets.push_back(copy);
    }
    us = k3_table_microseconds(t, prepare_work, &work, 48, 96);
    for (auto &s : work.sets) {
      free_matrix(&s.kv_b);
      if (q_cols > 0) free_matrix(&s.q_b);
    }
  }
  char shape[96], q_b[32] = "";
  if (q_cols > 0) snprintf(q_b, sizeof q_b, ", q_b of %lld", (long long)q_cols);
  snprintf(shape, sizeof shape, "%lld heads, C %lld %s, %lld/%lld%s%s", (long long)heads, (long long)latent, type_names[type],
           (long long)rank, (long long)world, owner ? " owner" : "", q_b);
  /* codes of rms(q_a): 2e-5 of its norm (kernel_device.h) */
  k3_table_row(t, shape, error, q_cols > 0 ? 8e-5 : 2e-6, control, &use, us,
               (double)heads * nope * latent * (type == K3_TYPE_F32 ? 4 : type == K3_TYPE_BF16 ? 2 : 34.0 / 32) +
                   (double)heads * (nope + rope) * q_cols * 34.0 / 32);
  free_matrix(&a.kv_b);
  if (q_cols > 0) free_matrix(&a.q_b);
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

void check_merge(K3Table *t, int64_t heads, int64_t parts, int64_t nope, int64_t v, int64_t latent, K3Type type, bool timed,
                 K3CudaCacheType stored = K3_CACHE_F32, bool codes = true)
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
  std::vector<uint16_t> halves(stored == K3_CACHE_F32 ? 0 : acc.size());
  for (size_t i = 0; i < halves.size(); i++) halves[i] = half_of(stored, acc[i]), acc[i] = half_value(stored, halves[i]);
  const auto by_head = [&](const Floats &x) { /* as the slice kernels leave m and l */
    Floats out(x.size());
    for (int64_t p = 0; p < parts; p++)
      for (int64_t h = 0; h < heads; h++) out[h * parts + p] = x[p * heads + h];
    return out;
  };
  K3CudaMlaMerge a = {};
  a.heads = heads, a.nope = nope, a.v_dim = v, a.latent = latent;
  a.kv_b = make_matrix(type, rows, latent, w);
  a.in = {halves.empty() ? (void *)upload(acc) : (void *)upload(halves), upload(by_head(m)), upload(by_head(l)), parts, heads * latent, 1, parts, stored};
  a.gate = upload(gate);
  a.out = make_vector(heads * v, codes && v % 32 == 0);
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
  snprintf(shape, sizeof shape, "%lld heads, %lld%s parts, v %s", (long long)heads, (long long)parts,
           stored == K3_CACHE_F16 ? " f16" : "", type_names[type]);
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
               (double)k3_cuda_cache_element_bytes(stored) * parts * heads * latent + (double)heads * v * latent * (type == K3_TYPE_F32 ? 4 : type == K3_TYPE_BF16 ? 2 : 34.0 / 32));

  K3CudaMlaCombine b = {};
  b.heads = heads, b.latent = latent, b.in = a.in;
  b.acc = (float *)k3_table_poisoned(heads * latent * 4);
  b.m = (float *)k3_table_poisoned(heads * 4), b.l = (float *)k3_table_poisoned(heads * 4);
  K3_CHECK_STATUS(k3_cuda_mla_combine(&launch, &b));
  error = fmax(error_of(download(b.acc, heads * latent), merged_all), error_of(download(b.l, heads), totals));
  CombineTime context = {b};
  us = timed && t->time ? k3_table_microseconds(t, combine_work, &context, 1, 48) : 0;
  k3_table_row(t, shape, error, 5e-6, INFINITY, &use, us,
               (double)(k3_cuda_cache_element_bytes(stored) * parts + 4) * heads * latent);
  free_matrix(&a.kv_b), free_vector(&a.out);
  cudaFree(b.acc), cudaFree(b.m), cudaFree(b.l);
  cudaFree(const_cast<void *>(a.in.acc)), cudaFree(const_cast<float *>(a.in.m)), cudaFree(const_cast<float *>(a.in.l));
}

} // namespace

void k3_check_attention(K3Table *t, const char *words)
{
  if (!*words || named(words, "kda"))
    for (const KdaCase &c : {KdaCase{12, 128, K3_TYPE_Q8_0, true, false}, {12, 128, K3_TYPE_BF16, true, true},
                             {12, 128, K3_TYPE_F32, false, false}, {96, 128, K3_TYPE_Q8_0, true, false},
                             {3, 60, K3_TYPE_F32, false, false}, {3, 100, K3_TYPE_BF16, false, false},
                             {2, 9, K3_TYPE_F32, false, false}, {2, 160, K3_TYPE_Q8_0, true, false}})
      check_kda(t, c);
  if (!*words || named(words, "prepare")) {
    check_prepare(t, 12, 128, 64, 128, 512, K3_TYPE_Q8_0, K3_CACHE_BF16, 8, 3, 64 * (8 * 5 + 3) + 17, true);
    check_prepare(t, 12, 128, 64, 128, 512, K3_TYPE_Q8_0, K3_CACHE_BF16, 8, 3, 64 * (8 * 5 + 3) + 17, true, 1536);
    check_prepare(t, 7, 96, 40, 24, 200, K3_TYPE_BF16, K3_CACHE_F32, 3, 1, 0, false, 512);
    check_prepare(t, 12, 128, 64, 128, 512, K3_TYPE_BF16, K3_CACHE_F16, 8, 2, 64 * (8 * 5 + 3) + 17, true);
    check_prepare(t, 96, 128, 64, 128, 512, K3_TYPE_Q8_0, K3_CACHE_BF16, 1, 0, 4099, true);
    check_prepare(t, 3, 40, 16, 24, 64, K3_TYPE_F32, K3_CACHE_F32, 1, 0, 129, false);
    check_prepare(t, 5, 160, 8, 72, 200, K3_TYPE_BF16, K3_CACHE_F32, 3, 1, 0, false);
    const int64_t parts[] = {1, 2, 8, 64, 128, 300};
    for (int64_t p : parts) check_merge(t, 12, p, 128, 128, 512, p % 8 ? K3_TYPE_BF16 : K3_TYPE_Q8_0, p == 8 || p >= 64);
    for (K3CudaCacheType stored : {K3_CACHE_F32, K3_CACHE_F16})
      check_merge(t, 96, 64, 128, 128, 512, K3_TYPE_Q8_0, true, stored);
    for (int64_t p : {8, 16, 17}) /* up to 16 ranks' by a kernel of its own; without codes as in a step */
      for (K3Type type : {K3_TYPE_F32, K3_TYPE_BF16, K3_TYPE_Q8_0})
        check_merge(t, 12, p, 128, 128, 512, type, p == 8 && type == K3_TYPE_Q8_0, K3_CACHE_F32, type == K3_TYPE_F32);
    check_merge(t, 3, 7, 40, 24, 64, K3_TYPE_F32, false);
    check_merge(t, 2, 5, 24, 200, 1024, K3_TYPE_BF16, false);
  }
  k3_check_slices(t, words);
}
