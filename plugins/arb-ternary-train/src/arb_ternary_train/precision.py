"""Devices and number formats, and errors that say what this machine cannot do."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch

from arb_ternary.errors import ConfigError, EnvironmentProblem
from arb_ternary_train.capabilities import chooses_dtypes
from arb_ternary_train.options import AmpName, DtypeName

_DTYPES: Final[dict[str, torch.dtype]] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def resolve_device(name: str) -> torch.device:
    """Return the device that a config names: ``cpu``, ``cuda``, ``cuda:N`` or ``mps``.

    Raises:
        EnvironmentProblem: this machine, or this build of torch, does not have it.
    """
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            why = "this build of torch has no CUDA"
            if torch.version.cuda or torch.version.hip:
                why = "torch sees no GPU"
            raise EnvironmentProblem(
                f"device {name}: {why}", "Use device: cpu, or install a torch build for your GPU."
            )
        count = torch.cuda.device_count()
        if device.index is not None and device.index >= count:
            raise EnvironmentProblem(
                f"device {name}: there are {count} GPUs, numbered from 0", f"Use cuda:{count - 1}."
            )
        if device.index is None:
            return torch.device("cuda", torch.cuda.current_device())
        return device
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise EnvironmentProblem(f"device {name}: Metal is not available here", "Use device: cpu.")
    return device


def autocast_for(
    device: torch.device, use_amp: bool, amp_dtype: AmpName, *, ternary: bool
) -> Callable[[], AbstractContextManager[Any]]:
    """Return a function that makes the context of a forward pass.

    float16 needs a loss scale, which acts on float gradients only: votes would be cast from
    gradients that the scaler may discard afterwards.

    Raises:
        ConfigError: the combination does not work; the option is named.
    """
    if not use_amp:
        return nullcontext
    if amp_dtype == "float16" and device.type != "cuda":
        raise ConfigError(
            f"amp_dtype: float16 needs loss scaling, which works on cuda, not on {device.type}",
            "Use amp_dtype: bfloat16.",
        )
    if amp_dtype == "float16" and ternary:
        raise ConfigError(
            "amp_dtype: float16 scales the loss, and ternary modules cast votes before the scaler "
            "can reject a step",
            "Use amp_dtype: bfloat16, which needs no scaling.",
        )
    dtype = _DTYPES[amp_dtype]
    return lambda: torch.autocast(device.type, dtype=dtype)


def scaler_for(device: torch.device, use_amp: bool, amp_dtype: AmpName) -> torch.amp.GradScaler:
    """Return the loss scaler that float16 needs; it is disabled for other number formats."""
    enabled = use_amp and amp_dtype == "float16"
    return torch.amp.GradScaler(device.type, enabled=enabled)


def set_compute_dtype(model: Any, dtype: DtypeName, device: torch.device) -> None:
    """Make the float parts of ``model`` compute in ``dtype``.

    Raises:
        ConfigError: float16 on a CPU: its gradients underflow, and nothing scales them there.
    """
    if dtype == "float16" and device.type == "cpu":
        raise ConfigError(
            "dtype: float16 training does not work on cpu", "Use dtype: bfloat16 or float32."
        )
    if chooses_dtypes(model):
        model.set_dtype(_DTYPES[dtype])
    else:
        model.to(_DTYPES[dtype])
