/* What the CUDA backend keeps for a rank. Layer: backend (CUDA), internal to kernels/backend.cu and its neighbours:
 * device.cu (which GPU), pool.cu (device memory), place.cu (what stands where), load.cu (weights), step*.cu (one token),
 * graph.cu (capture, replay, waiting), comm_nccl.cu (collectives), service.cu (small kernels around the step). */
#ifndef K3_KERNELS_BACKEND_H
#define K3_KERNELS_BACKEND_H

#include <cuda_runtime.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Headers of C11, read by C++. */
#define _Noreturn [[noreturn]]
extern "C" {
#include "decode/backend.h"
#include "plan/attention.h"
#include "plan/synth_recipe.h"
}
#undef _Noreturn
#include "kernels/launch.h"
#include "kernels/linear.h"
#include "kernels/mla.h"
#include "kernels/norm.h"
#include "kernels/weights.h"

/* --- device memory ---------------------------------------------------------------------------------- */

/* One allocation, handed out in pieces of 256 bytes and more; or, for memory checkers, an allocation a piece. */
typedef struct {
  char *base; /* NULL: counting only */
  int64_t used, size;
  int separate; /* K3_POOL=separate: `pieces` hold the allocations */
  void **pieces;
  int64_t count, room;
} K3CudaPool;

/* Prepares a pool of `size` bytes on the current device. poison: every byte 0xff, which is NaN in all float types.
 * Errors: K3_ERR_DEVICE with the bytes wanted and free. */
K3Status k3_cuda_pool_open(K3CudaPool *pool, int64_t size, int poison);
/* The next `bytes` of the pool; counts alone when it is not open. Errors: K3_ERR_DEVICE. */
K3Status k3_cuda_pool_take(K3CudaPool *pool, int64_t bytes, void **memory);
K3Status k3_cuda_pool_close(K3CudaPool *pool);

/* --- weights ------------------------------------------------------------------------------------------ */

/* Where a tensor's band stands: rows [row, row + its rows) of `matrix`, or `vector` in float32. */
typedef struct {
  K3CudaMatrix matrix;
  int64_t row;
  float *vector;
} K3CudaTensor;

enum { K3_GROUP_PARTS = 6 };

/* Matrices that share an input. Neighbours of one storage type are one matrix; part k writes y + offset[k]. */
typedef struct {
  int count;
  K3CudaMatrix matrix[K3_GROUP_PARTS];
  int64_t offset[K3_GROUP_PARTS];
  int64_t rows; /* of all parts */
} K3CudaGroup;

typedef struct {
  K3CudaGroup attention;              /* KDA: q k v g f_a b; MLA: q_a kv_a g */
  K3CudaGroup ffn;                    /* dense: gate up; MoE: routed_down, router, shared gate, shared up */
  float *attention_score, *ffn_score; /* res_norm ⊙ res_proj [H] */
  float *kda_state, *kda_window;
  void *cache; /* MLA: [cache_rows, C + R] */
} K3CudaLayer;

/* --- a step, as its ends see it -------------------------------------------------------------------------- */

/* Host memory that the device reads. */
typedef struct {
  int64_t token, position, rows; /* rows: of this rank's cache with this token */
} K3CudaStepIn;

/* Host memory that the device writes. */
typedef struct {
  int64_t token;
  float logit;
  int32_t bad; /* lowest row of `watch` with a non-finite value · 2, plus 1 when only part of that row is; -1: none */
} K3CudaStepOut;

/* One rank's best logit. */
typedef struct {
  int64_t row; /* -1: some logit is NaN */
  float value, unused;
} K3CudaPair;

/* The times at which phases begin and end: time k belongs to what began at mark k. */
typedef struct {
  K3Phase phase;
  int idle; /* nothing is timed from here to the next mark */
} K3CudaMark;

typedef struct {
  int count, room;
  K3CudaMark *marks;
  unsigned long long *stamps; /* [room] nanoseconds, host memory that the device writes */
} K3CudaTimer;

