/* Model files: what is written is read back band by band, and each kind of bad file is refused with a sentence.
 * Everything runs in one process: a band of each rank of a world is read in turn. Fresh seeds, printed. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <fcntl.h>
#include <hdf5.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include "base/float16.h"
#include "commands/commands.h"
#include "plan/plan.h"
#include "plan/synth_recipe.h"
#include "store/hdf5_error.h"
#include "store/content_digest.h"
#include "store/model_writer.h"
#include "store/row_ranges.h"
#include "store/source.h"

/* Small sizes whose rows are whole blocks; 3 layers: KDA with dense FFN, KDA with MoE, MLA with MoE. */
#define SIZES                                                                                            \
  "tiny:num_layers=3,hidden_size=64,num_heads=4,q_lora_rank=32,latent_size=64,moe_intermediate_size=64," \
  "num_experts=5,num_experts_per_token=2,dense_intermediate_size=96,vocab_size=101"

static char folder[64];
static char model_path[128], other_path[128], shard_path[128];
static unsigned seed;

/* ---------------------------------------------------------------- helpers */

static void write_source(K3Source *source, const char *path, const char *skip)
{
  K3ModelWriter *writer = NULL;
  unlink(path); /* what a test damaged is no model file, and would not be replaced */
  assert_int_equal(k3_model_writer_create(path, &source->config, "test_store", 1, &writer), K3_OK);
  for (int64_t i = 0; i < source->table.count; i++) {
    const K3TensorSpec *spec = &source->table.specs[i];
    K3Band all = {{0, 0, 0}, {spec->shape[0], spec->shape[1], spec->shape[2]}};
    void *data = malloc((size_t)k3_source_band_bytes(source, i, &all));
    int64_t rows = spec->rank == 3 ? spec->shape[0] * spec->shape[1] : spec->shape[0];
    assert_non_null(data);
    assert_int_equal(source->read(source, i, &all, data), K3_OK);
    assert_int_equal(k3_model_writer_tensor(writer, spec, source->types[i]), K3_OK);
    if (!skip || strcmp(skip, spec->path) != 0) {
      /* The later part first: order does not matter. */
      int64_t row_bytes = k3_source_band_bytes(source, i, &all) / rows, half = rows / 2;
      assert_int_equal(
          k3_model_writer_rows(writer, spec, source->types[i], half, rows - half, (char *)data + half * row_bytes),
          K3_OK);
      assert_int_equal(k3_model_writer_rows(writer, spec, source->types[i], 0, half, data), K3_OK);
    }
    free(data);
  }
  K3Status status = k3_model_writer_finish(writer, &source->table);
  k3_model_writer_close(writer);
  assert_int_equal(status, skip ? K3_ERR_INPUT : K3_OK);
}

static void write_model(const char *overrides)
{
  char recipe[512];
  K3Source *source = NULL;
  snprintf(recipe, sizeof recipe, "synth:%s,seed=%u%s", SIZES, seed, overrides);
  assert_int_equal(k3_source_open(recipe, &source), K3_OK);
  write_source(source, model_path, NULL);
  source->close(source);
}

/* Opens model_path and wants a refusal whose message holds the file and all the phrases (NULL ends them). */
static void expect_refusal(const char *phrase, ...)
{
  K3Source *source = NULL;
  k3_status_clear();
  K3Status status = k3_model_file_open(model_path, &source);
  va_list phrases;
  va_start(phrases, phrase);
  if (status != K3_ERR_INPUT || source) fail_msg("status %d, wanted a refusal with \"%s\"", (int)status, phrase);
  if (!strstr(k3_status_message(), model_path)) fail_msg("no file name in: %s", k3_status_message());
  for (; phrase; phrase = va_arg(phrases, const char *))
    if (!strstr(k3_status_message(), phrase)) fail_msg("no \"%s\" in: %s", phrase, k3_status_message());
  va_end(phrases);
  k3_status_clear();
}

static void expect_sound(void)
{
  K3Source *source = NULL;
  if (k3_model_file_open(model_path, &source) != K3_OK) fail_msg("refused: %s", k3_status_message());
  source->close(source);
}

static hid_t edit(void)
{
  hid_t file = H5Fopen(model_path, H5F_ACC_RDWR, H5P_DEFAULT);
  assert_true(file >= 0);
  return file;
}

static void put_attribute(hid_t file, const char *object, const char *name, hid_t type, const void *value,
                          hsize_t count)
{
  hid_t place = H5Oopen(file, object, H5P_DEFAULT),
        space = count ? H5Screate_simple(1, &count, NULL) : H5Screate(H5S_SCALAR);
  assert_true(place >= 0);
  if (H5Aexists(place, name) > 0) assert_true(H5Adelete(place, name) >= 0);
  if (value) {
    hid_t attribute = H5Acreate2(place, name, type, space, H5P_DEFAULT, H5P_DEFAULT);
    assert_true(H5Awrite(attribute, type, value) >= 0);
    H5Aclose(attribute);
  }
  H5Sclose(space);
  H5Oclose(place);
}

static void put_text(hid_t file, const char *object, const char *name, const char *text, int variable)
{
  hid_t type = H5Tcopy(H5T_C_S1);
  H5Tset_size(type, variable ? H5T_VARIABLE : strlen(text)); /* fixed: not terminated, padded with zeros */
  if (!variable) H5Tset_strpad(type, H5T_STR_NULLPAD);
  put_attribute(file, object, name, type, variable ? (const void *)&text : (const void *)text, 0);
  H5Tclose(type);
}

