/* Files that appear whole. See partial_file.h. Layer: store. */
#include "store/partial_file.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "store/hdf5_attribute.h"
#include "store/hdf5_error.h"
#include "store/run_reader.h"

/* ---------------------------------------------------------------- the path */

/* Is the file at `path` one of ours? */
static int has_format(const char *path, const char *wanted)
{
  char format[64] = "";
  k3_hdf5_silence();
  hid_t file = H5Fopen(path, H5F_ACC_RDONLY, H5P_DEFAULT);
  if (file < 0) return 0;
  if (H5Aexists(file, "format") > 0 && k3_hdf5_read_text(path, file, "/", "format", format, sizeof format) != K3_OK)
    k3_status_clear();
  H5Fclose(file);
  return strcmp(format, wanted) == 0;
}

/* Could a killed k3decode have left this PATH.partial? Killed early, it leaves a beginning that is not written yet. */
static int is_leftover(const char *partial)
{
  static const char zero[8];
  char head[sizeof zero] = "";
  K3FileKind kind = k3_run_reader_recognise(partial);
  if (kind != K3_FILE_NOT_HDF5) return kind != K3_FILE_FOREIGN;
  int descriptor = open(partial, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  int unwritten = descriptor >= 0 && pread(descriptor, head, sizeof head, 0) >= 0 && memcmp(head, zero, sizeof head) == 0;
  if (descriptor >= 0) close(descriptor);
  return unwritten;
}

static K3Status check_leftover(const char *partial)
{
  int there = access(partial, F_OK) == 0;
  if (!there && errno != ENOENT && errno != ENOTDIR)
    K3_FAIL(K3_ERR_INPUT, "%s cannot be written: %s", partial, K3_ERRNO_REASON(errno));
  if (there && !is_leftover(partial))
    K3_FAIL(K3_ERR_INPUT, "%s is in the way, and k3decode did not make it; move it or choose another output", partial);
  return K3_OK;
}

K3Status k3_partial_check(const char *path, int overwrite, const char *format, const char *kind)
{
  struct stat info;
  char folder[PATH_MAX], partial[PATH_MAX];
  if (path[0] == '\0') K3_FAIL(K3_ERR_INPUT, "output: the path is empty");
  if (strlen(path) + sizeof ".partial" > sizeof folder)
    K3_FAIL(K3_ERR_INPUT, "output: a path of %zu bytes is too long", strlen(path));
  if (stat(path, &info) == 0) {
    if (S_ISDIR(info.st_mode)) K3_FAIL(K3_ERR_INPUT, "output %s is a directory; give the path of a file in it", path);
    if (!S_ISREG(info.st_mode)) K3_FAIL(K3_ERR_INPUT, "output %s is not a regular file; give another path", path);
    if (!overwrite) K3_FAIL(K3_ERR_INPUT, "output %s exists; give another path, or --overwrite", path);
    if (info.st_size > 0 && !has_format(path, format))
      K3_FAIL(K3_ERR_INPUT,
              "output %s is not a %s, and k3decode replaces nothing else here; give another path or remove it", path,
              kind);
  }
  strcpy(folder, path);
  char *slash = strrchr(folder, '/');
  if (!slash) strcpy(folder, ".");
  else slash[slash == folder] = '\0';
  if (stat(folder, &info) != 0 || !S_ISDIR(info.st_mode))
    K3_FAIL(K3_ERR_INPUT, "output %s: no such directory; make it first", path);
  if (access(folder, W_OK | X_OK) != 0) K3_FAIL(K3_ERR_INPUT, "output %s cannot be written: %s", path, strerror(errno));
  snprintf(partial, sizeof partial, "%s.partial", path);
  return check_leftover(partial);
}

/* ---------------------------------------------------------------- making it */

K3Status k3_partial_remove_leftover(const char *partial)
{
  K3_TRY(check_leftover(partial));
  int descriptor = open(partial, O_RDWR | O_CLOEXEC);
  if (descriptor < 0) {
    if (errno == ENOENT || errno == ENOTDIR) return K3_OK; /* making the file will say what is wrong */
    K3_FAIL(K3_ERR_INPUT, "%s: left by another run and cannot be opened: %s", partial, K3_ERRNO_REASON(errno));
  }
  int locked = flock(descriptor, LOCK_EX | LOCK_NB), error = errno;
  if (locked == 0) locked = unlink(partial), error = errno;
  close(descriptor);
  if (locked == 0) return K3_OK;
  if (error == EWOULDBLOCK)
    K3_FAIL(K3_ERR_INPUT, "%s: another process is writing this file; wait for it or choose another output", partial);
  K3_FAIL(K3_ERR_INPUT, "%s: left by another run and cannot be replaced (%s); remove it if nothing writes it", partial,
          strerror(error));
}

int k3_partial_descriptor(hid_t file)
{
  void *handle = NULL;
  if (H5Fget_vfd_handle(file, H5P_DEFAULT, &handle) < 0 || !handle) return -1;
  return *(int *)handle;
}

K3Status k3_partial_create(const char *partial, hid_t creation, hid_t *file)
{
  K3Status status = K3_OK;
  hid_t access = H5Pcreate(H5P_FILE_ACCESS);
  if (access < 0 || H5Pset_file_locking(access, 1, 1) < 0)
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: cannot create: %s", partial, K3_HDF5_REASON);
  *file = H5Fcreate(partial, H5F_ACC_EXCL, creation, access);
  if (*file < 0) {
    int error = k3_hdf5_errno();
    if (error == EEXIST)
      K3_FAIL_DONE(K3_ERR_INPUT, "%s: another process is writing this file; wait for it or choose another output",
                   partial);
    if (error != ENOLCK && error != ENOSYS && error != EOPNOTSUPP)
      K3_FAIL_DONE(K3_ERR_INPUT, "%s: cannot create: %s", partial, K3_HDF5_REASON);
    /* The file system knows no locks: the file was just made, exclusively, by the call that failed. */
    unlink(partial);
    if (H5Pset_file_locking(access, 0, 1) >= 0) *file = H5Fcreate(partial, H5F_ACC_EXCL, creation, access);
    if (*file < 0) K3_FAIL_DONE(K3_ERR_INPUT, "%s: cannot create: %s", partial, K3_HDF5_REASON);
  }
  /* Held even with HDF5_USE_FILE_LOCKING=FALSE, so that a second writer sees this one; without locks on the
   * file system the exclusive creation is all there is. */
  flock(k3_partial_descriptor(*file), LOCK_EX | LOCK_NB);
done:
  if (access >= 0) H5Pclose(access);
  return status;
}

K3Status k3_partial_reserve(const char *partial, int descriptor, int64_t bytes)
{
  struct rlimit limit;
  struct statvfs disk;
  int error = 0;
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && (rlim_t)bytes > limit.rlim_cur)
    error = EFBIG;
  else if (fallocate(descriptor, FALLOC_FL_KEEP_SIZE, 0, bytes) == 0) return K3_OK;
  else if (errno == ENOSPC || errno == EDQUOT || errno == EFBIG) error = errno;
  else if (fstatvfs(descriptor, &disk) == 0 && (double)disk.f_bavail * (double)disk.f_frsize < (double)bytes)
    error = ENOSPC; /* a file system that cannot reserve */
  if (error)
    K3_FAIL(K3_ERR_INPUT, "%s: no room for %.1f MB: %s", partial, (double)bytes * 1e-6, K3_ERRNO_REASON(error));
  return K3_OK;
}

