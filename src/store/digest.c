/* FNV-1a, 64 bit. See digest.h. Layer: store. */
#include "store/digest.h"

#include <endian.h>
#include <string.h>

uint64_t k3_digest_bytes(uint64_t digest, const void *data, size_t bytes)
{
  const uint8_t *at = data;
  for (size_t i = 0; i < bytes; i++) digest = (digest ^ at[i]) * 0x100000001b3ull;
  return digest;
}

/* Multiplication alone never carries a high bit down, so two of them could cancel: the shift mixes it in. */
uint64_t k3_digest_words(uint64_t digest, const void *data, size_t bytes)
{
  const uint8_t *at = data;
  size_t whole = bytes / 8 * 8;
  for (size_t i = 0; i < whole; i += 8) {
    uint64_t word;
    memcpy(&word, at + i, sizeof word);
    digest = (digest ^ le64toh(word)) * 0x9e3779b97f4a7c15ull;
    digest ^= digest >> 32;
  }
  return k3_digest_bytes(digest, at + whole, bytes - whole);
}

uint64_t k3_digest_number(uint64_t digest, uint64_t number)
{
  uint8_t bytes[8];
  for (int i = 0; i < 8; i++) bytes[i] = (uint8_t)(number >> (8 * i));
  return k3_digest_bytes(digest, bytes, sizeof bytes);
}

uint64_t k3_digest_text(uint64_t digest, const char *text) { return k3_digest_bytes(digest, text, strlen(text) + 1); }

uint64_t k3_digest_config(uint64_t digest, const K3Config *config)
{
  for (int i = 0; i < k3_config_field_count; i++) {
    double value = k3_config_get(config, &k3_config_fields[i]);
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    digest = k3_digest_number(k3_digest_text(digest, k3_config_fields[i].name), bits);
  }
  return k3_digest_bytes(digest, config->layer_types, (size_t)config->num_layers);
}

uint64_t k3_digest_tensor(uint64_t digest, const K3TensorSpec *spec, K3Type type)
{
  digest = k3_digest_text(k3_digest_text(digest, spec->path), k3_format(type)->name);
  for (int i = 0; i < 3; i++) digest = k3_digest_number(digest, (uint64_t)spec->shape[i]);
  return digest;
}
