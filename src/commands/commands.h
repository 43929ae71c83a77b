/* The program's commands. Layer: commands.
 * argc and argv begin at the command's own name ("compare"), and getopt_long parses them afresh. `--help`
 * prints the usage to stdout and gives K3_OK; wrong usage is K3_ERR_USAGE with a message. `comm` may be NULL
 * (a world of one). Whoever calls prints the message and turns the status into the exit status. */
#ifndef K3_COMMANDS_COMMANDS_H
#define K3_COMMANDS_COMMANDS_H

#include "base/status.h"
#include "comm/comm.h"

/* The main job. Prints its own failures, once for all ranks. *signal: what stopped it early, else 0. */
K3Status k3_command_run(int argc, char **argv, K3Comm *comm, int *signal);

/* The depth curve of two arms. Prints its own failures and signal as run does. */
K3Status k3_command_sweep(int argc, char **argv, K3Comm *comm, int *signal);

K3Status k3_command_synth(int argc, char **argv, K3Comm *comm);
K3Status k3_command_import(int argc, char **argv, K3Comm *comm);

/* Parity of two run files. One process only.
 * Errors: K3_ERR_COMPARE (beyond a threshold), K3_ERR_INPUT (not comparable, or no run file), K3_ERR_USAGE. */
K3Status k3_command_compare(int argc, char **argv, K3Comm *comm);

/* Times the attention kernels on this GPU. One process only. Errors: K3_ERR_DEVICE, K3_ERR_INPUT, K3_ERR_USAGE. */
K3Status k3_command_tune(int argc, char **argv, K3Comm *comm);

/* What is in a model, run, sweep or tuning file. One process only. Errors: K3_ERR_INPUT, K3_ERR_USAGE. */
K3Status k3_command_info(int argc, char **argv, K3Comm *comm);

/* Figures and tables of run and sweep files, by src/helpers/report.py. One process only.
 * Errors: K3_ERR_INPUT (a file, a missing library), K3_ERR_USAGE. */
K3Status k3_command_report(int argc, char **argv, K3Comm *comm);

/* Text to token ids and back with a checkpoint's tokenizer, by src/helpers/text.py. One process only. Errors: as report. */
K3Status k3_command_text(int argc, char **argv, K3Comm *comm);

/* `info --check`: reads every tensor of a model file and names the first value that may not be (NaN, infinity,
 * an E8M0 byte of 255 …). src/commands/check_model.c. */
K3Status k3_command_check_model(const char *path);

#endif
