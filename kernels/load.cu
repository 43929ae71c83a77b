/* Weights onto the device. See backend.h. Layer: backend (CUDA), host code only.
 *
 * From a file: bands through two pinned buffers; while one is read from HDF5, the other is copied and repacked. From a
 * recipe: matrices are made in place, byte for byte what src/plan/synth_recipe.c makes. Vectors are small and go through the
 * host either way, widened to float32. */
#include <math.h>
#include <stdlib.h>

#include "base/clock.h"
#include "kernels/backend.h"
#include "kernels/norm.h"
extern "C" {
#include "plan/decode.h"
}

enum { STAGING_BYTES = 64 << 20 };

typedef struct {
  char *host[2], *device[2];
  cudaEvent_t free_again[2];
  int turn;
  K3SynthRecipe recipe;
  int synthetic; /* matrices come from `recipe` */
  int64_t done, all;
} Loader;

static K3Status open_loader(const K3Cuda *cuda, Loader *loader)
{
  static const char prefix[] = "synth:";
  const char *origin = cuda->source->origin;
  memset(loader, 0, sizeof *loader);
  /* an origin that fills its field may have been cut */
  if (strncmp(origin, prefix, sizeof prefix - 1) == 0 && strlen(origin) + 1 < sizeof cuda->source->origin) {
    K3_TRY(k3_synth_recipe_parse(origin + sizeof prefix - 1, &loader->recipe));
    loader->synthetic = 1;
  }
  for (int i = 0; i < 2; i++) {
    K3_CUDA_TRY(cudaMallocHost((void **)&loader->host[i], STAGING_BYTES));
    K3_CUDA_TRY(cudaMalloc((void **)&loader->device[i], STAGING_BYTES));
    K3_CUDA_TRY(cudaEventCreateWithFlags(&loader->free_again[i], cudaEventDisableTiming));
  }
  loader->all = k3_plan_weight_bytes(cuda->plan, cuda->rank, &cuda->source->table, cuda->source->types);
  return K3_OK;
}

static K3Status close_loader(Loader *loader)
{
  K3Status status = K3_OK;
  for (int i = 0; i < 2; i++) {
    cudaError_t error = loader->free_again[i] ? cudaEventDestroy(loader->free_again[i]) : cudaSuccess;
    if (error == cudaSuccess && loader->device[i]) error = cudaFree(loader->device[i]);
    if (error == cudaSuccess && loader->host[i]) error = cudaFreeHost(loader->host[i]);
    if (error != cudaSuccess && status == K3_OK)
      status = k3_cuda_failed(error, "release of the staging buffers", __FILE__, __LINE__);
  }
  return status;
}

/* --- matrices --------------------------------------------------------------------------------------------- */

/* Axes of a band as slabs of rows: rank 3: an expert is a slab; rank 2: one slab. */
typedef struct {
  int slab_axis, row_axis;
  int64_t slabs, slab_rows, row_bytes;
} Slabs;

static Slabs slabs_of(const K3TensorSpec *spec, K3Type type, const K3Band *band)
{
  Slabs s;
  s.row_axis = spec->rank - 2;
  s.slab_axis = 0;
  s.slabs = spec->rank == 3 ? band->count[0] : 1;
  s.slab_rows = band->count[s.row_axis];
  s.row_bytes = k3_format_bytes(type, band->count[spec->rank - 1]);
  return s;
}

/* A filled staging buffer to rows [row, row + rows). */
static K3Status upload(K3Cuda *cuda, Loader *loader, int turn, int64_t index, int64_t row, int64_t rows, int64_t bytes)
{
  K3_CUDA_TRY(
      cudaMemcpyAsync(loader->device[turn], loader->host[turn], (size_t)bytes, cudaMemcpyHostToDevice, cuda->stream));
  K3CudaRepack repack;
  repack.matrix = cuda->tensors[index].matrix;
  repack.row = row;
  repack.rows = rows;
  repack.d_stored = loader->device[turn];
  K3_TRY(k3_cuda_repack(&cuda->launch, &repack));
  K3_CUDA_TRY(cudaEventRecord(loader->free_again[turn], cuda->stream));
  return K3_OK;
}

