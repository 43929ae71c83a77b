/* A seal: the first 512 bytes of a file, text, that tell the length and a digest of all that follows. Layer: store.
 * HDF5 keeps such a user block out of its own way. One flipped bit anywhere in the file, the seal included, is found:
 * the digest's steps are one-to-one, and of the seal nothing is free.
 *
 * The digest is a sum over blocks, so that several ranks may each read a part of the file. */
#ifndef K3_STORE_SEAL_H
#define K3_STORE_SEAL_H

#include <stdint.h>

#include "base/status.h"

enum { K3_SEAL_BYTES = 512 };

typedef struct {
  int64_t bytes;   /* of the whole file */
  uint64_t digest; /* of the bytes after the seal */
} K3Seal;

/* Adds up the digests of the blocks that `part` of `parts` has; over all parts the sum is the file's.
 * `bytes`: of the file. Errors: K3_ERR_INPUT. */
K3Status k3_seal_sum(const char *path, int64_t bytes, int part, int parts, uint64_t *sum);

/* Writes the seal of the file as it stands; `word` names the kind of file. Errors: K3_ERR_INPUT. */
K3Status k3_seal_write(const char *path, const char *word);

/* Reads it, and compares the length. Errors: K3_ERR_INPUT (no seal, damaged, truncated). */
K3Status k3_seal_read(const char *path, const char *word, K3Seal *seal);

#endif
