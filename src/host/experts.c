/* See experts.h. Layer: host backend. Twin of kernels/experts.cu. */
#include "host/experts.h"

#include <math.h>

#include "base/breakage.h"

double k3_host_situ(double gate, double up, double beta, double linear_beta)
{
  double linear = K3_BROKEN("no_up_tanh") ? up : linear_beta * tanh(up / linear_beta);
  return beta * tanh(gate / beta) / (1.0 + exp(-gate)) * linear;
}

static int taken(const K3ChosenExpert *chosen, int64_t count, int64_t id)
{
  for (int64_t i = 0; i < count; i++)
    if (chosen[i].id == id) return 1;
  return 0;
}

void k3_host_choose_experts(const float *scores, const float *bias, int64_t experts, int64_t count, int renormalize,
                            double scaling, K3ChosenExpert *chosen)
{
  double sum = 0.0;
  for (int64_t n = 0; n < count; n++) {
    int64_t best = -1;
    float best_key = 0.0f;
    for (int64_t e = 0; e < experts; e++) {
      float key = scores[e] + bias[e];
      int better = best < 0 || key > best_key || (K3_BROKEN("tie_to_higher") && key == best_key);
      if (better && !taken(chosen, n, e)) {
        best = e;
        best_key = key;
      }
    }
    chosen[n].id = best;
    chosen[n].weight = K3_BROKEN("bias_weighs") ? (double)best_key : (double)scores[best];
    sum += chosen[n].weight;
  }
  double divisor = renormalize ? sum + 1e-20 : 1.0;
  for (int64_t n = 0; n < count; n++) chosen[n].weight = chosen[n].weight / divisor * scaling;
}
