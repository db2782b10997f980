"""Randomness that a run can restore: seeds derived by hash, and the state of global generators.

Everything that a result depends on draws from a generator whose seed is a hash of its purpose
(``derive_seed(seed, "mask", step, microbatch)``). So the order of calls does not matter, and
nothing needs to be stored. The global generators of Python, numpy and torch are seeded and stored
all the same, for components that use them.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def derive_seed(*parts: int | str) -> int:
    """Return a seed in [0, 2**63) that depends on every part and on their order.

    It is the first 8 bytes of their SHA-256, halved.
    """
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def derived_generator(*parts: int | str) -> torch.Generator:
    """Return a CPU generator seeded with :func:`derive_seed` of ``parts``."""
    generator = torch.Generator()
    generator.manual_seed(derive_seed(*parts))
    return generator


def seed_everything(seed: int) -> None:
    """Seed the global generators of Python, numpy and torch on every device."""
    random.seed(derive_seed(seed, "python"))
    np.random.seed(derive_seed(seed, "numpy") % 2**32)
    torch.manual_seed(derive_seed(seed, "torch"))


@contextmanager
def deterministic_algorithms(wanted: bool) -> Iterator[None]:
    """Use torch's deterministic algorithms within a ``with`` block if ``wanted``."""
    before = torch.get_deterministic_debug_mode()
    if wanted:
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


def global_rng_state(device: torch.device) -> dict[str, Any]:
    """Return the state of the global generators, and of ``device``, as a checkpoint can hold it."""
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (
            str(name),
            torch.from_numpy(np.asarray(keys, dtype=np.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    elif device.type == "mps":
        state["mps"] = torch.mps.get_rng_state()
    return state


def restore_global_rng(state: Mapping[str, Any], device: torch.device) -> None:
    """Restore what :func:`global_rng_state` returned.

    The generator of a device is restored if the device exists on both sides.
    """
    random.setstate(state["python"])
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
    elif device.type == "mps" and "mps" in state:
        torch.mps.set_rng_state(state["mps"])


@contextmanager
def preserved_global_rng(device: torch.device) -> Iterator[None]:
    """Restore the global generators after a ``with`` block, whatever was drawn in it."""
    state = global_rng_state(device)
    try:
        yield
    finally:
        restore_global_rng(state, device)
