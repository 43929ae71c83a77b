/* Which rows of a dataset were written, in any order, and the CRC-32 of their bytes. Layer: store. */
#ifndef K3_STORE_ROW_RANGES_H
#define K3_STORE_ROW_RANGES_H

#include <stdint.h>

#include "base/status.h"

typedef struct {
  int64_t begin, end;
  uint32_t crc; /* of rows [begin, end) */
} K3RowRange;

/* Zeroed but for the sizes it is empty. */
typedef struct {
  int64_t rows, row_bytes; /* of the whole dataset */
  K3RowRange *ranges;      /* sorted, and none touches the next */
  int64_t count, room;
} K3RowRanges;

/* Adds rows [begin, end). `file` and `dataset` are for the message.
 * Errors: K3_ERR_INPUT: rows that were added before or do not exist; memory. */
K3Status k3_row_ranges_add(K3RowRanges *ranges, const char *file, const char *dataset, int64_t begin, int64_t end,
                           uint32_t crc);

/* 1 when all rows are there: ranges->ranges[0].crc is that of the dataset. */
int k3_row_ranges_whole(const K3RowRanges *ranges);

/* Rows that are there. */
int64_t k3_row_ranges_count(const K3RowRanges *ranges);

void k3_row_ranges_free(K3RowRanges *ranges);

#endif
