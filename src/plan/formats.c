/* Table of storage formats. See formats.h. Layer: plan. Source: model.md "Block formats"; the GGUF
 * types as the public package gguf sizes them (gguf.GGML_QUANT_SIZES). */
#include "plan/formats.h"

#include <string.h>

static const K3Format formats[K3_TYPE_COUNT] = {
  /*                     values, bytes, codes, high, scale: where they begin and their bytes; the two float16 */
  [K3_TYPE_F32] = {"f32", 1, 4, {0, 4}, {0, 0}, {0, 0}, -1, -1},
  [K3_TYPE_BF16] = {"bf16", 1, 2, {0, 2}, {0, 0}, {0, 0}, -1, -1},
  [K3_TYPE_Q8_0] = {"q8_0", 32, 34, {2, 32}, {0, 0}, {0, 2}, 0, -1},
  [K3_TYPE_MXFP4] = {"mxfp4", 32, 17, {1, 16}, {0, 0}, {0, 1}, -1, -1},
  [K3_TYPE_IQ1_S] = {"iq1_s", 256, 50, {2, 32}, {34, 16}, {0, 2}, 0, -1},
  [K3_TYPE_F16] = {"f16", 1, 2, {0, 2}, {0, 0}, {0, 0}, -1, -1},
  [K3_TYPE_Q4_0] = {"q4_0", 32, 18, {2, 16}, {0, 0}, {0, 2}, 0, -1},
  [K3_TYPE_Q4_1] = {"q4_1", 32, 20, {4, 16}, {0, 0}, {0, 4}, 0, 2},
  [K3_TYPE_Q5_0] = {"q5_0", 32, 22, {6, 16}, {2, 4}, {0, 2}, 0, -1},
  [K3_TYPE_Q5_1] = {"q5_1", 32, 24, {8, 16}, {4, 4}, {0, 4}, 0, 2},
  [K3_TYPE_IQ4_NL] = {"iq4_nl", 32, 18, {2, 16}, {0, 0}, {0, 2}, 0, -1},
  [K3_TYPE_Q2_K] = {"q2_k", 256, 84, {0, 80}, {0, 0}, {80, 4}, 80, 82},
  [K3_TYPE_Q3_K] = {"q3_k", 256, 110, {0, 96}, {96, 12}, {108, 2}, 108, -1},
  [K3_TYPE_Q4_K] = {"q4_k", 256, 144, {0, 144}, {0, 0}, {0, 0}, 0, 2},
  [K3_TYPE_Q5_K] = {"q5_k", 256, 176, {0, 176}, {0, 0}, {0, 0}, 0, 2},
  [K3_TYPE_Q6_K] = {"q6_k", 256, 210, {0, 208}, {0, 0}, {208, 2}, 208, -1},
  [K3_TYPE_IQ1_M] = {"iq1_m", 256, 56, {0, 48}, {0, 0}, {48, 8}, -1, -1},
  [K3_TYPE_IQ2_XXS] = {"iq2_xxs", 256, 66, {2, 64}, {0, 0}, {0, 2}, 0, -1},
  [K3_TYPE_IQ2_XS] = {"iq2_xs", 256, 74, {2, 64}, {66, 8}, {0, 2}, 0, -1},
  [K3_TYPE_IQ2_S] = {"iq2_s", 256, 82, {2, 64}, {66, 16}, {0, 2}, 0, -1},
  [K3_TYPE_IQ3_XXS] = {"iq3_xxs", 256, 98, {2, 96}, {0, 0}, {0, 2}, 0, -1},
  [K3_TYPE_IQ3_S] = {"iq3_s", 256, 110, {2, 64}, {66, 44}, {0, 2}, 0, -1},
  [K3_TYPE_IQ4_XS] = {"iq4_xs", 256, 136, {8, 128}, {0, 0}, {0, 8}, 0, -1},
};

const K3Format *k3_format(K3Type type) { return &formats[type]; }

int k3_format_find(const char *name)
{
  for (int i = 0; i < K3_TYPE_COUNT; i++)
    if (strcmp(formats[i].name, name) == 0) return i;
  return -1;
}

int64_t k3_format_bytes(K3Type type, int64_t values)
{
  return values / formats[type].block_values * formats[type].block_bytes;
}

int k3_format_is_quantised(K3Type type) { return formats[type].block_values > 1; }

const char *k3_format_names(void)
{
  return "bf16, f16, q8_0, q4_0, q4_1, q5_0, q5_1, q2_k, q3_k, q4_k, q5_k, q6_k, iq1_s, iq1_m, iq2_xxs, iq2_xs, iq2_s, iq3_xxs, "
         "iq3_s, iq4_nl, iq4_xs, mxfp4";
}
