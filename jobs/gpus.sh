#!/bin/sh
# The GPUs that a program started here may use, a line each, in the order in which it numbers them: index,UUID,PCI address. Nothing
# without a driver. CUDA_VISIBLE_DEVICES counts as CUDA reads it: indices or beginnings of UUIDs, up to the first that there is not.
set -eu

all=$(nvidia-smi --query-gpu=index,uuid,pci.bus_id --format=csv,noheader 2>/dev/null | tr -d ' ' | awk -F, 'NF == 3') # its complaints stand in stdout too
if [ -z "${CUDA_VISIBLE_DEVICES+set}" ]; then
  [ -z "$all" ] || echo "$all"
  exit
fi
for name in $(echo "$CUDA_VISIBLE_DEVICES" | tr ',' ' '); do
  echo "$all" | awk -F, -v name="$name" '$1 == name || index($2, name) == 1 { print; found = 1 } END { exit !found }' || break
done
