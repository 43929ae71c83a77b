/* Stored values to float32, any type. Layer: plan (pure). */
#ifndef K3_PLAN_DECODE_H
#define K3_PLAN_DECODE_H

#include "plan/formats.h"

/* `count` values (whole blocks) at `data` into out. book: the type's packed codebook (codebook.h), NULL where it has none.
 * Source: blocks.h. */
void k3_decode(K3Type type, const uint32_t *book, const uint8_t *data, int64_t count, float *out);

#endif
