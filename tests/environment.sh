# Sourced before each test: what mpirun, OpenMP and the sanitizers need on a small machine. Layer: tests.
# shellcheck shell=sh

# Ranks share few cores: no binding, waiting ranks yield, one thread each.
OMP_NUM_THREADS=${OMP_NUM_THREADS-1}
OMPI_MCA_rmaps_base_oversubscribe=1
OMPI_MCA_hwloc_base_binding_policy=none
OMPI_MCA_mpi_yield_when_idle=1
OMPI_MCA_btl_vader_single_copy_mechanism=none
export OMP_NUM_THREADS OMPI_MCA_rmaps_base_oversubscribe OMPI_MCA_hwloc_base_binding_policy
export OMPI_MCA_mpi_yield_when_idle OMPI_MCA_btl_vader_single_copy_mechanism
if [ "$(id -u)" -eq 0 ]; then # as in a container; mpirun refuses root otherwise
  OMPI_ALLOW_RUN_AS_ROOT=1
  OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  export OMPI_ALLOW_RUN_AS_ROOT OMPI_ALLOW_RUN_AS_ROOT_CONFIRM
fi

PYTHONDONTWRITEBYTECODE=1
export PYTHONDONTWRITEBYTECODE

# Read only by a program built with --enable-sanitizers. Leaks inside Open MPI are listed in lsan.supp.
ASAN_OPTIONS=${ASAN_OPTIONS-abort_on_error=0:detect_leaks=1:protect_shadow_gap=0}
UBSAN_OPTIONS=${UBSAN_OPTIONS-print_stacktrace=1:halt_on_error=1}
LSAN_OPTIONS=${LSAN_OPTIONS-suppressions=$(cd "${srcdir:-.}" && pwd)/tests/lsan.supp:print_suppressions=0}
export ASAN_OPTIONS UBSAN_OPTIONS LSAN_OPTIONS
