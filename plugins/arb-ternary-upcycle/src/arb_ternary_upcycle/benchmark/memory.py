"""Memory of a model: weights, keys and values, and the peak of generating text.

Two models share the process of the run. So only the growth during a generation is measured, and
weights and cache are counted.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from arb_ternary_text.models.decoder import Decoder
from arb_ternary_train.audit import audit
from arb_ternary_upcycle.benchmark.latency import generate_random
from arb_ternary_upcycle.verification.kv_cache import student_bytes_per_token

#: Rows of an audit that only training needs.
_TRAINING: Final = frozenset({"votes", "exponent votes", "control words"})
_STATUS: Final = Path("/proc/self/status")
#: Writing 5 to this file resets Linux's peak of the process.
_RESET_PEAK: Final = Path("/proc/self/clear_refs")


def weight_bytes(model: Decoder) -> tuple[int, int]:
    """Return the number of weights, and the bytes that they take without accumulators of votes."""
    counted = audit(model)
    return counted.parameters, sum(row.nbytes for row in counted.rows if row.what not in _TRAINING)


def memory_growth(work: Callable[[], object], device: torch.device) -> int | None:
    """Return the peak of ``work`` in bytes, beyond what is held before it; None if unknown.

    On CUDA it is that of torch's tensors. On Linux it is that of the process, which does not grow
    when freed memory is used again.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    if device.type != "cpu" or not _STATUS.exists():
        return None
    try:
        _RESET_PEAK.write_text("5")
    except OSError:  # not permitted on this system
        return None
    before = _status_bytes("VmRSS")
    work()
    return max(0, _status_bytes("VmHWM") - before)


def _status_bytes(name: str) -> int:
    lines = _STATUS.read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def measure_memory(
    name: str, model: Decoder, size: tuple[int, int, int], device: torch.device
) -> dict[str, Any]:
    """Measure ``model``, in evaluation mode, as it reads prompts and generates tokens."""
    prompt, generation, batch = size
    growth = memory_growth(lambda: generate_random(model, size), device)
    parameters, weights = weight_bytes(model)
    # The last token is chosen but not read.
    tokens = prompt + generation - 1
    cache = batch * tokens * student_bytes_per_token(model, device)
    return {
        "model": name,
        "prompt": prompt,
        "generation": generation,
        "batch": batch,
        "parameters": parameters,
        "weight_bytes": weights,
        "bits_per_weight": 8 * weights / parameters,
        "kv_cache_bytes": cache,
        # A process with memory to spare does not grow by the cache, which exists nevertheless.
        "peak_bytes": None if growth is None else weights + max(growth, cache),
    }
