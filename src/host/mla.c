/* See mla.h. Layer: host backend. Twin of kernels/mla_slice.cu, mla_tensor.cu and mla_merge.cu. */
#include "host/mla.h"

#include <math.h>

#include "base/breakage.h"

static void set_empty(double *partial, int64_t latent)
{
  partial[0] = K3_EMPTY_SLICE_M;
  for (int64_t c = 0; c <= latent; c++) partial[1 + c] = 0.0;
}

void k3_host_mla_attend_whole(const float *query, const float *cache, int64_t rows, int64_t latent, int64_t rope,
                              double scale, double *score, double *partial)
{
  int64_t width = latent + rope;
  set_empty(partial, latent);
  if (K3_BROKEN("no_score_scale")) scale = 1.0;
  for (int64_t t = 0; t < rows; t++) {
    const float *row = cache + t * width;
    double sum = 0.0;
    for (int64_t c = 0; c < width; c++) sum += (double)query[c] * (double)row[c];
    score[t] = sum * scale;
    if (score[t] > partial[0]) partial[0] = score[t];
  }
  double *acc = partial + 2;
  for (int64_t t = 0; t < rows; t++) {
    const float *row = cache + t * width;
    double weight = exp(score[t] - partial[0]);
    partial[1] += weight;
    for (int64_t c = 0; c < latent; c++) acc[c] += weight * (double)row[c];
  }
}

void k3_host_mla_slice(const float *query, const float *cache, int64_t rows, int64_t latent, int64_t rope, double scale,
                       double *partial)
{
  double score[K3_HOST_SLICE_ROWS];
  k3_host_mla_attend_whole(query, cache, rows, latent, rope, scale, score, partial);
}

void k3_host_mla_merge(double *into, const double *part, int64_t latent)
{
  double m = into[0] > part[0] ? into[0] : part[0];
  double mine = exp(into[0] - m), theirs = exp(part[0] - m);
  if (K3_BROKEN("merge_without_rescale")) mine = theirs = 1.0;
  into[0] = m;
  for (int64_t c = 0; c <= latent; c++) into[1 + c] = into[1 + c] * mine + part[1 + c] * theirs;
}

void k3_host_mla_attend(const float *query, const float *cache, int64_t rows, int64_t latent, int64_t rope,
                        double scale, double *partial)
{
  double part[k3_partial_width(latent)];
  set_empty(partial, latent);
  for (int64_t row = 0; row < rows; row += K3_HOST_SLICE_ROWS) {
    int64_t count = rows - row < K3_HOST_SLICE_ROWS ? rows - row : K3_HOST_SLICE_ROWS;
    k3_host_mla_slice(query, cache + row * (latent + rope), count, latent, rope, scale, part);
    k3_host_mla_merge(partial, part, latent);
  }
}
