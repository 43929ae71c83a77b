#!/bin/bash
# Proves attention over a deep cache on a machine with GPUs: 131,072 positions split against un-split and against the host backend
# (on one rank, two ranks on one GPU, and two GPUs where there are), known faults F1, F2 and F10, the sanitizers at 12,289 positions,
# a sweep to 1,048,576, and k3decode tune. Ends with a table; exit status 0 when every row passed.
#
#   jobs/attention_check.sh [SECTION…]     deep f1 f2 f10 sanitize tune million; all of them without arguments
#
# Environment: K3DECODE the program (default: builds it into build-gpu); K3MPIRUN what starts ranks (mpirun --oversubscribe);
# OUT a folder for logs, tune.h5 and the sweep (default: output/attention_check); K3_DEEP the deep section's context (131072);
# K3_PARALLEL runs at a time where nothing is timed (5).
# shellcheck disable=SC2086,SC2046,SC2013,SC2015 # lists of words are split on purpose
set -u

check=attention_check all='deep f1 f2 f10 sanitize tune million'
sections=${*:-$all}
# shellcheck source=jobs/check_lib.sh
. "$(dirname "$0")/check_lib.sh"
export NCCL_NVLS_ENABLE=0 # no multicast: some hosts forbid it
cores=$(nproc) deep=${K3_DEEP:-131072}

# K3's attention (96 heads, C 512, R 64) in a narrow model: attention is nearly all of its work, on the host too. MLA_AT says
# which of its three layers is MLA, so that what its only MLA layer does shows in the logits.
narrow=hidden_size=1024,num_experts=16,vocab_size=4096,latent_size=512,moe_intermediate_size=512,dense_intermediate_size=2048
mla_at() { echo "synth:k3:$narrow,layer_types=$1"; }
deep_model=synth:k3:num_layers=5,num_experts=16,vocab_size=4096 # K3's widths; layers 4 and 5 are MLA
with='--prompt 7,8 --steps 2'

# moves ROW A B: the control of `same`: two runs that must differ, by more than any threshold here
moves() {
  local name=$1 a=$2 b=$3 got
  [ -f "$work/$a.h5" ] && [ -f "$work/$b.h5" ] || { row "$name" FAIL 'no run'; return; }
  $K3DECODE compare "$work/$a.h5" "$work/$b.h5" --max-mean-kl 1e-4 --min-top1 0 >"$out/$a-$b.txt" 2>&1
  got=$?
  row "$name" "$([ $got -eq 1 ] && echo ok || echo FAIL)" "$(awk '/^mean KL/ {print "mean KL " $4 ", wanted above 1e-4"}' "$out/$a-$b.txt")"
}

