"""The interface of optimizers beyond ``torch.optim.Optimizer``.

It has the parts of a model that an optimizer trains, and the outcome of a step. An optimizer may
also declare these attributes:

* ``defers``: its ``step`` may defer a step (:func:`may_defer`).
* ``refuses``: its ``step`` may skip an update because of its gradients (:func:`may_refuse`).
* ``takes_loss_signal``: its ``step`` takes the mean loss (:func:`takes_loss_signal`).
* ``last_outcome``: the :class:`StepOutcome` of the last step, if ``step`` returns a bool.
* ``inner`` or ``parts``: the optimizers inside it (:class:`Wraps`, :class:`Joins`).
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
    from arb_ternary.ternary.module import TernaryModule


#: The nouns of the kinds of parts in messages.
PART_NOUNS: Final = {"ternary": "ternary modules", "float": "float parameters"}


@frozen
class Trainable:
    """The parts of a model that an optimizer may change, by qualified name.

    Attributes:
        ternary: modules whose packed weights learn by votes and that are not frozen.
        floats: float parameters with ``requires_grad``.
        idle: kinds of parts that the model has, but that are all frozen now.
        later: kinds of parts that the run will add to the model; their optimizer is then built
            again.
    """

    ternary: Mapping[str, TernaryModule] = field(factory=dict)
    floats: Mapping[str, nn.Parameter] = field(factory=dict)
    idle: frozenset[str] = frozenset()
    later: frozenset[str] = frozenset()

    @property
    def parts(self) -> dict[str, Mapping[str, Any]]:
        """The parts by the kind that an optimizer declares to accept; kinds that exist only."""
        parts = {"ternary": self.ternary, "float": self.floats}
        return {kind: part for kind, part in parts.items() if part}


@frozen(kw_only=True)
class Planned:
    """The parts that a run will train, as far as its config states them.

    Options are checked against it.

    The options of a model state it with a method ``planned() -> Planned``. The options of any
    component may have a method ``validate_in_run(run, planned) -> Iterable[tuple[str, str]]``,
    which yields an option (or "" for all of them) and what is wrong with it in the run whose config
    is ``run``. ``planned`` is None if the model does not state it.

    Attributes:
        kinds: kinds of the parts that are trained.
        idle: kinds of further parts, which are frozen during the whole run.
        matrices: whether some float parameters are matrices.
        vote_bits: bits of the accumulators of ternary modules.
        integers: whether the gradients of some ternary weights are exact integers.
        exponents: whether some exponents learn by votes.
    """

    kinds: frozenset[TrainedPart]
    idle: frozenset[TrainedPart] = frozenset()
    matrices: bool = True
    vote_bits: int = 8
    integers: bool = False
    exponents: bool = True

    @property
    def largest_vote(self) -> int:
        """Largest value of an accumulator: 127, 7 or 1."""
        return (1 << (self.vote_bits - 1)) - 1


@frozen
class StepOutcome:
    """The outcome of one ``step()`` of an optimizer.

    Attributes:
        stepped: whether weights were updated; a wrapper that defers a step reports False.
        draws: number of micro-batches in the step (so far, if it was deferred).
        grad_norm: norm of the gradient of the last micro-batch, if it is known.
        flips: number of trits that changed.
        exponent_moves: number of exponents that changed.
        skipped: whether the update was dropped because a loss, a signal or a gradient was not
            finite; the optimizer has cleared the gradients that it dropped.
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
    """An optimizer that decides when an inner optimizer steps.

    The ``kind`` of its own groups differs from that of the inner optimizer.
    """

    @property
    def inner(self) -> Optimizer: ...


@runtime_checkable
class Joins(Protocol):
    """An optimizer that consists of several."""

    @property
    def parts(self) -> Mapping[str, Optimizer]: ...


def inner_optimizers(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Yield ``optimizer`` and all optimizers inside it, each before those inside it."""
    yield optimizer
    inside = [*optimizer.parts.values()] if isinstance(optimizer, Joins) else []
    if isinstance(optimizer, Wraps):
        inside.append(optimizer.inner)
    for each in inside:
        yield from inner_optimizers(each)


def may_refuse(optimizer: Optimizer) -> bool:
    """Whether ``optimizer``, or one inside it, may skip an update because of its gradients."""
    return any(bool(getattr(part, "refuses", False)) for part in inner_optimizers(optimizer))


def takes_loss_signal(optimizer: Optimizer) -> bool:
    """Whether ``step`` takes ``loss_signal``, the mean loss since the last call."""
    return bool(getattr(optimizer, "takes_loss_signal", False))


def may_defer(optimizer: Optimizer) -> bool:
    """Whether ``step`` may defer a step, and report ``stepped=False``."""
    return bool(getattr(optimizer, "defers", False))


def as_outcome(result: Any, optimizer: Any = None) -> StepOutcome:
    """Return the outcome of a step from what ``step()`` returned.

    That is a :class:`StepOutcome`, the bool of a wrapper, or the loss or None of an optimizer of
    torch.
    """
    if isinstance(result, StepOutcome):
        return result
    if not isinstance(result, bool):
        return StepOutcome()
    outcome = getattr(optimizer, "last_outcome", None)
    if isinstance(outcome, StepOutcome) and outcome.stepped == result:
        return outcome
    return StepOutcome(stepped=result)


def copied_attributes(optimizer: Any) -> dict[str, Any]:
    """Return the attributes of ``optimizer`` that a copy or a pickle holds, for ``__getstate__``.

    The optimizers of torch copy groups and state only. Hooks are left out, as they do, and so is
    the ``step`` that a scheduler patched.
    """
    copied = dict(vars(optimizer))
    copied.pop("step", None)
    hooks = [name for name in copied if name.endswith(("_pre_hooks", "_post_hooks"))]
    for name in hooks:
        del copied[name]
    return copied


def collect_trainable(model: nn.Module) -> Trainable:
    """Return the trainable parts of ``model`` in the order of registration; tied modules once."""
    from arb_ternary.ternary.models import ternary_modules

    all_ternary = dict(ternary_modules(model))
    all_floats = {name: each for name, each in model.named_parameters() if each.is_floating_point()}
    ternary = {name: module for name, module in all_ternary.items() if not module.frozen}
    floats = {name: parameter for name, parameter in all_floats.items() if parameter.requires_grad}
    idle = set()
    if all_ternary and not ternary:
        idle.add("ternary")
    if all_floats and not floats:
        idle.add("float")
    return Trainable(ternary, floats, frozenset(idle))


def build_optimizer(where: str, choice: Choice[OptimizerSpec], trainable: Trainable) -> Optimizer:
    """Build the optimizer that a config names at ``where``, for all parts of ``trainable``.

    Raises:
        ConfigError: it does not accept a kind of these parts.
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
