/* Checksums that a model file bears of its own content: a CRC-32 of each tensor's stored bytes, and a digest over config,
 * tensors and CRCs. A file may come without them (format_version 1 does not ask for them). Layer: store.
 * Stored as attribute `crc32` (uint32) of each tensor's dataset and as root attribute `content_digest` (16 hexadecimal
 * digits). The CRC is zlib's. */
#ifndef K3_STORE_CONTENT_DIGEST_H
#define K3_STORE_CONTENT_DIGEST_H

#include <hdf5.h>
#include <stdint.h>

#include "base/status.h"
#include "plan/config.h"
#include "plan/formats.h"
#include "plan/tensors.h"

#define K3_TENSOR_CRC "crc32"
#define K3_CONTENT_DIGEST "content_digest"

/* CRC-32 of `bytes` more, going on from `crc` (0: the first). */
uint32_t k3_content_crc(uint32_t crc, const void *data, int64_t bytes);

/* The CRC of one piece followed by another of `bytes`. */
uint32_t k3_content_join(uint32_t first, uint32_t second, int64_t bytes);

/* The digest: begun with the config, then one tensor after the other in the table's order. */
uint64_t k3_content_begin(const K3Config *config);
uint64_t k3_content_add(uint64_t digest, const K3TensorSpec *spec, K3Type type, uint32_t crc);

/* Fill the attributes in an open file, where the writer made room for them. `path` (the file) begins messages. */
K3Status k3_content_put_crc(const char *path, hid_t file, const char *dataset, uint32_t crc);
K3Status k3_content_put_digest(const char *path, hid_t file, uint64_t digest);

/* Reads what the file `path` says: crcs [table->count] and the digest. *found = 0 when it has no such attributes.
 * Errors: K3_ERR_INPUT: some are there and others not, or of another kind. */
K3Status k3_content_read(const char *path, const K3TensorTable *table, uint32_t *crcs, uint64_t *digest, int *found);

#endif
