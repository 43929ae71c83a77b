/* FNV-1a, 64 bit. See digest.h. Layer: store. */
#include "store/digest.h"

#include <string.h>

uint64_t k3_digest_bytes(uint64_t digest, const void *data, size_t bytes)
{
  const uint8_t *at = data;
  for (size_t i = 0; i < bytes; i++) digest = (digest ^ at[i]) * 0x100000001b3ull;
  return digest;
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
