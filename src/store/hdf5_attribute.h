/* Attributes read from HDF5 with their class checked. Layer: store.
 * `origin` (the file) and `where` (the object) begin the messages. Errors: K3_ERR_INPUT. */
#ifndef K3_STORE_HDF5_ATTRIBUTE_H
#define K3_STORE_HDF5_ATTRIBUTE_H

#include <hdf5.h>
#include <stddef.h>

#include "base/status.h"

/* A single text of fixed or variable length, cut to `size`. */
K3Status k3_hdf5_read_text(const char *origin, hid_t place, const char *where, const char *name, char *text,
                           size_t size);

/* A single number of class `wanted` and any width, converted to the type `memory`. */
K3Status k3_hdf5_read_number(const char *origin, hid_t place, const char *where, const char *name, H5T_class_t wanted,
                             hid_t memory, void *value);

/* "an integer", "a float" … */
const char *k3_hdf5_class_name(H5T_class_t class);

#endif
