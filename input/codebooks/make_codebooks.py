"""Writes src/plan/codebook_data.c: the codebooks of the GGUF block formats, taken from the public `gguf` package.

    pip install gguf numpy && python3 input/codebooks/make_codebooks.py > src/plan/codebook_data.c

The numbers are the formats' definitions; the package (MIT licence, version 0.19.0 for the file in the repository) is where
they were read. An entry is 16 bits, the index of each value among the format's levels: eight values of two bits (iq1, iq2)
or four of four bits (iq3), value 0 lowest. iq4_nl's sixteen values stand in codebook.c: they are its levels.
"""
import hashlib
from importlib.metadata import version

import numpy as np

import gguf.quants as quants

# The table of sign bytes is no data: bit 7 makes the number of ones even.
signs = np.frombuffer(quants.IQ2_XXS.ksigns, np.uint8)
assert all(signs[i] == i | (bin(i).count("1") & 1) << 7 for i in range(128))
assert tuple(quants.IQ4_NL.kvalues) == (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

print(f"""/* Codebooks of the GGUF block formats: data, made by input/codebooks/make_codebooks.py from the public package gguf
 * {version('gguf')} (MIT licence). See codebook.h; an entry is 16 bits, the index of each value among the format's levels,
 * value 0 lowest. Layer: plan. */
#include <stdint.h>

extern const uint16_t k3_codebook_iq1_s[], k3_codebook_iq2_xxs[], k3_codebook_iq2_xs[], k3_codebook_iq2_s[],
    k3_codebook_iq3_xxs[], k3_codebook_iq3_s[];
""")
for name in ("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"):
    kind = getattr(quants, name)
    kind.init_grid()
    entries, values = kind.grid_shape
    grid = kind.grid.reshape(entries, values).astype(int)
    levels = list(kind.grid_map)
    bits = 16 // values
    packed = [sum(levels.index(v) << (bits * j) for j, v in enumerate(entry)) for entry in grid]
    digest = hashlib.sha256(b"".join(p.to_bytes(2, "little") for p in packed)).hexdigest()
    print(f"/* {entries} entries of {values} values in {{{', '.join(map(str, levels))}}}; sha256 of the little-endian entries:\n"
          f" * {digest} */\nconst uint16_t k3_codebook_{name.lower()}[{entries}] = {{")
    for at in range(0, entries, 12):
        print("  " + " ".join(f"0x{p:04x}," for p in packed[at:at + 12]))
    print("};")
