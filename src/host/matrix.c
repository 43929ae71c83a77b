/* Products with stored weights. See matrix.h. Layer: host backend.
 * The decoders are plan/blocks.h's, a block at a time; all products stand on it. Twin of kernels/linear.cu. */
#include "host/matrix.h"

#include <string.h>

#include "plan/blocks.h"
#include "plan/codebook.h"

enum { PIECE = 256 }; /* values decoded at a time: the largest block, and a multiple of all blocks */

static uint16_t read_u16(const uint8_t *at) { return (uint16_t)(at[0] | (at[1] << 8)); }

static void decode_blocks(const K3HostMatrix *matrix, const uint8_t *data, int64_t count, float *out)
{
  const K3Format *format = k3_format(matrix->type);
  const K3Codebook *codebook = matrix->book ? k3_codebook((K3CodebookId)k3_codebook_of(matrix->type)) : NULL;
  K3BlockBook book = {matrix->book, codebook ? matrix->book + codebook->words : NULL, 1, 1};
  int runs = k3_block_runs(matrix->type), units = (int)format->block_values / (runs * K3_BLOCK_RUN);
  for (int64_t at = 0; at < count; at += format->block_values, data += format->block_bytes) {
    K3BlockParts parts = {data + format->codes.at, data + format->high.at, data + format->scale.at};
    for (int unit = 0; unit < units; unit++) {
      uint32_t word[K3_BLOCK_WORDS];
      k3_block_fetch(matrix->type, parts, unit, word);
      for (int r = 0; r < runs; r++) {
        K3BlockRun run;
        float *to = out + at + K3_BLOCK_RUN * k3_block_run_at(matrix->type, unit, r);
        k3_block_decode(matrix->type, word, unit, r, &book, &run);
        for (int i = 0; i < K3_BLOCK_RUN; i++) to[i] = k3_block_value(&run, i);
      }
    }
  }
}

/* `count` values (at most PIECE, whole blocks) of a row from column `col`. */
static void decode_piece(const K3HostMatrix *matrix, const uint8_t *row, int64_t col, int64_t count, float *out)
{
  const uint8_t *data = row + k3_format_bytes(matrix->type, col);
  switch (matrix->type) {
  case K3_TYPE_F32: memcpy(out, data, (size_t)count * 4); return;
  case K3_TYPE_BF16:
    for (int64_t i = 0; i < count; i++) out[i] = k3_bf16_to_float(read_u16(data + 2 * i));
    return;
  case K3_TYPE_F16:
    for (int64_t i = 0; i < count; i++) out[i] = k3_f16_to_float(read_u16(data + 2 * i));
    return;
  default: decode_blocks(matrix, data, count, out);
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
