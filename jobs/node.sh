#!/bin/bash
# Decodes with k3decode from a shell on a node: a rank to a GPU, each on the processor cores next to it.
#
#   jobs/node.sh MODEL.h5 --prompt 1,2,3 --steps 64     any option of `k3decode run`
#   jobs/node.sh sweep MODEL.h5 --contexts 128,4096     another command that runs on all ranks: run, sweep
#
# Writes output/node-DATE-TIME.h5 unless --output is given, and ends with the page about it.
# Environment: RANKS (the number of GPUs; without one, tell how many ranks the host backend shall have); K3DECODE a program in the
# place of build/k3decode.
set -u

root=$(cd "$(dirname "$0")/.." && pwd)
refuse() {
  echo "node.sh: $2" >&2
  exit "$1"
}
command=run
case ${1:-} in
run | sweep) command=$1; shift ;;
'' | -h | --help)
  sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
  [ $# -gt 0 ]
  exit $(($? * 2)) ;;
esac

k3decode=${K3DECODE:-$root/build/k3decode}
[ -x "$k3decode" ] || k3decode=$(command -v k3decode) || refuse 2 "no k3decode in $root/build nor on PATH: build it (jobs/build.sh), or name it by K3DECODE"
command -v mpirun >/dev/null || refuse 2 "no mpirun on PATH: load your site's Open MPI module, or run jobs/setup.sh"
if [ -n "${SLURM_JOB_ID:-}" ] && [ "${SLURM_NNODES:-1}" -gt 1 ]; then
  refuse 2 "this allocation has $SLURM_NNODES nodes, and node.sh serves one: submit jobs/decode.sbatch"
fi

gpus=$("$root/jobs/gpus.sh" | wc -l)
ranks=${RANKS:-$gpus}
case $ranks in
'' | *[!0-9]*) refuse 2 "RANKS=$ranks is no number of ranks" ;;
0) refuse 4 "no GPU is seen here; for the host backend say how many ranks: RANKS=2 jobs/node.sh …" ;;
esac
if [ "$gpus" -gt 0 ] && [ "$ranks" -gt "$gpus" ]; then
  refuse 4 "$ranks ranks, but $gpus GPUs: each rank needs one"
fi
if [ "$(id -u)" -eq 0 ]; then # Open MPI asks root to say so twice
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi

output=
for option; do
  case $option in --output | --output=* | -h | --help) output=theirs ;; esac
done
if [ -z "$output" ]; then
  output=output/node-$(date +%Y%m%d-%H%M%S).h5
  mkdir -p output
  set -- "$@" --output "$output"
fi
echo "node.sh: $ranks ranks, $gpus GPUs; mpirun … $k3decode $command $*" >&2
mpirun --oversubscribe --bind-to none -n "$ranks" "$root/jobs/bind.sh" "$k3decode" "$command" "$@" || exit
[ "$output" = theirs ] || exec "$k3decode" info "$output"
