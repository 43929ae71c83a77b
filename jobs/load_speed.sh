#!/bin/sh
# How fast a rank loads its weights, against dd on the same file: k3decode should reach 80 % of it or more.
#
#   jobs/load_speed.sh [FOLDER [OUTPUT.txt]]
#
# Writes a synthetic model of a few GiB into FOLDER (default: a new one in /tmp; it must be on the disk that is asked about),
# then in turns reads it by dd with blocks of BLOCK and loads it by `k3decode run` on one rank, each time after the file's
# pages were dropped from the system's cache (posix_fadvise, by dd; it wants no root). A turn whose pages stay cached would
# measure memory: the first column of the table says how much of the file was cached when the turn began, where fincore knows.
# Environment: MODEL (k3:num_layers=2,vocab_size=16384,num_experts=192), TURNS (3), BLOCK (64M), BACKEND (host).
# Exit status: 0 at 80 % or more of dd (medians), 1 below, else what synth or run gave.
set -eu

model=${MODEL:-k3:num_layers=2,vocab_size=16384,num_experts=192}
turns=${TURNS:-3}
block=${BLOCK:-64M}

root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
[ -x "${K3_BUILD_DIR:-$root/build}/k3decode" ] || { jobs/setup.sh && jobs/build.sh; }
k3decode=${K3_BUILD_DIR:-$root/build}/k3decode
made=
folder=${1:-}
if [ -z "$folder" ]; then
  folder=$(mktemp -d "${TMPDIR:-/tmp}/k3load.XXXXXX")
  made=$folder
fi
output=${2:-output/load_speed.txt}
file=$folder/k3-load-speed.h5
trap 'rm -f "$file" "$file".partial*; [ -z "$made" ] || rmdir "$made"' EXIT
trap 'exit 130' HUP INT TERM

drop() { # the file's clean pages leave the cache
  sync "$file"
  dd if="$file" iflag=nocache count=0 2>/dev/null
}
cached() { # per cent of the file in the cache
  if command -v fincore >/dev/null; then
    fincore --bytes --noheadings --output RES,SIZE "$file" | awk '{ printf "%d", 100 * $1 / $2 }'
  else printf '?'; fi
}
seconds() { date +%s.%N; }

"$k3decode" synth "$model" --output "$file" --overwrite >/dev/null
bytes=$(stat -c %s "$file")
{
  echo "# command: jobs/load_speed.sh (MODEL=$model TURNS=$turns BLOCK=$block)"
  echo "# program: $("$k3decode" --version | head -n 1); date: $(date -u +%Y-%m-%d)"
  echo "# device: $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1), $(nproc) cores; disk: $(df --output=source,fstype "$folder" | tail -n 1)"
  echo "# load average at the start: $(cut -d' ' -f1-3 /proc/loadavg)"
  awk -v bytes="$bytes" 'BEGIN { printf "# file: %.3f GB\n", bytes / 1e9 }'
  echo "# cached: per cent of the file in the system's cache before the turn"
  echo 'turn  cached    dd GB/s  cached  load GB/s'
} | tee "$output"

rates=$(mktemp)
turn=1
while [ "$turn" -le "$turns" ]; do
  drop
  before_dd=$(cached)
  start=$(seconds)
  dd if="$file" of=/dev/null bs="$block" 2>/dev/null
  dd_rate=$(awk -v a="$start" -v b="$(seconds)" -v bytes="$bytes" 'BEGIN { printf "%.3f", bytes / 1e9 / (b - a) }')
  drop
  before_load=$(cached)
  said=$(K3_VERBOSE=1 "$k3decode" run "$file" --backend "${BACKEND:-host}" --prompt 1 --steps 1 2>&1 >/dev/null | grep 'loaded')
  load_rate=$(echo "$said" | sed -n 's/^rank 0: loaded .*, \([0-9.]*\) GB\/s$/\1/p' | head -n 1)
  printf '%4d  %6s  %9s  %6s  %9s\n' "$turn" "$before_dd" "$dd_rate" "$before_load" "$load_rate" | tee -a "$output"
  echo "$dd_rate $load_rate" >>"$rates"
  turn=$((turn + 1))
done
median() { cut -d' ' -f"$1" "$rates" | sort -n | awk '{ v[NR] = $1 } END { print v[int((NR + 1) / 2)] }'; }
awk -v dd="$(median 1)" -v load="$(median 2)" 'BEGIN {
  printf "median: dd %.3f GB/s, load %.3f GB/s: %.0f %% of dd\n", dd, load, 100 * load / dd
  exit !(load >= 0.8 * dd) }' | tee -a "$output"
rm -f "$rates"
tail -n 1 "$output" | awk '{ sub("%", "", $NF); for (i = 1; i <= NF; i++) if ($i == "%") share = $(i - 1); exit !(share >= 80) }'
