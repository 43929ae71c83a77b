/* What `k3decode tune` asks of the device. Layer: decode (interface): kernels/tune.cu, or no_cuda.c. One process, one GPU. */
#ifndef K3_DECODE_TUNE_H
#define K3_DECODE_TUNE_H

#include "comm/comm.h"
#include "decode/backend.h"
#include "plan/attention_tuning.h"

typedef struct K3Tuner K3Tuner;

/* Chooses the GPU as the backend does, and describes it: `here` gets what a tuning holds for (no trials), `line` the
 * device in words. config and comm outlive the tuner.
 * Errors: K3_ERR_DEVICE (no GPU, no CUDA in this build), K3_ERR_INPUT (no memory). */
K3Status k3_tuner_open(const K3Config *config, K3Comm *comm, K3CacheType cache, K3AttentionTuning *here, char *line,
                       size_t line_size, K3Tuner **tuner);

/* What the planner must know of a kernel for so many heads and rows here. *serves 0: it has none for this model and cache. */
K3Status k3_tuner_shape(K3Tuner *tuner, K3AttentionKernel kernel, int64_t heads, int64_t rows, K3AttentionShape *shape,
                        int *serves);

/* Measures a trial: kernel, heads, rows, heads_per_pass, passes, slices and blocks are given; times, registers, shared
 * memory, resident blocks and GB/s are filled. The caches rotate past the L2 where that is quick. What the trial computes is compared with what
 * the first trial of these heads and rows computed.
 * Errors: K3_ERR_DEVICE (launch; another result than the first one's), K3_ERR_INPUT (no memory on the device). */
K3Status k3_tuner_measure(K3Tuner *tuner, K3AttentionTrial *trial);

void k3_tuner_close(K3Tuner *tuner); /* safe on NULL */

#endif
