/* decode_blocks TYPE: blocks from standard input, their values as float32 to standard output, by the host's decoder and
 * the published codebook. For tests/test_formats.py. */
#include <stdio.h>
#include <stdlib.h>

#include "host/matrix.h"
#include "plan/codebook.h"

int main(int argc, char **argv)
{
  int found = argc == 2 ? k3_format_find(argv[1]) : -1;
  if (found < 0 || k3_format((K3Type)found)->block_values > 256) {
    fprintf(stderr, "usage: decode_blocks TYPE <blocks >floats\n");
    return 2;
  }
  K3HostMatrix row = {.type = (K3Type)found, .experts = 1, .rows = 1};
  int id = k3_codebook_of(row.type);
  static int8_t grid[K3_CODEBOOK_MOST_BYTES];
  static uint32_t words[K3_CODEBOOK_MOST_WORDS + 256];
  if (id >= 0) {
    const K3Codebook *book = k3_codebook((K3CodebookId)id);
    k3_codebook_fill(book, grid);
    if (k3_codebook_pack(book, "decode_blocks", grid, k3_codebook_bytes(book), words) != K3_OK) return 3;
    row.book = words;
  }
  const K3Format *format = k3_format(row.type);
  uint8_t block[256];
  float values[256];
  row.cols = format->block_values;
  row.row_bytes = format->block_bytes;
  row.data = block;
  while (fread(block, (size_t)format->block_bytes, 1, stdin) == 1) {
    k3_host_decode_row(&row, 0, 0, values);
    if (fwrite(values, 4, (size_t)format->block_values, stdout) != (size_t)format->block_values) return 3;
  }
  return fflush(stdout) == 0 ? 0 : 3;
}
