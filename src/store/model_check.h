/* What a model file must hold, checked without reading its content. Layer: store.
 * Source: model.md, "The model file". */
#ifndef K3_STORE_MODEL_CHECK_H
#define K3_STORE_MODEL_CHECK_H

#include <hdf5.h>

#include "base/status.h"
#include "store/source.h"

/* Opens the dataset at `path` of an open file, or says which step of the path fails and where an external link leads.
 * `wanted` describes the dataset in the message. Errors: K3_ERR_INPUT. */
K3Status k3_model_open_dataset(const char *origin, hid_t file, const char *path, const char *wanted, hid_t *dataset);

/* Every tensor of source->table is there in full, with the right shape and an allowed type, and /layers holds nothing
 * else. Fills source->types. Errors: K3_ERR_INPUT. */
K3Status k3_model_check_tensors(K3Source *source, hid_t file);

#endif
