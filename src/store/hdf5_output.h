/* Attributes and datasets of files that k3decode writes: run, sweep and tuning files. Layer: store.
 * `path` (the file) begins the messages. Errors: K3_ERR_INPUT. */
#ifndef K3_STORE_HDF5_OUTPUT_H
#define K3_STORE_HDF5_OUTPUT_H

#include <hdf5.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "plan/config.h"
#include "store/hdf5_error.h"

/* A failure of the HDF5 call just made; an expression. */
#define K3_HDF5_FAIL(format, ...) \
  k3_status_fail(K3_ERR_INPUT, __FILE__, __LINE__, format ": %s", __VA_ARGS__, K3_HDF5_REASON)

/* A fixed-length string type for texts of up to `bytes` bytes, NUL included; the caller closes it. Negative: failed. */
hid_t k3_hdf5_text_type(size_t bytes);

/* One scalar attribute of the object `where`. */
K3Status k3_hdf5_put_attribute(const char *path, hid_t where, const char *name, hid_t stored, hid_t memory,
                               const void *value);
K3Status k3_hdf5_put_integer(const char *path, hid_t where, const char *name, int64_t value);
K3Status k3_hdf5_put_text(const char *path, hid_t where, const char *name, const char *text);

/* A dataset that keeps its size; space allocated at once, so that SWMR writing may fill it later.
 * `axes` 0: scalar. */
K3Status k3_hdf5_put_dataset(const char *path, hid_t file, const char *name, hid_t stored, hid_t memory, int axes,
                             const hsize_t *size, const void *value);

/* Says what a numeric dataset holds, in its attributes units ("ms", "byte"; "1": a pure number), axes and meaning.
 * NULL: no such attribute. */
K3Status k3_hdf5_put_meaning(const char *path, hid_t file, const char *name, const char *units, const char *axes,
                             const char *meaning);

/* Doubles (`real`) or int64_t with what they are as attributes: units (NULL: "1"), names of the axes, meaning. */
K3Status k3_hdf5_put_numbers(const char *path, hid_t file, const char *name, int real, int axes, const hsize_t *size,
                             const void *value, const char *units, const char *axis_names, const char *meaning);

/* A scalar text of room `bytes`. */
K3Status k3_hdf5_put_text_dataset(const char *path, hid_t file, const char *name, const char *text, size_t bytes);

/* Texts [size …], each as long as the longest. */
K3Status k3_hdf5_put_texts(const char *path, hid_t file, const char *name, int axes, const hsize_t *size,
                           const char *const *texts);

K3Status k3_hdf5_put_group(const char *path, hid_t file, const char *name);

/* The fields of /config, as the model file has it; the group exists. */
K3Status k3_hdf5_put_config(const char *path, hid_t file, const K3Config *config);

#endif
