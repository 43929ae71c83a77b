/* Names of tensors in the released checkpoints. Layer: import.
 * Source: model.md, "Names in published checkpoints"; the variants are those that the public mlx-lm module
 * kimi_k3 accepts (residual scores as NAME.norm_weight, the router's bias beside the gate). */
#ifndef K3_IMPORT_HF_NAMES_H
#define K3_IMPORT_HF_NAMES_H

#include <stddef.h>

#include "plan/tensors.h"

enum { K3_HF_NAME_SIZE = 256, K3_HF_VARIANTS = 2 };

/* The prefix of the released form; a text-only checkpoint may come without it. */
#define K3_HF_PREFIX "language_model."

/* Part of a routed expert: a plain matrix, or the two of a packed one. */
typedef enum { K3_HF_PLAIN, K3_HF_PACKED, K3_HF_SCALE } K3HfPart;

/* 1 for experts_gate, experts_up, experts_down: many published tensors make up one of ours. */
int k3_hf_is_expert(const K3TensorSpec *spec);

/* Name of a tensor that is no routed expert. variant 0 is the released one; returns 0 when `spec` has no such
 * variant, and then name is "". */
int k3_hf_name(const K3TensorSpec *spec, int variant, const char *prefix, char name[K3_HF_NAME_SIZE]);

/* Name of a part of one routed expert. */
void k3_hf_expert_name(const K3TensorSpec *spec, int64_t expert, K3HfPart part, const char *prefix,
                       char name[K3_HF_NAME_SIZE]);

/* 1 for tensors of the vision tower and its projector, which a text decoder skips. */
int k3_hf_is_vision(const char *name);

#endif
