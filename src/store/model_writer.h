/* Writes a model file (format_version 1) tensor by tensor. Layer: store.
 * The file is written as PATH.partial and renamed when k3_model_writer_finish succeeds, so that a
 * file under the final name is always whole. Source: model.md, "The model file". */
#ifndef K3_STORE_MODEL_WRITER_H
#define K3_STORE_MODEL_WRITER_H

#include "base/status.h"
#include "plan/config.h"
#include "plan/formats.h"
#include "plan/tensors.h"

typedef struct K3ModelWriter K3ModelWriter;

/* Creates PATH.partial with root attributes and /config. An existing PATH is refused unless `overwrite`.
 * `provenance` (text: command, source) is stored as root attribute `provenance`.
 * Errors: K3_ERR_INPUT (cannot write, exists, disk full). */
K3Status k3_model_writer_create(const char *path, const K3Config *config, const char *provenance, int overwrite,
                                K3ModelWriter **writer);

/* Creates the dataset of `spec` in `type`. */
K3Status k3_model_writer_tensor(K3ModelWriter *writer, const K3TensorSpec *spec, K3Type type);

/* Writes rows [row, row+count) of the tensor created last for `spec`, where the tensor is seen as a matrix
 * [product of all axes but the last, last axis] (a 1-axis tensor: [n, 1]); `data` is as stored. */
K3Status k3_model_writer_rows(K3ModelWriter *writer, const K3TensorSpec *spec, K3Type type, int64_t row, int64_t count,
                              const void *data);

/* Stores /codebooks/NAME as uint8 [bytes]. */
K3Status k3_model_writer_codebook(K3ModelWriter *writer, const char *name, const void *data, size_t bytes);

/* Checks that every tensor of `table` was written whole, flushes, fsyncs, renames. */
K3Status k3_model_writer_finish(K3ModelWriter *writer, const K3TensorTable *table);

/* Closes and frees; an unfinished .partial file is removed. Safe on NULL. */
void k3_model_writer_close(K3ModelWriter *writer);

#endif
