"""What ``run_end.py`` tries and the package does not have: a plugin file for that study alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from statistics import NormalDist
from typing import Any

import torch
from attrs import asdict, evolve, frozen
from torch import Tensor

from arb_ternary import hookimpl
from arb_ternary.config.options import option
from arb_ternary.optim.protocol import Planned, Trainable, inner_optimizers
from arb_ternary.protocols.runs import PhaseResult
from arb_ternary.specs import OptimizerSpec, PhaseSpec
from arb_ternary.ternary.models import ternary_modules
from arb_ternary.ternary.module import TernaryModule
from arb_ternary_train.context import TrainingContext
from arb_ternary_train.growing_batches import GrowingBatches
from arb_ternary_train.loop import TrainingLoop
from arb_ternary_train.options import StandardConfig
from arb_ternary_train.schedules import scheduled_groups
from arb_ternary_train.snapshot import Snapshot
from arb_ternary_train.standard import StandardPhase
from arb_ternary_votes.config import ScaledVotesConfig
from arb_ternary_votes.scaled_votes import CELLS, ScaledVotes

ARB_API_VERSION = (1, 0)

#: Batches after the trunk, of which branches train on the first.
REACH = 2000


@frozen(kw_only=True)
class PartsConfig(StandardConfig):
    """Options of the phase, whose schedule and batches are given in parts."""

    parts: list[str] = option(
        help="'STEPS BATCHES FROM TO': so many steps of so many batches each, the rate on a line "
        "between two factors"
    )

    def contradictions_in(self, run: Any, planned: Planned | None) -> Iterator[tuple[str, str]]:
        """Nothing is refused: the study knows what it does."""
        return iter(())


class PartsLoop(TrainingLoop):
    """A loop whose rates and batches follow the parts."""

    def __init__(self, context: TrainingContext, options: PartsConfig, key: str) -> None:
        super().__init__(context, options, key)
        self._course: list[tuple[int, float]] = []
        self.follow(options.parts, after=0)
        assert self.length == options.steps
        self.joined = 1
        self.batches = GrowingBatches(self.batches, lambda: self.joined)

    def close(self) -> None:
        """Stop reading ahead, unless branches are to follow."""
        if not isinstance(self.options, BranchesConfig) or self.step > self.options.steps:
            super().close()

    @property
    def length(self) -> int:
        """Steps of the course."""
        return len(self._course)

    def follow(self, parts: Sequence[str], after: int) -> None:
        """Let the course go on like this after so many steps."""
        del self._course[after:]
        for part in parts:
            steps, batches, first, last = map(float, part.split())
            line = [first + (last - first) * step / steps for step in range(int(steps))]
            self._course += [(int(batches), factor) for factor in line]

    def set_rates(self) -> dict[str, float]:
        """Factors of the peak, and the warm-up."""
        batches, factor = self._course[self.step]
        self.joined = batches
        factor *= min(1.0, (self.step + 1) / max(1, self.options.warmup_steps))
        rates: dict[str, float] = {}
        for group in scheduled_groups(self.optimizer):
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor
            rates.setdefault(
                "lr" if group.get("kind", "float") == "float" else "rate", float(group["lr"])
            )
        return rates


class PartsPhase(StandardPhase):
    """The phase of such a loop."""

    name = "parts"

    def make_loop(self, context: TrainingContext, *, resumed: bool) -> TrainingLoop:
        assert isinstance(self.config, PartsConfig)
        return PartsLoop(context, self.config, key=f"phase {context.phase_index}")


def build_phase(config: PartsConfig) -> PartsPhase:
    """The factory of the phase."""
    return PartsPhase(config)


@frozen(kw_only=True)
class BranchesConfig(PartsConfig):
    """Options of a phase whose last steps are taken several times, each time from the same
    state.
    """

    branches: list[str] = option(
        help='JSON: {"name": ..., "parts": [as in parts], "votes": {options of end_votes}, "turn": '
        "[shares]}"
    )
    judged: int = option(
        200, "batches of the training data that follow, on which each end is judged"
    )


class BranchesPhase(PartsPhase):
    """Trains by ``parts``; then by each branch, and writes down the losses at its end."""

    name = "branches"

    def run(self, context: TrainingContext) -> PhaseResult:
        """The trunk, then the branches; the model is left at the end of the last one."""
        config = self.config
        assert isinstance(config, BranchesConfig)
        result = super().run(context)
        loop = self._loop
        assert isinstance(loop, PartsLoop)
        trunk = Snapshot.take(loop)
        for text in config.branches:
            branch = json.loads(text)
            trunk.restore(loop)
            loop.follow(branch["parts"], after=config.steps)
            for optimizer in inner_optimizers(loop.optimizer):
                if isinstance(optimizer, EndVotes):
                    optimizer.become(evolve(optimizer.own, **branch.get("votes", {})))
            losses = []
            while loop.step < loop.length:
                if (report := loop.train_micro_batch()) is not None:
                    losses.append(report.loss * loop.joined)
            base = sum(
                int(steps) * int(batches) for steps, batches, *_ in map(str.split, branch["parts"])
            )
            context.record(
                "branch",
                {
                    "name": branch["name"],
                    "training_loss": sum(losses) / base,
                    "stream_loss": self._judge(loop, config.judged, after=base, trunk=trunk),
                    "validation_loss": context.evaluate(config.eval_batches).loss,
                    "turned": _turned(context, config, branch.get("turn", [])),
                },
            )
        loop.close()
        return result

    def _judge(self, loop: PartsLoop, count: int, *, after: int, trunk: Snapshot) -> float:
        """Loss on training data that no branch has trained on: as far from the trunk for all."""
        loop.batches.load_state_dict(trunk.loop["sampler"])
        loop.joined = 1
        for _ in range(REACH):
            next(loop.batches)
        assert after <= REACH
        total = 0.0
        loop.model.eval()
        with torch.no_grad():
            for _ in range(count):
                batch = next(loop.batches)
                masked = loop.mask(batch)
                total += float(loop.loss(batch, masked, loop.predict(batch, masked)))
        return total / count


def _turned(
    context: TrainingContext, config: PartsConfig, shares: Sequence[float]
) -> list[list[float]]:
    """By share of a cell: share of trits that turn where accumulators beyond it all do so at once,
    the loss then.
    """
    found = []
    before = [
        (module, module.trits(), module.logical_votes())
        for _, module in ternary_modules(context.model)
    ]
    for share in shares:
        changed = 0
        for module, trits, votes in before:
            beyond = (votes >= share * CELLS[8]).to(torch.int8) - (votes <= -share * CELLS[8]).to(
                torch.int8
            )
            turned = (trits + beyond).clamp_(-1, 1)
            changed += int((turned != trits).sum())
            module.set_trits(turned)
        weights = sum(trits.numel() for _, trits, _ in before)
        found.append([share, changed / weights, context.evaluate(config.eval_batches).loss])
    return found


def build_branches(config: BranchesConfig) -> BranchesPhase:
    """The factory of the phase."""
    return BranchesPhase(config)


@frozen(kw_only=True)
class EndVotesConfig(ScaledVotesConfig):
    """Options of scaled votes, and what is other where a vote is a fraction of a quantum."""

    tail_below: float = option(0.0, "votes of the tail below so many quanta a standard deviation")
    tail_noise: int = option(2, "the noise of a vote of the tail is 2**-this of a quantum, from 0")
    sticky: int = option(
        0, "where an accumulator is after a flip, on the side of the flip, of a rule without carry"
    )
    rail: int = option(0, "likewise after a flip that the end of the trits' range prevents")
    flip_cell: int = option(0, "quanta that make a trit turn and leave by it; 0 = the cell")


class EndVotes(ScaledVotes):
    """Scaled votes whose tail and cell follow the rate."""

    def __init__(self, modules: Mapping[str, TernaryModule], config: EndVotesConfig) -> None:
        self.own = config
        own = ("tail_below", "tail_noise", "flip_cell", "sticky", "rail")
        super().__init__(
            modules, **{name: value for name, value in asdict(config).items() if name not in own}
        )

    def become(self, config: EndVotesConfig) -> None:
        """Go on by other options."""
        self.own = config
        self._refresh_scales()

    def _scaling(
        self, group: Mapping[str, Any], module: TernaryModule, quanta: float
    ) -> tuple[float, float, int]:
        own = self.own
        if quanta >= own.tail_below:
            return super()._scaling(group, module, quanta)
        share = min(0.8 * min(quanta, 1.0), 0.9)
        tau = -NormalDist().inv_cdf(share / 2)
        noise = 2.0**-own.tail_noise
        return 0.5 / tau, 1.0 + noise, own.tail_noise

    def _flip(
        self, group: dict[str, Any], module: TernaryModule, place: tuple[int, int], voted: bool
    ) -> Tensor:
        if self.own.sticky or self.own.rail:
            trits = module.trits()
            held = module.logical_votes()
            cell = group["cell"] or 7
            changed = super()._flip(group, module, place, voted)
            wanted = (held >= cell).to(torch.int8) - (held <= -cell).to(torch.int8)
            after = (
                torch.where(module.trits() != trits, self.own.sticky, self.own.rail).to(torch.int8)
                * wanted
            )
            module.set_votes(torch.where(wanted != 0, after, module.logical_votes()))
            return changed
        if not self.own.flip_cell:
            return super()._flip(group, module, place, voted)
        kept = group["cell"]
        group["cell"] = self.own.flip_cell
        try:
            return super()._flip(group, module, place, voted)
        finally:
            group["cell"] = kept


def build_votes(config: EndVotesConfig, trainable: Trainable) -> EndVotes:
    """The factory of the optimizer."""
    return EndVotes(trainable.ternary, config)


@hookimpl
def arb_register_optimizers() -> Sequence[OptimizerSpec]:
    return (
        OptimizerSpec(
            name="end_votes",
            target="run_end_parts:build_votes",
            config="run_end_parts:EndVotesConfig",
            accepts=frozenset({"ternary"}),
            summary="scaled votes whose tail and cell follow the rate",
        ),
    )


@hookimpl
def arb_register_phases() -> Sequence[PhaseSpec]:
    return (
        PhaseSpec(
            name="parts",
            target="run_end_parts:build_phase",
            config="run_end_parts:PartsConfig",
            summary="the standard phase with batches and rates in parts",
        ),
        PhaseSpec(
            name="branches",
            target="run_end_parts:build_branches",
            config="run_end_parts:BranchesConfig",
            summary="the same, whose end is taken in several ways from one state",
        ),
    )
