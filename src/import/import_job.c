/* What importers share. See import_job.h. Layer: import.
 * Tensors are dealt to OpenMP threads one by one; a thread reads, converts and writes its tensor in pieces. The writer's
 * library calls all lie before and after that (model_writer.c). */
#include "import/import_job.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "base/clock.h"
#include "base/float16.h"
#include "plan/codebook.h"
#include "store/digest.h"
#include "store/model_writer.h"

static int signal_came(const K3ImportJob *job) { return job->options->stopped && *job->options->stopped; }

static K3Status check_stop(const K3ImportJob *job)
{
  if (signal_came(job))
    K3_FAIL(K3_ERR_INPUT,
            "import stopped by signal %d: %s.partial is kept; the same command goes on with its finished tensors",
            (int)*job->options->stopped, job->output);
  return K3_OK;
}

static void report_progress(K3ImportJob *job, int64_t bytes)
{
#ifdef _OPENMP
#pragma omp critical(k3_import_progress)
#endif
  {
    job->bytes_done += bytes;
    if (job->options->progress) job->options->progress(job->options->progress_context, job->bytes_done, job->bytes_all);
  }
}

K3Status k3_import_put(K3ImportWorker *worker, const K3TensorSpec *spec, K3Type type, int64_t row, int64_t count,
                       const void *data, int64_t bytes_read)
{
  K3_TRY(check_stop(worker->job));
  K3_TRY(k3_model_writer_rows(worker->job->writer, spec, type, row, count, data));
  report_progress(worker->job, bytes_read);
  return K3_OK;
}

K3Status k3_import_rows(const char *path, const char *name, int64_t row_bytes, int64_t *rows)
{
  *rows = K3_IMPORT_PIECE / row_bytes;
  if (*rows < 1)
    K3_FAIL(K3_ERR_INPUT, "%s: tensor %s has rows of %lld bytes, at most %d are read", path, name, (long long)row_bytes,
            K3_IMPORT_PIECE);
  return K3_OK;
}

/* One tensor, unless an earlier run finished it. */
static K3Status write_tensor(K3ImportJob *job, int64_t tensor, K3ImportWorker *worker)
{
  const K3TensorSpec *spec = &job->table.specs[tensor];
  int whole = 0;
  K3_TRY(k3_model_writer_restore(job->writer, spec, &whole));
  if (whole) {
    report_progress(job, job->source_bytes[tensor]);
#ifdef _OPENMP
#pragma omp atomic
#endif
    job->result->resumed++;
    return K3_OK;
  }
  K3_TRY(job->write(job->importer, spec, tensor, worker));
  return k3_model_writer_done(job->writer, spec);
}

static int thread_count(const K3ImportJob *job)
{
  int threads = 1;
#ifdef _OPENMP
  threads = omp_get_max_threads();
#endif
  if (threads > K3_IMPORT_MAX_THREADS) threads = K3_IMPORT_MAX_THREADS;
  return (int64_t)threads > job->table.count ? (int)job->table.count : threads;
}

static K3Status write_all(K3ImportJob *job, K3ImportWorker *workers, int threads)
{
  K3Status status = K3_OK;
#ifdef _OPENMP
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
#endif
  for (int64_t i = 0; i < job->table.count; i++) {
    K3Status seen;
    int number = 0;
#ifdef _OPENMP
#pragma omp atomic read
#endif
    seen = status;
    if (seen != K3_OK) continue; /* a loop of OpenMP cannot be left */
#ifdef _OPENMP
    number = omp_get_thread_num();
#endif
    K3Status mine = write_tensor(job, i, &workers[number]);
    if (mine != K3_OK) {
#ifdef _OPENMP
#pragma omp atomic write
#endif
      status = mine;
    }
  }
  (void)threads;
  return status;
}

static K3Status write_codebooks(K3ImportJob *job)
{
  int needed[K3_CODEBOOK_COUNT];
  int8_t grid[K3_CODEBOOK_MOST_BYTES];
  k3_codebooks_needed(job->types, job->table.count, needed);
  for (int id = 0; id < K3_CODEBOOK_COUNT; id++) {
    const K3Codebook *book = k3_codebook((K3CodebookId)id);
    if (!needed[id]) continue;
    k3_codebook_fill(book, grid);
    K3_TRY(k3_model_writer_codebook(job->writer, book->name, grid, k3_codebook_bytes(book)));
  }
  return K3_OK;
}

/* Over everything that the content depends on besides the checkpoint's own files. */
static uint64_t full_identity(const K3ImportJob *job)
{
  uint64_t identity = k3_digest_config(job->identity, &job->config);
  for (int64_t i = 0; i < job->table.count; i++)
    identity = k3_digest_tensor(identity, &job->table.specs[i], job->types[i]);
  return identity;
}

K3Status k3_import_open(K3ImportJob *job)
{
  memset(job->result, 0, sizeof *job->result);
  K3_TRY(k3_tensors_build(&job->config, &job->table));
  job->types = calloc((size_t)job->table.count, sizeof *job->types);
  job->source_bytes = calloc((size_t)job->table.count, sizeof *job->source_bytes);
  if (!job->types || !job->source_bytes)
    K3_FAIL(K3_ERR_INPUT, "no memory for the list of %lld tensors", (long long)job->table.count);
  job->identity = K3_DIGEST_START;
  return K3_OK;
}

