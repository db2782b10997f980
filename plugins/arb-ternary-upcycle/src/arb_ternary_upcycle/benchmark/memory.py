"""What a model takes in memory: weights, keys and values, and a pass besides."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from arb_ternary_text.models.decoder import Decoder
from arb_ternary_train.audit import audit
from arb_ternary_upcycle.benchmark.latency import generate_greedily
from arb_ternary_upcycle.verification.kv_cache import student_bytes_per_token

#: Rows of an audit that only training needs.
_TRAINING: Final = frozenset({"votes", "exponent votes", "control words"})
_STATUS: Final = Path("/proc/self/status")
#: Writing 5 here has Linux begin to look for the process's peak anew.
_FORGET_PEAK: Final = Path("/proc/self/clear_refs")


def weight_bytes(model: Decoder) -> tuple[int, int]:
    """Learned numbers of ``model``, and the bytes that it computes them from; accumulators of votes
    do not count.
    """
    counted = audit(model)
    return counted.parameters, sum(row.nbytes for row in counted.rows if row.what not in _TRAINING)


def growth_of(work: Callable[[], None], device: torch.device) -> int | None:
    """Bytes by which ``work`` exceeds what is held before it; None where the system does not tell.

    On CUDA those of torch's tensors; elsewhere those of the process on Linux, of which freed memory
    that is used again is no part.
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
        _FORGET_PEAK.write_text("5")
    except OSError:  # a system that keeps the file from its own processes
        return None
    before = _kilobytes("VmRSS")
    work()
    return max(0, _kilobytes("VmHWM") - before) * 1024


def _kilobytes(name: str) -> int:
    lines = _STATUS.read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def measure_memory(
    name: str, model: Decoder, size: tuple[int, int, int], device: torch.device
) -> dict[str, Any]:
    """A row for ``model``, in evaluation mode: what it takes with a prompt and what follows it, in
    a batch.
    """
    prompt, generation, batch = size
    parameters, weights = weight_bytes(model)
    # The last token is chosen and not read.
    tokens = prompt + generation - 1
    cache = batch * tokens * student_bytes_per_token(model, device)
    growth = growth_of(lambda: generate_greedily(model, prompt, generation, batch, device), device)
    return {
        "model": name,
        "prompt": prompt,
        "generation": generation,
        "batch": batch,
        "parameters": parameters,
        "weight_bytes": weights,
        "bits_per_weight": 8 * weights / parameters,
        "kv_cache_bytes": cache,
        # A process that has memory to spare does not grow by the cache, which is there all the
        # same.
        "peak_bytes": None if growth is None else weights + max(growth, cache),
    }
