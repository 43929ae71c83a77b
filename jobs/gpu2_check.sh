#!/bin/bash
# Proves the CUDA backend on two GPUs of one host: the collectives themselves (bit for bit, delayed ranks, microseconds), two ranks
# against one and against the host backend, launchers that narrow the list of GPUs, a rank that stops or dies, and what the
# collectives cost a step. Ends with a table; exit status 0 when every row passed.
#
#   jobs/gpu2_check.sh [SECTION…]     comm cost guard hang tiny k3; all of them without arguments
#
# Environment: K3DECODE and COMM_CHECK the programs (default: built into build-gpu); K3MPIRUN what starts ranks (mpirun
# --bind-to none); OUT a folder for logs (default: output/gpu2_check); K3_PARALLEL runs at a time where nothing is timed (4);
# K3_WAYS ways of communicating ("nccl device"); K3_LIMIT_S seconds after which no new run begins (none).
# shellcheck disable=SC2086,SC2046,SC2016,SC2013,SC2030,SC2031 # lists of words are split on purpose; inner shells expand and set
set -u

root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root" || exit 1
out=${OUT:-$root/output/gpu2_check}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out" "$work/rows"
sections=${*:-comm cost guard hang tiny k3}
mpirun=${K3MPIRUN:-mpirun --bind-to none}
parallel=${K3_PARALLEL:-4} ways=${K3_WAYS:-nccl device} limit=${K3_LIMIT_S:-100000}
export NCCL_NVLS_ENABLE=0 # no multicast: design, and some hosts forbid it
if [ "$(id -u)" -eq 0 ]; then
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi
if [ -z "${K3DECODE:-}" ]; then
  { K3_BUILD_DIR=$root/build-gpu jobs/build.sh --with-cuda --with-nccl && make -C build-gpu tests/comm_check; } >"$out/build.log" 2>&1 || {
    tail -n 30 "$out/build.log"
    echo "gpu2_check: the build failed"
    exit 1
  }
  K3DECODE=$root/build-gpu/k3decode COMM_CHECK=$root/build-gpu/tests/comm_check
fi
gpus=$(jobs/gpus.sh | wc -l)
if [ "$gpus" -lt 2 ]; then
  echo "gpu2_check: needs two GPUs, sees $gpus"
  exit 77
fi
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader | sed 's/^/# /'
export K3DECODE mpirun work out limit

row() { # order name verdict figure: a file a row, so that runs side by side do not mix them
  printf '%-46s %-5s %s\n' "$2" "$3" "$4" >"$work/rows/$1"
}
wanted() { case " $sections " in *" $1 "*) return 0 ;; esac; return 1; }
note() { echo "[$SECONDS s] $*"; }
first_error() { grep -h k3decode: "$out/$1.log" | head -n 1 | cut -c1-230; }

# decode NAME RANKS OPTION…: a run file $work/NAME.h5, log $out/NAME.log; RANKS 0: no mpirun
decode() {
  local name=$1 ranks=$2 with=
  shift 2
  [ "$(($(date +%s) - begin))" -ge "$limit" ] && { echo "k3decode: not run: out of time" >"$out/$name.log"; return 1; }
  [ "$ranks" -gt 0 ] && with="$mpirun -n $ranks"
  timeout "${LIMIT:-40}" $with $K3DECODE run "$@" --output "$work/$name.h5" --overwrite >"$out/$name.log" 2>&1 </dev/null
}
# same ORDER ROW A B THRESHOLD…: compares run files
same() {
  local order=$1 name=$2 a=$3 b=$4
  shift 4
  if [ ! -f "$work/$b.h5" ] || [ ! -f "$work/$a.h5" ]; then
    local log=$b
    [ -f "$work/$a.h5" ] || log=$a
    row "$order" "$name" FAIL "no run: $(first_error "$log")"
    return
  fi
  if $K3DECODE compare "$work/$a.h5" "$work/$b.h5" "$@" >"$out/$a-$b.txt" 2>&1; then verdict=ok; else verdict=FAIL; fi
  row "$order" "$name" $verdict "$(awk '/^mean KL/ {kl=$4} /^top-1/ {top=$3} /^largest logit/ {e=$4} /^compared/ {n=$2 "/" $4} END {print "mean KL " kl ", top-1 " top ", logit error " e ", steps " n}' "$out/$a-$b.txt")"
}
begin=$(date +%s)
export begin
export -f decode same row first_error
exact='--max-mean-kl 1e-9'
equal='--max-mean-kl 0 --max-logit-error 0'