# beside COMMAND…: with up to K3_PARALLEL others; beside_done waits for all of them
beside_pids=()
beside() {
  if [ ${#beside_pids[@]} -ge "${K3_PARALLEL:-5}" ]; then
    wait "${beside_pids[0]}"
    beside_pids=("${beside_pids[@]:1}")
  fi
  "$@" &
  beside_pids+=($!)
}
beside_done() {
  for pid in "${beside_pids[@]}"; do wait "$pid"; done
  beside_pids=()
}
cuda() { decode "$@" --backend cuda --activations f32; }

# --- the host backend's runs, beside everything that is not timed; a pid file a section, so that each waits for its own
hosts() { # SECTION THREADS NAME OPTION…
  local section=$1 threads=$2
  shift 2
  LIMIT=300 OMP_NUM_THREADS=$threads decode "$@" --backend host &
  echo $! >>"$work/hosts-$section"
}
hosts_done() { for pid in $(cat "$work/hosts-$1" 2>/dev/null); do wait "$pid"; done; }
f1_contexts='11766 11767 12289 58113' f10_tokens='1 15 16 17 64 65'
prompt_of() { seq -s, 3 $(($1 + 2)); }
if wanted deep; then hosts deep $((cores / 2 + 1)) deep-host $deep_model --context "$deep" $with; fi
if wanted f1; then
  for at in 010 001; do
    for context in $f1_contexts; do
      hosts f1 $((cores / 8 + 1)) f1-$at-$context-host "$(mla_at $at)" --context $context --prompt 7 --steps 2
    done
  done
fi
if wanted f10; then
  for bias in 20 -20; do
    for tokens in $f10_tokens; do
      hosts f10 1 f10$bias-$tokens-host "synth:tiny:dt_bias=$bias" --prompt "$(prompt_of $tokens)" --steps 2
    done
  done
fi

# --- known fault F10: KDA at the lower bound of its decay, and without decay ------------------------------------------------------
if wanted f10; then
  note f10
  for bias in 20 -20; do
    for tokens in $f10_tokens; do
      beside cuda f10$bias-$tokens "synth:tiny:dt_bias=$bias" --prompt "$(prompt_of $tokens)" --steps 2
    done
  done
  beside_done
  hosts_done f10
  for bias in 20 -20; do
    for tokens in $f10_tokens; do same "F10: dt_bias $bias, $tokens tokens = host" f10$bias-$tokens-host f10$bias-$tokens $exact; done
  done
  moves 'F10 control: dt_bias 20 against -20' f1020-65 f10-20-65
fi

# --- known fault F2: more slices than positions ---------------------------------------------------------------------------------------
if wanted f2; then
  note f2
  model=$(mla_at 001)
  for cache in f32 f16; do
    K3_TEST_SLICES=64 beside sanitize "F2: memcheck, 1 to 63 positions, $cache" memcheck $K3DECODE run "$model" \
      --prompt "$(prompt_of 63)" --steps 1 --logits none --backend cuda --activations f32 --cache $cache --graph off
    for positions in 1 2 5 63; do
      options="--prompt 7 --steps 1 --cache $cache"
      [ $positions -gt 1 ] && options="$options --context $((positions - 1))"
      beside cuda f2-$cache-$positions-one "$model" $options --attention unsplit
      K3_VERBOSE=1 K3_TEST_SLICES=64 beside cuda f2-$cache-$positions-64 "$model" $options
    done
  done
  beside_done
  for cache in f32 f16; do
    for positions in 1 2 5 63; do
      same "F2: $positions positions, $cache, 64 slices = 1" f2-$cache-$positions-one f2-$cache-$positions-64 $exact
      grep -q ' 64 slices' "$out/f2-$cache-$positions-64.log" || row "F2: $positions positions, $cache" FAIL 'no 64 slices were run'
    done
  done
fi

# --- known fault F1: contexts around 48 KB and 227 KB of a float a position -------------------------------------------------------------
if wanted f1; then
  note f1
  for at in 010 001; do
    for context in $f1_contexts; do
      for cache in f32 f16; do
        beside cuda f1-$at-$context-$cache "$(mla_at $at)" --context $context --prompt 7 --steps 2 --cache $cache
      done
      beside cuda f1-$at-$context-other "$(mla_at $at)" --context $context --prompt 7 --steps 2 --seed 2
    done
  done
  beside_done
  hosts_done f1
  for at in 010 001; do
    for context in $f1_contexts; do
      same "F1: $context, MLA at $at, f32 = host" f1-$at-$context-host f1-$at-$context-f32 $exact
      same "F1: $context, MLA at $at, f16 = host" f1-$at-$context-host f1-$at-$context-f16 $codes
      moves "F1: $context, MLA at $at, not zero: other cache" f1-$at-$context-f32 f1-$at-$context-other
    done
  done
fi

# --- the whole model at depth -------------------------------------------------------------------------------------------------------------
if wanted deep; then
  note deep
  common="$deep_model --context $deep $with"
  for cache in f32 f16 bf16; do
    for arm in split unsplit; do beside cuda deep-$cache-$arm $common --cache $cache --attention $arm; done
  done
  beside cuda deep-f16-core $common --cache f16 --attention core
  beside decode deep-int16 $common --backend cuda
  beside cuda deep-other $common --seed 2
  for band in context none; do
    for cache in f32 f16; do
      options="$common --backend cuda --activations f32 --cache $cache --cache-band $band"
      CUDA_VISIBLE_DEVICES=0 K3_COMM=staged beside decode_ranks deep-staged-$cache-$band 2 $options
      [ "$gpus" -ge 2 ] && beside decode_ranks deep-two-$cache-$band 2 $options
    done
  done
  beside_done
  hosts_done deep
  at="$deep positions"
  same "$at, f32 split = host" deep-host deep-f32-split $exact
  same "$at, f32 un-split = host" deep-host deep-f32-unsplit $exact
  same "$at, f32 split = un-split" deep-f32-unsplit deep-f32-split $exact
  for cache in f16 bf16; do
    same "$at, $cache split = host" deep-host deep-$cache-split $codes
    same "$at, $cache split = un-split" deep-$cache-unsplit deep-$cache-split $codes
  done
  same "$at, f16 tensor = CUDA cores" deep-f16-core deep-f16-split $codes
  same "$at, default (int16, f16) = host" deep-host deep-int16 $codes
  moves "$at, control: another cache" deep-f32-split deep-other
  for band in context none; do
    same "$at, 2 ranks on 1 GPU, f32, band $band = host" deep-host deep-staged-f32-$band $exact
    same "$at, 2 ranks on 1 GPU, f16, band $band = host" deep-host deep-staged-f16-$band $codes
    if [ "$gpus" -ge 2 ]; then
      same "$at, 2 GPUs, f32, band $band = host" deep-host deep-two-f32-$band $exact
      same "$at, 2 GPUs, f16, band $band = host" deep-host deep-two-f16-$band $codes
    else row "$at, 2 GPUs, band $band" skip "sees $gpus"; fi
  done
fi

# --- compute-sanitizer --------------------------------------------------------------------------------------------------------------------
if wanted sanitize; then
  note sanitize
  for cache in f16 f32; do
    for tool in memcheck racecheck; do
      beside sanitize "$tool, 12289 positions, $cache" $tool $K3DECODE run "$(mla_at 01)" --context 12289 --prompt 7 --steps 1 --logits none \
        --backend cuda --activations f32 --cache $cache --graph off
    done
  done
  beside_done
fi

# --- timed from here on, nothing beside it ------------------------------------------------------------------------------------------------
wait
slice='synth:k3:experts=iq1_s,max_context=1048640 --slice 0/8'
# medians FILE ARM: of the first three contexts of a sweep's table, with p10 and p90
medians() { awk -v arm="$2" '$1 + 0 > 0 && $2 == arm && n++ < 3 {printf "%s%s", (n > 1 ? ", " : ""), $4 " (" $7 "-" $8 ")"}' "$1"; }
if wanted tune; then
  note tune
  model=synth:k3:experts=iq1_s
  timeout 120 $K3DECODE tune $model --slice 0/8 --output "$out/tune.h5" --overwrite >"$out/tune.txt" 2>&1
  got=$?
  row 'tune, rank 0 of 8' "$([ $got -eq 0 ] && echo ok || echo FAIL)" "exit $got; $(grep -c -E '^  (core|tensor).*\|' "$out/tune.txt") trials"
  $K3DECODE info "$out/tune.h5" >"$out/tune-info.txt" 2>&1
  row 'info of the tuning file = what tune printed' "$(diff <(tail -n +2 "$out/tune-info.txt") <(sed '$d' "$out/tune.txt") >/dev/null && echo ok || echo FAIL)" ''
  fails 'tune control: a wrong kernel is not timed' 4 'computes something else' env K3_TEST_TUNE_WRONG=1 $K3DECODE tune $model \
    --slice 0/8 --contexts 512
  small=synth:k3:num_layers=4,num_experts=16,vocab_size=4096
  options="--context 12289 --prompt 7 --steps 2 --backend cuda"
  export K3_VERBOSE=1 # says slices and passes
  # the tuning holds for ranks of eight and for all 96 heads, as one rank has
  decode tuned-without $small $options
  decode tuned-with $small $options --tuning "$out/tune.h5"
  unset K3_VERBOSE
  same 'run --tuning = run' tuned-without tuned-with $codes
  # width and slices that the table says are chosen for 96 heads and 12,291 rows
  chosen=$(awk '/^# chosen:/ {on = 1} on && $1 == "tensor" && $2 == 96 && $3 <= 12291 && $4 >= 12291 {print $6 " slices, " 96 / $5 " passes"}' "$out/tune.txt")
  row 'run --tuning: the plan is the chosen one' "$([ -n "$chosen" ] && grep -q " $chosen" "$out/tuned-with.log" && echo ok || echo FAIL)" \
    "$chosen; without: $(grep -o -m1 -E '[0-9]+ slices, [0-9]+ passes' "$out/tuned-without.log")"
  fails 'run --tuning, another cache type' 3 'a cache in f16' $K3DECODE run $small $options --cache bf16 --tuning "$out/tune.h5"
  fails 'run --tuning, another model' 3 'num_heads 96' $K3DECODE run synth:tiny --prompt 1 --backend cuda --tuning "$out/tune.h5"
  fails 'run --tuning, other heads a rank' 3 'for 96, 12 heads' $K3DECODE run $small --slice 0/2 --context 64 --cache-band none \
    --backend cuda --tuning "$out/tune.h5"
fi
if wanted tune; then
  for with in '' "--tuning $out/tune.h5"; do
    name="planner's own"
    [ -n "$with" ] && name=tuned
    timeout 60 $K3DECODE sweep $slice --contexts 128,4096,131072 --arms cache-band:context,cache-band:none --steps 16 --repeats 3 $with \
      >"$out/tuned-sweep-${with:+with}.txt" 2>&1
    got=$?
    row "slice 0/8, $name" "$([ $got -eq 0 ] && echo ok || echo FAIL)" \
      "median ms at 128, 4096, 131072: context $(medians "$out/tuned-sweep-${with:+with}.txt" A), none $(medians "$out/tuned-sweep-${with:+with}.txt" B)"
  done
fi
if wanted million; then
  note million
  # both ways to keep the cache of 1,048,576 positions beside a rank's 74 GB of weights
  timeout 200 $K3DECODE sweep $slice --contexts 128,131072,1048576 --arms cache-band:context,cache-band:none --steps 4 --repeats 2 \
    --output "$out/million.h5" --overwrite >"$out/million.txt" 2>&1
  got=$?
  row 'sweep to 1,048,576, rank 0 of 8, both bands' "$([ $got -eq 0 ] && echo ok || echo FAIL)" \
    "exit $got; median ms at 128, 131072, 1048576: context $(medians "$out/million.txt" A), none $(medians "$out/million.txt" B)"
fi

finish
