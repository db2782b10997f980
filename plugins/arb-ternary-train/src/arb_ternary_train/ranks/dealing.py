"""Which micro-batches of a step are whose, and how their parts become one step.

A step has ``n`` micro-batches (``gradient_accumulation_steps``), at the places ``j = 0 .. n - 1``.
In one process they come one after the other. Of ``N`` ranks rank ``r`` takes those with ``j % N ==
r`` and passes over the others; so the data, the masks and the hashes of a micro-batch do not depend
on who takes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from arb_ternary.errors import CheckpointError, ConfigError
from arb_ternary.optim.protocol import inner_optimizers, may_defer
from arb_ternary.optim.ternary import TernaryOptimizer
from arb_ternary.protocols.data import Batches
from arb_ternary.ternary.models import ternary_modules
from arb_ternary.ternary.module import TernaryModule
from arb_ternary_train.config import RanksConfig
from arb_ternary_train.in_flight import Outcome
from arb_ternary_train.protocols import DealtBatches
from arb_ternary_train.ranks.collectives import all_gather_single
from arb_ternary_train.ranks.exchange import OwnerRows, own_rows, share_votes
from arb_ternary_train.ranks.one_sum import OneSum
from arb_ternary_train.ranks.ordered_sums import OrderedSums
from arb_ternary_train.ranks.owned_moments import own_moments
from arb_ternary_train.ranks.refusals import refuse_global_draws, refuse_optimizer
from arb_ternary_train.ranks.rounds import RoundDelivery
from arb_ternary_train.ranks.weights import Weights, WholeWeights
from arb_ternary_train.ranks.world import World

_WHOLE: Final = WholeWeights()
_NOTHING_SHARED: Final = RanksConfig()


class Learner(Protocol):
    """Who trains on micro-batches: a training loop."""

    model: nn.Module
    batches: Batches
    voters: Sequence[TernaryModule]
    microbatches: int


class Dealing(Protocol):
    """How the micro-batches of a step are dealt.

    Attributes:
        turn: micro-batches that :meth:`places` takes together.
    """

    @property
    def turn(self) -> int: ...

    def adopt(self, model: nn.Module, optimizer: Optimizer) -> Sequence[TernaryModule]:
        """Prepare ``model`` and ``optimizer``, between two steps; the modules that learn by
        votes.
        """

    def places(self, learner: Learner, place: int, mine: list[Outcome]) -> Iterator[int]:
        """Places to train on here, of the next ``turn`` micro-batches, of which the first is at
        ``place``.

        Who asks for them trains ``learner`` on its next micro-batch at each, adds its gradients,
        and appends to ``mine`` what became of it; then asks for the next place, to the end.

        Raises:
            CheckpointError: a step is under way that these cannot go on with.
        """

    def outcomes(self, mine: Sequence[Outcome]) -> list[Outcome]:
        """What became of all ``turn`` micro-batches, by place."""


class OneByOne:
    """All micro-batches in one process, which can be stopped between any two of them."""

    turn = 1

    def __init__(self, places: int) -> None:
        self._places = places

    def adopt(self, model: nn.Module, optimizer: Optimizer) -> Sequence[TernaryModule]:
        """See :class:`Dealing`. Votes of several micro-batches are summed, as those of several
        ranks are.

        What puts steps off takes them as they come: it keeps and drops micro-batches by itself.
        """
        return _sum_votes(model, optimizer, always=self._places > 1 and not may_defer(optimizer))

    def places(self, learner: Learner, place: int, mine: list[Outcome]) -> Iterator[int]:
        """See :class:`Dealing`."""
        yield place
        for module in learner.voters:
            module.end_microbatch()

    def outcomes(self, mine: Sequence[Outcome]) -> list[Outcome]:
        """See :class:`Dealing`."""
        return [*mine]


class Dealt:
    """The ``places`` micro-batches of a step, each on the rank whose turn it is.

    Gradients of float parameters, and magnitudes and statistics of ternary modules, are added in
    the order of places; after the last round every rank has those sums, as one process would. Votes
    are integers: an optimizer's exchange adds them when it steps. Without ``shared.ordered_sums``
    the gradients are added in an order of torch's.

    In the last round votes leave while backward goes on, unless a second rule would then talk to
    the ranks too, or where ``compiled`` backward calls nobody. Those for sharded weights leave in
    every round.
    """

    def __init__(
        self,
        world: World,
        places: int,
        weights: Weights = _WHOLE,
        shared: RanksConfig = _NOTHING_SHARED,
        *,
        compiled: bool = False,
    ) -> None:
        self.turn = places
        self._world = world
        self._weights = weights
        self._shared = shared
        self._compiled = compiled
        self._rounds: RoundDelivery | None = None
        self._exchanges: dict[TernaryOptimizer, OwnerRows] = {}

    def adopt(self, model: nn.Module, optimizer: Optimizer) -> Sequence[TernaryModule]:
        """See :class:`Dealing`; ConfigError where several ranks cannot train with ``optimizer``."""
        refuse_optimizer(optimizer, self._world)
        voters = _sum_votes(model, optimizer, always=True)
        own_rows(model, self._world)
        self._rounds = self._weights.rounds(voters)
        self._exchanges = share_votes(optimizer, self._world, self._rounds)
        if self._shared.optimizer_state == "sharded":
            own_moments(optimizer, self._world)
        return voters

    def places(self, learner: Learner, place: int, mine: list[Outcome]) -> Iterator[int]:
        """See :class:`Dealing`."""
        rank = self._world.rank
        size = self._world.size
        places = self.turn
        if place % places:
            raise CheckpointError(
                f"the checkpoint was written by one process after {place} of the {places} "
                "micro-batches of a step, and several ranks go on between steps only",
                "Let one process go on to its next checkpoint, by the same command without "
                "torchrun, or resume from an earlier one: --resume PATH.",
            )
        if isinstance(learner.batches, DealtBatches):
            learner.batches.deal(rank, size, places)
        ordered = self._shared.ordered_sums
        done = 0
        sums = (
            OrderedSums(self._world)
            if ordered
            else OneSum(self._world, len(_learning(learner.model)))
        )
        for exchange in self._exchanges.values():
            exchange.begin()
        for own in range(rank, rank + -(-places // size) * size, size):
            trained = own < places
            last = own // size == (places - 1) // size
            if trained:
                _pass_over(learner, own - done)
                for rule, exchange in self._exchanges.items() if last and self._may_watch else ():
                    exchange.watch(rule)
                with refuse_global_draws(self._world.device):
                    yield own
                done = own + 1
            self._weights.end_round()
            if self._rounds is not None:
                self._rounds.end_round(last=last)
            if last:
                for rule, exchange in self._exchanges.items():
                    exchange.flush(rule)
            self._add(sums, learner, trained and mine[-1].finite)
        _pass_over(learner, places - done)
        self._take(sums, learner)

    @property
    def _may_watch(self) -> bool:
        return (
            len(self._exchanges) == 1
            and isinstance(self._weights, WholeWeights)
            and not self._compiled
        )

    def _add(self, sums: OrderedSums | OneSum, learner: Learner, present: bool) -> None:
        """Hand in what a micro-batch has left, and clear it."""
        parameters = _learning(learner.model)
        tensors = [p if p.grad is None else p.grad for p in parameters]
        has = [p.grad is not None for p in parameters]
        folds = [each for module in learner.voters for each, _ in _folds(module)]
        sums.add_round(
            [*tensors, *folds], [present and there for there in (*has, *[True] * len(folds))]
        )
        for parameter in parameters:
            parameter.grad = None
        for each in folds:
            each.zero_()
        for module in learner.voters:
            module.end_microbatch()

    def _take(self, sums: OrderedSums | OneSum, learner: Learner) -> None:
        """Leave the sums where one process would have left them."""
        parameters = _learning(learner.model)
        totals = sums.finish()
        present = sums.present
        for parameter, total, there in zip(parameters, totals, present, strict=False):
            if there:
                parameter.grad = total
        folded = [into for module in learner.voters for _, into in _folds(module)]
        for into, total in zip(folded, totals[len(parameters) :], strict=True):
            into.add_(total)

    def outcomes(self, mine: Sequence[Outcome]) -> list[Outcome]:
        """See :class:`Dealing`. Collective."""
        rounds = -(-self.turn // self._world.size)
        own = torch.zeros(rounds, 2, dtype=torch.float64)
        for index, outcome in enumerate(mine):
            own[index] = torch.tensor([outcome.loss, outcome.tokens], dtype=torch.float64)
        own = own.to(self._world.device)
        found = own.new_empty(self._world.size * rounds, 2)
        all_gather_single(found, own, group=self._world.group)
        rows = (
            found.view(self._world.size, rounds, 2)
            .transpose(0, 1)
            .reshape(-1, 2)[: self.turn]
            .tolist()
        )
        return [Outcome(loss, int(tokens)) for loss, tokens in rows]


def dealing_in(
    world: World,
    places: int,
    weights: Weights = _WHOLE,
    shared: RanksConfig = _NOTHING_SHARED,
    *,
    compiled: bool = False,
) -> Dealing:
    """How the ``places`` micro-batches of a step are dealt in ``world``.

    Args:
        world: the ranks.
        places: micro-batches of a step.
        weights: those of the model.
        shared: what the ranks share.
        compiled: the model is.

    Raises:
        ConfigError: there are more ranks than micro-batches.
    """
    if world.size == 1:
        return OneByOne(places)
    if world.size > places:
        raise ConfigError(
            f"gradient_accumulation_steps: a step has {places} micro-batches, and there are "
            f"{world.size} ranks, each of which takes one at least",
            f"Start at most {places} ranks, or set gradient_accumulation_steps to {world.size} or "
            f"more, with as much "
            "smaller a batch_size: it counts the micro-batches of all ranks together.",
        )
    return Dealt(world, places, weights, shared, compiled=compiled)


def _sum_votes(model: nn.Module, optimizer: Optimizer, *, always: bool) -> list[TernaryModule]:
    """Have votes summed over a step where that is asked for, or a rule needs it; the modules that
    ``optimizer`` trains.

    Modules that nothing trains keep no memory for it.
    """
    rules = [each for each in inner_optimizers(optimizer) if isinstance(each, TernaryOptimizer)]
    voters = {module: always or rule.sums_votes for rule in rules for module in rule.modules}
    for _, module in ternary_modules(model):
        module.sum_votes(voters.get(module, False))
        module.on_backward = None
    return [*voters]


def _pass_over(learner: Learner, count: int) -> None:
    """Go on as if the next ``count`` micro-batches had been trained on."""
    learner.microbatches += count
    if isinstance(learner.batches, DealtBatches):
        learner.batches.skip(count)
    else:
        for _ in range(count):
            next(learner.batches)


def _learning(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _folds(module: TernaryModule) -> list[tuple[Tensor, Tensor]]:
    """What a module sums in float, of the micro-batch under way and of the step."""
    sums = module.sums
    assert sums is not None
    found = [(sums.stats, module.stats)]
    if sums.magnitudes is not None and module.magnitudes is not None:
        found.append((sums.magnitudes, module.magnitudes))
    return found
