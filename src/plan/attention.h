/* How MLA attention over one rank's cached rows is cut into blocks. Layer: plan (pure: no I/O, no CUDA).
 * Source: design.md, "Attention at depth".
 *
 * Work is cut twice: heads into passes (one pass over the cache serves heads_per_pass heads) and rows into
 * slices (runs of contiguous rows, whole tiles of tile_rows, the last tile possibly partial). A block is one
 * (slice, pass). The grid is fixed by the plan, the slices' rows follow from the row count of the moment, so that
 * one captured graph serves all steps up to plan.rows; k3_attention_capacity says where the next plan begins. */
#ifndef K3_PLAN_ATTENTION_H
#define K3_PLAN_ATTENTION_H

#include <stdint.h>
#include <string.h>

#include "base/float16.h" /* K3_HOST_DEVICE */
#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* At most so many rows are attended by one slice (the un-split kernel) unless the caller moves the threshold.
 * Measured on H200, 12 heads, tensor cores: 128 rows 4.4 us un-split and 3.5 us in two slices, 256 rows 6.8 and 3.5:
 * splitting pays as soon as there are two tiles. */
enum { K3_ATTENTION_UNSPLIT_ROWS = 64 };

enum { K3_ATTENTION_MAX_WIDTHS = 8 };

/* The slice kernels. Tiles and widths of both stand here alone: the planner's guess without a device (info --plan) and
 * the launchers (kernels/mla_slice.cu, mla_tensor.cu) cannot disagree. */
typedef enum {
  K3_ATTENTION_KERNEL_CORE = 0, /* CUDA cores: any cache type */
  K3_ATTENTION_KERNEL_TENSOR    /* tensor cores: C 512, R 64, 16-bit cache */
} K3AttentionKernel;

enum { K3_ATTENTION_CORE_TILE_ROWS = 32, K3_ATTENTION_TENSOR_TILE_ROWS = 64 };

struct K3AttentionTuning; /* plan/attention_tuning.h */

typedef struct {
  K3AttentionKernel kernel;
  const struct K3AttentionTuning *tuning; /* measured cuts that go before the planner's own; NULL: none */
  int64_t heads;               /* heads this rank attends for (all of them when the cache is banded by context) */
  int64_t rows;                /* rows the plan must serve, at most this rank's capacity */
  int64_t latent;              /* C */
  int64_t multiprocessors;     /* of the device */
  int64_t resident_blocks;     /* blocks of the slice kernel that fit on one of them */
  int64_t tile_rows;           /* rows of one tile of the slice kernel */
  int64_t widths[K3_ATTENTION_MAX_WIDTHS]; /* heads a pass the slice kernel is built for, ascending, 0 ends the list */
  int64_t unsplit_rows;        /* rows up to which one slice serves; K3_ATTENTION_UNSPLIT_ROWS */
  int64_t max_head_slices;     /* cap on heads × slices (the partials' memory); 0: two waves of blocks */
  int64_t force_slices;        /* tests and tuning: this many slices, empty ones included; 0: planned */
} K3AttentionShape;

typedef struct {
  int64_t heads, rows, latent, tile_rows;
  int64_t heads_per_pass;      /* width of the kernel; the last pass may hold fewer heads */
  int64_t passes;              /* grid.y of the slice kernel */
  int64_t slices;              /* grid.x of the slice kernel, partials of the merge */
  int split;                   /* 0: one slice, the un-split kernel */
  int tuned;                   /* 1: width and slices are measured ones (shape.tuning) */
  int64_t blocks;              /* passes × slices */
  int64_t busy_blocks;         /* of these, with rows when all plan.rows are cached */
  int64_t acc_floats;          /* scratch: [slices, heads, latent] */
  int64_t ml_floats;           /* scratch: [heads, slices], twice (m and l) */
} K3AttentionPlan;

/* Tile, widths and thresholds of a kernel; all else of `shape` is 0 but heads and latent. */
static inline void k3_attention_kernel_shape(K3AttentionKernel kernel, int64_t heads, int64_t latent,
                                             K3AttentionShape *shape)
{
  memset(shape, 0, sizeof *shape);
  shape->kernel = kernel;
  shape->heads = heads;
  shape->latent = latent;
  shape->unsplit_rows = K3_ATTENTION_UNSPLIT_ROWS;
  if (kernel == K3_ATTENTION_KERNEL_TENSOR) {
    shape->tile_rows = K3_ATTENTION_TENSOR_TILE_ROWS;
    shape->widths[0] = 16, shape->widths[1] = 24, shape->widths[2] = 48;
  } else {
    shape->tile_rows = K3_ATTENTION_CORE_TILE_ROWS;
    shape->widths[0] = 4, shape->widths[1] = 12;
  }
}

/* Blocks of a kernel that an SM of Hopper holds, from its shared memory and at most 128 registers a thread: for plans
 * without a device. The CUDA backend asks the driver. width: C + R. */
int64_t k3_attention_resident_guess(K3AttentionKernel kernel, int64_t latent, int64_t width);

/* Derives the plan. Nothing is remembered: call again when anything in `shape` changes. Width and slices are those of
 * shape.tuning where it has such heads and rows and no slice count is forced.
 * Where there is enough work and no tuning (passes × tiles >= multiprocessors, above the threshold, no cap hit), at least 90 % of
 * the multiprocessors have work.
 * Errors: K3_ERR_INPUT for a size below 1, naming it. */
K3Status k3_attention_plan(const K3AttentionShape *shape, K3AttentionPlan *plan);

/* Rows up to which the plan for `rows` rows is to be made: multiples of 64, from 1,024 on eight to a doubling, so that the
 * cut fits the rows well. A graph captured for that many serves all steps up to it. Never above `limit`, never below `rows`. */
int64_t k3_attention_capacity(int64_t rows, int64_t limit);

/* First row of slice `slice` of `slices` when `rows` rows are cached; slice `slices` begins at `rows`. Used by the
 * kernels as it stands: the plan and the device cannot disagree. Whole tiles, dealt evenly; more slices than tiles
 * leave empty slices. */
static inline K3_HOST_DEVICE int64_t k3_attention_slice_begin(int64_t rows, int64_t tile_rows, int64_t slices,
                                                              int64_t slice)
{
  int64_t tiles = (rows + tile_rows - 1) / tile_rows;
  int64_t whole = tiles * slice; /* 32 bits as a rule, and a device divides 64 in software */
  int64_t before = whole <= UINT32_MAX && slices <= UINT32_MAX ? (uint32_t)whole / (uint32_t)slices : whole / slices;
  int64_t begin = before * tile_rows;
  return begin < rows ? begin : rows;
}

/* The same where the caller knows that 32 bits hold rows + tile_rows and tiles · slices. */
static inline K3_HOST_DEVICE uint32_t k3_attention_slice_begin_narrow(uint32_t rows, uint32_t tile_rows, uint32_t slices,
                                                                      uint32_t slice)
{
  uint32_t begin = (rows + tile_rows - 1) / tile_rows * slice / slices * tile_rows;
  return begin < rows ? begin : rows;
}

/* Rows that `rank` of `world` holds of the first `context` positions, pages dealt round-robin
 * (k3_plan_cache_rows, for the device). */
static inline K3_HOST_DEVICE int64_t k3_attention_rows(int64_t context, int64_t page_positions, int64_t world,
                                                       int64_t rank)
{
  int64_t pages = context / page_positions, rest = context % page_positions;
  int64_t rows = (pages / world) * page_positions, turn = pages % world;
  if (rank < turn) return rows + page_positions;
  return rank == turn ? rows + rest : rows;
}

#ifdef __cplusplus
}
#endif
#endif
