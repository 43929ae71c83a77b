/* Products with stored weights. See matrix.h. Layer: host backend.
 * One decoder a format, a block at a time; all products stand on it. Twin of kernels/linear.cu. */
#include "host/matrix.h"

#include <math.h>
#include <string.h>

#include "base/float16.h"

enum { PIECE = 256 }; /* values decoded at a time: the largest block, and a multiple of all blocks */

static const float e2m1[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                               -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

static uint16_t read_u16(const uint8_t *at) { return (uint16_t)(at[0] | (at[1] << 8)); }

static void decode_f32(const uint8_t *data, int64_t count, float *out) { memcpy(out, data, (size_t)count * 4); }

static void decode_bf16(const uint8_t *data, int64_t count, float *out)
{
  uint16_t half[PIECE];
  memcpy(half, data, (size_t)count * 2);
  for (int64_t i = 0; i < count; i++) out[i] = k3_bf16_to_float(half[i]);
}

static void decode_q8_0(const uint8_t *data, int64_t count, float *out)
{
  for (int64_t block = 0; block < count / 32; block++, data += 34, out += 32) {
    float d = k3_f16_to_float(read_u16(data));
    for (int i = 0; i < 32; i++) out[i] = d * (float)(int8_t)data[2 + i];
  }
}

static void decode_mxfp4(const uint8_t *data, int64_t count, float *out)
{
  for (int64_t block = 0; block < count / 32; block++, data += 17, out += 32) {
    /* 2^(s-127): the byte is float32's own exponent, save 0, which is the subnormal 2^-127; 255 stands for NaN */
    float scale = data[0] == 255 ? NAN : k3_float_from_bits(data[0] ? (uint32_t)data[0] << 23 : 0x00400000u);
    for (int i = 0; i < 16; i++) {
      out[2 * i] = scale * e2m1[data[1 + i] & 15];
      out[2 * i + 1] = scale * e2m1[data[1 + i] >> 4];
    }
  }
}

/* GGUF iq1_s: f16 d, qs[32], qh[8] uint16; 8 sub-blocks of 32 values, 4 grid entries each. */
static void decode_iq1_s(const uint8_t *data, int64_t count, const int8_t *grid, float *out)
{
  for (int64_t block = 0; block < count / 256; block++, data += 50, out += 256) {
    float d = k3_f16_to_float(read_u16(data));
    for (int sub = 0; sub < 8; sub++) {
      unsigned qh = read_u16(data + 34 + 2 * sub);
      float scale = d * (float)(2 * ((qh >> 12) & 7u) + 1);
      float shift = (qh & 0x8000u) ? -0.125f : 0.125f;
      for (int entry = 0; entry < 4; entry++) {
        unsigned index = data[2 + 4 * sub + entry] | (((qh >> (3 * entry)) & 7u) << 8);
        for (int j = 0; j < 8; j++) out[32 * sub + 8 * entry + j] = scale * ((float)grid[8 * index + (unsigned)j] + shift);
      }
    }
  }
}

/* `count` values (at most PIECE, whole blocks) of a row from column `col`. */
static void decode_piece(const K3HostMatrix *matrix, const uint8_t *row, int64_t col, int64_t count, float *out)
{
  const uint8_t *data = row + k3_format_bytes(matrix->type, col);
  switch (matrix->type) {
  case K3_TYPE_F32: decode_f32(data, count, out); return;
  case K3_TYPE_BF16: decode_bf16(data, count, out); return;
  case K3_TYPE_Q8_0: decode_q8_0(data, count, out); return;
  case K3_TYPE_MXFP4: decode_mxfp4(data, count, out); return;
  case K3_TYPE_IQ1_S: decode_iq1_s(data, count, matrix->grid, out); return;
  default: break;
  }
}

static const uint8_t *row_at(const K3HostMatrix *matrix, int64_t expert, int64_t row)
{
  return matrix->data + (expert * matrix->rows + row) * matrix->row_bytes;
}

/* Eight running sums: float64, and free for the compiler to keep in vector registers. */
static double dot_piece(const float *w, const float *x, int64_t count)
{
  double sum[8] = {0};
  int64_t i = 0;
  for (; i + 8 <= count; i += 8)
    for (int lane = 0; lane < 8; lane++) sum[lane] += (double)w[i + lane] * (double)x[i + lane];
  for (; i < count; i++) sum[i & 7] += (double)w[i] * (double)x[i];
  return ((sum[0] + sum[4]) + (sum[1] + sum[5])) + ((sum[2] + sum[6]) + (sum[3] + sum[7]));
}

void k3_host_decode_row(const K3HostMatrix *matrix, int64_t expert, int64_t row, float *out)
{
  const uint8_t *data = row_at(matrix, expert, row);
  for (int64_t col = 0; col < matrix->cols; col += PIECE)
    decode_piece(matrix, data, col, matrix->cols - col < PIECE ? matrix->cols - col : PIECE, out + col);
}

double k3_host_dot_row(const K3HostMatrix *matrix, int64_t expert, int64_t row, const float *x)
{
  const uint8_t *data = row_at(matrix, expert, row);
  float w[PIECE];
  double sum = 0.0;
  for (int64_t col = 0; col < matrix->cols; col += PIECE) {
    int64_t count = matrix->cols - col < PIECE ? matrix->cols - col : PIECE;
    decode_piece(matrix, data, col, count, w);
    sum += dot_piece(w, x + col, count);
  }
  return sum;
}

void k3_host_matvec(const K3HostMatrix *matrix, int64_t expert, const float *x, double *y)
{
#pragma omp parallel for schedule(static) if (matrix->rows * matrix->cols > 16384)
  for (int64_t row = 0; row < matrix->rows; row++) y[row] = k3_host_dot_row(matrix, expert, row, x);
}

void k3_host_matvec_add(const K3HostMatrix *matrix, int64_t expert, double weight, const float *x, double *y)
{
#pragma omp parallel for schedule(static) if (matrix->rows * matrix->cols > 16384)
  for (int64_t row = 0; row < matrix->rows; row++) y[row] += weight * k3_host_dot_row(matrix, expert, row, x);
}

void k3_host_add_row(const K3HostMatrix *matrix, int64_t expert, int64_t row, double weight, double *y)
{
  const uint8_t *data = row_at(matrix, expert, row);
  float w[PIECE];
  for (int64_t col = 0; col < matrix->cols; col += PIECE) {
    int64_t count = matrix->cols - col < PIECE ? matrix->cols - col : PIECE;
    decode_piece(matrix, data, col, count, w);
    for (int64_t i = 0; i < count; i++) y[col + i] += weight * (double)w[i];
  }
}
