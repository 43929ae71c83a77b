/* A source that makes its weights in place from a recipe: each rank its own band, with no file.
 * See source.h, plan/synth_recipe.h. Layer: store. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "plan/codebook.h"
#include "plan/synth_recipe.h"
#include "store/digest.h"
#include "store/source.h"

typedef struct {
  K3Source base; /* first: a K3Source* is a SynthSource* */
  K3SynthRecipe recipe;
} SynthSource;

static K3Status synth_read(K3Source *source, int64_t tensor, const K3Band *band, void *destination)
{
  const K3TensorSpec *spec = &source->table.specs[tensor];
  K3Type type = source->types[tensor];
  K3SynthRule rule = k3_synth_rule(&((SynthSource *)source)->recipe, spec);
  int last = spec->rank - 1;
  int64_t row_values = band->count[last], row_bytes = k3_format_bytes(type, row_values);
  /* Axes before the last as [outer, inner]; absent ones have one index. */
  int64_t outer = spec->rank == 3 ? band->count[0] : 1, outer_begin = spec->rank == 3 ? band->begin[0] : 0;
  int64_t inner = last > 0 ? band->count[last - 1] : 1, inner_begin = last > 0 ? band->begin[last - 1] : 0;
  int64_t inner_size = last > 0 ? spec->shape[last - 1] : 1;

#pragma omp parallel for schedule(static) if (outer * inner > 1)
  for (int64_t row = 0; row < outer * inner; row++) {
    int64_t whole_row = (outer_begin + row / inner) * inner_size + inner_begin + row % inner;
    k3_synth_fill(rule, type, whole_row * spec->shape[last] + band->begin[last], row_values,
                  (char *)destination + row * row_bytes);
  }
  source->bytes_read += outer * inner * row_bytes;
  return K3_OK;
}

static K3Status synth_codebook(K3Source *source, const char *name, void **data, size_t *bytes)
{
  *data = NULL;
  *bytes = 0;
  for (int id = 0; id < K3_CODEBOOK_COUNT; id++) {
    const K3Codebook *book = k3_codebook((K3CodebookId)id);
    if (strcmp(name, book->name) != 0) continue;
    *data = malloc(k3_codebook_bytes(book));
    if (!*data) K3_FAIL(K3_ERR_INPUT, "%s: no memory for the codebook %s", source->origin, name);
    k3_codebook_fill(book, *data);
    *bytes = k3_codebook_bytes(book);
    return K3_OK;
  }
  K3_FAIL(K3_ERR_INPUT, "%s: there is no codebook %s", source->origin, name);
}

static void synth_close(K3Source *source)
{
  if (!source) return;
  k3_tensors_free(&source->table);
  free(source->types);
  free(source);
}

static uint64_t synth_digest(const SynthSource *synth)
{
  const K3Source *source = &synth->base;
  uint64_t digest = k3_digest_config(k3_digest_text(K3_DIGEST_START, "synth"), &source->config);
  digest = k3_digest_number(digest, synth->recipe.seed);
  for (int64_t i = 0; i < source->table.count; i++) {
    K3SynthRule rule = k3_synth_rule(&synth->recipe, &source->table.specs[i]);
    digest = k3_digest_tensor(digest, &source->table.specs[i], source->types[i]);
    digest = k3_digest_number(digest, k3_float_bits(rule.mean));
    digest = k3_digest_number(digest, k3_float_bits(rule.deviation));
  }
  return digest;
}

K3Status k3_synth_source_open(const char *recipe, K3Source **source)
{
  K3Status status = K3_OK;
  *source = NULL;
  SynthSource *synth = calloc(1, sizeof *synth);
  if (!synth) K3_FAIL(K3_ERR_INPUT, "synth:%s: no memory", recipe);
  K3Source *base = &synth->base;
  snprintf(base->origin, sizeof base->origin, "synth:%s", recipe);
  K3_TRY_DONE(k3_synth_recipe_parse(recipe, &synth->recipe));
  base->config = synth->recipe.config;
  K3_TRY_DONE(k3_tensors_build(&base->config, &base->table));
  base->types = calloc((size_t)base->table.count, sizeof *base->types);
  if (!base->types) K3_FAIL_DONE(K3_ERR_INPUT, "%s: no memory", base->origin);
  for (int64_t i = 0; i < base->table.count; i++)
    K3_TRY_DONE(k3_synth_type(&synth->recipe, &base->table.specs[i], &base->types[i]));
  base->digest = synth_digest(synth);
  base->read = synth_read;
  base->codebook = synth_codebook;
  base->close = synth_close;
  *source = base;
done:
  if (status != K3_OK) synth_close(base);
  return status;
}
