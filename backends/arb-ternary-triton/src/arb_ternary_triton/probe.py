"""Probe whether the Triton kernels can work on a device.

The probe imports neither torch nor triton, and does not initialise an accelerator.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Final

from arb_ternary.backends.protocol import ProbeResult
from arb_ternary.backends.reference_probe import probe as probe_torch
from arb_ternary_triton.plugin import INTERPRET

#: First release whose compiler and interpreter the kernels are tested with.
_OLDEST: Final = (3, 4)


def interpreted() -> bool:
    """Return whether Triton would run kernels in its interpreter."""
    return INTERPRET.read().strip().lower() in ("1", "true", "on", "yes", "y")


def probe(device: str) -> ProbeResult:
    """Accept ``cuda`` with a driver, and ``cpu`` if ``TRITON_INTERPRET=1`` is set."""
    release = _release()
    if release is None:
        return ProbeResult(False, "triton is not installed: pip install triton (Linux only)")
    if _numbers(release) < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        return ProbeResult(False, f"triton {release} is too old: pip install 'triton>={oldest}'")
    kind = device.partition(":")[0]
    torch = probe_torch(device)
    if not torch.usable:
        return ProbeResult(False, torch.reason)
    if kind == "cpu":
        if interpreted():
            return ProbeResult(
                True, f"triton {release} in its interpreter, for tests: slow", last_resort=True
            )
        return ProbeResult(
            False,
            f"triton {release} compiles for GPUs only; {INTERPRET.name}=1 runs its interpreter",
        )
    if interpreted():
        return ProbeResult(False, f"{INTERPRET.name}=1 runs kernels on the CPU; unset it")
    return ProbeResult(True, f"triton {release}")


def _release() -> str | None:
    """Return the installed release of Triton.

    ROCm builds of torch bring it under another distribution's name.
    """
    if find_spec("triton") is None:
        return None
    for distribution in ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-rocm"):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None


def _numbers(release: str) -> tuple[int, ...]:
    parts = release.partition("+")[0].split(".")[:2]
    return tuple(int(part) if part.isdigit() else 0 for part in parts)
