/* What a model file must hold, checked without reading its content. See model_check.h. Layer: store. */
#include "store/model_check.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "store/hdf5_attribute.h"
#include "store/hdf5_error.h"

enum { MAX_LINK = 4096 }; /* bytes of an external link's value */

/* ---------------------------------------------------------------- finding datasets */

/* "[3, 5]" */
static const char *shape_text(int rank, const int64_t *shape, char *text, size_t size)
{
  size_t at = (size_t)snprintf(text, size, "[");
  for (int i = 0; i < rank && at < size; i++)
    at += (size_t)snprintf(text + at, size - at, "%s%" PRId64, i ? ", " : "", shape[i]);
  if (at < size) snprintf(text + at, size - at, "]");
  return text;
}

/* Why the file behind an external link cannot be opened: the library drops the cause on its way. */
static const char *external_reason(const char *origin, const char *name, K3Hdf5Reason *reason)
{
  char beside[PATH_MAX];
  const char *slash = name[0] == '/' ? NULL : strrchr(origin, '/');
  snprintf(beside, sizeof beside, "%.*s%s", slash ? (int)(slash + 1 - origin) : 0, origin, name);
  if (access(beside, R_OK) != 0) return k3_errno_reason(errno, reason);
  hid_t file = H5Fopen(beside, H5F_ACC_RDONLY, H5P_DEFAULT);
  if (file < 0) return k3_hdf5_reason(reason);
  H5Fclose(file);
  snprintf(reason->text, sizeof reason->text, "that file has no such object");
  return reason->text;
}

K3Status k3_model_open_dataset(const char *origin, hid_t file, const char *path, const char *wanted, hid_t *dataset)
{
  char part[64] = "", through[2 * MAX_LINK + 128] = "", value[MAX_LINK];
  const char *external = NULL, *object_name = NULL;
  K3Hdf5Reason reason;
  for (const char *end = path; *end;) {
    end = strchrnul(end + 1, '/');
    snprintf(part, sizeof part, "%.*s", (int)(end - path), path);
    htri_t present = H5Lexists(file, part, H5P_DEFAULT);
    if (present < 0)
      K3_FAIL(K3_ERR_INPUT, "%s: dataset %s%s: cannot be reached: %s", origin, path, through,
              external ? external_reason(origin, external, &reason) : k3_hdf5_reason(&reason));
    if (!present)
      K3_FAIL(K3_ERR_INPUT, "%s: dataset %s%s is missing%s%s, wanted %s; write the model again", origin, path, through,
              *end ? ": there is no " : "", *end ? part : "", wanted);
    H5L_info_t link;
    if (H5Lget_info(file, part, &link, H5P_DEFAULT) < 0 || link.type != H5L_TYPE_EXTERNAL ||
        link.u.val_size > sizeof value || H5Lget_val(file, part, value, sizeof value, H5P_DEFAULT) < 0)
      continue;
    if (H5Lunpack_elink_val(value, link.u.val_size, NULL, &external, &object_name) >= 0)
      snprintf(through, sizeof through, " (an external link at %s to object %s in file %s)", part, object_name,
               external);
  }
  hid_t object = H5Oopen(file, path, H5P_DEFAULT);
  if (object < 0)
    K3_FAIL(K3_ERR_INPUT, "%s: dataset %s%s: cannot be opened: %s", origin, path, through,
            external ? external_reason(origin, external, &reason) : k3_hdf5_reason(&reason));
  if (H5Iget_type(object) != H5I_DATASET) {
    H5Oclose(object);
    K3_FAIL(K3_ERR_INPUT, "%s: %s%s is no dataset, wanted %s", origin, path, through, wanted);
  }
  *dataset = object;
  return K3_OK;
}