/* Replaces a dataset; `chunk` 0 = contiguous; `data` NULL = never written. */
static void put_dataset(hid_t file, const char *path, hid_t type, int rank, const hsize_t *dims, hsize_t chunk,
                        const void *data)
{
  hid_t space = H5Screate_simple(rank, dims, NULL), creation = H5Pcreate(H5P_DATASET_CREATE);
  if (chunk) {
    hsize_t chunks[3] = {chunk, chunk, chunk};
    assert_true(H5Pset_chunk(creation, rank, chunks) >= 0 && H5Pset_deflate(creation, 1) >= 0);
  }
  if (H5Lexists(file, path, H5P_DEFAULT) > 0) assert_true(H5Ldelete(file, path, H5P_DEFAULT) >= 0);
  hid_t dataset = H5Dcreate2(file, path, type, space, H5P_DEFAULT, creation, H5P_DEFAULT);
  assert_true(dataset >= 0);
  if (data) assert_true(H5Dwrite(dataset, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, data) >= 0);
  H5Dclose(dataset);
  H5Pclose(creation);
  H5Sclose(space);
}

static int64_t file_size(const char *path)
{
  struct stat found;
  assert_int_equal(stat(path, &found), 0);
  return (int64_t)found.st_size;
}

/* ---------------------------------------------------------------- reading back */

/* Every band of every rank equals what k3_synth_fill makes of its rows. */
static void check_bands(K3Source *file, const char *recipe_text, int world)
{
  K3SynthRecipe recipe;
  K3Plan plan;
  K3PlanOptions options = {0};
  int64_t bytes = 0;
  assert_int_equal(k3_synth_recipe_parse(recipe_text, &recipe), K3_OK);
  if (k3_plan_make(&file->config, &file->table, file->types, world, &options, &plan) != K3_OK)
    fail_msg("%s", k3_status_message());
  for (int rank = 0; rank < world; rank++)
    for (int64_t i = 0; i < file->table.count; i++) {
      const K3TensorSpec *spec = &file->table.specs[i];
      K3Band band = k3_plan_band(&plan, rank, spec);
      int64_t size = k3_source_band_bytes(file, i, &band), last = spec->rank - 1;
      if (size == 0) continue;
      uint8_t *got = malloc((size_t)size), *want = malloc((size_t)size), *to = want;
      assert_true(got && want);
      memset(got, 0xa5, (size_t)size);
      if (file->read(file, i, &band, got) != K3_OK) fail_msg("%s", k3_status_message());
      int64_t outer = spec->rank == 3 ? band.count[0] : 1, inner = last > 0 ? band.count[last - 1] : 1;
      for (int64_t a = 0; a < outer; a++)
        for (int64_t b = 0; b < inner; b++) {
          int64_t row = last > 0 ? band.begin[last - 1] + b : 0;
          if (spec->rank == 3) row += (band.begin[0] + a) * spec->shape[1];
          k3_synth_fill(k3_synth_rule(&recipe, spec), file->types[i], row * spec->shape[last] + band.begin[last],
                        band.count[last], to);
          to += k3_format_bytes(file->types[i], band.count[last]);
        }
      if (memcmp(got, want, (size_t)size) != 0) fail_msg("world %d rank %d %s differs", world, rank, spec->path);
      bytes += size;
      free(want);
      free(got);
    }
  assert_int_equal(file->bytes_read, bytes);
  file->bytes_read = 0;
}

static void test_read_bands_of_all_ranks(void **state)
{
  (void)state;
  static const char *const types[] = {"", ",trunk=bf16,experts=bf16", ",trunk=q8_0,experts=mxfp4", ",experts=q8_0"};
  static const int worlds[] = {1, 2, 3, 4};
  for (size_t t = 0; t < sizeof types / sizeof types[0]; t++) {
    char recipe[512];
    K3Source *source = NULL;
    write_model(types[t]);
    snprintf(recipe, sizeof recipe, "%s,seed=%u%s", SIZES, seed, types[t]);
    if (k3_source_open(model_path, &source) != K3_OK) fail_msg("%s", k3_status_message());
    for (size_t w = 0; w < sizeof worlds / sizeof worlds[0]; w++) check_bands(source, recipe, worlds[w]);
    source->close(source);
  }
}

static void test_synth_source_equals_file(void **state)
{
  (void)state;
  char recipe[512];
  K3Source *source = NULL;
  static const int worlds[] = {1, 3, 4};
  snprintf(recipe, sizeof recipe, "%s,seed=%u,trunk=q8_0,experts=mxfp4", SIZES, seed);
  assert_int_equal(k3_synth_source_open(recipe, &source), K3_OK);
  for (size_t w = 0; w < sizeof worlds / sizeof worlds[0]; w++) check_bands(source, recipe, worlds[w]);
  source->close(source);
}

/* Chunked, compressed and big-endian datasets go through the library; bytes are the same. */
static void test_read_other_layouts(void **state)
{
  (void)state;
  char recipe[512];
  K3Source *source = NULL;
  write_model(",experts=mxfp4");
  snprintf(recipe, sizeof recipe, "%s,seed=%u,experts=mxfp4", SIZES, seed);
  static const char *const paths[] = {"/layers/001/o_proj", "/layers/001/input_norm", "/layers/002/experts_down",
                                      "/layers/001/experts_gate"};
  for (size_t i = 0; i < sizeof paths / sizeof paths[0]; i++) {
    hid_t file = edit(), dataset = H5Dopen2(file, paths[i], H5P_DEFAULT), type = H5Dget_type(dataset);
    hid_t space = H5Dget_space(dataset);
    hsize_t dims[3];
    int rank = H5Sget_simple_extent_dims(space, dims, NULL);
    void *data = malloc((size_t)H5Sget_simple_extent_npoints(space) * H5Tget_size(type));
    assert_true(H5Dread(dataset, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, data) >= 0);
    H5Dclose(dataset);
    put_dataset(file, paths[i], type, rank, dims, i == 1 ? 64 : 5, data);
    if (i > 1) {
      int64_t shape[3] = {(int64_t)dims[0], (int64_t)dims[1], (int64_t)dims[2] / 17 * 32};
      put_text(file, paths[i], "type", "mxfp4", 1);
      put_attribute(file, paths[i], "shape", H5T_NATIVE_INT64, shape, 3);
    }
    free(data);
    H5Sclose(space);
    H5Tclose(type);
    H5Fclose(file);
  }
  if (k3_source_open(model_path, &source) != K3_OK) fail_msg("%s", k3_status_message());
  check_bands(source, recipe, 1);
  check_bands(source, recipe, 3);
  source->close(source);
}

