/* FNV-1a, 64 bit: tells two models apart. Not cryptographic. Layer: store. */
#ifndef K3_STORE_DIGEST_H
#define K3_STORE_DIGEST_H

#include <stddef.h>
#include <stdint.h>

#include "plan/config.h"
#include "plan/formats.h"
#include "plan/tensors.h"

#define K3_DIGEST_START 0xcbf29ce484222325ull

/* Each takes a digest and returns it with more hashed in. Numbers are hashed as 8 bytes, low byte first. */
uint64_t k3_digest_bytes(uint64_t digest, const void *data, size_t bytes);
/* The same job for large data, eight bytes at a time, some GB a second; another digest than k3_digest_bytes gives. */
uint64_t k3_digest_words(uint64_t digest, const void *data, size_t bytes);
uint64_t k3_digest_number(uint64_t digest, uint64_t number);
uint64_t k3_digest_text(uint64_t digest, const char *text);

/* Every field of /config and the layer types. */
uint64_t k3_digest_config(uint64_t digest, const K3Config *config);

/* Path, type and shape of a tensor. */
uint64_t k3_digest_tensor(uint64_t digest, const K3TensorSpec *spec, K3Type type);

#endif
