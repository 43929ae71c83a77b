/* Opens either kind of source. See source.h. Layer: store. */
#include "store/source.h"

#include <stdlib.h>
#include <string.h>

K3Status k3_source_open(const char *model, K3Source **source)
{
  static const char prefix[] = "synth:";
  size_t length = sizeof prefix - 1;
  if (strncmp(model, prefix, length) == 0) return k3_synth_source_open(model + length, source);
  return k3_model_file_open(model, source);
}

K3Status k3_source_codebook(K3Source *source, K3CodebookId id, uint32_t **words)
{
  K3Status status = K3_OK;
  const K3Codebook *book = k3_codebook(id);
  void *grid = NULL;
  size_t bytes = 0;
  *words = NULL;
  K3_TRY_DONE(source->codebook(source, book->name, &grid, &bytes));
  *words = malloc((size_t)k3_codebook_words(book) * sizeof **words);
  if (!*words) K3_FAIL_DONE(K3_ERR_INPUT, "%s: no memory for the codebook %s", source->origin, book->name);
  K3_TRY_DONE(k3_codebook_pack(book, source->origin, grid, bytes, *words));
done:
  free(grid);
  if (status != K3_OK) {
    free(*words);
    *words = NULL;
  }
  return status;
}

int64_t k3_source_band_bytes(const K3Source *source, int64_t tensor, const K3Band *band)
{
  const K3TensorSpec *spec = &source->table.specs[tensor];
  int64_t rows = 1;
  for (int axis = 0; axis < spec->rank - 1; axis++) rows *= band->count[axis];
  return rows * k3_format_bytes(source->types[tensor], band->count[spec->rank - 1]);
}
