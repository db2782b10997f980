"""The schedule of micro-batches on several ranks, and how their parts become one step.

A step has ``n`` micro-batches (``gradient_accumulation_steps``), with the indices ``j = 0 .. n -
1``. Of ``N`` ranks rank ``r`` trains on those with ``j % N == r`` and skips the others; so the
data, the masks and the hashes of a micro-batch do not depend on which rank trains on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from arb_ternary.errors import CheckpointError, ConfigError
from arb_ternary.ternary.module import TernaryModule
from arb_ternary_distributed.checks import check_optimizer, no_global_draws
from arb_ternary_distributed.collectives import all_gather_single
from arb_ternary_distributed.exchange import exchange_votes
from arb_ternary_distributed.optimizer_state import shard_moments
from arb_ternary_distributed.shards import shard_rows
from arb_ternary_distributed.step_votes import StepVotes
from arb_ternary_distributed.sums import AllReduceSums, OrderedSums
from arb_ternary_train.config import RanksConfig
from arb_ternary_train.loop_state import Outcome
from arb_ternary_train.microbatches import sum_votes
from arb_ternary_train.protocols import ShardableBatches

if TYPE_CHECKING:
    from arb_ternary_distributed.process_group import ProcessGroup
    from arb_ternary_train.loop import TrainingLoop


class DistributedSchedule:
    """Trains on the micro-batches of a step in rounds, one per rank and round.

    Gradients of float parameters, and magnitudes and statistics of ternary modules, are added in
    the order of micro-batches; after the last round every rank has those sums, as one process
    would. Votes are integers: the optimizer's exchange adds them when it steps. Without
    ``options.ordered_sums`` torch chooses the order in which gradients are added.

    Votes are sent while backward continues, unless it is ``compiled`` and calls no hooks: in the
    last round of a step, or with ``options.weights: sharded`` in every round.

    Args:
        world: the ranks.
        count: micro-batches per step.
        options: what the ranks share.
        compiled: whether the model is compiled.

    Raises:
        ConfigError: there are more ranks than micro-batches.
    """

    def __init__(
        self,
        world: ProcessGroup,
        count: int,
        options: RanksConfig,
        *,
        compiled: bool = False,
    ) -> None:
        if world.size > count:
            raise ConfigError(
                f"gradient_accumulation_steps: a step has {count} micro-batches, and there are "
                f"{world.size} ranks, each of which takes one at least",
                f"Start at most {count} ranks, or set gradient_accumulation_steps to {world.size} "
                f"or more, with as much smaller a batch_size: it counts the micro-batches of all "
                f"ranks together.",
            )
        self._world = world
        self._count = count
        self._options = options
        self._compiled = compiled

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> Sequence[TernaryModule]:
        """See ``MicrobatchSchedule``."""
        check_optimizer(optimizer, self._world.size)
        voters = sum_votes(model, optimizer, always=True)
        shard_rows(model, self._world)
        self._votes = StepVotes(
            self._world,
            voters,
            every_round=self._options.weights == "sharded",
            during_backward=not self._compiled,
        )
        exchange_votes(optimizer, self._world, self._votes)
        if self._options.optimizer_state == "sharded":
            shard_moments(optimizer, self._world)
        return voters

    def draw(self, loop: TrainingLoop, first: int) -> int:
        """See ``MicrobatchSchedule``. A step is drawn as a whole. Collective."""
        world = self._world
        count = self._count
        if first % count:
            raise CheckpointError(
                f"the checkpoint was written by one process after {first} of the {count} "
                "micro-batches of a step, and several ranks go on between steps only",
                "Let one process go on to its next checkpoint, by the same command without "
                "torchrun, or resume from an earlier one: --resume PATH.",
            )
        if isinstance(loop.batches, ShardableBatches):
            loop.batches.shard(world.rank, world.size, count)
        done = 0
        with no_global_draws(world.device):
            for index in range(world.rank, count, world.size):
                _skip(loop, index - done)
                loop.draw_microbatch(loop.microbatches + index)
                done = index + 1
            _skip(loop, count - done)
        total = torch.tensor(sum(drawn.predictions for drawn in loop.drawn), device=world.device)
        dist.all_reduce(total, group=world.group)
        return int(total)

    def indices(self, loop: TrainingLoop, first: int, outcomes: list[Outcome]) -> Iterator[int]:
        """See ``MicrobatchSchedule``. All micro-batches of a step are trained on together."""
        rank = self._world.rank
        size = self._world.size
        count = self._count
        before = loop.microbatches
        if self._options.ordered_sums:
            sums: OrderedSums | AllReduceSums = OrderedSums(self._world)
        else:
            sums = AllReduceSums(self._world, len(_trainable(loop.model)))
        votes = self._votes
        votes.begin_step()
        rounds = -(-count // size)
        for number in range(rounds):
            index = number * size + rank
            trained = index < count
            last = number == rounds - 1
            if trained:
                votes.begin_round(last=last)
                with no_global_draws(self._world.device):
                    yield index
            votes.end_round(last=last)
            self._add(sums, loop, trained and outcomes[-1].finite)
        loop.microbatches = before + count
        self._take(sums, loop)

    def _add(self, sums: OrderedSums | AllReduceSums, loop: TrainingLoop, present: bool) -> None:
        """Add gradients and statistics of a micro-batch to ``sums``, and clear them.

        Args:
            sums: of the step.
            loop: what trains.
            present: whether this rank has a micro-batch in this round, with a finite loss.
        """
        parameters = _trainable(loop.model)
        # A parameter without a gradient stands for the shape of one, and is not read.
        gradients = [
            parameter if parameter.grad is None else parameter.grad for parameter in parameters
        ]
        has_gradient = [present and parameter.grad is not None for parameter in parameters]
        statistics: list[Tensor] = []
        for module in loop.voters:
            statistics += [own for own, _ in _statistics(module)]
        sums.add_round([*gradients, *statistics], [*has_gradient, *[present] * len(statistics)])
        for parameter in parameters:
            parameter.grad = None
        for own in statistics:
            own.zero_()
        for module in loop.voters:
            module.end_microbatch()

    def _take(self, sums: OrderedSums | AllReduceSums, loop: TrainingLoop) -> None:
        """Leave the sums where one process would have left them."""
        parameters = _trainable(loop.model)
        totals = sums.finish()
        for parameter, total, present in zip(parameters, totals, sums.present, strict=False):
            if present:
                parameter.grad = total
        of_step: list[Tensor] = []
        for module in loop.voters:
            of_step += [whole for _, whole in _statistics(module)]
        for whole, total in zip(of_step, totals[len(parameters) :], strict=True):
            whole.add_(total)

    def gather_outcomes(self, outcomes: list[Outcome]) -> list[Outcome]:
        """See ``MicrobatchSchedule``. Collective."""
        rounds = -(-self._count // self._world.size)
        world = self._world
        own = torch.zeros(rounds, 2, dtype=torch.float64)
        for number, outcome in enumerate(outcomes):
            own[number, 0] = outcome.loss
            own[number, 1] = outcome.tokens
        own = own.to(world.device)
        found = own.new_empty(world.size * rounds, 2)
        all_gather_single(found, own, group=world.group)
        by_rank = found.view(world.size, rounds, 2)
        by_index = by_rank.transpose(0, 1).reshape(-1, 2)
        rows = by_index[: self._count].tolist()
        return [Outcome(loss, int(tokens)) for loss, tokens in rows]


def _skip(loop: TrainingLoop, count: int) -> None:
    """Pass over the next ``count`` batches, which other ranks draw."""
    if isinstance(loop.batches, ShardableBatches):
        loop.batches.skip(count)
    else:
        for _ in range(count):
            next(loop.batches)


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _statistics(module: TernaryModule) -> list[tuple[Tensor, Tensor]]:
    """Return what a module sums in float, of the current micro-batch and of the step."""
    sums = module.sums
    assert sums is not None
    found = [(sums.stats, module.stats)]
    if sums.magnitudes is not None and module.magnitudes is not None:
        found.append((sums.magnitudes, module.magnitudes))
    return found
