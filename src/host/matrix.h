/* Weights of one rank in host memory, and the products that read them as they are stored. Layer: host backend.
 * Nothing is ever expanded beyond one block (matrices); vectors are float32. */
#ifndef K3_HOST_MATRIX_H
#define K3_HOST_MATRIX_H

#include <stdint.h>

#include "plan/formats.h"

/* A band of a tensor as stored: [experts, rows, cols], row-major, rows of whole blocks. */
typedef struct {
  K3Type type;
  int64_t experts, rows, cols;
  int64_t row_bytes;
  const uint8_t *data;
  const uint32_t *book; /* packed codebook (plan/codebook.h) of the types that need one; NULL for others */
} K3HostMatrix;

/* Decodes `cols` values from `row` of `expert` into out [cols] f32. Source: model.md, "Block formats". */
void k3_host_decode_row(const K3HostMatrix *matrix, int64_t expert, int64_t row, float *out);

/* y[r] = sum_c W[expert, r, c] x[c] for all rows. x [cols] f32, y [rows] f64 (float64 accumulation). */
void k3_host_matvec(const K3HostMatrix *matrix, int64_t expert, const float *x, double *y);

/* y[r] += weight * sum_c W[expert, r, c] x[c]. */
void k3_host_matvec_add(const K3HostMatrix *matrix, int64_t expert, double weight, const float *x, double *y);

/* sum_c W[expert, row, c] x[c]. */
double k3_host_dot_row(const K3HostMatrix *matrix, int64_t expert, int64_t row, const float *x);

/* y[c] += weight * W[expert, row, c] for all columns: a column of Wᵀx. y [cols] f64. */
void k3_host_add_row(const K3HostMatrix *matrix, int64_t expert, int64_t row, double weight, double *y);

#endif
