/* Which part of the model a rank owns. Layer: plan (pure: no I/O, no MPI, no CUDA).
 * Source: design.md, "Who owns what". */
#ifndef K3_PLAN_PLAN_H
#define K3_PLAN_PLAN_H

#include "base/status.h"
#include "plan/config.h"
#include "plan/formats.h"
#include "plan/tensors.h"

enum { K3_MAX_WORLD = 64 };

/* Half-open range of elements of one axis. */
typedef struct {
  int64_t begin, end;
} K3Range;

/* Where the latent cache of the MLA layers lives. */
typedef enum {
  K3_CACHE_CONTEXT = 0, /* position pages dealt round-robin to the ranks; queries are gathered */
  K3_CACHE_NONE = 1     /* every rank holds all positions and attends for its own heads */
} K3CacheBand;

typedef struct {
  int expert_groups;        /* 0: chosen by the planner. groups × bands = world */
  K3CacheBand cache_band;
  int64_t page_positions;   /* positions of a cache page; 0: K3_PAGE_POSITIONS */
} K3PlanOptions;

enum { K3_PAGE_POSITIONS = 64 };

/* The plan of all ranks; a rank's view is `rank` passed to the calls below. */
typedef struct {
  int world;
  int expert_groups, expert_bands; /* rank = group * expert_bands + band */
  double expert_load;              /* expected busiest rank's share of the routed work, 1 = even */
  K3CacheBand cache_band;
  int64_t page_positions;
  int64_t units[K3_SHARE_COUNT];   /* number of units dealt, 0 for K3_SHARE_NONE */
  int64_t unit_size[K3_SHARE_COUNT]; /* of what is dealt (heads, columns …) in one unit */
  int64_t total[K3_SHARE_COUNT];   /* of what is dealt, whole */
} K3Plan;

/* A rank's part of one tensor: a box. Axes beyond the tensor's rank are [0, 1). */
typedef struct {
  int64_t begin[3], count[3];
} K3Band;

/* The planner. `types[i]` is the storage type of table->specs[i]: a band never cuts a block, so the
 * types of the column-banded tensors set the unit in which heads and columns are dealt.
 * Dealing: of n units the first (n mod world) ranks get one more than the others.
 * Errors: K3_ERR_INPUT when the world size cannot work, naming the tensor and the sizes that would;
 * K3_ERR_USAGE when options->expert_groups does not divide the world. */
K3Status k3_plan_make(const K3Config *config, const K3TensorTable *table, const K3Type *types, int world,
                      const K3PlanOptions *options, K3Plan *plan);

/* The range of `share` that a rank owns, in what is dealt (heads, vocabulary rows, columns, …).
 * For K3_SHARE_EXPERTS this is the range of the intermediate axis; the experts are k3_plan_experts. */
K3Range k3_plan_range(const K3Plan *plan, int rank, K3Share share);

/* The experts of a rank's group. */
K3Range k3_plan_experts(const K3Plan *plan, int rank);

/* The box of `spec` that `rank` owns. */
K3Band k3_plan_band(const K3Plan *plan, int rank, const K3TensorSpec *spec);

/* Which rank owns element `at` of what `share` deals (not for K3_SHARE_EXPERTS or K3_SHARE_NONE). */
int k3_plan_owner(const K3Plan *plan, K3Share share, int64_t at);

/* Elements of a band. */
int64_t k3_band_elements(const K3Band *band);

/* Bytes of all weights a rank holds. */
int64_t k3_plan_weight_bytes(const K3Plan *plan, int rank, const K3TensorTable *table, const K3Type *types);

/* --- the latent cache (cache_band == K3_CACHE_CONTEXT: page p lives on rank p mod world) --- */

/* Rank that stores position t; with K3_CACHE_NONE every rank does, and the answer is -1. */
int k3_plan_cache_owner(const K3Plan *plan, int64_t position);

/* Row of position t in its owner's cache. */
int64_t k3_plan_cache_row(const K3Plan *plan, int64_t position);

/* Rows that `rank` holds when positions 0 … context-1 are cached. Rows are filled in order, so the
 * cached positions of a rank are always its rows [0, this). */
int64_t k3_plan_cache_rows(const K3Plan *plan, int rank, int64_t context);

#endif
