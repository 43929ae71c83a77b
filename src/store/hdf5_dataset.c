/* See hdf5_dataset.h. Layer: store. */
#include "store/hdf5_dataset.h"

#include "store/hdf5_attribute.h"
#include "store/hdf5_output.h"

enum { MAX_AXES = 8 };

/* A dataset and the sizes of its axes; the caller closes *dataset unless it failed. */
static K3Status open_dataset(const char *origin, hid_t file, const char *name, int axes, hsize_t *size, hid_t *dataset)
{
  K3Status status = K3_OK;
  hid_t space = H5I_INVALID_HID;
  *dataset = H5Dopen2(file, name, H5P_DEFAULT);
  if (*dataset < 0) K3_FAIL(K3_ERR_INPUT, "%s: dataset %s is missing", origin, name);
  space = H5Dget_space(*dataset);
  int found = space < 0 ? -1 : H5Sget_simple_extent_ndims(space);
  if (found != axes || axes > MAX_AXES)
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: dataset %s has %d axes, wanted %d", origin, name, found, axes);
  if (H5Sget_simple_extent_dims(space, size, NULL) != axes)
    status = k3_status_fail(K3_ERR_INPUT, __FILE__, __LINE__, "%s: dataset %s: %s", origin, name, K3_HDF5_REASON);
done:
  if (space >= 0) H5Sclose(space);
  if (status != K3_OK) H5Dclose(*dataset);
  return status;
}

K3Status k3_hdf5_read_shape(const char *origin, hid_t file, const char *name, int axes, hsize_t *size)
{
  hid_t dataset;
  K3_TRY(open_dataset(origin, file, name, axes, size, &dataset));
  H5Dclose(dataset);
  return K3_OK;
}

static K3Status read_whole(const char *origin, hid_t file, const char *name, H5T_class_t wanted, hid_t memory, int axes,
                           const hsize_t *size, void *value)
{
  K3Status status = K3_OK;
  hsize_t found[MAX_AXES];
  hid_t dataset, type = H5I_INVALID_HID;
  K3_TRY(open_dataset(origin, file, name, axes, found, &dataset));
  type = H5Dget_type(dataset);
  for (int i = 0; i < axes; i++)
    if (found[i] != size[i])
      K3_FAIL_DONE(K3_ERR_INPUT, "%s: dataset %s: axis %d is %llu long, wanted %llu", origin, name, i,
                   (unsigned long long)found[i], (unsigned long long)size[i]);
  if (type < 0 || H5Tget_class(type) != wanted)
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: dataset %s holds %s, wanted %s", origin, name,
                 k3_hdf5_class_name(type < 0 ? H5T_NO_CLASS : H5Tget_class(type)), k3_hdf5_class_name(wanted));
  if (H5Dread(dataset, memory, H5S_ALL, H5S_ALL, H5P_DEFAULT, value) < 0)
    status = k3_status_fail(K3_ERR_INPUT, __FILE__, __LINE__, "%s: dataset %s cannot be read: %s", origin, name,
                            K3_HDF5_REASON);
done:
  if (type >= 0) H5Tclose(type);
  H5Dclose(dataset);
  return status;
}

K3Status k3_hdf5_read_numbers(const char *origin, hid_t file, const char *name, int real, int axes, const hsize_t *size,
                              void *value)
{
  return read_whole(origin, file, name, real ? H5T_FLOAT : H5T_INTEGER, real ? H5T_NATIVE_DOUBLE : H5T_NATIVE_INT64,
                    axes, size, value);
}

K3Status k3_hdf5_read_texts(const char *origin, hid_t file, const char *name, int axes, const hsize_t *size,
                            size_t bytes, char *texts)
{
  hid_t type = k3_hdf5_text_type(bytes);
  size_t count = 1;
  if (type < 0) K3_FAIL(K3_ERR_INPUT, "%s: dataset %s: no string type", origin, name);
  K3Status status = read_whole(origin, file, name, H5T_STRING, type, axes, size, texts);
  H5Tclose(type);
  for (int i = 0; i < axes; i++) count *= (size_t)size[i];
  for (size_t i = 0; status == K3_OK && i < count; i++) texts[(i + 1) * bytes - 1] = '\0';
  return status;
}
