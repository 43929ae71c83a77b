/* See snapshot.h. Layer: decode. */
#include "decode/snapshot.h"

#include <stdlib.h>
#include <string.h>

#include "base/breakage.h"
#include "base/float16.h"
#include "decode/interrupt.h"

enum { WINDOW_BYTES = 16 << 20 }; /* of the cache, on its way at once */

/* What a rank needs for the way of a band: its own, on rank 0 those of all, and pieces [2, world]. */
typedef struct {
  char *own, *all, *ordered;
  int64_t *piece;
} Buffers;

static int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

/* --- sizes -------------------------------------------------------------------------------------------- */

static int64_t row_bytes(const K3StateOwner *owner)
{
  return k3_config_cache_width(owner->config) * k3_cache_type_bytes(owner->backend->cache_type);
}

/* Positions of a window: whole rounds of pages. */
static int64_t window_positions(const K3StateOwner *owner)
{
  int64_t round = owner->plan->page_positions * owner->plan->world, row = k3_config_cache_width(owner->config) * 4;
  return max64(WINDOW_BYTES / (round * row), 1) * round;
}

static int64_t channels_of(const K3StateOwner *owner, int rank)
{
  K3Range heads = k3_plan_range(owner->plan, rank, K3_SHARE_KDA_HEADS);
  return (heads.end - heads.begin) * owner->config->kda_head_dim;
}

/* Floats of a KDA layer's state, or windows, for so many channels. */
static int64_t kda_floats(const K3StateOwner *owner, K3StatePart part, int64_t channels)
{
  const K3Config *c = owner->config;
  return channels * (part == K3_STATE_KDA ? c->kda_head_dim : 3 * (c->kda_conv_kernel - 1));
}

static K3Status open_buffers(const K3StateOwner *owner, int collects, Buffers *buffers)
{
  int64_t D = owner->config->kda_head_dim, heads = owner->config->num_heads;
  int64_t all = window_positions(owner) * k3_config_cache_width(owner->config) * 4;
  all = max64(all, max64(kda_floats(owner, K3_STATE_KDA, heads * D), kda_floats(owner, K3_STATE_CONV, heads * D)) * 4);
  *buffers = (Buffers){.own = malloc((size_t)all), .piece = calloc(2 * (size_t)owner->comm->world, 8)};
  int good = buffers->own && buffers->piece;
  if (collects) {
    good &= (buffers->all = malloc((size_t)all)) != NULL;
    good &= (buffers->ordered = malloc((size_t)all)) != NULL;
  }
  if (!good) K3_FAIL(K3_ERR_INPUT, "no memory for the bands of a snapshot, %lld bytes", (long long)all);
  return K3_OK;
}

static void close_buffers(Buffers *buffers)
{
  free(buffers->own);
  free(buffers->all);
  free(buffers->ordered);
  free(buffers->piece);
}

/* --- writing ------------------------------------------------------------------------------------------- */

/* Brings every rank's piece to rank 0; count[r] is set. A rank that failed takes part all the same. */
static K3Status gather(const K3StateOwner *owner, Buffers *buffers, K3Element element)
{
  K3Comm *comm = owner->comm;
  int64_t *count = buffers->piece, *displacement = count + comm->world, at = 0;
  for (int r = 0; r < comm->world; r++, at += count[r - 1]) displacement[r] = at;
  return comm->gather(comm, buffers->own, count[comm->rank], buffers->all, (K3Pieces){count, displacement}, element);
}

/* Rows of `rank` before `position`, of those that it brings: with all rows on every rank, rank 0 brings them. */
static int64_t rows_before(const K3Plan *plan, int rank, int64_t position)
{
  if (plan->cache_band == K3_CACHE_NONE && rank > 0) return 0;
  return k3_plan_cache_rows(plan, rank, position);
}

/* From pages rank after rank to the order of positions. */
static void sort_pages(const K3StateOwner *owner, Buffers *buffers, int64_t from, int64_t to)
{
  const K3Plan *plan = owner->plan;
  const int64_t *displacement = buffers->piece + plan->world;
  int64_t row = row_bytes(owner);
  for (int64_t t = from; t < to; t += plan->page_positions) {
    int rank = max64(k3_plan_cache_owner(plan, t), 0);
    int64_t rows = min64(plan->page_positions, to - t);
    int64_t at = displacement[rank] + (k3_plan_cache_row(plan, t) - rows_before(plan, rank, from)) * row;
    if (K3_BROKEN("snapshot_page_twice")) at = displacement[0];
    memcpy(buffers->ordered + (t - from) * row, buffers->all + at, (size_t)(rows * row));
  }
}

