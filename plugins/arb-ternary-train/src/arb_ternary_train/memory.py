"""Refuses a run that cannot fit into memory, before anything is allocated.

What is computed are lower bounds: the tensors of the model, and what a micro-batch needs at least.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from arb_ternary.backends.select import use_backend
from arb_ternary.config.choice import Choice
from arb_ternary.config.errors import Path as ConfigPath
from arb_ternary.config.errors import show_path
from arb_ternary.config.fields import config_fields, default_of
from arb_ternary.errors import ArbError
from arb_ternary.specs import ModelSpec
from arb_ternary.ternary.module import DRAW_TRITS
from arb_ternary_train.audit import audit
from arb_ternary_train.progress import format_bytes

if TYPE_CHECKING:
    from arb_ternary_train.config import RunConfig

_CPU: Final = torch.device("cpu")
_MEMINFO: Final = Path("/proc/meminfo")
#: How many of the options that make a model large an error names.
_NAMED: Final = 4
#: Bytes of a token that is read and of its target, and of a feature in the shortest number format.
_TOKEN_BYTES: Final = 16
_FEATURE_BYTES: Final = 2
#: A size in an error may be far beyond any memory.
_format: Final = partial(format_bytes, largest="EiB")


def free_memory(device: torch.device) -> int:
    """Return the free bytes in the memory of ``device``; all bytes if the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if _MEMINFO.exists():
        for line in _MEMINFO.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_model_fits(choice: Choice[ModelSpec], vocabulary_size: int) -> None:
    """Check that the tensors of a model fit into memory, in which every model is built first.

    A model that cannot be built without memory is not checked.

    Raises:
        ArbError: they do not fit; the options that make the model large are named.
    """
    sizes = dict(_whole_numbers(choice, ("model",)))
    free = free_memory(_CPU)
    # Counting takes seconds, and is needless if even this would fit: as many square matrices of the
    # largest size as the second largest number says.
    second, side = sorted([*sizes.values(), 1, 1])[-2:]
    if side * side * second + side * vocabulary_size < free:
        return
    estimate = estimate_model(choice, vocabulary_size)
    if estimate is None or estimate[1] <= free:
        return
    parameters, nbytes = estimate
    raised = [path for path, _ in _whole_numbers(choice, ("model",), raised=True)]
    named = sorted(raised or sizes, key=lambda path: -sizes[path])[:_NAMED]
    options = ", ".join(f"{show_path(path)} ({sizes[path]})" for path in named)
    raise ArbError(
        f"model: needs {_format(nbytes)} of memory for {parameters:,} parameters and the "
        f"state that they learn by, and {_format(free)} are free",
        f"Lower the options that make it large: {options}. The data have {vocabulary_size} ids.",
    )


def check_batches_fit(config: RunConfig, device: torch.device) -> None:
    """Check that the micro-batches of all phases fit into the memory of ``device``.

    Raises:
        ArbError: one does not fit.
    """
    width = getattr(config.model.options, "width", 1)
    for index, phase in enumerate(config.phases):
        samples = getattr(phase.options, "batch_size", None)
        length = getattr(phase.options, "block_size", None)
        if samples is None:
            continue
        if length is None or getattr(config.data.options, "sized_samples", False):
            length = 1
        nbytes = samples * length * (_TOKEN_BYTES + _FEATURE_BYTES * width)
        free = free_memory(device)
        if nbytes > free:
            where = show_path(("phases", index))
            raise ArbError(
                f"{where}: a micro-batch needs at least {_format(nbytes)} of memory, and "
                f"{_format(free)} are free on {device}",
                f"Lower {where}.batch_size ({samples}) or {where}.block_size ({length}); "
                "gradient_accumulation_steps makes a step of several micro-batches.",
            )


def estimate_model(choice: Choice[ModelSpec], vocabulary_size: int) -> tuple[int, int] | None:
    """Return the number of parameters of a model and the bytes of its tensors.

    Options called ``layers`` or ``..._layers`` count equal blocks. Models with one and with two are
    built without memory, and the difference is multiplied. None if that is not possible.
    """
    depths = {
        path: number
        for path, number in _whole_numbers(choice)
        if str(path[-1]).rpartition("_")[2] == "layers" and number > 1
    }
    shallow = choice
    for path in depths:
        shallow = shallow.with_option(path, 1)
    first = _counted(shallow, vocabulary_size)
    if first is None:
        return None
    parameters, nbytes = first
    for path, number in depths.items():
        deeper = _counted(shallow.with_option(path, 2), vocabulary_size)
        if deeper is None:
            return None
        parameters += (number - 1) * (deeper[0] - first[0])
        nbytes += (number - 1) * (deeper[1] - first[1])
    return parameters, nbytes


def meta_model(choice: Choice[ModelSpec], vocabulary_size: int) -> nn.Module | None:
    """Build a model on the device ``meta``; return None if building it computes something."""
    token = DRAW_TRITS.set(False)
    try:
        with use_backend("torch"), torch.device("meta"):
            model = choice.build(vocabulary_size)
    except (NotImplementedError, RuntimeError, TypeError):
        return None
    finally:
        DRAW_TRITS.reset(token)
    return model if isinstance(model, nn.Module) else None


def _counted(choice: Choice[ModelSpec], vocabulary_size: int) -> tuple[int, int] | None:
    model = meta_model(choice, vocabulary_size)
    if model is None:
        return None
    nbytes = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    return audit(model).parameters, nbytes


def _whole_numbers(
    choice: Choice[Any], path: ConfigPath = (), *, raised: bool = False
) -> Iterator[tuple[ConfigPath, int]]:
    """Yield every whole number above 0 in the options of a component, and of those inside it.

    Of two sides it is the longer one.

    Args:
        choice: the component.
        path: its path.
        raised: leave out numbers that are at most the option's default.
    """
    if choice.options is None:
        return
    for field in config_fields(type(choice.options)):
        value = getattr(choice.options, field.name)
        if isinstance(value, Choice):
            yield from _whole_numbers(value, (*path, field.name), raised=raised)
            continue
        number = _largest(value)
        if number > (_largest(default_of(field)) if raised else 0):
            yield (*path, field.name), number


def _largest(value: Any) -> int:
    """Return the largest whole number in a value that is a number or a list; 0 if it has none."""
    numbers = value if isinstance(value, list | tuple) else (value,)
    return max((number for number in numbers if type(number) is int), default=0)