/* Bytes that system calls hand to this process. -1: the system does not tell. */
static int64_t bytes_read_by_process(void)
{
  long long bytes = -1;
  FILE *io = fopen("/proc/self/io", "r");
  if (!io) return -1;
  if (fscanf(io, "rchar: %lld", &bytes) != 1) bytes = -1;
  fclose(io);
  return bytes;
}

static void test_read_columns_reads_little_else(void **state)
{
  (void)state;
  K3Source *source = NULL;
  K3Plan plan;
  K3PlanOptions options = {0};
  write_model(",hidden_size=512,latent_size=512,moe_intermediate_size=512,experts=q8_0");
  assert_int_equal(k3_source_open(model_path, &source), K3_OK);
  assert_int_equal(k3_plan_make(&source->config, &source->table, source->types, 4, &options, &plan), K3_OK);
  int64_t before = bytes_read_by_process(), bands = 0;
  if (before < 0) {
    source->close(source);
    skip();
  }
  for (int rank = 0; rank < 4; rank++)
    for (int64_t i = 0; i < source->table.count; i++) {
      K3Band band = k3_plan_band(&plan, rank, &source->table.specs[i]);
      int64_t size = k3_source_band_bytes(source, i, &band);
      void *data = malloc((size_t)size + 1);
      assert_int_equal(source->read(source, i, &band, data), K3_OK);
      bands += size;
      free(data);
    }
  int64_t read = bytes_read_by_process() - before;
  print_message("# bands of 4 ranks %" PRId64 " bytes, read %" PRId64 ", file %" PRId64 "\n", bands, read,
                file_size(model_path));
  assert_true((double)read <= 1.02 * (double)bands);
  assert_true((double)read <= 1.05 * (double)file_size(model_path));
  source->close(source);
}

static void test_read_refuses_band_outside(void **state)
{
  (void)state;
  K3Source *source = NULL;
  float data[256];
  write_model("");
  assert_int_equal(k3_source_open(model_path, &source), K3_OK);
  int64_t norm = k3_tensors_find_path(&source->table, "/layers/001/input_norm");
  K3Band band = {{1, 0, 0}, {64, 1, 1}};
  assert_int_equal(source->read(source, norm, &band, data), K3_ERR_INPUT);
  assert_non_null(strstr(k3_status_message(), "/layers/001/input_norm"));
  k3_status_clear();
  source->close(source);
}

/* ---------------------------------------------------------------- digest */

static uint64_t digest_of_model(void)
{
  K3Source *source = NULL;
  if (k3_source_open(model_path, &source) != K3_OK) fail_msg("%s", k3_status_message());
  uint64_t digest = source->digest;
  source->close(source);
  return digest;
}

static void test_digest_tells_models_apart(void **state)
{
  (void)state;
  write_model("");
  uint64_t first = digest_of_model(), again = digest_of_model();
  assert_true(first == again);
  write_model("");
  again = digest_of_model();
  assert_true(first == again);
  write_model(",seed=77777777");
  assert_true(first != digest_of_model());
  write_model("");
  hid_t file = edit();
  double beta = 4.5;
  put_attribute(file, "/config", "situ_beta", H5T_NATIVE_DOUBLE, &beta, 0);
  H5Fclose(file);
  assert_true(first != digest_of_model());
}

static void test_synth_is_deterministic(void **state)
{
  (void)state;
  K3SynthRecipe recipe;
  float whole[64], part[16];
  assert_int_equal(k3_synth_recipe_parse("tiny:seed=5", &recipe), K3_OK);
  K3TensorTable table;
  assert_int_equal(k3_tensors_build(&recipe.config, &table), K3_OK);
  K3SynthRule rule = k3_synth_rule(&recipe, &table.specs[0]);
  k3_synth_fill(rule, K3_TYPE_F32, 100, 64, whole);
  k3_synth_fill(rule, K3_TYPE_F32, 132, 16, part);
  assert_memory_equal(whole + 32, part, sizeof part);
  recipe.seed = 6;
  k3_synth_fill(k3_synth_rule(&recipe, &table.specs[0]), K3_TYPE_F32, 132, 16, part);
  assert_memory_not_equal(whole + 32, part, sizeof part);
  k3_tensors_free(&table);
}

/* ---------------------------------------------------------------- recipes */

static void expect_recipe(const char *text, K3Status wanted, const char *phrase)
{
  K3SynthRecipe recipe;
  k3_status_clear();
  K3Status status = k3_synth_recipe_parse(text, &recipe);
  if (status != wanted || !strstr(k3_status_message(), phrase))
    fail_msg("%s: status %d, message \"%s\", wanted %d with \"%s\"", text, (int)status, k3_status_message(),
             (int)wanted, phrase);
  k3_status_clear();
}

