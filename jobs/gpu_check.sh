#!/bin/bash
# Proves the CUDA backend on a machine with a GPU: against the host backend, graph against eager, several ranks, planted faults,
# sanitizers, and the time of one rank's slice of Kimi K3. Ends with a short table; exit status 0 when every row passed.
#
#   jobs/gpu_check.sh [SECTION…]     kernels tiny shapes formats gguf k3 ranks snapshot guard sanitize slice; all of them without arguments
#
# Environment: K3DECODE the program, with tests/kernel_check beside it for the first section (default: builds both into build-gpu);
# K3MPIRUN what starts ranks (mpirun --oversubscribe); OUT a folder for logs (default: output/gpu_check); K3_SLICE the model of the slice section.
# shellcheck disable=SC2086,SC2046 # lists of words are split on purpose
set -u

check=gpu_check all='kernels tiny shapes formats gguf k3 ranks snapshot guard sanitize slice'
sections=${*:-$all}
case " $sections " in *' kernels '*) build_programs=tests/kernel_check ;; esac
# shellcheck source=jobs/check_lib.sh
. "$(dirname "$0")/check_lib.sh"
slice_model=${K3_SLICE:-synth:k3:experts=iq1_s}

# the four CUDA ways of a model against the host's run NAME-host
four_ways() {
  local name=$1
  shift
  decode "$name-f32" "$@" --backend cuda --activations f32
  decode "$name-f32e" "$@" --backend cuda --activations f32 --graph off
  decode "$name-int16" "$@" --backend cuda
  decode "$name-int16e" "$@" --backend cuda --graph off
  same "$name f32 activations" "$name-host" "$name-f32" $exact
  same "$name int16 activations" "$name-host" "$name-int16" $codes
  same "$name f32 eager = graph" "$name-f32" "$name-f32e" $equal
  same "$name int16 eager = graph" "$name-int16" "$name-int16e" $equal
}

if wanted kernels; then
  note kernels
  verdict=FAIL
  timeout 160 "$(dirname "$K3DECODE")/tests/kernel_check" >"$out/kernels.log" 2>&1 && verdict=ok
  row kernels $verdict "$(tail -n 1 "$out/kernels.log")"
fi

prompt='--prompt 3,1,4,1,5 --steps 12'
if wanted tiny; then
  note tiny
  for trunk in f32 q8_0 bf16; do
    for experts in f32 mxfp4; do
      name=tiny-$trunk-$experts
      OMP_NUM_THREADS=2 decode "$name-host" "synth:tiny:trunk=$trunk,experts=$experts" $prompt --backend host &
    done
  done
  wait
  for trunk in f32 q8_0 bf16; do
    for experts in f32 mxfp4; do
      four_ways "tiny-$trunk-$experts" "synth:tiny:trunk=$trunk,experts=$experts" $prompt
    done
  done
fi

if wanted shapes; then
  note shapes
  # seeds: the default's block1 and head100 hold a near tie of the router, which a relative change of 2e-5 anywhere turns over,
  # the host's own too (KL 0.17 and 9e-4)
  tried='iq1:experts=iq1_s,latent_size=256,moe_intermediate_size=256,trunk=q8_0 context4:context=4 context12289:context=12289
    layers12:num_layers=12,attn_res_block_size=12 layers13:num_layers=13,attn_res_block_size=12
    layers25:num_layers=25,attn_res_block_size=12 block1:attn_res_block_size=1,seed=6 head60:kda_head_dim=60 head100:kda_head_dim=100,seed=2
    crossing:context=250 far:num_layers=1,layer_types=1,hidden_size=1024,num_heads=4,kv_lora_rank=512,qk_rope_head_dim=64,max_context=2000000+1864200'
  # NAME:OVERRIDES, NAME:OVERRIDES+CONTEXT or NAME:context=CONTEXT; far: a cache of more than 2^31 bytes
  shape_of() {
    name=${1%%:*} rest=${1#*:} options=$prompt
    case $rest in
    context=*) model=synth:tiny options="--context ${rest#context=} $prompt" ;;
    *+*) model=synth:tiny:${rest%%+*} options="--context ${rest#*+} --prompt 3,1 --steps 2" ;;
    *) model=synth:tiny:$rest ;;
    esac
  }
  for entry in $tried; do
    shape_of "$entry"
    LIMIT=100 OMP_NUM_THREADS=4 decode "$name-host" "$model" $options --backend host &
  done
  wait
  for entry in $tried; do
    shape_of "$entry"
    decode "$name-f32" "$model" $options --backend cuda --activations f32
    decode "$name-int16" "$model" $options --backend cuda
    same "$name f32 activations" "$name-host" "$name-f32" $exact
    same "$name int16 activations" "$name-host" "$name-int16" $codes
  done
