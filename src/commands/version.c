/* See version.h. Layer: commands. */
#include "commands/version.h"

#include <hdf5.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "config.h"
#include "decode/backend.h"
#include "decode/device_versions.h"

#ifdef HAVE_JSON_C
#include <json-c/json_c_version.h>
#endif

/* H5get_libversion goes through the library's start-up, which aborts on a mismatch unless told not to: the
 * environment variable is the library's own switch, and the check that follows is ours. */
static void found_hdf5(unsigned version[3])
{
  setenv("HDF5_DISABLE_VERSION_CHECK", "2", 1);
  if (H5get_libversion(&version[0], &version[1], &version[2]) < 0) version[0] = version[1] = version[2] = 0;
}

static void found_mpi(char text[MPI_MAX_LIBRARY_VERSION_STRING])
{
  int length = 0;
  if (MPI_Get_library_version(text, &length) != MPI_SUCCESS) strcpy(text, "unknown");
  text[strcspn(text, ",\n")] = '\0';
}

typedef struct {
  char text[40];
} VersionText;

static const char *cuda_text(int code, VersionText *version)
{
  snprintf(version->text, sizeof version->text, "%d.%d", code / 1000, code % 1000 / 10);
  return version->text;
}

static const char *nccl_text(int code, VersionText *version)
{
  snprintf(version->text, sizeof version->text, "%d.%d.%d", code / 10000, code / 100 % 100, code % 100);
  return version->text;
}

/* Asked of the libraries alone: a machine without a GPU answers too. */
static void print_device_versions(void)
{
  K3DeviceVersions versions;
  VersionText built, found, driver;
  k3_device_versions(&versions);
  if (!versions.cuda_built) {
    printf("  CUDA      none: host backend alone\n");
    return;
  }
  printf("  CUDA      %-17s %s, ", cuda_text(versions.cuda_built, &built), cuda_text(versions.cuda_found, &found));
  if (versions.driver) printf("driver for up to %s\n", cuda_text(versions.driver, &driver));
  else printf("no driver\n");
  if (versions.nccl_built)
    printf("  NCCL      %-17s %s\n", nccl_text(versions.nccl_built, &built), nccl_text(versions.nccl_found, &found));
  else printf("  NCCL      none: one GPU alone\n");
}

void k3_print_version(void)
{
  unsigned found[3];
  char mpi[MPI_MAX_LIBRARY_VERSION_STRING];
  found_hdf5(found);
  found_mpi(mpi);
  printf("k3decode %s\n", PACKAGE_VERSION);
  printf("  library   built with        found\n");
  printf("  HDF5      %-17s %u.%u.%u\n", &H5_VERS_INFO[strlen("HDF5 library version: ")], found[0], found[1], found[2]);
#ifdef OMPI_MAJOR_VERSION
  printf("  MPI       Open MPI %d.%d.%-4d %s\n", OMPI_MAJOR_VERSION, OMPI_MINOR_VERSION, OMPI_RELEASE_VERSION, mpi);
#else
  printf("  MPI       MPI %d.%-11d %s\n", MPI_VERSION, MPI_SUBVERSION, mpi);
#endif
#ifdef HAVE_JSON_C
  printf("  json-c    %-17s %s\n", JSON_C_VERSION, json_c_version());
#else
  printf("  json-c    none: import reads GGUF alone\n");
#endif
  print_device_versions();
  printf("  backends  host%s\n", k3_backend_has_cuda() ? ", cuda" : "");
}

void k3_version_line(char *text, size_t size)
{
  unsigned found[3];
  char mpi[MPI_MAX_LIBRARY_VERSION_STRING];
  found_hdf5(found);
  found_mpi(mpi);
  snprintf(text, size, "k3decode %s, HDF5 %d.%d.%d built with and %u.%u.%u found, MPI %s", PACKAGE_VERSION,
           H5_VERS_MAJOR, H5_VERS_MINOR, H5_VERS_RELEASE, found[0], found[1], found[2], mpi);
}

K3Status k3_version_check_mpi(void)
{
#ifdef OMPI_MAJOR_VERSION
  char mpi[MPI_MAX_LIBRARY_VERSION_STRING], wanted[32];
  snprintf(wanted, sizeof wanted, "Open MPI v%d.", OMPI_MAJOR_VERSION);
  found_mpi(mpi);
  if (strncmp(mpi, wanted, strlen(wanted)) != 0)
    K3_FAIL(
        K3_ERR_DEVICE,
        "built with Open MPI %d.%d.%d, but the library found at run time is '%.60s': look at LD_LIBRARY_PATH, or build "
        "against that library",
        OMPI_MAJOR_VERSION, OMPI_MINOR_VERSION, OMPI_RELEASE_VERSION, mpi);
#endif
  return K3_OK;
}

K3Status k3_version_check_hdf5(void)
{
  unsigned found[3];
  found_hdf5(found);
  if (found[0] != H5_VERS_MAJOR || found[1] != H5_VERS_MINOR)
    K3_FAIL(K3_ERR_DEVICE,
            "built with HDF5 %d.%d.%d, but the library found at run time is %u.%u.%u: look at LD_LIBRARY_PATH (a conda "
            "environment or a module?), or build against that library",
            H5_VERS_MAJOR, H5_VERS_MINOR, H5_VERS_RELEASE, found[0], found[1], found[2]);
  return K3_OK;
}

K3Status k3_version_check_nccl(void)
{
  K3DeviceVersions versions;
  VersionText built, found;
  k3_device_versions(&versions);
  if (versions.nccl_built / 100 != versions.nccl_found / 100)
    K3_FAIL(K3_ERR_DEVICE,
            "built with NCCL %s, but the library found at run time is %s: look at LD_LIBRARY_PATH (a conda environment "
            "or a module?), or build against that library",
            nccl_text(versions.nccl_built, &built), nccl_text(versions.nccl_found, &found));
  return K3_OK;
}