/* The storage type that the dataset's own type and attribute `type` tell. */
static K3Status find_type(const char *origin, const K3TensorSpec *spec, hid_t dataset, hid_t stored, K3Type *type)
{
  H5T_class_t class = H5Tget_class(stored);
  size_t bytes = H5Tget_size(stored);
  int is_unsigned = class == H5T_INTEGER && H5Tget_sign(stored) == H5T_SGN_NONE;
  char name[64] = "";
  htri_t named = H5Aexists(dataset, "type");
  if (named < 0) K3_FAIL(K3_ERR_INPUT, "%s: dataset %s: cannot be examined: %s", origin, spec->path, K3_HDF5_REASON);
  if (named) K3_TRY(k3_hdf5_read_text(origin, dataset, spec->path, "type", name, sizeof name));
  int format = named ? k3_format_find(name) : class == H5T_FLOAT && bytes == 4 ? K3_TYPE_F32 : -1;
  if (named && format < 0)
    K3_FAIL(K3_ERR_INPUT, "%s: dataset %s: attribute type = \"%s\", wanted one of %s", origin, spec->path, name,
            k3_format_names());
  int fits = format == K3_TYPE_F32    ? class == H5T_FLOAT && bytes == 4
             : format == K3_TYPE_BF16 || format == K3_TYPE_F16 ? is_unsigned && bytes == 2
                                      : format > 0 && is_unsigned && bytes == 1;
  if (!fits)
    K3_FAIL(
        K3_ERR_INPUT,
        "%s: dataset %s: stored as %s of %zu bytes%s%s%s, wanted float32, uint16 with attribute type = \"bf16\" or \"f16\", or "
        "uint8 with attribute type = a block format",
        origin, spec->path, k3_hdf5_class_name(class), bytes,
        named ? " with attribute type = \"" : " without attribute type", name, named ? "\"" : "");
  *type = (K3Type)format;
  return K3_OK;
}

/* Logical shape, from the extent and, for block formats, the attribute `shape`. */
static K3Status check_shape(const char *origin, const K3TensorSpec *spec, hid_t dataset, hid_t space, K3Type type)
{
  K3Status status = K3_OK;
  char got[128], wanted[128];
  hsize_t dims[H5S_MAX_RANK];
  int64_t extent[H5S_MAX_RANK], stored[3], logical[3] = {0};
  hid_t attribute = -1, attribute_space = -1;
  int last = spec->rank - 1, rank = H5Sget_simple_extent_dims(space, dims, NULL);
  if (rank < 0) K3_FAIL(K3_ERR_INPUT, "%s: dataset %s: no shape: %s", origin, spec->path, K3_HDF5_REASON);
  for (int i = 0; i < rank; i++) extent[i] = (int64_t)dims[i];
  memcpy(stored, spec->shape, sizeof stored);
  if (k3_format_is_quantised(type)) {
    const K3Format *format = k3_format(type);
    if (!spec->is_matrix)
      K3_FAIL(K3_ERR_INPUT, "%s: dataset %s: stored as %s, but only matrices may be quantised; wanted float32 or bf16",
              origin, spec->path, format->name);
    if (spec->shape[last] % format->block_values)
      K3_FAIL(K3_ERR_INPUT,
              "%s: dataset %s: rows of %" PRId64 " values are no whole number of %s blocks (%" PRId64
              " values); store it as float32 or bf16",
              origin, spec->path, spec->shape[last], format->name, format->block_values);
    stored[last] = k3_format_bytes(type, spec->shape[last]);
  }
  int same = rank == spec->rank;
  for (int i = 0; i < spec->rank && same; i++) same = extent[i] == stored[i];
  if (!same)
    K3_FAIL(K3_ERR_INPUT, "%s: dataset %s: shape %s, wanted %s%s%s; write the model again or mend /config", origin,
            spec->path, shape_text(rank, extent, got, sizeof got),
            shape_text(spec->rank, stored, wanted, sizeof wanted), k3_format_is_quantised(type) ? " bytes of " : "",
            k3_format_is_quantised(type) ? k3_format(type)->name : "");
  if (!k3_format_is_quantised(type)) return K3_OK;

  htri_t present = H5Aexists(dataset, "shape");
  if (present <= 0)
    K3_FAIL(K3_ERR_INPUT, "%s: dataset %s: attribute shape is missing, wanted %s", origin, spec->path,
            shape_text(spec->rank, spec->shape, wanted, sizeof wanted));
  attribute = H5Aopen(dataset, "shape", H5P_DEFAULT);
  attribute_space = attribute < 0 ? -1 : H5Aget_space(attribute);
  if (attribute_space < 0 || H5Sget_simple_extent_npoints(attribute_space) != spec->rank ||
      H5Aread(attribute, H5T_NATIVE_INT64, logical) < 0)
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: dataset %s: attribute shape does not hold %d integers, wanted %s", origin,
                 spec->path, spec->rank, shape_text(spec->rank, spec->shape, wanted, sizeof wanted));
  for (int i = 0; i < spec->rank; i++)
    if (logical[i] != spec->shape[i])
      K3_FAIL_DONE(K3_ERR_INPUT, "%s: dataset %s: attribute shape = %s, wanted %s", origin, spec->path,
                   shape_text(spec->rank, logical, got, sizeof got),
                   shape_text(spec->rank, spec->shape, wanted, sizeof wanted));
