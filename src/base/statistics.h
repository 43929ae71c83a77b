/* Order statistics of a few numbers. Layer: base. */
#ifndef K3_BASE_STATISTICS_H
#define K3_BASE_STATISTICS_H

#include <stdint.h>

/* Sorts values [n], ascending. No NaN among them. */
void k3_sort(double *values, int64_t n);

/* Quantile q (0 … 1) of sorted values [n], n at least 1: linear between the two nearest. */
double k3_quantile(const double *sorted, int64_t n, double q);

#endif
