#!/bin/sh
# Builds kernel_check with nvcc alone (for a machine with a GPU and no build tree; in one, make kernel_check) and runs it.
#     tests/kernel_check.sh [arguments of kernel_check]
# Environment: NVCC, CC, BUILD (a folder, /tmp/k3_kernel_check), K3_ATTENTION=1 to add the attention families' rows,
# K3_BUILD_ONLY=1 to build alone.
set -eu
cd "$(dirname "$0")/.."
PATH=$PATH:/usr/local/cuda/bin
NVCC=${NVCC:-nvcc} CC=${CC:-cc} BUILD=${BUILD:-/tmp/k3_kernel_check}
mkdir -p "$BUILD"

compile_cuda() { # source object
  "$NVCC" -gencode arch=compute_90a,code=sm_90a -O3 -std=c++17 -I. -Isrc -Xcompiler -fopenmp -c "$1" -o "$2"
}
compile_host() { # source object; the host twins have planted faults, for the controls
  "$CC" -O2 -std=c11 -D_GNU_SOURCE -DK3_BREAKAGE -Isrc -c "$1" -o "$2"
}

set -- kernels/experts.cu kernels/head.cu kernels/launch.cu kernels/linear.cu kernels/norm.cu kernels/repack.cu \
  tests/kernel_check.cu tests/kernel_check_chain.cu tests/kernel_check_experts.cu \
  tests/kernel_check_linear.cu src/base/status.c src/plan/formats.c -- "$@"
if [ "${K3_ATTENTION:-0}" = 1 ]; then
  set -- kernels/kda.cu kernels/mla_merge.cu kernels/mla_prepare.cu kernels/mla_slice.cu kernels/mla_tensor.cu \
    tests/kernel_check_attention.cu tests/kernel_check_slices.cu src/host/kda.c src/plan/attention.c src/plan/attention_tuning.c "$@"
fi

rm -f "$BUILD"/*.o # of another K3_ATTENTION
jobs=
while [ "$1" != -- ]; do
  object=$BUILD/$(echo "${1%.*}" | tr / _).o
  case $1 in
  *.cu) compile_cuda "$1" "$object" & ;;
  *) compile_host "$1" "$object" & ;;
  esac
  jobs="$jobs $!"
  shift
done
shift
for job in $jobs; do wait "$job"; done
"$NVCC" -Xcompiler -fopenmp "$BUILD"/*.o -o "$BUILD/kernel_check"
[ "${K3_BUILD_ONLY:-0}" = 1 ] && exit
exec "$BUILD/kernel_check" "$@"
