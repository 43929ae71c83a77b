/* What importers share: a model file written tensor by tensor on several threads, in bounded memory, restartable.
 * Layer: import. */
#ifndef K3_IMPORT_IMPORT_JOB_H
#define K3_IMPORT_IMPORT_JOB_H

#include <signal.h>
#include <stdint.h>

#include "base/status.h"
#include "plan/config.h"
#include "plan/formats.h"
#include "plan/tensors.h"

enum { K3_IMPORT_PIECE = 16 << 20, K3_IMPORT_MAX_THREADS = 16 };

typedef struct {
  int overwrite;
  const char *provenance;                                     /* text for the model file */
  const volatile sig_atomic_t *stopped;                       /* a signal number once one came; may be NULL */
  void (*progress)(void *context, int64_t done, int64_t all); /* bytes of the checkpoint; may be NULL */
  void *progress_context;
} K3ImportOptions;

typedef struct {
  int64_t tensors;   /* of the model file */
  int64_t published; /* of the checkpoint, without skipped ones */
  int64_t vision;    /* skipped */
  int64_t resumed;   /* tensors of the model file that an earlier run had finished */
  int replaced;      /* an unfinished file of another import gave way */
  int64_t bytes_read, bytes_written;
  int64_t by_type[K3_TYPE_COUNT]; /* tensors of the model file */
  double seconds;                 /* of the second pass */
  uint64_t digest;                /* content digest of the model file */
} K3ImportResult;

typedef struct K3ImportJob K3ImportJob;

/* One thread's room. */
typedef struct {
  K3ImportJob *job;
  uint8_t *stored; /* [K3_IMPORT_PIECE] a piece as the model file stores it */
  float *values;   /* [K3_IMPORT_PIECE / 4] a piece widened */
} K3ImportWorker;

struct K3ImportJob {
  const char *output;
  const K3ImportOptions *options;
  K3Config config;
  K3TensorTable table;
  K3Type *types;         /* [table.count] of the model file */
  int64_t *source_bytes; /* [table.count] of the checkpoint that go into each tensor */
  uint64_t identity;     /* a hash of the checkpoint's files and of what else changes the content */
  void *importer;
  /* Writes all rows of one tensor by k3_import_put. Runs on several threads at once. */
  K3Status (*write)(void *importer, const K3TensorSpec *spec, int64_t tensor, K3ImportWorker *worker);
  K3ImportResult *result;
  /* of the run */
  struct K3ModelWriter *writer;
  int64_t bytes_done, bytes_all;
};

/* From job->config: table; types and source_bytes, zero, for the importer to fill; nothing counted in the result.
 * Errors: K3_ERR_INPUT. */
K3Status k3_import_open(K3ImportJob *job);

/* Frees what k3_import_open made. */
void k3_import_close(K3ImportJob *job);

/* Writes all tensors and finishes the file. On failure no output is left; after a signal the unfinished file is, and the
 * same command goes on with it. Errors: K3_ERR_INPUT. */
K3Status k3_import_run(K3ImportJob *job);

/* Rows [row, row + count) of a tensor, as stored; `bytes_read` of the checkpoint were used for them. Looks for a signal. */
K3Status k3_import_put(K3ImportWorker *worker, const K3TensorSpec *spec, K3Type type, int64_t row, int64_t count,
                       const void *data, int64_t bytes_read);

/* Rows of `row_bytes` that fit into a piece, at least one. Errors: K3_ERR_INPUT when a row does not. `name` (a tensor of
 * the checkpoint) and `path` (its file) are for the message. */
K3Status k3_import_rows(const char *path, const char *name, int64_t row_bytes, int64_t *rows);

/* A file's name, size and time of change hashed into job->identity. Errors: K3_ERR_INPUT. */
K3Status k3_import_identify(K3ImportJob *job, const char *path);

/* First element of `count` plain values (f32, f16, bf16; no alignment) that is NaN or infinite, -1: all are finite. */
int64_t k3_import_find_not_finite(K3Type type, const uint8_t *data, int64_t count);

/* float32 values in a plain type: exact for values that came from that type (k3_decode). */
void k3_import_narrow(K3Type type, const float *values, int64_t count, uint8_t *out);

#endif
