#!/bin/sh
# Fuzzes a reader with libFuzzer, AddressSanitizer and UndefinedBehaviorSanitizer: fuzz.sh gguf|safetensors SECONDS [FOLDER]
#
# Starts from tests/fuzz/corpus_NAME; what it finds stays in FOLDER (default /tmp/k3fuzz_NAME). Needs clang with its run-time
# libraries (Debian: clang, libclang-rt-dev) and libjson-c-dev. Afterwards a corpus that covers the same in fewer bytes:
#   /tmp/k3fuzz_gguf/fuzz -merge=1 tests/fuzz/corpus_gguf /tmp/k3fuzz_gguf/corpus
set -eu

name=$1 seconds=$2 folder=${3:-/tmp/k3fuzz_$1}
cd "$(dirname "$0")/../.."
mkdir -p "$folder/corpus"
wrap=
[ "$name" = gguf ] && wrap='-Wl,--wrap=malloc -Wl,--wrap=calloc -Wl,--wrap=realloc'
# shellcheck disable=SC2046,SC2086 # lists of flags
clang -std=gnu11 -g -O1 -D_GNU_SOURCE -DHAVE_JSON_C=1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined $wrap -Isrc -o "$folder/fuzz" \
  tests/fuzz/fuzz_$name.c src/base/status.c src/plan/config.c src/import/mapped_file.c src/import/gguf.c src/import/gguf_file.c \
  src/import/gguf_config.c src/import/safetensors.c src/import/json_file.c src/import/hf_config.c \
  $(pkg-config --cflags --libs json-c) -lm
exec "$folder/fuzz" -max_total_time="$seconds" -max_len=16384 -timeout=10 -rss_limit_mb=1024 -print_final_stats=1 "$folder/corpus" \
  "tests/fuzz/corpus_$name"
