/* See kda.h. Layer: host backend. Twin of kernels/kda.cu. */
#include "host/kda.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/breakage.h"

static double sigmoid(double x) { return 1.0 / (1.0 + exp(-x)); }

void k3_host_kda_conv(const double *x, const float *taps, int64_t channels, int64_t kernel, float *window, float *out)
{
  for (int64_t c = 0; c < channels; c++) {
    double current = (float)x[c];
    double sum = 0.0;
    for (int64_t t = 0; t < kernel; t++) {
      int64_t tap = K3_BROKEN("conv_tap_order") ? kernel - 1 - t : t;
      sum += (double)taps[c * kernel + tap] * (t == kernel - 1 ? current : (double)window[t * channels + c]);
    }
    for (int64_t t = 0; t + 2 < kernel; t++) window[t * channels + c] = window[(t + 1) * channels + c];
    if (kernel > 1) window[(kernel - 2) * channels + c] = (float)current;
    out[c] = (float)(sum * sigmoid(sum));
  }
}

/* out = x / sqrt(Σ x² + 1e-6) * scale */
static void normalise(const float *x, int64_t n, double scale, double *out)
{
  double sum = 0.0;
  for (int64_t i = 0; i < n; i++) sum += (double)x[i] * (double)x[i];
  scale /= sqrt(sum + 1e-6);
  for (int64_t i = 0; i < n; i++) out[i] = (double)x[i] * scale;
}

/* Scratch of a head: q, k, decay factors, r, o; five rows of D. */
static void one_head(const K3KdaArguments *a, int64_t head, double *scratch)
{
  int64_t D = a->head_dim;
  double *q = scratch, *k = q + D, *keep = k + D, *r = keep + D, *o = r + D;
  const float *v = a->v + head * D;
  float *S = a->state + head * D * D;
  normalise(a->q + head * D, D, K3_BROKEN("q_unscaled") ? 1.0 : 1.0 / sqrt((double)D), q);
  normalise(a->k + head * D, D, 1.0, k);
  double rate = exp((double)a->a_log[head]);
  for (int64_t i = 0; i < D; i++) {
    double z = a->decay[head * D + i] + (K3_BROKEN("no_dt_bias") ? 0.0 : (double)a->dt_bias[head * D + i]);
    keep[i] = exp(a->gate_lower_bound * sigmoid(rate * z));
  }
  double beta = sigmoid(a->beta[head]);

  for (int64_t j = 0; j < D; j++) r[j] = o[j] = 0.0;
  for (int64_t i = 0; i < D; i++)
    for (int64_t j = 0; j < D; j++) {
      double decayed = (double)S[i * D + j] * (K3_BROKEN("decay_axis") ? keep[j] : keep[i]);
      S[i * D + j] = (float)decayed;
      r[j] += decayed * k[i];
    }
  for (int64_t i = 0; i < D; i++)
    for (int64_t j = 0; j < D; j++) {
      double updated = (double)S[i * D + j] + k[i] * beta * ((double)v[j] - r[j]);
      S[i * D + j] = (float)updated;
      o[j] += updated * q[i];
    }

  double sum = 0.0;
  for (int64_t j = 0; j < D; j++) sum += o[j] * o[j];
  double scale = 1.0 / sqrt(sum / (double)D + a->rms_norm_eps);
  for (int64_t j = 0; j < D; j++) {
    double gate = K3_BROKEN("no_gate_kda") ? 1.0 : sigmoid(a->gate[head * D + j]);
    a->out[head * D + j] = (float)(o[j] * scale * (double)a->o_norm[j] * gate);
  }
}

void k3_host_kda_heads(const K3KdaArguments *arguments)
{
  int64_t D = arguments->head_dim;
#pragma omp parallel for schedule(static)
  for (int64_t head = 0; head < arguments->heads; head++) {
    double scratch[5 * D];
    one_head(arguments, head, scratch);
  }
}
