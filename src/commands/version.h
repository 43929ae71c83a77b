/* Versions built with and found. Layer: commands. */
#ifndef K3_COMMANDS_VERSION_H
#define K3_COMMANDS_VERSION_H

#include <stddef.h>

#include "base/status.h"

/* Prints the program's version, and for each library the version compiled against and the one found. */
void k3_print_version(void);

/* The program's version and those of HDF5 and MPI built with and found, in one line. */
void k3_version_line(char *text, size_t size);

/* Refuse libraries whose interface differs from the headers compiled with, before their own check aborts the process
 * (known fault F35). Errors: K3_ERR_DEVICE with both versions and the mend. */
K3Status k3_version_check_mpi(void);  /* before MPI starts: each process for itself */
K3Status k3_version_check_hdf5(void); /* before the first use of HDF5 */
K3Status k3_version_check_nccl(void); /* major and minor; a build without NCCL passes */

#endif
