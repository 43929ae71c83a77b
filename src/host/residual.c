/* See residual.h. Layer: host backend. Twin of kernels/norm.cu. */
#include "host/residual.h"

#include <math.h>
#include <string.h>

#include "base/breakage.h"

enum { MOST_BANKED = 1000 }; /* layers / block size, at the most a snapshot a layer */

static double mean_square(const float *x, int64_t n)
{
  double sum = 0.0;
  for (int64_t i = 0; i < n; i++) sum += (double)x[i] * (double)x[i];
  return sum / (double)n;
}

void k3_host_rms(const float *x, const float *w, double eps, int64_t n, float *out)
{
  double scale = 1.0 / sqrt(mean_square(x, n) + eps);
  for (int64_t i = 0; i < n; i++) out[i] = (float)((double)w[i] * (double)x[i] * scale);
}

void k3_host_attn_res(const float *bank, int64_t banked, const float *p, const float *w, const float *u, double eps,
                      int64_t n, float *out)
{
  if (banked == 0) {
    memcpy(out, p, (size_t)n * sizeof *out);
    return;
  }
  double score[MOST_BANKED + 1], scale[MOST_BANKED + 1], largest = -INFINITY;
  for (int64_t j = 0; j <= banked; j++) {
    const float *v = j < banked ? bank + j * n : p;
    scale[j] = 1.0 / sqrt(mean_square(v, n) + eps);
    double sum = 0.0;
    for (int64_t d = 0; d < n; d++) sum += (double)u[d] * (double)w[d] * (double)v[d];
    score[j] = sum * scale[j];
    if (score[j] > largest) largest = score[j];
  }
  double total = 0.0;
  for (int64_t j = 0; j <= banked; j++) total += score[j] = exp(score[j] - largest);
  for (int64_t d = 0; d < n; d++) {
    double sum = 0.0;
    for (int64_t j = 0; j <= banked; j++) {
      double v = j < banked ? bank[j * n + d] : p[d];
      if (K3_BROKEN("residual_normalised")) v *= scale[j] * (double)w[d];
      sum += score[j] * v;
    }
    out[d] = (float)(sum / total);
  }
}
