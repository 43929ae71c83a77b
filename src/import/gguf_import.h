/* A GGUF model of architecture kimi-k3 -> a model file, block for block. Layer: import. */
#ifndef K3_IMPORT_GGUF_IMPORT_H
#define K3_IMPORT_GGUF_IMPORT_H

#include "base/status.h"
#include "import/import_job.h"

/* *is_one = 1 when `path` is named *.gguf, or is a directory that holds such files.
 * Errors: K3_ERR_INPUT: a directory that holds a safetensors checkpoint too. */
K3Status k3_gguf_is_one(const char *path, int *is_one);

/* `path`: see k3_gguf_open. Everything but the values is checked before the output is created.
 * Matrices keep their type and their blocks bit for bit; the half-bytes of mxfp4 are put in model.md's order. Vectors,
 * convolutions and the like become f32. kv_b_proj is the published joined matrix bit for bit or, where K and V parts are
 * published apart, joined from both: K's rows are the columns of the published one, which no block survives, so that parts of
 * block types are decoded to f32 (no value is rounded again); parts of one plain type keep it. Residual scores, published as
 * norm * projection, become the projection, and the norm is ones. A_log = log(-ssm_a), rounded to float32.
 * Errors: K3_ERR_INPUT: metadata, a missing, surplus or mis-shaped tensor, a type without a decoder, NaN or infinity in
 * plain values or a block's scale, an E8M0 byte of 255, ssm_a that is not negative, an output that cannot be written, a signal. */
K3Status k3_gguf_import(const char *path, const char *output, const K3ImportOptions *options, K3ImportResult *result);

#endif
