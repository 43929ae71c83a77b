/* Table of storage formats. See formats.h. Layer: plan. Source: model.md "Block formats". */
#include "plan/formats.h"

#include <string.h>

static const K3Format formats[K3_TYPE_COUNT] = {
  [K3_TYPE_F32] = {"f32", 1, 4},
  [K3_TYPE_BF16] = {"bf16", 1, 2},
  [K3_TYPE_Q8_0] = {"q8_0", 32, 34},
  [K3_TYPE_MXFP4] = {"mxfp4", 32, 17},
  [K3_TYPE_IQ1_S] = {"iq1_s", 256, 50},
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
