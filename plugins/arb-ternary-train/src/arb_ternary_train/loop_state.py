"""The state of a training loop, for checkpoints, and snapshots of a loop and its model.

:class:`LoopState` lists everything. Of the micro-batches since the last step it holds what they
have left in the model: gradients, statistics, and votes that can still be dropped. A
:class:`Snapshot` is a copy, in memory or in a folder, that can be put back.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import attrs
import torch
from attrs import evolve, frozen
from torch import Tensor, nn

from arb_ternary.ternary.models import reset_runtime_state, ternary_modules
from arb_ternary.ternary.module import TernaryModule
from arb_ternary_train.audit import tensors_in
from arb_ternary_train.checkpoint import CheckpointStore, read_checkpoint
from arb_ternary_train.model_options import to_device
from arb_ternary_train.model_state import ModelState, load_parts
from arb_ternary_train.seeding import global_rng_state, restore_global_rng

if TYPE_CHECKING:
    from arb_ternary_train.loop import TrainingLoop


@frozen
class Outcome:
    """The result of a micro-batch.

    Attributes:
        loss: its loss.
        tokens: predictions that counted in the loss.
    """

    loss: float
    tokens: int

    @property
    def finite(self) -> bool:
        """Whether the micro-batch takes part in the step."""
        return math.isfinite(self.loss)


def weighted_losses(losses: Sequence[float], tokens: Sequence[int]) -> list[float]:
    """Return mean losses of micro-batches, so weighted that their mean is that over predictions.

    The weight of a micro-batch is the number of its predictions over the mean number, exactly 1 if
    all have as many.
    """
    total = sum(tokens)
    if not total:
        return [*losses]
    count = len(losses)
    return [loss * (own * count / total) for loss, own in zip(losses, tokens, strict=True)]


@frozen
class InFlight:
    """The micro-batches since the last step.

    Attributes:
        accumulated: micro-batches since the last call of ``optimizer.step``.
        losses: losses of the micro-batches with a finite loss.
        tokens: predictions of the same micro-batches.
        cast: micro-batches with a finite loss since the last call of ``optimizer.step``.
        microbatch_index: index of the next micro-batch within the step, from 0.
        predictions: predictions of all micro-batches since the last call of ``optimizer.step``.
    """

    accumulated: int = 0
    losses: tuple[float, ...] = ()
    tokens: tuple[int, ...] = ()
    cast: int = 0
    microbatch_index: int = 0
    predictions: int = 0

    def plus(self, outcome: Outcome) -> InFlight:
        """Return these and one more micro-batch. One without a finite loss only takes an index."""
        longer = evolve(
            self,
            accumulated=self.accumulated + 1,
            microbatch_index=self.microbatch_index + 1,
            predictions=self.predictions + outcome.tokens,
        )
        if not outcome.finite:
            return longer
        losses = (*self.losses, outcome.loss)
        tokens = (*self.tokens, outcome.tokens)
        return evolve(longer, losses=losses, tokens=tokens, cast=self.cast + 1)

    @property
    def mean_loss(self) -> float:
        """Mean loss over the predictions of ``losses``."""
        return math.fsum(weighted_losses(self.losses, self.tokens)) / len(self.losses)

    @property
    def recent_loss(self) -> float:
        """The same since the last call of ``optimizer.step``."""
        first = len(self.losses) - self.cast
        return evolve(self, losses=self.losses[first:], tokens=self.tokens[first:]).mean_loss

    def attempted(self, *, dropped: bool) -> InFlight:
        """Return the micro-batches after a call of ``optimizer.step`` that did not step.

        Args:
            dropped: whether the call dropped the micro-batches since the call before it.
        """
        if not dropped:
            return evolve(self, accumulated=0, cast=0, predictions=0)
        kept = len(self.losses) - self.cast
        return InFlight(
            accumulated=0,
            losses=self.losses[:kept],
            tokens=self.tokens[:kept],
            microbatch_index=self.microbatch_index - self.accumulated,
        )


@frozen(kw_only=True, eq=False)
class LoopState:
    """Everything that decides how a training loop continues, except the model's own state dict.

    The names are the keys in a checkpoint. ``policy`` is only in the state of a loop that has one.

    Attributes:
        step: optimizer steps taken.
        micro_batches: micro-batches drawn.
        skipped: micro-batches and gradients that were dropped.
        skipped_in_a_row: those since the last step.
        sampler: where the batches stand, before those that were drawn and not trained on.
        optimizer: state of the optimizer.
        scaler: state of the loss scaler; None without one.
        in_flight: the micro-batches since the last step (:func:`in_flight_state`).
        runtime: what the model remembers of the last batch; None = nothing.
        rng: state of the global generators.
        policy: state of the step policy.
    """

    step: int
    micro_batches: int
    skipped: int
    skipped_in_a_row: int
    sampler: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    scaler: Mapping[str, Any] | None
    in_flight: Mapping[str, Any]
    runtime: Any
    rng: Mapping[str, Any]
    policy: Mapping[str, Any] | None = None

    @classmethod
    def collect(cls, loop: TrainingLoop) -> Self:
        """Return the state of ``loop``, without its policy's. Tensors are those in use."""
        runtime = getattr(loop.model, "runtime_state", None)
        return cls(
            step=loop.step,
            micro_batches=loop.microbatches,
            skipped=loop.skipped,
            skipped_in_a_row=loop.skipped_in_a_row,
            sampler=loop.drawn[0].position if loop.drawn else loop.batches.state_dict(),
            optimizer=loop.optimizer.state_dict(),
            scaler=loop.scaler.state_dict() if loop.scaler.is_enabled() else None,
            in_flight=in_flight_state(loop.model, loop.in_flight),
            runtime=None if runtime is None else runtime(),
            rng=global_rng_state(loop.context.device),
        )

    def restore(self, loop: TrainingLoop) -> None:
        """Have ``loop`` continue from this state; its tensors may be used on.

        The model must hold the weights of that moment.
        """
        device = loop.context.device
        loop.step = self.step
        loop.microbatches = self.micro_batches
        loop.skipped = self.skipped
        loop.skipped_in_a_row = self.skipped_in_a_row
        loop.drawn.clear()
        loop.batches.load_state_dict(self.sampler)
        loop.optimizer.load_state_dict(dict(self.optimizer))
        if loop.scaler.is_enabled() and self.scaler is not None:
            loop.scaler.load_state_dict(dict(self.scaler))
        loop.in_flight = load_in_flight(loop.model, self.in_flight, device)
        load_runtime = getattr(loop.model, "load_runtime_state", None)
        if self.runtime is not None and load_runtime is not None:
            load_runtime(to_device(self.runtime, device))
        restore_global_rng(self.rng, device)

    def to_dict(self) -> dict[str, Any]:
        """Return the state as a checkpoint holds it."""
        state = attrs.asdict(self, recurse=False)
        if self.policy is None:
            del state["policy"]
        return state

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Self:
        """Return the state that :meth:`to_dict` wrote."""
        return cls(**state)


