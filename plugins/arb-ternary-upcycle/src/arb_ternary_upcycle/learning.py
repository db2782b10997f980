"""Freeze a model but for one part, and refuse patterns that name none of what will learn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from arb_ternary.errors import ConfigError
from arb_ternary.ternary.models import StoredWeights, stored_modules, ternary_modules
from arb_ternary.ternary.module import TernaryModule
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_train.options import LoopOptions
from arb_ternary_train.part_names import is_named, near, parts_of


@contextmanager
def only_learning(model: nn.Module, part: nn.Module) -> Iterator[None]:
    """Within the block nothing of ``model`` learns but what learns in ``part``; afterwards
    everything is as before.
    """
    inside = set(part.modules())
    own = set(part.parameters())
    there: list[TernaryModule | StoredWeights] = [module for _, module in ternary_modules(model)]
    there += [module for _, module in stored_modules(model)]
    modules = [module for module in there if not module.frozen and module not in inside]
    parameters = [
        parameter
        for parameter in model.parameters()
        if parameter.requires_grad and parameter not in own
    ]
    for module in modules:
        module.frozen = True
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for module in modules:
            module.frozen = False
        for parameter in parameters:
            parameter.requires_grad_(True)


def parts_of_blocks(student: Decoder, distill_target: str) -> Sequence[str]:
    """Names of what learns of each block while its turn is, first block first."""
    part = ".attention" if distill_target == "attention" else ""
    return [f"blocks.{number}{part}" for number in range(len(student.blocks))]


def refuse_idle_patterns(
    student: Decoder, parts: Sequence[str], options: LoopOptions, where: str
) -> None:
    """Refuse a pattern of ``freeze`` or ``rate_factors`` that names nothing in ``parts``; nothing
    else learns.

    Raises:
        ConfigError: there is one. Patterns that name nothing in the whole model are left to the
            loop.
    """
    names = [*parts_of(student)]
    learning = [name for name in names if name.startswith(tuple(f"{part}." for part in parts))]
    for option, patterns in (
        ("freeze", options.freeze or ()),
        ("rate_factors", options.rate_factors or {}),
    ):
        for pattern in patterns:
            named = [name for name in names if is_named(name, [pattern])]
            if named and not set(named) & set(learning):
                raise ConfigError(
                    f"{where}.{option}: {pattern!r} has no effect: what it names does not learn in "
                    "this phase, which trains blocks only",
                    near(pattern, learning),
                )
