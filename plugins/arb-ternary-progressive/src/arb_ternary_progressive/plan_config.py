"""Plan the growth that a config file describes: of a run, or of training in Python."""

from __future__ import annotations

from pathlib import Path

import attrs
import torch
from torch.optim import Optimizer

from arb_ternary.backends.select import request_backend, select, use_backend
from arb_ternary.config.loading import read_document
from arb_ternary.errors import ConfigError
from arb_ternary.optim.protocol import Trainable, build_optimizer
from arb_ternary.protocols.data import (
    BatchRequest,
    DataSource,
    MaskContext,
    MaskedBatch,
    MaskingStrategy,
)
from arb_ternary_progressive.builder import ProgressiveRackBuilder
from arb_ternary_progressive.config import GrowthConfig, ProgressivePhaseConfig, block_options
from arb_ternary_progressive.hidden_codec import HiddenCodec
from arb_ternary_progressive.masking import TimeStepMasking
from arb_ternary_progressive.phase import as_growable
from arb_ternary_progressive.plan import CacheNeed, GrowthPlan, StagePlan, tokens_like
from arb_ternary_progressive.precision import native_precision
from arb_ternary_progressive.stackwise import StackWiseConfig
from arb_ternary_progressive.trainer import default_optimizer
from arb_ternary_train.build import build_model, configured_backend, require_protocol
from arb_ternary_train.capabilities import parts_added_by
from arb_ternary_train.config import RunConfig
from arb_ternary_train.loading import load_config
from arb_ternary_train.precision import autocast_for, resolve_device
from arb_ternary_train.protocols import SizedSamples


def plan_file(path: Path, overrides: tuple[str, ...] = (), **shape: int | None) -> list[StagePlan]:
    """Return the plan of the config in ``path``.

    Args:
        path: a config of ``arb train``, or one of ``StackWiseConfig``: with a section ``training``
            and no phases.
        overrides: ``path=value`` each.
        shape: arguments of :func:`plan_python`, for a config of training in Python only.

    Raises:
        ConfigError: the config is wrong, grows nothing, or states itself what ``shape`` states.
    """
    given = {name: value for name, value in shape.items() if value is not None}
    sections = read_document(path).data
    if "phases" not in sections and "training" in sections:
        config = StackWiseConfig.from_yaml(path, overrides)
        config.validate()
        return plan_python(config, **given)
    if given:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ConfigError(
            f"{path}: {options} cannot be used, because the config of a run has its own values",
            "Use -o phases.0...=VALUE.",
        )
    return plan_run(load_config(path, overrides).config)


def plan_run(config: RunConfig) -> list[StagePlan]:
    """Return the plan of the first phase ``progressive`` of a run.

    The data is read for its vocabulary and its length.

    Raises:
        ConfigError: there is no such phase, or the model cannot grow.
    """
    growing = [each for each in config.phases if isinstance(each.options, ProgressivePhaseConfig)]
    if not growing:
        names = ", ".join(each.name for each in config.phases)
        raise ConfigError(
            f"phases: none of them is progressive; they are {names}", "There is nothing to plan."
        )
    phase = growing[0]
    options: ProgressivePhaseConfig = phase.options
    data: DataSource = require_protocol(config.data.build(), DataSource, config.data)
    layers = getattr(config.model.options, "layers", 1)
    native = native_precision(getattr(config.model.options, "float_parts", ()))
    device = resolve_device("cpu")
    selection = select(request_backend(config=configured_backend(config), device=device.type))

    def make_builder(first_blocks: int) -> ProgressiveRackBuilder:
        model_options = attrs.evolve(config.model.options, layers=first_blocks)
        small = attrs.evolve(config, model=attrs.evolve(config.model, options=model_options))
        model = build_model(small, data.vocabulary_size, selection.name, device)
        builder = ProgressiveRackBuilder.from_model(as_growable(model), options)
        builder.build_rack().set_activation_checkpointing(
            options.activation_checkpointing, options.activation_checkpoint_threshold
        )
        return builder

    def make_optimizer(trainable: Trainable) -> Optimizer:
        later = parts_added_by(config.phases[config.phases.index(phase) :])
        return build_optimizer("optimizer", config.optimizer, attrs.evolve(trainable, later=later))

    batch, positions = _micro_batch(config, options, data)
    new_blocks = options.blocks_per_stack or layers
    plan = GrowthPlan(
        make_builder=make_builder,
        growth=options,
        blocks=[layers] + [new_blocks] * (options.target_stacks - 1),
        make_optimizer=make_optimizer,
        batch=batch,
        positions=positions,
        cache=_cache_need(options, _samples_read(options, data)),
        trained_from=0 if options.train_first else 1,
        masking=config.masking.build(),
        autocast=autocast_for(
            device, options.use_amp, options.amp_dtype, ternary=native == "ternary"
        ),
    )
    with use_backend(selection.name):
        return plan.stages()


