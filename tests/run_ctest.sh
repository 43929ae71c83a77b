#!/bin/sh
# Runs one cmocka program under a time limit: run_ctest.sh PROGRAM. Its TAP lines are counted into the log's last
# line, which count_cases.sh adds up. Exit status: 0 passed, 77 all skipped, 1 otherwise.
set -u

limit=${K3_TEST_TIMEOUT:-300}
log=$(mktemp "${TMPDIR:-/tmp}/k3ctest.XXXXXX") || exit 99
trap 'rm -f "$log"' EXIT
trap 'exit 99' HUP INT TERM

CMOCKA_MESSAGE_OUTPUT=TAP timeout -k 10 "$limit" "$@" >"$log" 2>&1 </dev/null
status=$?
cat "$log"
[ "$status" -eq 124 ] && echo "run_ctest.sh: $1 was ended after $limit s (K3_TEST_TIMEOUT)"

skipped=$(grep -c -E '^(not )?ok .*# *SKIP' "$log")
passed=$(grep -E '^ok ' "$log" | grep -c -v -E '# *SKIP')
failed=$(grep -E '^not ok ' "$log" | grep -c -v -E '# *SKIP')
if [ "$status" -ne 0 ] && [ "$status" -ne 77 ] && [ "$failed" -eq 0 ]; then
  echo "run_ctest.sh: exit status $status though no case failed: it counts as one"
  failed=1
fi
[ $((passed + failed + skipped)) -eq 0 ] && { [ "$status" -eq 77 ] && skipped=1 || passed=1; }
echo "cases: $passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ] || exit 1
[ "$passed" -gt 0 ] || exit 77
