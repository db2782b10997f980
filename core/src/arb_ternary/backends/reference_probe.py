"""Find out whether the torch backend can work on a device.

This neither imports torch nor initialises an accelerator.
"""

from __future__ import annotations

import platform
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from arb_ternary.backends.protocol import ProbeResult
from arb_ternary.environment import CUDA_VISIBLE_DEVICES

#: Device nodes of drivers: NVIDIA, AMD, and either of them under WSL.
_DEVICE_NODES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


def probe(device: str) -> ProbeResult:
    """Find out whether torch is installed and ``device`` (``cuda:1``, ``mps``) seems to exist.

    A process that has initialised CUDA can no longer fork workers. Therefore device nodes and
    metadata are checked, instead of ``torch.cuda.is_available()``.
    """
    if find_spec("torch") is None:
        return ProbeResult(False, "torch is not installed")
    try:
        release = version("torch")
    except PackageNotFoundError:  # a source checkout on sys.path
        release = "unknown"
    match device.partition(":")[0]:
        case "cpu":
            return ProbeResult(True, f"torch {release}")
        case "cuda":
            return _probe_cuda(release)
        case "mps":
            if sys.platform == "darwin" and platform.machine() == "arm64":
                return ProbeResult(True, f"torch {release}")
            return ProbeResult(False, "mps needs macOS on Apple silicon")
        case other:
            return ProbeResult(False, f"it has no kernels for {other!r}")


def _probe_cuda(release: str) -> ProbeResult:
    """Probe for a CUDA or ROCm device."""
    if "+cpu" in release:
        return ProbeResult(False, f"torch {release} is built without CUDA and ROCm")
    if CUDA_VISIBLE_DEVICES.read().strip() in ("", "-1"):
        return ProbeResult(False, "CUDA_VISIBLE_DEVICES hides every device")
    if any(Path(node).exists() for node in _DEVICE_NODES) or shutil.which("nvidia-smi"):
        return ProbeResult(True, f"torch {release}")
    return ProbeResult(False, "no CUDA or ROCm driver was found")