def in_flight_state(model: nn.Module, in_flight: InFlight) -> dict[str, Any]:
    """Return ``in_flight`` and what its micro-batches have left in ``model``.

    Tensors are those in use.
    """
    state: dict[str, Any] = {
        "accumulated": in_flight.accumulated,
        "losses": list(in_flight.losses),
        "tokens": list(in_flight.tokens),
    }
    if in_flight.microbatch_index != len(in_flight.losses):
        # Some micro-batches had no finite loss.
        state["cast"] = in_flight.cast
        state["place"] = in_flight.microbatch_index
        state["predictions"] = in_flight.predictions

    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradients[name] = parameter.grad
    state["gradients"] = gradients

    # Between steps statistics of gradients and sums of votes are zero.
    modules = dict(ternary_modules(model)) if in_flight.losses else {}
    magnitudes = {}
    sums = {}
    undo = {}
    for name, module in modules.items():
        if module.magnitudes is not None:
            magnitudes[name] = module.magnitudes
        if module.sums is not None:
            sums[name] = _sums_state(module)
        if module.kept_votes:
            undo[name] = _undo_state(module, module.kept_votes)
    state["statistics"] = {name: module.stats for name, module in modules.items()}
    state["magnitudes"] = magnitudes
    if sums:
        state["sums"] = sums
    if undo:
        state["undo"] = undo
    return state


def load_in_flight(model: nn.Module, state: Mapping[str, Any], device: torch.device) -> InFlight:
    """Put back into ``model`` what :func:`in_flight_state` returned; return the micro-batches.

    Its tensors may be used on.
    """
    for name, parameter in model.named_parameters():
        gradient = state["gradients"].get(name)
        if gradient is not None:
            gradient = gradient.to(parameter.device, parameter.dtype, copy=True)
        parameter.grad = gradient

    for name, module in ternary_modules(model):
        if name in state["statistics"]:
            module.stats.copy_(state["statistics"][name])
        if module.magnitudes is not None and name in state["magnitudes"]:
            module.magnitudes.copy_(state["magnitudes"][name])
        module.kept_votes = _load_undo(module, state.get("undo", {}).get(name), device)
        _load_sums(module, state.get("sums", {}).get(name, {}))

    losses = tuple(state["losses"])
    tokens = tuple(state["tokens"])
    accumulated = state["accumulated"]
    cast = state.get("cast", accumulated)
    return InFlight(
        accumulated=accumulated,
        losses=losses,
        tokens=tokens,
        cast=cast,
        microbatch_index=state.get("place", len(losses)),
        predictions=state.get("predictions", sum(tokens[len(tokens) - cast :])),
    )


