/* The table of `k3decode sweep` on stdout. Layer: commands. Rank 0 alone prints. */
#ifndef K3_COMMANDS_SWEEP_TABLE_H
#define K3_COMMANDS_SWEEP_TABLE_H

#include "store/sweep_file.h"

/* `#` lines: command, versions built and found, devices, settings, arms; then column names and units. */
void k3_sweep_print_head(const K3SweepInfo *info, const K3Sweep *sweep);

/* Rows of context c: A, B, and the A/A pair. */
void k3_sweep_print_context(const K3Sweep *sweep, int64_t c);

/* Differences against the noise floor, depth-dependent term and control phases of all measured contexts, and the verdict. */
void k3_sweep_print_tail(const K3SweepInfo *info, const K3Sweep *sweep);

/* `k3decode info` of a sweep file: the same table. Errors: those of k3_sweep_file_read. */
K3Status k3_command_info_sweep(const char *path);

#endif
