"""The distributed schedule leaves the gradients, statistics, outcomes and data of one process."""

from __future__ import annotations

import math
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from arb_ternary import TernaryLinear
from arb_ternary.backends.vote_state import VoteLimits
from arb_ternary.errors import CheckpointError, ConfigError
from arb_ternary_distributed.exchange import ShardExchange
from arb_ternary_distributed.schedule import DistributedSchedule
from arb_ternary_train.config import RanksConfig
from arb_ternary_train.loop_state import InFlight, Outcome
from arb_ternary_train.microbatches import SequentialSchedule
from arb_ternary_train.world import SingleProcess, World
from arb_ternary_votes.scaled_votes import ScaledVotes

MICROBATCHES = 5
TWO: Any = SingleProcess(size=2)


class Numbers:
    """Batches that are their own numbers."""

    continues = False

    def __init__(self) -> None:
        self.cursor = 0
        self.read: list[int] = []

    def __next__(self) -> int:
        self.read.append(self.cursor)
        self.cursor += 1
        return self.cursor - 1


class Skipping(Numbers):
    """Batches that can be sharded, as those of text can: skipped ones are not read."""

    sharded: tuple[int, ...] = ()

    def shard(self, rank: int, size: int, count: int) -> None:
        self.sharded = (rank, size, count)

    def skip(self, count: int) -> None:
        self.cursor += count


class Learner:
    """A loop over float and ternary layers; some micro-batches do not reach one of them."""

    def __init__(self, batches: Any) -> None:
        torch.manual_seed(0)
        table = TernaryLinear(16, 3, group_size=32)
        self.model: Any = nn.ModuleDict(
            {"first": nn.Linear(6, 16), "table": table, "last": nn.Linear(3, 3)}
        )
        self.optimizer = ScaledVotes({"table": table})
        table.vote_scale.fill_(100.0)
        table.limits = VoteLimits(vote_limit=16 * 256)
        self.batches = batches
        self.microbatches = 0
        self.in_flight = InFlight()
        self.drawn: Any = deque()
        self.voters: Any = ()
        self.seen: list[tuple[int, int]] = []

    def draw_microbatch(self, number: int) -> None:
        drawn = next(self.batches)
        assert drawn == number
        self.drawn.append(SimpleNamespace(number=number, predictions=number))

    def train_on(self, index: int) -> Outcome:
        number = self.drawn.popleft().number
        self.microbatches = number + 1
        self.seen.append((index, number))
        for module in self.voters:
            module.begin_microbatch(index)
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number)) * 10.0 ** (
            number % 7 - 3
        )
        y = self.model["table"](self.model["first"](x))
        loss = (self.model["last"](y) if number % 3 else y).square().mean()
        if number == 2:
            return Outcome(math.inf, number)
        loss.backward()
        return Outcome(float(loss.detach()), number)


def two_steps(schedule: Any, batches: Numbers) -> list[dict[str, Any]]:
    """Return what each of two steps leaves."""
    learner = Learner(batches)
    left = []
    learner.voters = schedule.prepare(learner.model, learner.optimizer)
    for first in (0, MICROBATCHES):
        outcomes: list[Outcome] = []
        totals: set[int] = set()
        while len(outcomes) < MICROBATCHES:
            own: list[Outcome] = []
            totals.add(schedule.draw(learner, len(outcomes)))
            for index in schedule.indices(learner, len(outcomes), own):
                own += [learner.train_on(index)]
            for outcome in schedule.gather_outcomes(own):
                learner.in_flight = learner.in_flight.plus(outcome)
                outcomes.append(outcome)
        learner.in_flight = InFlight()
        table = learner.model["table"]
        gradients: dict[str, Tensor | None] = {
            name: p.grad for name, p in learner.model.named_parameters()
        }
        left.append(
            {
                "outcomes": [(outcome.loss, outcome.tokens) for outcome in outcomes],
                "gradients": {
                    name: None if g is None else g.clone() for name, g in gradients.items()
                },
                "statistics": [table.stats.clone(), table.magnitudes.clone()],
                "casts": table.casts,
                "votes": own_votes(learner).clone(),
                "totals": totals,
                "counted": (batches.cursor, learner.microbatches),
                "seen": [each for each in learner.seen if each[1] >= first],
            }
        )
        for p in learner.model.parameters():
            p.grad = None
        table.clear_stats()
        table.sums.clear()
    return left