def _undo_state(module: TernaryModule, kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what a dropped step would put back, with accumulators in no backend's layout."""
    state = dict(kept)
    if "votes" in kept:
        state["votes"] = module.logical_votes(kept["votes"])
    return state


def _load_undo(
    module: TernaryModule, state: Mapping[str, Tensor] | None, device: torch.device
) -> dict[str, Tensor] | None:
    """Return what :func:`_undo_state` was taken from."""
    if state is None:
        return None
    kept: dict[str, Tensor] = to_device(state, device)
    if "votes" in state:
        kept["votes"] = module.packed_votes(state["votes"])
    return kept


def _sums_state(module: TernaryModule) -> dict[str, Any]:
    """Return the sums of votes of the step.

    What is of one micro-batch only has been added up, and is zero.
    """
    sums = module.sums
    assert sums is not None
    state = {"votes": sums.votes, "exponent_votes": sums.exponent_votes, "casts": sums.casts}
    if sums.bias is not None:
        state["bias"] = sums.bias
    return state


def _load_sums(module: TernaryModule, state: Mapping[str, Any]) -> None:
    """Put back what :func:`_sums_state` returned; without it the sums are zero."""
    sums = module.sums
    if sums is None:
        return
    sums.clear()
    sums.casts = state.get("casts", 0)
    for name, tensor in sums.tensors().items():
        if name in state:
            tensor.copy_(state[name])


# --- snapshots

#: The fields that say where a loop is in its data and its schedule, not what it has learnt.
_CURSOR: Final = ("step", "micro_batches", "skipped", "sampler", "rng")


@frozen(eq=False)
class Snapshot:
    """A copy of everything that a training loop learns and counts, to be put back later.

    The state of its policy is not part of it.

    Attributes:
        model: state dict of the model, in the at-rest form.
        loop: state of the loop.
    """

    model: Mapping[str, Tensor]
    loop: LoopState

    @classmethod
    def take(cls, loop: TrainingLoop) -> Self:
        """Copy everything as it is now."""
        model = {}
        for part in ModelState(loop.model).parts():
            for name, tensor in part.items():
                model[name] = copied(tensor)
        return cls(model, LoopState.from_dict(copied(LoopState.collect(loop).to_dict())))

    def restore(self, loop: TrainingLoop, *, cursor: bool = True) -> None:
        """Put everything back, bit for bit.

        Args:
            loop: any loop whose model and optimizer have the same structure; its policy is left
                alone.
            cursor: put back also the step counters, the position in the data, what the model
                remembers of the data, and the global generators. Otherwise these continue from
                where they are, the micro-batches since the snapshot are not repeated, and the model
                remembers nothing of the text before them.
        """
        state = copied(self.loop.to_dict())
        if not cursor:
            now = LoopState.collect(loop).to_dict()
            for name in _CURSOR:
                state[name] = now[name]
            state["runtime"] = None
        reset_runtime_state(loop.model)
        load_parts(loop.model, self.model)
        for _, module in ternary_modules(loop.model):
            module.clear_stats()
        LoopState.from_dict(state).restore(loop)

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        tensors = (*self.model.values(), *tensors_in(self.loop.to_dict()))
        return sum(tensor.nbytes for tensor in tensors)

    def state_dict(self) -> dict[str, Any]:
        """Return the snapshot as a checkpoint can hold it."""
        return {"model": dict(self.model), "loop": self.loop.to_dict()}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Self:
        """Return the snapshot that :meth:`state_dict` wrote."""
        return cls(state["model"], LoopState.from_dict(state["loop"]))

    def save(self, folder: Path) -> Path:
        """Write it into a folder of its own in ``folder``, as checkpoints are; return that folder.

        Raises:
            CheckpointError: the disk is full or refuses.
        """
        store = CheckpointStore(folder, keep=0)
        return store.save(self.loop.step, self.model, {"loop": self.loop.to_dict()}, {})

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return what :meth:`save` wrote; tensors of the model are read when they are accessed.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        checkpoint = read_checkpoint(path)
        return cls(checkpoint.model, LoopState.from_dict(checkpoint.state["loop"]))


def copied(value: Any) -> Any:
    """Return ``value`` with every tensor in its mappings, lists and tuples cloned."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) in (list, tuple):
        return type(value)(copied(item) for item in value)
    if isinstance(value, Mapping):
        pairs = {key: copied(item) for key, item in value.items()}
        return Counter(pairs) if isinstance(value, Counter) else pairs
    return value
