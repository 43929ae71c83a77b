/* Router and activation of the feed-forward layers. Layer: host backend. Source: model.md, "FFN". */
#ifndef K3_HOST_EXPERTS_H
#define K3_HOST_EXPERTS_H

#include <stdint.h>

typedef struct {
  int64_t id;
  double weight; /* w_e */
} K3ChosenExpert;

/* situ(g, u) = β tanh(g/β) sigmoid(g) · λ tanh(u/λ) */
double k3_host_situ(double gate, double up, double beta, double linear_beta);

/* The `count` largest of s + bias, ties to the lower index, in descending order; weights from s alone:
 * w_e = s_e / (Σ s + 1e-20) * scaling; without renormalize the divisor is 1.
 * scores [experts] f32: s = sigmoid(W_router x). */
void k3_host_choose_experts(const float *scores, const float *bias, int64_t experts, int64_t count, int renormalize,
                            double scaling, K3ChosenExpert *chosen);

#endif
