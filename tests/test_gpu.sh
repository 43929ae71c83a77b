#!/bin/sh
# What needs a GPU, where jobs/gpus.sh finds one: the kernels against their references (kernel_check, without times),
# then the backend against the host's on the small model and with planted faults (jobs/gpu_check.sh tiny guard). The
# whole proof and the times: jobs/gpu_check.sh.
set -u

here=$(cd "${srcdir:-.}" && pwd)
if [ -z "${NVCC:-}" ]; then
  echo "skipped: the GPU's checks need a build with CUDA, and configure found no nvcc"
  exit 77
fi
if [ -z "$("$here/jobs/gpus.sh")" ]; then
  echo "skipped: the GPU's checks need a GPU, and nvidia-smi finds none that may be used"
  exit 77
fi

passed=0 failed=0
count() { # status what
  if [ "$1" -eq 0 ]; then passed=$((passed + 1)); else failed=$((failed + 1)) && echo "failed: $2"; fi
}
nvidia-smi -L
MAKEFLAGS='' make -s kernel_check
count $? 'make kernel_check'
if [ -x tests/kernel_check ]; then
  timeout -k 10 300 tests/kernel_check --no-time
  count $? 'tests/kernel_check --no-time'
fi
OUT=$PWD/tests/gpu_check timeout -k 10 500 bash "$here/jobs/gpu_check.sh" tiny guard
count $? 'jobs/gpu_check.sh tiny guard'
echo "cases: $passed passed, $failed failed, 0 skipped"
[ "$failed" -eq 0 ]