/* One box through a staging buffer to rows [row, row + rows). */
static K3Status stage(K3Cuda *cuda, Loader *loader, int64_t index, const K3Band *box, int64_t row, int64_t rows,
                      int64_t bytes)
{
  int turn = loader->turn;
  loader->turn ^= 1;
  K3_CUDA_TRY(cudaEventSynchronize(loader->free_again[turn]));
  K3_TRY(cuda->source->read(cuda->source, index, box, loader->host[turn]));
  return upload(cuda, loader, turn, index, row, rows, bytes);
}

static K3Status load_matrix(K3Cuda *cuda, Loader *loader, int64_t index, const K3Band *band)
{
  const K3TensorSpec *spec = &cuda->source->table.specs[index];
  Slabs s = slabs_of(spec, cuda->source->types[index], band);
  int64_t most_rows = STAGING_BYTES / s.row_bytes, row = cuda->tensors[index].row;
  if (most_rows < 1)
    K3_FAIL(K3_ERR_INPUT, "%s: a row of %s takes %lld bytes; at most %d can be loaded", cuda->source->origin,
            spec->path, (long long)s.row_bytes, STAGING_BYTES);
  int64_t most_slabs = most_rows / s.slab_rows; /* whole slabs at a time where they fit */
  for (int64_t slab = 0; slab < s.slabs;) {
    int64_t slabs = most_slabs < 1 ? 1 : most_slabs < s.slabs - slab ? most_slabs : s.slabs - slab;
    for (int64_t first = 0; first < s.slab_rows;) {
      int64_t rows = most_slabs < 1 && most_rows < s.slab_rows - first ? most_rows : s.slab_rows - first;
      K3Band box = *band;
      if (spec->rank == 3) {
        box.begin[0] += slab;
        box.count[0] = slabs;
      }
      box.begin[s.row_axis] = band->begin[s.row_axis] + first;
      box.count[s.row_axis] = rows;
      K3_TRY(stage(cuda, loader, index, &box, row, slabs * rows, slabs * rows * s.row_bytes));
      row += slabs * rows;
      first += rows;
    }
    slab += slabs;
  }
  return K3_OK;
}

static K3Status make_matrix(K3Cuda *cuda, Loader *loader, int64_t index, const K3Band *band)
{
  const K3TensorSpec *spec = &cuda->source->table.specs[index];
  int row_axis = spec->rank - 2, last = spec->rank - 1;
  int64_t slabs = spec->rank == 3 ? band->count[0] : 1;
  K3CudaSynth synth;
  memset(&synth, 0, sizeof synth);
  synth.matrix = cuda->tensors[index].matrix;
  synth.rule = k3_synth_rule(&loader->recipe, spec);
  synth.row = cuda->tensors[index].row;
  synth.rows = slabs * band->count[row_axis];
  synth.slab_rows = band->count[row_axis];
  synth.slab_stride = spec->shape[row_axis];
  synth.first_row = (spec->rank == 3 ? band->begin[0] * spec->shape[1] : 0) + band->begin[row_axis];
  synth.first_col = band->begin[last];
  synth.full_cols = spec->shape[last];
  return k3_cuda_synth(&cuda->launch, &synth);
}

