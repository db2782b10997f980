"""Freeze a model except for one part, and refuse patterns that name nothing that learns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from arb_ternary.errors import ConfigError
from arb_ternary.ternary.models import ternary_modules
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_train.options import LoopOptions
from arb_ternary_train.part_names import is_named, near, parts_of


@contextmanager
def only_learning(model: nn.Module, part: nn.Module) -> Iterator[None]:
    """Freeze everything in ``model`` outside ``part``, and undo that at the end."""
    inside = set(part.modules())
    own = set(part.parameters())
    found = [module for _, module in ternary_modules(model)]
    modules = [module for module in found if not module.frozen and module not in inside]
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    parameters = [parameter for parameter in learning if parameter not in own]
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
    """Return the path of the part of each block that learns, first block first."""
    part = ".attention" if distill_target == "attention" else ""
    return [f"blocks.{number}{part}" for number in range(len(student.blocks))]


def refuse_idle_patterns(
    student: Decoder, parts: Sequence[str], options: LoopOptions, where: str
) -> None:
    """Refuse a pattern of ``freeze`` or ``rate_factors`` that names nothing inside ``parts``.

    Patterns that name nothing in the whole model are left to the training loop.

    Raises:
        ConfigError: there is one.
    """
    names = [*parts_of(student)]
    learning = [name for name in names if name.startswith(tuple(f"{part}." for part in parts))]
    given = {"freeze": options.freeze or (), "rate_factors": options.rate_factors or {}}
    for option, patterns in given.items():
        for pattern in patterns:
            named = [name for name in names if is_named(name, [pattern])]
            if named and not set(named) & set(learning):
                raise ConfigError(
                    f"{where}.{option}: {pattern!r} has no effect because it names nothing that "
                    "this phase trains, which is blocks only",
                    near(pattern, learning),
                )
