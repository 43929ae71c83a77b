#!/bin/sh
# Builds k3decode into build/ (git ignores it): bootstrap, configure, make, each only where needed.
#
#   jobs/build.sh [CONFIGURE-OPTION…]      e.g. jobs/build.sh --with-cuda --with-nccl
#
# Environment: K3_BUILD_DIR another directory than build; CC, CFLAGS … as configure takes them.
# Options are for the first build of a directory; with others, remove it or choose another K3_BUILD_DIR.
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
build=${K3_BUILD_DIR:-$root/build}

if [ -f "$root/config.status" ]; then
  echo "build: $root itself is configured, and then no second directory can be: run 'make distclean' there first" >&2
  exit 1
fi
# with a configured directory, make itself sees that configure.ac or Makefile.am is newer
if [ ! -x "$root/configure" ] || [ ! -f "$root/Makefile.in" ] ||
  [ -n "$(find "$root/configure.ac" "$root/Makefile.am" -newer "$root/Makefile.in")" ]; then
  "$root/bootstrap" >&2
fi
mkdir -p "$build"
cd "$build"
if [ ! -f config.status ] || [ ! -f Makefile ]; then
  "$root/configure" "$@" >configure.out || {
    status=$?
    tail -n 20 configure.out >&2
    exit $status
  }
  sed -n '/will be built with/,$p' configure.out
fi
make -s -j "$(nproc 2>/dev/null || echo 2)"
