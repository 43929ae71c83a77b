# What the scripts that prove things on a GPU share; sourced by jobs/gpu_check.sh and jobs/attention_check.sh with
#
#   check=NAME all='SECTION…' sections=${*:-$all}
#   . jobs/check_lib.sh
#
# and, where more than the program is needed, build_options and build_programs (of make) before that.
# Sets out, work, mpirun, K3DECODE (built unless given), the table and the thresholds; `finish` ends the script.
# shellcheck shell=bash disable=SC2086,SC2034,SC2154 # lists of words; names of the scripts that source it

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root" || exit 1
out=${OUT:-$root/output/$check}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out"
for section in $sections; do
  case " $all " in *" $section "*) ;; *) echo "$check: there is no section $section; there are: $all" && exit 2 ;; esac
done
mpirun=${K3MPIRUN:-mpirun --oversubscribe --bind-to none}
if [ "$(id -u)" -eq 0 ]; then
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi
if [ -z "${K3DECODE:-}" ]; then
  {
    K3_BUILD_DIR=$root/build-gpu jobs/build.sh --with-cuda ${build_options:-} &&
      make -s -C "$root/build-gpu" k3decode ${build_programs:-}
  } >"$out/build.log" 2>&1 || {
    tail -n 30 "$out/build.log"
    echo "$check: the build failed"
    exit 1
  }
  K3DECODE=$root/build-gpu/k3decode
fi

echo "# jobs/$check.sh $sections; $(date -u +%F); $($K3DECODE --version | head -n 1)"
table=$out/table.txt
: >"$table"
row() { # name verdict figure; also from runs side by side
  printf '%-44s %-5s %s\n' "$1" "$2" "$3" >>"$table"
  [ "$2" != FAIL ] || echo "$1" >>"$work/failed"
}
wanted() { case " $sections " in *" $1 "*) return 0 ;; esac; return 1; }
note() { echo "[$SECONDS s] $*"; }

# decode NAME MODEL OPTION…: a run file $work/NAME.h5, log $out/NAME.log
decode() {
  local name=$1
  shift
  timeout "${LIMIT:-60}" $K3DECODE run "$@" --output "$work/$name.h5" --overwrite >"$out/$name.log" 2>&1 </dev/null
}
decode_ranks() {
  local name=$1 ranks=$2
  shift 2
  timeout "${LIMIT:-60}" $mpirun -n "$ranks" $K3DECODE run "$@" --output "$work/$name.h5" --overwrite >"$out/$name.log" 2>&1 </dev/null
}
# same ROW A B THRESHOLD…: compares run files; the figure is the mean KL divergence
same() {
  local name=$1 a=$2 b=$3
  shift 3
  if [ ! -f "$work/$b.h5" ] || [ ! -f "$work/$a.h5" ]; then
    local log=$b
    [ -f "$work/$a.h5" ] || log=$a
    row "$name" FAIL "no run: $(grep -h k3decode: "$out/$log.log" | head -n 1 | cut -c1-220)"
    return
  fi
  if $K3DECODE compare "$work/$a.h5" "$work/$b.h5" "$@" >"$out/$a-$b.txt" 2>&1; then verdict=ok; else verdict=FAIL; fi
  row "$name" $verdict "$(awk '/^mean KL/ {kl=$4} /^top-1/ {top=$3} /^largest logit/ {e=$4} /^compared/ {n=$2 "/" $4} END {print "mean KL " kl ", top-1 " top ", logit error " e ", steps " n}' "$out/$a-$b.txt")"
}
exact='--max-mean-kl 1e-9'
codes='--max-mean-kl 1e-5'
equal='--max-mean-kl 0 --max-logit-error 0'

# fails ROW STATUS PHRASE command…
fails() {
  local name=$1 status=$2 phrase=$3 got
  shift 3
  timeout 60 "$@" >"$out/guard.log" 2>&1 </dev/null
  got=$?
  if [ $got -eq "$status" ] && grep -q "$phrase" "$out/guard.log"; then row "$name" ok "exit $got, \"$phrase\""
  else row "$name" FAIL "exit $got: $(grep -h k3decode: "$out/guard.log" | head -n 1 | cut -c1-200)"; fi
}

gpus=$(jobs/gpus.sh | wc -l)
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null | sed 's/^/# /'

# sanitize ROW TOOL command…: compute-sanitizer; exit status 0 and nothing found
sanitize() {
  local name=$1 tool=$2 got log
  shift 2
  command -v compute-sanitizer >/dev/null || { row "$name" skip 'no compute-sanitizer'; return; }
  log=$out/$(echo "$name" | tr -c 'a-zA-Z0-9\n' '-').log
  K3_POOL=separate timeout "${LIMIT:-90}" compute-sanitizer --tool "$tool" --error-exitcode 99 "$@" >"$log" 2>&1 </dev/null
  got=$?
  if [ $got -eq 0 ]; then row "$name" ok "$(tail -n 1 "$log")"
  else row "$name" FAIL "exit $got: $(grep -m1 -E 'Error|hazard|Race|k3decode:' "$log" | cut -c1-150)"; fi
}

finish() {
  note 'done'
  cat "$table"
  local failed rows
  failed=$(grep -c . "$work/failed" 2>/dev/null || :) rows=$(wc -l <"$table")
  if [ "${failed:-0}" -gt 0 ]; then
    echo "$check: $failed of $rows rows failed"
    exit 1
  fi
  echo "$check: all $rows rows passed"
}
