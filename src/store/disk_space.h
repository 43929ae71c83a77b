/* Room on a disk, asked before the first byte. Layer: store. */
#ifndef K3_STORE_DISK_SPACE_H
#define K3_STORE_DISK_SPACE_H

#include <stdint.h>

#include "base/status.h"

/* Whether a file of `bytes`, a `kind` ("model file"), fits beside what the disk of the file `output` holds, and below the
 * limit on file size: that must not reach HDF5, which crashes at exit over a file that it could not close. `mend` ends the
 * message.
 * Errors: K3_ERR_INPUT. */
K3Status k3_disk_space_check(const char *output, const char *kind, int64_t bytes, const char *mend);

#endif
