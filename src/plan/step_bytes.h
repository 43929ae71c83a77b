/* What a decode step must move through a rank's memory: the floor under its time. Layer: plan (pure). */
#ifndef K3_PLAN_STEP_BYTES_H
#define K3_PLAN_STEP_BYTES_H

#include "plan/plan.h"

typedef enum {
  K3_STEP_TRUNK,   /* weights that every step reads: all but the routed experts; of the embedding one row */
  K3_STEP_EXPERTS, /* routed experts: num_experts_per_token of num_experts of what the rank holds, an even share */
  K3_STEP_CACHE,   /* the latent cache: every cached row of every MLA layer, once */
  K3_STEP_STATE,   /* KDA states [heads, D, D] f32: read and written */
  K3_STEP_PARTS
} K3StepPart;

extern const char *const k3_step_part_names[K3_STEP_PARTS];

/* Bytes of each part on `rank`, with `positions` cached before the step, at cache_bytes a number of the cache.
 * Weights count as stored in the model. Left out, being small: activations, convolution windows, logits.
 * Source: design.md, "How a step reaches the limit". */
void k3_plan_step_bytes(const K3Plan *plan, int rank, const K3Config *config, const K3TensorTable *table,
                        const K3Type *types, int64_t positions, int64_t cache_bytes, int64_t bytes[K3_STEP_PARTS]);

#endif
