#!/bin/sh
# Proves a checkout right: set-up, build, all tests. Ends with a line "N passed, N failed, N skipped".
#
#   jobs/check.sh [CONFIGURE-OPTION…]
#
# Environment: K3_BUILD_DIR another directory than build; K3_TEST_TIMEOUT seconds a test file may take (300).
# Exit status: 0 when nothing failed.
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
build=${K3_BUILD_DIR:-$root/build}

# Whatever ends this script early, the last line is the count.
trap 'echo "0 passed, 1 failed, 0 skipped"' EXIT
jobs/setup.sh
jobs/build.sh "$@"
make -s -C "$build" kernels
status=0
make -s -C "$build" -j2 check || status=$?
trap - EXIT

if [ "$status" -ne 0 ]; then
  for trs in "$build"/tests/*.trs; do
    grep -q -E '^:test-result: *(FAIL|ERROR|XPASS)' "$trs" 2>/dev/null || continue
    echo "---- ${trs%.trs}.log"
    tail -n 100 "${trs%.trs}.log"
  done
fi
grep -h -E '^skipped:|^SKIPPED' "$build"/tests/*.log 2>/dev/null | sort -u || :
if counts=$(sh tests/count_cases.sh "$build"); then
  if [ "$status" -ne 0 ]; then # the harness failed, though no case did: a test program that did not build, say
    echo "make check ended with status $status"
    echo "${counts%% passed*} passed, 1 failed,${counts##*failed,}"
    exit 1
  fi
else
  status=1
fi
echo "$counts"
exit "$status"
