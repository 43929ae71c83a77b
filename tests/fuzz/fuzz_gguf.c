/* What the GGUF reader makes of any bytes: an open model or a message, nothing else. Layer: tests.
 * One input is one file. All its keys and tensors are decoded, and every tensor's last byte is read. What the reader asks of
 * malloc, calloc and realloc (the linker's --wrap) must not pass the size of the file by more than its own few structs.
 * Driven by libFuzzer (tests/fuzz/fuzz.sh) or by replay.c (make check). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/status.h"
#include "import/gguf.h"
#include "import/gguf_config.h"

enum { OWN_BYTES = 4096 }; /* structs and paths */

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
void *__real_malloc(size_t bytes);
void *__real_calloc(size_t count, size_t bytes);
void *__real_realloc(void *old, size_t bytes);
void *__wrap_malloc(size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes);
void *__wrap_realloc(void *old, size_t bytes);

static int counting;
static size_t asked;

void *__wrap_malloc(size_t bytes)
{
  if (counting) asked += bytes;
  return __real_malloc(bytes);
}

void *__wrap_calloc(size_t count, size_t bytes)
{
  if (counting) asked += count * bytes;
  return __real_calloc(count, bytes);
}

void *__wrap_realloc(void *old, size_t bytes)
{
  if (counting) asked += bytes;
  return __real_realloc(old, bytes);
}

static void look_at_all(const K3Gguf *gguf)
{
  K3Config config;
  volatile uint8_t last = 0;
  k3_gguf_config_read(gguf, &config);
  for (int64_t i = 0; i < gguf->shards[0].value_count; i++) {
    K3GgufValue value;
    char key[64], text[80];
    int64_t number = 0;
    double real = 0;
    k3_gguf_file_pair(&gguf->shards[0], i, key, sizeof key, &value);
    k3_gguf_kind_text(&value, text, sizeof text);
    k3_gguf_integer(&value, value.count - 1, &number);
    k3_gguf_real(&value, value.count - 1, &real);
    if (value.bytes > 0) last = value.data[value.bytes - 1];
  }
  for (int64_t i = 0; i < gguf->count; i++) {
    K3GgufTensor tensor;
    char text[100];
    k3_gguf_tensor(gguf, &gguf->entries[i], &tensor);
    k3_gguf_shape_text(tensor.rank, tensor.shape, text, sizeof text);
    last = tensor.data[tensor.bytes - 1];
    if (k3_gguf_find(gguf, tensor.name) != &gguf->entries[i]) abort();
  }
  (void)last;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
  char path[64];
  K3Gguf *gguf = NULL;
  int file = memfd_create("fuzz", 0);
  if (file < 0 || write(file, data, size) != (ssize_t)size) abort();
  snprintf(path, sizeof path, "/proc/self/fd/%d", file);
  asked = 0;
  counting = 1;
  K3Status status = k3_gguf_open(path, &gguf);
  counting = 0;
  if (asked > size + OWN_BYTES) abort();
  if ((status == K3_OK) != (gguf != NULL) || (status != K3_OK && !k3_status_message()[0])) abort();
  if (gguf) look_at_all(gguf);
  k3_gguf_close(gguf);
  k3_status_clear();
  close(file);
  return 0;
}
