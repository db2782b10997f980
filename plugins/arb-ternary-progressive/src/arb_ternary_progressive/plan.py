"""Plan a growing rack: shape, trained parameters and memory of each stack before a run.

Bytes are counted, not estimated. A rack with one block per stack, and racks with one block more,
are built, frozen and run forward and backward like the run does it, with its batch and its block
size. Nothing is trained: the optimizer is made and reports what it will keep, but never steps.
Weights, gradients, optimizer state and saved activations all grow linearly with the number of
blocks, so a few counts give the rest. The rack itself is never built.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import attrs
import torch
from attrs import asdict, frozen
from torch import Tensor, nn

from arb_ternary.backends.select import request_backend, select, use_backend
from arb_ternary.config.choice import PhaseChoice
from arb_ternary.errors import ConfigError
from arb_ternary.optim.protocol import (
    build_optimizer,
    collect_trainable,
    may_refuse,
)
from arb_ternary.protocols.data import (
    BatchRequest,
    DataSource,
    MaskContext,
    MaskedBatch,
    MaskingStrategy,
)
from arb_ternary.ternary.models import ternary_modules
from arb_ternary_progressive.builder import ProgressiveRackBuilder
from arb_ternary_progressive.config import ProgressivePhaseConfig
from arb_ternary_progressive.growth import Stage
from arb_ternary_progressive.masking import TimeStepMasking
from arb_ternary_progressive.phase import as_growable
from arb_ternary_progressive.precision import native_precision
from arb_ternary_progressive.rack import Rack
from arb_ternary_progressive.stack import count_learning
from arb_ternary_progressive.time import step_of_time, time_of_step
from arb_ternary_train.activation_cache import encode
from arb_ternary_train.audit import audit
from arb_ternary_train.build import build_model, configured_backend, require_protocol
from arb_ternary_train.capabilities import parts_added_by
from arb_ternary_train.config import RunConfig
from arb_ternary_train.evaluate import masked_loss
from arb_ternary_train.optim.planned_state import planned_state_bytes
from arb_ternary_train.precision import autocast_for, resolve_device
from arb_ternary_train.protocols import SizedSamples


@frozen
class Memory:
    """Bytes of a rack in training.

    Attributes:
        weights: parameters and buffers: weights, exponents, accumulators.
        gradients: gradients of float parameters, and the working memory of ternary modules within a
            step, votes that may be undone included.
        optimizer: state of the optimizer.
        activations: tensors that the backward pass of one micro-batch needs.
        cache: hidden states of the trunk in the activation cache.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    cache: int

    @property
    def total(self) -> int:
        """The sum of all."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.cache


@frozen(kw_only=True)
class StagePlan:
    """The planned training of one stack.

    Attributes:
        index: index of the stack in the order of building.
        position: place of the stack in the order of computation, while it is trained.
        blocks: blocks of the stack.
        depth: blocks of the rack.
        precision: format of the stack.
        trunk: what learns in the trunk: none, frozen or qlora.
        time_step: time step of the stack; None if time is an input.
        hidden_share: share of hidden positions at that step; None if it is not fixed, or if the
            masking does not depend on time.
        parameters: learnable numbers of the rack, frozen ones included.
        trainable: those of them that learn now.
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
        """Return plain numbers and strings."""
        return {**asdict(self), "memory": {**asdict(self.memory), "total": self.memory.total}}


