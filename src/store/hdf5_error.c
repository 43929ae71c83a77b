/* The HDF5 error stack as one clause. See hdf5_error.h. Layer: store.
 *
 * The library keeps a system error only inside its descriptions ("…, errno = 28, error message = …"), so
 * they are searched for it. */
#include "store/hdf5_error.h"

#include <errno.h>
#include <hdf5.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
  char innermost[400]; /* description of the deepest entry */
  char external[300];  /* name of an external link's file that could not be opened */
  int error;           /* errno, 0: none */
  int lock;            /* the failing call was a lock */
  int open_for_write;  /* the file bears a writer's mark */
  int not_hdf5;
  int truncated;
  unsigned long long real_end, stored_end;
} Findings;

void k3_hdf5_silence(void)
{
  /* Takes effect only before the library's first use. At exit the library would try once more to flush files whose
   * close has failed on a full disk, and 1.10 crashes there; all that this program keeps it has closed itself. */
  H5dont_atexit();
  H5Eset_auto2(H5E_DEFAULT, NULL, NULL);
}

static herr_t look(unsigned depth, const H5E_error2_t *entry, void *context)
{
  Findings *found = context;
  const char *text = entry->desc ? entry->desc : "";
  if (depth == 0) snprintf(found->innermost, sizeof found->innermost, "%s", text);

  const char *at = strstr(text, "errno = ");
  if (at && !found->error) {
    found->error = atoi(at + 8);
    found->lock = strstr(text, "lock file") != NULL;
  }
  if (strncmp(text, "truncated file", 14) == 0) {
    found->truncated = 1;
    at = strstr(text, "eof = ");
    if (at) found->real_end = strtoull(at + 6, NULL, 10);
    at = strstr(text, "stored_eof = ");
    if (at) found->stored_end = strtoull(at + 13, NULL, 10);
  }
  if (strstr(text, "file signature not found")) found->not_hdf5 = 1;
  if (strstr(text, "already open for write")) found->open_for_write = 1;
  at = strstr(text, "external link file name = '");
  if (at) {
    at += strlen("external link file name = '");
    snprintf(found->external, sizeof found->external, "%.*s", (int)strcspn(at, "'"), at);
  }
  return 0;
}

static Findings walk(void)
{
  Findings found = {0};
  H5Ewalk2(H5E_DEFAULT, H5E_WALK_UPWARD, look, &found);
  return found;
}

int k3_hdf5_errno(void) { return walk().error; }

static const char *mend_of(int error)
{
  switch (error) {
  case ENOENT: return "; check the path and that its directory exists on this host";
  case EACCES:
  case EPERM: return "; check the permissions of the file and its directory";
  case EROFS: return "; choose a directory on a writable file system";
  case ENOSPC: return " (disk full); free space or choose another file system";
  case EDQUOT: return " (quota used up); free space or choose another file system";
  case EFBIG: return "; the file system or the limit on file size (ulimit -f) does not allow a file this large";
  case EISDIR: return "; name a file, not a directory";
  case EIO: return "; the storage reported a failure: see the system log";
  case EMFILE:
  case ENFILE: return "; raise the limit on open files (ulimit -n)";
  default: return "";
  }
}

const char *k3_errno_reason(int error, K3Hdf5Reason *reason)
{
  snprintf(reason->text, sizeof reason->text, "%s%s", strerror(error), mend_of(error));
  return reason->text;
}

const char *k3_hdf5_reason(K3Hdf5Reason *reason)
{
  Findings found = walk();
  char *text = reason->text;
  size_t size = sizeof reason->text;
  if (found.truncated)
    snprintf(text, size, "the file is truncated: it should end at byte %llu but has %llu bytes; copy or write it again",
             found.stored_end, found.real_end);
  else if (found.open_for_write)
    snprintf(text, size,
             "the file is open for writing, or its writer was killed; wait for the writer, or clear the mark with "
             "h5clear -s --increment=0");
  else if (found.lock && (found.error == EAGAIN || found.error == EACCES))
    snprintf(text, size,
             "the file is locked: another process has it open; wait for it, or set HDF5_USE_FILE_LOCKING=FALSE if the "
             "file system has no working locks");
  else if (found.lock)
    snprintf(text, size,
             "the file cannot be locked (%s); set HDF5_USE_FILE_LOCKING=FALSE if the file system has no locks",
             strerror(found.error));
  else if (found.external[0])
    snprintf(text, size, "it leads to the file '%s' by an external link, and that file cannot be opened%s%s%s",
             found.external, found.error ? ": " : "", found.error ? strerror(found.error) : "",
             found.error ? mend_of(found.error) : "; put it beside this file");
  else if (found.error) k3_errno_reason(found.error, reason);
  else if (found.not_hdf5) snprintf(text, size, "this is no HDF5 file, or its beginning is damaged");
  else snprintf(text, size, "HDF5 says: %s", found.innermost[0] ? found.innermost : "nothing");
  return text;
}
