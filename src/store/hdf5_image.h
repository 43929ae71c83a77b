/* Small HDF5 files that are built in memory and written in one go: sweep and tuning files. Layer: store.
 * They are written by partial_file.h, whose k3_partial_check says beforehand whether they can be. */
#ifndef K3_STORE_HDF5_IMAGE_H
#define K3_STORE_HDF5_IMAGE_H

#include <hdf5.h>
#include <stdint.h>

#include "base/status.h"

/* Fills the open file. */
typedef K3Status (*K3Hdf5Fill)(const char *path, hid_t file, const void *context);

/* Errors: K3_ERR_INPUT; then nothing is left behind. */
K3Status k3_hdf5_write_image(const char *path, K3Hdf5Fill fill, const void *context);

/* Opens such a file for reading; the caller closes it.
 * Errors: K3_ERR_INPUT (no such file, no HDF5, another format, or a format_version other than `version`). */
K3Status k3_hdf5_open_image(const char *path, const char *format, const char *what, int64_t version, hid_t *file);

#endif
