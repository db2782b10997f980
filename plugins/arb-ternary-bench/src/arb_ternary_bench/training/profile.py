"""Profiled steps of a way of training, with the ranges that :mod:`.parts` reads.

Ranges are around the backend's kernels, modules, the loss and the optimizer's step. They replace
what is called, since a module with a hook would be trained in another way; so this is for a process
of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from torch._C._profiler import _RecordFunctionFast
from torch.profiler import ProfilerActivity

from arb_ternary.backends.select import get_backend
from arb_ternary_bench.training.loop import Learner
from arb_ternary_bench.training.parts import (
    KERNEL,
    LOSS,
    SCOPE,
    UPDATE,
    Split,
    read_step,
    split_steps,
)
from arb_ternary_bench.training.sizes import TrainSize
from arb_ternary_bench.training.trainees import TrainWay
from arb_ternary_train.protocols import BlockedLogits

#: Profiled steps.
_STEPS: Final = 6
_ROOT: Final = f"{SCOPE}step"


def profile_steps(way: TrainWay, size: TrainSize, seed: int = 0) -> Split:
    """Train a little, then take some profiled steps; return a step by part."""
    if way.backend is not None:
        _mark_kernels(way.backend)
    if not way.compiled:  # a compiler follows what a module's call does, and would stop at a range
        _mark_modules()
    learner = Learner(way, size, seed)
    learner.check()
    loop: Any = learner.loop
    loop.loss = _marked(f"{SCOPE}{LOSS}", loop.loss)
    model: Any = loop.model
    if issubclass(type(model), BlockedLogits):
        model.mean_cross_entropy = _marked(f"{SCOPE}{LOSS}", model.mean_cross_entropy)
    loop.optimizer.step = _marked(f"{SCOPE}{UPDATE}", loop.optimizer.step)
    step = _marked(_ROOT, learner.step)
    steps = []
    for _ in range(_STEPS):
        with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profiler:
            step()
        events: Any = profiler.events()
        ordered = sorted(events, key=lambda each: each.time_range.start)
        steps.append(read_step(next(each for each in ordered if each.name == _ROOT), ordered))
    return split_steps(steps)


def _marked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def inside(*arguments: Any, **options: Any) -> Any:
        with _RecordFunctionFast(name):
            return function(*arguments, **options)

    return inside


def _mark_kernels(backend: str) -> None:
    built = get_backend(backend)
    marked = {op: _marked(f"{KERNEL}{op}", function) for op, function in built.kernels.items()}
    object.__setattr__(built, "kernels", marked)


def _mark_modules() -> None:
    call: Any = nn.Module.__call__

    def inside(module: nn.Module, *arguments: Any, **options: Any) -> Any:
        with _RecordFunctionFast(f"{SCOPE}{type(module).__name__}"):
            return call(module, *arguments, **options)

    setattr(nn.Module, "__call__", inside)  # noqa: B010  # mypy: a method cannot be assigned