def own_votes(learner: Learner) -> Tensor:
    """Return the sums of the rows that this rank owns."""
    table = learner.model["table"]
    exchange = learner.optimizer.exchange
    if isinstance(exchange, ShardExchange):
        return exchange.votes.take(table)
    votes: Tensor = table.sums.votes
    return votes


def on_rank(world: World, _folder: Path) -> Any:
    skipping = Skipping()
    plain = Numbers()
    steps = two_steps(world.microbatch_schedule(MICROBATCHES, RanksConfig()), skipping)
    again = two_steps(world.microbatch_schedule(MICROBATCHES, RanksConfig()), plain)
    with pytest.raises(ConfigError, match=r"1 micro-batches, and there are 2 ranks") as few:
        world.microbatch_schedule(1, RanksConfig())
    return steps, again[-1]["counted"], skipping.read, plain.read, skipping.sharded, few.value.hint


def test_two_ranks_leave_what_one_process_leaves(two_ranks: Any) -> None:
    alone = two_steps(SequentialSchedule(MICROBATCHES), Numbers())
    assert alone[0]["casts"] == 4  # one loss of five is not finite
    assert alone[0]["gradients"]["last.weight"] is not None
    ranks = [results["test_schedule"] for results in two_ranks[0]]
    for rank, (steps, counted, read, all_read, sharded, hint) in enumerate(ranks):
        own = [index for index in range(MICROBATCHES) if index % 2 == rank]
        assert read == own + [MICROBATCHES + index for index in own]
        assert all_read == [*range(2 * MICROBATCHES)]  # what cannot be skipped is drawn and dropped
        assert sharded == (rank, 2, MICROBATCHES)
        assert "at most 1 ranks" in hint
        for number, (step, whole) in enumerate(zip(steps, alone, strict=True)):
            assert step["seen"] == [(index, number * MICROBATCHES + index) for index in own]
            ends = [(MICROBATCHES, MICROBATCHES), counted]
            assert step["counted"] == ends[number]
            assert step["outcomes"] == whole["outcomes"]
            # Predictions of a micro-batch are its number here; the lost one counts too.
            numbers = range(number * MICROBATCHES, (number + 1) * MICROBATCHES)
            assert step["totals"] == whole["totals"] == {sum(numbers)}
            for name, gradient in whole["gradients"].items():
                assert torch.equal(step["gradients"][name], gradient)
            for mine, its in zip(step["statistics"], whole["statistics"], strict=True):
                assert mine.numpy().tobytes() == its.numpy().tobytes()
    # Votes are integers, whose sum is that of one process.
    for number, whole in enumerate(alone):
        assert whole["votes"].any()
        both = [steps[number] for steps, *_ in ranks]
        assert torch.equal(torch.cat([step["votes"] for step in both]), whole["votes"])
        assert both[0]["casts"] + both[1]["casts"] == whole["casts"]


def test_a_step_begun_by_one_process_is_refused() -> None:
    schedule = DistributedSchedule(TWO, MICROBATCHES, RanksConfig())
    learner: Any = Learner(Skipping())
    with pytest.raises(
        CheckpointError, match="after 3 of the 5 micro-batches of a step, and several ranks"
    ):
        schedule.draw(learner, 3)


class Defers(torch.optim.SGD):
    """A wrapper that defers steps."""

    defers = True

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__([nn.Parameter(torch.zeros(1))])
        self.inner = inner


def test_when_one_process_sums_votes() -> None:
    learner = Learner(Skipping())
    learner.model["still"] = TernaryLinear(16, 3, group_size=32)  # nothing trains it
    table = learner.model["table"]
    still = learner.model["still"]
    for places, optimizer, summed in (
        (1, learner.optimizer, False),
        (2, learner.optimizer, True),
        (2, Defers(learner.optimizer), False),
    ):
        assert SequentialSchedule(places).prepare(learner.model, optimizer) == [table]
        assert (table.sums is not None) == summed
        assert still.sums is None
    levels = ScaledVotes({"table": table}, vote_levels=3)
    SequentialSchedule(1).prepare(learner.model, levels)
    assert table.sums is not None
