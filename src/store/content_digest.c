/* Checksums of a model file's content. See content_digest.h. Layer: store. */
#include "store/content_digest.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <zlib.h>

#include "store/digest.h"
#include "store/hdf5_attribute.h"
#include "store/hdf5_error.h"

enum { MAX_STEP = 1 << 30, DIGITS = 16 };

uint32_t k3_content_crc(uint32_t crc, const void *data, int64_t bytes)
{
  const uint8_t *at = data;
  for (int64_t done = 0; done < bytes; done += MAX_STEP)
    crc = (uint32_t)crc32(crc, at + done, (uInt)(bytes - done < MAX_STEP ? bytes - done : MAX_STEP));
  return crc;
}

uint32_t k3_content_join(uint32_t first, uint32_t second, int64_t bytes)
{
  return (uint32_t)crc32_combine(first, second, (z_off_t)bytes);
}

uint64_t k3_content_begin(const K3Config *config)
{
  return k3_digest_config(k3_digest_text(K3_DIGEST_START, "content"), config);
}

uint64_t k3_content_add(uint64_t digest, const K3TensorSpec *spec, K3Type type, uint32_t crc)
{
  return k3_digest_number(k3_digest_tensor(digest, spec, type), crc);
}

K3Status k3_content_put_crc(const char *path, hid_t file, const char *dataset, uint32_t crc)
{
  K3Status status = K3_OK;
  hid_t object = H5Dopen2(file, dataset, H5P_DEFAULT);
  hid_t attribute = object < 0 ? -1 : H5Aopen(object, K3_TENSOR_CRC, H5P_DEFAULT);
  if (attribute < 0 || H5Awrite(attribute, H5T_NATIVE_UINT32, &crc) < 0)
    status =
        k3_status_fail(K3_ERR_INPUT, __FILE__, __LINE__, "%s: dataset %s: cannot write attribute " K3_TENSOR_CRC ": %s",
                       path, dataset, K3_HDF5_REASON);
  if (attribute >= 0) H5Aclose(attribute);
  if (object >= 0) H5Dclose(object);
  return status;
}

K3Status k3_content_put_digest(const char *path, hid_t file, uint64_t digest)
{
  K3Status status = K3_OK;
  char text[DIGITS + 1];
  hid_t type = -1, attribute = H5Aopen(file, K3_CONTENT_DIGEST, H5P_DEFAULT);
  snprintf(text, sizeof text, "%016" PRIx64, digest);
  type = attribute < 0 ? -1 : H5Aget_type(attribute);
  if (type < 0 || H5Tget_size(type) != sizeof text || H5Awrite(attribute, type, text) < 0)
    status = k3_status_fail(K3_ERR_INPUT, __FILE__, __LINE__, "%s: cannot write attribute " K3_CONTENT_DIGEST ": %s",
                            path, K3_HDF5_REASON);
  if (type >= 0) H5Tclose(type);
  if (attribute >= 0) H5Aclose(attribute);
  return status;
}

static K3Status read_crc(const char *path, hid_t file, const char *dataset, uint32_t *crc)
{
  int64_t number = 0;
  hid_t object = H5Dopen2(file, dataset, H5P_DEFAULT);
  if (object < 0) K3_FAIL(K3_ERR_INPUT, "%s: dataset %s: cannot be opened: %s", path, dataset, K3_HDF5_REASON);
  K3Status status = k3_hdf5_read_number(path, object, dataset, K3_TENSOR_CRC, H5T_INTEGER, H5T_NATIVE_INT64, &number);
  H5Dclose(object);
  *crc = (uint32_t)number;
  return status;
}

K3Status k3_content_read(const char *path, const K3TensorTable *table, uint32_t *crcs, uint64_t *digest, int *found)
{
  K3Status status = K3_OK;
  char text[DIGITS + 2], *end = NULL;
  hid_t access = H5Pcreate(H5P_FILE_ACCESS), file = -1;
  *found = 0;
  for (int locking = 1; locking >= 0 && access >= 0 && file < 0; locking--) /* as it may be open already */
    if (H5Pset_file_locking(access, (hbool_t)locking, 1) >= 0) file = H5Fopen(path, H5F_ACC_RDONLY, access);
  if (file < 0) K3_FAIL_DONE(K3_ERR_INPUT, "%s: cannot open: %s", path, K3_HDF5_REASON);
  htri_t present = H5Aexists(file, K3_CONTENT_DIGEST);
  if (present < 0) K3_FAIL_DONE(K3_ERR_INPUT, "%s: cannot be examined: %s", path, K3_HDF5_REASON);
  if (!present) goto done;
  K3_TRY_DONE(k3_hdf5_read_text(path, file, "the root group", K3_CONTENT_DIGEST, text, sizeof text));
  *digest = strtoull(text, &end, 16);
  if (end != text + DIGITS || *end)
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: attribute " K3_CONTENT_DIGEST " = \"%s\", wanted %d hexadecimal digits", path, text,
                 DIGITS);
  for (int64_t i = 0; i < table->count; i++) K3_TRY_DONE(read_crc(path, file, table->specs[i].path, &crcs[i]));
  *found = 1;
done:
  if (file >= 0) H5Fclose(file);
  if (access >= 0) H5Pclose(access);
  return status;
}