done:
  if (attribute_space >= 0) H5Sclose(attribute_space);
  if (attribute >= 0) H5Aclose(attribute);
  return status;
}

/* ---------------------------------------------------------------- is it all there */

/* Whether dataset `name` of `file`, as a virtual dataset names them, is there and written. The file is looked for as
 * given, then beside the one that holds the virtual dataset. Returns NULL, or what is wrong in `reason`. */
static const char *virtual_source_fault(hid_t dataset, const char *file_name, const char *name, K3Hdf5Reason *reason)
{
  char holder[PATH_MAX], beside[2 * PATH_MAX];
  H5D_space_status_t allocated = H5D_SPACE_STATUS_NOT_ALLOCATED;
  hid_t file = -1, source = -1;
  const char *fault = NULL;
  if (strcmp(file_name, ".") == 0) {
    file = H5Iget_file_id(dataset);
  } else {
    if (H5Fget_name(dataset, holder, sizeof holder) < 0) return k3_hdf5_reason(reason);
    const char *slash = file_name[0] == '/' ? NULL : strrchr(holder, '/');
    snprintf(beside, sizeof beside, "%.*s%s", slash ? (int)(slash + 1 - holder) : 0, holder, file_name);
    const char *found = access(file_name, F_OK) == 0 ? file_name : beside;
    if (access(found, R_OK) != 0) return k3_errno_reason(errno, reason);
    hid_t access_list = H5Pcreate(H5P_FILE_ACCESS); /* a look needs no lock */
    if (access_list >= 0 && H5Pset_file_locking(access_list, 0, 1) >= 0)
      file = H5Fopen(found, H5F_ACC_RDONLY, access_list);
    if (file < 0) k3_hdf5_reason(reason);
    if (access_list >= 0) H5Pclose(access_list);
    if (file < 0) return reason->text;
  }
  if (file < 0) return k3_hdf5_reason(reason);
  source = H5Dopen2(file, name, H5P_DEFAULT);
  if (source < 0) {
    fault = k3_hdf5_reason(reason);
  } else {
    hid_t creation = H5Dget_create_plist(source);
    int is_stored = creation >= 0 && H5Pget_layout(creation) != H5D_VIRTUAL;
    if (creation >= 0) H5Pclose(creation);
    if (is_stored && (H5Dget_space_status(source, &allocated) < 0 || allocated == H5D_SPACE_STATUS_NOT_ALLOCATED)) {
      snprintf(reason->text, sizeof reason->text, "it was created but never written");
      fault = reason->text;
    }
    H5Dclose(source);
  }
  H5Fclose(file);
  return fault;
}

