#!/bin/sh
# The readers of GGUF and safetensors over the inputs that fuzzing kept: no crash, no memory beyond the file's size.
set -u

top=$(cd "${srcdir:-$(dirname "$0")/..}" && pwd)
passed=0 failed=0
for name in gguf safetensors; do
  program=tests/fuzz/replay_$name
  if ! [ -x "$program" ]; then
    echo "not built, so not run: $program"
    continue
  fi
  if timeout 60 "$program" "$top/tests/fuzz/corpus_$name"; then
    passed=$((passed + 1))
  else
    echo "FAILED: $program, exit status $?"
    failed=$((failed + 1))
  fi
done
echo "cases: $passed passed, $failed failed, 0 skipped"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