/* ---------------------------------------------------------------- the end */

static K3Status sync_path(const char *path, int flags)
{
  int descriptor = open(path, O_RDONLY | O_CLOEXEC | flags);
  if (descriptor < 0) K3_FAIL(K3_ERR_INPUT, "%s: cannot open to flush: %s", path, K3_ERRNO_REASON(errno));
  int failed = fsync(descriptor), error = errno;
  close(descriptor);
  if (failed && error != EINVAL && error != EROFS) /* some file systems cannot flush a directory */
    K3_FAIL(K3_ERR_INPUT, "%s: cannot flush to disk: %s", path, K3_ERRNO_REASON(error));
  return K3_OK;
}

K3Status k3_partial_rename(const char *partial, const char *path, int overwrite)
{
  int failed;
  if (overwrite) {
    failed = rename(partial, path);
  } else { /* a file that appeared meanwhile is kept */
    failed = renameat2(AT_FDCWD, partial, AT_FDCWD, path, RENAME_NOREPLACE);
    if (failed && (errno == EINVAL || errno == ENOSYS)) {
      failed = access(path, F_OK) == 0;
      if (failed) errno = EEXIST;
      else failed = rename(partial, path);
    }
  }
  if (failed && errno == EEXIST)
    K3_FAIL(K3_ERR_INPUT, "output %s exists now: another job has made it; give another path", path);
  if (failed) K3_FAIL(K3_ERR_INPUT, "%s: cannot be renamed to %s: %s", partial, path, K3_ERRNO_REASON(errno));
  return K3_OK;
}

K3Status k3_partial_publish(const char *partial, const char *path, int overwrite)
{
  K3_TRY(sync_path(partial, 0));
  K3_TRY(k3_partial_rename(partial, path, overwrite));
  char directory[PATH_MAX];
  snprintf(directory, sizeof directory, "%s", path);
  char *slash = strrchr(directory, '/');
  if (!slash) strcpy(directory, ".");
  else slash[slash == directory] = '\0';
  return sync_path(directory, O_DIRECTORY);
}

void k3_partial_discard(hid_t file)
{
  int descriptor = k3_partial_descriptor(file);
  int nowhere = memfd_create("k3decode-discarded", MFD_CLOEXEC);
  if (descriptor >= 0 && nowhere >= 0) dup3(nowhere, descriptor, O_CLOEXEC);
  if (nowhere >= 0) close(nowhere);
}
