/* The snapshot file: bands written in one cut and read in another; every single bit of it flipped in turn. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/status.h"
#include "store/seal.h"
#include "store/snapshot_file.h"

enum { HEADS = 4, D = 8, TAPS = 3, WIDTH = 20, POSITIONS = 11, KDA = 3, MLA = 1, TOKENS = 12 };

static char directory[] = "/tmp/k3_snapshot_XXXXXX";
static char path[256];
static const int64_t tokens[TOKENS] = {5, 4, 3, 2, 1, 0, 9, 8, 7, 6, 5, 4};

static K3SnapshotInfo info(void)
{
  K3SnapshotInfo i = {.program_version = "0.1", .model = "tiny.h5", .backend = "host", .time = "2026-01-01T00:00:00Z",
                      .activations = "f32", .cache_type = "f32", .model_digest = 0xfedcba9876543210u, .ranks = 3,
                      .fed = POSITIONS, .prompt_count = 7, .token_count = TOKENS};
  i.config = (K3Config){.num_layers = 4, .hidden_size = 64, .vocab_size = 100, .num_heads = HEADS, .q_lora_rank = 32,
                        .kv_lora_rank = 16, .qk_nope_head_dim = 16, .qk_rope_head_dim = 4, .v_head_dim = 16,
                        .kda_head_dim = D, .kda_conv_kernel = TAPS + 1, .kda_gate_lower_bound = -5.0, .num_experts = 8,
                        .num_experts_per_token = 2, .num_shared_experts = 1, .latent_size = 32,
                        .moe_intermediate_size = 32, .dense_intermediate_size = 128, .first_dense_layers = 1,
                        .attn_res_block_size = 2, .rms_norm_eps = 1e-5, .low_rank_norm_eps = 1e-6, .situ_beta = 4.0,
                        .situ_linear_beta = 25.0, .routed_scaling_factor = 1.0, .renormalize = 1, .max_context = 4096,
                        .layer_types = {0, 0, 0, 1}};
  return i;
}

/* A number that says where it stands. */
static float mark(K3StatePart part, int64_t layer, int64_t a, int64_t b, int64_t c)
{
  return (float)(((int64_t)part * 10 + layer) * 100000 + a * 1000 + b * 30) + 0.25f * (float)c;
}

static void check(K3Status status)
{
  if (status != K3_OK) fail_msg("%s", k3_status_message());
}

/* Heads [begin, end) of a layer, as one rank has them. */
static void fill_kda(int64_t layer, int64_t begin, int64_t end, float *state, float *window)
{
  for (int64_t h = begin; h < end; h++)
    for (int64_t i = 0; i < D; i++)
      for (int64_t j = 0; j < D; j++) *state++ = mark(K3_STATE_KDA, layer, h, i, j);
  for (int64_t p = 0; p < 3; p++)
    for (int64_t t = 0; t < TAPS; t++)
      for (int64_t c = begin * D; c < end * D; c++) *window++ = mark(K3_STATE_CONV, layer, p, t, c);
}

static void write_file(int64_t heads_at_once, int64_t positions_at_once)
{
  K3SnapshotInfo i = info();
  K3SnapshotWriter *writer;
  float state[HEADS * D * D], window[3 * TAPS * HEADS * D], cache[POSITIONS * WIDTH];
  check(k3_snapshot_create(path, &i, tokens, 1, &writer));
  for (int64_t layer = 0; layer < KDA; layer++)
    for (int64_t h = 0; h < HEADS; h += heads_at_once) {
      int64_t end = h + heads_at_once < HEADS ? h + heads_at_once : HEADS;
      fill_kda(layer, h, end, state, window);
      check(k3_snapshot_write_kda(writer, layer, h, end - h, state));
      check(k3_snapshot_write_conv(writer, layer, h * D, (end - h) * D, window));
    }
  for (int64_t t = 0; t < POSITIONS; t += positions_at_once) {
    int64_t count = t + positions_at_once < POSITIONS ? positions_at_once : POSITIONS - t;
    for (int64_t n = 0; n < count * WIDTH; n++) cache[n] = mark(K3_STATE_CACHE, 0, t + n / WIDTH, 0, n % WIDTH);
    check(k3_snapshot_write_cache(writer, 0, t, count, cache));
  }
  assert_int_not_equal(access(path, F_OK), 0); /* not before it is whole */
  check(k3_snapshot_finish(writer));
  k3_snapshot_writer_close(writer);
  assert_int_equal(access(path, F_OK), 0);
}