tiny_model=synth:tiny:trunk=q8_0,experts=mxfp4
k3_model=synth:k3:num_layers=5,num_experts=64,vocab_size=4096
with_context() { [ "$1" -gt 0 ] && echo "--context $1"; }

# hosts KIND MODEL THREADS OPTION…: the host backend's runs, beside everything else; their pids in $hosts_pids
hosts_pids=
hosts() {
  local kind=$1 model=$2 threads=$3
  shift 3
  for context in 0 4096 12289; do
    LIMIT=140 OMP_NUM_THREADS=$threads decode "$kind-$context-host" 0 "$model" "$@" $(with_context $context) --backend host &
    hosts_pids="$hosts_pids $!"
  done
}
tiny_options='--prompt 3,1,4,1,5 --steps 12' k3_options='--prompt 7,8 --steps 2'
cores=$(nproc)
wanted k3 && hosts k3 $k3_model $((cores * 9 / 32 + 1)) $k3_options
wanted tiny && hosts tiny $tiny_model 1 $tiny_options

# --- the collectives -------------------------------------------------------------------------------------------------
if wanted comm; then
  good=
  for way in $ways; do
    note "comm $way"
    K3_COMM=$way timeout 40 $mpirun -n 2 $COMM_CHECK ${K3_COMM_ARGUMENTS:-} >"$out/comm-$way.log" 2>&1 </dev/null
    code=$?
    row "1$way" "comm_check, $way" "$([ $code -eq 0 ] && echo ok || echo FAIL)" "exit $code: $(tail -n 1 "$out/comm-$way.log" | cut -c1-200)"
    cat "$out/comm-$way.log"
    [ $code -eq 0 ] && good="$good$way "
  done
  if [ "$ways" = 'nccl device' ]; then
    digests=$(sed -n 's/^# digest of all checksums //p' "$out/comm-nccl.log" "$out/comm-device.log" | sort | uniq -c | awk '{print $1, $2}')
    row 1ways 'comm_check: device = nccl, every bit' "$(case $digests in '2 '*) echo ok ;; *) echo FAIL ;; esac)" "digests: ${digests//$'\n'/, }"
  fi
  ways=${good% } # nothing more by a way that fails here
  case " $ways " in *" device "*)
    note 'comm device, delay inside the round'
    K3_COMM=device K3_TEST_COMM_SPIN_NS=20000 timeout 40 $mpirun -n 2 $COMM_CHECK --check >"$out/comm-inside.log" 2>&1 </dev/null
    code=$?
    row 1inside 'comm_check, device, delay inside the round' "$([ $code -eq 0 ] && echo ok || echo FAIL)" "exit $code: $(tail -n 1 "$out/comm-inside.log" | cut -c1-200)"
    cat "$out/comm-inside.log" ;;
  esac
  for variant in ${K3_NCCL_VARIANTS:-}; do
    note "comm nccl, $variant"
    env K3_COMM=nccl "$variant" timeout 30 $mpirun -n 2 $COMM_CHECK --time >"$out/comm-$variant.log" 2>&1 </dev/null
    cat "$out/comm-$variant.log"
  done
fi

# --- what they cost a step: two ranks, less rank 0's slice of two ---------------------------------------------------------
if wanted cost; then
  model=${K3_COST_MODEL:-synth:k3:experts=iq1_s,num_experts=112}
  for context in ${K3_COST_CONTEXTS:-131072 4096}; do
    for n in $(seq "${K3_COST_REPEATS:-1}"); do
      for way in slice $ways; do
        [ "$(($(date +%s) - begin))" -ge "$limit" ] && continue
        ranks="$mpirun -n 2" options="--backend cuda"
        [ $way = slice ] && ranks='' options='--slice 0/2'
        K3_COMM=$([ $way = slice ] || echo $way) K3_VERBOSE=1 timeout 40 $ranks $K3DECODE run "$model" $options --context $context \
          --prompt 1 --steps 48 --logits none --output "$work/cost.h5" --overwrite >"$out/cost-$context-$way-$n.log" 2>&1 </dev/null
        code=$?
        $K3DECODE info "$work/cost.h5" >>"$out/cost-$context-$way-$n.log" 2>&1
        row "2$context-$way-$n" "step, context $context, $way" "$([ $code -eq 0 ] && echo ok || echo FAIL)" \
          "$(grep -h -E '^step  ' "$out/cost-$context-$way-$n.log" | tr -s ' ') $(grep -h -o -E '[0-9.]+ ms a step' "$out/cost-$context-$way-$n.log" | head -n 1) $([ $code -ne 0 ] && first_error "cost-$context-$way-$n")"
      done
    done
  done
  for way in $ways; do
    [ "$(($(date +%s) - begin))" -ge "$limit" ] && continue
    K3_COMM=$way K3_PHASE_TIMES=1 timeout 40 $mpirun -n 2 $K3DECODE run "$model" --backend cuda --context 131072 --prompt 1 --steps 48 \
      --logits none --output "$work/cost.h5" --overwrite >"$out/phases-$way.log" 2>&1 </dev/null
    $K3DECODE info "$work/cost.h5" >>"$out/phases-$way.log" 2>&1
    row "2phases-$way" "comm phase, context 131072, $way" ok "$(grep -h -E '^ *comm ' "$out/phases-$way.log" | tr -s ' ' | head -n 1)"
  done
