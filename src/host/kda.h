/* Kimi delta attention, one token, the heads of one rank. Layer: host backend. Source: model.md, "KDA". */
#ifndef K3_HOST_KDA_H
#define K3_HOST_KDA_H

#include <stdint.h>

/* Depthwise causal convolution of one token, then silu; shifts the window.
 * in      x      [channels] f64  W x of this token, before the convolution
 * in      taps   [channels, kernel] f32; the current token meets the last tap
 * in/out  window [kernel - 1, channels] f32  earlier tokens' x, oldest first
 * out     out    [channels] f32 */
void k3_host_kda_conv(const double *x, const float *taps, int64_t channels, int64_t kernel, float *window, float *out);

typedef struct {
  int64_t heads, head_dim; /* this rank's heads; D */
  double gate_lower_bound; /* log decay at the closed gate, -5 */
  double rms_norm_eps;
  const float *q, *k, *v;  /* [heads, D] after convolution and silu */
  const double *decay;     /* [heads, D] W_fb W_fa x */
  const float *dt_bias;    /* [heads, D] */
  const float *a_log;      /* [heads] */
  const double *beta;      /* [heads] W_b x, before the sigmoid */
  const float *o_norm;     /* [D] */
  const double *gate;      /* [heads, D] W_g x, before the sigmoid */
  float *state;            /* in/out [heads, D key, D value] */
  float *out;              /* [heads, D] rms(o) ⊙ sigmoid(gate): the input of o_proj */
} K3KdaArguments;

void k3_host_kda_heads(const K3KdaArguments *arguments);

#endif
