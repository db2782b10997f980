"""Packed weights of which a rank keeps its own rows, and has the others while a block runs: FSDP2
of torch.

The packed weight of a module becomes a parameter without a gradient, which ``fully_shard`` cuts by
rows as accumulators are cut (:mod:`arb_ternary_distributed.rows`) and gathers as the bytes that it
is, two bits a weight: those of one block at a time in forward and again in backward, those outside
of blocks (embedding, head, final norm) from the beginning of forward to the end of backward. Flips
are made where the rows are kept, and no rank is told of another's.

Everything else stays as it is: float parameters and exponents are on all ranks, and state dicts
hold whole weights, for which all ranks gather them. Sums of votes are cut as well: those of a block
leave behind its backward (``rounds``).
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
from arb_ternary_distributed.exchange import OwnedRows
from arb_ternary_distributed.gathers import Gathers
from arb_ternary_distributed.rounds import RoundDelivery
from arb_ternary_distributed.rows import row_bounds

if TYPE_CHECKING:
    from arb_ternary_distributed.process_group import ProcessGroup

#: What torch adds to a module so that state dicts hold shards. Ours hold whole weights.
_STATE_DICT_HOOKS: Final = (
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
#: Classes that have been made, by the kind of module.
_KINDS: Final[dict[type[TernaryModule], type[ShardedModule]]] = {}


class ShardedRows(OwnedRows):
    """The accumulators and the packed weight of own rows, which are flipped in place; nobody is
    told of it.
    """

    def apply_votes(self, op: str, *settings: int) -> Tensor:
        """As ``TernaryModule.apply_votes``, for the rows of this rank."""
        module = cast("ShardedModule", self.module)
        local = cast("DTensor", module.weight).to_local()
        self.flips = self.flip_(local, op, *settings)
        # torch gathers into the same memory and leaves its version as it is, whoever has flipped
        # what. Decoded weights are kept for the versions of weight and exponents.
        torch.autograd.graph.increment_version((local, module.exponent))
        return self.flips


class ShardedModule(TernaryModule):
    """A ternary module whose ``weight`` is a ``DTensor`` of rows, and an ordinary tensor while its
    block runs.
    """

    #: Who keeps its rows.
    shard_type = ShardedRows
    #: The kind of module that it was.
    uncut: type[TernaryModule]
    cut_by: ShardedWeights

    def trits(self) -> Tensor:
        """As of any ternary module; collective where they are not gathered."""
        if not isinstance(self.weight, DTensor):
            return super().trits()
        self.cut_by.check_together()
        trits: Tensor = kernel(self.backend, "unpack")(self.weight.full_tensor(), self.shape)
        return trits

    def multiply(self, x: Tensor, activations: str, bias: Tensor | None = None) -> Tensor:
        """As of any ternary module; RuntimeError where the weight is not gathered."""
        self._check_gathered()
        return super().multiply(x, activations, bias)

    def look_up(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """As of any ternary module; RuntimeError where the weight is not gathered."""
        self._check_gathered()
        return super().look_up(ids, dtype)

    def _check_gathered(self) -> None:
        if isinstance(self.weight, DTensor):
            raise RuntimeError(
                f"{type(self).__name__}({self.extra_repr()}): it is used outside of its block's "
                f"forward, where a rank "
                "has only some rows of its weight; set ranks.weights to replicated for this model"
            )


class ShardedWeights:
    """The ``Weights`` of ``model``, cut by rows among the ranks of ``world``. Collective.

    A weight that the backend packs in tiles which several ranks would have to share stays whole on
    all of them.

    Args:
        model: on its device, with its weights. All ranks run the same blocks in the same order.
        world: of several ranks.

    Attributes:
        modules: those whose weights are cut, by name.
        replicated: the names of the others.

    Raises:
        EnvironmentProblem: torch is too old.
    """

    def __init__(self, model: nn.Module, world: ProcessGroup) -> None:
        check_torch()
        found = dict(ternary_modules(model))
        cut = {
            name: module for name, module in found.items() if _rows_are_bytes(module, world.size)
        }
        self.replicated = tuple(name for name in found if name not in cut)
        hooks = [
            (module, name, getattr(module, name).copy())
            for module in cut.values()
            for name in _STATE_DICT_HOOKS
        ]
        self.modules = {name: _with_parameter(module) for name, module in cut.items()}
        packed = {cast("nn.Parameter", module.weight) for module in self.modules.values()}
        blocks = [block for block in blocks_of(model) if any(True for _ in ternary_modules(block))]
        cut_blocks = [block for block in blocks if not packed.isdisjoint(block.parameters())]
        options: dict[str, Any] = {
            "mesh": DeviceMesh.from_group(_group_of(world), world.device.type),
            "ignored_params": set(model.parameters()) - packed,
        }
        units: list[FSDPModule] = [
            fully_shard(module, **options) for module in (*cut_blocks, model)
        ]
        # A loss does not write into logits; torch warns of those that do.
        warnings.filterwarnings(
            "ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning
        )
        for unit in units:
            # the first time torch completes itself, which it must not do in inference mode
            unit.unshard()
            unit.reshard()
            # None but itself: torch would gather ahead, which a rank that makes up for a pass would
            # do in other places. Hosts run ahead of GPUs in any case, and votes of the block before
            # leave after the gather.
            unit.set_modules_to_backward_prefetch([unit])
        for module, name, own in hooks:
            setattr(module, name, own)
        self._units = units
        self._world = world
        self._blocks = blocks
        self._rounds: RoundDelivery | None = None
        self._gathers = Gathers(model, blocks, self._reach)
        self._alone = False
        self._whole = False
        for sharded in self.modules.values():
            sharded.cut_by = self
        model.register_forward_pre_hook(lambda *_: self.check_together(), prepend=True)

    def round_exchange(self, voters: Sequence[TernaryModule]) -> RoundDelivery:
        """Return what sends the votes of ``voters`` in every round from now on."""
        self._rounds = RoundDelivery(self._world, voters, self._blocks)
        return self._rounds

    def _reach(self, block: nn.Module) -> None:
        if self._rounds is not None:
            self._rounds.reach(block)

    def end_round(self) -> None:
        """Take part in what other ranks have gathered for passes that this one has not made.

        Called when every rank has trained on a micro-batch, or has none, or one whose loss is not
        finite and which had no backward.
        """
        forward, backward = self._gathers.missed(backward=True)
        self._gather(forward)
        for block in backward:
            self._gather([block])
            self._reach(block)
        self._units[-1].reshard()

    def end_evaluation_round(self) -> None:
        """Take part in what other ranks have gathered for a batch that this one does not have."""
        self._gather(self._gathers.missed(backward=False)[0])

    def _gather(self, places: Sequence[nn.Module | None]) -> None:
        for place in places:
            if place is None:
                self._units[-1].unshard()
            elif isinstance(place, FSDPModule):  # others keep their weights whole
                place.unshard()
                place.reshard()

    @contextmanager
    def main_process_only(self) -> Iterator[None]:
        """Refuse, within a block, to compute with weights of which this rank has only some rows."""
        before = self._alone
        self._alone = True
        try:
            yield
        finally:
            self._alone = before

    def check_together(self) -> None:
        """ConfigError where this rank acts alone and needs the rows of others."""
        if self._alone and not self._whole:
            raise ConfigError(
                "ranks.weights: one rank alone asks for weights of which it has only some rows",
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
        self._whole = True


def blocks_of(model: nn.Module) -> Iterator[nn.Module]:
    """The outermost members of module lists: what a model runs one after the other."""
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from blocks_of(child)


def _group_of(world: ProcessGroup) -> torch.distributed.ProcessGroup:
    if world.group is None:
        raise ValueError("weights are sharded among several ranks, and this process is alone")
    return world.group


def _with_parameter(module: TernaryModule) -> ShardedModule:
    weight = module.weight
    del module.weight
    module.weight = nn.Parameter(weight, requires_grad=False)
    kind = type(module)
    if kind not in _KINDS:
        _KINDS[kind] = type(f"Sharded{kind.__name__}", (ShardedModule, kind), {"uncut": kind})
    module.__class__ = _KINDS[kind]
    return cast("ShardedModule", module)


def _with_buffer(module: ShardedModule) -> None:
    """Undo :func:`_with_parameter`; the weight is the first of the buffers, as it was."""
    weight = module.weight.detach()
    others = dict(module._buffers)
    del module.weight
    module._buffers.clear()
    module.register_buffer("weight", weight)
    module._buffers.update(others)
    module.__class__ = next(kind for kind, sharded in _KINDS.items() if type(module) is sharded)  # type: ignore[assignment]


def _rows_are_bytes(module: TernaryModule, size: int) -> bool:
    """Whether a rank's rows of a packed weight are those of its first dimension that torch gives
    it.
    """
    return _layout_is_cut(
        module.backend,
        module.shape.out_features,
        module.shape.in_features,
        size,
        module.weight.device,
    )


@cache
def _layout_is_cut(backend: str, rows: int, columns: int, size: int, device: torch.device) -> bool:
    generator = torch.Generator().manual_seed(0)
    trits = (torch.randint(3, (rows, columns), generator=generator, dtype=torch.int8) - 1).to(
        device
    )
    pack = kernel(backend, "pack")
    whole = pack(trits)
    pieces = zip(row_bounds(rows, size), row_bounds(whole.shape[0], size), strict=True)
    return all(
        torch.equal(pack(trits[first:last]), whole[start:end])
        for (first, last), (start, end) in pieces
    )
