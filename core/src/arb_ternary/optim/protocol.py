"""What an optimizer is given, what its step reports, and what it may declare beside
``torch.optim.Optimizer``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

from attrs import field, frozen

from arb_ternary.errors import ConfigError
from arb_ternary.specs import TrainedPart

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from arb_ternary.config.choice import Choice
    from arb_ternary.specs import OptimizerSpec
    from arb_ternary.ternary.models import StoredWeights
    from arb_ternary.ternary.module import TernaryModule


#: How messages speak of the kinds of parts.
PART_NOUNS: Final = {
    "ternary": "ternary modules",
    "float": "float parameters",
    "stored": "modules with integer weights of their own format",
}


@frozen
class Trainable:
    """The parts of a model that an optimizer may change, by qualified name.

    Attributes:
        ternary: modules whose packed weights learn by votes and that are not frozen.
        floats: float parameters with ``requires_grad``.
        stored: modules that keep integer weights in a format of their own and are not frozen.
        idle: kinds of parts that the model has and that are all frozen now, so that there is
            nothing of the kind above.
        later: kinds of parts that the run will add to the model; an optimizer of them is made anew
            then.
    """

    ternary: Mapping[str, TernaryModule] = field(factory=dict)
    floats: Mapping[str, nn.Parameter] = field(factory=dict)
    stored: Mapping[str, StoredWeights] = field(factory=dict)
    idle: frozenset[str] = frozenset()
    later: frozenset[str] = frozenset()

    @property
    def parts(self) -> dict[str, Mapping[str, Any]]:
        """What there is to train, by the kind that an optimizer declares to accept; only kinds that
        there are.
        """
        parts = {"ternary": self.ternary, "float": self.floats, "stored": self.stored}
        return {kind: part for kind, part in parts.items() if part}


@frozen(kw_only=True)
class Planned:
    """What a run will train, as far as its config tells it: what options are compared with before
    anything is built.

    The options of a model say it by a method ``planned() -> Planned``. Those of any component
    object by a method ``validate_in_run(run, planned) -> Iterable[tuple[str, str]]``: an option
    of theirs (or "" for all of them) and what is wrong with it in the run whose config is ``run``;
    ``planned`` is None where the model does not tell.

    Attributes:
        kinds: of the parts that are trained.
        idle: kinds of further parts, which are frozen throughout.
        matrices: some float parameters are matrices.
        vote_bits: of the accumulators of ternary modules.
        integers: the gradients of some ternary weights are exact integers.
        exponents: some exponents learn by votes.
    """

    kinds: frozenset[TrainedPart]
    idle: frozenset[TrainedPart] = frozenset()
    matrices: bool = True
    vote_bits: int = 8
    integers: bool = False
    exponents: bool = True

    @property
    def largest_vote(self) -> int:
        """What an accumulator holds: 127, 7 or 1."""
        return (1 << self.vote_bits - 1) - 1


@frozen
class StepOutcome:
    """What one ``step()`` of an optimizer did.

    Attributes:
        stepped: whether weights were updated; a wrapper that defers a step reports False.
        draws: micro-batches that went into the step (so far, when it was deferred).
        grad_norm: norm of the gradient of the last micro-batch, when it is known.
        flips: trits that changed.
        exponent_moves: exponents that changed.
        skipped: the update was dropped because a loss, a signal or a gradient was not finite; the
            optimizer has cleared the gradients that it dropped.
        statistics: further numbers for the progress line and the metrics file.
    """

    stepped: bool = True
    draws: int = 1
    grad_norm: float | None = None
    flips: int = 0
    exponent_moves: int = 0
    skipped: bool = False
    statistics: Mapping[str, float] = field(factory=dict)


@runtime_checkable
class Wraps(Protocol):
    """An optimizer that decides when another one steps. Its own groups are of another ``kind`` than
    those.
    """

    @property
    def inner(self) -> Optimizer: ...


@runtime_checkable
class Joins(Protocol):
    """An optimizer that is made of several."""

    @property
    def parts(self) -> Mapping[str, Optimizer]: ...


@runtime_checkable
class MayDefer(Protocol):
    """An optimizer whose ``step`` may put a step off (``stepped=False``) while ``defers``."""

    @property
    def defers(self) -> bool: ...


@runtime_checkable
class MayRefuse(Protocol):
    """An optimizer whose ``step`` may skip an update because of its gradients, while
    ``refuses``.
    """

    @property
    def refuses(self) -> bool: ...


@runtime_checkable
class TakesLossSignal(Protocol):
    """An optimizer whose ``step`` takes ``loss_signal``, the mean loss since the last call, while
    it says so.
    """

    @property
    def takes_loss_signal(self) -> bool: ...


@runtime_checkable
class KeepsOutcome(Protocol):
    """An optimizer whose ``step`` returns a bool, with the numbers of that step here."""

    @property
    def last_outcome(self) -> StepOutcome: ...


def inner_optimizers(optimizer: Optimizer) -> Iterator[Optimizer]:
    """``optimizer`` and, at any depth, those that it is made of, each before what is inside it."""
    yield optimizer
    inside = [*optimizer.parts.values()] if isinstance(optimizer, Joins) else []
    if isinstance(optimizer, Wraps):
        inside.append(optimizer.inner)
    for each in inside:
        yield from inner_optimizers(each)


def may_refuse(optimizer: Optimizer) -> bool:
    """Whether ``optimizer``, or one inside it, may skip an update after backward; see
    :class:`MayRefuse`.
    """
    return any(isinstance(part, MayRefuse) and part.refuses for part in inner_optimizers(optimizer))


def takes_loss_signal(optimizer: Optimizer) -> bool:
    """Whether to hand ``loss_signal`` to ``optimizer.step``; see :class:`TakesLossSignal`."""
    return isinstance(optimizer, TakesLossSignal) and optimizer.takes_loss_signal


def may_defer(optimizer: Optimizer) -> bool:
    """Whether ``step`` may put a step off; see :class:`MayDefer`."""
    return isinstance(optimizer, MayDefer) and optimizer.defers


def as_outcome(result: Any, optimizer: Any = None) -> StepOutcome:
    """Read what ``step()`` returned: a :class:`StepOutcome`, a wrapper's bool, or a torch
    optimizer's loss or None.
    """
    if isinstance(result, StepOutcome):
        return result
    if isinstance(result, bool):
        if isinstance(optimizer, KeepsOutcome) and optimizer.last_outcome.stepped == result:
            return optimizer.last_outcome
        return StepOutcome(stepped=result)
    return StepOutcome()


def copied_attributes(optimizer: Any) -> dict[str, Any]:
    """What a copy or a pickle of ``optimizer`` holds, for its ``__getstate__``: all attributes of
    its own.

    torch's optimizers hold groups and state alone. As theirs do, a copy leaves hooks behind, and
    the patch that a scheduler made of ``step``.
    """
    own = vars(optimizer).items()
    return {
        name: value
        for name, value in own
        if name != "step" and not name.endswith(("_pre_hooks", "_post_hooks"))
    }


def collect_trainable(model: nn.Module) -> Trainable:
    """The trainable parts of ``model`` in the order of their names' registration; tied modules
    once.
    """
    from arb_ternary.ternary.models import stored_modules, ternary_modules

    all_ternary = dict(ternary_modules(model))
    all_stored = dict(stored_modules(model))
    all_floats = {name: each for name, each in model.named_parameters() if each.is_floating_point()}
    ternary = {name: module for name, module in all_ternary.items() if not module.frozen}
    floats = {name: parameter for name, parameter in all_floats.items() if parameter.requires_grad}
    stored = {name: module for name, module in all_stored.items() if not module.frozen}
    kinds = {
        "ternary": (all_ternary, ternary),
        "float": (all_floats, floats),
        "stored": (all_stored, stored),
    }
    idle = frozenset(kind for kind, (there, trained) in kinds.items() if there and not trained)
    return Trainable(ternary, floats, stored, idle)


def build_optimizer(where: str, choice: Choice[OptimizerSpec], trainable: Trainable) -> Optimizer:
    """The optimizer that a config chose at ``where``, over all of ``trainable``; ConfigError for a
    kind it refuses.
    """
    for kind, parts in trainable.parts.items():
        if kind not in choice.spec.accepts:
            raise ConfigError(
                f"{where}: {choice.name!r} cannot train {PART_NOUNS[kind]}, and the model has "
                f"{len(parts)} of them, the first being {next(iter(parts))!r}",
                "Use `optimizer: {name: split, ternary: ..., float: ...}`, or freeze those parts.",
            )
    built: Optimizer = choice.build(trainable)
    return built
