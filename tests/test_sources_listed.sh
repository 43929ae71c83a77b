#!/bin/sh
# Every source, header, kernel and test of a git checkout is named in Makefile.am: an unlisted one would be missing
# from the program or from `make dist`.
set -eu

cd "${srcdir:-.}"
if ! [ -e .git ]; then
  echo "skipped: not a git checkout, so no list of files to compare with"
  exit 77
fi
missing=0
for file in $(find src kernels tests -path tests/fixtures -prune -o -type f \
  \( -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' -o -name '*.py' \) -print | sort); do
  stem=${file%.c}
  if ! tr -s '[:space:]' '\n' <Makefile.am | grep -q -x -F -e "$file" -e "$stem"; then
    echo "not listed in Makefile.am: $file"
    missing=$((missing + 1))
  fi
done
echo "$missing files are not listed"
[ "$missing" -eq 0 ]