static void test_recipe_words(void **state)
{
  (void)state;
  K3SynthRecipe recipe;
  assert_int_equal(k3_synth_recipe_parse("k3", &recipe), K3_OK);
  assert_int_equal(recipe.config.num_layers, 93);
  assert_int_equal(k3_config_count_layers(&recipe.config, K3_LAYER_MLA), 24);
  assert_int_equal(recipe.config.layer_types[92], K3_LAYER_MLA);
  assert_int_equal(k3_synth_recipe_parse("tiny:layer_types=0101,seed=18446744073709551615", &recipe), K3_OK);
  assert_int_equal(recipe.config.num_layers, 4);
  assert_true(recipe.seed == UINT64_MAX);
  expect_recipe("huge", K3_ERR_USAGE, "huge");
  expect_recipe("", K3_ERR_USAGE, "known: tiny, k3");
  expect_recipe("tiny:", K3_ERR_USAGE, "name=value");
  expect_recipe("tiny:num_layers", K3_ERR_USAGE, "num_layers");
  expect_recipe("tiny:layers=3", K3_ERR_USAGE, "\"layers\"");
  expect_recipe("tiny:num_layers=1.5", K3_ERR_USAGE, "num_layers=1.5");
  expect_recipe("tiny:num_layers=0x10", K3_ERR_USAGE, "num_layers=0x10");
  expect_recipe("tiny:num_layers=0", K3_ERR_INPUT, "num_layers");
  expect_recipe("tiny:num_layers=1001", K3_ERR_INPUT, "num_layers");
  expect_recipe("tiny:num_layers=-1", K3_ERR_INPUT, "num_layers");
  expect_recipe("tiny:seed=-1", K3_ERR_USAGE, "seed=-1");
  expect_recipe("tiny:trunk=q7", K3_ERR_USAGE, "trunk=q7");
  expect_recipe("tiny:layer_types=012", K3_ERR_USAGE, "layer_types=012");
  expect_recipe("tiny:num_layers=3,layer_types=01", K3_ERR_USAGE, "2 digits");
  expect_recipe("tiny:num_experts_per_token=25", K3_ERR_INPUT, "num_experts_per_token");
  K3Source *source = NULL;
  assert_int_equal(k3_source_open("synth:tiny:experts=iq1_s", &source), K3_ERR_INPUT);
  assert_non_null(strstr(k3_status_message(), "multiple of 256"));
  k3_status_clear();
}

/* ---------------------------------------------------------------- bad files */

static void test_open_truncated_file(void **state)
{
  (void)state;
  write_model("");
  int64_t size = file_size(model_path);
  const int64_t cuts[] = {1, 4096, size / 2, size - 100};
  for (size_t i = 0; i < sizeof cuts / sizeof cuts[0]; i++) {
    char stored[32], real[32];
    write_model("");
    assert_int_equal(truncate(model_path, size - cuts[i]), 0);
    snprintf(stored, sizeof stored, "byte %" PRId64, size);
    snprintf(real, sizeof real, "%" PRId64 " bytes", size - cuts[i]);
    expect_refusal("truncated", stored, real, NULL);
  }
  assert_int_equal(truncate(model_path, 0), 0);
  expect_refusal("empty", NULL);
  assert_int_equal(truncate(model_path, 100000), 0);
  expect_refusal("no HDF5 file", NULL);
  unlink(model_path);
  expect_refusal("No such file", NULL);
}

static void test_read_file_cut_while_open(void **state)
{
  (void)state;
  K3Source *source = NULL;
  write_model("");
  assert_int_equal(k3_source_open(model_path, &source), K3_OK);
  int64_t last = source->table.count - 1;
  const K3TensorSpec *spec = &source->table.specs[last];
  K3Band band = {{0, 0, 0}, {spec->shape[0], spec->shape[1], spec->shape[2]}};
  void *data = malloc((size_t)k3_source_band_bytes(source, last, &band));
  assert_int_equal(truncate(model_path, file_size(model_path) - 8192), 0);
  assert_int_equal(source->read(source, last, &band, data), K3_ERR_INPUT);
  if (!strstr(k3_status_message(), "truncated") && !strstr(k3_status_message(), spec->path))
    fail_msg("%s", k3_status_message());
  k3_status_clear();
  free(data);
  source->close(source);
}

static void test_open_wrong_root(void **state)
{
  (void)state;
  int64_t two = 2;
  int8_t one = 1;
  write_model("");
  hid_t file = edit();
  put_text(file, "/", "format", "k3decode-model", 0);
  put_text(file, "/", "architecture", "kimi-k3", 1);
  put_attribute(file, "/", "format_version", H5T_NATIVE_INT8, &one, 0);
  H5Fclose(file);
  expect_sound(); /* fixed and variable texts, an integer of any width */
  file = edit();
  put_text(file, "/", "format", "k3decode-run", 1);
  H5Fclose(file);
  expect_refusal("format", "\"k3decode-run\"", "\"k3decode-model\"", NULL);
  write_model("");
  file = edit();
  put_attribute(file, "/", "format_version", H5T_NATIVE_INT64, &two, 0);
  H5Fclose(file);
  expect_refusal("format_version = 2", "wanted 1", NULL);
  write_model("");
  file = edit();
  put_text(file, "/", "architecture", "kimi-linear", 1);
  H5Fclose(file);
  expect_refusal("kimi-linear", "kimi-k3", NULL);
  file = edit();
  put_attribute(file, "/", "architecture", 0, NULL, 0);
  H5Fclose(file);
  expect_refusal("architecture is missing", NULL);
}

static void test_open_each_field_missing(void **state)
{
  (void)state;
  for (int i = 0; i < k3_config_field_count; i++) {
    char phrase[80];
    write_model("");
    hid_t file = edit();
    put_attribute(file, "/config", k3_config_fields[i].name, 0, NULL, 0);
    H5Fclose(file);
    snprintf(phrase, sizeof phrase, "field %s is missing", k3_config_fields[i].name);
    expect_refusal(phrase, NULL);
  }
}