static K3Status write_cache(const K3StateOwner *owner, Buffers *buffers, int64_t layer, int64_t index, int64_t position,
                            K3SnapshotWriter *writer)
{
  int64_t window = window_positions(owner), row = row_bytes(owner);
  for (int64_t from = 0; from < position; from += window) {
    int64_t to = min64(from + window, position);
    for (int r = 0; r < owner->plan->world; r++)
      buffers->piece[r] = (rows_before(owner->plan, r, to) - rows_before(owner->plan, r, from)) * row;
    K3StateBand band = {.part = K3_STATE_CACHE,
                        .layer = layer,
                        .begin = rows_before(owner->plan, owner->comm->rank, from),
                        .count = buffers->piece[owner->comm->rank] / row};
    K3Status status = owner->backend->save(owner->backend, &band, buffers->own);
    K3_TRY(gather(owner, buffers, K3_ELEMENT_BYTE));
    if (writer && status == K3_OK) {
      sort_pages(owner, buffers, from, to);
      status = k3_snapshot_write_cache(writer, index, from, to - from, buffers->ordered);
    }
    K3_TRY(k3_comm_agree(owner->comm, status));
  }
  return K3_OK;
}

static K3Status write_kda(const K3StateOwner *owner, Buffers *buffers, int64_t layer, int64_t index, K3StatePart part,
                          K3SnapshotWriter *writer)
{
  K3StateBand band = {.part = part, .layer = layer};
  int world = owner->plan->world;
  for (int r = 0; r < world; r++) buffers->piece[r] = kda_floats(owner, part, channels_of(owner, r));
  K3Status status = owner->backend->save(owner->backend, &band, buffers->own);
  K3_TRY(gather(owner, buffers, K3_ELEMENT_F32));
  const float *all = (const float *)buffers->all;
  if (writer && status == K3_OK && part == K3_STATE_KDA)
    status = k3_snapshot_write_kda(writer, index, 0, owner->config->num_heads, all);
  int64_t channel = 0;
  for (int r = 0; writer && status == K3_OK && part == K3_STATE_CONV && r < world; r++) {
    status = k3_snapshot_write_conv(writer, index, channel, channels_of(owner, r), all + buffers->piece[world + r]);
    channel += channels_of(owner, r);
  }
  return k3_comm_agree(owner->comm, status);
}

static K3Status write_layers(const K3StateOwner *owner, Buffers *buffers, int64_t position, K3SnapshotWriter *writer)
{
  int64_t index[2] = {0, 0};
  for (int64_t i = 0; i < owner->config->num_layers; i++) {
    int type = owner->config->layer_types[i];
    if (type == K3_LAYER_MLA) {
      K3_TRY(write_cache(owner, buffers, i, index[type], position, writer));
    } else {
      K3_TRY(write_kda(owner, buffers, i, index[type], K3_STATE_KDA, writer));
      K3_TRY(write_kda(owner, buffers, i, index[type], K3_STATE_CONV, writer));
    }
    index[type]++;
  }
  return K3_OK;
}

K3Status k3_state_write(const K3StateOwner *owner, const char *path, const K3SnapshotInfo *info, const int64_t *tokens,
                        int overwrite)
{
  K3SnapshotWriter *writer = NULL;
  Buffers buffers = {0};
  int first = owner->comm->rank == 0;
  k3_interrupt_hold(1);
  K3Status status = open_buffers(owner, first, &buffers);
  if (status == K3_OK && first) status = k3_snapshot_create(path, info, tokens, overwrite, &writer);
  status = k3_comm_agree(owner->comm, status);
  if (status == K3_OK) status = write_layers(owner, &buffers, k3_snapshot_position(info), writer);
  if (status == K3_OK) status = k3_comm_agree(owner->comm, writer ? k3_snapshot_finish(writer) : K3_OK);
  k3_snapshot_writer_close(writer);
  close_buffers(&buffers);
  k3_interrupt_hold(0);
  return status;
}

/* --- opening -------------------------------------------------------------------------------------------- */

static K3Status share_sum(K3Comm *comm, uint64_t mine, uint64_t *sum)
{
  int64_t *words = calloc(3 * (size_t)comm->world, sizeof *words);
  K3Status status = words ? K3_OK
                          : k3_status_fail(K3_ERR_INPUT, __FILE__, __LINE__,
                                           "no memory to check a snapshot on %d ranks", comm->world);
  status = k3_comm_agree(comm, status);
  if (status == K3_OK) {
    int64_t *count = words + comm->world, *displacement = count + comm->world;
    for (int r = 0; r < comm->world; r++) count[r] = 1, displacement[r] = r;
    memcpy(&words[comm->rank], &mine, sizeof mine);
    status = comm->all_gather(comm, words, (K3Pieces){count, displacement}, K3_ELEMENT_I64);
  }
  *sum = 0;
  for (int r = 0; status == K3_OK && r < comm->world; r++) *sum += (uint64_t)words[r];
  free(words);
  return status;
}

K3Status k3_state_open(K3Comm *comm, const char *path, K3Snapshot **snapshot)
{
  uint64_t mine = 0, sum = 0;
  *snapshot = NULL;
  K3_TRY(k3_comm_agree(comm, k3_snapshot_sum(path, comm->rank, comm->world, &mine)));
  K3_TRY(share_sum(comm, mine, &sum));
  return k3_comm_agree(comm, k3_snapshot_open(path, sum, snapshot));
}

