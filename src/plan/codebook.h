/* Codebooks of block formats, for synthetic models and imports. Layer: plan (pure).
 * A model file stores what its tensors need as /codebooks/NAME; readers use that copy. */
#ifndef K3_PLAN_CODEBOOK_H
#define K3_PLAN_CODEBOOK_H

#include <stdint.h>

enum { K3_CODEBOOK_IQ1_S_ENTRIES = 2048, K3_CODEBOOK_IQ1_S_BYTES = 2048 * 8 };

/* Packed data (codebook_iq1_s.c). */
extern const uint16_t k3_codebook_iq1_s_packed[K3_CODEBOOK_IQ1_S_ENTRIES];

/* Unpacks it into grid [2048][8] int8 in {-1, 0, 1}: the bytes of /codebooks/iq1_s. */
void k3_codebook_iq1_s(int8_t *grid);

#endif
