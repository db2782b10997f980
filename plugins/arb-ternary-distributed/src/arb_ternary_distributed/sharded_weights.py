"""Packed weights that are sharded by rows over ranks, by FSDP2 of torch.

The packed weight of a module becomes a parameter without a gradient. ``fully_shard`` cuts it by
rows, as accumulators are cut, and gathers it as bytes, two bits per weight: the weights of one
block at a time in forward and again in backward, those outside of blocks (embedding, head, final
norm) from the beginning of forward to the end of backward. Flips are made where the rows are kept,
and are not sent to other ranks.

Everything else stays as it is: float parameters and exponents are on all ranks, and state dicts
hold whole weights, which all ranks gather. Sums of votes are sharded too: those of a block are sent
behind its backward (``round_votes``).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from arb_ternary.backends.dispatch import kernel
from arb_ternary.errors import ConfigError
from arb_ternary.ternary.models import ternary_modules
from arb_ternary.ternary.module import TernaryModule
from arb_ternary_distributed.checks import check_torch
from arb_ternary_distributed.gathers import MissedGathers
from arb_ternary_distributed.round_votes import RoundVotes
from arb_ternary_distributed.shards import AccumulatorShard
from arb_ternary_distributed.wire.rows import row_bounds

if TYPE_CHECKING:
    from arb_ternary_distributed.process_group import ProcessGroup

#: What torch adds to a module so that state dicts hold shards. Ours hold whole weights.
_STATE_DICT_HOOKS: Final = (
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
#: Classes of sharded modules, by the class of the module with a replicated weight.
_SHARDED_CLASSES: Final[dict[type[TernaryModule], type[ShardedModule]]] = {}


class WeightShard(AccumulatorShard):
    """The rows of accumulators and packed weight on this rank, where the weight is flipped."""

    def apply_votes(self, op: str, *settings: int) -> Tensor:
        """Flip own rows of the weight; see ``RowShard``."""
        module = cast("ShardedModule", self.module)
        local = cast("DTensor", module.weight).to_local()
        self.flips = self.flip_(local, op, *settings)
        # torch gathers into the same memory and leaves its version unchanged, but decoded weights
        # are cached for the versions of weight and exponents, which the flips make stale.
        torch.autograd.graph.increment_version((local, module.exponent))
        return self.flips


class ShardedModule(TernaryModule):
    """A ternary module whose ``weight`` is a ``DTensor`` of rows, gathered while its block runs."""

    #: What keeps its rows.
    shard_type = WeightShard
    #: The class of the module when its weight is replicated.
    replicated_type: type[TernaryModule]
    sharded_by: ShardedWeights

    def trits(self) -> Tensor:
        """See ``TernaryModule``; collective unless the weight is gathered."""
        if not isinstance(self.weight, DTensor):
            return super().trits()
        self.sharded_by.check_all_ranks()
        trits: Tensor = kernel(self.backend, "unpack")(self.weight.full_tensor(), self.shape)
        return trits

    def multiply(self, x: Tensor, activations: str, bias: Tensor | None = None) -> Tensor:
        """See ``TernaryModule``; RuntimeError unless the weight is gathered."""
        self._check_gathered()
        return super().multiply(x, activations, bias)

    def look_up(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """See ``TernaryModule``; RuntimeError unless the weight is gathered."""
        self._check_gathered()
        return super().look_up(ids, dtype)

    def _check_gathered(self) -> None:
        if isinstance(self.weight, DTensor):
            raise RuntimeError(
                f"{type(self).__name__}({self.extra_repr()}): it is used outside of its block's "
                f"forward, where a rank has only some rows of its weight; set ranks.weights to "
                f"replicated for this model"
            )


class ShardedWeights:
    """The packed weights of ``model``, sharded by rows among the ranks of ``world``. Collective.

    A weight that the backend packs in tiles which several ranks would have to share stays
    replicated.

    Args:
        model: on its device, with its weights. All ranks run the same blocks in the same order.
        world: the ranks.

    Attributes:
        modules: those whose weights are sharded, by name.
        replicated: names of the other ternary modules.

    Raises:
        EnvironmentProblem: torch is too old.
    """

    def __init__(self, model: nn.Module, world: ProcessGroup) -> None:
        check_torch()
        self._world = world
        found = dict(ternary_modules(model))
        to_shard = {
            name: module for name, module in found.items() if _can_be_sharded(module, world.size)
        }
        self.replicated = tuple(name for name in found if name not in to_shard)
        hooks = [
            (module, name, getattr(module, name).copy())
            for module in to_shard.values()
            for name in _STATE_DICT_HOOKS
        ]
        self.modules = {name: _with_parameter(module) for name, module in to_shard.items()}
        self._blocks = [block for block in blocks_of(model) if any(ternary_modules(block))]
        self._units = self._shard_units(model)
        for module, name, own in hooks:
            setattr(module, name, own)
        for sharded in self.modules.values():
            sharded.sharded_by = self

        self._rounds: RoundVotes | None = None
        self._missed = MissedGathers(model, self._blocks, self._reach)
        self._alone = False
        self._is_full = False
        model.register_forward_pre_hook(lambda *_: self.check_all_ranks(), prepend=True)

    def _shard_units(self, model: nn.Module) -> list[FSDPModule]:
        """Shard the packed weights of each block, and last those outside of blocks."""
        packed = {cast("nn.Parameter", module.weight) for module in self.modules.values()}
        blocks = [block for block in self._blocks if not packed.isdisjoint(block.parameters())]
        group = self._world.group
        assert group is not None
        options: dict[str, Any] = {
            "mesh": DeviceMesh.from_group(group, self._world.device.type),
            "ignored_params": set(model.parameters()) - packed,
        }
        units: list[FSDPModule] = [fully_shard(module, **options) for module in (*blocks, model)]
        # A loss does not write into logits, and torch warns of that.
        warnings.filterwarnings(
            "ignore",
            "FSDP2-wrapped module .* returned a view tensor",
            UserWarning,
        )
        for unit in units:
            # The first time torch completes itself, which it must not do in inference mode.
            unit.unshard()
            unit.reshard()
            # No prefetch in backward: a rank that makes up for a pass would gather in another
            # order. Hosts run ahead of GPUs in any case.
            unit.set_modules_to_backward_prefetch([unit])
        return units

    def round_exchange(self, voters: Sequence[TernaryModule]) -> RoundVotes:
        """Return what sends the votes of ``voters`` in every round from now on."""
        self._rounds = RoundVotes(self._world, voters, self._blocks)
        return self._rounds

    def _reach(self, block: nn.Module) -> None:
        if self._rounds is not None:
            self._rounds.reach(block)

    def end_round(self) -> None:
        """Take part in what other ranks have gathered for passes that this one has not made.

        Called when every rank has trained on a micro-batch, or has none, or one whose loss is not
        finite and which had no backward.
        """
        forward, backward = self._missed.take(backward=True)
        self._gather(forward)
        for block in backward:
            self._gather([block])
            self._reach(block)
        self._units[-1].reshard()

    def end_evaluation_round(self) -> None:
        """Take part in what other ranks have gathered for a batch that this one does not have."""
        forward, _ = self._missed.take(backward=False)
        self._gather(forward)

    def _gather(self, blocks: Sequence[nn.Module | None]) -> None:
        for block in blocks:
            if block is None:
                self._units[-1].unshard()
            elif isinstance(block, FSDPModule):  # other blocks have replicated weights
                block.unshard()
                block.reshard()

    @contextmanager
    def main_process_only(self) -> Iterator[None]:
        """Refuse, within a block, to compute with weights that this rank has only in part."""
        before = self._alone
        self._alone = True
        try:
            yield
        finally:
            self._alone = before

    def check_all_ranks(self) -> None:
        """Check that this rank does not act alone if it needs the rows of others.

        Raises:
            ConfigError: it does.
        """
        if self._alone and not self._is_full:
            raise ConfigError(
                "ranks.weights: one rank alone asks for weights, and it has only some of their "
                "rows",
                "An observer or a hook does this between steps: leave it out, or set ranks.weights "
                "to replicated.",
            )

    def gather_full(self) -> None:
        """Give every rank all weights, after the last step. Modules are ordinary ones again."""
        for unit in self._units:  # a pass then neither gathers nor frees anything
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()
        for module in self.modules.values():
            _with_buffer(module)
        if self._rounds is not None:
            self._rounds.close()
        self._is_full = True


def blocks_of(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost members of module lists: what a model runs one after the other."""
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from blocks_of(child)


