/* Stored values that may not be: a NaN or an infinity, or the scale of a block that is one. Layer: plan (pure). */
#ifndef K3_PLAN_BLOCK_FAULT_H
#define K3_PLAN_BLOCK_FAULT_H

#include "plan/formats.h"

/* What is wrong with one block (of a plain type: one value), "NaN", "an infinite block scale"; NULL: nothing. */
const char *k3_block_fault(K3Type type, const uint8_t *block);

#endif
