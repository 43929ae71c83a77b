/* The planner. See plan.h. Layer: plan (pure). */
#include "plan/plan.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static int64_t greatest_common_divisor(int64_t a, int64_t b)
{
  while (b) {
    int64_t rest = a % b;
    a = b;
    b = rest;
  }
  return a;
}

static int64_t least_common_multiple(int64_t a, int64_t b) { return a / greatest_common_divisor(a, b) * b; }

/* Unit i of n over `world` ranks: the first (n mod world) ranks hold one more. */
static K3Range deal(int64_t units, int world, int rank)
{
  int64_t base = units / world, more = units % world;
  K3Range range;
  range.begin = rank * base + (rank < more ? rank : more);
  range.end = range.begin + base + (rank < more ? 1 : 0);
  return range;
}

static K3Range deal_elements(int64_t units, int64_t unit_size, int64_t total, int parts, int part)
{
  K3Range range = deal(units, parts, part);
  range.begin = range.begin * unit_size < total ? range.begin * unit_size : total;
  range.end = range.end * unit_size < total ? range.end * unit_size : total;
  return range;
}

/* --- units: a band never cuts a block -------------------------------------------------------- */

static void set_totals(const K3Config *config, K3Plan *plan)
{
  plan->total[K3_SHARE_VOCAB] = config->vocab_size;
  plan->total[K3_SHARE_KDA_HEADS] = config->num_heads;
  plan->total[K3_SHARE_MLA_HEADS] = config->num_heads;
  plan->total[K3_SHARE_DENSE] = config->dense_intermediate_size;
  plan->total[K3_SHARE_SHARED] = k3_config_shared_size(config);
  plan->total[K3_SHARE_LATENT_ROWS] = config->latent_size;
  plan->total[K3_SHARE_ROUTER_ROWS] = config->num_experts;
  plan->total[K3_SHARE_LATENT_COLUMNS] = config->latent_size;
  plan->total[K3_SHARE_EXPERTS] = config->moe_intermediate_size;
}

/* A tensor banded along its last axis sets the unit: as many of what is dealt as fill whole blocks. */
static void set_units(const K3TensorTable *table, const K3Type *types, K3Plan *plan)
{
  for (int share = 0; share < K3_SHARE_COUNT; share++) plan->unit_size[share] = 1;
  for (int64_t i = 0; i < table->count; i++) {
    const K3TensorSpec *spec = &table->specs[i];
    if (spec->share == K3_SHARE_NONE || spec->share_axis != spec->rank - 1) continue;
    int64_t block = k3_format(types[i])->block_values;
    int64_t unit = block / greatest_common_divisor(block, spec->share_size);
    plan->unit_size[spec->share] = least_common_multiple(plan->unit_size[spec->share], unit);
  }
  for (int share = 1; share < K3_SHARE_COUNT; share++)
    plan->units[share] = (plan->total[share] + plan->unit_size[share] - 1) / plan->unit_size[share];
}

/* --- the expert grid ------------------------------------------------------------------------- */

/* Expected largest of `groups` counts when `picks` experts fall on groups evenly and independently:
 * P(all <= m) = picks! / groups^picks * [x^picks] (sum_{k<=m} x^k/k!)^groups. */
static double expected_busiest(int64_t picks, int groups)
{
  enum { MOST = 256 };
  if (groups == 1 || picks > MOST) return (double)picks / groups;
  double expected = 0.0, below = 0.0;
  for (int64_t m = 0; m <= picks; m++) {
    double power[MOST + 1] = {1.0};
    for (int g = 0; g < groups; g++) { /* probabilities of a binomial split keep the numbers tame */
      double next[MOST + 1] = {0.0};
      double share = 1.0 / (groups - g);
      for (int64_t used = 0; used <= picks; used++) {
        if (power[used] == 0.0) continue;
        int64_t left = picks - used;
        for (int64_t k = 0; k <= (left < m ? left : m); k++) {
          double log_term = lgamma((double)left + 1) - lgamma((double)k + 1) - lgamma((double)(left - k) + 1);
          double chance = share >= 1.0 ? (k == left ? 1.0 : 0.0)
                                       : exp(log_term + (double)k * log(share) + (double)(left - k) * log1p(-share));
          next[used + k] += power[used] * chance;
        }
      }
      memcpy(power, next, sizeof power);
    }
    double at_most = power[picks];
    expected += (double)m * (at_most - below);
    below = at_most;
  }
  return expected;
}