K3Status k3_state_check_type(const K3Snapshot *snapshot, const char *path, K3CacheType type)
{
  const char *stored = k3_snapshot_info(snapshot)->cache_type;
  if (type == K3_CACHE_TYPE_F32 || strcmp(stored, k3_cache_type_names[type]) == 0) return K3_OK;
  K3_FAIL(K3_ERR_INPUT, "%s holds a cache in %s, and %s would round it: leave --cache out, or give --cache %s", path,
          stored, k3_cache_type_names[type], stored);
}

K3CacheType k3_state_cache_type(const K3Snapshot *snapshot)
{
  int type = K3_CACHE_TYPE_F32;
  while (strcmp(k3_cache_type_names[type], k3_snapshot_info(snapshot)->cache_type) != 0) type++;
  return (K3CacheType)type; /* one of the names, or the snapshot would not have opened */
}

/* --- reading -------------------------------------------------------------------------------------------- */

/* 16-bit numbers at the start of `data` become float32, from the last to the first. */
static void widen(const char *type, int64_t count, char *data)
{
  int half = strcmp(type, "f16") == 0;
  for (int64_t i = count - 1; i >= 0; i--) {
    uint16_t bits;
    memcpy(&bits, data + 2 * i, sizeof bits);
    float value = half ? k3_f16_to_float(bits) : k3_bf16_to_float(bits);
    memcpy(data + 4 * i, &value, sizeof value);
  }
}

/* This rank's pages of [from, to), at their rows. */
static K3Status read_pages(const K3StateOwner *owner, K3Snapshot *snapshot, int64_t index, int64_t from, int64_t to,
                           int64_t row, char *own)
{
  const K3Plan *plan = owner->plan;
  int64_t first = k3_plan_cache_rows(plan, owner->comm->rank, from);
  int64_t step = plan->cache_band == K3_CACHE_NONE ? to - from : plan->page_positions;
  for (int64_t t = from; t < to; t += step) {
    int rank = k3_plan_cache_owner(plan, t);
    if (rank >= 0 && rank != owner->comm->rank) continue;
    K3_TRY(k3_snapshot_read_cache(snapshot, index, t, min64(step, to - t),
                                  own + (k3_plan_cache_row(plan, t) - first) * row));
  }
  return K3_OK;
}

static K3Status read_cache(const K3StateOwner *owner, K3Snapshot *snapshot, char *own, int64_t layer, int64_t index)
{
  const K3SnapshotInfo *info = k3_snapshot_info(snapshot);
  int64_t window = window_positions(owner), position = k3_snapshot_position(info),
          width = k3_config_cache_width(owner->config);
  int64_t stored = k3_snapshot_cache_bytes(info->cache_type), kept = k3_cache_type_bytes(owner->backend->cache_type);
  for (int64_t from = 0; from < position; from += window) {
    int64_t to = min64(from + window, position);
    K3StateBand band = {
        .part = K3_STATE_CACHE, .layer = layer, .begin = k3_plan_cache_rows(owner->plan, owner->comm->rank, from)};
    band.count = k3_plan_cache_rows(owner->plan, owner->comm->rank, to) - band.begin;
    K3_TRY(read_pages(owner, snapshot, index, from, to, width * stored, own));
    if (stored < kept) widen(info->cache_type, band.count * width, own);
    K3_TRY(owner->backend->restore(owner->backend, &band, own));
  }
  return K3_OK;
}

static K3Status read_kda(const K3StateOwner *owner, K3Snapshot *snapshot, char *own, int64_t layer, int64_t index)
{
  K3Range heads = k3_plan_range(owner->plan, owner->comm->rank, K3_SHARE_KDA_HEADS);
  int64_t D = owner->config->kda_head_dim;
  K3StateBand band = {.part = K3_STATE_KDA, .layer = layer};
  K3_TRY(k3_snapshot_read_kda(snapshot, index, heads.begin, heads.end - heads.begin, (float *)own));
  if (!K3_BROKEN("restore_no_kda")) K3_TRY(owner->backend->restore(owner->backend, &band, own));
  band.part = K3_STATE_CONV;
  K3_TRY(k3_snapshot_read_conv(snapshot, index, heads.begin * D, (heads.end - heads.begin) * D, (float *)own));
  return K3_BROKEN("restore_no_conv") ? K3_OK : owner->backend->restore(owner->backend, &band, own);
}

static K3Status read_layers(const K3StateOwner *owner, K3Snapshot *snapshot, char *own)
{
  int64_t index[2] = {0, 0};
  for (int64_t i = 0; i < owner->config->num_layers; i++) {
    int type = owner->config->layer_types[i];
    K3_TRY((type == K3_LAYER_MLA ? read_cache : read_kda)(owner, snapshot, own, i, index[type]++));
  }
  return owner->backend->resume_at(owner->backend, k3_snapshot_position(k3_snapshot_info(snapshot)));
}

K3Status k3_state_read(const K3StateOwner *owner, K3Snapshot *snapshot)
{
  Buffers buffers = {0};
  K3Status status = open_buffers(owner, 0, &buffers);
  if (status == K3_OK) status = read_layers(owner, snapshot, buffers.own);
  close_buffers(&buffers);
  return k3_comm_agree(owner->comm, status);
}
