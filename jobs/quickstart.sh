#!/bin/sh
# From a fresh clone to a decode by eight MPI ranks: set-up, build, a tiny model of Kimi K3's shape, a run, and what
# the run file holds.
#
#   jobs/quickstart.sh
#
# Leaves build/ and output/tiny.h5, output/quickstart.h5, output/quickstart.html (git ignores all of them). May be run again: it overwrites its
# own outputs. Environment: RANKS (8), STEPS (32), PROMPT (token ids, comma-separated).
# An installed copy uses the installed k3decode and writes to ./output.
set -eu

ranks=${RANKS:-8}
steps=${STEPS:-32}
prompt=${PROMPT:-1,2,3,5,8,13,21,34}

root=$(cd "$(dirname "$0")/.." && pwd)
if [ -f "$root/configure.ac" ]; then
  cd "$root"
  jobs/setup.sh
  jobs/build.sh
  k3decode=${K3_BUILD_DIR:-build}/k3decode
else
  k3decode=$(command -v k3decode) || {
    echo "quickstart: k3decode is not on PATH" >&2
    exit 1
  }
fi

mkdir -p output
rm -f output/tiny.h5 output/tiny.h5.partial output/quickstart.h5 output/quickstart.html

# Eight ranks on whatever cores there are: one thread each, no binding; a container's root is let through.
OMP_NUM_THREADS=1
export OMP_NUM_THREADS
if [ "$(id -u)" -eq 0 ]; then
  OMPI_ALLOW_RUN_AS_ROOT=1
  OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  export OMPI_ALLOW_RUN_AS_ROOT OMPI_ALLOW_RUN_AS_ROOT_CONFIRM
fi
if mpirun --version 2>/dev/null | grep -q 'Open MPI\|Open RTE'; then
  set -- --oversubscribe --bind-to none
else
  set --
fi

show() {
  echo "\$ $*"
  "$@"
}
show "$k3decode" synth tiny --output output/tiny.h5
show mpirun "$@" -n "$ranks" "$k3decode" run output/tiny.h5 --prompt "$prompt" --steps "$steps" --output output/quickstart.h5
show "$k3decode" info output/quickstart.h5
echo
show "$k3decode" report output/quickstart.h5 --output output/quickstart.html --overwrite || echo "quickstart: no page was drawn, all else is there" >&2
