/* Codebooks of block formats. Layer: plan (pure).
 * A model file stores what its tensors need as /codebooks/NAME, signed bytes [entries][values]; readers use that copy, packed
 * by k3_codebook_pack for the decoders of blocks.h. iq1_m shares iq1_s's, iq4_xs iq4_nl's. */
#ifndef K3_PLAN_CODEBOOK_H
#define K3_PLAN_CODEBOOK_H

#include <stddef.h>

#include "base/status.h"
#include "plan/formats.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
  K3_CODEBOOK_IQ1_S = 0,
  K3_CODEBOOK_IQ2_XXS,
  K3_CODEBOOK_IQ2_XS,
  K3_CODEBOOK_IQ2_S,
  K3_CODEBOOK_IQ3_XXS,
  K3_CODEBOOK_IQ3_S,
  K3_CODEBOOK_IQ4_NL,
  K3_CODEBOOK_COUNT
} K3CodebookId;

enum { K3_CODEBOOK_LEVELS = 16, K3_CODEBOOK_MOST_WORDS = 2048, K3_CODEBOOK_MOST_BYTES = 2048 * 8 };

typedef struct {
  const char *name;       /* in the file: /codebooks/NAME */
  int entries, values;    /* of an entry: 8, 4 or, iq4_nl, 1 */
  int levels;             /* values that an entry may hold */
  int8_t level[K3_CODEBOOK_LEVELS];
  const uint16_t *packed; /* codebook_data.c; NULL: the levels themselves */
  int words;              /* of the packed grid */
  int sign_bits;          /* sign selectors behind the grid: 7 (bit 7 makes the number of ones even), 8, or 0: none */
} K3Codebook;

const K3Codebook *k3_codebook(K3CodebookId id);

/* The codebook that blocks of `type` need; -1: none. */
int k3_codebook_of(K3Type type);

/* Which codebooks `types` [count] need: needed [K3_CODEBOOK_COUNT] of 0 or 1. */
void k3_codebooks_needed(const K3Type *types, int64_t count, int *needed);

/* Bytes of /codebooks/NAME, and 32-bit words of its packed form: grid, then sign selectors (2^sign_bits). */
size_t k3_codebook_bytes(const K3Codebook *book);
int k3_codebook_words(const K3Codebook *book);

/* The published codebook as the file stores it: grid [k3_codebook_bytes]. */
void k3_codebook_fill(const K3Codebook *book, int8_t *grid);

/* The file's bytes to the decoders' form [k3_codebook_words]: an entry is a word with a nibble a value, its level's index;
 * a sign selector a word with bit 2 of nibble i set where value i is negative. iq4_nl: the sixteen bytes.
 * Errors: K3_ERR_INPUT (naming `origin`) for a wrong number of bytes or a value that is no level. */
K3Status k3_codebook_pack(const K3Codebook *book, const char *origin, const int8_t *grid, size_t bytes, uint32_t *words);

#ifdef __cplusplus
}
#endif
#endif