/* A matrix that is kept as float32 (k3_cuda_placed_type), decoded on the host, a few rows at a time. */
static K3Status decode_matrix(K3Cuda *cuda, Loader *loader, int64_t index, const K3Band *band)
{
  K3Status status = K3_OK;
  K3Source *source = cuda->source;
  K3Type type = source->types[index];
  int id = k3_codebook_of(type);
  int64_t cols = band->count[1], row_bytes = k3_format_bytes(type, cols), most = STAGING_BYTES / (cols * 4), at = cuda->tensors[index].row;
  uint32_t *book = NULL;
  uint8_t *stored = NULL;
  if (most < 1)
    K3_FAIL(K3_ERR_INPUT, "%s: a row of %s has %lld values; at most %d can be loaded", source->origin, source->table.specs[index].path,
            (long long)cols, STAGING_BYTES / 4);
  if (id >= 0) K3_TRY_DONE(k3_source_codebook(source, (K3CodebookId)id, &book));
  stored = (uint8_t *)malloc((size_t)(most * row_bytes));
  if (!stored)
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: no memory for %lld bytes of %s", source->origin, (long long)(most * row_bytes),
                 source->table.specs[index].path);
  for (int64_t row = 0; row < band->count[0]; row += most) {
    K3Band box = *band;
    int turn = loader->turn;
    loader->turn ^= 1;
    box.begin[0] += row;
    box.count[0] = most < band->count[0] - row ? most : band->count[0] - row;
    K3_TRY_DONE(source->read(source, index, &box, stored));
    K3_CUDA_TRY_DONE(cudaEventSynchronize(loader->free_again[turn]));
    k3_decode(type, book, stored, box.count[0] * cols, (float *)loader->host[turn]);
    K3_TRY_DONE(upload(cuda, loader, turn, index, at + row, box.count[0], box.count[0] * cols * 4));
  }
done:
  free(book);
  free(stored);
  return status;
}

/* --- vectors and the codebook ------------------------------------------------------------------------------- */

static K3Status load_vector(K3Cuda *cuda, Loader *loader, int64_t index, const K3Band *band)
{
  int64_t count = k3_band_elements(band);
  if (count * 4 > STAGING_BYTES)
    K3_FAIL(K3_ERR_INPUT, "%s: %s has %lld elements here; at most %d can be loaded", cuda->source->origin,
            cuda->source->table.specs[index].path, (long long)count, STAGING_BYTES / 4);
  K3_CUDA_TRY(cudaStreamSynchronize(cuda->stream)); /* both buffers are ours */
  K3_TRY(cuda->source->read(cuda->source, index, band, loader->host[0]));
  const void *values = loader->host[0];
  if (cuda->source->types[index] != K3_TYPE_F32) {
    k3_decode(cuda->source->types[index], NULL, (const uint8_t *)loader->host[0], count, (float *)loader->host[1]);
    values = loader->host[1];
  }
  const K3TensorSpec *spec = &cuda->source->table.specs[index];
  for (int64_t i = 0; spec->role == K3_ROLE_ROUTER_BIAS && cuda->bad_bias_layer < 0 && i < count; i++)
    if (!isfinite(((const float *)values)[i])) cuda->bad_bias_layer = spec->layer;
  K3_CUDA_TRY(cudaMemcpy(cuda->tensors[index].vector, values, (size_t)count * 4, cudaMemcpyHostToDevice));
  return K3_OK;
}

/* The file's codebook, uploaded and packed. */
static K3Status load_iq1_s_codebook(K3Cuda *cuda)
{
  enum { BYTES = K3_CODEBOOK_ENTRIES * 8 };
  void *data = NULL;
  size_t bytes = 0;
  K3Status status = K3_OK;
  if (!cuda->codebook) return K3_OK;
  K3_TRY_DONE(cuda->source->codebook(cuda->source, "iq1_s", &data, &bytes));
  if (bytes != BYTES)
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: /codebooks/iq1_s holds %zu bytes, wanted %d (2048 entries of 8)",
                 cuda->source->origin, bytes, BYTES);
  K3_CUDA_TRY_DONE(cudaMemcpy(cuda->codebook_grid, data, BYTES, cudaMemcpyHostToDevice));
  K3_TRY_DONE(k3_cuda_codebook_pack(&cuda->launch, cuda->codebook_grid, cuda->codebook));
  K3_CUDA_TRY_DONE(cudaStreamSynchronize(cuda->stream));