fi

# --- launchers --------------------------------------------------------------------------------------------------------------
# fails ORDER ROW STATUS PHRASE command…
fails() {
  local order=$1 name=$2 status=$3 phrase=$4 got start
  shift 4
  start=$(date +%s)
  timeout 40 "$@" >"$out/$order.log" 2>&1 </dev/null
  got=$?
  if [ $got -eq "$status" ] && grep -q "$phrase" "$out/$order.log"; then row "$order" "$name" ok "exit $got, \"$phrase\", $(($(date +%s) - start)) s"
  else row "$order" "$name" FAIL "exit $got: $(first_error "$order")"; fi
}
guards() {
  local model="run $tiny_model $tiny_options --backend cuda --activations f32"
  fails 3a 'a GPU a task (CUDA_VISIBLE_DEVICES = local rank)' 0 'done' $mpirun -n 2 bash -c \
    'export CUDA_VISIBLE_DEVICES=$OMPI_COMM_WORLD_LOCAL_RANK; exec "$@"' - $K3DECODE $model --output "$work/tiny-0-narrow.h5"
  fails 3b 'GPUs in reverse order' 0 'done' env CUDA_VISIBLE_DEVICES=1,0 $mpirun -n 2 $K3DECODE $model --output "$work/tiny-0-reverse.h5"
  fails 3c 'three ranks, two GPUs' 4 'ranks 0 and 2 of host' $mpirun --oversubscribe -n 3 $K3DECODE $model
  fails 3d 'one GPU listed twice' 4 'GPU' env CUDA_VISIBLE_DEVICES=0,0 $mpirun -n 2 $K3DECODE $model
}

# --- a rank stops, or dies -------------------------------------------------------------------------------------------------------
# hang ORDER ROW SIGNAL PHRASE OPTION…: sends SIGNAL (none: a test hook stops it) to rank 1 in mid-run
hang() {
  local order=$1 name=$2 signal=$3 phrase=$4 start pid got
  shift 4
  rm -f "$work/$order."*
  timeout 60 $mpirun -n 2 bash -c 'echo $$ >"$0.$OMPI_COMM_WORLD_RANK"; exec "$@"' "$work/$order" $K3DECODE run \
    synth:tiny:max_context=400000 --prompt 1,2 --steps 300000 --logits none --backend cuda --output "$work/$order.h5" "$@" >"$out/$order.log" 2>&1 </dev/null &
  local job=$!
  if [ "$signal" != none ]; then
    for _ in $(seq 100); do # until some steps are in the file
      [ "$($K3DECODE info "$work/$order.h5" 2>/dev/null | awk '/^whole steps/ {print $3}')" -ge 30 ] 2>/dev/null && break
      sleep 0.3
    done
    pid=$(cat "$work/$order.1")
    kill -"$signal" "$pid"
  fi
  start=$(date +%s.%N)
  wait $job
  got=$?
  local seconds left=
  seconds=$(echo "$(date +%s.%N) - $start" | bc 2>/dev/null || awk -v a="$start" -v b="$(date +%s.%N)" 'BEGIN {printf "%.1f", b - a}')
  sleep 1
  for pid in $(cat "$work/$order.0" "$work/$order.1"); do # a zombie has ended: mpirun is gone before it is reaped
    grep -q '^State:[[:space:]]*[RSDTt]' "/proc/$pid/status" 2>/dev/null && left="$left $pid"
  done
  local steps
  steps=$($K3DECODE info "$work/$order.h5" 2>&1 | grep -E '^whole steps' | tr -s ' ')
  if [ $got -ne 0 ] && [ $got -ne 124 ] && grep -q -E "$phrase" "$out/$order.log" && [ -z "$left" ]; then
    row "$order" "$name" ok "exit $got after ${seconds%.*} s; file: $steps; $(grep -h -o -E "$phrase.*" "$out/$order.log" | head -n 1 | cut -c1-250)"
  else
    row "$order" "$name" FAIL "exit $got after $seconds s; left: $left; file: $steps; $(first_error "$order")"
    for pid in $left; do kill -9 "$pid" 2>/dev/null; done
  fi
}
# hang_in_step: the same, again where the signal came between two steps, which rank 0 says
hang_in_step() {
  for _ in 1 2 3; do
    hang "$@"
    grep -q 'between two steps' "$out/$1.log" || break
  done
}
hangs() {
  export K3_WATCHDOG_S=1
  for way in $ways; do
    (export K3_COMM=$way; hang_in_step 4a$way "rank 1 stopped, eager, $way" STOP 'hangs in layer.*no answer from rank 1' --graph off) &
    (export K3_COMM=$way K3_TEST_STOP_AT=500; hang 4b$way "rank 1 stopped before a replay, $way" none 'hangs in layer -1, phase embed.*no answer from rank 1') &
  done
  hang 4c 'rank 1 stopped, graph' STOP 'no answer from rank 1' &
  hang 4d 'rank 1 killed' KILL 'exited on signal 9|[Kk]illed' &
  wait
}
export -f fails
side_pids=
if wanted guard; then guards & side_pids="$side_pids $!"; fi
if wanted hang; then (hangs) & side_pids="$side_pids $!"; fi

