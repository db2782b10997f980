"""Fine-tuning: which parts of a model a phase leaves as they are, and how fast each of the others
learns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn

from arb_ternary.errors import ConfigError
from arb_ternary_train.part_names import is_named, near, parts_of
from arb_ternary_train.protocols import ChecksModel, ModelChangingPhase

if TYPE_CHECKING:
    from arb_ternary.ternary.models import StoredWeights
    from arb_ternary.ternary.module import TernaryModule
    from arb_ternary_train.config import RunConfig
    from arb_ternary_train.options import LoopOptions


class FineTuning:
    """What ``freeze`` and ``rate_factors`` of a phase make of ``model``, from its making until
    :meth:`release`.

    A frozen ternary module casts no votes and keeps weights, exponents and accumulators; a frozen
    float parameter gets no gradient. What was frozen before stays so.

    Args:
        model: the model.
        options: of the loop.
        where: the phase, for errors: ``phases[0]``.

    Attributes:
        factors: by name, of those parts that learn, what their rates are multiplied by where that
            is not 1. Of several patterns that name a part all count.

    Raises:
        ConfigError: a pattern names nothing, or a factor only what is frozen.
    """

    def __init__(self, model: nn.Module, options: LoopOptions, where: str) -> None:
        frozen, factors = _named(model, options, where)
        self.factors: Mapping[str, float] = {
            name: factor for name, factor in factors.items() if factor != 1.0
        }
        parts = parts_of(model)
        self._modules: list[TernaryModule | StoredWeights] = []
        self._parameters: list[nn.Parameter] = []
        for part in (parts[name] for name in frozen):
            if isinstance(part, nn.Parameter):
                if part.requires_grad:
                    part.requires_grad_(False)
                    part.grad = None
                    self._parameters.append(part)
            elif not part.frozen:
                part.frozen = True
                self._modules.append(part)

    def release(self) -> None:
        """Let learn again what this has frozen."""
        for module in self._modules:
            module.frozen = False
        for parameter in self._parameters:
            parameter.requires_grad_(True)
        self._modules = []
        self._parameters = []


@contextmanager
def frozen_at_first(config: RunConfig, model: nn.Module) -> Iterator[None]:
    """Within, what the run's first phase freezes is frozen: for what asks beforehand how ``model``
    will be trained.
    """
    options = config.phases[0].options
    if getattr(options, "freeze", None) is None:
        yield
        return
    tuning = FineTuning(model, options, "phases[0]")
    try:
        yield
    finally:
        tuning.release()


def check_patterns(config: RunConfig, model: nn.Module) -> None:
    """Refuse what phases cannot do with ``model`` before the first of them begins, as far as they
    get this one.

    Phases after one that changes the model are asked when it is their turn.

    Raises:
        ConfigError: see :class:`FineTuning`; or a phase freezes everything; or it is a
            :class:`ChecksModel`, and says so.
    """
    for index, phase in enumerate(config.phases):
        made = phase.build()
        if isinstance(made, ModelChangingPhase):
            return
        if isinstance(made, ChecksModel):
            made.check_model(model, f"phases[{index}]")
        if getattr(phase.options, "freeze", None) or getattr(phase.options, "rate_factors", None):
            frozen, _ = _named(model, phase.options, f"phases[{index}]")
            if len(frozen) == len(parts_of(model)):
                raise ConfigError(
                    f"phases[{index}].freeze: nothing in the model can be trained; every part is "
                    f"frozen",
                    "Leave out a pattern, or name fewer modules by it.",
                )


def _named(
    model: nn.Module, options: LoopOptions, where: str
) -> tuple[Sequence[str], Mapping[str, float]]:
    """Names of the parts that are frozen, and the factor of each other one that has any; checks
    both options.
    """
    names = [*parts_of(model)]
    freeze = options.freeze or ()
    factors = options.rate_factors or {}
    for option, patterns in (("freeze", freeze), ("rate_factors", factors)):
        for pattern in patterns:
            if not any(is_named(name, [pattern]) for name in names):
                raise ConfigError(
                    f"{where}.{option}: {pattern!r} names no part of the model",
                    near(pattern, names),
                )
    frozen = [name for name in names if is_named(name, freeze)]
    learning = [name for name in names if name not in set(frozen)]
    found: dict[str, float] = {}
    for pattern, factor in factors.items():
        named = [name for name in learning if is_named(name, [pattern])]
        if not named:
            raise ConfigError(
                f"{where}.rate_factors: everything that {pattern!r} names is frozen, and learns at "
                f"no rate",
                "Remove the factor, or the pattern of `freeze` that names the same parts.",
            )
        found |= {name: math.prod((found.get(name, 1.0), factor)) for name in named}
    return frozen, found
