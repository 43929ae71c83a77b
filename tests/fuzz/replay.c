/* Runs a fuzzing harness over the files of a folder, without libFuzzer: replay_NAME FOLDER. Layer: tests.
 * Prints how many; a harness that finds something aborts, after its file's name was printed. */
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static int replay(const char *path)
{
  static uint8_t data[1 << 20];
  FILE *file = fopen(path, "r");
  if (!file) return 0;
  size_t size = fread(data, 1, sizeof data, file);
  fclose(file);
  printf("%s, %zu bytes\n", path, size);
  fflush(stdout);
  LLVMFuzzerTestOneInput(data, size);
  return 1;
}

int main(int argc, char **argv)
{
  char path[4096];
  int count = 0;
  DIR *folder = argc == 2 ? opendir(argv[1]) : NULL;
  if (!folder) {
    fprintf(stderr, "usage: %s FOLDER\n", argv[0]);
    return 2;
  }
  for (struct dirent *item; (item = readdir(folder));) {
    if (item->d_name[0] == '.') continue;
    snprintf(path, sizeof path, "%s/%s", argv[1], item->d_name);
    count += replay(path);
  }
  closedir(folder);
  printf("%d inputs\n", count);
  return count > 0 ? 0 : 1;
}
