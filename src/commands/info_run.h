/* The page about a run file, and following one that is being written. Layer: commands. */
#ifndef K3_COMMANDS_INFO_RUN_H
#define K3_COMMANDS_INFO_RUN_H

#include "base/status.h"
#include "store/run_reader.h"

enum { K3_INFO_PATIENCE_S = 30 };

/* Prints what is in a run file: what ran, its speed and spread, its phases, what was unusual, its plan.
 * `tokenizer`: directory of a tokenizer for prompt and decoded tokens as text; NULL: ids alone.
 * Errors: K3_ERR_INPUT (unreadable, damaged; no such tokenizer). */
K3Status k3_info_run(const char *path, const char *tokenizer);

/* The parts of that page. `description`: what ran; `result`: what came of it, so far. */
void k3_info_run_description(const K3RunReader *run);
K3Status k3_info_run_result(K3RunReader *run);

/* Returns when `path` opens as an HDF5 file, when it has content that does not change, or after `patience` seconds: a run may
 * be followed before its file is there. */
void k3_info_wait_for_file(const char *path, double patience);

/* Prints a run's description, a line for each step as it comes, and, when the run has ended, its result. After `patience`
 * seconds without a new step the writer is looked for: while it holds the file, one note says so and the waiting goes on.
 * Errors: K3_ERR_INPUT (no run file; the writer is gone, or cannot be looked for on this file system). */
K3Status k3_info_follow(const char *path, double patience);

#endif
