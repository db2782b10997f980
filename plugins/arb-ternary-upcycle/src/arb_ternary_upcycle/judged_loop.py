"""A training loop that ends with the best state it has reached, judged on held-out text.

Ten times on its way, and at the end, the loop measures a distance on held-out text. If the distance
has grown, the rates are too high: the loop goes back to the best state so far and continues from
there at lower rates. It ends with the best state, so no farther than it began.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from attrs import asdict, define, field
from torch import Tensor, nn

from arb_ternary.ternary.models import ternary_modules
from arb_ternary_train.evaluate import evaluation_mode
from arb_ternary_train.loop import TrainingLoop
from arb_ternary_train.loop_state import copied
from arb_ternary_train.model_state import ModelState, load_parts
from arb_ternary_train.policy import Adjustment

if TYPE_CHECKING:
    from arb_ternary_train.context import TrainingContext
    from arb_ternary_train.options import LoopOptions
    from arb_ternary_train.step import StepReport

#: How often a loop judges its state, and the fewest steps between two judgements.
_JUDGEMENTS: Final = 10
_LEAST_STEPS: Final = 5
#: Factor of the rates of float parameters whenever the loop goes back.
_FLOAT_DECAY: Final = 0.5


@define
class BestState:
    """The state with the least distance so far.

    Attributes:
        first: distance before the first step.
        distance: least distance.
        step: step of the loop after which it was reached.
        lowered: how often the rates have been lowered.
        tensors: the state dict of the part that learns.
        start: the same before the first step; empty unless the loop needs it.
    """

    first: float
    distance: float
    step: int = 0
    lowered: int = 0
    tensors: dict[str, Tensor] = field(factory=dict, repr=False)
    start: dict[str, Tensor] = field(factory=dict, repr=False)


class JudgedLoop(TrainingLoop, ABC):
    """Keeps the best state of what it trains, and puts it back if the loop has left it.

    A policy, and the schedule ``none``, decide about rates themselves: then the state is judged
    only at the last step.

    Args:
        context: the run.
        options: how to train.
        key: see ``TrainingLoop``.
        part: what learns.
        judged: whether its state is judged at all.
        title: what is trained, for notes.

    Attributes:
        best: None before the first step, and if nothing is judged.
    """

    #: What is measured, for notes.
    distance_name: str
    #: Factor of the rate of votes whenever the loop goes back.
    votes_decay: float
    #: Multiple of the first distance from which on the loop goes back; None = it goes back from
    #: every state that is worse than the best.
    tolerated: float | None
    #: Whether votes that have turned no trit are dropped at the end.
    drops_votes: bool

    def __init__(
        self,
        context: TrainingContext,
        options: LoopOptions,
        key: str,
        *,
        part: nn.Module,
        judged: bool,
        title: str,
    ) -> None:
        super().__init__(context, options, key)
        self._part = part
        self.best: BestState | None = None
        self._judged = judged
        self._title = title
        self._finds_rates = self.policy is None and options.lr_schedule != "none"
        self._every = max(_LEAST_STEPS, options.steps // _JUDGEMENTS)

    @abstractmethod
    def held_out_distance(self) -> float:
        """Return the distance on held-out text; the model is in evaluation mode, without votes."""

    def train_microbatch(self) -> StepReport | None:
        """See ``TrainingLoop``; judge the state if that is due."""
        if self._judged and self.best is None:
            first = self._measure()
            self.best = BestState(first, first, tensors=self._tensors())
            if self.drops_votes:
                self.best.start = self.best.tensors
        report = super().train_microbatch()
        if report is None or self.best is None or not self._finds_rates:
            return report
        if report.step % self._every == 0 and report.step < self.options.steps:
            self._judge(self.best)
        return report

    def finish(self, run_step: int) -> None:
        """End with the best state, and record its distance. The loop takes no further step.

        Args:
            run_step: steps of the run, those of this loop included.
        """
        best = self.best
        if best is None:
            return
        distance = self._measure()
        self._take_if_better(best, distance)
        put_back = distance != best.distance
        if put_back:
            load_parts(self._part, best.tensors)
        if self.drops_votes:
            self._drop_votes(best)
        values = {
            "step": run_step,
            "of": self._title,
            "first": best.first,
            "last": best.distance,
            "put_back": put_back,
        }
        self.context.record("held_out", values)
        text = f"{self._title}: {self.distance_name} {best.first:.4g} to {best.distance:.4g}"
        if put_back:
            text += f"; the state after step {best.step} was put back, later ones are worse"
        self.context.note(text)

    def _judge(self, best: BestState) -> None:
        distance = self._measure()
        self._take_if_better(best, distance)
        limit = best.distance if self.tolerated is None else self.tolerated * best.first
        if distance <= limit:
            return
        load_parts(self._part, best.tensors)
        best.lowered += 1
        self._lower_rates(best.lowered)
        rates = self.adjustment
        self.context.note(
            f"{self._title}: {self.distance_name} has grown by step {self.step}; back to the state "
            f"after step {best.step}, votes at {rates.ternary_rate:g} and floats at "
            f"{rates.float_rate:g} of the schedule's rates"
        )

    def _take_if_better(self, best: BestState, distance: float) -> None:
        if distance < best.distance:
            best.distance = distance
            best.step = self.step
            best.tensors = self._tensors()

    @torch.no_grad()
    def _drop_votes(self, best: BestState) -> None:
        """Give every trit that has not changed the accumulator that it began with."""
        end = self._tensors()
        trits = {module: module.trits().clone() for _, module in ternary_modules(self._part)}
        votes = {module: module.logical_votes().clone() for module in trits}
        load_parts(self._part, best.start)
        first = {
            module: torch.where(trits[module] == module.trits(), module.logical_votes(), own)
            for module, own in votes.items()
        }
        load_parts(self._part, end)
        for module, own in first.items():
            module.set_votes(own)

    def _measure(self) -> float:
        with evaluation_mode(self.model):
            return self.held_out_distance()

    def _tensors(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for part in ModelState(self._part).parts():
            tensors |= copied(part)
        return tensors

    def _lower_rates(self, times: int) -> None:
        self.adjustment = Adjustment(
            float_rate=_FLOAT_DECAY**times, ternary_rate=self.votes_decay**times
        )

    def state_dict(self) -> dict[str, Any]:
        """See ``TrainingLoop``; the best state is part of it."""
        best = None if self.best is None else asdict(self.best, recurse=False)
        return {**super().state_dict(), "best": best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See ``TrainingLoop``. A checkpoint of an older version has no best state."""
        state = dict(state)
        best = state.pop("best", None)
        super().load_state_dict(state)
        if best is None:
            return
        self.best = BestState(**best)
        if self._finds_rates:
            self._lower_rates(self.best.lowered)
