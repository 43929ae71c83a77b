/* The page of `k3decode info` about a snapshot. Layer: commands. */
#ifndef K3_COMMANDS_INFO_SNAPSHOT_H
#define K3_COMMANDS_INFO_SNAPSHOT_H

#include "base/status.h"

/* Checks the whole file and prints what it holds. Errors: K3_ERR_INPUT (damaged …). */
K3Status k3_info_snapshot(const char *path);

#endif
