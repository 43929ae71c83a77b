#!/bin/sh
# The program under the sanitizers and valgrind (tests/sanitize.sh), small models: a clean run.
set -eu
exec sh "${srcdir:-.}/tests/sanitize.sh" quick
