/* Block formats on the way into a model file: q8_0 from floats, mxfp4 from its published packing. Layer: import.
 * Source: model.md, "Block formats"; q8_0 as ggml's quantize_row_q8_0_ref rounds it. */
#ifndef K3_IMPORT_QUANTISE_H
#define K3_IMPORT_QUANTISE_H

#include <stdint.h>

enum {
  K3_QUANTISE_BLOCK = 32, /* values of a q8_0 or an mxfp4 block */
  K3_Q8_0_BYTES = 34,
  K3_MXFP4_BYTES = 17,
  K3_MXFP4_NIBBLE_BYTES = 16
};

/* Quantises blocks of 32 finite floats: d = max|x| / 127 (stored as float16), q = round(x / d) with the
 * unrounded d, halves away from zero.
 * in   values  [blocks, 32]
 * out  out     [blocks, 34]
 * Returns -1, or the first block whose d exceeds float16 (max|x| of about 8.3 million): it is not stored. */
int64_t k3_quantise_q8_0(const float *values, int64_t blocks, uint8_t *out);

/* Separate nibbles and scales -> 17-byte blocks, bit for bit.
 * in   packed  [blocks, 16]  low nibble = even element
 * in   scales  [blocks]      E8M0
 * out  out     [blocks, 17]
 * Returns -1, or the first block whose scale byte is 255 (NaN): nothing from there on is stored. */
int64_t k3_mxfp4_interleave(const uint8_t *packed, const uint8_t *scales, int64_t blocks, uint8_t *out);

/* Values of 17-byte blocks: exact, but 6 * 2^127 and 4 * 2^127 are infinite in float32.
 * in   in      [blocks, 17]
 * out  values  [blocks, 32] */
void k3_mxfp4_unpack(const uint8_t *in, int64_t blocks, float *values);

#endif
