/* Progress bar. See progress.h. Layer: commands. */
#include "commands/progress.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "base/clock.h"

static int terminal_columns(void)
{
  struct winsize size;
  if (ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  return 80;
}

/* "12.3 of 45.6 GB, 1.23 GB/s, 27 s left", "12 of 32 steps, 4.5 tokens/s, 4 s left" */
static void describe(const K3ProgressBar *bar, double elapsed_s, char *text, size_t size)
{
  double rate = elapsed_s > 0 ? (double)bar->done / elapsed_s : 0;
  int length;
  if (bar->unit == K3_PROGRESS_BYTES)
    length = snprintf(text, size, "%.2f of %.2f GB, %.2f GB/s", 1e-9 * (double)bar->done, 1e-9 * (double)bar->all,
                      1e-9 * rate);
  else
    length = snprintf(text, size, "%lld of %lld steps, %.1f tokens/s", (long long)bar->done, (long long)bar->all,
                      rate);
  if (bar->done < bar->all && rate > 0 && elapsed_s > 1 && length > 0 && (size_t)length < size)
    snprintf(text + length, size - (size_t)length, ", %.0f s left", (double)(bar->all - bar->done) / rate);
}

static void draw(K3ProgressBar *bar)
{
  char text[128], line[512], blocks[64];
  describe(bar, 1e-3 * k3_clock_ms() - bar->start_s, text, sizeof text);
  double part = bar->all > 0 ? (double)bar->done / (double)bar->all : 1.0;
  if (part > 1) part = 1;
  int columns = terminal_columns();
  int width = columns - 1 - (int)strlen(bar->label) - (int)strlen(text) - 10;
  if (width > 30) width = 30;
  if (width > 3) {
    for (int i = 0; i < width; i++) blocks[i] = i < (int)(part * width) ? '#' : '.';
    blocks[width] = '\0';
    snprintf(line, sizeof line, "%s [%s] %3d %% %s", bar->label, blocks, (int)(100 * part), text);
  } else {
    snprintf(line, sizeof line, "%s %3d %% %s", bar->label, (int)(100 * part), text);
  }
  /* One write a frame, cut to the terminal so that the line never wraps; \033[K clears what was longer. */
  fprintf(stderr, "\r%.*s\033[K", columns > 1 ? columns - 1 : 1, line);
  fflush(stderr);
  bar->drawn = 1;
}

void k3_progress_start(K3ProgressBar *bar, const char *label, K3ProgressUnit unit, int64_t all, int enabled)
{
  const char *terminal = getenv("TERM");
  *bar = (K3ProgressBar){.label = label, .unit = unit, .all = all, .start_s = 1e-3 * k3_clock_ms()};
  bar->shown = enabled && isatty(STDERR_FILENO) && !(terminal && strcmp(terminal, "dumb") == 0);
  if (bar->shown) draw(bar);
  bar->drawn_s = bar->start_s;
}

void k3_progress_update(K3ProgressBar *bar, int64_t done)
{
  bar->done = done;
  if (!bar->shown) return;
  double now = 1e-3 * k3_clock_ms();
  if (now - bar->drawn_s < 0.1) return;
  bar->drawn_s = now;
  draw(bar);
}

void k3_progress_finish(K3ProgressBar *bar)
{
  if (!bar->shown || !bar->drawn) return;
  draw(bar);
  fputc('\n', stderr);
  fflush(stderr);
  bar->shown = bar->drawn = 0;
}

void k3_progress_callback(void *context, int64_t done, int64_t all)
{
  K3ProgressBar *bar = context;
  if (!bar) return;
  bar->all = all;
  k3_progress_update(bar, done);
}
