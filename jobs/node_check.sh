#!/bin/bash
# All GPUs of a node at once, in one call of under ten minutes on eight: parity of a rank a GPU with one GPU and with the host
# backend, what each collective of a step costs both ways, the step of Kimi K3 over depth with the cache banded by context and not,
# and the same step predicted from one rank's slice and the collectives. Ends with a table; exit status 0 when every row passed.
#
#   jobs/node_check.sh [SECTION…]     parity comm depth; all of them without arguments
#
# Environment: as jobs/check_lib.sh says; RANKS (the number of GPUs), COMM_CHECK the built tests/comm_check,
# K3_NODE_MODEL the model that is timed. Default: all of Kimi K3 on eight GPUs; on fewer, 56 experts a rank of its 896 (an eighth
# of what a rank of eight holds would not fit beside the larger bands of the trunk).
# shellcheck disable=SC2086,SC2046 # lists of words are split on purpose
set -u

check=node_check all='parity comm depth' sections=${*:-parity comm depth}
build_options=--with-nccl build_programs=tests/comm_check
# shellcheck source=jobs/check_lib.sh
. "$(dirname "$0")/check_lib.sh"
export NCCL_NVLS_ENABLE=0 # no multicast: design, and some hosts forbid it
COMM_CHECK=${COMM_CHECK:-$root/build-gpu/tests/comm_check}
ranks=${RANKS:-$gpus}
if [ "$ranks" -lt 2 ] || [ "$ranks" -gt "$gpus" ]; then
  echo "$check: skipped: $ranks ranks want as many GPUs and at least two, and $gpus are seen"
  exit 77
fi
experts=$([ "$ranks" -lt 8 ] && echo ",num_experts=$((56 * ranks))")
model=${K3_NODE_MODEL:-synth:k3:experts=iq1_s$experts}
contexts=${K3_NODE_CONTEXTS:-128,4096,32768,131072}

if wanted parity; then
  note parity
  for kind in tiny k3; do
    case $kind in
    tiny) with="synth:tiny:trunk=q8_0,experts=mxfp4 --prompt 3,1,4,1,5 --steps 12 --context 200" ;;
    k3) with="synth:k3:num_layers=5,num_experts=64,vocab_size=4096 --prompt 7,8 --steps 2 --context 4096" ;;
    esac
    LIMIT=150 decode $kind-host $with --backend host &
    host=$!
    decode $kind-one $with --backend cuda --activations f32
    for way in nccl device; do
      for band in context none; do
        K3_COMM=$way decode_ranks $kind-$way-$band "$ranks" $with --backend cuda --activations f32 --cache-band $band
        same "$kind: $ranks GPUs, $way, band $band = 1 GPU" $kind-one $kind-$way-$band $exact
      done
    done
    decode_ranks $kind-int16 "$ranks" $with --backend cuda
    wait $host
    same "$kind: 1 GPU = host" $kind-host $kind-one $exact
    same "$kind: $ranks GPUs, int16 = host" $kind-host $kind-int16 $codes
  done
fi

if wanted comm; then
  for way in nccl device; do
    note "comm $way"
    K3_COMM=$way timeout 60 $mpirun -n "$ranks" "$COMM_CHECK" >"$out/comm-$way.log" 2>&1 </dev/null
    code=$?
    row "comm_check, $way" "$([ $code -eq 0 ] && echo ok || echo FAIL)" "exit $code: $(tail -n 1 "$out/comm-$way.log" | cut -c1-200)"
    sed -n '/^# us a collective/,$p' "$out/comm-$way.log"
  done
fi

# us a step for all collectives, from the microseconds of each message (the median, after a kernel that touches the data); the norms
# are in the slice: what they take more with their all-reduce
collectives_us() {
  awk -v layers="$2" -v mla="$3" '
    /^all-reduce 7168 f32/ { us += $(NF - 1) }
    /^norm 7168 f32/ { us -= 2 * layers * $(NF - 1) }
    /^norm with the all-reduce 7168 f32/ { us += 2 * layers * $(NF - 1) }
    /^gather latent 3584/ || /^all-reduce 3584 f32/ { us += (layers - 1) * $(NF - 1) }
    /^gather queries/ || /^all-to-all partials/ { us += mla * $(NF - 1) }
    /^gather pairs/ { us += $(NF - 1) }
    END { print us }' "$1"
}
# medians FILE: "CONTEXT ARM MS" a line, of the sweep's table
medians() { awk '$2 == "A" || $2 == "B" { if ($3 ~ /^cache-band/ && !(($1, $2) in seen)) { seen[$1, $2] = 1; print $1, $2, $4 } }' "$1"; }

if wanted depth; then
  note depth
  sweep="sweep $model --contexts $contexts --arms cache-band:context,cache-band:none --steps 8 --repeats 3 --overwrite"
  timeout 150 $mpirun -n "$ranks" $K3DECODE $sweep --output "$out/node.h5" >"$out/node.txt" 2>&1 </dev/null
  row "sweep, $ranks ranks" "$([ -s "$out/node.h5" ] && echo ok || echo FAIL)" "$(grep -h k3decode: "$out/node.txt" | head -n 1 | cut -c1-200)"
  timeout 100 $K3DECODE $sweep --slice "0/$ranks" --output "$out/slice.h5" >"$out/slice.txt" 2>&1 </dev/null
  row "sweep, slice 0/$ranks" "$([ -s "$out/slice.h5" ] && echo ok || echo FAIL)" "$(grep -h k3decode: "$out/slice.txt" | head -n 1 | cut -c1-200)"
  cat "$out/node.txt"
  $K3DECODE info --plan "$model" --ranks "$ranks" --context "${contexts##*,}" >"$out/plan.txt" 2>&1
  log=$out/comm-device.log
  [ -s "$log" ] || K3_COMM=device timeout 60 $mpirun -n "$ranks" "$COMM_CHECK" --time >"$log" 2>&1 </dev/null
  added=$(collectives_us "$log" 93 24)
  medians "$out/node.txt" >"$work/node"
  medians "$out/slice.txt" >"$work/slice"
  while read -r context arm ms; do
    slice=$(awk -v c="$context" -v a="$arm" '$1 == c && $2 == a { print $3 }' "$work/slice")
    row "context $context, $([ "$arm" = A ] && echo banded || echo whole) cache" ok "$(awk -v m="$ms" -v s="$slice" -v u="$added" 'BEGIN {
      printf "%.3f ms a step, %.1f tokens/s; predicted %.3f + %.3f = %.3f ms (slice + collectives)", m, 1000 / m, s, u / 1000, s + u / 1000 }')"
  done <"$work/node"
fi
finish
