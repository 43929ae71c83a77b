/* Versions built with and found. Layer: commands. */
#ifndef K3_COMMANDS_VERSION_H
#define K3_COMMANDS_VERSION_H

#include "base/status.h"

/* Prints the program's version, and for each library the version compiled against and the one found. */
void k3_print_version(void);

/* Refuses libraries whose interface differs from the headers compiled with, before their own check aborts the
 * process (known fault F35). Errors: K3_ERR_DEVICE with both versions and the mend. */
K3Status k3_version_check(void);

#endif
