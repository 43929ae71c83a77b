/* A directory of safetensors: shards mapped read-only, headers and index checked. Layer: import.
 * Opens `model.safetensors.index.json` with its shards, or a single `model.safetensors`. After a successful
 * open every tensor lies wholly inside its file, no two overlap, and index and shards agree.
 * Source: the safetensors format (8-byte little-endian header length, JSON header, data). */
#ifndef K3_IMPORT_SAFETENSORS_H
#define K3_IMPORT_SAFETENSORS_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

enum {
  K3_SAFE_MAX_AXES = 8,
  K3_SAFE_MAX_HEADER = 100000000, /* bytes, the format's own limit */
  K3_SAFE_MAX_INDEX = 500000000
};

typedef enum {
  K3_SAFE_BOOL,
  K3_SAFE_F4,
  K3_SAFE_U8,
  K3_SAFE_I8,
  K3_SAFE_F8_E5M2,
  K3_SAFE_F8_E4M3,
  K3_SAFE_F8_E8M0,
  K3_SAFE_U16,
  K3_SAFE_I16,
  K3_SAFE_F16,
  K3_SAFE_BF16,
  K3_SAFE_U32,
  K3_SAFE_I32,
  K3_SAFE_F32,
  K3_SAFE_U64,
  K3_SAFE_I64,
  K3_SAFE_F64,
  K3_SAFE_C64,
  K3_SAFE_DTYPE_COUNT
} K3SafeDtype;

typedef struct {
  char *name; /* no control characters */
  int shard;  /* in K3Safetensors.shards */
  K3SafeDtype dtype;
  int rank; /* axes */
  int64_t shape[K3_SAFE_MAX_AXES];
  int64_t begin, end;  /* bytes in the shard's data */
  const uint8_t *data; /* in the mapping; no alignment is promised */
  int64_t bytes;
  int used; /* for the importer: it knows what this is */
} K3SafeTensor;

typedef struct {
  char *name; /* file name in the directory */
  char *path;
  uint8_t *map;
  size_t size;
  int64_t data_offset; /* of the data in the file */
} K3SafeShard;

typedef struct {
  char *directory;
  int64_t shard_count;
  K3SafeShard *shards;
  int64_t count;
  K3SafeTensor *tensors; /* sorted by name */
} K3Safetensors;

/* Opens and checks everything but the values.
 * Errors: K3_ERR_INPUT naming file and tensor: a shard absent, shorter or longer than its header says, a bad
 * header, a tensor the index names that its shard lacks, listed under the wrong shard, in two shards, or in a
 * shard and not in the index. *out is NULL on failure. */
K3Status k3_safetensors_open(const char *directory, K3Safetensors **out);

/* The tensor called `name`, NULL when there is none. */
K3SafeTensor *k3_safetensors_find(const K3Safetensors *safe, const char *name);

/* Path of the file that holds `tensor`. */
const char *k3_safetensors_path(const K3Safetensors *safe, const K3SafeTensor *tensor);

/* Tells the system that bytes [begin, end) of `tensor` are not needed any more, so that memory stays bounded. */
void k3_safetensors_release(const K3SafeTensor *tensor, int64_t begin, int64_t end);

/* "BF16". */
const char *k3_safetensors_dtype_name(K3SafeDtype dtype);

/* "[4, 1, 128]" into `text`. */
void k3_safetensors_shape_text(const K3SafeTensor *tensor, char *text, size_t size);

/* Unmaps and frees. Safe on NULL. */
void k3_safetensors_close(K3Safetensors *safe);

#endif