void k3_import_close(K3ImportJob *job)
{
  free(job->types);
  free(job->source_bytes);
  k3_tensors_free(&job->table);
}

K3Status k3_import_run(K3ImportJob *job)
{
  K3Status status = K3_OK;
  const K3ImportOptions *options = job->options;
  K3ImportWorker workers[K3_IMPORT_MAX_THREADS] = {{NULL, NULL, NULL}};
  int threads = thread_count(job);
  double start_ms = k3_clock_ms();
  job->writer = NULL;
  job->bytes_done = job->bytes_all = 0;
  for (int64_t i = 0; i < job->table.count; i++) {
    job->bytes_all += job->source_bytes[i];
    job->result->by_type[job->types[i]]++;
    job->result->bytes_written += k3_format_bytes(job->types[i], k3_tensor_elements(&job->table.specs[i]));
  }
  job->result->tensors = job->table.count;
  for (int t = 0; t < threads; t++) {
    workers[t] = (K3ImportWorker){job, malloc(K3_IMPORT_PIECE), malloc(K3_IMPORT_PIECE)};
    if (!workers[t].stored || !workers[t].values)
      K3_FAIL_DONE(K3_ERR_INPUT, "no memory for two buffers of %d bytes a thread", K3_IMPORT_PIECE);
  }
  K3_TRY_DONE(k3_model_writer_create_all(job->output, &job->config, &job->table, job->types, full_identity(job),
                                         options->provenance, options->overwrite, &job->writer));
  K3_TRY_DONE(write_codebooks(job));
  K3_TRY_DONE(write_all(job, workers, threads));
  K3_TRY_DONE(check_stop(job));
  K3_TRY_DONE(k3_model_writer_finish(job->writer, &job->table));
  job->result->replaced = k3_model_writer_replaced(job->writer);
  job->result->digest = k3_model_writer_digest(job->writer);
  job->result->bytes_read = job->bytes_done;
  job->result->seconds = 1e-3 * (k3_clock_ms() - start_ms);
done:
  if (status != K3_OK && job->writer && signal_came(job)) k3_model_writer_keep(job->writer);
  k3_model_writer_close(job->writer);
  for (int t = 0; t < threads; t++) {
    free(workers[t].stored);
    free(workers[t].values);
  }
  return status;
}

K3Status k3_import_identify(K3ImportJob *job, const char *path)
{
  struct stat info;
  if (stat(path, &info) != 0) K3_FAIL(K3_ERR_INPUT, "%s: cannot stat: %s", path, strerror(errno));
  job->identity = k3_digest_number(k3_digest_text(job->identity, path), (uint64_t)info.st_size);
  job->identity = k3_digest_number(job->identity, (uint64_t)info.st_mtim.tv_sec);
  job->identity = k3_digest_number(job->identity, (uint64_t)info.st_mtim.tv_nsec);
  return K3_OK;
}

/* --- plain values --- */

/* Of 16-bit values, those whose bits `mask` are all set. */
static int64_t find_not_finite_16(unsigned mask, const uint8_t *data, int64_t count)
{
  for (int64_t begin = 0; begin < count; begin += 4096) { /* the inner loop has no branch: it is made wide */
    int64_t end = begin + 4096 < count ? begin + 4096 : count;
    unsigned bad = 0;
    for (int64_t i = begin; i < end; i++) {
      uint16_t bits;
      memcpy(&bits, data + 2 * i, 2);
      bad |= (bits & mask) == mask;
    }
    for (int64_t i = begin; bad && i < end; i++) {
      uint16_t bits;
      memcpy(&bits, data + 2 * i, 2);
      if ((bits & mask) == mask) return i;
    }
  }
  return -1;
}

static int64_t find_not_finite_32(const uint8_t *data, int64_t count)
{
  const uint32_t mask = 0x7f800000u;
  for (int64_t begin = 0; begin < count; begin += 4096) {
    int64_t end = begin + 4096 < count ? begin + 4096 : count;
    unsigned bad = 0;
    for (int64_t i = begin; i < end; i++) {
      uint32_t bits;
      memcpy(&bits, data + 4 * i, 4);
      bad |= (bits & mask) == mask;
    }
    for (int64_t i = begin; bad && i < end; i++) {
      uint32_t bits;
      memcpy(&bits, data + 4 * i, 4);
      if ((bits & mask) == mask) return i;
    }
  }
  return -1;
}

int64_t k3_import_find_not_finite(K3Type type, const uint8_t *data, int64_t count)
{
  if (type == K3_TYPE_F32) return find_not_finite_32(data, count);
  return find_not_finite_16(type == K3_TYPE_BF16 ? 0x7f80u : 0x7c00u, data, count);
}

void k3_import_narrow(K3Type type, const float *values, int64_t count, uint8_t *out)
{
  if (type == K3_TYPE_F32) {
    memcpy(out, values, (size_t)count * 4);
    return;
  }
  for (int64_t i = 0; i < count; i++) {
    uint16_t half = type == K3_TYPE_BF16 ? k3_bf16_from_float(values[i]) : k3_f16_from_float(values[i]);
    memcpy(out + 2 * i, &half, 2);
  }
}
