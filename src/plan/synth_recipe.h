/* Recipes of synthetic models: a name with overrides, "tiny", "k3:num_layers=5,experts=mxfp4,seed=3".
 * Layer: plan (pure). */
#ifndef K3_PLAN_SYNTH_RECIPE_H
#define K3_PLAN_SYNTH_RECIPE_H

#include "base/status.h"
#include "plan/config.h"
#include "plan/formats.h"
#include "plan/synth_values.h"
#include "plan/tensors.h"

typedef struct {
  K3Config config;
  uint64_t seed;
  K3Type trunk;   /* matrices outside the experts; a matrix whose row is no whole number of blocks stays f32 */
  K3Type experts; /* experts_gate, experts_up, experts_down */
  double dt_bias; /* mean of dt_bias: far above 0 every KDA channel decays at the lower bound, far below none does */
} K3SynthRecipe;

/* Parses a recipe. Overrides: every scalar field of /config, `layer_types` (digits, e.g. 0001), `seed`,
 * `trunk`, `experts`, `dt_bias`. Without layer_types, one-based layers 4, 8, 12 … and the last are MLA.
 * Errors: K3_ERR_USAGE naming the word that is wrong; K3_ERR_INPUT from k3_config_check. */
K3Status k3_synth_recipe_parse(const char *text, K3SynthRecipe *recipe);

/* The storage type of a tensor. Errors: K3_ERR_INPUT when the experts' type does not suit their rows. */
K3Status k3_synth_type(const K3SynthRecipe *recipe, const K3TensorSpec *spec, K3Type *type);

/* Mean and deviation of a tensor's values, such that activations stay of order one. */
K3SynthRule k3_synth_rule(const K3SynthRecipe *recipe, const K3TensorSpec *spec);

/* Fills `count` values (whole blocks) as stored, from row-major element `first` of the whole tensor. */
void k3_synth_fill(K3SynthRule rule, K3Type type, int64_t first, int64_t count, void *destination);

#endif
