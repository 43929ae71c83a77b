/* Opening files that all ranks read, and their /config. See hdf5_input.h. Layer: store. */
#include "store/hdf5_input.h"

#include <errno.h>
#include <inttypes.h>
#include <sys/stat.h>

#include "store/hdf5_attribute.h"
#include "store/hdf5_error.h"

K3Status k3_hdf5_open_input(const char *path, hid_t *file)
{
  K3Status status = K3_OK;
  struct stat found;
  if (stat(path, &found) != 0) K3_FAIL(K3_ERR_INPUT, "%s: cannot open: %s", path, K3_ERRNO_REASON(errno));
  if (!S_ISREG(found.st_mode)) K3_FAIL(K3_ERR_INPUT, "%s: cannot open: it is no plain file; name an HDF5 file", path);
  if (found.st_size == 0) K3_FAIL(K3_ERR_INPUT, "%s: the file is empty; copy or write it again", path);
  hid_t access = H5Pcreate(H5P_FILE_ACCESS);
  if (access < 0 || H5Pset_file_locking(access, 1, 1) < 0)
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: cannot open: %s", path, K3_HDF5_REASON);
  *file = H5Fopen(path, H5F_ACC_RDONLY, access);
  if (*file < 0) {
    int error = k3_hdf5_errno();
    if (error != ENOLCK && error != ENOSYS && error != EOPNOTSUPP)
      K3_FAIL_DONE(K3_ERR_INPUT, "%s: cannot open: %s", path, K3_HDF5_REASON);
    /* A file system without locks: reading needs none, since writers rename whole files into place. */
    if (H5Pset_file_locking(access, 0, 1) >= 0) *file = H5Fopen(path, H5F_ACC_RDONLY, access);
    if (*file < 0) K3_FAIL_DONE(K3_ERR_INPUT, "%s: cannot open: %s", path, K3_HDF5_REASON);
  }
done:
  if (access >= 0) H5Pclose(access);
  return status;
}

static K3Status read_layer_types(const char *origin, hid_t group, K3Config *config)
{
  K3Status status = K3_OK;
  hid_t dataset = -1, space = -1, type = -1;
  hssize_t points;
  htri_t present = H5Lexists(group, "layer_types", H5P_DEFAULT);
  if (present <= 0)
    K3_FAIL(K3_ERR_INPUT, "%s: dataset /config/layer_types is missing, wanted uint8 [num_layers]", origin);
  dataset = H5Dopen2(group, "layer_types", H5P_DEFAULT);
  space = dataset < 0 ? -1 : H5Dget_space(dataset);
  type = dataset < 0 ? -1 : H5Dget_type(dataset);
  if (space < 0 || type < 0)
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: cannot open dataset /config/layer_types: %s", origin, K3_HDF5_REASON);
  points = H5Sget_simple_extent_npoints(space);
  if (H5Sget_simple_extent_ndims(space) != 1 || points != config->num_layers)
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: dataset /config/layer_types holds %" PRId64 " values, wanted num_layers = %" PRId64,
                 origin, (int64_t)points, config->num_layers);
  if (H5Tget_class(type) != H5T_INTEGER)
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: dataset /config/layer_types holds no integers, wanted uint8", origin);
  if (H5Dread(dataset, H5T_NATIVE_UINT8, H5S_ALL, H5S_ALL, H5P_DEFAULT, config->layer_types) < 0)
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: cannot read dataset /config/layer_types: %s", origin, K3_HDF5_REASON);
done:
  if (type >= 0) H5Tclose(type);
  if (space >= 0) H5Sclose(space);
  if (dataset >= 0) H5Dclose(dataset);
  return status;
}

K3Status k3_hdf5_read_config(const char *origin, hid_t file, K3Config *config)
{
  K3Status status = K3_OK;
  hid_t group = -1;
  if (H5Lexists(file, "config", H5P_DEFAULT) <= 0) K3_FAIL(K3_ERR_INPUT, "%s: group /config is missing", origin);
  group = H5Gopen2(file, "config", H5P_DEFAULT);
  if (group < 0) K3_FAIL(K3_ERR_INPUT, "%s: cannot open group /config: %s", origin, K3_HDF5_REASON);
  for (int i = 0; i < k3_config_field_count; i++) {
    const K3ConfigField *field = &k3_config_fields[i];
    void *at = (char *)config + field->offset;
    if (field->kind == K3_FIELD_REAL) {
      K3_TRY_DONE(k3_hdf5_read_number(origin, group, "/config", field->name, H5T_FLOAT, H5T_NATIVE_DOUBLE, at));
      continue;
    }
    int64_t value = 0;
    K3_TRY_DONE(k3_hdf5_read_number(origin, group, "/config", field->name, H5T_INTEGER, H5T_NATIVE_INT64, &value));
    if (field->kind == K3_FIELD_INTEGER) *(int64_t *)at = value;
    else if (value == 0 || value == 1) *(uint8_t *)at = (uint8_t)value;
    else K3_FAIL_DONE(K3_ERR_INPUT, "%s: /config: field %s = %" PRId64 ", wanted 0 or 1", origin, field->name, value);
  }
  if (config->num_layers < 1 || config->num_layers > K3_MAX_LAYERS)
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: /config: field num_layers = %" PRId64 ", wanted 1 to %d", origin,
                 config->num_layers, K3_MAX_LAYERS);
  K3_TRY_DONE(read_layer_types(origin, group, config));
  K3_TRY_DONE(k3_config_check(config, origin));
done:
  H5Gclose(group);
  return status;
}
