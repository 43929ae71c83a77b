/* The snapshot file: the whole state of a decode, from which any number of ranks goes on. Layer: store.
 *
 * One HDF5 file behind a seal (seal.h), written by rank 0 and renamed when it is whole and on disk. Nothing in it
 * depends on how many ranks wrote it. Layout: output/README.md, "A snapshot". */
#ifndef K3_STORE_SNAPSHOT_FILE_H
#define K3_STORE_SNAPSHOT_FILE_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "plan/config.h"

#define K3_SNAPSHOT_FORMAT "k3decode-snapshot"
enum { K3_SNAPSHOT_FORMAT_VERSION = 1 };

typedef struct {
  char program_version[64], model[1024], backend[32], time[32];
  char activations[16]; /* "f32", "int16": of the run that wrote it */
  char cache_type[8];   /* "f32", "f16", "bf16": what /state/cache holds */
  uint64_t model_digest;
  K3Config config;
  int64_t ranks;         /* that wrote it */
  int64_t first_context; /* synthetic positions before the first token (--context N) */
  int64_t fed;           /* tokens that went through the model: the state is theirs */
  int64_t prompt_count;  /* tokens that were given; those after them were decoded */
  int64_t token_count;   /* of all tokens; more than fed: the others are fed next */
} K3SnapshotInfo;

/* Positions cached: first_context + fed. */
int64_t k3_snapshot_position(const K3SnapshotInfo *info);

/* Bytes of a number of the cache: 4 or 2; 0 for an unknown type. */
int64_t k3_snapshot_cache_bytes(const char *cache_type);

/* Bytes that a snapshot has at most; of info: config, cache_type, first_context, fed, token_count. */
int64_t k3_snapshot_bytes(const K3SnapshotInfo *info);

/* --- writing (rank 0) --- */

typedef struct K3SnapshotWriter K3SnapshotWriter;

/* Creates PATH.partial with room for everything. tokens [token_count].
 * Errors: K3_ERR_INPUT (not writable, no room, another process writes it). */
K3Status k3_snapshot_create(const char *path, const K3SnapshotInfo *info, const int64_t *tokens, int overwrite,
                            K3SnapshotWriter **writer);

/* The three parts of the state; `layer` counts the layers of that kind. All errors: K3_ERR_INPUT.
 * cache  [positions, C + R] at `position`, as cache_type says
 * kda    [heads, D key, D value] f32 at `head`
 * conv   [3 (q, k, v), kernel - 1, channels] f32 at `channel` = head · D: W x of earlier tokens, oldest first */
K3Status k3_snapshot_write_cache(K3SnapshotWriter *writer, int64_t layer, int64_t position, int64_t positions,
                                 const void *data);
K3Status k3_snapshot_write_kda(K3SnapshotWriter *writer, int64_t layer, int64_t head, int64_t heads, const float *data);
K3Status k3_snapshot_write_conv(K3SnapshotWriter *writer, int64_t layer, int64_t channel, int64_t channels,
                                const float *data);

/* Closes, seals, flushes to disk, renames. */
K3Status k3_snapshot_finish(K3SnapshotWriter *writer);

/* Frees; what is unfinished is removed. Safe on NULL. */
void k3_snapshot_writer_close(K3SnapshotWriter *writer);

/* --- reading (every rank) --- */

typedef struct K3Snapshot K3Snapshot;

/* Reads the seal and adds up this rank's part of the digests (seal.h); the sum over all parts is for k3_snapshot_open.
 * Errors: K3_ERR_INPUT (no snapshot, truncated …). */
K3Status k3_snapshot_sum(const char *path, int part, int parts, uint64_t *sum);

/* Compares the sum with the seal, then opens and validates. Errors: K3_ERR_INPUT (damaged, another version …). */
K3Status k3_snapshot_open(const char *path, uint64_t sum, K3Snapshot **snapshot);

const K3SnapshotInfo *k3_snapshot_info(const K3Snapshot *snapshot);
const int64_t *k3_snapshot_tokens(const K3Snapshot *snapshot); /* [token_count] */

/* As the writing calls. */
K3Status k3_snapshot_read_cache(K3Snapshot *snapshot, int64_t layer, int64_t position, int64_t positions, void *data);
K3Status k3_snapshot_read_kda(K3Snapshot *snapshot, int64_t layer, int64_t head, int64_t heads, float *data);
K3Status k3_snapshot_read_conv(K3Snapshot *snapshot, int64_t layer, int64_t channel, int64_t channels, float *data);

void k3_snapshot_close(K3Snapshot *snapshot); /* safe on NULL */

/* --- what both sides share --- */

typedef enum { K3_STATE_CACHE, K3_STATE_KDA, K3_STATE_CONV, K3_STATE_PARTS } K3StatePart;

extern const char *const k3_state_path[K3_STATE_PARTS];

/* Shape of a part's dataset, [layers of its kind, …]; the number of axes. */
int k3_state_shape(const K3SnapshotInfo *info, K3StatePart part, uint64_t shape[4]);

#endif
