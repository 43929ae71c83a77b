/* Metadata of a GGUF model of architecture kimi-k3 -> K3Config. Layer: import.
 * Source: the keys that the public converter and reader of llama.cpp use for this architecture. Required keys are
 * required; low_rank_norm_eps has no key there, and is the 1e-6 of the published modules. */
#ifndef K3_IMPORT_GGUF_CONFIG_H
#define K3_IMPORT_GGUF_CONFIG_H

#include "base/status.h"
#include "import/gguf.h"
#include "plan/config.h"

/* Errors: K3_ERR_INPUT: another architecture, a key missing, of another kind or out of range, a value that chooses a
 * formula that is not implemented. */
K3Status k3_gguf_config_read(const K3Gguf *gguf, K3Config *config);

#endif
