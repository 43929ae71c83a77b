#!/bin/sh
# Adds up the cases of a finished `make check`: count_cases.sh BUILD_DIR. Prints "N passed, N failed, N skipped".
# A test whose log has no line of counts (it is one case, or never ended) counts as one, by its .trs file.
# Exit status: 0, or 1 when a case failed or none ran.
set -eu

passed=0 failed=0 skipped=0
for trs in "$1"/tests/*.trs; do
  [ -f "$trs" ] || continue
  log=${trs%.trs}.log
  result=$(sed -n 's/^:test-result: *//p' "$trs" | sed -n 1p)
  counts=$(sed -n 's/^cases: \([0-9]*\) passed, \([0-9]*\) failed, \([0-9]*\) skipped$/\1 \2 \3/p' "$log" 2>/dev/null | tail -n 1)
  if [ -z "$counts" ]; then
    case $result in
      PASS | XFAIL) counts='1 0 0' ;;
      SKIP) counts='0 0 1' ;;
      *) counts='0 1 0' ;;
    esac
  fi
  # shellcheck disable=SC2086 # three numbers
  set -- $counts
  passed=$((passed + $1)) failed=$((failed + $2)) skipped=$((skipped + $3))
done
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
