/* What the host backend keeps for a rank. Layer: host backend (internal to src/host/). */
#ifndef K3_HOST_HOST_STATE_H
#define K3_HOST_HOST_STATE_H

#include "decode/backend.h"
#include "host/experts.h"
#include "host/matrix.h"

/* A tensor's band: matrices as stored, everything else widened to float32. */
typedef struct {
  K3HostMatrix matrix; /* .data is NULL for a band of no elements */
  float *vector;       /* non-matrices: [band elements] f32, else NULL */
  void *memory;        /* what to free */
} K3HostTensor;

/* What one layer carries from token to token. */
typedef struct {
  float *kda_state;     /* KDA: [heads, D, D] */
  float *window[3];     /* KDA: q, k, v: [kernel - 1, heads * D] */
  float *cache;         /* MLA: [cached rows of this rank, C + R] */
} K3HostLayer;

typedef struct {
  K3Source *source;
  const K3Config *config;
  const K3Plan *plan;
  K3Comm *comm;
  K3BackendOptions options;
  int rank;                /* whose band this is: comm->rank, or the slice's */
  uint32_t *books[K3_CODEBOOK_COUNT]; /* packed codebooks, NULL where no tensor needs them */
  K3HostTensor *tensors;   /* [table.count] */
  K3HostLayer *layers;     /* [num_layers] */
  int64_t position;        /* of the next token */
  int64_t banked;          /* snapshots in bank */

  /* Scratch, NaN until written. H, C, R, L, E, D as in the config; `heads` this rank's. */
  float *p;                /* [H] residual stream */
  float *bank;             /* [snapshots, H] */
  float *h, *x;            /* [H] mixed, normed */
  double *sum;             /* [H] partial sum of a sublayer, then reduced */
  double *wide[5];         /* projections' outputs, each [widest] f64 */
  float *narrow[4];        /* activations, each [widest] f32 */
  float *queries;          /* [all heads, C + R] absorbed */
  double *partials;        /* [all heads, 2 + C] of this rank's cached rows */
  double *whole;           /* [threads, cache rows] scores of the un-split arm, else NULL */
  int64_t held_rows;       /* cache rows there is room for */
  double *returned;        /* [world, heads, 2 + C] of this rank's heads, from all ranks */
  float *gathered;         /* latent and router scores, piece after piece */
  float *latent, *scores;  /* [L], [E] in order */
  double *routed;          /* [L] partial sum of the experts, then reduced */
  float *logits;           /* this rank's vocabulary rows */
  K3ChosenExpert *chosen;  /* [num_experts_per_token] */
  int64_t *piece;          /* [8, world] counts and displacements of the exchanges */

  double comm_ms;          /* spent in collectives since the phase began */
  double phase_ms[K3_PHASE_COUNT];
} K3Host;

/* The band of `role` in `layer` (-1: root). */
const K3HostMatrix *k3_host_matrix_of(const K3Host *host, int64_t layer, K3Role role);
const float *k3_host_vector_of(const K3Host *host, int64_t layer, K3Role role);

/* Number of elements of a share that this rank owns. */
int64_t k3_host_own(const K3Host *host, K3Share share);

/* One step (src/host/host_step.c); see K3Backend.step. */
K3Status k3_host_step(K3Backend *backend, int64_t token, int choose, int want_logits, K3StepResult *result);

#endif
