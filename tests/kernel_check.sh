#!/bin/sh
# Builds kernel_check with nvcc alone (for a machine with a GPU and no build tree) and runs it.
#     tests/kernel_check.sh [arguments of kernel_check]
# Environment: NVCC, BUILD (a folder, /tmp/k3_kernel_check), K3_ATTENTION=1 to add the attention families' rows.
set -eu
cd "$(dirname "$0")/.."
PATH=$PATH:/usr/local/cuda/bin
NVCC=${NVCC:-nvcc} BUILD=${BUILD:-/tmp/k3_kernel_check}
mkdir -p "$BUILD"
flags="-gencode arch=compute_90a,code=sm_90a -O3 -std=c++17 -I. -Isrc -Xcompiler -fopenmp"
sources="kernels/launch.cu kernels/repack.cu kernels/linear.cu kernels/experts.cu kernels/norm.cu kernels/router.cu kernels/head.cu
 tests/kernel_check.cu tests/kernel_check_linear.cu tests/kernel_check_experts.cu tests/kernel_check_chain.cu"
if [ "${K3_ATTENTION:-0}" = 1 ]; then
  sources="$sources $(ls kernels/kda*.cu kernels/mla*.cu tests/kernel_check_attention.cu)"
fi
objects= jobs=
for source in $sources; do
  object=$BUILD/$(basename "$source" .cu).o
  objects="$objects $object"
  $NVCC $flags -c "$source" -o "$object" &
  jobs="$jobs $!"
done
for source in src/base/status.c src/plan/formats.c; do
  object=$BUILD/$(basename "$source" .c)_c.o
  objects="$objects $object"
  ${CC:-cc} -O2 -std=c11 -D_GNU_SOURCE -Isrc -c "$source" -o "$object"
done
for job in $jobs; do wait "$job"; done
$NVCC $flags $objects -o "$BUILD/kernel_check"
exec "$BUILD/kernel_check" "$@"
