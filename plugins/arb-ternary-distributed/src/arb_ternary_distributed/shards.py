"""Accumulators that are sharded by rows: each rank keeps, and votes on, the rows that it owns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import define, evolve
from torch import Tensor, nn

from arb_ternary.backends.dispatch import kernel
from arb_ternary.backends.protocol import ROW_SHARDS, WeightShape
from arb_ternary.ternary.models import ternary_modules
from arb_ternary.ternary.module import TernaryModule
from arb_ternary_distributed.collectives import all_gather_rows
from arb_ternary_distributed.step_votes import RowSums
from arb_ternary_distributed.wire import wire_kernel
from arb_ternary_distributed.wire.rows import row_bounds

if TYPE_CHECKING:
    from arb_ternary_distributed.process_group import ProcessGroup


@define(eq=False)
class AccumulatorShard:
    """The rows of a module's accumulators on this rank; the ``RowShard`` of a module.

    Attributes:
        module: whose accumulators.
        world: the ranks.
        bounds: first row of each rank, and the row after its last.
        flips: number of flips counted here in the current step; None if nothing was applied.
        before: own rows of the packed weight before the step.
        after: own rows as the step has left them; the weight follows in ``gather_flips``.
    """

    module: TernaryModule
    world: ProcessGroup
    bounds: list[tuple[int, int]]
    flips: Tensor | None = None
    before: Tensor | None = None
    after: Tensor | None = None

    @property
    def rows(self) -> slice:
        """The rows of this rank."""
        return slice(*self.bounds[self.world.rank])

    @property
    def rows_shape(self) -> WeightShape:
        """The shape of own rows of the weight."""
        first, last = self.bounds[self.world.rank]
        return evolve(self.module.shape, out_features=last - first)

    def gather(self, local: Tensor) -> Tensor:
        """See ``RowShard``."""
        counts = [last - first for first, last in self.bounds]
        return torch.cat(all_gather_rows(local, counts, group=self.world.group))

    def apply_votes(self, op: str, *settings: int) -> Tensor:
        """Flip own rows of a copy; see ``RowShard``.

        The weight itself follows when all ranks have exchanged their flips.
        """
        module = self.module
        first, last = self.bounds[self.world.rank]
        select_rows = wire_kernel(module.backend, "distributed.weight_rows")
        self.before = select_rows(module.weight, module.shape, first, last)
        self.after = self.before.clone()
        if first == last:
            self.flips = torch.zeros((), dtype=torch.int64, device=module.weight.device)
            return self.flips
        shape = self.rows_shape
        state = module.vote_state()._replace(
            weight=self.after,
            exponent=module.exponent[first:last],
            exponent_votes=None,
            sums=None,
            exponent_sums=None,
            sizes=(shape.out_features, shape.in_features, shape.group_size, shape.vote_bits),
            first_row=first,
        )
        # Scaled votes hash the position of an element in the whole weight.
        needs_first_row = op == "apply_scaled_votes" and first > 0
        apply = kernel(module.backend, op, ROW_SHARDS if needs_first_row else None)
        changed: Tensor = apply(state, *settings)
        self.flips = changed
        return changed


def shard_rows(model: nn.Module, world: ProcessGroup) -> None:
    """Keep only the rows of this rank of every module's accumulators.

    All ranks have the same accumulators before. Frozen modules keep all rows, which do not change.
    """
    for _, module in ternary_modules(model):
        if module.shard is None and not module.frozen:
            votes = module.logical_votes()
            bounds = row_bounds(module.shape.out_features, world.size)
            module.shard = AccumulatorShard(module, world, bounds)
            module.votes = module.packed_votes(votes)


def gather_rows(model: nn.Module) -> None:
    """Keep all rows of every module's accumulators and sums on every rank again. Collective."""
    for _, module in ternary_modules(model):
        if isinstance(module.sums, RowSums):
            module.sum_votes()
        if module.shard is not None:
            votes = module.logical_votes()
            module.shard = None
            module.votes = module.packed_votes(votes)