/* A captured step. */
typedef struct {
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  int64_t plan_rows; /* of the attention plan it was captured with */
  int64_t kernels;   /* nodes */
  K3CudaTimer timer;
} K3CudaGraph;

/* --- collectives ------------------------------------------------------------------------------------------- */

typedef struct K3Cuda K3Cuda;

/* All on the one stream. Counts and displacements are in elements of `size` bytes. */
typedef struct {
  const char *name; /* "nccl", "nccl device API", "staged" */
  int captures;     /* may stand in a graph */
  void *state;
  void *device; /* comm_device.cu's own */
  K3Status (*all_reduce)(K3Cuda *cuda, float *data, int64_t count); /* data: at a multiple of 16 bytes */
  /* all_reduce(norm->branch, n) and k3_cuda_norm in one kernel where n fits, to the same bits; branch is used up. NULL: not served. */
  K3Status (*all_reduce_norm)(K3Cuda *cuda, const K3CudaNorm *norm);
  /* Several buffers in one message: own[b] is this rank's piece of data[b], there already or elsewhere. */
  K3Status (*all_gather)(K3Cuda *cuda, int buffers, const void *const *own, void *const *data, const K3Pieces *pieces,
                         int64_t size);
  /* Of several buffers at once: piece r of send[b] goes to rank r. Elements are float32. */
  K3Status (*all_to_all)(K3Cuda *cuda, int buffers, float *const *send, const K3Pieces *sent, float *const *receive,
                         const K3Pieces *received);
  K3Status (*poll)(K3Cuda *cuda); /* an error that another rank or the network caused; NULL: none to ask for */
  void (*close)(K3Cuda *cuda);
} K3CudaComm;

/* --- the rank ------------------------------------------------------------------------------------------------ */

struct K3Cuda {
  K3Source *source;
  const K3Config *config;
  const K3Plan *plan;
  K3Comm *comm;
  K3BackendOptions options;
  int rank, world;  /* of the plan: the slice's in slice mode */
  int communicates; /* world > 1 (or K3_COMM=nccl|device) and not a slice */
  int exact;        /* float32 activations */
  K3CudaCacheType cache_type;
  int verbose, timed; /* K3_VERBOSE, phase times wanted */
  double watchdog_s;

  int device, sharing; /* sharing: ranks on this GPU */
  char device_name[256], bus[32];
  cudaStream_t stream; /* everything of a step */
  cudaStream_t aside;  /* looks at memory while `stream` hangs */
  K3CudaLaunch launch;
  K3CudaComm collectives;

  K3CudaPool weights, state;
  uint32_t *codebook; /* iq1_s, packed; NULL when no tensor needs it */
  uint32_t *books[K3_CODEBOOK_COUNT]; /* of GGUF blocks, as k3_codebook_pack makes them; NULL where no tensor needs one */
  int8_t *codebook_grid;
  K3CudaTensor *tensors; /* [table.count] */
  K3CudaLayer *layers;   /* [num_layers] */
  float *output_score;
  int64_t snapshots, cache_rows;
  double load_seconds;
  int64_t load_bytes;

  /* Attention over the cache. */
  K3AttentionShape shape;
  K3AttentionPlan attention;
  int64_t held_rows, held_acc, held_ml; /* cache rows, floats of acc, and of m or l, that there is room for */
  int tensor_cores;
  int64_t attend_heads; /* heads this rank attends for */

  int64_t position; /* of the next token */