static void test_open_wrong_field(void **state)
{
  (void)state;
  double real = 64;
  float single = 4;
  int16_t narrow = 64;
  int64_t negative = -64;
  uint8_t two = 2, types[4] = {0, 1, 0, 1}, bad_types[3] = {0, 9, 0};
  hsize_t four = 4, three = 3;
  write_model("");
  hid_t file = edit();
  put_attribute(file, "/config", "situ_beta", H5T_NATIVE_FLOAT, &single, 0);
  put_attribute(file, "/config", "hidden_size", H5T_NATIVE_INT16, &narrow, 0);
  H5Fclose(file);
  expect_sound();
  struct {
    const char *name, *phrase;
    hid_t type;
    const void *value;
  } cases[] = {
      {"hidden_size", "hidden_size is a float, wanted an integer", H5T_NATIVE_DOUBLE, &real},
      {"hidden_size", "hidden_size = -64", H5T_NATIVE_INT64, &negative},
      {"situ_beta", "situ_beta is an integer, wanted a float", H5T_NATIVE_INT64, &negative},
      {"renormalize", "renormalize = 2", H5T_NATIVE_UINT8, &two},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    write_model("");
    file = edit();
    put_attribute(file, "/config", cases[i].name, cases[i].type, cases[i].value, 0);
    H5Fclose(file);
    expect_refusal(cases[i].phrase, NULL);
  }
  write_model("");
  file = edit();
  put_dataset(file, "/config/layer_types", H5T_NATIVE_UINT8, 1, &four, 0, types);
  H5Fclose(file);
  expect_refusal("layer_types holds 4 values", "num_layers = 3", NULL);
  file = edit();
  put_dataset(file, "/config/layer_types", H5T_NATIVE_UINT8, 1, &three, 0, bad_types);
  H5Fclose(file);
  expect_refusal("layer_types[1] = 9", NULL);
  file = edit();
  H5Ldelete(file, "/config/layer_types", H5P_DEFAULT);
  H5Fclose(file);
  expect_refusal("/config/layer_types is missing", NULL);
}

static void test_open_wrong_tensor(void **state)
{
  (void)state;
  float floats[64] = {0};
  double doubles[64] = {0};
  uint8_t bytes[68] = {0};
  hsize_t short_dims = 63, dims = 64, byte_dims = 68;
  int64_t logical[2] = {64, 32};
  hid_t file;

  write_model("");
  file = edit();
  H5Ldelete(file, "/layers/001/k_proj", H5P_DEFAULT);
  H5Fclose(file);
  expect_refusal("/layers/001/k_proj is missing", "[128, 64]", NULL);

  write_model("");
  file = edit();
  H5Ldelete(file, "/layers/001", H5P_DEFAULT);
  H5Fclose(file);
  expect_refusal("there is no /layers/001", NULL);

  write_model("");
  file = edit();
  put_dataset(file, "/layers/001/input_norm", H5T_IEEE_F32LE, 1, &short_dims, 0, floats);
  H5Fclose(file);
  expect_refusal("/layers/001/input_norm", "shape [63], wanted [64]", NULL);

  file = edit();
  put_dataset(file, "/layers/001/input_norm", H5T_NATIVE_DOUBLE, 1, &dims, 0, doubles);
  H5Fclose(file);
  expect_refusal("/layers/001/input_norm", "a float of 8 bytes", "wanted float32", NULL);

  file = edit();
  put_dataset(file, "/layers/001/input_norm", H5T_NATIVE_UINT8, 1, &byte_dims, 0, bytes);
  put_text(file, "/layers/001/input_norm", "type", "q8_0", 1);
  H5Fclose(file);
  expect_refusal("/layers/001/input_norm", "only matrices may be quantised", NULL);

  file = edit();
  put_dataset(file, "/layers/001/input_norm", H5T_IEEE_F32LE, 1, &dims, 0, NULL);
  H5Fclose(file);
  expect_refusal("/layers/001/input_norm was created but never written", NULL);

  write_model(",trunk=q8_0");
  file = edit();
  put_text(file, "/layers/001/q_proj", "type", "q9_9", 0);
  H5Fclose(file);
  expect_refusal("/layers/001/q_proj", "\"q9_9\"", NULL);

  write_model(",trunk=q8_0");
  file = edit();
  put_attribute(file, "/layers/001/q_proj", "shape", H5T_NATIVE_INT64, logical, 2);
  H5Fclose(file);
  expect_refusal("/layers/001/q_proj", "shape = [64, 32], wanted [128, 64]", NULL);

  file = edit();
  put_attribute(file, "/layers/001/q_proj", "shape", 0, NULL, 0);
  H5Fclose(file);
  expect_refusal("/layers/001/q_proj", "attribute shape is missing", NULL);

  write_model("");
  file = edit();
  put_dataset(file, "/layers/001/bogus", H5T_IEEE_F32LE, 1, &dims, 0, floats);
  H5Fclose(file);
  expect_refusal("/layers/001/bogus is surplus", NULL);

  write_model("");
  file = edit();
  H5Gclose(H5Gcreate2(file, "/layers/003", H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT));
  H5Fclose(file);
  expect_refusal("/layers/003 is surplus", NULL);

  write_model("");
  file = edit();
  H5Gclose(H5Gcreate2(file, "/notes", H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT));
  put_dataset(file, "/notes/any", H5T_IEEE_F32LE, 1, &dims, 0, floats);
  H5Fclose(file);
  expect_sound();
}

static void test_open_external_link(void **state)
{
  (void)state;
  char recipe[512];
  K3Source *source = NULL;
  write_model("");
  hid_t file = edit(), shard = H5Fcreate(shard_path, H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT);
  assert_true(H5Ocopy(file, "/layers/001", shard, "part", H5P_DEFAULT, H5P_DEFAULT) >= 0);
  H5Fclose(shard);
  H5Ldelete(file, "/layers/001", H5P_DEFAULT);
  assert_true(H5Lcreate_external("shard.h5", "/part", file, "/layers/001", H5P_DEFAULT, H5P_DEFAULT) >= 0);
  H5Fclose(file);
  snprintf(recipe, sizeof recipe, "%s,seed=%u", SIZES, seed);
  if (k3_source_open(model_path, &source) != K3_OK) fail_msg("%s", k3_status_message());
  check_bands(source, recipe, 1);
  check_bands(source, recipe, 3);
  source->close(source);
  assert_int_equal(truncate(shard_path, file_size(shard_path) - 1), 0);
  expect_refusal("/layers/001", "shard.h5", "truncated", NULL);
  unlink(shard_path);
  expect_refusal("/layers/001", "shard.h5", "No such file", NULL);
}

