/* GGUF files, one or the shards of a split one: mapped read-only, every length checked. Layer: import.
 * After a successful open every key and tensor lies wholly inside its file, no two tensors overlap, each file is as long
 * as its header says, and the shards belong together. Nothing is allocated in proportion to a number in a file before
 * that number was found to fit into the file; what is kept of a key is 8 bytes and of a tensor 16, fewer than either
 * takes in the file. Values and tensors are decoded from the mapping when asked for.
 * Source: the GGUF specification, versions 2 and 3 (little endian), and the tensor types of the public package gguf 0.19.0. */
#ifndef K3_IMPORT_GGUF_H
#define K3_IMPORT_GGUF_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

enum { K3_GGUF_MAX_AXES = 4, K3_GGUF_NAME_SIZE = 128 };

/* Kinds of metadata; the values are the format's own. */
typedef enum {
  K3_GGUF_UINT8,
  K3_GGUF_INT8,
  K3_GGUF_UINT16,
  K3_GGUF_INT16,
  K3_GGUF_UINT32,
  K3_GGUF_INT32,
  K3_GGUF_FLOAT32,
  K3_GGUF_BOOL,
  K3_GGUF_STRING,
  K3_GGUF_ARRAY,
  K3_GGUF_UINT64,
  K3_GGUF_INT64,
  K3_GGUF_FLOAT64,
  K3_GGUF_KIND_COUNT
} K3GgufKind;

/* A value, or the elements of an array. */
typedef struct {
  K3GgufKind kind; /* never K3_GGUF_ARRAY */
  int is_array;
  int64_t count;       /* elements; 1 where it is no array */
  const uint8_t *data; /* in the mapping, no alignment is promised; strings: 8 bytes of length before each */
  int64_t bytes;
} K3GgufValue;

/* Types of tensors that this file knows by size; the values are the format's own. */
typedef enum { K3_GGUF_F32 = 0, K3_GGUF_F16 = 1, K3_GGUF_BF16 = 30, K3_GGUF_MXFP4 = 39 } K3GgufType;

typedef struct {
  char name[K3_GGUF_NAME_SIZE]; /* printable */
  int shard;                    /* in K3Gguf.shards */
  int type;                     /* a number with a name: k3_gguf_type_name */
  int rank;
  int64_t shape[K3_GGUF_MAX_AXES]; /* outermost axis first (the file has it last) */
  int64_t offset;                  /* bytes in the file's data */
  int64_t bytes;
  const uint8_t *data; /* in the mapping */
} K3GgufTensor;

typedef struct {
  const uint8_t *at; /* of the tensor's entry in the header */
  int32_t shard;
  int32_t used; /* for the importer: it knows what this is */
} K3GgufEntry;

typedef struct {
  char *path;
  uint8_t *map;
  size_t size;
  int64_t value_count, tensor_count;
  const uint8_t **values; /* key-value pairs in the mapping, sorted by key */
  int64_t infos;          /* byte offset of the tensors' entries */
  int64_t data_offset;    /* of the data in the file */
  int64_t alignment;
} K3GgufShard;

typedef struct {
  char *path; /* as given */
  int64_t shard_count;
  K3GgufShard *shards;
  int64_t count;
  K3GgufEntry *entries; /* all shards' tensors, sorted by name */
} K3Gguf;

/* Opens a .gguf file, the first shard of a split one (NAME-00001-of-000NN.gguf) with the others beside it, or the model
 * of a directory: its only .gguf file or first shard (files named mmproj* hold a vision tower and are left out).
 * Errors: K3_ERR_INPUT naming file and tensor or key: no GGUF, another version or byte order, a length beyond the file, a
 * file shorter or longer than its header says, an unknown kind or type, a key or tensor twice, tensors that overlap, a
 * missing shard, shards that do not belong together. *gguf is NULL on failure. */
K3Status k3_gguf_open(const char *path, K3Gguf **gguf);

/* 1, and the value, when the first shard has `key`; else 0. */
int k3_gguf_value(const K3Gguf *gguf, const char *key, K3GgufValue *value);

/* Element `index` of a value of a whole-number kind (or bool) as int64: 0 when the kind is another, the index is beyond
 * the value, or a uint64 does not fit. */
int k3_gguf_integer(const K3GgufValue *value, int64_t index, int64_t *number);

/* The same for float32 and float64. */
int k3_gguf_real(const K3GgufValue *value, int64_t index, double *number);

/* "a float32", "an array of 3 string": for messages. */
const char *k3_gguf_kind_text(const K3GgufValue *value, char *text, size_t size);

/* The entry of the tensor called `name`, NULL when there is none. */
K3GgufEntry *k3_gguf_find(const K3Gguf *gguf, const char *name);

/* Decodes an entry. */
void k3_gguf_tensor(const K3Gguf *gguf, const K3GgufEntry *entry, K3GgufTensor *tensor);

/* Path of the file that holds `tensor`. */
const char *k3_gguf_path(const K3Gguf *gguf, const K3GgufTensor *tensor);

/* "q4_k", in lower case as in gguf.GGMLQuantizationType; NULL for a number that no type has. */
const char *k3_gguf_type_name(int type);

/* "[4, 1, 128]" into `text`. */
void k3_gguf_shape_text(int rank, const int64_t *shape, char *text, size_t size);

/* Unmaps and frees. Safe on NULL. */
void k3_gguf_close(K3Gguf *gguf);

/* --- between gguf.c and gguf_file.c --- */

/* Maps shard->path and reads its header up to the data; shard->values is sorted. */
K3Status k3_gguf_file_open(K3GgufShard *shard);

/* Writes the file's tensors to entries[0 .. tensor_count), and checks each and all of them. */
K3Status k3_gguf_file_entries(const K3GgufShard *shard, int number, K3GgufEntry *entries);

/* Decodes an entry of `shard`. */
void k3_gguf_file_tensor(const K3GgufShard *shard, const K3GgufEntry *entry, K3GgufTensor *tensor);

/* k3_gguf_value in one file. */
int k3_gguf_file_value(const K3GgufShard *shard, const char *key, K3GgufValue *value);

/* Value `index` of shard->values: its key (printable, up to size - 1 bytes) and what it is. */
void k3_gguf_file_pair(const K3GgufShard *shard, int64_t index, char *key, size_t size, K3GgufValue *value);

#endif
