/* Where weights come from: an HDF5 model file, or a synthetic recipe made in place. Layer: store.
 * Both answer through one table of functions, so that the backends load bands the same way. */
#ifndef K3_STORE_SOURCE_H
#define K3_STORE_SOURCE_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "plan/codebook.h"
#include "plan/config.h"
#include "plan/formats.h"
#include "plan/plan.h"
#include "plan/tensors.h"

typedef struct K3Source K3Source;

struct K3Source {
  char origin[1024];    /* the file's path, or "synth:tiny:…": begins messages */
  K3Config config;      /* checked */
  K3TensorTable table;
  K3Type *types;        /* [table.count] storage type of each tensor */
  uint64_t digest;      /* over config, tensor table, types, sizes and samples of the content; equal on
                           all ranks when they see the same model */
  int64_t bytes_read;   /* of weights, by this rank so far */

  /* Reads the box `band` of tensor `tensor` as stored (blocks for quantised types), packed row-major,
   * into `destination`. band->begin and count of the last axis are whole blocks.
   * Errors: K3_ERR_INPUT naming file and dataset. */
  K3Status (*read)(K3Source *source, int64_t tensor, const K3Band *band, void *destination);

  /* The codebook dataset /codebooks/NAME as raw bytes; *data is allocated, the caller frees it.
   * Errors: K3_ERR_INPUT when the source has none. */
  K3Status (*codebook)(K3Source *source, const char *name, void **data, size_t *bytes);

  void (*close)(K3Source *source); /* frees everything, `source` too */
};

/* Opens `model`: a path, or "synth:RECIPE". Validates everything but the content: format, version,
 * config, every tensor's presence, type and shape, allocation (a dataset never written is refused).
 * Errors: K3_ERR_INPUT (bad file), K3_ERR_USAGE (bad recipe). */
K3Status k3_source_open(const char *model, K3Source **source);
K3Status k3_model_file_open(const char *path, K3Source **source);  /* src/store/model_file.c */
K3Status k3_synth_source_open(const char *recipe, K3Source **source); /* src/store/synth_source.c */

/* A codebook packed for the decoders (plan/codebook.h); *words is allocated, the caller frees it.
 * Errors: K3_ERR_INPUT: the source has none, or one that the format does not know. */
K3Status k3_source_codebook(K3Source *source, K3CodebookId id, uint32_t **words);

/* Bytes of `band` of tensor `tensor` as stored. */
int64_t k3_source_band_bytes(const K3Source *source, int64_t tensor, const K3Band *band);

#endif
