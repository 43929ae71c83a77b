"""Writes src/plan/codebook_iq1_s.c: the codebook of the GGUF format iq1_s, taken from the public `gguf` package.

    pip install gguf numpy && python3 input/codebooks/make_iq1_s.py > src/plan/codebook_iq1_s.c

The numbers are the format's definition (2048 entries of 8 values in {-1, 0, 1}); the package (MIT licence, version 0.19.0
for the file in the repository) is where they were read. Each entry is packed into 16 bits: value + 1 in two bits,
element 0 lowest.
"""
import hashlib

import gguf
import gguf.quants as quants
from importlib.metadata import version

quants.IQ1_S.init_grid()
grid = quants.IQ1_S.grid.reshape(2048, 8).astype(int)
packed = [sum((int(value) + 1) << (2 * j) for j, value in enumerate(entry)) for entry in grid]
digest = hashlib.sha256(b"".join(p.to_bytes(2, "little") for p in packed)).hexdigest()
print(f"""/* Codebook of iq1_s: data, made by input/codebooks/make_iq1_s.py from the public package gguf {version('gguf')}.
 * 2048 entries of 8 values in {{-1, 0, 1}}; an entry is 16 bits, value + 1 in two bits, element 0 lowest.
 * sha256 of the little-endian entries: {digest}. Layer: plan. */
#include "plan/codebook.h"

const uint16_t k3_codebook_iq1_s_packed[K3_CODEBOOK_IQ1_S_ENTRIES] = {{""")
for at in range(0, 2048, 12):
    print("  " + " ".join(f"0x{p:04x}," for p in packed[at:at + 12]))
print("};")
