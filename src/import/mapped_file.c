/* A plain file mapped read-only. See mapped_file.h. Layer: import. */
#include "import/mapped_file.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

K3Status k3_mapped_open(const char *path, const char *what, size_t least, uint8_t **map, size_t *size)
{
  K3Status status = K3_OK;
  struct stat info;
  *map = NULL;
  *size = 0;
  int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) K3_FAIL(K3_ERR_INPUT, "%s: cannot open: %s", path, strerror(errno));
  if (fstat(fd, &info) != 0) K3_FAIL_DONE(K3_ERR_INPUT, "%s: cannot stat: %s", path, strerror(errno));
  if (!S_ISREG(info.st_mode)) K3_FAIL_DONE(K3_ERR_INPUT, "%s: no plain file", path);
  if ((uint64_t)info.st_size < least)
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: the file is too short: %lld bytes, %s has at least %zu", path,
                 (long long)info.st_size, what, least);
  void *found = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
  if (found == MAP_FAILED)
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: cannot map its %lld bytes: %s (is there a limit on address space, ulimit -v?)",
                 path, (long long)info.st_size, strerror(errno));
  *map = found;
  *size = (size_t)info.st_size;
done:
  close(fd);
  return status;
}

void k3_mapped_release(const uint8_t *data, int64_t begin, int64_t end)
{
  uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
  uintptr_t first = ((uintptr_t)data + (uintptr_t)begin) / page * page;
  uintptr_t last = ((uintptr_t)data + (uintptr_t)end) / page * page;
  if (last > first) madvise((void *)first, last - first, MADV_DONTNEED); /* advice: read again when wanted again */
}

void k3_mapped_close(uint8_t *map, size_t size)
{
  if (map) munmap(map, size);
}
