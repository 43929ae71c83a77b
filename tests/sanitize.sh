#!/bin/sh
# The program under AddressSanitizer and UndefinedBehaviorSanitizer, on one rank and on two, and under valgrind on one.
#
#   tests/sanitize.sh          small models, under a minute: `make check` runs this
#   tests/sanitize.sh full     more ranks, storage types and prompts
#
# Builds in a scratch folder that is removed at the end. Compiler and flags come from CC, MPI_CFLAGS, HDF5_CFLAGS,
# JSON_CFLAGS and the same with _LIBS, else from pkg-config. What Open MPI and HDF5 keep to their ends is listed in lsan.supp
# and valgrind.supp. Exit status: 0 clean, 77 skipped (with a reason), 1 otherwise.
set -u

mode=${1:-quick}
top=$(cd "${srcdir:-$(dirname "$0")/..}" && pwd)
# shellcheck source=tests/environment.sh
srcdir=$top . "$top/tests/environment.sh"
scratch=$(mktemp -d "${TMPDIR:-/tmp}/k3sanitize.XXXXXX") || exit 99
trap 'rm -rf "$scratch"' EXIT
trap 'exit 99' HUP INT TERM

flags() { # flags VARIABLE --cflags|--libs NAME…: the variable, or what pkg-config says of the first package it knows
  eval "given=\${$1:-}"
  if [ -n "$given" ]; then
    echo "$given"
    return
  fi
  what=$2
  shift 2
  for package in "$@"; do
    pkg-config --exists "$package" 2>/dev/null && exec pkg-config "$what" "$package"
  done
}
cflags="$(flags MPI_CFLAGS --cflags ompi-c ompi mpich) $(flags HDF5_CFLAGS --cflags hdf5-serial hdf5) $(flags JSON_CFLAGS --cflags json-c)"
libs="-lz $(flags MPI_LIBS --libs ompi-c ompi mpich) $(flags HDF5_LIBS --libs hdf5-serial hdf5) $(flags JSON_LIBS --libs json-c)"
mpirun=${MPIRUN:-mpirun}
cc=${CC:-gcc}

skip() {
  echo "skipped: $*"
  exit 77
}
fail() {
  echo "FAILED: $*"
  exit 1
}

# ---- building -------------------------------------------------------------------------------------------------
cat >"$scratch/config.h" <<END
#define PACKAGE_VERSION "sanitized"
#define HAVE_JSON_C 1
#define K3_BUILD_DIR "$scratch"
#define K3_HELPER_DIR "$top/src/helpers"
#define K3_HELPER_SOURCE_DIR "$top/src/helpers"
#define K3_PYTHON "${PYTHON:-}"
END

