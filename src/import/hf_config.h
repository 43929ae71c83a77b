/* config.json of a published checkpoint -> K3Config. Layer: import.
 * Nested (`text_config`) or flat. A key that is absent, out of range, or holds a value that this program does
 * not implement is an error that names it. Source: model.md, "Names in published checkpoints". */
#ifndef K3_IMPORT_HF_CONFIG_H
#define K3_IMPORT_HF_CONFIG_H

#include "base/status.h"
#include "plan/config.h"

/* Reads DIRECTORY/config.json.
 * `low_rank_norm_eps` is 1e-6, as in all public code, unless the text config has a key of that name;
 * `max_context` is `model_max_length`, or else `max_position_embeddings`.
 * out config  checked with k3_config_check
 * Errors: K3_ERR_INPUT. */
K3Status k3_hf_config_read(const char *directory, K3Config *config);

#endif
