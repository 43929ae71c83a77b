/* What the decode loop asks of a backend. Layer: backend (interface).
 *
 * Host (src/host/) and CUDA (kernels/) each fill one K3Backend. A backend owns a rank's weights, its KDA
 * states, convolution windows and latent cache, and the collectives inside a step. The loop knows nothing
 * of devices. All calls are collective over the ranks of `comm`. */
#ifndef K3_DECODE_BACKEND_H
#define K3_DECODE_BACKEND_H

#include "base/status.h"
#include "comm/comm.h"
#include "plan/plan.h"
#include "store/snapshot_file.h"
#include "store/source.h"

/* Phases of a step, as timed. */
typedef enum {
  K3_PHASE_EMBED, K3_PHASE_ATTN_KDA, K3_PHASE_ATTN_MLA, K3_PHASE_FFN_DENSE, K3_PHASE_FFN_MOE, K3_PHASE_COMM,
  K3_PHASE_HEAD, K3_PHASE_COUNT
} K3Phase;

extern const char *const k3_phase_names[K3_PHASE_COUNT];

/* What a number of the latent cache is stored as. The host backend keeps float32 whatever is asked. */
typedef enum {
  K3_CACHE_TYPE_DEFAULT = 0, /* f32 with activations_f32, else f16 */
  K3_CACHE_TYPE_F32, K3_CACHE_TYPE_BF16, K3_CACHE_TYPE_F16
} K3CacheType;

/* How attention over the cache is computed. */
typedef enum {
  K3_ATTENTION_SPLIT = 0, /* slices and kernel as the planner chooses for device and depth */
  K3_ATTENTION_UNSPLIT,   /* the same kernel, one slice at every depth */
  K3_ATTENTION_CORE,      /* CUDA: the kernel for CUDA cores, slices as planned */
  K3_ATTENTION_TENSOR,    /* CUDA: the kernel for tensor cores, slices as planned */
  K3_ATTENTION_COUNT
} K3AttentionArm;

extern const char *const k3_attention_arm_names[K3_ATTENTION_COUNT];

/* "f32" …; by K3CacheType, "" for DEFAULT. */
extern const char *const k3_cache_type_names[K3_CACHE_TYPE_F16 + 1];

/* Bytes of one number; not of DEFAULT. */
static inline int64_t k3_cache_type_bytes(K3CacheType type) { return type == K3_CACHE_TYPE_F32 ? 4 : 2; }

typedef struct {
  int64_t capacity;     /* positions that the cache must hold */
  int64_t start;        /* positions already cached, filled with synthetic values (--context N); 0: empty */
  uint64_t start_seed;
  int slice_rank, slice_world; /* slice_world > 0: stand for that rank of that world, collectives left out */
  K3AttentionArm attention;
  const struct K3AttentionTuning *tuning; /* CUDA: measured cuts of attention (--tuning); NULL: the planner's own */
  const char *tuning_path;                /* begins messages about it */
  int reconfigures;     /* 1: `configure` will be called, so make room for what any of its arms wants */
  /* CUDA alone: */
  int graph;                   /* 1: a step is a captured graph; 0: the same kernels launched one by one */
  int activations_f32;         /* 1: float32 activations throughout; 0: 16-bit codes, a scale per 32, where the weights are quantised */
  K3CacheType cache_type;
  int phase_times;             /* 1: phase times of captured steps too, which costs them a little */
  int64_t horizon;             /* positions that the first plan of attention serves at least, so that it does not change
                                  on the way there; 0: as they come */
} K3BackendOptions;

/* Called while loading; bytes of this rank. May be NULL. */
typedef void (*K3Progress)(void *context, int64_t done_bytes, int64_t all_bytes);

