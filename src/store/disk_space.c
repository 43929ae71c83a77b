/* Room on a disk. See disk_space.h. Layer: store. */
#include "store/disk_space.h"

#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/statvfs.h>

K3Status k3_disk_space_check(const char *output, const char *kind, int64_t bytes, const char *mend)
{
  char directory[4096];
  struct statvfs disk;
  snprintf(directory, sizeof directory, "%s", output);
  char *slash = strrchr(directory, '/');
  if (!slash) strcpy(directory, ".");
  else slash[slash == directory] = '\0';
  struct rlimit limit;
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && limit.rlim_cur < (rlim_t)bytes)
    K3_FAIL(K3_ERR_INPUT,
            "%s: the %s has up to %.6g GB, and the limit on file size (ulimit -f) is %.6g GB: raise it, or %s",
            output, kind, (double)bytes * 1e-9, (double)limit.rlim_cur * 1e-9, mend);
  if (statvfs(directory, &disk) != 0) return K3_OK; /* creating the file tells better what is wrong */
  double available = (double)disk.f_bavail * (double)disk.f_frsize;
  if (available < (double)bytes)
    K3_FAIL(K3_ERR_INPUT, "%s: the disk is too full: the %s has up to %.6g GB, %.6g GB are free in %s; %s", output, kind,
            (double)bytes * 1e-9, available * 1e-9, directory, mend);
  return K3_OK;
}
