/* A plain file mapped read-only, for the readers of checkpoints. Layer: import. */
#ifndef K3_IMPORT_MAPPED_FILE_H
#define K3_IMPORT_MAPPED_FILE_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

/* Maps a file of at least `least` bytes; `what` ("a safetensors file") stands in the message of a shorter one.
 * *map is released with k3_mapped_close. Errors: K3_ERR_INPUT (absent, no plain file, too short, no address space). */
K3Status k3_mapped_open(const char *path, const char *what, size_t least, uint8_t **map, size_t *size);

/* Tells the system that bytes [begin, end) after `data`, in a mapping, are not needed any more, so that memory stays
 * bounded. Whole pages go; the one that a piece ends in is given back with the next piece. */
void k3_mapped_release(const uint8_t *data, int64_t begin, int64_t end);

/* Safe on NULL. */
void k3_mapped_close(uint8_t *map, size_t size);

#endif
