/* Files that all ranks read at once (models, snapshots): opening, and the group /config. Layer: store. */
#ifndef K3_STORE_HDF5_INPUT_H
#define K3_STORE_HDF5_INPUT_H

#include <hdf5.h>

#include "base/status.h"
#include "plan/config.h"

/* Opens `path` read-only, with HDF5's lock where the file system has locks.
 * Errors: K3_ERR_INPUT (no such file, no plain file, empty, no HDF5, truncated, locked). */
K3Status k3_hdf5_open_input(const char *path, hid_t *file);

/* Reads every field of /config and the layer types, checked. `origin` (the file) begins the messages.
 * Errors: K3_ERR_INPUT naming the field: missing, of another kind, out of range. */
K3Status k3_hdf5_read_config(const char *origin, hid_t file, K3Config *config);

#endif
