"""The processor or GPU that a run computes on."""

from __future__ import annotations

import platform
from pathlib import Path

import torch


def processor_name(device: torch.device) -> str:
    """Return the GPU's name, or the processor's; its architecture if the system has no name."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text(encoding="utf-8").splitlines() if facts.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