build() { # build NAME FLAG…
  name=$1
  shift
  mkdir -p "$scratch/$name"
  # shellcheck disable=SC2086,SC2016,SC2038 # lists of flags; the inner shell expands; no odd names
  (cd "$top" && find src -name '*.c' | xargs -P 2 -I{} sh -c 'object=$1/$(echo "$2" | tr / _).o && shift 2 && exec "$@" -o "$object"' \
    sh "$scratch/$name" {} $cc -std=c11 -D_GNU_SOURCE -DHAVE_CONFIG_H -g "$@" -I"$scratch" -Isrc $cflags -c {}) || return 1
  # shellcheck disable=SC2086
  $cc "$@" -rdynamic -o "$scratch/k3decode-$name" "$scratch/$name"/*.o "$top/tests/keep_modules.c" $libs -lm -lpthread
}

sanitizers='-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer'
echo 'int main(void) { return 0; }' >"$scratch/empty.c"
# shellcheck disable=SC2086,SC2015 # a list of flags; skip when either fails
$cc $sanitizers -o "$scratch/empty" "$scratch/empty.c" 2>/dev/null && "$scratch/empty" ||
  skip "$cc links no program with $sanitizers (Debian: libasan8 and libubsan1 come with gcc)"
# shellcheck disable=SC2086
build sanitized -O1 $sanitizers || fail "the sanitized program does not build"

# ---- running --------------------------------------------------------------------------------------------------
runs=0
try() { # try STATUS COMMAND…: runs it; the status must be that, and no sanitizer may speak
  wanted=$1
  shift
  runs=$((runs + 1))
  timeout -k 10 240 "$@" >"$scratch/log" 2>&1 </dev/null
  status=$?
  if [ $status -ne "$wanted" ] || grep -q -e 'Sanitizer' -e 'runtime error:' -e '== ERROR SUMMARY: [1-9]' "$scratch/log"; then
    head -c 20000 "$scratch/log"
    fail "exit status $status, wanted $wanted: $*"
  fi
}
k3=$scratch/k3decode-sanitized
on() { # on RANKS ARGUMENT…
  ranks=$1
  shift
  if [ "$ranks" -eq 1 ]; then try 0 "$k3" "$@"; else try 0 "$mpirun" -n "$ranks" "$k3" "$@"; fi
}

cd "$scratch" || exit 99
small=tiny:num_layers=5,hidden_size=64,vocab_size=101,num_heads=4,q_lora_rank=16,kv_lora_rank=32,qk_nope_head_dim=16
small=$small,dense_intermediate_size=64,num_experts=6,num_experts_per_token=2,latent_size=64,moe_intermediate_size=64
try 0 "$k3" synth "$small" --output small.h5
try 0 "$k3" synth "$small,trunk=q8_0,experts=mxfp4" --output blocks.h5
try 0 "$k3" info small.h5
try 0 "$k3" info --check blocks.h5
on 1 run small.h5 --prompt 1,2,3 --steps 3 --output one.h5
on 2 run small.h5 --prompt 1,2,3 --steps 3 --output two.h5
on 3 run blocks.h5 --prompt 1,2 --steps 2 --output blocks-run.h5 --logits top:5 --cache-band none --expert-grid 3x1
on 2 run "synth:$small,trunk=bf16,kda_head_dim=20" --context 130 --steps 2 --output context.h5
on 1 run small.h5 --prompt 1 --steps 2 --slice 1/4 --output slice.h5
try 0 "$k3" compare one.h5 two.h5 --max-mean-kl 1e-9
try 0 "$k3" info one.h5
try 0 "$k3" info --follow two.h5
try 3 "$k3" text encode --tokenizer nowhere text
try 3 "$k3" run small.h5 --prompt 1,101 --output bad.h5
try 3 "$k3" run small.h5 --prompt 1,,2
try 3 "$mpirun" -n 2 "$k3" run small.h5 --prompt 1 --output one.h5
head -c 30000 small.h5 >cut.h5
try 3 "$k3" run cut.h5 --prompt 1
try 2 "$k3" run small.h5 --prompt 1 --logits top:0
fixture=$top/tests/fixtures/public_k3
for variant in plain mxfp4; do
  [ -d "$fixture/$variant" ] || continue
  try 0 "$k3" import "$fixture/$variant" --output "$variant.h5" --trunk q8_0
  on 1 run "$variant.h5" --prompt 1,2 --steps 1 --overwrite --output imported.h5
done
if "${PYTHON:-python3}" -c 'import numpy' 2>/dev/null; then # a split GGUF, all block types, and a cut one
  "${PYTHON:-python3}" - "$top/tests" <<'END' || fail "the GGUF files cannot be made"
import pathlib, sys
sys.path.insert(0, sys.argv[1])
import gguf_model
kv, tensors = gguf_model.small_model(1, layers=5, mla=(2, 5), vocab=64, experts=2, top=1, dense_inner=256)
paths = gguf_model.write_split(pathlib.Path("."), "small", kv, tensors, 2)
pathlib.Path("cut.gguf").write_bytes(gguf_model.pack_gguf(kv, tensors)[:-1])
END
  try 0 "$k3" import small-00001-of-00002.gguf --output gguf.h5
  try 0 "$k3" info --check gguf.h5
  try 3 "$k3" import cut.gguf --output cut-gguf.h5
  try 3 "$k3" import small-00002-of-00002.gguf --output cut-gguf.h5
fi
if [ "$mode" = full ]; then
  try 0 "$k3" synth tiny --output tiny.h5
  for ranks in 1 2 4 8; do
    on "$ranks" run tiny.h5 --prompt 1,2,3,4,5,6,7,8 --steps 8 --overwrite --output "tiny-$ranks.h5"
    try 0 "$k3" compare tiny-1.h5 "tiny-$ranks.h5" --max-mean-kl 1e-9
    for types in trunk=bf16,experts=mxfp4 trunk=q8_0,experts=q8_0; do
      on "$ranks" run "synth:tiny:$types" --prompt 1,2 --steps 2 --overwrite --output types.h5
    done
  done
fi
echo "AddressSanitizer and UndefinedBehaviorSanitizer: $runs runs, clean"

# ---- valgrind, one rank ---------------------------------------------------------------------------------------
if ! command -v valgrind >/dev/null; then
  echo "valgrind: left out, it is not installed (Debian: valgrind)"
  exit 0
fi
build plain -O1 || fail "the program for valgrind does not build"
k3=$scratch/k3decode-plain
runs=0
very_small=$small,num_layers=2,layer_types=01
checked="valgrind -q --error-exitcode=99 --num-callers=40 --leak-check=full --show-leak-kinds=definite --errors-for-leak-kinds=definite --suppressions=$top/tests/valgrind.supp"
# shellcheck disable=SC2086
{
  try 0 $checked "$k3" run "synth:$very_small" --prompt 1,2 --steps 2 --overwrite --output valgrind.h5
  try 0 "$k3" synth "$very_small" --output very-small.h5
  try 0 $checked "$k3" run very-small.h5 --prompt 1,2 --steps 2 --overwrite --output valgrind.h5
  try 0 $checked "$k3" info valgrind.h5
}
echo "valgrind: $runs runs, clean"
