/* Snapshots of a decode that runs on many ranks: each rank gives, or takes, the bands that it owns. Layer: decode.
 * All calls but k3_state_check_type are collective over the communicator and agree on failure. */
#ifndef K3_DECODE_SNAPSHOT_H
#define K3_DECODE_SNAPSHOT_H

#include "comm/comm.h"
#include "decode/backend.h"
#include "plan/plan.h"
#include "store/snapshot_file.h"

/* Whose state it is. */
typedef struct {
  K3Backend *backend;
  const K3Config *config;
  const K3Plan *plan;
  K3Comm *comm;
} K3StateOwner;

/* Writes the state as it stands, between two steps. Rank 0 writes; the others send their bands in pieces, so that no
 * rank needs more than tens of MB for it. info: complete on every rank; tokens [token_count]: on rank 0.
 * A stop signal waits until the file is whole. Errors: K3_ERR_INPUT (rank 0's disk), K3_ERR_DEVICE. */
K3Status k3_state_write(const K3StateOwner *owner, const char *path, const K3SnapshotInfo *info, const int64_t *tokens,
                        int overwrite);

/* Opens a snapshot on every rank; the ranks share the work of checking it. Errors: K3_ERR_INPUT (k3_snapshot_open). */
K3Status k3_state_open(K3Comm *comm, const char *path, K3Snapshot **snapshot);

/* Can this backend go on from that cache without a rounding? The types are equal, or it keeps float32.
 * Errors: K3_ERR_INPUT naming both. */
K3Status k3_state_check_type(const K3Snapshot *snapshot, const char *path, K3CacheType type);

/* What its cache is stored as. */
K3CacheType k3_state_cache_type(const K3Snapshot *snapshot);

/* Reads this rank's bands into the backend, which is loaded and reset and has room for the positions. */
K3Status k3_state_read(const K3StateOwner *owner, K3Snapshot *snapshot);

#endif
