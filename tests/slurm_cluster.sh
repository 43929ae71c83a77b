#!/bin/sh
# A real Slurm of one node on this machine, for tests: munged, slurmctld and slurmd with keys, state and ports of their own.
#
#   tests/slurm_cluster.sh start DIR [CPUS]    writes DIR/slurm.conf (export SLURM_CONF), waits until the node is idle
#   tests/slurm_cluster.sh stop DIR            ends its jobs and daemons
#
# The node claims CPUS processors (16) and eight GPUs that are counted, not opened. A requeued job starts again after some
# seconds (cred_expire), not minutes. Exit status: 0, 1 it does not start (why is
# said), 77 Slurm or munge is not installed.
set -u

command=${1:-} dir=${2:-} cpus=${3:-16}
[ -n "$dir" ] || { sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2; exit 2; }

end_daemons() {
  for daemon in slurmd slurmctld munged; do
    [ -f "$dir/$daemon.pid" ] && kill "$(cat "$dir/$daemon.pid")" 2>/dev/null
  done
  for _ in $(seq 50); do
    pgrep -f "$dir/(slurm.conf|munge.key)" >/dev/null || return 0
    sleep 0.1
  done
  pkill -9 -f "$dir/(slurm.conf|munge.key)"
}

case $command in
stop)
  SLURM_CONF=$dir/slurm.conf scancel --full --state=RUNNING --user="$(id -un)" 2>/dev/null
  end_daemons
  exit 0
  ;;
start) ;;
*) exit 2 ;;
esac

for program in munged slurmctld slurmd sbatch; do
  PATH=$PATH:/usr/sbin command -v $program >/dev/null || {
    echo "skipped: $program is not installed (Debian: slurmctld slurmd slurm-client munge)"
    exit 77
  }
done
PATH=$PATH:/usr/sbin
mkdir -p "$dir/state" "$dir/spool"
chmod 700 "$dir"
dir=$(cd "$dir" && pwd)
user=$(id -un) host=$(hostname -s)
free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

(umask 077 && head -c 1024 /dev/urandom >"$dir/munge.key")
cat >"$dir/slurm.conf" <<END
ClusterName=k3test
SlurmctldHost=$host(127.0.0.1)
SlurmUser=$user
SlurmdUser=$user
AuthType=auth/munge
AuthInfo=socket=$dir/munge.socket,cred_expire=5
SlurmctldPort=$(free_port)
SlurmdPort=$(free_port)
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
OverTimeLimit=0
KillWait=60
GresTypes=gpu
NodeName=$host NodeAddr=127.0.0.1 CPUs=$cpus RealMemory=4000 Gres=gpu:8 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
END
for gpu in 0 1 2 3 4 5 6 7; do : >"$dir/gpu$gpu"; done
echo "Name=gpu File=$dir/gpu[0-7]" >"$dir/gres.conf"

{
  munged --force --key-file="$dir/munge.key" --socket="$dir/munge.socket" --pid-file="$dir/munged.pid" \
    --log-file="$dir/munged.log" --seed-file="$dir/munged.seed" &&
    slurmctld -f "$dir/slurm.conf" && slurmd -f "$dir/slurm.conf"
} >"$dir/start.log" 2>&1 </dev/null || {
  echo "slurm_cluster: the daemons do not start:"
  cat "$dir/start.log"
  end_daemons
  exit 1
}
SLURM_CONF=$dir/slurm.conf
export SLURM_CONF
for _ in $(seq 120); do
  sinfo -h -o %T 2>/dev/null | grep -q -x idle && exit 0
  sleep 0.5
done
echo "slurm_cluster: the node is not idle after a minute:"
sinfo 2>&1
tail -n 20 "$dir/slurmctld.log" "$dir/slurmd.log"
end_daemons
exit 1
