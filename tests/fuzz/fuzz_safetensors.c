/* What the readers of safetensors, their index and config.json make of any bytes. Layer: tests.
 * The first byte of an input says which file the rest is: 0 model.safetensors; 1 config.json; 2 the index, whose length stands
 * in the next two bytes, and then the shard a.safetensors. Driven by libFuzzer (tests/fuzz/fuzz.sh) or by replay.c (make check). */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/status.h"
#include "import/hf_config.h"
#include "import/safetensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static char folder[64];
static const char *const names[] = {"model.safetensors", "config.json", "model.safetensors.index.json",
                                    "a.safetensors"};

static void path_of(int name, char *path, size_t size) { snprintf(path, size, "%s/%s", folder, names[name]); }

static void remove_folder(void)
{
  char path[128];
  for (int i = 0; i < 4; i++) {
    path_of(i, path, sizeof path);
    unlink(path);
  }
  rmdir(folder);
}

static void put(int name, const uint8_t *data, size_t size)
{
  char path[128];
  path_of(name, path, sizeof path);
  FILE *file = fopen(path, "w");
  if (!file || fwrite(data, 1, size, file) != size || fclose(file) != 0) abort();
}

static void look_at_all(const K3Safetensors *safe)
{
  volatile uint8_t last = 0;
  for (int64_t i = 0; i < safe->count; i++) {
    const K3SafeTensor *tensor = &safe->tensors[i];
    char text[200];
    k3_safetensors_shape_text(tensor, text, sizeof text);
    if (tensor->bytes > 0) last = tensor->data[tensor->bytes - 1];
    if (k3_safetensors_find(safe, tensor->name) != tensor) abort();
  }
  (void)last;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
  if (size < 3) return 0;
  if (!folder[0]) {
    snprintf(folder, sizeof folder, "%s/k3fuzz.XXXXXX", access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp");
    if (!mkdtemp(folder)) abort();
    atexit(remove_folder);
  }
  for (int i = 0; i < 4; i++) {
    char path[128];
    path_of(i, path, sizeof path);
    unlink(path);
  }
  K3Status status = K3_OK;
  K3Safetensors *safe = NULL;
  K3Config config;
  int kind = data[0] % 3;
  if (kind == 0) put(0, data + 1, size - 1);
  if (kind == 1) put(1, data + 1, size - 1);
  if (kind == 2) {
    size_t length = (size_t)(data[1] | data[2] << 8), most = size - 3;
    if (length > most) length = most;
    put(2, data + 3, length);
    put(3, data + 3 + length, most - length);
  }
  if (kind == 1) status = k3_hf_config_read(folder, &config);
  else status = k3_safetensors_open(folder, &safe);
  if (status != K3_OK && (safe || !k3_status_message()[0])) abort();
  if (safe) look_at_all(safe);
  k3_safetensors_close(safe);
  k3_status_clear();
  return 0;
}
