/* RMS norm and the attention residual. Layer: host backend. Source: model.md, "The layer". */
#ifndef K3_HOST_RESIDUAL_H
#define K3_HOST_RESIDUAL_H

#include <stdint.h>

/* out = w ⊙ x / sqrt(mean(x²) + eps). x, w, out [n] f32; out may be x. */
void k3_host_rms(const float *x, const float *w, double eps, int64_t n, float *out);

/* The mix of the banked snapshots and p:
 *   score_j = Σ_d u_d w_d v_j,d / sqrt(mean(v_j²) + eps);  out = Σ_j softmax(score)_j v_j
 * bank [banked, n] f32, p, w (the norm), u (the projection), out [n] f32; out must not overlap bank or p.
 * An empty bank gives p. */
void k3_host_attn_res(const float *bank, int64_t banked, const float *p, const float *w, const float *u, double eps,
                      int64_t n, float *out);

#endif
