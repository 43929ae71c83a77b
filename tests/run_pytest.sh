#!/bin/sh
# Runs one file of Python tests under a time limit: run_pytest.sh FILE. The cases are counted into the log's last
# line, which count_cases.sh adds up. Exit status: 0 passed, 77 all skipped (with a reason), 1 otherwise.
set -u

file=$1
if [ -z "${PYTHON:-}" ]; then
  echo "skipped: $file needs a Python 3 with numpy, h5py and pytest (Debian: python3-numpy python3-h5py" \
    "python3-pytest), and configure found none (PYTHON=... ./configure names one)"
  exit 77
fi
for module in numpy h5py pytest; do
  if ! "$PYTHON" -c "import $module" 2>/dev/null; then
    echo "skipped: $file needs $module, and $PYTHON does not import it (Debian: python3-$module)"
    exit 77
  fi
done

limit=${K3_TEST_TIMEOUT:-300}
report=$PWD/tests/$(basename "$file" .py).xml
mkdir -p tests
rm -f "$report"

timeout -k 10 "$limit" "$PYTHON" -m pytest -v -rs --tb=short -p no:cacheprovider --junitxml="$report" "$file" </dev/null
status=$?
[ "$status" -eq 124 ] && echo "run_pytest.sh: $file was ended after $limit s (K3_TEST_TIMEOUT)"

counts=$("$PYTHON" - "$report" <<'END'
import sys
import xml.etree.ElementTree as tree
try:
    cases = list(tree.parse(sys.argv[1]).iter("testcase"))
except (OSError, tree.ParseError):
    cases = []
failed = sum(case.find("failure") is not None or case.find("error") is not None for case in cases)
skipped = sum(case.find("skipped") is not None for case in cases)
print(len(cases) - failed - skipped, failed, skipped)
END
) || counts='0 0 0'
# shellcheck disable=SC2086 # three numbers
set -- $counts
passed=$1 failed=$2 skipped=$3
if [ "$status" -ne 0 ] && [ "$failed" -eq 0 ]; then
  echo "run_pytest.sh: exit status $status though no case failed: it counts as one"
  failed=1
fi
echo "cases: $passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ] || exit 1
[ "$passed" -gt 0 ] || exit 77
