/* Storage formats of tensors: names, block sizes. Layer: plan.
 * Decoding: blocks.h, for both backends. */
#ifndef K3_PLAN_FORMATS_H
#define K3_PLAN_FORMATS_H

#include <stdint.h>

typedef enum {
  K3_TYPE_F32 = 0,
  K3_TYPE_BF16,
  K3_TYPE_Q8_0,  /* 32 values: float16 d, 32 int8; w = d q */
  K3_TYPE_MXFP4, /* 32 values: E8M0 byte, 16 bytes of e2m1 nibbles, low nibble = even element */
  K3_TYPE_IQ1_S, /* 256 values: GGUF super-block, 50 bytes; needs /codebooks/iq1_s */
  K3_TYPE_F16,   /* IEEE binary16 */
  /* GGUF blocks, bit for bit (blocks.h decodes them) */
  K3_TYPE_Q4_0,
  K3_TYPE_Q4_1,
  K3_TYPE_Q5_0,
  K3_TYPE_Q5_1,
  K3_TYPE_IQ4_NL,
  K3_TYPE_Q2_K,
  K3_TYPE_Q3_K,
  K3_TYPE_Q4_K,
  K3_TYPE_Q5_K,
  K3_TYPE_Q6_K,
  K3_TYPE_IQ1_M,
  K3_TYPE_IQ2_XXS,
  K3_TYPE_IQ2_XS,
  K3_TYPE_IQ2_S,
  K3_TYPE_IQ3_XXS,
  K3_TYPE_IQ3_S,
  K3_TYPE_IQ4_XS,
  K3_TYPE_COUNT
} K3Type;

/* Bytes [at, at + bytes) of a stored block. */
typedef struct {
  int16_t at, bytes;
} K3BlockPart;

typedef struct {
  const char *name;      /* as in the attribute `type` */
  int64_t block_values;  /* values of a block; 1 for plain floats */
  int64_t block_bytes;
  K3BlockPart codes, high, scale; /* what stands together on the device; a multiple of 16 bytes of codes */
  int16_t scale_at, offset_at;    /* where a float16 scale and a float16 offset or minimum begin; -1: there is none */
} K3Format;

/* The description of `type`; never NULL for a valid type. */
const K3Format *k3_format(K3Type type);

/* Finds a format by name; -1 when there is none. */
int k3_format_find(const char *name);

/* Bytes of `values` consecutive values; `values` is a whole number of blocks. */
int64_t k3_format_bytes(K3Type type, int64_t values);

/* "f16, bf16, …": all names that the attribute `type` may bear, for messages. */
const char *k3_format_names(void);

/* Quantised = stored as blocks (uint8 dataset). */
int k3_format_is_quantised(K3Type type);

#endif