static void test_open_virtual_dataset(void **state)
{
  (void)state;
  char recipe[512];
  hsize_t dims[2] = {128, 64}, half[2] = {64, 64}, begin[2] = {0, 0};
  K3Source *source = NULL;
  float *data = malloc(128 * 64 * sizeof *data);
  write_model("");
  hid_t file = edit(), shard = H5Fcreate(shard_path, H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT);
  hid_t dataset = H5Dopen2(file, "/layers/001/q_proj", H5P_DEFAULT);
  assert_true(H5Dread(dataset, H5T_NATIVE_FLOAT, H5S_ALL, H5S_ALL, H5P_DEFAULT, data) >= 0);
  H5Dclose(dataset);
  put_dataset(shard, "a", H5T_IEEE_F32LE, 2, half, 0, data);
  put_dataset(shard, "b", H5T_IEEE_F32LE, 2, half, 0, data + 64 * 64);
  H5Fclose(shard);
  hid_t space = H5Screate_simple(2, dims, NULL), part = H5Screate_simple(2, half, NULL);
  hid_t creation = H5Pcreate(H5P_DATASET_CREATE);
  for (int i = 0; i < 2; i++) {
    begin[0] = (hsize_t)i * 64;
    H5Sselect_hyperslab(space, H5S_SELECT_SET, begin, NULL, half, NULL);
    assert_true(H5Pset_virtual(creation, space, "shard.h5", i ? "b" : "a", part) >= 0);
  }
  H5Ldelete(file, "/layers/001/q_proj", H5P_DEFAULT);
  dataset = H5Dcreate2(file, "/layers/001/q_proj", H5T_IEEE_F32LE, space, H5P_DEFAULT, creation, H5P_DEFAULT);
  assert_true(dataset >= 0);
  H5Dclose(dataset);
  H5Pclose(creation);
  H5Sclose(part);
  H5Sclose(space);
  H5Fclose(file);
  snprintf(recipe, sizeof recipe, "%s,seed=%u", SIZES, seed);
  if (k3_source_open(model_path, &source) != K3_OK) fail_msg("%s", k3_status_message());
  check_bands(source, recipe, 1);
  check_bands(source, recipe, 3);
  source->close(source);
  shard = H5Fopen(shard_path, H5F_ACC_RDWR, H5P_DEFAULT);
  H5Ldelete(shard, "b", H5P_DEFAULT);
  H5Fclose(shard);
  expect_refusal("/layers/001/q_proj", "dataset b in file shard.h5", NULL);
  unlink(shard_path);
  expect_refusal("/layers/001/q_proj", "shard.h5", "No such file", NULL);
  free(data);
}

/* Other readers are welcome, a writer is not. Locks are per open file: this process can play the other. */
static void test_open_file_held_by_another(void **state)
{
  (void)state;
  write_model("");
  int descriptor = open(model_path, O_RDONLY);
  assert_int_equal(flock(descriptor, LOCK_SH), 0);
  expect_sound();
  assert_int_equal(flock(descriptor, LOCK_EX), 0);
  expect_refusal("locked", "HDF5_USE_FILE_LOCKING=FALSE", NULL);
  close(descriptor);
  expect_sound();
}

static void test_open_iq1_s_without_codebook(void **state)
{
  (void)state;
  K3Source *source = NULL;
  write_model("");
  assert_int_equal(k3_source_open(model_path, &source), K3_OK);
  void *data = NULL;
  size_t bytes = 0;
  assert_int_equal(source->codebook(source, "iq1_s", &data, &bytes), K3_ERR_INPUT);
  assert_non_null(strstr(k3_status_message(), "/codebooks/iq1_s"));
  k3_status_clear();
  source->close(source);
}

/* ---------------------------------------------------------------- the writer */

static void test_writer_refuses_existing_file(void **state)
{
  (void)state;
  K3Source *source = NULL;
  K3ModelWriter *writer = NULL;
  write_model("");
  assert_int_equal(k3_source_open("synth:" SIZES, &source), K3_OK);
  assert_int_equal(k3_model_writer_create(model_path, &source->config, "", 0, &writer), K3_ERR_INPUT);
  assert_non_null(strstr(k3_status_message(), "exists; give another path, or --overwrite"));
  k3_status_clear();
  expect_sound();
  assert_int_equal(k3_model_writer_create("/nonexistent-folder/m.h5", &source->config, "", 0, &writer), K3_ERR_INPUT);
  assert_non_null(strstr(k3_status_message(), "/nonexistent-folder/m.h5"));
  k3_status_clear();
  source->close(source);
}

static void test_writer_refuses_unwritten_tensor(void **state)
{
  (void)state;
  char partial[160];
  K3Source *source = NULL;
  assert_int_equal(k3_source_open("synth:" SIZES, &source), K3_OK);
  write_source(source, other_path, "/layers/001/o_proj");
  assert_non_null(strstr(k3_status_message(), "/layers/001/o_proj: 0 of 64 rows"));
  k3_status_clear();
  snprintf(partial, sizeof partial, "%s.partial", other_path);
  assert_int_not_equal(access(other_path, F_OK), 0);
  assert_int_not_equal(access(partial, F_OK), 0);
  source->close(source);
}

static void test_writer_two_at_once_and_leftovers(void **state)
{
  (void)state;
  char partial[160];
  K3Source *source = NULL;
  K3ModelWriter *first = NULL, *second = NULL;
  snprintf(partial, sizeof partial, "%s.partial", other_path);
  int descriptor = open(partial, O_CREAT | O_WRONLY, 0644); /* of a killed run */
  assert_true(descriptor >= 0);
  close(descriptor);
  assert_int_equal(k3_source_open("synth:" SIZES, &source), K3_OK);
  assert_int_equal(k3_model_writer_create(other_path, &source->config, "", 0, &first), K3_OK);
  assert_int_equal(k3_model_writer_create(other_path, &source->config, "", 0, &second), K3_ERR_INPUT);
  assert_non_null(strstr(k3_status_message(), "another process is writing"));
  k3_status_clear();
  k3_model_writer_close(first);
  assert_int_not_equal(access(partial, F_OK), 0);
  source->close(source);
}

