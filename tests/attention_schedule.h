/* The batched, split attention schedule of the GPU kernels in float32 on the CPU, and what it is held against: two-pass
 * attention in float64 with expanded values. Layer: tests. Twin of kernels/mla_slice.cu, mla_tensor.cu, mla_merge.cu.
 *
 * The order of the additions is the kernels': slices from k3_attention_slice_begin, heads pass by pass, tile by tile
 * with float32 m, l and acc, scores and m in units of log 2 (exp2f), partials (m, l, acc[C]) a slice and head, the
 * merge by exp(m_i - m) in 16 interleaved sums, W_v after it. Left out: 16-bit caches, queries and weights (mma
 * operands), the output gate, the pipeline. */
#ifndef K3_TESTS_ATTENTION_SCHEDULE_H
#define K3_TESTS_ATTENTION_SCHEDULE_H

#include <stdint.h>

#define K3_SCHEDULE_EMPTY_M (-1e30f)

typedef struct {
  int64_t heads, heads_per_pass; /* the last pass may hold fewer */
  int64_t rows, slices;
  int64_t tile_rows;            /* rows between two looks at m */
  int64_t step_rows;            /* rows summed before they meet acc: 1 on CUDA cores, 16 in an mma */
  int64_t latent, rope, v_head; /* C, R, v */
  double scale;                 /* 1 / sqrt(qk head dim) */
  const float *query;           /* [heads, C + R] */
  const float *cache;           /* [rows, C + R] */
  const float *w_v;             /* [heads, v, C] */
  const uint8_t *chosen; /* [heads], heads to compute; NULL: all. Partials and outputs of others stay untouched */
} K3Schedule;

/* Mistakes that a check must catch. Those with a slice strike K3Fault.slice. */
typedef enum {
  K3_FAULT_NONE,
  K3_FAULT_MERGE_UNSCALED,    /* merge without exp(m_i - m) */
  K3_FAULT_W_V_FIRST,         /* W_v on each slice's own mean, the results averaged over the slices with rows */
  K3_FAULT_EMPTY_UNWRITTEN,   /* empty slices leave the scratch as it was */
  K3_FAULT_SLICE_UNWRITTEN,   /* one slice leaves the scratch as it was */
  K3_FAULT_SLICE_BEGINS_LATE, /* one slice misses its first row */
  K3_FAULT_SLICE_ENDS_LATE    /* one slice takes its successor's first row too (its last one twice if there is none) */
} K3FaultKind;

typedef struct {
  K3FaultKind kind;
  int64_t slice;
} K3Fault;

typedef struct {
  float *m, *l; /* [slices, heads] */
  float *acc;   /* [slices, heads, C] */
} K3Partials;

/* All slices of all passes. Writes the partials of every chosen head and every slice, empty ones included. */
void k3_schedule_slices(const K3Schedule *s, K3Fault fault, const K3Partials *partials);

/* Merges the first s->slices partials, then W_v. out [heads, v]; without any row: 0. */
void k3_schedule_merge(const K3Schedule *s, K3Fault fault, const K3Partials *partials, float *out);

/* Float64, one head, two passes: all scores and their maximum, then Σ softmax · (W_v c), W_v inside the sum.
 * out [v] of rows v_begin … v_begin + v_count of W_v. top: the largest |score|, when not NULL. */
void k3_schedule_reference(const K3Schedule *s, int64_t head, int64_t v_begin, int64_t v_count, double *out,
                           double *top);

#endif