/* Routed work of the busiest rank over the mean. */
static double grid_load(const K3Plan *plan, const K3Config *config, int groups)
{
  int bands = plan->world / groups;
  K3Range widest = deal_elements(plan->units[K3_SHARE_EXPERTS], plan->unit_size[K3_SHARE_EXPERTS],
                                 plan->total[K3_SHARE_EXPERTS], bands, 0);
  double rows = (double)(widest.end - widest.begin) * bands / (double)plan->total[K3_SHARE_EXPERTS];
  double picks = expected_busiest(config->num_experts_per_token, groups) * groups /
                 (double)config->num_experts_per_token;
  return rows * picks;
}

static K3Status choose_grid(const K3Config *config, int wanted_groups, K3Plan *plan)
{
  int world = plan->world;
  if (wanted_groups) {
    if (wanted_groups < 1 || world % wanted_groups != 0)
      K3_FAIL(K3_ERR_USAGE, "expert grid of %d groups: does not divide the world of %d ranks; groups × bands = ranks",
              wanted_groups, world);
    if (wanted_groups > config->num_experts)
      K3_FAIL(K3_ERR_USAGE, "expert grid of %d groups: only %lld experts", wanted_groups,
              (long long)config->num_experts);
    plan->expert_groups = wanted_groups;
  } else {
    double best = INFINITY;
    for (int groups = 1; groups <= world && groups <= config->num_experts; groups++) {
      if (world % groups) continue;
      double load = grid_load(plan, config, groups);
      if (load < best - 1e-9) { /* ties: fewer groups */
        best = load;
        plan->expert_groups = groups;
      }
    }
  }
  plan->expert_bands = world / plan->expert_groups;
  plan->expert_load = grid_load(plan, config, plan->expert_groups);
  return K3_OK;
}

/* --- making and asking ------------------------------------------------------------------------ */

/* Every rank needs at least one head of each kind: states, caches and queries hang on it. */
static K3Status check_heads(const K3TensorTable *table, const K3Type *types, const K3Plan *plan)
{
  for (int64_t i = 0; i < table->count; i++) {
    const K3TensorSpec *spec = &table->specs[i];
    if (spec->role != K3_ROLE_KDA_O_PROJ && spec->role != K3_ROLE_MLA_O_PROJ) continue;
    int64_t units = plan->units[spec->share];
    if (units >= plan->world) continue;
    K3_FAIL(K3_ERR_INPUT,
            "a world of %d ranks cannot work: %s (%s, block size %lld) deals its %lld head%s of %lld columns in units of %lld, "
            "which makes %lld, and a rank would own none; %s %lld",
            plan->world, spec->path, k3_format(types[i])->name, (long long)k3_format(types[i])->block_values,
            (long long)plan->total[spec->share], plan->total[spec->share] == 1 ? "" : "s", (long long)spec->share_size,
            (long long)plan->unit_size[spec->share], (long long)units,
            units > 1 ? "world sizes that work: 1 to" : "the only world size that works:", (long long)units);
  }
  return K3_OK;
}

