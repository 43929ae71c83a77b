/* Programs in Python that serve a command: plotting and tokenising are left to libraries of that language. Layer: commands.
 * They stand in src/helpers/, and installed in libexec/k3decode. */
#ifndef K3_COMMANDS_HELPER_H
#define K3_COMMANDS_HELPER_H

#include "base/status.h"

/* Runs helper `name` ("report.py") with `words` (ended by NULL) to its end.
 * in   input   what it reads from its standard input; NULL: nothing
 * out  output  what it wrote to its standard output, allocated; NULL: it writes to ours
 * The Python is $K3_PYTHON, else the one that configure found, else python3; $K3_HELPERS names another directory.
 * Errors: the helper's own message and exit status (K3_ERR_USAGE, else K3_ERR_INPUT); K3_ERR_INPUT naming the mend when
 * Python or the helper is missing. */
K3Status k3_helper_run(const char *name, const char *const *words, const char *input, char **output);

#endif
