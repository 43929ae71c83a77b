/* Files that appear under their name when they are whole: written as PATH.partial, flushed to disk, renamed. Layer: store.
 * A leftover of a killed process bears no lock and is replaced; one that another process writes is refused, and so is a
 * PATH.partial that is none of k3decode's files.
 * Errors: K3_ERR_INPUT. */
#ifndef K3_STORE_PARTIAL_FILE_H
#define K3_STORE_PARTIAL_FILE_H

#include <hdf5.h>
#include <stdint.h>

#include "base/status.h"

/* Before the work: could PATH be written? An existing file is refused unless `overwrite`, and then unless its root
 * attribute `format` is `format`; `kind` names such files ("sweep file"). */
K3Status k3_partial_check(const char *path, int overwrite, const char *format, const char *kind);

/* Makes room for a new PATH.partial. */
K3Status k3_partial_remove_leftover(const char *partial);

/* A new HDF5 file, locked while it is open. creation: its property list, or H5P_DEFAULT. */
K3Status k3_partial_create(const char *partial, hid_t creation, hid_t *file);

/* The descriptor under an open HDF5 file, -1: none. */
int k3_partial_descriptor(hid_t file);

/* Sees to it that the file can grow to `bytes`: a full disk must not reach HDF5, which cannot close the file then. */
K3Status k3_partial_reserve(const char *partial, int descriptor, int64_t bytes);

/* Without `overwrite` a file that appeared under `path` meanwhile is kept, and that is an error. */
K3Status k3_partial_rename(const char *partial, const char *path, int overwrite);

/* The same for a closed file, which is flushed to disk before, and its folder after. */
K3Status k3_partial_publish(const char *partial, const char *path, int overwrite);

/* Before closing a file that is thrown away: the library cannot close one whose last flush fails, and complains again
 * when the process ends; so its last writes go to memory instead of a full disk. */
void k3_partial_discard(hid_t file);

#endif
