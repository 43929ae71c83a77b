/* Gated MLA attention over cached positions, absorbed form. Layer: host backend.
 * Source: model.md, "Gated MLA"; design.md, "Attention at depth".
 *
 * A slice is a run of cached rows; it leaves a partial (m, l, acc) a head, and partials of slices and of
 * ranks are merged by rescaling with exp(m_i - m). An empty slice is neutral: l = 0, m = -1e30, acc = 0. */
#ifndef K3_HOST_MLA_H
#define K3_HOST_MLA_H

#include <stdint.h>

#define K3_EMPTY_SLICE_M (-1e30)

enum { K3_HOST_SLICE_ROWS = 1024 }; /* rows of one slice */

/* Numbers of one head's partial: m, l, acc [C]. */
static inline int64_t k3_partial_width(int64_t latent) { return latent + 2; }

/* One slice of one head.
 * in   query [C + R] f32: Wk_hᵀ q_nope | q_rope
 * in   cache [rows, C + R] f32
 * out  partial [2 + C] f64: m, l, acc, not normalised
 * scale: 1 / sqrt(qk head dim). */
void k3_host_mla_slice(const float *query, const float *cache, int64_t rows, int64_t latent, int64_t rope, double scale,
                       double *partial);

/* Merges `part` into `into` [2 + C]. */
void k3_host_mla_merge(double *into, const double *part, int64_t latent);

/* All of one head's rows, slice by slice, merged. Same arguments. */
void k3_host_mla_attend(const float *query, const float *cache, int64_t rows, int64_t latent, int64_t rope,
                        double scale, double *partial);

/* The same rows as one slice: the un-split arm. score: scratch [rows]. */
void k3_host_mla_attend_whole(const float *query, const float *cache, int64_t rows, int64_t latent, int64_t rope,
                              double scale, double *score, double *partial);

#endif
