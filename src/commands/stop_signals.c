/* See stop_signals.h. Layer: commands. */
#include "commands/stop_signals.h"

volatile sig_atomic_t k3_stop_signal;

static const int stop_signals[K3_STOP_SIGNALS] = {SIGINT, SIGTERM, SIGHUP};

static void on_signal(int number) { k3_stop_signal = number; }

void k3_stop_catch(struct sigaction before[K3_STOP_SIGNALS])
{
  struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
  sigemptyset(&action.sa_mask);
  k3_stop_signal = 0;
  signal(SIGXFSZ, SIG_IGN);
  for (int i = 0; i < K3_STOP_SIGNALS; i++) {
    sigaction(stop_signals[i], NULL, &before[i]);
    if (before[i].sa_handler != SIG_IGN) sigaction(stop_signals[i], &action, NULL);
  }
}

void k3_stop_release(const struct sigaction before[K3_STOP_SIGNALS])
{
  for (int i = 0; i < K3_STOP_SIGNALS; i++) sigaction(stop_signals[i], &before[i], NULL);
}