# --- two ranks against one and against the host -----------------------------------------------------------------------------------
# A line a run: NAME RANKS WAY OPTION…
runs=$work/runs compares=$work/compares
: >"$runs"
: >"$compares"
plan_runs() { # KIND ORDER MODEL THRESHOLD OPTION…
  local kind=$1 order=$2 model=$3
  shift 3
  for context in 0 4096 12289; do
    local common
    common="$model $* $(with_context $context) --backend cuda --activations f32"
    echo "$kind-$context-one 0 - $common" >>"$runs"
    echo "$order-$context-0 '$kind, context $context, 1 GPU = host' $kind-$context-host $kind-$context-one $exact" >>"$compares"
    for way in $ways; do
      for grid in 1x2 2x1; do
        for band in context none; do
          local name=$kind-$context-$way-$grid-$band
          case " ${K3_GRIDS:-1x2-context 2x1-context 1x2-none 2x1-none} " in *" $grid-$band "*) ;; *) continue ;; esac
          echo "$name 2 $way $common --expert-grid $grid --cache-band $band" >>"$runs"
          echo "$order-$context-$way-$grid-$band-a '$kind, context $context, $way $grid $band = host' $kind-$context-host $name $exact" >>"$compares"
          echo "$order-$context-$way-$grid-$band-b '$kind, context $context, $way $grid $band = 1 GPU' $kind-$context-one $name $exact" >>"$compares"
          case " ${K3_EAGER:-1x2-context 2x1-none} " in *" $grid-$band "*) ;; *) continue ;; esac
          echo "$name-eager 2 $way $common --expert-grid $grid --cache-band $band --graph off" >>"$runs"
          echo "$order-$context-$way-$grid-$band-c '$kind, context $context, $way $grid $band: eager = graph' $name $name-eager $equal" >>"$compares"
        done
      done
    done
    if [ "$ways" = "nccl device" ]; then
      echo "$order-$context-ways '$kind, context $context, 1x2 context: device = nccl' $kind-$context-nccl-1x2-context $kind-$context-device-1x2-context $equal" >>"$compares"
    fi
  done
}
wanted tiny && plan_runs tiny 5 $tiny_model $tiny_options
wanted k3 && plan_runs k3 6 $k3_model $k3_options
run_line() {
  local name=$1 ranks=$2 way=$3
  shift 3
  [ "$way" = - ] && way=
  K3_COMM=$way LIMIT=30 decode "$name" "$ranks" "$@"
}
export -f run_line
note "$(wc -l <"$runs") runs, $parallel at a time"
xargs -d "\n" -P "$parallel" -I{} bash -c 'run_line {}' <"$runs"
note 'runs done'
for pid in $side_pids $hosts_pids; do wait "$pid"; done
note 'side runs and host runs done'
if wanted guard && wanted tiny; then
  same 3e 'a GPU a task: logits = host' tiny-0-host tiny-0-narrow $exact
  same 3f 'GPUs in reverse order: logits = host' tiny-0-host tiny-0-reverse $exact
fi
xargs -d "\n" -P 16 -I{} bash -c "same {}" <"$compares"

note 'done'
table=$out/table.txt
cat "$work"/rows/* >"$table" # in the order of their names
cat "$table"
failed=$(awk '{ if (substr($0, 48, 4) == "FAIL") n++ } END { print n + 0 }' "$table")
echo "gpu2_check: $failed of $(wc -l <"$table") rows failed"
[ "$failed" -eq 0 ]