  /* Scratch. H, C, R, L, E as in the config. */
  float *p, *bank, *branch; /* [H], [snapshots, H], [H] a sublayer's output */
  float *mixed, *mix;       /* [watch_rows, H], [watch_rows, K3_NORM_MIX] the bank's part for each sublayer (norm.h) */
  K3CudaVector x;           /* [H]; values or scales go to a row of `watch` */
  float *watch;             /* [watch_rows, watch_width] the normed inputs of all sublayers, and of the head */
  int64_t watch_rows, watch_width;
  float *projected; /* of a group of matrices */
  float *heads_out; /* attention's output before o_proj */
  float *q, *query; /* [heads, nope + rope], [all heads, C + R] */
  void *query16;
  float *acc, *m, *l;                /* partials of the slices */
  float *sum_acc, *sum_m, *sum_l;    /* of this rank's rows, all heads */
  float *part_acc, *part_m, *part_l; /* of this rank's heads, from all ranks */
  float *ffn_y;                      /* dense gate, up; or this rank's latent, router scores, shared gate, shared up */
  float *latent, *logits_router;     /* [L], [E] of all ranks; world 1: in ffn_y */
  int32_t *ids;
  float *chosen_weights, *hidden, *z;
  float *logits; /* this rank's vocabulary rows */
  uint64_t *argmax_keys;
  uint32_t *argmax_count, *finish_count, *meeting;
  int32_t *bad;
  K3CudaPair *pairs; /* [world] */
  int64_t *d_step;   /* token, position, rows */

  K3CudaStepIn *in;   /* host, mapped */
  K3CudaStepOut *out; /* host, mapped */
  float *host_logits; /* host, pinned */
  int64_t *piece;     /* [8, world] counts and displacements */

  K3CudaGraph graphs[2]; /* without and with the head */
  K3CudaTimer eager_timer;
  K3CudaTimer *timer; /* of the step being enqueued; NULL: not timed */
  int64_t
      bad_bias_layer; /* of a router bias that is not finite: it would only keep experts from being chosen; -1: none */
  double launch_s;    /* host time of launching steps, and their number */
  int64_t launches;
  int waits;     /* 1: errors are waited for after each phase */
  K3Phase phase; /* being enqueued */
  int64_t
      phase_bytes[K3_PHASE_COUNT]; /* weights, state and cache that the step reads; the mean over choices of experts */
};

/* Elements of a share that this rank owns. */
static inline int64_t k3_cuda_own(const K3Cuda *cuda, K3Share share)
{
  K3Range range = k3_plan_range(cuda->plan, cuda->rank, share);
  return range.end - range.begin;
}

static inline const K3CudaTensor *k3_cuda_tensor(const K3Cuda *cuda, int64_t layer, K3Role role)
{
  return &cuda->tensors[k3_tensors_find(&cuda->source->table, layer, role)];
}

/* device.cu: picks and checks the GPU; refuses two ranks on one unless `share`. Sets device, names, sharing. */
K3Status k3_cuda_device_choose(K3Cuda *cuda, int share);

/* place.cu: limits of the kernels, before anything is loaded; then memory. In a pool that is not open sizes are counted. */
K3Status k3_cuda_check_limits(const K3Cuda *cuda);
K3Status k3_cuda_place_weights(K3Cuda *cuda, K3CudaPool *pool);
K3Status k3_cuda_place_state(K3Cuda *cuda, K3CudaPool *pool);
/* Rows that this rank would hold at max_context. Plans end there, not at the room of this run: so two runs with unlike room cut
 * attention alike at every depth, and a decode that goes on from a snapshot has the same bits. */
int64_t k3_cuda_most_rows(const K3Cuda *cuda, const K3Plan *plan);
/* Floats of acc, and of m or l, that plans of `shape`, ending at `limit`, want while rows grow up to `most`; *acc, *ml only grow. */
K3Status k3_cuda_most_partials(K3AttentionShape shape, int64_t most, int64_t limit, int64_t *acc, int64_t *ml);
/* The type that a tensor is kept in on the device. */
K3Type k3_cuda_placed_type(const K3Source *source, int64_t index);
int64_t k3_cuda_widest_group(const K3Cuda *cuda);

/* load.cu */
K3Status k3_cuda_load_weights(K3Cuda *cuda, K3Progress progress, void *context);

/* step.cu: enqueues one token; choose: with the head. */
K3Status k3_cuda_enqueue_step(K3Cuda *cuda, int choose);
/* The kernel that `arm` runs, and what the planner must know of it for `heads` heads; shape->rows is left 0. */
K3Status k3_cuda_attention_shape(const K3Cuda *cuda, K3AttentionArm arm, int64_t heads, int *tensor_cores,
                                 K3AttentionShape *shape);
