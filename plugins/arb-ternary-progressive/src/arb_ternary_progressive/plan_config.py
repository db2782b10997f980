"""The plan of a config file: of a run with the phase ``progressive``, or of training in Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
from arb_ternary_progressive.config import ProgressivePhaseConfig, block_options
from arb_ternary_progressive.hidden_codec import HiddenCodec
from arb_ternary_progressive.masking import TimeStepMasking
from arb_ternary_progressive.plan import CacheNeed, StagePlan, plan_growth, tokens_like
from arb_ternary_progressive.precision import native_precision
from arb_ternary_progressive.stackwise import StackWiseConfig
from arb_ternary_progressive.trainer import default_optimizer
from arb_ternary_text.models.transformer import Transformer
from arb_ternary_train.build import build_model, configured_backend, require_protocol
from arb_ternary_train.capabilities import parts_added_by
from arb_ternary_train.config import RunConfig
from arb_ternary_train.loading import load_config
from arb_ternary_train.precision import autocast_for, resolve_device
from arb_ternary_train.protocols import SizedSamples


def plan_file(path: Path, overrides: tuple[str, ...] = (), **shape: int | None) -> list[StagePlan]:
    """The plan of the config in ``path``.

    Args:
        path: a config of ``arb train``, or one of ``StackWiseConfig``: with a section ``training``
            and no phases.
        overrides: ``path=value`` each.
        shape: see :func:`plan_python`; for the latter only.

    Raises:
        ConfigError: the config is wrong, grows nothing, or says itself what ``shape`` says.
    """
    sections = read_document(path).data
    if "phases" not in sections and "training" in sections:
        config = StackWiseConfig.from_yaml(path, overrides)
        config.validate()
        return plan_python(
            config, **{name: value for name, value in shape.items() if value is not None}
        )
    given = [f"--{name.replace('_', '-')}" for name, value in shape.items() if value is not None]
    if given:
        raise ConfigError(
            f"{path}: the config of a run says itself what {', '.join(given)} would say",
            "Use -o phases.0...=VALUE.",
        )
    return plan_run(load_config(path, overrides).config)


def plan_run(config: RunConfig) -> list[StagePlan]:
    """The plan of the first phase ``progressive`` of a run; the data is read, to know its
    vocabulary and its length.

    Raises:
        ConfigError: there is no such phase, or the model is none that can grow.
    """
    phase = next(
        (each for each in config.phases if isinstance(each.options, ProgressivePhaseConfig)), None
    )
    if phase is None:
        names = ", ".join(each.name for each in config.phases)
        raise ConfigError(
            f"phases: none of them is progressive; they are {names}", "There is nothing to plan."
        )
    options: Any = phase.options
    data: DataSource = require_protocol(config.data.build(), DataSource, config.data)
    vocabulary = data.vocabulary_size
    layers = getattr(config.model.options, "layers", 1)
    native = native_precision(getattr(config.model.options, "float_parts", ()))
    device = resolve_device("cpu")
    selection = select(request_backend(config=configured_backend(config), device=device.type))

    def make_builder(first_blocks: int) -> ProgressiveRackBuilder:
        small = attrs.evolve(
            config.model, options=attrs.evolve(config.model.options, layers=first_blocks)
        )
        model = build_model(attrs.evolve(config, model=small), vocabulary, selection.name, device)
        if not (isinstance(model, Transformer) and model.grows):
            raise ConfigError(
                "model: the phase progressive grows models that are a decoder's blocks between an "
                f"embedding and a head; a {type(model).__name__} is not"
            )
        builder = ProgressiveRackBuilder.from_model(model, options)
        builder.build_rack().set_activation_checkpointing(
            options.activation_checkpointing, options.activation_checkpoint_threshold
        )
        return builder

    def make_optimizer(trainable: Trainable) -> Optimizer:
        later = parts_added_by(config.phases[config.phases.index(phase) :])
        return build_optimizer("optimizer", config.optimizer, attrs.evolve(trainable, later=later))

    windows = data.samples_per_epoch(options.block_size)
    batch = tokens_like(options.batch_size, options.block_size)
    positions = options.block_size
    blocks = block_options(config.model.options)
    if isinstance(data, SizedSamples) and blocks is not None:
        batch = _first_batch(config, data, options.batch_size)
        positions = blocks.max_length
    cache = None
    if options.cache_activations:
        cache = CacheNeed(
            _seen(options, windows), options.cache_bytes, HiddenCodec(options.cache_dtype)
        )
    new = options.blocks_per_stack or layers
    with use_backend(selection.name):
        return plan_growth(
            make_builder,
            options,
            [layers, *[new] * (options.target_stacks - 1)],
            make_optimizer=make_optimizer,
            batch=batch,
            positions=positions,
            cache=cache,
            trained_from=0 if options.train_first else 1,
            masking=config.masking.build(),
            autocast=autocast_for(
                device, options.use_amp, options.amp_dtype, ternary=native == "ternary"
            ),
        )


def plan_python(
    config: StackWiseConfig,
    *,
    target_stacks: int | None = None,
    batch_size: int = 16,
    block_size: int = 128,
    samples: int | None = None,
) -> list[StagePlan]:
    """The plan of a training by ``ProgressiveTrainer`` with its default optimizer.

    Args:
        config: model and training.
        target_stacks: stacks of the finished rack; None = ``max_stacks``.
        batch_size: samples in a batch of the dataloader.
        block_size: positions of a sample.
        samples: in the dataloader; None = as many as the cache could hold.
    """
    progressive = config.training.progressive
    training = config.training
    target = progressive.max_stacks if target_stacks is None else target_stacks

    def make_builder(first_blocks: int) -> ProgressiveRackBuilder:
        builder = ProgressiveRackBuilder(config)
        builder.add_stack(n_blocks=first_blocks)
        return builder

    cache = None
    if progressive.cache_activations:
        held = progressive.cache_bytes if samples is None else samples
        cache = CacheNeed(held, progressive.cache_bytes, HiddenCodec(progressive.cache_dtype))
    return plan_growth(
        make_builder,
        progressive,
        [progressive.blocks_per_stack] * target,
        make_optimizer=default_optimizer(training.lr, training.rate),
        batch=tokens_like(batch_size, block_size),
        positions=block_size,
        cache=cache,
        masking=TimeStepMasking(config),
    )


def _first_batch(config: RunConfig, data: DataSource, batch_size: int) -> MaskedBatch:
    """A micro-batch of samples that are no token ids."""
    batches = data.batches(BatchRequest(batch_size, 1, config.seed))
    try:
        masking: MaskingStrategy = config.masking.build()
        context = MaskContext(step=0, seed=config.seed, vocabulary_size=data.vocabulary_size)
        return masking.apply(next(batches), torch.Generator(), context)
    finally:
        batches.close()


def _seen(options: ProgressivePhaseConfig, windows: int) -> int:
    """Distinct samples that the training of a stack reads: no more than its steps draw."""
    if options.steps_per_stack is None:
        return windows
    drawn = options.steps_per_stack * options.batch_size * options.gradient_accumulation_steps
    return min(windows, drawn)
