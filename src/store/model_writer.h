/* Writes a model file (format_version 1) tensor by tensor. Layer: store.
 * The file is written as PATH.partial and renamed when k3_model_writer_finish succeeds, so that a
 * file under the final name is always whole. It bears checksums of its content (content_digest.h).
 * Source: model.md, "The model file". */
#ifndef K3_STORE_MODEL_WRITER_H
#define K3_STORE_MODEL_WRITER_H

#include "base/status.h"
#include "plan/config.h"
#include "plan/formats.h"
#include "plan/tensors.h"

typedef struct K3ModelWriter K3ModelWriter;

/* Bytes that a model file of these tensors, types [table->count], has at most. */
int64_t k3_model_writer_room(const K3TensorTable *table, const K3Type *types);

/* Creates PATH.partial with root attributes and /config. An existing PATH is refused unless `overwrite`,
 * and then unless it is a model file.
 * `provenance` (text: command, source) is stored as root attribute `provenance`.
 * Errors: K3_ERR_INPUT (cannot write, exists, disk full). */
K3Status k3_model_writer_create(const char *path, const K3Config *config, const char *provenance, int overwrite,
                                K3ModelWriter **writer);

/* The same with the datasets of all tensors of `table`, types [table->count], and restartable: which tensors are whole is
 * noted in PATH.partial.journal. When a run that was stopped left both files, and its `identity` (a hash of all that the
 * content depends on) is the same, this one goes on with them: see k3_model_writer_restore. */
K3Status k3_model_writer_create_all(const char *path, const K3Config *config, const K3TensorTable *table,
                                    const K3Type *types, uint64_t identity, const char *provenance, int overwrite,
                                    K3ModelWriter **writer);

/* Creates the dataset of `spec` in `type`. */
K3Status k3_model_writer_tensor(K3ModelWriter *writer, const K3TensorSpec *spec, K3Type type);

/* Writes rows [row, row+count) of the tensor created for `spec` in `type`, where the tensor is seen as a matrix
 * [product of all axes but the last, last axis] (a 1-axis tensor: [n, 1]); `data` is as stored. Any order; several
 * threads may write different tensors at once. */
K3Status k3_model_writer_rows(K3ModelWriter *writer, const K3TensorSpec *spec, K3Type type, int64_t row, int64_t count,
                              const void *data);

/* Of a restartable writer: *whole = 1 when an earlier run wrote this tensor and its bytes are still what they were (they
 * are read); then there is nothing to write. May be called by several threads for different tensors. */
K3Status k3_model_writer_restore(K3ModelWriter *writer, const K3TensorSpec *spec, int *whole);

/* Of a restartable writer: notes that the tensor is whole. Likewise. */
K3Status k3_model_writer_done(K3ModelWriter *writer, const K3TensorSpec *spec);

/* Of a restartable writer: k3_model_writer_close leaves an unfinished file for the next run. */
void k3_model_writer_keep(K3ModelWriter *writer);

/* Stores /codebooks/NAME as uint8 [bytes]; before any tensor's rows in a restartable writer. */
K3Status k3_model_writer_codebook(K3ModelWriter *writer, const char *name, const void *data, size_t bytes);

/* Checks that every tensor of `table` was written whole, stores the checksums, flushes, fsyncs, renames. */
K3Status k3_model_writer_finish(K3ModelWriter *writer, const K3TensorTable *table);

/* 1: a PATH.partial that another run left was replaced, since there was nothing to go on with. */
int k3_model_writer_replaced(const K3ModelWriter *writer);

/* The content digest of a finished file. */
uint64_t k3_model_writer_digest(const K3ModelWriter *writer);

/* Closes and frees; an unfinished .partial file is removed. Safe on NULL. */
void k3_model_writer_close(K3ModelWriter *writer);

#endif
