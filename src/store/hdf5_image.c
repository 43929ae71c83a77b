/* See hdf5_image.h. Layer: store. */
#include "store/hdf5_image.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "store/hdf5_attribute.h"
#include "store/hdf5_input.h"
#include "store/hdf5_output.h"
#include "store/partial_file.h"

/* `bytes` as PATH.partial, then under its name. */
static K3Status write_image(const char *path, const void *image, size_t bytes)
{
  char partial[PATH_MAX];
  snprintf(partial, sizeof partial, "%s.partial", path);
  K3_TRY(k3_partial_remove_leftover(partial));
  int descriptor = open(partial, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666), error = 0;
  if (descriptor < 0) K3_FAIL(K3_ERR_INPUT, "output %s cannot be written: %s", partial, K3_ERRNO_REASON(errno));
  for (size_t at = 0; at < bytes && !error;) {
    ssize_t count = write(descriptor, (const char *)image + at, bytes - at);
    if (count < 0 && errno != EINTR) error = errno;
    if (count > 0) at += (size_t)count;
  }
  if (close(descriptor) != 0 && !error) error = errno;
  K3Status status = K3_OK;
  if (error)
    status = k3_status_fail(K3_ERR_INPUT, __FILE__, __LINE__, "output %s cannot be written: %s", path,
                            K3_ERRNO_REASON(error));
  else status = k3_partial_publish(partial, path, 1);
  if (status != K3_OK) unlink(partial);
  return status;
}

K3Status k3_hdf5_write_image(const char *path, K3Hdf5Fill fill, const void *context)
{
  K3Status status = K3_OK;
  void *image = NULL;
  k3_hdf5_silence();
  hid_t access = H5Pcreate(H5P_FILE_ACCESS), file = H5I_INVALID_HID;
  if (access >= 0 && H5Pset_fapl_core(access, 1 << 20, 0) >= 0)
    file = H5Fcreate(path, H5F_ACC_TRUNC, H5P_DEFAULT, access); /* in memory: the path is a name alone */
  if (file < 0) {
    status = K3_HDF5_FAIL("output %s: no HDF5 file in memory", path);
    goto done;
  }
  K3_TRY_DONE(fill(path, file, context));
  ssize_t bytes = H5Fflush(file, H5F_SCOPE_GLOBAL) < 0 ? -1 : H5Fget_file_image(file, NULL, 0);
  if (bytes < 0 || !(image = malloc((size_t)bytes)) || H5Fget_file_image(file, image, (size_t)bytes) < 0) {
    status = K3_HDF5_FAIL("output %s: no image of the HDF5 file", path);
    goto done;
  }
  status = write_image(path, image, (size_t)bytes);
done:
  free(image);
  if (file >= 0) H5Fclose(file);
  if (access >= 0) H5Pclose(access);
  return status;
}

K3Status k3_hdf5_open_image(const char *path, const char *format, const char *what, int64_t version, hid_t *file)
{
  char found[64] = "";
  int64_t number = 0;
  K3Status status = K3_OK;
  k3_hdf5_silence();
  K3_TRY(k3_hdf5_open_input(path, file));
  K3_TRY_DONE(k3_hdf5_read_text(path, *file, "/", "format", found, sizeof found));
  if (strcmp(found, format) != 0)
    K3_FAIL_DONE(K3_ERR_INPUT, "%s is no %s file: its root attribute format is %s, wanted %s", path, what, found,
                 format);
  K3_TRY_DONE(k3_hdf5_read_number(path, *file, "/", "format_version", H5T_INTEGER, H5T_NATIVE_INT64, &number));
  if (number != version)
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: format_version %lld of a %s file; this program reads %lld: make the file again",
                 path, (long long)number, what, (long long)version);
done:
  if (status != K3_OK) H5Fclose(*file);
  return status;
}