fi

if wanted formats; then
  note formats
  # TRUNK:EXPERTS:SEED; the seeds keep the routers off near ties (a gap of 2e-3 or more in the float64 reference)
  tried='q4_k:iq2_xxs:1 q5_k:q2_k:5 q6_k:iq1_m:3 iq4_xs:q3_k:1 q4_0:iq2_xs:3 q5_0:iq2_s:1 q4_1:iq3_xxs:1 q5_1:iq3_s:2
    iq4_nl:iq4_xs:2 f16:q4_k:1 iq2_xxs:q5_k:4 iq3_xxs:q6_k:2 q8_0:iq4_nl:1'
  whole_blocks=tiny:layer_types=0101,hidden_size=256,num_heads=4,kda_head_dim=128,q_lora_rank=256,kv_lora_rank=256
  whole_blocks=$whole_blocks,qk_nope_head_dim=32,qk_rope_head_dim=16,v_head_dim=128,latent_size=512,moe_intermediate_size=512
  whole_blocks=$whole_blocks,dense_intermediate_size=512,num_experts=8,num_experts_per_token=2,vocab_size=300
  format_of() {
    trunk=${1%%:*} seed=${1##*:} experts=${1#*:}
    experts=${experts%:*} name=format-$trunk-$experts
    model=synth:$whole_blocks,trunk=$trunk,experts=$experts,seed=$seed
  }
  for entry in $tried; do
    format_of "$entry"
    OMP_NUM_THREADS=1 decode "$name-host" "$model" --prompt 3,1,4,1,5 --steps 4 --backend host &
  done
  wait
  for entry in $tried; do
    format_of "$entry"
    decode "$name-f32" "$model" --prompt 3,1,4,1,5 --steps 4 --backend cuda --activations f32
    decode "$name-int16" "$model" --prompt 3,1,4,1,5 --steps 4 --backend cuda
    same "$trunk trunk, $experts experts, f32" "$name-host" "$name-f32" $exact
    same "$trunk trunk, $experts experts, int16" "$name-host" "$name-int16" $codes
  done
fi

if wanted gguf; then
  note gguf
  # the file whose logits llama.cpp computed (tests/fixtures/public_gguf), 23 types mixed: tests/test_gguf.py holds the host to them
  name='imported GGUF'
  if ! python3 -c 'import numpy' 2>/dev/null; then
    row "$name" skip 'python3 has no numpy'
  elif python3 tests/gguf_model.py "$work/small.gguf" 48 &&
    timeout 60 $K3DECODE import "$work/small.gguf" --output "$work/small.h5" >"$out/gguf-import.log" 2>&1 </dev/null; then
    with="$work/small.h5 --prompt 69,113,75,119,125,2,149,191 --steps 64"
    decode gguf-host $with --backend host
    four_ways gguf $with
    for ranks in 2 8; do
      K3_COMM=staged LIMIT=90 decode_ranks gguf-$ranks $ranks $with --backend cuda --activations f32
      same "gguf on $ranks ranks, staged" gguf-host gguf-$ranks $exact
    done
  else
    row "$name" FAIL "no import: $(tail -n 1 "$out/gguf-import.log" | cut -c1-200)"
  fi
fi

if wanted k3; then
  note k3
  model=synth:k3:num_layers=5,num_experts=64,vocab_size=4096
  for context in 0 4 4096 12289; do
    with="--prompt 7,8 --steps 2"
    [ $context -gt 0 ] && with="$with --context $context"
    LIMIT=100 decode "k3-$context-host" $model $with --backend host &
    [ $context -eq 4 ] && wait # two at a time
  done
  for context in 0 4 4096 12289; do
    with="--prompt 7,8 --steps 2"
    [ $context -gt 0 ] && with="$with --context $context"
    decode "k3-$context-f32" $model $with --backend cuda --activations f32
    decode "k3-$context-f16" $model $with --backend cuda --activations f32 --cache f16
    decode "k3-$context-bf16" $model $with --backend cuda --activations f32 --cache bf16
    decode "k3-$context-int16" $model $with --backend cuda
  done
  wait
  for context in 0 4 4096 12289; do
    same "k3 5 layers, context $context, f32" "k3-$context-host" "k3-$context-f32" $exact
    same "k3 5 layers, context $context, f16 cache" "k3-$context-host" "k3-$context-f16" $codes
    same "k3 5 layers, context $context, bf16 cache" "k3-$context-host" "k3-$context-bf16" $codes
    same "k3 5 layers, context $context, int16" "k3-$context-host" "k3-$context-int16" $codes
  done
  for cache in f32 f16; do
    K3_COMM=staged LIMIT=90 decode_ranks "k3-ranks-$cache" 2 $model --prompt 7,8 --steps 2 --context 4096 --backend cuda \
      --activations f32 --cache $cache
    same "k3 5 layers, 2 ranks staged, $cache cache" "k3-4096-$cache" "k3-ranks-$cache" $exact
  done
fi

if wanted ranks; then
  note ranks
  model=synth:tiny:trunk=q8_0,experts=mxfp4
  decode ranks-host $model $prompt --context 200 --backend host
  export K3_COMM=staged
  for way in "2 --expert-grid 1x2" "2 --expert-grid 2x1" "2 --cache-band none" "3"; do
    set -- $way
    ranks=$1
    shift
    name=ranks-$(echo "$way" | tr -d ' -')
    OMP_NUM_THREADS=1 decode_ranks "$name" "$ranks" $model $prompt --context 200 --backend cuda --activations f32 "$@"
    same "$way ranks, one GPU, staged" ranks-host "$name" $exact
  done
  unset K3_COMM
  # NCCL's calls in a graph, even where there is but one GPU
  if $K3DECODE --version | grep -q NCCL || [ -n "${K3_NCCL:-}" ]; then
    for graph in on off; do
      K3_COMM=nccl decode "ranks-one-$graph" $model $prompt --context 200 --backend cuda --activations f32 --graph $graph
      same "1 rank with NCCL, graph $graph" ranks-host "ranks-one-$graph" $exact
    done
  fi
  # plain NCCL where there are GPUs enough
  if [ "$gpus" -ge 2 ]; then
    for graph in on off; do
      decode_ranks "ranks-nccl-$graph" 2 $model $prompt --context 200 --backend cuda --activations f32 --graph $graph
      same "2 ranks, NCCL, graph $graph" ranks-host "ranks-nccl-$graph" $exact
    done
  fi
fi

if wanted snapshot; then
  note snapshot
  # K3's widths of a head and a cached row
  k3model=synth:k3:num_layers=3,layer_types=011,hidden_size=2048,num_heads=16,num_experts=16,vocab_size=2048,dense_intermediate_size=2048
  k3model=$k3model,latent_size=1024,moe_intermediate_size=512
  for entry in f32:synth:tiny:trunk=q8_0,experts=mxfp4 f16:$k3model bf16:$k3model f32:$k3model; do
    cache=${entry%%:*} model=${entry#*:}
    name=snapshot-$(echo "$model" | cut -d: -f2)-$cache
    label="$(echo "$model" | cut -d: -f2), $cache cache"
    with="--prompt 7,8,9,10 --context 700"
    [ "$cache" = f32 ] && act='--activations f32' limit=$exact || act='' limit=$codes
    rm -f "$work/$name.state"
    decode "$name-whole" $model $with --steps 4 --backend cuda --cache $cache $act
    timeout 60 $K3DECODE run $model $with --steps 0 --backend cuda --cache $cache $act --snapshot "$work/$name.state" >"$out/$name.log" 2>&1
    decode "$name-resumed" $model --resume "$work/$name.state" --steps 4 --backend cuda $act
    same "snapshot on CUDA, on CUDA, $label" "$name-whole" "$name-resumed" $equal
    LIMIT=100 decode "$name-host" $model --resume "$work/$name.state" --steps 4 --backend host
    same "snapshot on CUDA, on the host, $label" "$name-whole" "$name-host" $limit
    K3_COMM=staged OMP_NUM_THREADS=1 decode_ranks "$name-ranks" 2 $model --resume "$work/$name.state" --steps 4 --backend cuda $act
    same "snapshot on CUDA, on 2 ranks, $label" "$name-whole" "$name-ranks" $limit
  done
  timeout 100 $K3DECODE run $k3model $with --steps 0 --backend host --snapshot "$work/host.state" >"$out/host.state.log" 2>&1
  decode snapshot-host-cuda $k3model --resume "$work/host.state" --steps 4 --backend cuda --activations f32
  same "snapshot on the host, on CUDA, k3" "$name-whole" snapshot-host-cuda $exact
  fails 'snapshot that would be rounded' 3 'would round it' $K3DECODE run $k3model --resume "$work/host.state" --steps 1 --backend cuda --cache f16
fi

if wanted guard; then
  note guard
  for phase in embed attn_kda attn_mla ffn_dense ffn_moe head; do
    for graph in on off; do
      fails "oversized launch in $phase, graph $graph" 4 "phase $phase" \
        env K3_TEST_OVERSIZED_LAUNCH=$phase $K3DECODE run synth:tiny $prompt --backend cuda --graph $graph
    done
  done
  fails 'no visible GPU' 4 'no GPU is visible' env CUDA_VISIBLE_DEVICES= $K3DECODE run synth:tiny $prompt --backend cuda
  if [ "$gpus" -eq 1 ]; then
    fails 'two ranks, one GPU' 4 'ranks 0 and 1 of host' $mpirun -n 2 $K3DECODE run synth:tiny $prompt --backend cuda
  fi
  fails 'one GPU chosen by the launcher' 0 'done' env CUDA_VISIBLE_DEVICES=0 $K3DECODE run synth:tiny $prompt --backend cuda
  for what in o_norm:1:attn_kda input_norm:2:attn_kda; do
    tensor=${what%%:*} rest=${what#*:}
    layer=${rest%%:*} phase=${rest#*:}
    for trunk in f32 q8_0; do
      $K3DECODE synth tiny:trunk=$trunk --output "$work/nan.h5" --overwrite >"$out/nan.log" 2>&1 ||
        { rm -f "$work/nan.h5"; $K3DECODE synth tiny:trunk=$trunk --output "$work/nan.h5" >"$out/nan.log" 2>&1; }
      python3 -c "
import h5py, sys
with h5py.File(sys.argv[1], 'r+') as f: f['/layers/%03d/%s' % (int(sys.argv[2]), sys.argv[3])][3] = float('nan')
" "$work/nan.h5" "$layer" "$tensor" >>"$out/nan.log" 2>&1 || { row "NaN in $tensor" skip 'no python3 with h5py'; continue; }
      for graph in on off; do
        fails "NaN in $tensor, $trunk trunk, graph $graph" 4 "layer $layer, phase $phase" \
          $K3DECODE run "$work/nan.h5" $prompt --backend cuda --graph $graph
      done
      rm -f "$work/nan.h5"
    done
  done
fi

if wanted sanitize; then
  note sanitize
  for tool in memcheck racecheck; do
    sanitize "compute-sanitizer $tool" $tool \
      $K3DECODE run synth:tiny:trunk=q8_0,experts=mxfp4,num_layers=5 --prompt 1,2 --steps 2 --backend cuda --graph off
  done
fi

# time ROW ENVIRONMENT… : the slice once
time_slice() {
  local name=$1
  shift
  if ! timeout 100 env K3_VERBOSE=1 "$@" $K3DECODE run "$slice_model" --slice 0/8 --context 131072 --steps 64 --logits none \
    --output "$work/slice.h5" --overwrite >"$out/slice-$name.log" 2>&1 </dev/null; then
    row "slice 0/8: $name" FAIL "$(grep -h k3decode: "$out/slice-$name.log" | head -n 1 | cut -c1-200)"
    return
  fi
  $K3DECODE info "$work/slice.h5" >>"$out/slice-$name.log" 2>&1
  row "slice 0/8: $name" ok "$(grep -h '^step  ' "$out/slice-$name.log" | tr -s ' ')"
}
if wanted slice; then
  note slice
  for n in 1 2 3; do time_slice "run $n"; done
  for variant in ${K3_VARIANTS:-K3_PHASE_TIMES=1 K3_PDL=0}; do time_slice "$variant" "$variant"; done
  grep -h '^# ' "$out/slice-run 1.log"
  sed -n '/^phase  /,/^all/p' "$out/slice-K3_PHASE_TIMES=1.log" 2>/dev/null
fi

finish
