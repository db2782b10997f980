"""Causal attention in training on a CPU, forward and backward: torch's fused kernel and whole matrices.

    python plugins/arb-ternary-text/studies/attention.py 128,32 256,64 512,64 --dtype bfloat16

Milliseconds of processor time, the shortest of the repetitions, for each LENGTH,FEATURES of a head. Another processor
is imitated by ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 in front.
"""

from __future__ import annotations

import argparse
import time

import torch

from arb_ternary_text.models import attend as module


def milliseconds(length: int, features: int, dtype: torch.dtype, heads: int, repeat: int) -> float:
    """Processor time of one pass there and back, heads as a decoder hands them over."""
    torch.manual_seed(0)
    drawn = (torch.randn(1, length, heads, features).to(dtype).transpose(1, 2) for _ in range(3))
    given = [each.detach().requires_grad_() for each in drawn]
    best = float("inf")
    for _ in range(repeat):
        for each in given:
            each.grad = None
        start = time.process_time()
        seen = module.attend(given[0], given[1], given[2], mask=None, is_causal=True)
        seen.backward(seen.detach())
        best = min(best, time.process_time() - start)
    return 1e3 * best


def main() -> None:
    """A line for each shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="+", metavar="LENGTH,FEATURES")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for shape in options.shapes:
        length, features = map(int, shape.split(","))
        times = []
        for longest in (0, length):
            module.whole_matrix_length = lambda _, longest=longest: longest
            times.append(milliseconds(length, features, getattr(torch, options.dtype), options.heads, options.repeat))
        print(f"{shape:>9}  fused {times[0]:8.1f}  whole {times[1]:8.1f}  ratio {times[0] / times[1]:.2f}", flush=True)


if __name__ == "__main__":
    main()
