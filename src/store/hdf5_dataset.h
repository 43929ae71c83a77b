/* Whole datasets of small files, with their class and shape checked. Layer: store.
 * `origin` (the file) begins the messages. Errors: K3_ERR_INPUT. */
#ifndef K3_STORE_HDF5_DATASET_H
#define K3_STORE_HDF5_DATASET_H

#include <hdf5.h>

#include "base/status.h"

/* Sizes of a dataset of exactly `axes` axes. */
K3Status k3_hdf5_read_shape(const char *origin, hid_t file, const char *name, int axes, hsize_t *size);

/* Doubles (`real`) or int64_t of exactly that shape. */
K3Status k3_hdf5_read_numbers(const char *origin, hid_t file, const char *name, int real, int axes, const hsize_t *size,
                              void *value);

/* Texts of exactly that shape, each terminated in `bytes` bytes; longer ones are cut. */
K3Status k3_hdf5_read_texts(const char *origin, hid_t file, const char *name, int axes, const hsize_t *size,
                            size_t bytes, char *texts);

#endif
