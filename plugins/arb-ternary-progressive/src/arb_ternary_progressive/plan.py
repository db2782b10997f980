"""What a growing rack will be and need, stack by stack, before a run.

Bytes are counted, not estimated: a rack with one block a stack, and one with two, are built, frozen
and run forward and backward as the run would do it, with its batch and its block size. Nothing is
trained: the optimizer is made, and says what it will keep, but never steps. What is stored, what
gradients and optimizer take and what the backward pass keeps all grow linearly with the number of
blocks, so that two counts give the rest. The rack itself is never built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from attrs import asdict, evolve, frozen
from torch import Tensor, nn
from torch.optim import Optimizer

from arb_ternary.optim.protocol import Trainable, collect_trainable, may_refuse
from arb_ternary.protocols.data import MaskedBatch, MaskingStrategy
from arb_ternary.ternary.models import ternary_modules
from arb_ternary_progressive.growth import Stage
from arb_ternary_progressive.hidden_codec import HiddenCodec
from arb_ternary_progressive.masking import TimeStepMasking
from arb_ternary_progressive.time import step_of_time, time_of_step
from arb_ternary_train.audit import audit
from arb_ternary_train.evaluate import masked_loss
from arb_ternary_train.optim.planned_state import planned_state_bytes

if TYPE_CHECKING:
    from arb_ternary_progressive.builder import ProgressiveRackBuilder
    from arb_ternary_progressive.config import GrowthConfig


@frozen
class Memory:
    """Bytes of a rack in training.

    Attributes:
        weights: parameters and buffers: weights, exponents, accumulators.
        gradients: of float parameters, and what ternary modules hold within a step, votes that may
            be undone included.
        optimizer: what the optimizer will keep.
        activations: what the backward pass keeps of one micro-batch.
        cache: hidden states of the trunk in the activation cache.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int = 0
    cache: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.cache


@frozen(kw_only=True)
class StagePlan:
    """One stack's training as planned.

    Attributes:
        index: in the order of building.
        position: in the order of computation, while it is trained.
        blocks: of the stack.
        depth: blocks of the rack.
        precision: what the stack is stored in.
        trunk: what learns beside it: none, frozen or qlora.
        time_step: its time step; None where time is an input.
        hidden_share: share of hidden positions then; None where time is an input, or where time
            hides nothing.
        parameters: learnable numbers of the rack, frozen ones included.
        trainable: of these, those that learn now.
        memory: bytes of the whole rack in training.
    """

    index: int
    position: int
    blocks: int
    depth: int
    precision: str
    trunk: str
    time_step: int | None
    hidden_share: float | None
    parameters: int
    trainable: int
    memory: Memory

    def to_json(self) -> dict[str, Any]:
        """Plain numbers and strings."""
        return {**asdict(self), "memory": {**asdict(self.memory), "total": self.memory.total}}


@frozen
class CacheNeed:
    """What the activation cache will be asked to hold: samples, bytes it may have, and number
    format.
    """

    samples: int
    budget: int
    codec: HiddenCodec


def measured_memory(
    rack: nn.Module, optimizer: Optimizer, activations: int = 0, cache: int = 0
) -> Memory:
    """The bytes of ``rack`` as it stands, counted from its tensors, and of ``optimizer`` to come;
    shared count once.
    """
    weights = {id(tensor): tensor.nbytes for tensor in (*rack.parameters(), *rack.buffers())}
    gradients = [
        parameter.grad.nbytes for parameter in rack.parameters() if parameter.grad is not None
    ]
    modules = [module for _, module in ternary_modules(rack)]
    # Accumulators of 2 bits are working memory and a buffer.
    working = [
        tensor.nbytes
        for each in modules
        for tensor in each.working_memory()
        if id(tensor) not in weights
    ]
    working += [tensor.nbytes for each in modules for tensor in (each.kept_votes or {}).values()]
    return Memory(
        weights=sum(weights.values()),
        gradients=sum(gradients) + sum(working),
        optimizer=planned_state_bytes(optimizer),
        activations=activations,
        cache=cache,
    )


def kept_for_backward(rack: nn.Module, forward: Callable[[], Tensor]) -> tuple[Tensor, int]:
    """What ``forward`` returns, and the bytes that autograd keeps until its backward; weights do
    not count.
    """
    own = {tensor.untyped_storage().data_ptr() for tensor in (*rack.parameters(), *rack.buffers())}
    kept: dict[int, int] = {}
    alive: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)  # or the address could be given to another tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    return result, sum(kept.values())


def tokens_like(batch_size: int, block_size: int) -> MaskedBatch:
    """A micro-batch of token ids, for all of which one stands."""
    tokens_BS = torch.zeros(batch_size, block_size, dtype=torch.int64)
    return MaskedBatch(tokens_BS, tokens_BS, torch.ones_like(tokens_BS, dtype=torch.bool))


