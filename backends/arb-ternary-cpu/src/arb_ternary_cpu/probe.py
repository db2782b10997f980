"""Whether the native kernels can work here; asked before torch is imported."""

from __future__ import annotations

from importlib.util import find_spec

from arb_ternary.backends.protocol import ProbeResult
from arb_ternary.errors import ArbError


def probe(device: str) -> ProbeResult:
    """Usable on ``cpu`` where torch is installed, with the instruction set that would be used as
    the reason.
    """
    if device.partition(":")[0] != "cpu":
        return ProbeResult(False, f"it has no kernels for {device!r}")
    if find_spec("torch") is None:
        return ProbeResult(False, "torch is not installed")
    try:
        from arb_ternary_cpu.isa import chosen_isa

        return ProbeResult(True, f"instruction set {chosen_isa()}")
    except ImportError as error:
        return ProbeResult(False, f"its extension module cannot be imported: {error}")
    except ArbError as error:
        return ProbeResult(False, f"{error.what} ({error.hint})")