/* A limit on the file's size stands for a full disk: both fail in the middle of a write. */
static void test_writer_out_of_space(void **state)
{
  (void)state;
  char partial[160];
  struct rlimit old, low;
  K3Source *source = NULL;
  K3ModelWriter *writer = NULL;
  static const char zeros[101 * 64 * 4];
  unlink(other_path);
  snprintf(partial, sizeof partial, "%s.partial", other_path);
  assert_int_equal(k3_source_open("synth:" SIZES, &source), K3_OK);
  const K3TensorSpec *spec = &source->table.specs[0];
  assert_int_equal(k3_model_writer_create(other_path, &source->config, "", 0, &writer), K3_OK);
  assert_int_equal(k3_model_writer_tensor(writer, spec, K3_TYPE_F32), K3_OK);
  assert_string_equal(spec->path, "/embed");
  signal(SIGXFSZ, SIG_IGN);
  assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
  low = old;
  low.rlim_cur = 10000;
  assert_int_equal(setrlimit(RLIMIT_FSIZE, &low), 0);
  K3Status status = k3_model_writer_rows(writer, spec, K3_TYPE_F32, 0, 101, zeros);
  setrlimit(RLIMIT_FSIZE, &old);
  assert_int_equal(status, K3_ERR_INPUT);
  if (!strstr(k3_status_message(), "File too large")) fail_msg("%s", k3_status_message());
  k3_status_clear();
  k3_model_writer_close(writer);
  source->close(source);
  assert_int_not_equal(access(other_path, F_OK), 0);
  assert_int_not_equal(access(partial, F_OK), 0);
}

/* A limit that is known before is refused before: HDF5 would crash when the program ends under it. */
static void test_limit_on_file_size(void **state)
{
  (void)state;
  char partial[160], output[160];
  struct rlimit old, low;
  struct stat whole;
  K3Source *source = NULL;
  snprintf(output, sizeof output, "--output=%s", other_path);
  snprintf(partial, sizeof partial, "%s.partial", other_path);
  assert_int_equal(k3_source_open("synth:" SIZES, &source), K3_OK);
  int64_t room = k3_model_writer_room(&source->table, source->types);
  signal(SIGXFSZ, SIG_IGN);
  assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
  low = old;
  char *arguments[] = {"synth", SIZES, output, NULL};
  for (int i = 0; i < 2; i++) {
    low.rlim_cur = (rlim_t)(room - 1 + i);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &low), 0);
    K3Status status = k3_command_synth(3, arguments, NULL);
    setrlimit(RLIMIT_FSIZE, &old);
    assert_int_equal(status, i ? K3_OK : K3_ERR_INPUT);
    if (i == 0 && !strstr(k3_status_message(), "ulimit -f")) fail_msg("%s", k3_status_message());
    k3_status_clear();
    assert_int_equal(access(other_path, F_OK) == 0, i);
    assert_int_not_equal(access(partial, F_OK), 0);
  }
  assert_int_equal(stat(other_path, &whole), 0);
  assert_true(whole.st_size <= room);
  unlink(other_path);
  source->close(source);
}

static void test_synth_command(void **state)
{
  (void)state;
  K3Source *source = NULL;
  char *good[] = {"synth", SIZES, "--seed", "9", "-o", other_path, "--overwrite", NULL};
  assert_int_equal(k3_command_synth(7, good, NULL), K3_OK);
  assert_int_equal(k3_source_open(other_path, &source), K3_OK);
  check_bands(source, SIZES ",seed=9", 3);
  source->close(source);
  struct {
    char *arguments[6];
    int count;
    const char *phrase;
  } bad[] = {
      {{"synth", "tiny"}, 2, "--output"},
      {{"synth", "-o", other_path}, 3, "one recipe"},
      {{"synth", "tiny", "tiny", "-o", other_path}, 5, "one recipe"},
      {{"synth", "tiny", "--output"}, 3, "wants a value"},
      {{"synth", "tiny", "--fast"}, 3, "--fast"},
      {{"synth", "large", "-o", other_path}, 4, "large"},
  };
  for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
    K3Status status = k3_command_synth(bad[i].count, bad[i].arguments, NULL);
    if (status != K3_ERR_USAGE || !strstr(k3_status_message(), bad[i].phrase))
      fail_msg("case %zu: status %d, %s", i, (int)status, k3_status_message());
    k3_status_clear();
  }
}

/* ---------------------------------------------------------------- info --check */

static void poke(const char *path, hid_t type, hsize_t index, const void *value)
{
  hid_t file = edit(), dataset = H5Dopen2(file, path, H5P_DEFAULT), space = H5Dget_space(dataset);
  hsize_t dims[3], at[3], one = 1;
  int rank = H5Sget_simple_extent_dims(space, dims, NULL);
  for (int i = rank - 1; i >= 0; i--) at[i] = index % dims[i], index /= dims[i];
  hid_t memory = H5Screate_simple(1, &one, NULL);
  assert_true(H5Sselect_elements(space, H5S_SELECT_SET, 1, at) >= 0);
  assert_true(H5Dwrite(dataset, type, memory, space, H5P_DEFAULT, value) >= 0);
  H5Sclose(memory);
  H5Sclose(space);
  H5Dclose(dataset);
  H5Fclose(file);
}

static void expect_fault(const char *path, const char *what, const char *index)
{
  k3_status_clear();
  assert_int_equal(k3_command_check_model(model_path), K3_ERR_INPUT);
  if (!strstr(k3_status_message(), path) || !strstr(k3_status_message(), what) || !strstr(k3_status_message(), index))
    fail_msg("%s", k3_status_message());
  k3_status_clear();
}

