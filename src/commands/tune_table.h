/* The table of `k3decode tune`, and of `k3decode info` of a tuning file, on stdout. Layer: commands. */
#ifndef K3_COMMANDS_TUNE_TABLE_H
#define K3_COMMANDS_TUNE_TABLE_H

#include "store/tuning_file.h"

/* `#` lines: command, versions, model, device, what is measured; then column names and units. */
void k3_tune_print_head(const K3TuningFile *file);

/* Rows of trials first … tuning.count - 1. */
void k3_tune_print_trials(const K3TuningFile *file, int64_t first);

/* What is chosen for which rows, what it gains over the planner's own, and where the occupancy steps are. */
void k3_tune_print_choices(const K3TuningFile *file);

/* `k3decode info` of a tuning file: all of the above. Errors: those of k3_tuning_file_read. */
K3Status k3_command_info_tuning(const char *path);

#endif