done:
  free(data);
  return status;
}

/* Those of GGUF blocks, packed on the host. */
static K3Status load_codebooks(K3Cuda *cuda)
{
  K3Status status = K3_OK;
  uint32_t *words = NULL;
  K3_TRY_DONE(load_iq1_s_codebook(cuda));
  for (int id = 0; id < K3_CODEBOOK_COUNT; id++) {
    if (!cuda->books[id]) continue;
    K3_TRY_DONE(k3_source_codebook(cuda->source, (K3CodebookId)id, &words));
    K3_CUDA_TRY_DONE(cudaMemcpy(cuda->books[id], words, (size_t)k3_codebook_words(k3_codebook((K3CodebookId)id)) * sizeof *words,
                                cudaMemcpyHostToDevice));
    free(words);
    words = NULL;
  }
done:
  free(words);
  return status;
}

/* --- all ------------------------------------------------------------------------------------------------------ */

static K3Status load_tensor(K3Cuda *cuda, Loader *loader, int64_t index)
{
  const K3TensorSpec *spec = &cuda->source->table.specs[index];
  K3Band band = k3_plan_band(cuda->plan, cuda->rank, spec);
  cuda->launch.layer = spec->layer;
  if (k3_band_elements(&band) > 0) {
    if (!spec->is_matrix) K3_TRY(load_vector(cuda, loader, index, &band));
    else if (k3_cuda_placed_type(cuda->source, index) != cuda->source->types[index])
      K3_TRY(decode_matrix(cuda, loader, index, &band));
    else if (loader->synthetic) K3_TRY(make_matrix(cuda, loader, index, &band));
    else K3_TRY(load_matrix(cuda, loader, index, &band));
  }
  loader->done += k3_source_band_bytes(cuda->source, index, &band);
  return K3_OK;
}

/* res_norm ⊙ res_proj. */
static K3Status make_score(K3Cuda *cuda, int64_t layer, K3Role norm, K3Role proj, float *score)
{
  return k3_cuda_norm_score(&cuda->launch, k3_cuda_tensor(cuda, layer, norm)->vector,
                            k3_cuda_tensor(cuda, layer, proj)->vector, cuda->config->hidden_size, score);
}

static K3Status make_scores(K3Cuda *cuda)
{
  for (int64_t i = 0; i < cuda->config->num_layers; i++) {
    K3_TRY(make_score(cuda, i, K3_ROLE_ATTN_RES_NORM, K3_ROLE_ATTN_RES_PROJ, cuda->layers[i].attention_score));
    K3_TRY(make_score(cuda, i, K3_ROLE_MLP_RES_NORM, K3_ROLE_MLP_RES_PROJ, cuda->layers[i].ffn_score));
  }
  return make_score(cuda, -1, K3_ROLE_OUTPUT_RES_NORM, K3_ROLE_OUTPUT_RES_PROJ, cuda->output_score);
}

K3Status k3_cuda_load_weights(K3Cuda *cuda, K3Progress progress, void *context)
{
  Loader loader;
  K3Status status = K3_OK;
  double begin = 1e-3 * k3_clock_ms();
  cuda->launch.phase = "load";
  K3_TRY_DONE(open_loader(cuda, &loader));
  K3_TRY_DONE(load_codebooks(cuda));
  for (int64_t i = 0; i < cuda->source->table.count; i++) {
    K3_TRY_DONE(load_tensor(cuda, &loader, i));
    if (progress) progress(context, loader.done, loader.all);
  }
  K3_TRY_DONE(make_scores(cuda));
  K3_CUDA_TRY_DONE(cudaStreamSynchronize(cuda->stream));
  cuda->load_seconds = 1e-3 * k3_clock_ms() - begin;
  cuda->load_bytes = loader.done;
done:
  K3Status closed = close_loader(&loader);
  return status != K3_OK ? status : closed;
}
