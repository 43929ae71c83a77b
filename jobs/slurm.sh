# shellcheck shell=bash
# What the batch scripts have in common; they source it. Gives $k3decode, refuse, start_ranks, stop_before_limit.
# Environment: K3DECODE the program (default: build/k3decode of the checkout, else what is on PATH); K3_LAUNCHER srun or mpirun
# (default: srun where it speaks PMIx); K3_REQUEUE=0 stops at the time limit and stays stopped.

refuse() { # STATUS SENTENCE
  echo "${job_script:-k3decode job}: $2" >&2
  exit "$1"
}

[ -n "${SLURM_JOB_ID:-}" ] || refuse 2 "this is a batch script: submit it by sbatch (in a shell on a node, jobs/node.sh does the same)"

k3decode=${K3DECODE:-$root/build/k3decode}
[ -x "$k3decode" ] || k3decode=$(command -v k3decode) ||
  refuse 2 "no k3decode in $root/build nor on PATH: build it (jobs/build.sh), or name it by K3DECODE"

launcher=${K3_LAUNCHER:-}
if [ -z "$launcher" ]; then
  launcher=mpirun
  srun --mpi=list 2>&1 | grep -q -w pmix && launcher=srun
fi
case $launcher in
srun | mpirun) ;;
*) refuse 2 "K3_LAUNCHER is srun or mpirun, not $launcher" ;;
esac

if [ "$(id -u)" -eq 0 ]; then # Open MPI asks root to say so twice
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi

# start_ranks N COMMAND…: a task to a GPU, each on the cores next to it. The GPUs of a node stay visible to all its tasks:
# NCCL needs its peers. With in_place=exec it becomes the launcher, which then is what a signal reaches.
start_ranks() {
  local ranks=$1
  shift
  if [ "$launcher" = srun ]; then
    ${in_place:-} srun --mpi=pmix --ntasks="$ranks" --kill-on-bad-exit=1 --cpu-bind=none --gpu-bind=none "$root/jobs/bind.sh" "$@"
  else
    ${in_place:-} mpirun --bind-to none -n "$ranks" "$root/jobs/bind.sh" "$@"
  fi
}

# stop_before_limit FILE COMMAND…: runs COMMAND. On the signal that Slurm sends before the time limit (#SBATCH --signal=B:USR1@…)
# it tells the ranks, which finish their step and write FILE; then the job is requeued, and its next start goes on from FILE.
# Leaves COMMAND's exit status in $status. COMMAND is start_ranks ….
stop_before_limit() {
  local file=$1 pid stopped=0 before
  before=$(stat -c '%i %y' "$file" 2>/dev/null)
  shift
  in_place="exec" "$@" &
  pid=$!
  trap 'stopped=1; echo "$job_script: the time limit is near, stopping the ranks"; kill -USR1 $pid' USR1
  wait "$pid"
  status=$?
  while kill -0 "$pid" 2>/dev/null; do # the trap ended the first wait
    wait "$pid"
    status=$?
  done
  trap - USR1
  [ "$stopped" = 1 ] && [ "$status" -ne 0 ] && [ "${K3_REQUEUE:-1}" = 1 ] || return 0
  if [ ! -e "$file" ]; then
    echo "$job_script: stopped with status $status, and there is no $file to go on from: not requeued" >&2
    return 0
  fi
  if [ "$(stat -c '%i %y' "$file")" = "$before" ]; then # or it would go round for ever
    echo "$job_script: stopped with status $status before it had written $file anew: not requeued, give it more time" >&2
    return 0
  fi
  echo "$job_script: requeued, to go on from $file"
  scontrol requeue "$SLURM_JOB_ID"
}
