/* See codebook.h. Layer: plan (pure). */
#include "plan/codebook.h"

void k3_codebook_iq1_s(int8_t *grid)
{
  for (int entry = 0; entry < K3_CODEBOOK_IQ1_S_ENTRIES; entry++)
    for (int j = 0; j < 8; j++)
      grid[8 * entry + j] = (int8_t)((k3_codebook_iq1_s_packed[entry] >> (2 * j)) & 3) - 1;
}