def _with_parameter(module: TernaryModule) -> ShardedModule:
    """Make the packed weight of a module a parameter, which FSDP shards."""
    weight = module.weight
    del module.weight
    module.weight = nn.Parameter(weight, requires_grad=False)
    kind = type(module)
    if kind not in _SHARDED_CLASSES:
        _SHARDED_CLASSES[kind] = type(
            f"Sharded{kind.__name__}",
            (ShardedModule, kind),
            {"replicated_type": kind},
        )
    module.__class__ = _SHARDED_CLASSES[kind]
    return cast("ShardedModule", module)


def _with_buffer(module: ShardedModule) -> None:
    """Undo :func:`_with_parameter`; the weight becomes the first buffer, as it was."""
    weight = module.weight.detach()
    others = dict(module._buffers)
    del module.weight
    module._buffers.clear()
    module.register_buffer("weight", weight)
    module._buffers.update(others)
    module.__class__ = module.replicated_type  # type: ignore[assignment]


def _can_be_sharded(module: TernaryModule, size: int) -> bool:
    """Return whether FSDP cuts the packed weight where the rows of the ranks end."""
    shape = module.shape
    return _slices_are_rows(
        module.backend,
        shape.out_features,
        shape.in_features,
        size,
        module.weight.device,
    )


@cache
def _slices_are_rows(
    backend: str,
    rows: int,
    columns: int,
    size: int,
    device: torch.device,
) -> bool:
    pack = kernel(backend, "pack")
    generator = torch.Generator().manual_seed(0)
    trits = torch.randint(3, (rows, columns), generator=generator, dtype=torch.int8) - 1
    trits = trits.to(device)
    whole = pack(trits)
    of_rows = row_bounds(rows, size)
    of_weight = row_bounds(whole.shape[0], size)
    for (first, last), (start, end) in zip(of_rows, of_weight, strict=True):
        if not torch.equal(pack(trits[first:last]), whole[start:end]):
            return False
    return True
