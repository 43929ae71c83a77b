/* Products with stored weights. See matrix.h. Layer: host backend.
 * Rows are decoded (plan/decode.h) a few blocks at a time; all products stand on it. Twin of kernels/linear.cu. */
#include "host/matrix.h"

#include "plan/decode.h"

enum { PIECE = 256 }; /* values decoded at a time: the largest block, and a multiple of all blocks */

/* `count` values (at most PIECE, whole blocks) of a row from column `col`. */
static void decode_piece(const K3HostMatrix *matrix, const uint8_t *row, int64_t col, int64_t count, float *out)
{
  k3_decode(matrix->type, matrix->book, row + k3_format_bytes(matrix->type, col), count, out);
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