/* Heads that this rank attends for under `plan`. */
int64_t k3_cuda_attend_heads(const K3Cuda *cuda, const K3Plan *plan);
/* Plans for `rows` rows, and for those of options.horizon. */
K3Status k3_cuda_plan_attention(K3Cuda *cuda, int64_t rows);

/* graph.cu */
K3Status k3_cuda_step(K3Backend *backend, int64_t token, int choose, int want_logits, K3StepResult *result);
K3Status k3_cuda_graph_close(K3CudaGraph *graph);
/* Waits for the stream with the watchdog. Errors: K3_ERR_DEVICE naming layer and phase. */
K3Status k3_cuda_wait(K3Cuda *cuda);
K3Status k3_cuda_timer_open(K3CudaTimer *timer, int room);
K3Status k3_cuda_timer_close(K3CudaTimer *timer);
/* What runs from here on belongs to `phase` (idle: to nothing). Enqueues a stamp when the step is timed. */
K3Status k3_cuda_mark(K3Cuda *cuda, K3Phase phase, int idle);

/* state.cu: snapshots; see K3Backend. */
K3Status k3_cuda_save(K3Backend *backend, const K3StateBand *band, void *data);
K3Status k3_cuda_restore(K3Backend *backend, const K3StateBand *band, const void *data);
K3Status k3_cuda_resume_at(K3Backend *backend, int64_t position);

/* comm_nccl.cu. K3_COMM=staged takes MPI through host memory (eager only, ranks may share a GPU), nccl NCCL's plain calls, device
 * its device API; unset: the device API where all GPUs reach each other's memory, else plain calls. nccl and device call NCCL in
 * a world of one too, to test it on one GPU. */
int k3_cuda_comm_is_staged(void);
int k3_cuda_comm_is_forced(void);
K3Status k3_cuda_comm_open(K3Cuda *cuda);
/* comm_device.cu: takes over from NCCL's plain calls, which are open. Where it cannot: an error if `required`, else nothing changes. */
K3Status k3_cuda_comm_device_open(K3Cuda *cuda, int required);

/* tune.cu: what a tuning of this device, model and cache holds for; no trials. */
struct K3AttentionTuning;
void k3_cuda_tuning_here(const K3Cuda *cuda, struct K3AttentionTuning *here);

/* service.cu: kernels around the step. */
/* First of a step: copies *in to d_step [3] and poisons watch [count]. */
K3Status k3_cuda_begin(const K3CudaLaunch *launch, const K3CudaStepIn *in, int64_t *d_step, float *watch,
                       int64_t count);
/* Last of a step: the best of pairs [ranks] (NULL: no choice) and the lowest row of watch [rows, width] that is not
 * finite; tail [tail_count] (NULL: none) stands for one row more. *d_bad is INT32_MAX and *d_count 0 before and after. */
typedef struct {
  const float *watch;
  int64_t rows, width;
  const float *tail;
  int64_t tail_count;
  const K3CudaPair *pairs;
  int ranks;
  int32_t *d_bad;
  uint32_t *d_count;
  K3CudaStepOut *out;
} K3CudaFinish;
K3Status k3_cuda_finish(const K3CudaLaunch *launch, const K3CudaFinish *finish);
/* *stamp = nanoseconds of the device's clock once everything before is done. */
K3Status k3_cuda_stamp(const K3CudaLaunch *launch, unsigned long long *stamp);
/* data [count] = mean + deviation · uniform(-√3 … √3), a function of the index. */
K3Status k3_cuda_fill(const K3CudaLaunch *launch, float *data, int64_t count, float mean, float deviation);
/* Cache rows of the first `start` positions that this rank holds: src/host/host_backend.c, fill_start. */
typedef struct {
  void *cache;
  K3CudaCacheType type;
  int64_t start, width, page_positions, world, rank; /* world 1: all positions */
  K3SynthRule rule;
} K3CudaCacheFill;
K3Status k3_cuda_cache_fill(const K3CudaLaunch *launch, const K3CudaCacheFill *fill);

#endif