K3Status k3_plan_make(const K3Config *config, const K3TensorTable *table, const K3Type *types, int world,
                      const K3PlanOptions *options, K3Plan *plan)
{
  memset(plan, 0, sizeof *plan);
  if (world < 1 || world > K3_MAX_WORLD)
    K3_FAIL(K3_ERR_INPUT, "a world of %d ranks cannot work: wanted 1 to %d", world, K3_MAX_WORLD);
  plan->world = world;
  plan->cache_band = options ? options->cache_band : K3_CACHE_CONTEXT;
  plan->page_positions = options && options->page_positions ? options->page_positions : K3_PAGE_POSITIONS;
  set_totals(config, plan);
  set_units(table, types, plan);
  K3_TRY(check_heads(table, types, plan));
  return choose_grid(config, options ? options->expert_groups : 0, plan);
}

K3Range k3_plan_range(const K3Plan *plan, int rank, K3Share share)
{
  if (share == K3_SHARE_EXPERTS)
    return deal_elements(plan->units[share], plan->unit_size[share], plan->total[share], plan->expert_bands,
                         rank % plan->expert_bands);
  return deal_elements(plan->units[share], plan->unit_size[share], plan->total[share], plan->world, rank);
}

K3Range k3_plan_experts(const K3Plan *plan, int rank)
{
  return deal(plan->total[K3_SHARE_ROUTER_ROWS], plan->expert_groups, rank / plan->expert_bands);
}

K3Band k3_plan_band(const K3Plan *plan, int rank, const K3TensorSpec *spec)
{
  K3Band band;
  for (int axis = 0; axis < 3; axis++) {
    band.begin[axis] = 0;
    band.count[axis] = spec->shape[axis];
  }
  if (spec->share == K3_SHARE_NONE) return band;
  K3Range range = k3_plan_range(plan, rank, spec->share);
  band.begin[spec->share_axis] = range.begin * spec->share_size;
  band.count[spec->share_axis] = (range.end - range.begin) * spec->share_size;
  if (spec->share == K3_SHARE_EXPERTS) {
    K3Range experts = k3_plan_experts(plan, rank);
    band.begin[0] = experts.begin;
    band.count[0] = experts.end - experts.begin;
  }
  return band;
}

int k3_plan_owner(const K3Plan *plan, K3Share share, int64_t at)
{
  int64_t unit = at / plan->unit_size[share];
  int64_t base = plan->units[share] / plan->world, more = plan->units[share] % plan->world;
  if (unit < more * (base + 1)) return (int)(unit / (base + 1));
  return (int)(more + (unit - more * (base + 1)) / base);
}

int64_t k3_band_elements(const K3Band *band) { return band->count[0] * band->count[1] * band->count[2]; }

int64_t k3_plan_weight_bytes(const K3Plan *plan, int rank, const K3TensorTable *table, const K3Type *types)
{
  int64_t bytes = 0;
  for (int64_t i = 0; i < table->count; i++) {
    K3Band band = k3_plan_band(plan, rank, &table->specs[i]);
    bytes += k3_format_bytes(types[i], k3_band_elements(&band));
  }
  return bytes;
}

/* --- the latent cache -------------------------------------------------------------------------- */

int k3_plan_cache_owner(const K3Plan *plan, int64_t position)
{
  if (plan->cache_band == K3_CACHE_NONE) return -1;
  return (int)(position / plan->page_positions % plan->world);
}

int64_t k3_plan_cache_row(const K3Plan *plan, int64_t position)
{
  if (plan->cache_band == K3_CACHE_NONE) return position;
  int64_t page = position / plan->page_positions;
  return page / plan->world * plan->page_positions + position % plan->page_positions;
}

int64_t k3_plan_cache_rows(const K3Plan *plan, int rank, int64_t context)
{
  if (plan->cache_band == K3_CACHE_NONE) return context;
  int64_t pages = context / plan->page_positions; /* whole pages; the rest is page number `pages` */
  int64_t rows = (pages / plan->world + (rank < pages % plan->world)) * plan->page_positions;
  if (pages % plan->world == rank) rows += context % plan->page_positions;
  return rows;
}
