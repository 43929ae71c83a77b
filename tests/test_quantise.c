/* q8_0 and mxfp4 blocks as the importer makes them: edges, ties, refusals. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include <cmocka.h>
#include <math.h>
#include <string.h>

#include "base/float16.h"
#include "import/quantise.h"

static float scale_of(const uint8_t *block) { return k3_f16_to_float((uint16_t)(block[0] | block[1] << 8)); }

static void test_q8_0_random_error_within_half_step(void **state)
{
  (void)state;
  unsigned seed = (unsigned)time(NULL);
  printf("# seed %u\n", seed);
  srand(seed);
  double worst = 0.0;
  for (int trial = 0; trial < 2000; trial++) {
    float x[32];
    uint8_t block[34];
    double gain = pow(10.0, rand() % 7 - 3), largest = 0.0;
    for (int i = 0; i < 32; i++) {
      x[i] = (float)(gain * ((double)rand() / RAND_MAX * 2.0 - 1.0));
      largest = fmax(largest, fabs((double)x[i]));
    }
    assert_int_equal(k3_quantise_q8_0(x, 1, block), -1);
    /* half a step of d, and what rounding d to float16 (11 bits, subnormals 2^-24) moves at code 127 */
    double bound = largest / 127.0 * (0.5 + 1e-4) + 127.0 * fmax(largest / 127.0 * ldexp(1.0, -11), ldexp(1.0, -25));
    for (int i = 0; i < 32; i++) {
      double error = fabs((double)scale_of(block) * (int8_t)block[2 + i] - (double)x[i]);
      assert_true(error <= bound);
      worst = fmax(worst, error / bound);
    }
  }
  printf("# share of the tolerance used: %.3f\n", worst);
}

static void test_q8_0_exact_codes(void **state)
{
  (void)state;
  float x[32];
  uint8_t block[34];
  for (int i = 0; i < 32; i++) x[i] = 0.25f * (float)(i * 8 - 127);
  x[31] = 0.25f * 127.0f;
  assert_int_equal(k3_quantise_q8_0(x, 1, block), -1);
  assert_true(scale_of(block) == 0.25f);
  for (int i = 0; i < 31; i++) assert_int_equal((int8_t)block[2 + i], i * 8 - 127);
  assert_int_equal((int8_t)block[33], 127);
}

static void test_q8_0_ties_go_away_from_zero(void **state)
{
  (void)state;
  float x[32] = {127.0f, 0.5f, -0.5f, 1.5f, -1.5f, 2.5f};
  uint8_t block[34];
  assert_int_equal(k3_quantise_q8_0(x, 1, block), -1);
  const int wanted[] = {127, 1, -1, 2, -2, 3, 0};
  for (int i = 0; i < 7; i++) assert_int_equal((int8_t)block[2 + i], wanted[i]);
}

static void test_q8_0_zero_and_tiny(void **state)
{
  (void)state;
  static const float sizes[] = {0.0f, 1e-45f, 1e-38f, 1e-9f, 1e-6f};
  for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
    float x[32];
    uint8_t block[34];
    for (int i = 0; i < 32; i++) x[i] = i % 2 ? -sizes[s] : sizes[s];
    assert_int_equal(k3_quantise_q8_0(x, 1, block), -1);
    for (int i = 0; i < 32; i++) {
      float back = scale_of(block) * (float)(int8_t)block[2 + i];
      assert_true(isfinite(back) && fabsf(back) <= 127.0f * 65504.0f);
      if (sizes[s] == 0.0f) assert_int_equal(block[2 + i], 0);
    }
  }
}

static void test_q8_0_too_large_names_block(void **state)
{
  (void)state;
  float x[3 * 32] = {0};
  uint8_t blocks[3 * 34];
  x[32] = 127.0f * 65504.0f; /* fits to the bit */
  assert_int_equal(k3_quantise_q8_0(x, 3, blocks), -1);
  x[64 + 5] = 127.0f * 65600.0f;
  assert_int_equal(k3_quantise_q8_0(x, 3, blocks), 2);
  x[0] = -3e38f;
  assert_int_equal(k3_quantise_q8_0(x, 3, blocks), 0);
}

static void test_mxfp4_interleave_is_bit_for_bit(void **state)
{
  (void)state;
  uint8_t packed[4 * 16], out[4 * 17];
  const uint8_t scales[4] = {0, 127, 254, 1};
  for (int i = 0; i < 64; i++) packed[i] = (uint8_t)(i * 37 + 11);
  assert_int_equal(k3_mxfp4_interleave(packed, scales, 4, out), -1);
  for (int b = 0; b < 4; b++) {
    assert_int_equal(out[17 * b], scales[b]);
    assert_memory_equal(out + 17 * b + 1, packed + 16 * b, 16);
  }
}

static void test_mxfp4_interleave_refuses_nan_scale(void **state)
{
  (void)state;
  uint8_t packed[3 * 16] = {0}, out[3 * 17];
  const uint8_t scales[3] = {254, 255, 255};
  assert_int_equal(k3_mxfp4_interleave(packed, scales, 3, out), 1);
}

/* Neighbours share a byte, the even one in the low half: the GGUF pairing (j, j + 16) must not pass. */
static void test_mxfp4_unpack_all_codes_all_scales(void **state)
{
  (void)state;
  static const double codes[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  for (int scale = 0; scale < 255; scale++) {
    uint8_t block[17] = {(uint8_t)scale};
    float values[32];
    for (int i = 0; i < 16; i++) block[1 + i] = (uint8_t)(i | (15 - i) << 4);
    k3_mxfp4_unpack(block, 1, values);
    for (int i = 0; i < 32; i++) {
      int code = i % 2 == 0 ? i / 2 : 15 - i / 2;
      double wanted = ldexp(codes[code & 7], scale - 127) * (code & 8 ? -1.0 : 1.0);
      assert_true((double)values[i] == (double)(float)wanted && !signbit(values[i]) == !(code & 8));
    }
  }
}

int main(void)
{
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_q8_0_random_error_within_half_step),
      cmocka_unit_test(test_q8_0_exact_codes),
      cmocka_unit_test(test_q8_0_ties_go_away_from_zero),
      cmocka_unit_test(test_q8_0_zero_and_tiny),
      cmocka_unit_test(test_q8_0_too_large_names_block),
      cmocka_unit_test(test_mxfp4_interleave_is_bit_for_bit),
      cmocka_unit_test(test_mxfp4_interleave_refuses_nan_scale),
      cmocka_unit_test(test_mxfp4_unpack_all_codes_all_scales),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
