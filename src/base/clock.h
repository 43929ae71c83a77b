/* The monotonic clock, for durations. Layer: base. */
#ifndef K3_BASE_CLOCK_H
#define K3_BASE_CLOCK_H

#include <time.h>

/* Milliseconds since some fixed moment; never goes back. */
static inline double k3_clock_ms(void)
{
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec * 1e3 + (double)time.tv_nsec * 1e-6;
}

#endif
