"""Probe whether the TileLang kernels can work on a device.

The probe imports neither TileLang nor torch, and wakes no GPU.
"""

from __future__ import annotations

import shutil
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from arb_ternary.backends.protocol import ProbeResult
from arb_ternary.backends.reference_probe import probe as probe_torch
from arb_ternary_tilelang.plugin import CUDA_HOME, CXX

#: Names that TileLang looks for, in its order, if CXX is not set.
COMPILERS: Final = ("g++", "clang++", "c++")
_CUDA_HOME: Final = "/usr/local/cuda"


def cpu_compiler() -> str | None:
    """Return the path of the C++ compiler that TileLang would use, or None."""
    chosen = CXX.read().strip()
    if chosen:
        return shutil.which(chosen)
    for name in COMPILERS:
        found = shutil.which(name)
        if found:
            return found
    return None


def cuda_compiler() -> str | None:
    """Return the path of the CUDA compiler that TileLang would use, or None."""
    places = ["nvcc", f"{_CUDA_HOME}/bin/nvcc"]
    chosen = CUDA_HOME.read().strip()
    if chosen:
        places.insert(0, str(Path(chosen) / "bin" / "nvcc"))
    for place in places:
        found = shutil.which(place)
        if found:
            return found
    return None


def probe(device: str) -> ProbeResult:
    """Find whether ``device`` (``cpu``, ``cuda``, ``cuda:1``) can be served, and why (not)."""
    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        return ProbeResult(False, f"it has no kernels for {kind!r}")
    if find_spec("tilelang") is None:
        return ProbeResult(False, "tilelang is not installed")
    torch = probe_torch(device)
    if not torch.usable:
        return ProbeResult(False, torch.reason)
    compiler = cpu_compiler()
    wanted = f"a C++ compiler ({CXX.read().strip() or ', '.join(COMPILERS)}): none was found"
    if kind == "cuda":
        if "+rocm" in torch.reason:
            return ProbeResult(
                False, f"{torch.reason} is built for ROCm, and the kernels are for CUDA"
            )
        compiler = cuda_compiler()
        wanted = "nvcc: none was found in CUDA_HOME, PATH or /usr/local/cuda"
    if compiler is None:
        return ProbeResult(False, f"its kernels need {wanted}")
    shown = compiler if kind == "cuda" else Path(compiler).name
    return ProbeResult(True, f"tilelang {_release()}, compiled by {shown}")


def _release() -> str:
    try:
        return version("tilelang")
    except PackageNotFoundError:  # a source checkout on sys.path
        return "unknown"
