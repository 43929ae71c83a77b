/* See codebook.h. Layer: plan (pure). */
#include "plan/codebook.h"

#include <string.h>

extern const uint16_t k3_codebook_iq1_s[], k3_codebook_iq2_xxs[], k3_codebook_iq2_xs[], k3_codebook_iq2_s[],
    k3_codebook_iq3_xxs[], k3_codebook_iq3_s[]; /* codebook_data.c */

static const K3Codebook books[K3_CODEBOOK_COUNT] = {
  [K3_CODEBOOK_IQ1_S] = {"iq1_s", 2048, 8, 3, {-1, 0, 1}, k3_codebook_iq1_s, 2048, 0},
  [K3_CODEBOOK_IQ2_XXS] = {"iq2_xxs", 256, 8, 3, {8, 25, 43}, k3_codebook_iq2_xxs, 256, 7},
  [K3_CODEBOOK_IQ2_XS] = {"iq2_xs", 512, 8, 3, {8, 25, 43}, k3_codebook_iq2_xs, 512, 7},
  [K3_CODEBOOK_IQ2_S] = {"iq2_s", 1024, 8, 3, {8, 25, 43}, k3_codebook_iq2_s, 1024, 8},
  [K3_CODEBOOK_IQ3_XXS] = {"iq3_xxs", 256, 4, 8, {4, 12, 20, 28, 36, 44, 52, 62}, k3_codebook_iq3_xxs, 256, 7},
  [K3_CODEBOOK_IQ3_S] = {"iq3_s", 512, 4, 8, {1, 3, 5, 7, 9, 11, 13, 15}, k3_codebook_iq3_s, 512, 8},
  [K3_CODEBOOK_IQ4_NL] = {"iq4_nl", 16, 1, 16, {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113},
                          NULL, 4, 0},
};

const K3Codebook *k3_codebook(K3CodebookId id) { return &books[id]; }

int k3_codebook_of(K3Type type)
{
  switch (type) {
  case K3_TYPE_IQ1_S:
  case K3_TYPE_IQ1_M: return K3_CODEBOOK_IQ1_S;
  case K3_TYPE_IQ2_XXS: return K3_CODEBOOK_IQ2_XXS;
  case K3_TYPE_IQ2_XS: return K3_CODEBOOK_IQ2_XS;
  case K3_TYPE_IQ2_S: return K3_CODEBOOK_IQ2_S;
  case K3_TYPE_IQ3_XXS: return K3_CODEBOOK_IQ3_XXS;
  case K3_TYPE_IQ3_S: return K3_CODEBOOK_IQ3_S;
  case K3_TYPE_IQ4_NL:
  case K3_TYPE_IQ4_XS: return K3_CODEBOOK_IQ4_NL;
  default: return -1;
  }
}

void k3_codebooks_needed(const K3Type *types, int64_t count, int *needed)
{
  memset(needed, 0, K3_CODEBOOK_COUNT * sizeof *needed);
  for (int64_t i = 0; i < count; i++) {
    int id = k3_codebook_of(types[i]);
    if (id >= 0) needed[id] = 1;
  }
}

size_t k3_codebook_bytes(const K3Codebook *book) { return (size_t)book->entries * (size_t)book->values; }

int k3_codebook_words(const K3Codebook *book) { return book->words + (book->sign_bits ? 1 << book->sign_bits : 0); }

void k3_codebook_fill(const K3Codebook *book, int8_t *grid)
{
  if (!book->packed) {
    memcpy(grid, book->level, (size_t)book->entries);
    return;
  }
  int bits = 16 / book->values;
  for (int i = 0; i < book->entries * book->values; i++)
    grid[i] = book->level[book->packed[i / book->values] >> (bits * (i % book->values)) & ((1 << bits) - 1)];
}

/* Bit 2 of nibble i: is bit i of `signs` set? */
static uint32_t sign_selector(uint32_t signs)
{
  uint32_t word = 0;
  for (int i = 0; i < 8; i++) word |= (signs >> i & 1u) << (4 * i + 2);
  return word;
}

K3Status k3_codebook_pack(const K3Codebook *book, const char *origin, const int8_t *grid, size_t bytes, uint32_t *words)
{
  if (bytes != k3_codebook_bytes(book))
    K3_FAIL(K3_ERR_INPUT, "%s: /codebooks/%s holds %zu bytes, wanted %zu (%d entries of %d)", origin, book->name, bytes,
            k3_codebook_bytes(book), book->entries, book->values);
  memset(words, 0, (size_t)k3_codebook_words(book) * sizeof *words);
  if (book->values == 1) memcpy(words, grid, bytes); /* any sixteen values */
  for (int i = 0; book->values > 1 && i < book->entries * book->values; i++) {
    int level = 0;
    while (level < book->levels && book->level[level] != grid[i]) level++;
    if (level == book->levels)
      K3_FAIL(K3_ERR_INPUT, "%s: /codebooks/%s: value %d of entry %d is %d, which the format does not know; write the file again",
              origin, book->name, i % book->values, i / book->values, grid[i]);
    words[i / book->values] |= (uint32_t)level << (4 * (i % book->values));
  }
  for (uint32_t i = 0; book->sign_bits && i < 1u << book->sign_bits; i++) {
    uint32_t odd = 0;
    for (int bit = 0; bit < 7; bit++) odd ^= i >> bit & 1u;
    words[(uint32_t)book->words + i] = sign_selector(book->sign_bits == 7 ? i | odd << 7 : i);
  }
  return K3_OK;
}
