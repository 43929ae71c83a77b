/* `k3decode info --follow RUN.h5`: a run that is being written, step by step. See info_run.h. Layer: commands. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "commands/info_run.h"

enum { POLL_MS = 100, SETTLED_S = 3, BATCH = 256 };

typedef enum { WRITER_HOLDS, WRITER_GONE, WRITER_UNKNOWN } Writer;

static void pause_ms(int ms)
{
  struct timespec time = {ms / 1000, ms % 1000 * 1000000L};
  nanosleep(&time, NULL);
}

/* The writer holds a lock on the file as long as it lives (store/run_file.c), where the file system has locks. */
static Writer find_writer(const char *path)
{
  int descriptor = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) return WRITER_UNKNOWN;
  Writer writer = WRITER_GONE;
  if (flock(descriptor, LOCK_EX | LOCK_NB) != 0) writer = errno == EWOULDBLOCK ? WRITER_HOLDS : WRITER_UNKNOWN;
  close(descriptor);
  return writer;
}

void k3_info_wait_for_file(const char *path, double patience)
{
  double end = k3_clock_ms() + 1e3 * patience;
  for (;;) {
    struct stat info;
    K3FileKind kind = k3_run_reader_recognise(path);
    int opens = kind != K3_FILE_UNREADABLE && kind != K3_FILE_NOT_HDF5 && kind != K3_FILE_DAMAGED;
    /* by age, not by the lock: to ask for the lock could take it from a writer that is just making the file */
    int settled = stat(path, &info) == 0 && info.st_size > 0 && time(NULL) - info.st_mtime >= SETTLED_S;
    if (opens || settled || k3_clock_ms() >= end) return;
    pause_ms(POLL_MS);
  }
}

/* Lines for the steps from `shown` on. */
static K3Status print_steps(K3RunReader *run, int64_t *shown)
{
  int64_t tokens[BATCH];
  double step_ms[BATCH];
  while (*shown < run->steps) {
    int64_t count = run->steps - *shown < BATCH ? run->steps - *shown : BATCH;
    K3_TRY(k3_run_reader_steps(run, *shown, count, tokens, step_ms));
    for (int64_t i = 0; i < count; i++)
      printf("step %6lld  token %8lld  %10.3f ms  %9.2f tokens/s\n", (long long)(*shown + i), (long long)tokens[i],
             step_ms[i], step_ms[i] > 0 ? 1e3 / step_ms[i] : 0.0);
    *shown += count;
  }
  fflush(stdout);
  return K3_OK;
}

/* Nothing came for `patience` seconds. Errors: K3_ERR_INPUT when waiting on is useless, or blind. */
static K3Status judge_silence(K3RunReader *run, double patience)
{
  switch (find_writer(run->path)) {
  case WRITER_HOLDS:
    fprintf(stderr, "info: no step for %.0f s, but the writer still holds %s: a long prompt, or it hangs; waiting on\n",
            patience, run->path);
    return K3_OK;
  case WRITER_GONE:
    K3_TRY(k3_run_reader_refresh(run)); /* it may have ended since */
    if (strcmp(run->ending, "running") != 0) return K3_OK;
    K3_FAIL(K3_ERR_INPUT,
            "%s: no step for %.0f s and no process holds the file: its writer died. The %lld whole steps are good; "
            "k3decode "
            "info %s shows them",
            run->path, patience, (long long)run->steps, run->path);
  default:
    K3_FAIL(
        K3_ERR_INPUT,
        "%s: no step for %.0f s, and this file system cannot tell whether the writer lives; --patience waits longer",
        run->path, patience);
  }
}

K3Status k3_info_follow(const char *path, double patience)
{
  K3Status status = K3_OK;
  K3RunReader *run = NULL;
  int64_t shown = 0;
  int told = 0;
  K3_TRY(k3_run_reader_open(path, &run));
  k3_info_run_description(run);
  double grown = k3_clock_ms();
  for (;;) {
    /* the ending is read before the steps are counted, so that none is missed after it */
    int ended = strcmp(run->ending, "running") != 0;
    if (shown < run->steps) grown = k3_clock_ms(), told = 0;
    K3_TRY_DONE(print_steps(run, &shown));
    if (ended) break;
    if (!told && k3_clock_ms() - grown > 1e3 * patience) {
      K3_TRY_DONE(judge_silence(run, patience));
      told = 1;
    }
    pause_ms(POLL_MS);
    K3_TRY_DONE(k3_run_reader_refresh(run));
  }
  printf("\n");
  status = k3_info_run_result(run);
done:
  fflush(stdout);
  k3_run_reader_close(run);
  return status;
}
