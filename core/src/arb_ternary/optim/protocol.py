"""What an optimizer is given and what its step reports."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from arb_ternary.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from arb_ternary.ternary.module import TernaryModule
    from arb_ternary.ternary.stored import StoredWeights

__all__ = ["StepOutcome", "Trainable", "as_outcome", "collect_trainable", "copied_attributes", "require_accepted"]


@frozen
class Trainable:
    """The parts of a model that an optimizer may change, by qualified name.

    Attributes:
        ternary: modules whose packed weights learn by votes and that are not frozen.
        floats: float parameters with ``requires_grad``.
        stored: modules that keep integer weights in a format of their own and are not frozen. Since interface 1.1.
        idle: kinds of parts that the model has and that are all frozen now, so that there is nothing of the kind above.
            Since interface 1.2.
    """

    ternary: Mapping[str, TernaryModule] = field(factory=dict)
    floats: Mapping[str, nn.Parameter] = field(factory=dict)
    stored: Mapping[str, StoredWeights] = field(factory=dict)
    idle: frozenset[str] = frozenset()

    @property
    def parts(self) -> dict[str, Mapping[str, Any]]:
        """What there is to train, by the kind that an optimizer declares to accept; only kinds that there are."""
        parts = {"ternary": self.ternary, "float": self.floats, "stored": self.stored}
        return {kind: part for kind, part in parts.items() if part}


@frozen
class StepOutcome:
    """What one ``step()`` of an optimizer did.

    Attributes:
        stepped: whether weights were updated; a wrapper that defers a step reports False.
        draws: micro-batches that went into the step (so far, when it was deferred).
        grad_norm: norm of the gradient of the last micro-batch, when it is known.
        flips: trits that changed.
        exponent_moves: exponents that changed.
        skipped: the update was dropped because a loss, a signal or a gradient was not finite; the optimizer has cleared
            the gradients that it dropped.
        statistics: further numbers for the progress line and the metrics file.
    """

    stepped: bool = True
    draws: int = 1
    grad_norm: float | None = None
    flips: int = 0
    exponent_moves: int = 0
    skipped: bool = False
    statistics: Mapping[str, float] = field(factory=dict)


def as_outcome(result: Any, optimizer: Any = None) -> StepOutcome:
    """Read what ``step()`` returned: a :class:`StepOutcome`, a wrapper's bool, or a torch optimizer's loss or None.

    A wrapper that returns a bool may keep the numbers of that step in its attribute ``last_outcome``.
    """
    if isinstance(result, StepOutcome):
        return result
    if isinstance(result, bool):
        last = getattr(optimizer, "last_outcome", None)
        if isinstance(last, StepOutcome) and last.stepped == result:
            return last
        return StepOutcome(stepped=result)
    return StepOutcome()


def copied_attributes(optimizer: Any) -> dict[str, Any]:
    """What a copy or a pickle of ``optimizer`` holds, for its ``__getstate__``: all attributes of its own.

    torch's optimizers hold groups and state alone. As theirs do, a copy leaves hooks behind, and the patch that a
    scheduler made of ``step``.
    """
    own = vars(optimizer).items()
    return {name: value for name, value in own if name != "step" and not name.endswith(("_pre_hooks", "_post_hooks"))}


def collect_trainable(model: nn.Module) -> Trainable:
    """The trainable parts of ``model`` in the order of their names' registration; tied modules once."""
    from arb_ternary.ternary.module import TernaryModule
    from arb_ternary.ternary.stored import stored_modules

    all_ternary = {name: module for name, module in model.named_modules() if isinstance(module, TernaryModule)}
    all_floats, all_stored = dict(model.named_parameters()), dict(stored_modules(model))
    ternary = {name: module for name, module in all_ternary.items() if not module.frozen}
    floats = {name: parameter for name, parameter in all_floats.items() if parameter.requires_grad}
    stored = {name: module for name, module in all_stored.items() if not module.frozen}
    kinds = {"ternary": (all_ternary, ternary), "float": (all_floats, floats), "stored": (all_stored, stored)}
    idle = frozenset(kind for kind, (there, trained) in kinds.items() if there and not trained)
    return Trainable(ternary, floats, stored, idle)


def require_accepted(where: str, name: str, accepts: Collection[str], trainable: Trainable) -> None:
    """See that the optimizer ``name``, named at ``where`` in a config, trains all kinds of parts in ``trainable``.

    Raises:
        ConfigError: there are parts of a kind that it does not accept.
    """
    nouns = {
        "ternary": "ternary modules",
        "float": "float parameters",
        "stored": "modules with integer weights of their own format",
    }
    for kind, parts in trainable.parts.items():
        if kind not in accepts:
            raise ConfigError(
                f"{where}: {name!r} cannot train {nouns[kind]}, and the model has {len(parts)} of them, "
                f"the first being {next(iter(parts))!r}",
                "Use `optimizer: {name: split, ternary: ..., float: ...}`, or freeze those parts.",
            )
