"""What a GPU can do, measured in the same run: the rate of copying its memory, and the peaks of its
matrix units.
"""

from __future__ import annotations

from typing import Final

import torch

from arb_ternary_bench.kernels.probes import Probe
from arb_ternary_bench.kernels.timing import Variant

#: Least bytes of the copied buffer, and how many caches it takes otherwise.
_LEAST_BUFFER: Final = 512 << 20
_BUFFER_CACHES: Final = 8
#: Edge of the matrices: large enough that the units are busy.
_EDGE: Final = 8192


def copy_probe(device: str, cache_bytes: int) -> Probe:
    """A copy from memory to memory of more than caches hold: bytes read and bytes written."""
    nbytes = max(_LEAST_BUFFER, _BUFFER_CACHES * cache_bytes)
    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    variant = Variant(name="copy bandwidth", call=lambda _: target.copy_(source), nbytes=2 * nbytes)
    return Probe(variant, f"a copy of {nbytes >> 20} MiB, what is read and what is written")


def matrix_probe(device: str, dtype: torch.dtype) -> Probe:
    """torch's product of large square matrices, int8 to int32 or bfloat16: a library's, and no peak
    of the units.
    """
    edge = _EDGE
    name = "int8 peak" if dtype is torch.int8 else "bfloat16 peak"
    if dtype is torch.int8:
        left, right = (
            torch.randint(-127, 128, (edge, edge), dtype=dtype, device=device) for _ in range(2)
        )
        variant = Variant(
            name=name, call=lambda _: torch._int_mm(left, right.t()), operations=2 * edge**3
        )
        return Probe(variant, f"torch._int_mm of {edge} x {edge} matrices")
    left, right = (torch.randn(edge, edge, device=device).to(dtype) for _ in range(2))
    variant = Variant(name=name, call=lambda _: left @ right.t(), operations=2 * edge**3)
    return Probe(variant, f"torch.matmul of {edge} x {edge} matrices in bfloat16")
