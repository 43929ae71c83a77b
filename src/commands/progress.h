/* A progress bar on stderr, for loading (bytes, GB/s) and decoding (steps, tokens/s). Layer: commands.
 * Nothing is written when stderr is no tty, or on ranks that pass enabled = 0. */
#ifndef K3_COMMANDS_PROGRESS_H
#define K3_COMMANDS_PROGRESS_H

#include <stdint.h>

typedef enum { K3_PROGRESS_BYTES, K3_PROGRESS_STEPS } K3ProgressUnit;

typedef struct {
  const char *label; /* "loading"; outlives the bar */
  K3ProgressUnit unit;
  int64_t done, all;
  double start_s, drawn_s; /* monotonic clock */
  int shown;               /* a tty, and enabled */
  int drawn;               /* something stands on the line */
} K3ProgressBar;

/* Begins a bar of `all` units. Draws at most ten times a second. */
void k3_progress_start(K3ProgressBar *bar, const char *label, K3ProgressUnit unit, int64_t all, int enabled);
void k3_progress_update(K3ProgressBar *bar, int64_t done);

/* Draws the last state and ends the line. Safe to call twice, and on a zeroed bar. Call it before any message. */
void k3_progress_finish(K3ProgressBar *bar);

/* The same update in the shape of K3Progress (decode/backend.h); `context` is a K3ProgressBar, NULL does nothing. */
void k3_progress_callback(void *context, int64_t done, int64_t all);

#endif