static void test_written_in_one_cut_read_in_another(void **unused)
{
  (void)unused;
  for (int64_t cut = 1; cut <= HEADS; cut++) {
    K3Snapshot *snapshot;
    uint64_t sum = 0, part;
    float state[HEADS * D * D], window[3 * TAPS * HEADS * D], want[HEADS * D * D], taps[3 * TAPS * HEADS * D];
    float cache[POSITIONS * WIDTH];
    unlink(path);
    write_file(cut, 2 * cut);
    for (int r = 0; r < 3; r++) { /* as three ranks */
      check(k3_snapshot_sum(path, r, 3, &part));
      sum += part;
    }
    check(k3_snapshot_open(path, sum, &snapshot));
    assert_int_equal(k3_snapshot_info(snapshot)->token_count, TOKENS);
    assert_int_equal(k3_snapshot_info(snapshot)->model_digest, 0xfedcba9876543210u);
    assert_memory_equal(k3_snapshot_tokens(snapshot), tokens, sizeof tokens);
    for (int64_t layer = 0; layer < KDA; layer++)
      for (int64_t h = 0; h < HEADS; h += 3) {
        int64_t end = h + 3 < HEADS ? h + 3 : HEADS;
        fill_kda(layer, h, end, want, taps);
        check(k3_snapshot_read_kda(snapshot, layer, h, end - h, state));
        check(k3_snapshot_read_conv(snapshot, layer, h * D, (end - h) * D, window));
        assert_memory_equal(state, want, (size_t)((end - h) * D * D) * 4);
        assert_memory_equal(window, taps, (size_t)(3 * TAPS * (end - h) * D) * 4);
      }
    check(k3_snapshot_read_cache(snapshot, 0, 3, POSITIONS - 3, cache));
    for (int64_t n = 0; n < (POSITIONS - 3) * WIDTH; n++)
      assert_true(cache[n] == mark(K3_STATE_CACHE, 0, 3 + n / WIDTH, 0, n % WIDTH));
    k3_snapshot_close(snapshot);
  }
}

/* Of all bits, not of some. */
static void test_every_flipped_bit_is_found(void **unused)
{
  (void)unused;
  unlink(path);
  write_file(2, 4);
  FILE *file = fopen(path, "r+b");
  assert_non_null(file);
  assert_int_equal(fseek(file, 0, SEEK_END), 0);
  long bytes = ftell(file), found = 0;
  for (long bit = 0; bit < 8 * bytes; bit++) {
    K3Seal seal;
    uint64_t sum = 0;
    for (int put = 0; put < 2; put++) { /* the wrong byte, then the right one again */
      assert_int_equal(fseek(file, bit / 8, SEEK_SET), 0);
      int byte = fgetc(file);
      assert_int_equal(fseek(file, bit / 8, SEEK_SET), 0);
      assert_int_not_equal(fputc(byte ^ 1 << bit % 8, file), EOF);
      assert_int_equal(fflush(file), 0);
      if (put == 1) break;
      K3Status status = k3_seal_read(path, K3_SNAPSHOT_FORMAT, &seal);
      if (status == K3_OK) status = k3_snapshot_sum(path, 0, 1, &sum);
      found += status != K3_OK || sum != seal.digest;
      k3_status_clear();
    }
  }
  fclose(file);
  print_message("%ld of %ld flipped bits found\n", found, 8 * bytes);
  assert_int_equal(found, 8 * bytes);
  K3Snapshot *snapshot;
  uint64_t sum;
  check(k3_snapshot_sum(path, 0, 1, &sum));
  check(k3_snapshot_open(path, sum, &snapshot)); /* whole again */
  k3_snapshot_close(snapshot);
}

/* What a kill leaves. */
static void test_unsealed_file_is_refused(void **unused)
{
  (void)unused;
  K3SnapshotInfo i = info();
  K3SnapshotWriter *writer;
  uint64_t sum;
  char partial[300];
  unlink(path);
  check(k3_snapshot_create(path, &i, tokens, 0, &writer));
  snprintf(partial, sizeof partial, "%s.partial", path);
  assert_int_equal(k3_snapshot_sum(partial, 0, 1, &sum), K3_ERR_INPUT);
  k3_status_clear();
  k3_snapshot_writer_close(writer); /* given up: nothing is left */
  assert_int_not_equal(access(partial, F_OK), 0);
  assert_int_not_equal(access(path, F_OK), 0);
}

static int set_up(void **unused)
{
  (void)unused;
  if (!mkdtemp(directory)) return -1;
  snprintf(path, sizeof path, "%s/s.h5", directory);
  return 0;
}

static int tear_down(void **unused)
{
  (void)unused;
  unlink(path);
  return rmdir(directory);
}

int main(void)
{
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_written_in_one_cut_read_in_another),
      cmocka_unit_test(test_every_flipped_bit_is_found),
      cmocka_unit_test(test_unsealed_file_is_refused),
  };
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