static void test_check_model_finds_bad_values(void **state)
{
  (void)state;
  float nan_value = NAN, infinite = -INFINITY;
  uint16_t half_nan = 0x7fc1;
  uint8_t scale = 255, high = 0x7c;
  write_model("");
  assert_int_equal(k3_command_check_model(model_path), K3_OK);
  poke("/layers/001/o_norm", H5T_NATIVE_FLOAT, 7, &nan_value);
  expect_fault("/layers/001/o_norm", "NaN", "[7]");
  write_model("");
  poke("/layers/002/experts_up", H5T_NATIVE_FLOAT, (2 * 64 + 3) * 64 + 5, &infinite);
  expect_fault("/layers/002/experts_up", "-infinity", "[2, 3, 5]");
  write_model(",trunk=bf16,experts=mxfp4");
  assert_int_equal(k3_command_check_model(model_path), K3_OK);
  poke("/lm_head", H5T_NATIVE_UINT16, 100 * 64 + 63, &half_nan);
  expect_fault("/lm_head", "NaN", "[100, 63]");
  write_model(",experts=mxfp4");
  poke("/layers/002/experts_down", H5T_NATIVE_UINT8, (4 * 64 + 1) * 34 + 17, &scale); /* second block of the row */
  expect_fault("/layers/002/experts_down", "byte 255", "[4, 1, 32]");
  write_model(",trunk=q8_0");
  assert_int_equal(k3_command_check_model(model_path), K3_OK);
  poke("/layers/001/q_proj", H5T_NATIVE_UINT8, 68 * 9 + 35, &high); /* the high byte of the second block's d */
  expect_fault("/layers/001/q_proj", "block scale", "[9, 32]");
}

/* ---------------------------------------------------------------- */

static int open_folder(void **state)
{
  (void)state;
  seed = (unsigned)time(NULL) ^ (unsigned)getpid();
  print_message("# seed %u\n", seed);
  snprintf(folder, sizeof folder, "/tmp/k3-test-store-XXXXXX");
  if (!mkdtemp(folder)) return -1;
  snprintf(model_path, sizeof model_path, "%s/model.h5", folder);
  snprintf(other_path, sizeof other_path, "%s/other.h5", folder);
  snprintf(shard_path, sizeof shard_path, "%s/shard.h5", folder);
  k3_hdf5_silence();
  return 0;
}

static int remove_folder(void **state)
{
  (void)state;
  unlink(model_path);
  unlink(other_path);
  unlink(shard_path);
  return rmdir(folder);
}

/* Rows in any order, some of them one by one: the CRC is that of all bytes in order, and nothing may come twice. */
static void test_row_ranges_any_order(void **state)
{
  enum { ROWS = 97, BYTES = 13 };
  uint8_t data[ROWS * BYTES];
  (void)state;
  srand(seed);
  for (int i = 0; i < ROWS * BYTES; i++) data[i] = (uint8_t)rand();
  for (int trial = 0; trial < 200; trial++) {
    K3RowRanges ranges = {.rows = ROWS, .row_bytes = BYTES};
    int cut[ROWS + 1], order[ROWS], pieces = 0;
    for (int row = 0; row < ROWS; row++)
      if (row == 0 || rand() % 4 == 0) cut[pieces++] = row;
    cut[pieces] = ROWS;
    for (int i = 0; i < pieces; i++) order[i] = i;
    for (int i = pieces - 1; i > 0; i--) {
      int other = rand() % (i + 1), kept = order[i];
      order[i] = order[other];
      order[other] = kept;
    }
    for (int i = 0; i < pieces; i++) {
      int begin = cut[order[i]], end = cut[order[i] + 1];
      uint32_t crc = k3_content_crc(0, data + begin * BYTES, (end - begin) * BYTES);
      assert_int_equal(k3_row_ranges_whole(&ranges), 0);
      assert_int_equal(k3_row_ranges_add(&ranges, "file", "/embed", begin, end, crc), K3_OK);
      assert_int_equal(k3_row_ranges_add(&ranges, "file", "/embed", begin, end, crc), K3_ERR_INPUT);
      k3_status_clear();
    }
    assert_int_equal(k3_row_ranges_whole(&ranges), 1);
    assert_int_equal(k3_row_ranges_count(&ranges), ROWS);
    assert_int_equal(ranges.ranges[0].crc, k3_content_crc(0, data, ROWS * BYTES));
    assert_int_equal(k3_row_ranges_add(&ranges, "file", "/embed", ROWS, ROWS + 1, 0), K3_ERR_INPUT);
    k3_row_ranges_free(&ranges);
    k3_status_clear();
  }
}

int main(void)
{
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_read_bands_of_all_ranks),
      cmocka_unit_test(test_synth_source_equals_file),
      cmocka_unit_test(test_read_other_layouts),
      cmocka_unit_test(test_read_columns_reads_little_else),
      cmocka_unit_test(test_read_refuses_band_outside),
      cmocka_unit_test(test_digest_tells_models_apart),
      cmocka_unit_test(test_synth_is_deterministic),
      cmocka_unit_test(test_recipe_words),
      cmocka_unit_test(test_open_truncated_file),
      cmocka_unit_test(test_read_file_cut_while_open),
      cmocka_unit_test(test_open_wrong_root),
      cmocka_unit_test(test_open_each_field_missing),
      cmocka_unit_test(test_open_wrong_field),
      cmocka_unit_test(test_open_wrong_tensor),
      cmocka_unit_test(test_open_external_link),
      cmocka_unit_test(test_open_virtual_dataset),
      cmocka_unit_test(test_open_file_held_by_another),
      cmocka_unit_test(test_open_iq1_s_without_codebook),
      cmocka_unit_test(test_writer_refuses_existing_file),
      cmocka_unit_test(test_writer_refuses_unwritten_tensor),
      cmocka_unit_test(test_writer_two_at_once_and_leftovers),
      cmocka_unit_test(test_writer_out_of_space),
      cmocka_unit_test(test_limit_on_file_size),
      cmocka_unit_test(test_row_ranges_any_order),
      cmocka_unit_test(test_synth_command),
      cmocka_unit_test(test_check_model_finds_bad_values),
  };
  return cmocka_run_group_tests(tests, open_folder, remove_folder);
}
