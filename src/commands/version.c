/* See version.h. Layer: commands. */
#include "commands/version.h"

#include <hdf5.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "config.h"
#include "decode/backend.h"

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

void k3_print_version(void)
{
  unsigned found[3];
  char mpi[MPI_MAX_LIBRARY_VERSION_STRING] = "";
  int length = 0;
  found_hdf5(found);
  if (MPI_Get_library_version(mpi, &length) != MPI_SUCCESS) snprintf(mpi, sizeof mpi, "unknown");
  mpi[strcspn(mpi, ",\n")] = '\0';
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
  printf("  json-c    none: import is left out\n");
#endif
  printf("  backends  host%s\n", k3_backend_has_cuda() ? ", cuda" : "");
}

K3Status k3_version_check(void)
{
  unsigned found[3];
  found_hdf5(found);
  if (found[0] != H5_VERS_MAJOR || found[1] != H5_VERS_MINOR)
    K3_FAIL(K3_ERR_DEVICE,
            "built with HDF5 %d.%d.%d, but the library found at run time is %u.%u.%u: look at LD_LIBRARY_PATH (a conda "
            "environment or a module?), or build against that library",
            H5_VERS_MAJOR, H5_VERS_MINOR, H5_VERS_RELEASE, found[0], found[1], found[2]);
#ifdef OMPI_MAJOR_VERSION
  char mpi[MPI_MAX_LIBRARY_VERSION_STRING] = "", wanted[32];
  int length = 0;
  snprintf(wanted, sizeof wanted, "Open MPI v%d.", OMPI_MAJOR_VERSION);
  if (MPI_Get_library_version(mpi, &length) != MPI_SUCCESS || strncmp(mpi, wanted, strlen(wanted)) != 0)
    K3_FAIL(K3_ERR_DEVICE,
            "built with Open MPI %d.%d.%d, but the library found at run time is '%.60s': look at LD_LIBRARY_PATH, or build "
            "against that library",
            OMPI_MAJOR_VERSION, OMPI_MINOR_VERSION, OMPI_RELEASE_VERSION, mpi);
#endif
  return K3_OK;
}
