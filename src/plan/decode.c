/* See decode.h. Layer: plan (pure). */
#include "plan/decode.h"

#include <string.h>

#include "plan/blocks.h"
#include "plan/codebook.h"

static uint16_t read_u16(const uint8_t *at) { return (uint16_t)(at[0] | (at[1] << 8)); }

static void decode_block(K3Type type, const K3BlockBook *book, const uint8_t *block, float *out)
{
  const K3Format *format = k3_format(type);
  K3BlockParts parts = {block + format->codes.at, block + format->high.at, block + format->scale.at};
  int runs = k3_block_runs(type), units = (int)format->block_values / (runs * K3_BLOCK_RUN);
  for (int unit = 0; unit < units; unit++) {
    uint32_t word[K3_BLOCK_WORDS];
    k3_block_fetch(type, parts, unit, word);
    for (int r = 0; r < runs; r++) {
      K3BlockRun run;
      float *to = out + K3_BLOCK_RUN * k3_block_run_at(type, unit, r);
      k3_block_decode(type, word, unit, r, book, &run);
      for (int i = 0; i < K3_BLOCK_RUN; i++) to[i] = k3_block_value(&run, i);
    }
  }
}

void k3_decode(K3Type type, const uint32_t *book, const uint8_t *data, int64_t count, float *out)
{
  const K3Format *format = k3_format(type);
  switch (type) {
  case K3_TYPE_F32: memcpy(out, data, (size_t)count * 4); return;
  case K3_TYPE_BF16:
    for (int64_t i = 0; i < count; i++) out[i] = k3_bf16_to_float(read_u16(data + 2 * i));
    return;
  case K3_TYPE_F16:
    for (int64_t i = 0; i < count; i++) out[i] = k3_f16_to_float(read_u16(data + 2 * i));
    return;
  default: break;
  }
  K3BlockBook parts = {book, book ? book + k3_codebook((K3CodebookId)k3_codebook_of(type))->words : NULL, 4, 4};
  for (int64_t at = 0; at < count; at += format->block_values, data += format->block_bytes)
    decode_block(type, &parts, data, out + at);
}
