/* The decode loop: through the prompt token by token, then greedily. Layer: decode.
 * Source: design.md, "The command line" (run). */
#ifndef K3_DECODE_DECODE_H
#define K3_DECODE_DECODE_H

#include "base/status.h"
#include "decode/backend.h"
#include "store/run_file.h"

typedef struct {
  const int64_t *prompt; /* at least one token, all in the vocabulary (k3_decode_check_prompt) */
  int64_t prompt_count;
  int64_t steps;         /* tokens to decode; 0: feed all of the prompt but its last token, for a snapshot */
  K3LogitsKind logits;
  int64_t top;           /* K of K3_LOGITS_TOP */
  int64_t snapshot_every; /* fed tokens between two calls of `snapshot`; 0: it is never called */
  K3Status (*snapshot)(void *context, int64_t fed); /* on all ranks, between two steps; agrees on failure */
} K3DecodeOptions;

/* Told of progress on every rank; may be NULL. `fed` of `all` tokens have gone through the model. `token` was
 * just decoded, -1 while the prompt is read. */
typedef void (*K3DecodeObserver)(void *context, int64_t fed, int64_t all, int64_t token);

typedef struct {
  int64_t fed;    /* tokens that went through the model */
  int64_t steps;  /* whole steps done */
  int signal;     /* the signal that stopped the run at a step's end, 0 when none */
  double decode_ms; /* wall time of the steps after the first */
} K3DecodeResult;

/* Every token must lie in [0, vocab_size). Errors: K3_ERR_INPUT naming position and id. */
K3Status k3_decode_check_tokens(const K3Config *config, const int64_t *tokens, int64_t count);

/* The same of the prompt, and start + prompt + steps must fit max_context.
 * Errors: K3_ERR_INPUT naming position and id. */
K3Status k3_decode_check_prompt(const K3Config *config, int64_t start, const K3DecodeOptions *options);

/* Positions the cache must hold: the last decoded token is not fed. */
int64_t k3_decode_capacity(int64_t start, const K3DecodeOptions *options);

/* Runs. `context` is the observer's and the snapshot's. `file` is NULL on ranks other than 0, and on rank 0 when no output is wanted. A failure inside a step
 * ends all ranks (k3_comm_abort), after rank 0 closed `file`; failures at a step's end are agreed on.
 * Errors: K3_ERR_INPUT (the run file cannot be written), K3_ERR_DEVICE. */
K3Status k3_decode_run(K3Backend *backend, const K3Config *config, const K3Plan *plan, K3Comm *comm,
                       const K3DecodeOptions *options, K3RunFile *file, K3DecodeObserver observer, void *context,
                       K3DecodeResult *result);

#endif
