/* What the checks of the attention kernels share: random inputs, weights of each type, arrays to and from the device.
 * Included by tests/kernel_check_attention.cu and tests/kernel_check_slices.cu (CUDA C++, host code). */
#ifndef K3_TESTS_KERNEL_ATTENTION_H
#define K3_TESTS_KERNEL_ATTENTION_H

#include <string.h>

#include <vector>

#include "kernels/mla.h"
extern "C" {
#include "base/float16.h"
}
#include "tests/kernel_table.h"

/* Slices of both arms; in kernel_check_slices.cu. `words`: see kernel_check_attention.cu. */
void k3_check_slices(K3Table *table, const char *words);

/* Is `word` one of the comma-separated `words`? */
static inline bool named(const char *words, const char *word)
{
  const size_t length = strlen(word);
  for (const char *at = words; (at = strstr(at, word)) != NULL; at += length)
    if ((at == words || at[-1] == ',') && (at[length] == ',' || !at[length])) return true;
  return false;
}

namespace {

typedef std::vector<float> Floats;
typedef std::vector<double> Doubles;

inline double normal_at(uint64_t key, uint64_t index)
{
  double sum = 0;
  for (int i = 0; i < 4; i++)
    sum += (double)(k3_synth_bits(key, 4 * index + i) >> 11) * (2.0 / 9007199254740992.0) - 1.0;
  return sum * 0.8660254037844386;
}

inline Floats random_floats(K3Table *t, int64_t count, double deviation)
{
  const uint64_t key = k3_table_bits(t);
  Floats out(count);
#pragma omp parallel for
  for (int64_t i = 0; i < count; i++) out[i] = (float)(deviation * normal_at(key, i));
  return out;
}

template <typename T>
T *upload(const std::vector<T> &host) { return (T *)k3_table_upload(host.data(), (int64_t)(host.size() * sizeof(T))); }

inline Floats download(const float *device, int64_t count)
{
  Floats out(count);
  K3_CHECK_CUDA(cudaDeviceSynchronize());
  K3_CHECK_CUDA(cudaMemcpy(out.data(), device, count * sizeof(float), cudaMemcpyDeviceToHost));
  return out;
}

inline double error_of(const Floats &got, const Doubles &want) { return k3_table_error(got.data(), want.data(), (int64_t)got.size()); }

/* Weights of one type: `values` become what the stored form decodes to. */
inline K3CudaMatrix make_matrix(K3Type type, int64_t rows, int64_t cols, Floats &values)
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

inline void free_matrix(K3CudaMatrix *m)
{
  cudaFree(const_cast<void *>(m->codes));
  if (m->scale) cudaFree(const_cast<void *>(m->scale));
}

/* Largest |code · scale - value| in units of half a scale; 1 + a rounding is right. NaN if a code is missing. */
inline double code_error(const K3CudaVector &out, int64_t count)
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

inline K3CudaVector make_vector(int64_t count, bool quantised)
{
  K3CudaVector v = {};
  v.values = (float *)k3_table_poisoned(count * 4);
  if (quantised) v.codes = (int8_t *)k3_table_poisoned(2 * count), v.scales = (float *)k3_table_poisoned(count / 8);
  return v;
}

inline void free_vector(K3CudaVector *v) { cudaFree(v->values), cudaFree(v->codes), cudaFree(v->scales); }

const char *const type_names[] = {"f32", "bf16", "q8_0"};

inline uint16_t half_of(K3CudaCacheType type, float x) { return type == K3_CACHE_BF16 ? k3_bf16_from_float(x) : k3_f16_from_float(x); }
inline float half_value(K3CudaCacheType type, uint16_t x) { return type == K3_CACHE_BF16 ? k3_bf16_to_float(x) : k3_f16_to_float(x); }

} // namespace

#endif