def plan_growth(
    make_builder: Callable[[int], ProgressiveRackBuilder],
    growth: GrowthConfig,
    blocks: Sequence[int],
    *,
    make_optimizer: Callable[[Trainable], Optimizer],
    batch: MaskedBatch,
    positions: int,
    cache: CacheNeed | None,
    trained_from: int = 0,
    masking: MaskingStrategy | None = None,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> list[StagePlan]:
    """The plan of a rack with these numbers of blocks, stack by stack in the order of building.

    Args:
        make_builder: a builder whose rack has its first stack, of so many blocks.
        growth: how it grows.
        blocks: of each stack.
        make_optimizer: as the run makes it.
        batch: a micro-batch.
        positions: of the residual stream of a sample.
        cache: None where nothing is kept.
        trained_from: index of the first stack that is trained. Where all are trained at once, there
            is one plan, for the last.
        masking: hides the tokens.
        autocast: what the forward pass runs under.
    """
    shapes = [(1, 1), (2, 1), (1, 2)]
    probes = [
        _probe(make_builder, growth, len(blocks), shape, make_optimizer, batch, autocast)
        for shape in shapes
    ]
    stages = []
    for index in range(trained_from if growth.enabled else len(blocks) - 1, len(blocks)):
        base, deeper_first, deeper_rest = (probe[index] for probe in probes)
        counts = {
            name: _extrapolated(
                base.counts[name],
                deeper_first.counts[name],
                deeper_rest.counts[name],
                blocks,
                index,
            )
            for name in base.counts
        }
        width = base.width
        kept = 0
        if cache is not None and base.cacheable:
            sample = cache.codec.sample_bytes(positions, width)
            kept = min(cache.samples, cache.budget // sample) * sample
        time_step, share = _time(growth, index, len(blocks), masking)
        stages.append(
            StagePlan(
                index=index,
                position=base.position,
                blocks=blocks[index],
                depth=sum(blocks[: index + 1]),
                precision=base.precision,
                trunk=base.trunk,
                time_step=time_step,
                hidden_share=share,
                parameters=counts.pop("parameters"),
                trainable=counts.pop("trainable"),
                memory=evolve(Memory(**counts), cache=kept),
            )
        )
    return stages


@frozen
class _Probe:
    """What was counted while one stack of a small rack was trained."""

    position: int
    precision: str
    trunk: str
    cacheable: bool
    width: int
    counts: dict[str, int]


def _extrapolated(
    base: int, deeper_first: int, deeper_rest: int, blocks: Sequence[int], index: int
) -> int:
    """The count at ``blocks``, from those at one block a stack and at one block more in the first
    or in each other.
    """
    first = (deeper_first - base) * (blocks[0] - 1)
    # Every later stack has as many blocks as the next: one number describes them.
    rest = (deeper_rest - base) * (blocks[index] - 1) if index else 0
    return base + first + rest


def _probe(
    make_builder: Callable[[int], ProgressiveRackBuilder],
    growth: GrowthConfig,
    target: int,
    shape: tuple[int, int],
    make_optimizer: Callable[[Trainable], Optimizer],
    batch: MaskedBatch,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> dict[int, _Probe]:
    """Run a rack of ``shape`` (blocks of the first stack, of each other) forward and backward for
    each stack; count.

    Returns:
        What was counted, by the index of the stack.
    """
    builder = make_builder(shape[0])
    rack = builder.build_rack()
    found = {}
    for index in range(target):
        if index:
            builder.add_stack(n_blocks=shape[1])
        if not growth.enabled and index < target - 1:
            continue
        stage = Stage.enter(builder, growth.trunk_strategy) if growth.enabled else Stage.whole(rack)
        rack.train()
        optimizer = make_optimizer(collect_trainable(rack))
        for _, module in ternary_modules(rack):
            module.undoable = may_refuse(optimizer)
        inputs: dict[str, Any] = {}
        if not stage.uncacheable:
            with torch.no_grad(), autocast():
                inputs = {
                    "hidden": rack.trunk(batch.inputs, stage.position),
                    "from_stack": stage.position,
                }

        def loss(inputs: dict[str, Any] = inputs) -> Tensor:
            with autocast():
                return masked_loss(rack(batch.inputs, **inputs), batch)

        value, activations = kept_for_backward(rack, loss)
        value.backward()  # type: ignore[no-untyped-call]
        memory = measured_memory(rack, optimizer, activations)
        rack.zero_grad()
        for _, module in ternary_modules(rack):
            module.commit_votes()
        trainable = collect_trainable(rack)
        learning = sum(parameter.numel() for parameter in trainable.floats.values())
        learning += sum(
            module.shape.out_features * module.shape.in_features
            for module in trainable.ternary.values()
        )
        learning += sum(module.stored_weights for module in trainable.stored.values())
        counts = {name: value for name, value in asdict(memory).items() if name != "cache"}
        counts |= {"parameters": audit(rack).parameters, "trainable": learning}
        stack = rack.ordered_stacks[stage.position]
        found[index] = _Probe(
            stage.position,
            stack.precision,
            stage.trunk,
            not stage.uncacheable,
            rack.config.width,
            counts,
        )
    return found


def _time(
    growth: GrowthConfig, index: int, target: int, masking: MaskingStrategy | None
) -> tuple[int | None, float | None]:
    """The time step of a stack, and the share of positions that ``masking`` hides at it, where both
    are fixed.
    """
    if growth.time_interpretation == "input":
        return None, None
    step = growth.time_step(index, target)
    time = time_of_step(step, growth.num_time_steps)
    if not isinstance(masking, TimeStepMasking):
        return step, None
    return step, masking.fractions[step_of_time(time, masking.growth.num_time_steps)]
