#!/bin/sh
# Runs one rank's command on the processor cores next to the GPU that this rank will choose; mpirun or srun starts it in the
# place of the command itself:
#
#   mpirun --bind-to none -n 8 jobs/bind.sh k3decode run MODEL …
#   srun --cpu-bind=none jobs/bind.sh k3decode run MODEL …
#
# The rank's GPU is the one whose place among the visible GPUs is the rank's place on its host. Its cores are those that the
# system calls local to that GPU, as far as this job may use them, dealt in equal runs to the ranks whose GPUs share them. NCCL
# and UCX then choose the network card nearest to GPU and core by themselves. Without a GPU, or where nothing is known of its
# place, the command runs unbound. K3_VERBOSE=1 says what was chosen.
# For tests: K3_SYSFS in the place of /sys.
set -eu

if [ $# -eq 0 ]; then
  sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
rank=${OMPI_COMM_WORLD_LOCAL_RANK:-${SLURM_LOCALID:-0}}
ranks=${OMPI_COMM_WORLD_LOCAL_SIZE:-${SLURM_NTASKS_PER_NODE:-1}}
sysfs=${K3_SYSFS:-/sys}
say() { [ "${K3_VERBOSE:-0}" = 0 ] || echo "bind: local rank $rank: $*" >&2; }

unbound() {
  say "$1, so not bound"
  shift
  exec "$@"
}

# "0-3,8" as "0 1 2 3 8"
numbers() {
  for part in $(echo "$1" | tr ',' ' '); do
    seq "${part%-*}" "${part#*-}"
  done
}

locals=$("$(dirname "$0")/gpus.sh" | awk -F, '{ print tolower($3) }' | while read -r address; do # nvidia-smi writes the PCI domain with eight digits, the kernel with four
  cat "$sysfs/bus/pci/devices/${address#0000}/local_cpulist" 2>/dev/null || echo -
done)
mine=$(echo "$locals" | sed -n "$((rank + 1))p")
case $mine in '' | -) unbound "the cores near its GPU are not known" "$@" ;; esac

# Which of the ranks on these cores this one is.
sharers=$(echo "$locals" | head -n "$ranks" | grep -c -x -F -e "$mine")
before=$(echo "$locals" | head -n "$rank" | grep -c -x -F -e "$mine" || :)

allowed=$(taskset -pc $$ 2>/dev/null | sed 's/.*: *//') || unbound 'taskset says nothing' "$@"
cores=$(for core in $(numbers "$mine"); do
  numbers "$allowed" | grep -x "$core" || :
done)
count=$(echo "$cores" | grep -c . || :)
[ "$count" -ge "$sharers" ] || unbound "too few of its GPU's cores ($mine) belong to this job ($allowed)" "$@"
first=$((count * before / sharers + 1))
last=$((count * (before + 1) / sharers))
chosen=$(echo "$cores" | sed -n "${first},${last}p" | paste -s -d , -)
say "cores $chosen, of $mine near its GPU"
exec taskset -c "$chosen" "$@"
