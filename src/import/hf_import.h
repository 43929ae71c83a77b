/* A released checkpoint directory -> a model file, tensor by tensor in bounded memory. Layer: import. */
#ifndef K3_IMPORT_HF_IMPORT_H
#define K3_IMPORT_HF_IMPORT_H

#include <signal.h>
#include <stdint.h>

#include "base/status.h"
#include "plan/formats.h"

typedef enum {
  K3_TRUNK_KEEP, /* `bf16`: BF16 and F32 as published; F16 widened to f32 (exact) */
  K3_TRUNK_Q8_0, /* matrices whose rows are whole blocks; the others as KEEP */
  K3_TRUNK_F32   /* everything widened */
} K3HfTrunk;

typedef enum {
  K3_EXPERTS_KEEP, /* packed -> mxfp4 bit for bit; BF16 and F32 as published */
  K3_EXPERTS_Q8_0  /* where rows are whole blocks */
} K3HfExperts;

typedef struct {
  K3HfTrunk trunk;
  K3HfExperts experts;
  int overwrite;
  const char *provenance;                                     /* text for the model file */
  const volatile sig_atomic_t *stopped;                       /* a signal number once one came; may be NULL */
  void (*progress)(void *context, int64_t done, int64_t all); /* bytes read; may be NULL */
  void *progress_context;
} K3HfImportOptions;

typedef struct {
  int64_t tensors;   /* of the model file */
  int64_t published; /* of the checkpoint, without skipped ones */
  int64_t vision;    /* skipped */
  int64_t bytes_read, bytes_written;
  int64_t by_type[K3_TYPE_COUNT]; /* tensors of the model file */
} K3HfImportResult;

/* Everything but the values is checked before the output is created. On failure no output is left.
 * Norms, convolutions, A_log, biases and residual scores become f32.
 * Errors: K3_ERR_INPUT: config, a missing, surplus, mis-shaped or mis-typed tensor, NaN or infinity, a non-zero
 * tail of A_log, an E8M0 byte of 255, an output that cannot be written, a signal. */
K3Status k3_hf_import(const char *directory, const char *output, const K3HfImportOptions *options,
                      K3HfImportResult *result);

#endif
