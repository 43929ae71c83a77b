/* Attributes and datasets of files that k3decode writes. See hdf5_output.h. Layer: store. */
#include "store/hdf5_output.h"

#include <stdlib.h>
#include <string.h>

K3Status k3_hdf5_put_attribute(const char *path, hid_t where, const char *name, hid_t stored, hid_t memory,
                               const void *value)
{
  hid_t space = H5Screate(H5S_SCALAR), attribute = H5I_INVALID_HID;
  int good = 0;
  if (space >= 0) attribute = H5Acreate2(where, name, stored, space, H5P_DEFAULT, H5P_DEFAULT);
  if (attribute >= 0) good = H5Awrite(attribute, memory, value) >= 0;
  if (attribute >= 0 && H5Aclose(attribute) < 0) good = 0;
  if (space >= 0 && H5Sclose(space) < 0) good = 0;
  if (!good) return K3_HDF5_FAIL("output %s: attribute %s cannot be written", path, name);
  return K3_OK;
}

K3Status k3_hdf5_put_integer(const char *path, hid_t where, const char *name, int64_t value)
{
  return k3_hdf5_put_attribute(path, where, name, H5T_STD_I64LE, H5T_NATIVE_INT64, &value);
}

hid_t k3_hdf5_text_type(size_t bytes)
{
  hid_t type = H5Tcopy(H5T_C_S1);
  if (type < 0) return type;
  if (H5Tset_size(type, bytes) < 0 || H5Tset_cset(type, H5T_CSET_UTF8) < 0) {
    H5Tclose(type);
    return H5I_INVALID_HID;
  }
  return type;
}

K3Status k3_hdf5_put_text(const char *path, hid_t where, const char *name, const char *text)
{
  if (!text) text = "";
  hid_t type = k3_hdf5_text_type(strlen(text) + 1);
  if (type < 0) return K3_HDF5_FAIL("output %s: attribute %s: no string type", path, name);
  K3Status status = k3_hdf5_put_attribute(path, where, name, type, type, text);
  H5Tclose(type);
  return status;
}

K3Status k3_hdf5_put_dataset(const char *path, hid_t file, const char *name, hid_t stored, hid_t memory, int axes,
                             const hsize_t *size, const void *value)
{
  K3Status status = K3_OK;
  hid_t space = axes ? H5Screate_simple(axes, size, NULL) : H5Screate(H5S_SCALAR);
  hid_t properties = H5Pcreate(H5P_DATASET_CREATE), made = H5I_INVALID_HID;
  int good = space >= 0 && properties >= 0 && H5Pset_alloc_time(properties, H5D_ALLOC_TIME_EARLY) >= 0;
  if (good) {
    made = H5Dcreate2(file, name, stored, space, H5P_DEFAULT, properties, H5P_DEFAULT);
    good = made >= 0 && H5Dwrite(made, memory, H5S_ALL, H5S_ALL, H5P_DEFAULT, value) >= 0;
  }
  if (!good) status = K3_HDF5_FAIL("output %s: dataset %s cannot be made", path, name);
  if (properties >= 0) H5Pclose(properties);
  if (space >= 0) H5Sclose(space);
  if (made >= 0 && H5Dclose(made) < 0 && status == K3_OK)
    status = K3_HDF5_FAIL("output %s: dataset %s cannot be closed", path, name);
  return status;
}

K3Status k3_hdf5_put_meaning(const char *path, hid_t file, const char *name, const char *units, const char *axes,
                             const char *meaning)
{
  K3Status status = K3_OK;
  hid_t made = H5Dopen2(file, name, H5P_DEFAULT);
  if (made < 0) return K3_HDF5_FAIL("output %s: dataset %s cannot be opened", path, name);
  if (units) K3_TRY_DONE(k3_hdf5_put_text(path, made, "units", units));
  if (axes) K3_TRY_DONE(k3_hdf5_put_text(path, made, "axes", axes));
  if (meaning) K3_TRY_DONE(k3_hdf5_put_text(path, made, "meaning", meaning));
done:
  H5Dclose(made);
  return status;
}

