/* A released checkpoint directory -> a model file, tensor by tensor in bounded memory. Layer: import. */
#ifndef K3_IMPORT_HF_IMPORT_H
#define K3_IMPORT_HF_IMPORT_H

#include "base/status.h"
#include "import/import_job.h"

typedef enum {
  K3_TRUNK_KEEP, /* `bf16`: BF16 and F32 as published; F16 widened to f32 (exact) */
  K3_TRUNK_Q8_0, /* matrices whose rows are whole blocks; the others as KEEP */
  K3_TRUNK_F32   /* everything widened */
} K3HfTrunk;

typedef enum {
  K3_EXPERTS_KEEP, /* packed -> mxfp4 bit for bit; BF16 and F32 as published */
  K3_EXPERTS_Q8_0  /* where rows are whole blocks */
} K3HfExperts;

/* Everything but the values is checked before the output is created. On failure no output is left, see
 * k3_import_run.
 * Norms, convolutions, A_log, biases and residual scores become f32.
 * Errors: K3_ERR_INPUT: config, a missing, surplus, mis-shaped or mis-typed tensor, NaN or infinity, a non-zero
 * tail of A_log, an E8M0 byte of 255, an output that cannot be written, a signal. */
K3Status k3_hf_import(const char *directory, const char *output, K3HfTrunk trunk, K3HfExperts experts,
                      const K3ImportOptions *options, K3ImportResult *result);

#endif