/* A virtual dataset reads as zeros where its sources are missing: look for each. */
static K3Status check_virtual(const char *origin, const K3TensorSpec *spec, hid_t dataset, hid_t creation)
{
  size_t count = 0;
  int64_t covered = 0, all = 0;
  if (H5Pget_virtual_count(creation, &count) < 0)
    K3_FAIL(K3_ERR_INPUT, "%s: dataset %s: cannot be examined: %s", origin, spec->path, K3_HDF5_REASON);
  for (size_t i = 0; i < count; i++) {
    char file[PATH_MAX], name[1024];
    K3Hdf5Reason reason;
    if (H5Pget_virtual_filename(creation, i, file, sizeof file) < 0 ||
        H5Pget_virtual_dsetname(creation, i, name, sizeof name) < 0)
      K3_FAIL(K3_ERR_INPUT, "%s: dataset %s: cannot be examined: %s", origin, spec->path, K3_HDF5_REASON);
    if (strchr(file, '%') || strchr(name, '%'))
      K3_FAIL(K3_ERR_INPUT, "%s: dataset %s: virtual over numbered files (%s), which is not supported; name each file",
              origin, spec->path, file);
    const char *fault = virtual_source_fault(dataset, file, name, &reason);
    if (fault)
      K3_FAIL(K3_ERR_INPUT,
              "%s: dataset %s: virtual, part %zu of %zu is dataset %s in file %s, which cannot be read: %s", origin,
              spec->path, i + 1, count, name, file, fault);
    hid_t space = H5Pget_virtual_vspace(creation, i);
    if (space < 0) K3_FAIL(K3_ERR_INPUT, "%s: dataset %s: cannot be examined: %s", origin, spec->path, K3_HDF5_REASON);
    covered += (int64_t)H5Sget_select_npoints(space);
    H5Sclose(space);
  }
  hid_t space = H5Dget_space(dataset);
  if (space < 0) K3_FAIL(K3_ERR_INPUT, "%s: dataset %s: cannot be examined: %s", origin, spec->path, K3_HDF5_REASON);
  all = (int64_t)H5Sget_simple_extent_npoints(space);
  H5Sclose(space);
  if (covered < all)
    K3_FAIL(K3_ERR_INPUT, "%s: dataset %s: virtual, its parts hold %" PRId64 " of %" PRId64 " elements", origin,
            spec->path, covered, all);
  return K3_OK;
}

/* Chunks are counted: compressed ones have fewer bytes than the extent. */
static K3Status check_chunks(const char *origin, const K3TensorSpec *spec, hid_t dataset, hid_t creation)
{
  hsize_t dims[H5S_MAX_RANK], chunk[H5S_MAX_RANK], wanted = 1, got = 0;
  hid_t space = H5Dget_space(dataset);
  int rank = space < 0 ? -1 : H5Sget_simple_extent_dims(space, dims, NULL);
  int failed =
      rank < 0 || H5Pget_chunk(creation, H5S_MAX_RANK, chunk) != rank || H5Dget_num_chunks(dataset, space, &got) < 0;
  if (failed)
    k3_status_fail(K3_ERR_INPUT, __FILE__, __LINE__, "%s: dataset %s: cannot be examined: %s", origin, spec->path,
                   K3_HDF5_REASON);
  if (space >= 0) H5Sclose(space);
  if (failed) return K3_ERR_INPUT;
  for (int i = 0; i < rank; i++) wanted *= (dims[i] + chunk[i] - 1) / chunk[i];
  if (got != wanted)
    K3_FAIL(K3_ERR_INPUT,
            "%s: dataset %s was written in part: %" PRIu64 " of %" PRIu64 " chunks; write the model again", origin,
            spec->path, (uint64_t)got, (uint64_t)wanted);
  return K3_OK;
}

static K3Status check_written(const char *origin, const K3TensorSpec *spec, hid_t dataset)
{
  K3Status status = K3_OK;
  H5D_space_status_t allocated = H5D_SPACE_STATUS_NOT_ALLOCATED;
  hid_t creation = H5Dget_create_plist(dataset);
  if (creation < 0) K3_FAIL(K3_ERR_INPUT, "%s: dataset %s: cannot be examined: %s", origin, spec->path, K3_HDF5_REASON);
  H5D_layout_t layout = H5Pget_layout(creation);
  if (layout == H5D_VIRTUAL) K3_TRY_DONE(check_virtual(origin, spec, dataset, creation));
  if (layout == H5D_VIRTUAL || layout == H5D_COMPACT) goto done;
  if (H5Pget_external_count(creation) > 0)
    K3_FAIL_DONE(K3_ERR_INPUT,
                 "%s: dataset %s: its data lie in a raw external file, which is not supported; rewrite it "
                 "with h5repack",
                 origin, spec->path);
  if (H5Dget_space_status(dataset, &allocated) < 0)
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: dataset %s: cannot be examined: %s", origin, spec->path, K3_HDF5_REASON);
  if (allocated == H5D_SPACE_STATUS_NOT_ALLOCATED)
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: dataset %s was created but never written; write the model again", origin,
                 spec->path);
  if (layout == H5D_CHUNKED) K3_TRY_DONE(check_chunks(origin, spec, dataset, creation));