K3Status k3_hdf5_put_numbers(const char *path, hid_t file, const char *name, int real, int axes, const hsize_t *size,
                             const void *value, const char *units, const char *axis_names, const char *meaning)
{
  K3_TRY(k3_hdf5_put_dataset(path, file, name, real ? H5T_IEEE_F64LE : H5T_STD_I64LE,
                             real ? H5T_NATIVE_DOUBLE : H5T_NATIVE_INT64, axes, size, value));
  return k3_hdf5_put_meaning(path, file, name, units ? units : "1", axis_names, meaning);
}

K3Status k3_hdf5_put_text_dataset(const char *path, hid_t file, const char *name, const char *text, size_t bytes)
{
  char *padded = calloc(1, bytes);
  if (!padded) K3_FAIL(K3_ERR_INPUT, "output %s: no memory for %zu bytes of %s", path, bytes, name);
  strncpy(padded, text, bytes - 1);
  hid_t type = k3_hdf5_text_type(bytes);
  K3Status status = type < 0 ? K3_HDF5_FAIL("output %s: %s: no string type", path, name)
                             : k3_hdf5_put_dataset(path, file, name, type, type, 0, NULL, padded);
  if (type >= 0) H5Tclose(type);
  free(padded);
  return status;
}

K3Status k3_hdf5_put_texts(const char *path, hid_t file, const char *name, int axes, const hsize_t *size,
                           const char *const *texts)
{
  size_t longest = 1, count = 1;
  for (int i = 0; i < axes; i++) count *= (size_t)size[i];
  for (size_t i = 0; i < count; i++)
    if (strlen(texts[i]) + 1 > longest) longest = strlen(texts[i]) + 1;
  char *padded = calloc(count, longest);
  if (!padded) K3_FAIL(K3_ERR_INPUT, "output %s: no memory for the texts of %s", path, name);
  for (size_t i = 0; i < count; i++) strcpy(padded + i * longest, texts[i]);
  hid_t type = k3_hdf5_text_type(longest);
  K3Status status = type < 0 ? K3_HDF5_FAIL("output %s: %s: no string type", path, name)
                             : k3_hdf5_put_dataset(path, file, name, type, type, axes, size, padded);
  if (type >= 0) H5Tclose(type);
  free(padded);
  return status;
}

K3Status k3_hdf5_put_group(const char *path, hid_t file, const char *name)
{
  hid_t group = H5Gcreate2(file, name, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
  if (group < 0 || H5Gclose(group) < 0) return K3_HDF5_FAIL("output %s: group %s cannot be made", path, name);
  return K3_OK;
}

K3Status k3_hdf5_put_config(const char *path, hid_t file, const K3Config *config)
{
  K3Status status = K3_OK;
  hid_t group = H5Gopen2(file, "/config", H5P_DEFAULT);
  if (group < 0) return K3_HDF5_FAIL("output %s: group /config cannot be opened", path);
  for (int i = 0; i < k3_config_field_count; i++) {
    const K3ConfigField *field = &k3_config_fields[i];
    const void *value = (const char *)config + field->offset;
    hid_t stored = field->kind == K3_FIELD_INTEGER ? H5T_STD_I64LE
                   : field->kind == K3_FIELD_REAL  ? H5T_IEEE_F64LE
                                                   : H5T_STD_U8LE;
    hid_t memory = field->kind == K3_FIELD_INTEGER ? H5T_NATIVE_INT64
                   : field->kind == K3_FIELD_REAL  ? H5T_NATIVE_DOUBLE
                                                   : H5T_NATIVE_UINT8;
    K3_TRY_DONE(k3_hdf5_put_attribute(path, group, field->name, stored, memory, value));
  }
  hsize_t layers = (hsize_t)config->num_layers;
  K3_TRY_DONE(k3_hdf5_put_dataset(path, file, "/config/layer_types", H5T_STD_U8LE, H5T_NATIVE_UINT8, 1, &layers,
                                  config->layer_types));
  K3_TRY_DONE(k3_hdf5_put_meaning(path, file, "/config/layer_types", "1", "layer", "0: KDA, 1: MLA"));
done:
  H5Gclose(group);
  return status;
}
