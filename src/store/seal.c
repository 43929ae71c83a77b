/* See seal.h. Layer: store. */
#include "store/seal.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "store/digest.h"
#include "store/hdf5_error.h"

enum { BLOCK_BYTES = 4 << 20, SEAL_VERSION = 1 };

static K3Status open_file(const char *path, int flags, int *descriptor)
{
  *descriptor = open(path, flags | O_CLOEXEC);
  if (*descriptor < 0) K3_FAIL(K3_ERR_INPUT, "%s: cannot open: %s", path, K3_ERRNO_REASON(errno));
  return K3_OK;
}

/* All of [offset, offset + bytes); a file that ends before is an error. */
static K3Status read_all(const char *path, int descriptor, void *data, size_t bytes, int64_t offset)
{
  for (size_t done = 0; done < bytes;) {
    ssize_t count = pread(descriptor, (char *)data + done, bytes - done, (off_t)(offset + (int64_t)done));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) K3_FAIL(K3_ERR_INPUT, "%s: cannot read: %s", path, K3_ERRNO_REASON(errno));
    if (count == 0)
      K3_FAIL(K3_ERR_INPUT, "%s: the file is truncated at byte %" PRId64 "; copy or write it again", path,
              offset + (int64_t)done);
    done += (size_t)count;
  }
  return K3_OK;
}

K3Status k3_seal_sum(const char *path, int64_t bytes, int part, int parts, uint64_t *sum)
{
  K3Status status = K3_OK;
  int descriptor;
  *sum = 0;
  K3_TRY(open_file(path, O_RDONLY, &descriptor));
  char *block = malloc(BLOCK_BYTES);
  if (!block) K3_FAIL_DONE(K3_ERR_INPUT, "%s: no memory to check it", path);
  for (int64_t index = part;; index += parts) {
    int64_t at = K3_SEAL_BYTES + index * BLOCK_BYTES, count = bytes - at < BLOCK_BYTES ? bytes - at : BLOCK_BYTES;
    if (count <= 0) break;
    K3_TRY_DONE(read_all(path, descriptor, block, (size_t)count, at));
    *sum += k3_digest_words(k3_digest_number(K3_DIGEST_START, (uint64_t)index), block, (size_t)count);
  }
done:
  free(block);
  close(descriptor);
  return status;
}

/* The seal's bytes; all of them follow from the arguments. */
static void print_seal(char text[K3_SEAL_BYTES], const char *word, K3Seal seal)
{
  memset(text, 0, K3_SEAL_BYTES);
  snprintf(text, K3_SEAL_BYTES, "%s %d\nbytes %" PRId64 "\ndigest %016" PRIx64 "\n", word, SEAL_VERSION, seal.bytes,
           seal.digest);
}

K3Status k3_seal_write(const char *path, const char *word)
{
  K3Status status = K3_OK;
  K3Seal seal;
  struct stat found;
  char text[K3_SEAL_BYTES];
  int descriptor;
  if (stat(path, &found) != 0) K3_FAIL(K3_ERR_INPUT, "%s: %s", path, K3_ERRNO_REASON(errno));
  seal.bytes = found.st_size;
  K3_TRY(k3_seal_sum(path, seal.bytes, 0, 1, &seal.digest));
  print_seal(text, word, seal);
  K3_TRY(open_file(path, O_WRONLY, &descriptor));
  if (pwrite(descriptor, text, sizeof text, 0) != (ssize_t)sizeof text)
    status =
        k3_status_fail(K3_ERR_INPUT, __FILE__, __LINE__, "%s: cannot be written: %s", path, K3_ERRNO_REASON(errno));
  if (close(descriptor) != 0 && status == K3_OK)
    K3_FAIL(K3_ERR_INPUT, "%s: cannot be written: %s", path, K3_ERRNO_REASON(errno));
  return status;
}

K3Status k3_seal_read(const char *path, const char *word, K3Seal *seal)
{
  K3Status status = K3_OK;
  struct stat found;
  char text[K3_SEAL_BYTES + 1] = "", wanted[K3_SEAL_BYTES];
  int descriptor, version = 0, used = 0;
  K3_TRY(open_file(path, O_RDONLY | O_NONBLOCK, &descriptor)); /* a FIFO must not hold us */
  if (fstat(descriptor, &found) != 0 || !S_ISREG(found.st_mode))
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: it is no plain file; name a file that k3decode run --snapshot wrote", path);
  if (found.st_size >= K3_SEAL_BYTES) K3_TRY_DONE(read_all(path, descriptor, text, K3_SEAL_BYTES, 0));
  size_t length = strlen(word);
  int named = strncmp(text, word, length) == 0 && text[length] == ' ';
  int parsed = named && sscanf(text + length, " %d bytes %" SCNd64 " digest %" SCNx64 "%n", &version, &seal->bytes,
                               &seal->digest, &used) == 3;
  if (parsed) print_seal(wanted, word, *seal);
  if (!named)
    K3_FAIL_DONE(K3_ERR_INPUT,
                 "%s: no %s, or its first bytes are damaged: name a file that k3decode run --snapshot wrote", path,
                 word);
  if (parsed && version != SEAL_VERSION)
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: a seal of version %d, wanted %d: damaged, or of another version of k3decode", path,
                 version, SEAL_VERSION);
  if (!parsed || memcmp(text, wanted, K3_SEAL_BYTES) != 0)
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: its seal (the first %d bytes) is damaged; copy or write it again", path,
                 K3_SEAL_BYTES);
  if (found.st_size != seal->bytes)
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: %s: it should have %" PRId64 " bytes and has %" PRId64 "; copy or write it again",
                 path, found.st_size < seal->bytes ? "the file is truncated" : "bytes were added", seal->bytes,
                 (int64_t)found.st_size);
done:
  close(descriptor);
  return status;
}
