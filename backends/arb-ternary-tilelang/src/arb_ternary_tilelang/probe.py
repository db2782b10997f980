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
from arb_ternary.environment import CUDA_VISIBLE_DEVICES
from arb_ternary_tilelang.plugin import CUDA_HOME, CXX

#: Names that TileLang looks for, in its order, if CXX is not set.
COMPILERS: Final = ("g++", "clang++", "c++")
#: Device nodes by which an NVIDIA driver shows that it is there, natively or under WSL.
_DEVICE_NODES: Final = ("/dev/nvidiactl", "/dev/dxg")
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
    for module in ("torch", "tilelang"):
        if find_spec(module) is None:
            return ProbeResult(False, f"{module} is not installed")
    release = f"tilelang {_version('tilelang')}"
    match device.partition(":")[0]:
        case "cpu":
            compiler = cpu_compiler()
            if compiler is None:
                wanted = CXX.read().strip() or ", ".join(COMPILERS)
                return ProbeResult(
                    False, f"its kernels need a C++ compiler ({wanted}): none was found"
                )
            return ProbeResult(True, f"{release}, compiled by {Path(compiler).name}")
        case "cuda":
            return _probe_cuda(release)
        case other:
            return ProbeResult(False, f"it has no kernels for {other!r}")


def _probe_cuda(release: str) -> ProbeResult:
    torch_release = _version("torch")
    if "+cpu" in torch_release:
        return ProbeResult(False, f"torch {torch_release} is built without CUDA")
    if "+rocm" in torch_release:
        return ProbeResult(
            False, f"torch {torch_release} is built for ROCm, and the kernels are for CUDA"
        )
    if CUDA_VISIBLE_DEVICES.read().strip() in ("", "-1"):
        return ProbeResult(False, "CUDA_VISIBLE_DEVICES hides every device")
    if (
        not any(Path(node).exists() for node in _DEVICE_NODES)
        and shutil.which("nvidia-smi") is None
    ):
        return ProbeResult(False, "no CUDA driver was found")
    compiler = cuda_compiler()
    if compiler is None:
        return ProbeResult(
            False, "its kernels need nvcc: none was found in CUDA_HOME, PATH or /usr/local/cuda"
        )
    return ProbeResult(True, f"{release}, compiled by {compiler}")


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:  # a source checkout on sys.path
        return "unknown"
