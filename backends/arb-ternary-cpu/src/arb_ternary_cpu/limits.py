"""The machine's limits, measured by kernels that do nothing else: for `benchmarks/kernels.py`."""

from __future__ import annotations

import math

import torch
from torch import Tensor, get_num_threads

from arb_ternary.backends.arguments import check_mutable
from arb_ternary_cpu import _native

#: Bytes of the words that are summed.
_WORD = 8


def read_bytes(isa: int, buffer: Tensor) -> int:
    """Read a contiguous uint8 tensor once and return the sum of its 64-bit words, modulo 2**64.

    Raises:
        TypeError, ValueError: another dtype, device or layout; a size that is no multiple of 8.
    """
    check_mutable(buffer, "buffer", torch.uint8, tuple(buffer.shape))
    if buffer.numel() % _WORD:
        raise ValueError(f"buffer must have a multiple of {_WORD} bytes, got {buffer.numel()}")
    return _native.read_words(isa, get_num_threads(), buffer.data_ptr(), buffer.numel() // _WORD)


def int8_peak(isa: int, seconds: float) -> float:
    """Multiplications and additions of int8 a second over all threads, in registers, measured for
    about ``seconds``.

    Raises:
        ValueError: ``seconds`` is not a positive, finite number.
    """
    if not 0.0 < seconds < math.inf:
        raise ValueError(f"seconds must be positive and finite, got {seconds}")
    return _native.int8_peak(isa, get_num_threads(), seconds)