def plan_python(
    config: StackWiseConfig,
    *,
    target_stacks: int | None = None,
    batch_size: int = 16,
    block_size: int = 128,
    samples: int | None = None,
) -> list[StagePlan]:
    """Return the plan of a training by ``ProgressiveTrainer`` with its default optimizer.

    Args:
        config: model and training.
        target_stacks: stacks of the finished rack; None = ``max_stacks``.
        batch_size: samples in a batch of the dataloader.
        block_size: positions of a sample.
        samples: samples in the dataloader; None = as many as the cache can hold.
    """
    training = config.training
    progressive = training.progressive

    def make_builder(first_blocks: int) -> ProgressiveRackBuilder:
        builder = ProgressiveRackBuilder(config)
        builder.add_stack(n_blocks=first_blocks)
        return builder

    stacks = progressive.max_stacks if target_stacks is None else target_stacks
    return GrowthPlan(
        make_builder=make_builder,
        growth=progressive,
        blocks=[progressive.blocks_per_stack] * stacks,
        make_optimizer=default_optimizer(training.lr, training.rate),
        batch=tokens_like(batch_size, block_size),
        positions=block_size,
        cache=_cache_need(progressive, samples),
        masking=TimeStepMasking(config),
    ).stages()


def _cache_need(growth: GrowthConfig, samples: int | None) -> CacheNeed | None:
    """Return the demand on the cache; without ``samples`` it is filled."""
    if not growth.cache_activations:
        return None
    # A sample has more than one byte.
    held = growth.cache_bytes if samples is None else samples
    return CacheNeed(held, growth.cache_bytes, HiddenCodec(growth.cache_dtype))


def _micro_batch(
    config: RunConfig, options: ProgressivePhaseConfig, data: DataSource
) -> tuple[MaskedBatch, int]:
    """Return a micro-batch of the run, and the positions of a sample in the residual stream."""
    blocks = block_options(config.model.options)
    if blocks is None or not isinstance(data, SizedSamples):
        return tokens_like(options.batch_size, options.block_size), options.block_size
    # Samples that are not token ids, such as images: only the data knows their shape.
    batches = data.batches(BatchRequest(options.batch_size, 1, config.seed))
    try:
        masking: MaskingStrategy = config.masking.build()
        context = MaskContext(step=0, seed=config.seed, vocabulary_size=data.vocabulary_size)
        batch = masking.apply(next(batches), torch.Generator(), context)
    finally:
        batches.close()
    return batch, blocks.max_length


def _samples_read(options: ProgressivePhaseConfig, data: DataSource) -> int:
    """Return how many distinct samples the training of a stack reads at most."""
    samples = data.samples_per_epoch(options.block_size)
    if options.steps_per_stack is None:
        return samples
    drawn = options.steps_per_stack * options.batch_size * options.gradient_accumulation_steps
    return min(samples, drawn)
