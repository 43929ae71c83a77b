/* See synth_values.h. Layer: plan (pure). */
#include "plan/synth_values.h"

K3SynthBlock k3_synth_block_shape(K3Type type)
{
  static const float scales[K3_TYPE_COUNT][2] = {
    [K3_TYPE_Q4_0] = {4.609f, 0.0f},
    [K3_TYPE_Q4_1] = {4.61f, -7.5f},
    [K3_TYPE_Q5_0] = {9.233f, 0.0f},
    [K3_TYPE_Q5_1] = {9.232f, -15.5f},
    [K3_TYPE_IQ4_NL] = {67.18f, 0.0f},
    [K3_TYPE_Q2_K] = {13.86f, 1.5f},
    [K3_TYPE_Q3_K] = {43.3f, 0.0f},
    [K3_TYPE_Q4_K] = {258.5f, 7.5f},
    [K3_TYPE_Q5_K] = {526.8f, 15.5f},
    [K3_TYPE_Q6_K] = {1365.0f, 0.0f},
    [K3_TYPE_IQ1_M] = {7.193f, 0.0f},
    [K3_TYPE_IQ2_XXS] = {53.34f, 0.0f},
    [K3_TYPE_IQ2_XS] = {55.89f, 0.0f},
    [K3_TYPE_IQ2_S] = {56.31f, 0.0f},
    [K3_TYPE_IQ3_XXS] = {142.3f, 0.0f},
    [K3_TYPE_IQ3_S] = {140.2f, 0.0f},
    [K3_TYPE_IQ4_XS] = {1245.0f, 0.0f},
  };
  const K3Format *format = k3_format(type);
  return (K3SynthBlock){(int32_t)format->block_bytes, format->scale_at, format->offset_at, scales[type][0], scales[type][1]};
}
