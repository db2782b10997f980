"""Fine-tuning: parts of a model that a phase freezes, and rate factors of the other parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn

from arb_ternary.errors import ConfigError
from arb_ternary_train.capabilities import check_model
from arb_ternary_train.part_names import is_named, near, parts_of
from arb_ternary_train.protocols import ModelChangingPhase

if TYPE_CHECKING:
    from arb_ternary.ternary.module import TernaryModule
    from arb_ternary_train.config import RunConfig
    from arb_ternary_train.options import LoopOptions


class FineTuning:
    """Applies ``freeze`` and ``rate_factors`` of a phase to ``model`` until :meth:`release`.

    A frozen ternary module casts no votes and keeps weights, exponents and accumulators. A frozen
    float parameter gets no gradient. Parts that were frozen before stay frozen.

    Args:
        model: the model.
        options: options of the loop.
        where: the phase, for errors: ``phases[0]``.

    Attributes:
        factors: factors on the rates of parts that learn, by name, except 1. If several patterns
            name a part, their factors are multiplied.

    Raises:
        ConfigError: a pattern names nothing, or a factor only frozen parts.
    """

    def __init__(self, model: nn.Module, options: LoopOptions, where: str) -> None:
        frozen, factors = _resolve_patterns(model, options, where)
        self.factors: Mapping[str, float] = {
            name: factor for name, factor in factors.items() if factor != 1.0
        }
        self._modules: list[TernaryModule] = []
        self._parameters: list[nn.Parameter] = []
        parts = parts_of(model)
        for name in frozen:
            part = parts[name]
            if isinstance(part, nn.Parameter):
                if part.requires_grad:
                    part.requires_grad_(False)
                    part.grad = None
                    self._parameters.append(part)
            elif not part.frozen:
                part.frozen = True
                self._modules.append(part)

    def release(self) -> None:
        """Unfreeze what this has frozen."""
        for module in self._modules:
            module.frozen = False
        for parameter in self._parameters:
            parameter.requires_grad_(True)
        self._modules = []
        self._parameters = []


@contextmanager
def frozen_at_first(config: RunConfig, model: nn.Module) -> Iterator[None]:
    """Freeze what the first phase of a run freezes, within a ``with`` block.

    It serves checks that ask in advance how ``model`` will be trained.
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
    """Check what phases ask of ``model`` before the first of them begins.

    Phases after one that changes the model are checked when they begin.

    Raises:
        ConfigError: see :class:`FineTuning`; or a phase freezes everything; or a phase rejects the
            model (``capabilities.check_model``).
    """
    for index, phase in enumerate(config.phases):
        where = f"phases[{index}]"
        built = phase.build()
        if isinstance(built, ModelChangingPhase):
            return
        check_model(built, model, where)
        options = phase.options
        if getattr(options, "freeze", None) or getattr(options, "rate_factors", None):
            frozen, _ = _resolve_patterns(model, options, where)
            if len(frozen) == len(parts_of(model)):
                raise ConfigError(
                    f"{where}.freeze: nothing in the model can be trained; every part is frozen",
                    "Leave out a pattern, or name fewer modules by it.",
                )


def _resolve_patterns(
    model: nn.Module, options: LoopOptions, where: str
) -> tuple[Sequence[str], Mapping[str, float]]:
    """Return the names of frozen parts, and the factors of other parts that have one.

    Raises:
        ConfigError: see :class:`FineTuning`.
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
    learning = [name for name in names if not is_named(name, freeze)]
    found: dict[str, float] = {}
    for pattern, factor in factors.items():
        named = [name for name in learning if is_named(name, [pattern])]
        if not named:
            raise ConfigError(
                f"{where}.rate_factors: everything that {pattern!r} names is frozen, and has no "
                f"rate",
                "Remove the factor, or the pattern of `freeze` that names the same parts.",
            )
        for name in named:
            found[name] = found.get(name, 1.0) * factor
    return frozen, found
