/* Float64 references for kernel_check, written from model.md alone: blocks as stored, decoded in float64. Host code.
 * Matrices are drawn with the synthetic recipe's functions, on the host, block by block. */
#ifndef K3_TESTS_KERNEL_REFERENCE_H
#define K3_TESTS_KERNEL_REFERENCE_H

#include "kernels/weights.h"
#include "plan/codebook.h"
extern "C" {
#include "plan/decode.h"
}
#include "tests/kernel_table.h"

typedef struct {
  K3Type type;
  int64_t rows, cols, row_bytes;
  K3SynthRule rule;
  uint8_t *stored; /* rows of blocks as in the file */
} RefMatrix;

extern uint32_t ref_books[K3_CODEBOOK_COUNT][K3_CODEBOOK_MOST_WORDS + 256]; /* the published codebooks, packed; made by main */
extern int8_t ref_grid[K3_CODEBOOK_ENTRIES][8]; /* a random codebook; made by main */

/* `count` blocks from block `index` of the whole tensor. */
static inline void ref_fill(K3Type type, K3SynthRule rule, int64_t index, int64_t count, uint8_t *to)
{
  int64_t bytes = k3_format(type)->block_bytes;
#pragma omp parallel for
  for (int64_t i = 0; i < count; i++) {
    uint8_t *block = to + i * bytes;
    float value;
    uint16_t half;
    switch (type) {
    case K3_TYPE_F32: value = k3_synth_float(rule, (uint64_t)(index + i)); memcpy(block, &value, 4); break;
    case K3_TYPE_BF16:
      half = k3_bf16_from_float(k3_synth_float(rule, (uint64_t)(index + i)));
      memcpy(block, &half, 2);
      break;
    case K3_TYPE_F16:
      half = k3_f16_from_float(k3_synth_float(rule, (uint64_t)(index + i)));
      memcpy(block, &half, 2);
      break;
    case K3_TYPE_Q8_0: k3_synth_q8_0(rule, (uint64_t)(index + i), block); break;
    case K3_TYPE_MXFP4: k3_synth_mxfp4(rule, (uint64_t)(index + i), block); break;
    case K3_TYPE_IQ1_S: k3_synth_iq1_s(rule, (uint64_t)(index + i), block); break;
    default: k3_synth_block(rule, k3_synth_block_shape(type), (uint64_t)(index + i), block); break;
    }
  }
}

static inline RefMatrix ref_matrix(K3Table *table, K3Type type, int64_t rows, int64_t cols)
{
  RefMatrix m;
  m.type = type;
  m.rows = rows;
  m.cols = cols;
  m.row_bytes = k3_format_bytes(type, cols);
  m.rule.key = k3_table_bits(table);
  m.rule.mean = 0;
  m.rule.deviation = (float)(1.0 / sqrt((double)cols));
  m.stored = (uint8_t *)malloc((size_t)(rows * m.row_bytes));
  ref_fill(type, m.rule, 0, rows * (cols / k3_format(type)->block_values), m.stored);
  return m;
}

static inline double ref_f16(const uint8_t *b)
{
  int bits = b[0] | b[1] << 8, exponent = bits >> 10 & 31, fraction = bits & 1023;
  double v = exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24);
  return bits & 0x8000 ? -v : v;
}

/* One block to float64. */
static inline void ref_decode(K3Type type, const uint8_t *b, double *out)
{
  static const double e2m1[8] = {0, .5, 1, 1.5, 2, 3, 4, 6};
  float value;
  switch (type) {
  case K3_TYPE_F32: memcpy(&value, b, 4); out[0] = value; break;
  case K3_TYPE_BF16: {
    uint32_t bits = (uint32_t)(b[0] | b[1] << 8) << 16;
    memcpy(&value, &bits, 4);
    out[0] = value;
    break;
  }
  case K3_TYPE_F16: out[0] = ref_f16(b); break;
  case K3_TYPE_Q8_0: {
    double d = ref_f16(b);
    for (int i = 0; i < 32; i++) out[i] = d * (int8_t)b[2 + i];
    break;
  }
  case K3_TYPE_MXFP4: {
    double d = ldexp(1.0, b[0] - 127);
    for (int i = 0; i < 32; i++) {
      int code = b[1 + i / 2] >> (i % 2 * 4) & 15;
      out[i] = d * (code & 8 ? -e2m1[code & 7] : e2m1[code & 7]);
    }
    break;
  }
  default: { /* GGUF blocks: the host's decoder, which is the public package's bit for bit (tests/test_formats.py) */
    float values[256];
    int book = k3_codebook_of(type);
    k3_decode(type, book < 0 ? NULL : ref_books[book], b, k3_format(type)->block_values, values);
    for (int i = 0; i < k3_format(type)->block_values; i++) out[i] = values[i];
    break;
  }
  case K3_TYPE_IQ1_S: {
    double d = ref_f16(b);
    for (int ib = 0; ib < 8; ib++) {
      int qh = b[34 + 2 * ib] | b[35 + 2 * ib] << 8;
      double dl = d * (2 * (qh >> 12 & 7) + 1), delta = qh & 0x8000 ? -0.125 : 0.125;
      for (int l = 0; l < 4; l++) {
        int index = b[2 + 4 * ib + l] | (qh >> 3 * l & 7) << 8;
        for (int j = 0; j < 8; j++) out[32 * ib + 8 * l + j] = dl * (ref_grid[index][j] + delta);
      }
    }
  }
  }
}

/* y = W x, rows of stored blocks. */
static inline void ref_multiply(K3Type type, const uint8_t *stored, int64_t rows, int64_t cols, const double *x, double *y)
{
  int64_t values = k3_format(type)->block_values, bytes = k3_format(type)->block_bytes;
#pragma omp parallel for
  for (int64_t r = 0; r < rows; r++) {
    double block[256], sum = 0;
    for (int64_t b = 0; b < cols / values; b++) {
      ref_decode(type, stored + (r * (cols / values) + b) * bytes, block);
      for (int64_t i = 0; i < values; i++) sum += block[i] * x[b * values + i];
    }
    y[r] = sum;
  }
}

/* The activation's codes [2][n] and scales (float32, as the kernels make them), and what they stand for. */
static inline void ref_quantise(const float *x, int64_t n, int8_t *codes, float *scales, double *meant)
{
  for (int64_t b = 0; b < n / 32; b++) {
    float most = 0;
    for (int i = 0; i < 32; i++) most = fmaxf(most, fabsf(x[b * 32 + i]));
    float factor = most > 1e-30f ? 32512.0f / most : 0.0f;
    scales[b] = most / 32512.0f;
    for (int i = 0; i < 32; i++) {
      int code = (int)rintf(x[b * 32 + i] * factor), low = (code + 128) % 256 - 128;
      if (low < -128) low += 256;
      codes[b * 32 + i] = (int8_t)((code - low) / 256);
      codes[n + b * 32 + i] = (int8_t)low;
      meant[b * 32 + i] = (double)scales[b] * code;
    }
  }
}

static inline double ref_situ(double g, double u) { return 4 * tanh(g / 4) / (1 + exp(-g)) * 25 * tanh(u / 25); }

#endif
