/* SIGINT, SIGTERM and SIGUSR1 during a run. Layer: decode.
 *
 * A thread waits for the signals. The decode loop asks at each step's end and stops there when any rank was
 * told to. A rank may however be inside a collective whose partner is dead: when the loop does not come round
 * within K3_GRACE_MS of the signal, the thread says the last words (closes the run file) and ends the process
 * with 128 + signal, so that the file is whole before mpirun's SIGKILL, one second after its SIGTERM. */
#ifndef K3_DECODE_INTERRUPT_H
#define K3_DECODE_INTERRUPT_H

#include "base/status.h"

enum { K3_GRACE_MS = 400 };

/* Ignores SIGXFSZ, so that a limit on file size is a failed write with a message. Blocks the signals for all threads made from now on, and starts the waiting thread. Call before MPI starts
 * its own threads. Errors: K3_ERR_DEVICE. */
K3Status k3_interrupt_start(void);

/* What to do before the process ends without the loop's help; NULL for nothing. Called in the waiting thread. */
void k3_interrupt_set_last_words(void (*last_words)(void *context, int signal), void *context);

/* The signal received so far, 0 when none. */
int k3_interrupt_signal(void);

/* 1: a file is being written that must become whole, so the thread waits as long as it takes; 0: it is. A signal that
 * came meanwhile is for the loop's next look, or, when the loop is over, for nobody (k3_interrupt_acknowledge). */
void k3_interrupt_hold(int hold);

/* The loop has seen the signal and ends by itself: the thread leaves it alone. */
void k3_interrupt_acknowledge(void);

#endif