done:
  H5Pclose(creation);
  return status;
}

static K3Status check_tensor(K3Source *source, hid_t file, int64_t tensor)
{
  K3Status status = K3_OK;
  const char *origin = source->origin;
  const K3TensorSpec *spec = &source->table.specs[tensor];
  char wanted[128];
  hid_t dataset = -1, stored = -1, space = -1;
  K3_TRY(k3_model_open_dataset(origin, file, spec->path, shape_text(spec->rank, spec->shape, wanted, sizeof wanted),
                               &dataset));
  stored = H5Dget_type(dataset);
  space = stored < 0 ? -1 : H5Dget_space(dataset);
  if (space < 0)
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: dataset %s: cannot be examined: %s", origin, spec->path, K3_HDF5_REASON);
  K3_TRY_DONE(find_type(origin, spec, dataset, stored, &source->types[tensor]));
  K3_TRY_DONE(check_shape(origin, spec, dataset, space, source->types[tensor]));
  K3_TRY_DONE(check_written(origin, spec, dataset));
done:
  if (space >= 0) H5Sclose(space);
  if (stored >= 0) H5Tclose(stored);
  H5Dclose(dataset);
  return status;
}

/* ---------------------------------------------------------------- nothing may be there that the table does not know */

typedef struct {
  const K3Source *source;
  const char *group; /* "/layers" or "/layers/003" */
  char surplus[160]; /* the first path that is not known */
} Surplus;

static herr_t look_for_surplus(hid_t group, const char *name, const H5L_info_t *info, void *context)
{
  Surplus *surplus = context;
  const K3Source *source = surplus->source;
  char path[160];
  (void)group;
  (void)info;
  int length = snprintf(path, sizeof path, "%s/%s", surplus->group, name);
  int known;
  if (strcmp(surplus->group, "/layers") == 0) {
    char *end = NULL;
    long layer = strtol(name, &end, 10);
    known = strlen(name) == 3 && !*end && name[0] >= '0' && name[0] <= '9' && layer >= 0 &&
            layer < source->config.num_layers;
  } else {
    known = (size_t)length < sizeof path && k3_tensors_find_path(&source->table, path) >= 0;
  }
  if (known) return 0;
  snprintf(surplus->surplus, sizeof surplus->surplus, "%s", path);
  return 1;
}

static K3Status check_surplus_in(const K3Source *source, hid_t file, const char *name)
{
  Surplus surplus = {source, name, ""};
  hid_t group = H5Gopen2(file, name, H5P_DEFAULT);
  if (group < 0) K3_FAIL(K3_ERR_INPUT, "%s: group %s: cannot be opened: %s", source->origin, name, K3_HDF5_REASON);
  herr_t found = H5Literate(group, H5_INDEX_NAME, H5_ITER_NATIVE, NULL, look_for_surplus, &surplus);
  if (found < 0) {
    K3Status status = k3_status_fail(K3_ERR_INPUT, __FILE__, __LINE__, "%s: group %s: cannot be listed: %s",
                                     source->origin, name, K3_HDF5_REASON);
    H5Gclose(group);
    return status;
  }
  H5Gclose(group);
  if (found > 0)
    K3_FAIL(K3_ERR_INPUT,
            "%s: %s is surplus: a model of this config (num_layers = %" PRId64 ", /config/layer_types) has no "
            "such tensor; remove it or mend /config",
            source->origin, surplus.surplus, source->config.num_layers);
  return K3_OK;
}

static K3Status check_surplus(const K3Source *source, hid_t file)
{
  char name[32];
  K3_TRY(check_surplus_in(source, file, "/layers"));
  for (int64_t i = 0; i < source->config.num_layers; i++) {
    snprintf(name, sizeof name, "/layers/%03d", (int)i);
    K3_TRY(check_surplus_in(source, file, name));
  }
  return K3_OK;
}

K3Status k3_model_check_tensors(K3Source *source, hid_t file)
{
  for (int64_t i = 0; i < source->table.count; i++) K3_TRY(check_tensor(source, file, i));
  return check_surplus(source, file);
}
