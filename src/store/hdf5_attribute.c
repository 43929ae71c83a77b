/* Attributes read from HDF5. See hdf5_attribute.h. Layer: store. */
#include "store/hdf5_attribute.h"

#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>

#include "store/hdf5_error.h"

K3Status k3_hdf5_read_text(const char *origin, hid_t place, const char *where, const char *name, char *text,
                           size_t size)
{
  K3Status status = K3_OK;
  hid_t attribute = -1, type = -1, memory = -1, space = -1;
  char *variable = NULL;
  htri_t present = H5Aexists(place, name);
  if (present < 0)
    K3_FAIL(K3_ERR_INPUT, "%s: %s: cannot look for attribute %s: %s", origin, where, name, K3_HDF5_REASON);
  if (!present) K3_FAIL(K3_ERR_INPUT, "%s: %s: attribute %s is missing, wanted a text", origin, where, name);
  attribute = H5Aopen(place, name, H5P_DEFAULT);
  type = attribute < 0 ? -1 : H5Aget_type(attribute);
  space = attribute < 0 ? -1 : H5Aget_space(attribute);
  if (type < 0 || space < 0)
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: %s: cannot open attribute %s: %s", origin, where, name, K3_HDF5_REASON);
  if (H5Tget_class(type) != H5T_STRING || H5Sget_simple_extent_npoints(space) != 1)
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: %s: attribute %s is no single text; write it as a string", origin, where, name);
  memory = H5Tcopy(H5T_C_S1);
  if (memory < 0 || H5Tset_cset(memory, H5Tget_cset(type)) < 0)
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: %s: attribute %s: %s", origin, where, name, K3_HDF5_REASON);
  if (H5Tis_variable_str(type) > 0) {
    if (H5Tset_size(memory, H5T_VARIABLE) < 0 || H5Aread(attribute, memory, &variable) < 0)
      K3_FAIL_DONE(K3_ERR_INPUT, "%s: %s: cannot read attribute %s: %s", origin, where, name, K3_HDF5_REASON);
    snprintf(text, size, "%s", variable ? variable : "");
  } else {
    /* Converted to a terminated text; a longer one is cut, and then equals nothing that is wanted. */
    if (H5Tset_size(memory, size) < 0 || H5Aread(attribute, memory, text) < 0)
      K3_FAIL_DONE(K3_ERR_INPUT, "%s: %s: cannot read attribute %s: %s", origin, where, name, K3_HDF5_REASON);
    text[size - 1] = '\0';
  }
done:
  if (variable) H5free_memory(variable);
  if (memory >= 0) H5Tclose(memory);
  if (space >= 0) H5Sclose(space);
  if (type >= 0) H5Tclose(type);
  if (attribute >= 0) H5Aclose(attribute);
  return status;
}

const char *k3_hdf5_class_name(H5T_class_t class)
{
  switch (class) {
  case H5T_INTEGER: return "an integer";
  case H5T_FLOAT: return "a float";
  case H5T_STRING: return "a text";
  case H5T_ENUM: return "an enumeration";
  default: return "another kind of value";
  }
}

K3Status k3_hdf5_read_number(const char *origin, hid_t place, const char *where, const char *name, H5T_class_t wanted,
                             hid_t memory, void *value)
{
  K3Status status = K3_OK;
  hid_t attribute = -1, type = -1, space = -1;
  htri_t present = H5Aexists(place, name);
  if (present < 0)
    K3_FAIL(K3_ERR_INPUT, "%s: %s: cannot look for attribute %s: %s", origin, where, name, K3_HDF5_REASON);
  if (!present)
    K3_FAIL(K3_ERR_INPUT, "%s: %s: field %s is missing, wanted %s; nothing has a default", origin, where, name,
            k3_hdf5_class_name(wanted));
  attribute = H5Aopen(place, name, H5P_DEFAULT);
  type = attribute < 0 ? -1 : H5Aget_type(attribute);
  space = attribute < 0 ? -1 : H5Aget_space(attribute);
  if (type < 0 || space < 0)
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: %s: cannot open field %s: %s", origin, where, name, K3_HDF5_REASON);
  if (H5Tget_class(type) != wanted)
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: %s: field %s is %s, wanted %s", origin, where, name,
                 k3_hdf5_class_name(H5Tget_class(type)), k3_hdf5_class_name(wanted));
  if (H5Sget_simple_extent_npoints(space) != 1)
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: %s: field %s holds %" PRId64 " values, wanted 1", origin, where, name,
                 (int64_t)H5Sget_simple_extent_npoints(space));
  if (H5Aread(attribute, memory, value) < 0)
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: %s: cannot read field %s: %s", origin, where, name, K3_HDF5_REASON);
done:
  if (space >= 0) H5Sclose(space);
  if (type >= 0) H5Tclose(type);
  if (attribute >= 0) H5Aclose(attribute);
  return status;
}
