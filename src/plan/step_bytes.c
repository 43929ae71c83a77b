/* See step_bytes.h. Layer: plan (pure). */
#include "plan/step_bytes.h"

const char *const k3_step_part_names[K3_STEP_PARTS] = {
    [K3_STEP_TRUNK] = "trunk", [K3_STEP_EXPERTS] = "experts", [K3_STEP_CACHE] = "cache", [K3_STEP_STATE] = "state"};

void k3_plan_step_bytes(const K3Plan *plan, int rank, const K3Config *config, const K3TensorTable *table,
                        const K3Type *types, int64_t positions, int64_t cache_bytes, int64_t bytes[K3_STEP_PARTS])
{
  K3Range heads = k3_plan_range(plan, rank, K3_SHARE_KDA_HEADS);
  int64_t experts = 0;
  bytes[K3_STEP_TRUNK] = 0;
  for (int64_t i = 0; i < table->count; i++) {
    const K3TensorSpec *spec = &table->specs[i];
    K3Band band = k3_plan_band(plan, rank, spec);
    int64_t held = k3_format_bytes(types[i], k3_band_elements(&band));
    if (spec->share == K3_SHARE_EXPERTS) experts += held;
    else if (spec->role != K3_ROLE_EMBED) bytes[K3_STEP_TRUNK] += held;
    else if (band.count[0] > 0) bytes[K3_STEP_TRUNK] += held / band.count[0];
  }
  bytes[K3_STEP_EXPERTS] =
      config->num_experts > 0
          ? (int64_t)((double)experts * (double)config->num_experts_per_token / (double)config->num_experts)
          : 0;
  bytes[K3_STEP_CACHE] = k3_config_count_layers(config, K3_LAYER_MLA) * k3_plan_cache_rows(plan, rank, positions) *
                         k3_config_cache_width(config) * cache_bytes;
  bytes[K3_STEP_STATE] = 2 * k3_config_count_layers(config, K3_LAYER_KDA) * (heads.end - heads.begin) *
                         config->kda_head_dim * config->kda_head_dim * (int64_t)sizeof(float);
}
