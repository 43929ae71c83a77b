/* Planted faults, for negative controls: a parity check that has never failed has not been shown to work.
 * Layer: base. In the program K3_BROKEN(name) is the constant 0 and costs nothing; in the test binary
 * tests/k3decode-breakable (compiled with -DK3_BREAKAGE) it is true when the environment variable K3_BREAK
 * holds that name. */
#ifndef K3_BASE_BREAKAGE_H
#define K3_BASE_BREAKAGE_H

#ifdef K3_BREAKAGE
#include <stdlib.h>
#include <string.h>
static inline int k3_broken(const char *name)
{
  const char *chosen = getenv("K3_BREAK");
  return chosen && strcmp(chosen, name) == 0;
}
#define K3_BROKEN(name) k3_broken(name)
#else
#define K3_BROKEN(name) 0
#endif

#endif
