#!/bin/sh
# No complaint of shellcheck about any shell script of the checkout.
set -eu

cd "${srcdir:-.}"
command -v shellcheck >/dev/null || {
  echo "skipped: shellcheck is not installed (Debian: shellcheck)"
  exit 77
}
scripts=$(find bootstrap .ci/run jobs tests -type f \( -name '*.sh' -o -name '*.sbatch' -o -name bootstrap -o -name run \) | sort)
# shellcheck disable=SC2086 # a list of words
shellcheck --external-sources --format=gcc $scripts
echo "$scripts" | wc -l | sed 's/$/ scripts are clean/'
