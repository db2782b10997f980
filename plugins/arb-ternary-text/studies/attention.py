"""Causal attention in training on a CPU, forward and backward: torch's fused kernel, whole
matrices, the cpu backend.

    python plugins/arb-ternary-text/studies/attention.py 128,32 256,64 512,64 --dtype bfloat16

Milliseconds of processor time, in turns, the shortest of the repetitions, for each LENGTH,FEATURES
of a head; then how much longer the faster of torch's ways takes than the backend's kernels. Another
processor is imitated by ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2
MKL_ENABLE_INSTRUCTIONS=AVX2 ARB_TERNARY_CPU_ISA=avx2 in front.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from arb_ternary.backends.select import get_backend
from arb_ternary_text.models import attend as module


def by_torch(longest: int, given: list[Tensor], grad: Tensor) -> None:
    """There and back; whole matrices up to sequences of ``longest``."""
    module.whole_matrix_length = lambda _: longest
    for each in given:
        each.grad = None
    seen = module.attend(given[0], given[1], given[2], mask=None, is_causal=True)
    seen.backward(grad)


def by_kernels(rows: list[Tensor], grad: Tensor, heads: int, length: int) -> None:
    """The same from rows as linears write them."""
    kernels = get_backend("cpu").kernels
    rest = (None, heads, heads, length, None, None)
    seen, logs = kernels["attend"](*rows, *rest)
    kernels["attend_backward"](grad, *rows, seen, logs, *rest)


def milliseconds(
    length: int, features: int, dtype: torch.dtype, heads: int, repeat: int
) -> list[float]:
    """Processor time of each way, heads as a decoder hands them over."""
    torch.manual_seed(0)
    rows = [torch.randn(length, heads * features).to(dtype) for _ in range(4)]
    *given, grad = (each.view(1, length, heads, features).transpose(1, 2) for each in rows)
    leaves = [each.detach().requires_grad_() for each in given]
    ways: list[Callable[[], None]] = [
        lambda: by_torch(0, leaves, grad),
        lambda: by_torch(length, leaves, grad),
        lambda: by_kernels(rows[:3], rows[3], heads, length),
    ]
    best = [float("inf")] * len(ways)
    for _ in range(repeat):
        for place, way in enumerate(ways):
            start = time.process_time()
            way()
            best[place] = min(best[place], time.process_time() - start)
    return [1e3 * seconds for seconds in best]


def main() -> None:
    """A line for each shape."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shapes", nargs="+", metavar="LENGTH,FEATURES")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for shape in options.shapes:
        length, features = map(int, shape.split(","))
        fused, whole, kernels = milliseconds(
            length, features, getattr(torch, options.dtype), options.heads, options.repeat
        )
        ratio = min(fused, whole) / kernels
        print(
            f"{shape:>9}  fused {fused:8.1f}  whole {whole:8.1f}  cpu {kernels:8.1f}  ratio "
            f"{ratio:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
