/* See statistics.h. Layer: base. */
#include "base/statistics.h"

#include <stdlib.h>

static int by_value(const void *left, const void *right)
{
  double a = *(const double *)left, b = *(const double *)right;
  return (a > b) - (a < b);
}

void k3_sort(double *values, int64_t n) { qsort(values, (size_t)n, sizeof *values, by_value); }

double k3_quantile(const double *sorted, int64_t n, double q)
{
  double at = q * (double)(n - 1);
  int64_t low = (int64_t)at;
  if (low + 1 >= n) return sorted[n - 1];
  return sorted[low] + (at - (double)low) * (sorted[low + 1] - sorted[low]);
}
