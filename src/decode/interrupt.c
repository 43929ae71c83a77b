/* See interrupt.h. Layer: decode. */
#include "decode/interrupt.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static atomic_int received, acknowledged, held;
static pthread_mutex_t words_lock = PTHREAD_MUTEX_INITIALIZER;
static void (*words)(void *context, int signal);
static void *words_context;

static void pause_ms(long ms)
{
  struct timespec time = {ms / 1000, ms % 1000 * 1000000};
  nanosleep(&time, NULL);
}

static void fill_signals(sigset_t *signals)
{
  sigemptyset(signals);
  sigaddset(signals, SIGINT);
  sigaddset(signals, SIGTERM);
  sigaddset(signals, SIGUSR1);
}

static void *wait_for_signal(void *unused)
{
  (void)unused;
  sigset_t signals;
  int signal = 0;
  fill_signals(&signals);
  if (sigwait(&signals, &signal) != 0) return NULL;
  atomic_store(&received, signal);
  for (int waited = 0; waited < K3_GRACE_MS; waited += 10) {
    if (atomic_load(&acknowledged)) return NULL;
    if (atomic_load(&held)) waited = 0;
    pause_ms(10);
  }
  if (atomic_load(&acknowledged)) return NULL;
  pthread_mutex_lock(&words_lock);
  if (words) words(words_context, signal);
  _exit(128 + signal);
}

K3Status k3_interrupt_start(void)
{
  sigset_t signals;
  pthread_t thread;
  signal(SIGXFSZ, SIG_IGN);
  fill_signals(&signals);
  int code = pthread_sigmask(SIG_BLOCK, &signals, NULL);
  if (code == 0) code = pthread_create(&thread, NULL, wait_for_signal, NULL);
  if (code == 0) code = pthread_detach(thread);
  if (code != 0) K3_FAIL(K3_ERR_DEVICE, "cannot start the signal thread: %s", strerror(code));
  return K3_OK;
}

void k3_interrupt_set_last_words(void (*last_words)(void *context, int signal), void *context)
{
  pthread_mutex_lock(&words_lock);
  words = last_words;
  words_context = context;
  pthread_mutex_unlock(&words_lock);
}

int k3_interrupt_signal(void) { return atomic_load(&received); }

void k3_interrupt_hold(int hold) { atomic_store(&held, hold); }

void k3_interrupt_acknowledge(void) { atomic_store(&acknowledged, 1); }
