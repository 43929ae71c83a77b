#!/bin/sh
# Parity over world sizes at K3's own layer dimensions: the same prompt on 1, 2, 4 and 8 ranks, each compared with
# one rank (mean KL at most 1e-9, all tokens alike). The model is made in place: no file, about 11 GB of memory.
#
#   jobs/parity.sh [OUTPUT.txt]
#
# Environment: MODEL (synth:k3:num_layers=5,num_experts=64), WORLDS ("1 2 4 8"), STEPS (16), PROMPT, OPTIONS of `k3decode run`
# (--activations f32); K3DECODE a program in the place of the one built here, K3_START what starts RANKS COMMAND… (mpirun).
# About six minutes on two cores. Exit status: 0 all agree, 1 one does not, else what run or compare gave.
set -eu

model=${MODEL:-synth:k3:num_layers=5,num_experts=64}
worlds=${WORLDS:-1 2 4 8}
steps=${STEPS:-16}
prompt=${PROMPT:-163839,17,4242}

root=$(cd "$(dirname "$0")/.." && pwd)
if [ -z "${K3DECODE:-}" ]; then
  "$root/jobs/setup.sh"
  "$root/jobs/build.sh"
fi
k3decode=${K3DECODE:-${K3_BUILD_DIR:-$root/build}/k3decode}
case $k3decode in /*) ;; */*) k3decode=$PWD/$k3decode ;; esac # it is started in another directory too
start_by_mpirun() { mpirun --oversubscribe --bind-to none -n "$@"; }
start=${K3_START:-start_by_mpirun}
options=${OPTIONS:---activations f32}
output=${1:-$root/output/parity.txt}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cores=$(nproc 2>/dev/null || echo 2)
if [ "$(id -u)" -eq 0 ]; then
  OMPI_ALLOW_RUN_AS_ROOT=1
  OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  export OMPI_ALLOW_RUN_AS_ROOT OMPI_ALLOW_RUN_AS_ROOT_CONFIRM
fi

{
  echo "# command: jobs/parity.sh (MODEL=$model WORLDS=\"$worlds\" STEPS=$steps PROMPT=$prompt OPTIONS=\"$options\")"
  echo "# program: $("$k3decode" --version | head -n 1); date: $(date -u +%Y-%m-%d)"
  echo "# device: $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1), $cores cores"
} | tee "$output"

first=
for world in $worlds; do
  threads=$((cores / world > 0 ? cores / world : 1))
  # shellcheck disable=SC2086 # a list of words
  OMP_NUM_THREADS=$threads $start "$world" "$k3decode" run "$model" \
    --prompt "$prompt" --steps "$steps" $options --output "$scratch/$world.h5"
  if [ -z "$first" ]; then
    first=$world
    continue
  fi
  status=0
  (cd "$scratch" && "$k3decode" compare "$first.h5" "$world.h5" --max-mean-kl 1e-9) >"$scratch/compare.txt" || status=$?
  {
    echo
    echo "# $first rank(s) against $world, $threads thread(s) a rank"
    cat "$scratch/compare.txt"
  } | tee -a "$output"
  [ "$status" -eq 0 ] || exit "$status"
  rm "$scratch/$world.h5"
done
echo "results: $output"