class GrowthPlan:
    """The plan of the first phase ``progressive`` of a run.

    The data is read for its vocabulary and its length.

    Raises:
        ConfigError: there is no such phase, or the model cannot grow.
    """

    def __init__(self, config: RunConfig) -> None:
        phase = _growing_phase(config)
        self._config = config
        self._phases = config.phases[config.phases.index(phase) :]
        self.growth: ProgressivePhaseConfig = phase.options
        self._data: DataSource = require_protocol(config.data.build(), DataSource, config.data)
        self._masking: MaskingStrategy = config.masking.build()
        self._device = resolve_device("cpu")
        self._selection = select(
            request_backend(config=configured_backend(config), device=self._device.type)
        )
        layers = getattr(config.model.options, "layers", 1)
        new_blocks = self.growth.blocks_per_stack or layers
        self.blocks = [layers] + [new_blocks] * (self.growth.target_stacks - 1)
        self._batch = self._micro_batch()
        native = native_precision(getattr(config.model.options, "float_parts", ()))
        self._autocast = autocast_for(
            self._device,
            self.growth.use_amp,
            self.growth.amp_dtype,
            ternary=native == "ternary",
        )

    @property
    def trained(self) -> range:
        """The stacks that have a plan; only the last if all are trained at once."""
        count = len(self.blocks)
        return range(int(not self.growth.train_first) if self.growth.enabled else count - 1, count)

    def stages(self) -> list[StagePlan]:
        """Return the plan of each stack, in the order of building."""
        with use_backend(self._selection.name):
            base = self._probe(1, 1)
            deeper_first = self._probe(2, 1)
            deeper_rest = self._probe(1, 2)
        stages = []
        for index in self.trained:
            probe = base[index]
            # Every stack after the first has the same number of blocks.
            more_in_first = self.blocks[0] - 1
            more_in_rest = self.blocks[index] - 1 if index else 0
            counts = _Counts._make(
                at_one + (with_first - at_one) * more_in_first + (with_rest - at_one) * more_in_rest
                for at_one, with_first, with_rest in zip(
                    probe.counts, deeper_first[index].counts, deeper_rest[index].counts, strict=True
                )
            )
            time_step, share = self._time(index)
            stages.append(
                StagePlan(
                    index=index,
                    position=probe.stage.position,
                    blocks=self.blocks[index],
                    depth=sum(self.blocks[: index + 1]),
                    precision=probe.precision,
                    trunk=probe.stage.trunk,
                    time_step=time_step,
                    hidden_share=share,
                    parameters=counts.parameters,
                    trainable=counts.trainable,
                    memory=Memory(
                        counts.weights,
                        counts.gradients,
                        counts.optimizer,
                        counts.activations,
                        self._cached_bytes(probe.stage),
                    ),
                )
            )
        return stages

    def _probe(self, first_blocks: int, other_blocks: int) -> dict[int, _Probe]:
        """Build a small rack and count for each trained stack, by its index."""
        builder = self._make_builder(first_blocks)
        rack = builder.build_rack()
        probes = {}
        for index in range(len(self.blocks)):
            if index:
                builder.add_stack(n_blocks=other_blocks)
            if not self.growth.enabled and index not in self.trained:
                continue
            if self.growth.enabled:
                stage = Stage.enter(builder, self.growth.trunk_strategy)
            else:
                stage = Stage.whole(rack)
            probes[index] = _Probe(stage, stage.stack.precision, self._count(stage))
        return probes

    def _count(self, stage: Stage) -> _Counts:
        """Run a micro-batch forward and backward, and count."""
        rack = stage.rack
        rack.train()
        trainable = collect_trainable(rack)
        optimizer = build_optimizer(
            "optimizer",
            self._config.optimizer,
            attrs.evolve(trainable, later=parts_added_by(self._phases)),
        )
        for _, module in ternary_modules(rack):
            module.undoable = may_refuse(optimizer)

        inputs: dict[str, Any] = {}
        if not stage.uncacheable:
            with torch.no_grad(), self._autocast():
                hidden_BSD = rack.trunk(self._batch.inputs, stage.position)
            inputs = {"hidden": hidden_BSD, "from_stack": stage.position}

        def forward() -> Tensor:
            with self._autocast():
                return masked_loss(rack(self._batch.inputs, **inputs), self._batch)

        loss, activations = kept_for_backward(rack, forward)
        loss.backward()  # type: ignore[no-untyped-call]
        weights, gradients = _stored_bytes(rack)
        counts = _Counts(
            weights=weights,
            gradients=gradients,
            optimizer=planned_state_bytes(optimizer),
            activations=activations,
            parameters=audit(rack).parameters,
            trainable=count_learning(rack),
        )
        rack.zero_grad()
        for _, module in ternary_modules(rack):
            module.commit_votes()
        return counts

    def _time(self, index: int) -> tuple[int | None, float | None]:
        """Return the time step of a stack and its share of hidden positions, if they are fixed."""
        growth = self.growth
        if growth.time_interpretation == "input":
            return None, None
        step = growth.time_step(index, len(self.blocks))
        masking = self._masking
        if not isinstance(masking, TimeStepMasking):
            return step, None
        time = time_of_step(step, growth.num_time_steps)
        return step, masking.fractions[step_of_time(time, masking.growth.num_time_steps)]

    # --- the run

    def _make_builder(self, first_blocks: int) -> ProgressiveRackBuilder:
        """Return a builder whose rack has a first stack of ``first_blocks`` blocks."""
        config = self._config
        options = attrs.evolve(config.model.options, layers=first_blocks)
        small = attrs.evolve(config, model=attrs.evolve(config.model, options=options))
        model = build_model(small, self._data.vocabulary_size, self._selection.name, self._device)
        builder = ProgressiveRackBuilder.from_model(as_growable(model), self.growth)
        builder.build_rack().set_activation_checkpointing(
            self.growth.activation_checkpointing, self.growth.activation_checkpoint_threshold
        )
        return builder

    def _micro_batch(self) -> MaskedBatch:
        """Return a micro-batch of the run."""
        growth = self.growth
        config = self._config
        if not isinstance(self._data, SizedSamples):
            # Values of token ids do not matter for a plan.
            tokens_BS = torch.zeros(growth.batch_size, growth.block_size, dtype=torch.int64)
            return MaskedBatch(tokens_BS, tokens_BS, torch.ones_like(tokens_BS, dtype=torch.bool))
        # Samples that are not token ids, such as images: only the data knows their shape.
        batches = self._data.batches(BatchRequest(growth.batch_size, 1, config.seed))
        try:
            context = MaskContext(
                step=0, seed=config.seed, vocabulary_size=self._data.vocabulary_size
            )
            return self._masking.apply(next(batches), torch.Generator(), context)
        finally:
            batches.close()

    def _cached_bytes(self, stage: Stage) -> int:
        """Return the bytes of the samples that a stack reads and the cache can hold."""
        growth = self.growth
        if stage.uncacheable or not growth.cache_activations:
            return 0
        samples = self._data.samples_per_epoch(growth.block_size)
        if growth.steps_per_stack is not None:
            step = growth.batch_size * growth.gradient_accumulation_steps
            samples = min(samples, growth.steps_per_stack * step)
        model = stage.rack.config
        sized = isinstance(self._data, SizedSamples)
        positions = model.max_length if sized else growth.block_size
        stored = encode(torch.zeros(positions, model.width), growth.cache_dtype)
        sample = sum(tensor.nbytes for tensor in stored.values())
        return min(samples, growth.cache_bytes // sample) * sample


class _Counts(NamedTuple):
    """Numbers that grow linearly with the blocks of a rack; see :class:`Memory`."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    parameters: int
    trainable: int


@frozen
class _Probe:
    """The counts of one stack of a small rack. Later stacks change the rack of ``stage``."""

    stage: Stage
    precision: str
    counts: _Counts


def _stored_bytes(rack: Rack) -> tuple[int, int]:
    """Return the bytes of weights and of gradients; shared tensors count once."""
    weights = {id(tensor): tensor.nbytes for tensor in (*rack.parameters(), *rack.buffers())}
    gradients = 0
    for parameter in rack.parameters():
        if parameter.grad is not None:
            gradients += parameter.grad.nbytes
    for _, module in ternary_modules(rack):
        for tensor in module.working_memory():
            # Accumulators of 2 bits are working memory and a buffer.
            if id(tensor) not in weights:
                gradients += tensor.nbytes
        gradients += sum(tensor.nbytes for tensor in (module.kept_votes or {}).values())
    return sum(weights.values()), gradients


def kept_for_backward(rack: nn.Module, forward: Callable[[], Tensor]) -> tuple[Tensor, int]:
    """Return the result of ``forward`` and the bytes that autograd keeps for its backward pass.

    Weights do not count.
    """
    own = {tensor.untyped_storage().data_ptr() for tensor in (*rack.parameters(), *rack.buffers())}
    kept: dict[int, int] = {}
    alive: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
            # Its address must not be given to another tensor.
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    return result, sum(kept.values())


def _growing_phase(config: RunConfig) -> PhaseChoice:
    for phase in config.phases:
        if isinstance(phase.options, ProgressivePhaseConfig):
            return phase
    names = ", ".join(phase.name for phase in config.phases)
    raise ConfigError(
        f"phases: none of them is progressive; they are {names}", "There is nothing to plan."
    )