/* What a step gave this rank. */
typedef struct {
  int64_t token;                   /* greedy choice: largest logit, ties to the lower id; same on all ranks */
  const float *logits;             /* this rank's vocabulary rows (k3_plan_range VOCAB); host memory, valid
                                      until the next step; NULL unless asked for */
  double phase_ms[K3_PHASE_COUNT]; /* this rank's own times */
} K3StepResult;

/* A band of the state that this rank owns, for snapshots; in host memory laid out as in the file (snapshot_file.h).
 * K3_STATE_CACHE: rows [begin, begin + count) of the rank's cache of `layer`, numbers of cache_type
 * K3_STATE_KDA, K3_STATE_CONV: all heads of the rank; begin and count are not used */
typedef struct {
  K3StatePart part;
  int64_t layer; /* of the model */
  int64_t begin, count;
} K3StateBand;

typedef struct K3Backend K3Backend;

struct K3Backend {
  const char *name; /* "host", "cuda" */
  void *state;
  K3CacheType cache_type;  /* what the cache is stored as, never DEFAULT */
  const char *activations; /* "f32", "int16" */

  /* One line about this rank's device, e.g. "AMD EPYC …, 2 threads". */
  K3Status (*describe)(K3Backend *backend, char *text, size_t size);

  /* Bytes this rank will need, and bytes free where they go; called before load. */
  K3Status (*memory)(K3Backend *backend, int64_t *needed, int64_t *available);

  /* Reads this rank's bands from the source. */
  K3Status (*load)(K3Backend *backend, K3Progress progress, void *context);

  /* Forgets all state: zero KDA states and windows, empty (or synthetic, options.start) cache, position
   * options.start. */
  K3Status (*reset)(K3Backend *backend);

  /* Another arm or depth without loading again: `attention`, `start`, `start_seed`, `horizon` and `phase_times` of
   * `options`, and `plan`, which differs from the one opened with in cache_band at most and outlives the backend. Drops
   * captured steps, then resets. Only when opened with `reconfigures`, with the plan that holds most cache rows.
   * Errors: K3_ERR_INPUT (more cache rows than there is room for; an arm that is not here). */
  K3Status (*configure)(K3Backend *backend, const K3Plan *plan, const K3BackendOptions *options);

  /* Why this backend has no such arm for this model and cache, a sentence; NULL when it has. */
  const char *(*lacks_arm)(const K3Backend *backend, K3AttentionArm arm);

  /* One line: kernel, slices, passes and blocks of attention as the next step runs it. */
  void (*describe_attention)(const K3Backend *backend, char *text, size_t size);

  /* Feeds `token` at the next position. `want_logits`: copy this rank's logits out. `choose`: compute the
   * head at all (prompt tokens before the last need none).
   * Errors: K3_ERR_DEVICE (launch, non-finite values: names layer and phase). */
  K3Status (*step)(K3Backend *backend, int64_t token, int choose, int want_logits, K3StepResult *result);

  /* Copies a band of the state out, or in; after the last band in, resume_at names the position of the next token.
   * Errors: K3_ERR_INPUT (rows beyond the cache), K3_ERR_DEVICE. */
  K3Status (*save)(K3Backend *backend, const K3StateBand *band, void *data);
  K3Status (*restore)(K3Backend *backend, const K3StateBand *band, const void *data);
  K3Status (*resume_at)(K3Backend *backend, int64_t position);

  void (*close)(K3Backend *backend); /* frees everything, `backend` too */
};

/* Creates a backend over an open source. `source`, `plan` and `comm` outlive it.
 * Errors: K3_ERR_DEVICE, K3_ERR_INPUT. */
K3Status k3_backend_open_host(K3Source *source, const K3Plan *plan, K3Comm *comm, const K3BackendOptions *options,
                              K3Backend **backend);
K3Status k3_backend_open_cuda(K3Source *source, const K3Plan *plan, K3Comm *comm, const K3BackendOptions *options,
                              K3Backend **backend);

/* 1 when this build has CUDA and this machine its driver. */
int k3_backend_has_cuda(void);

#endif
