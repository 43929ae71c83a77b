/* Rows of a dataset that were written. See row_ranges.h. Layer: store. */
#include "store/row_ranges.h"

#include <stdlib.h>
#include <string.h>

#include "store/content_digest.h"

static int64_t range_bytes(const K3RowRanges *ranges, const K3RowRange *range)
{
  return (range->end - range->begin) * ranges->row_bytes;
}

K3Status k3_row_ranges_add(K3RowRanges *ranges, const char *file, const char *dataset, int64_t begin, int64_t end,
                           uint32_t crc)
{
  int64_t at = 0;
  while (at < ranges->count && ranges->ranges[at].end < begin) at++;
  K3RowRange *range = ranges->count ? &ranges->ranges[at] : NULL; /* the first that ends at `begin` or later */
  int64_t after = ranges->count - at;
  if (begin < 0 || begin >= end || end > ranges->rows || (after > 0 && range->begin < end && range->end > begin) ||
      (after > 1 && range[1].begin < end))
    K3_FAIL(K3_ERR_INPUT, "%s: dataset %s: rows %lld to %lld of %lld are written twice or do not exist", file, dataset,
            (long long)begin, (long long)end, (long long)ranges->rows);
  if (after > 0 && range->end == begin) { /* extends one, and may meet the next */
    range->crc = k3_content_join(range->crc, crc, (end - begin) * ranges->row_bytes);
    range->end = end;
    if (after > 1 && range[1].begin == end) {
      range->crc = k3_content_join(range->crc, range[1].crc, range_bytes(ranges, &range[1]));
      range->end = range[1].end;
      memmove(&range[1], &range[2], (size_t)(after - 2) * sizeof *range);
      ranges->count--;
    }
    return K3_OK;
  }
  if (after > 0 && range->begin == end) {
    range->crc = k3_content_join(crc, range->crc, range_bytes(ranges, range));
    range->begin = begin;
    return K3_OK;
  }
  if (ranges->count == ranges->room) {
    int64_t room = ranges->room ? 2 * ranges->room : 4;
    K3RowRange *larger = realloc(ranges->ranges, (size_t)room * sizeof *larger);
    if (!larger) K3_FAIL(K3_ERR_INPUT, "%s: no memory", file);
    ranges->ranges = larger;
    ranges->room = room;
  }
  range = &ranges->ranges[at];
  memmove(range + 1, range, (size_t)after * sizeof *range);
  *range = (K3RowRange){begin, end, crc};
  ranges->count++;
  return K3_OK;
}

int k3_row_ranges_whole(const K3RowRanges *ranges)
{
  return ranges->count == 1 && ranges->ranges[0].begin == 0 && ranges->ranges[0].end == ranges->rows;
}

int64_t k3_row_ranges_count(const K3RowRanges *ranges)
{
  int64_t count = 0;
  for (int64_t i = 0; i < ranges->count; i++) count += ranges->ranges[i].end - ranges->ranges[i].begin;
  return count;
}

void k3_row_ranges_free(K3RowRanges *ranges)
{
  free(ranges->ranges);
  ranges->ranges = NULL;
  ranges->count = ranges->room = 0;
}
