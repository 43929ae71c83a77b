/* SIGINT, SIGTERM and SIGHUP in commands of one process: a writer stops at its next piece, and its partial file
 * is removed. Layer: commands. (`run` has decode/interrupt.h.) */
#ifndef K3_COMMANDS_STOP_SIGNALS_H
#define K3_COMMANDS_STOP_SIGNALS_H

#include <signal.h>

enum { K3_STOP_SIGNALS = 3 };

/* The signal that asked for a stop, 0 when none. A handler can reach nothing but a static. */
extern volatile sig_atomic_t k3_stop_signal;

/* Catches them; what was set before goes to `before`. An ignored signal (nohup) stays ignored. SIGXFSZ is ignored
 * from here on, so that a file-size limit is a failed write with a message. */
void k3_stop_catch(struct sigaction before[K3_STOP_SIGNALS]);
void k3_stop_release(const struct sigaction before[K3_STOP_SIGNALS]);

#endif
