#!/usr/bin/env python3
"""MLA decode attention: our two arms beside public kernels, same shapes, same card, interleaved in one run.

    python3 jobs/attention_public.py [--kernel-check tests/kernel_check] [--flash-mla LIBRARY] [--rounds 5]

Needs a Hopper GPU, PyTorch and a built kernel_check (make kernel_check). FlashMLA: the library _C_legacy.abi3.so of the wheel
sgl-flash-mla 1.0.0 (pip download --no-deps sgl-flash-mla; unzip it), whose op is the dense decode of FlashMLA for sm_90.
PyTorch's scaled_dot_product_attention is timed with each backend that takes 576 and 512 columns; the others' refusals are printed.

A time is that of one call in a graph of 24, each with its own layer's cache. "whole": what gives the attention output, which is
what a public call does (ours: slice + combine). Bytes: the cache, read once, and the queries. A control that neither touches,
a copy within the device, shows whether the card changed between rounds."""
import argparse
import re
import statistics
import subprocess
import sys
import warnings

LATENT, ROPE, LAYERS, STREAM = 512, 64, 24, 4500e9
SHAPES = ((96, 16384), (12, 131072))
SCALE = 192**-0.5


def fail(message):
    print(f"attention_public: {message}", file=sys.stderr)
    sys.exit(3)


def ours(program):
    """One run of kernel_check's rate rows: {(shape, kernel): us}."""
    run = subprocess.run([program, "--only", "attention:rate"], capture_output=True, text=True, check=False)
    if run.returncode != 0:
        fail(f"{program} --only attention:rate ended with {run.returncode}:\n{run.stdout[-2000:]}{run.stderr[-500:]}")
    times = {}
    for line in run.stdout.splitlines():
        row = re.match(r"mla_(tensor|slice)_kernel +(\d+)x(\d+) bf16 \d+sl( \+ combine)? +\S+ +\S+ +\d+ +\d+ +\d+ +\d+ +(\S+)", line)
        if row:
            arm = "tensor" if row[1] == "tensor" else "core"
            times[(int(row[2]), int(row[3])), f"ours, {arm}{', whole' if row[4] else ', slice alone'}"] = float(row[5])
    return times


def graph_time(torch, call, layers):
    """us of a call: median of 10 replays of a graph of `layers` calls."""
    for layer in range(2):
        call(layer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(layers):
            call(layer)
    return replay_time(torch, graph.replay, 10) / layers


def replay_time(torch, run, count):
    times = []
    for _ in range(count + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times[2:])


def attended(torch, query, rows):
    """float64 attention: query [heads, 576], rows [positions, 576]."""
    wide = rows.double()
    return torch.softmax(query.double() @ wide.T * SCALE, -1) @ wide[:, :LATENT]


class Public:
    """Public kernels on one shape; `calls`: name -> (call of a layer, layers in the graph)."""

    def __init__(self, torch, heads, rows, flash_mla):
        self.calls, self.refused = {}, []
        query = torch.randn(heads, LATENT + ROPE, device="cuda", dtype=torch.bfloat16)
        caches = [torch.randn(rows, LATENT + ROPE, device="cuda", dtype=torch.bfloat16) for _ in range(LAYERS)]
        want = attended(torch, query, caches[0])

        def add(name, call, layers):
            out = call(0).reshape(heads, LATENT).double()
            error = ((out - want).norm() / want.norm()).item()
            print(f"# {heads} x {rows}: {name}: relative L2 {error:.2e} against float64")
            if not error < 1e-2:
                fail(f"{name} is wrong")
            self.calls[name] = (call, layers)

        if flash_mla:
            pages = rows // 64
            table = torch.arange(pages, device="cuda", dtype=torch.int32)[None]
            length = torch.tensor([rows], device="cuda", dtype=torch.int32)
            paged = [c.view(pages, 64, 1, LATENT + ROPE) for c in caches]
            one = query.view(1, 1, heads, LATENT + ROPE)
            plan = flash_mla(one, paged[0], LATENT, length, table, SCALE, False, None, None)[2:]
            add("FlashMLA, whole", lambda i: flash_mla(one, paged[i], LATENT, length, table, SCALE, False, *plan)[0], LAYERS)
        from torch.nn.attention import SDPBackend, sdpa_kernel

        attention = torch.nn.functional.scaled_dot_product_attention
        for backend in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH"):

            def call(i, backend=backend):  # one key head: the query heads are its queries
                keys = caches[i][None, None]
                with sdpa_kernel(getattr(SDPBackend, backend)):
                    return attention(query[None, None], keys, keys[..., :LATENT], scale=SCALE)

            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                try:
                    add(f"PyTorch {backend}", call, 2)
                except RuntimeError as error:
                    why = [str(w.message) for w in said if re.search("same last dimension|no more than", str(w.message))]
                    self.refused.append(f"PyTorch {backend}: {(why or [str(error)])[0].splitlines()[0][:140]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernel-check", default="tests/kernel_check")
    parser.add_argument("--flash-mla", metavar="LIBRARY")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    try:
        import torch
    except ImportError:
        fail("PyTorch is not installed")
    if not torch.cuda.is_available():
        fail("PyTorch finds no GPU")
    flash_mla = None
    if options.flash_mla:
        torch.ops.load_library(options.flash_mla)
        flash_mla = torch.ops.flash_mla_legacy.dense_decode_fwd
    print(f"# {' '.join(sys.argv)}\n# {torch.cuda.get_device_name()}, PyTorch {torch.__version__}, {options.rounds} rounds, bf16 cache, "
          f"{LATENT} + {ROPE} columns; spread: least and most of the rounds")
    public = {shape: Public(torch, *shape, flash_mla) for shape in SHAPES}
    for shape, kernels in public.items():
        for refusal in kernels.refused:
            print(f"# {shape[0]} x {shape[1]}: refused by {refusal}")
    block = torch.empty(1 << 29, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(block)
    times, copies = {}, []
    for _ in range(options.rounds):
        copies.append(replay_time(torch, lambda: target.copy_(block), 5))
        for key, us in ours(options.kernel_check).items():
            times.setdefault(key, []).append(us)
        for shape, kernels in public.items():
            for name, (call, layers) in kernels.calls.items():
                times.setdefault((shape, name), []).append(graph_time(torch, call, layers))
    print(f"{'heads x rows':14} {'kernel':28} {'us a layer':>10} {'spread':>17} {'ms for 24':>9} {'GB/s':>6} {'% of 4.5 TB/s':>13}")
    for (shape, name), us in sorted(times.items()):
        moved, middle = (shape[0] + shape[1]) * (LATENT + ROPE) * 2, statistics.median(us)
        print(f"{shape[0]:>2} x {shape[1]:<9} {name:28} {middle:10.2f} {min(us):8.2f}-{max(us):<8.2f} {middle * LAYERS / 1e3:9.3f} "
              f"{moved / middle / 1e3:6.0f} {moved / middle * 1e6 / STREAM * 100:13.1f}")
    rates = [2 * (1 << 29) / us / 1e3 for us in copies]
    print(f"# control: copy within the device {statistics.median(rates):.0f} GB/s, {min(rates):.0f}-{max(rates):.0f} over the rounds")


if __name__ == "__main__":
    main()
