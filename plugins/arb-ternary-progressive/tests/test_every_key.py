"""Every key of the config has a visible effect: two values of it, and what differs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import nn

from arb_ternary.errors import UsageProblem
from arb_ternary_progressive import (
    ModelConfig,
    ProgressiveConfig,
    ProgressiveRackBuilder,
    ProgressiveTrainer,
    StackWiseConfig,
    TimeStepMasking,
    TrainingConfig,
)
from arb_ternary_text.models.block import Block

SECTIONS: dict[str, type[Any]] = {
    "model": ModelConfig,
    "training": TrainingConfig,
    "progressive": ProgressiveConfig,
}
Observer = Callable[[StackWiseConfig], Any]


def section(config: StackWiseConfig, name: str) -> Any:
    return {
        "model": config.model,
        "training": config.training,
        "progressive": config.training.progressive,
    }[name]


def small(**options: Any) -> StackWiseConfig:
    """A tiny config; an option is ``section__key``."""
    config = StackWiseConfig()
    defaults = {
        "model__vocab_size": 24,
        "model__d_model": 16,
        "model__n_heads": 2,
        "model__max_length": 8,
        "training__steps_per_stack": 2,
        "progressive__blocks_per_stack": 1,
    }
    for name, value in {**defaults, **options}.items():
        where, _, key = name.partition("__")
        setattr(section(config, where), key, value)
    return config


def batches(length: int = 8) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(0, 22, (4, length), generator=generator)} for _ in range(2)]


def digest(module: nn.Module) -> str:
    whole = hashlib.sha256()
    for name, value in module.state_dict().items():
        plain = value.float() if value.is_floating_point() else value
        whole.update(name.encode() + plain.numpy().tobytes())
    return whole.hexdigest()


# --- observers


def grown(config: StackWiseConfig, stacks: int = 2) -> ProgressiveRackBuilder:
    builder = ProgressiveRackBuilder(config)
    for _ in range(stacks):
        builder.add_stack()
    return builder


def structure(config: StackWiseConfig) -> Any:
    """Return the structure of a rack of two stacks."""
    return grown(config).build_rack().structure()


def shapes(config: StackWiseConfig) -> Any:
    """Return names, shapes and dtypes of everything stored."""
    state = grown(config).build_rack().state_dict()
    return [(name, tuple(value.shape), str(value.dtype)) for name, value in state.items()]


def logits(config: StackWiseConfig) -> Any:
    """Return the initial logits of a rack of two stacks."""
    with torch.no_grad():
        return grown(config).build_rack()(torch.arange(8)[None]).flatten().tolist()


def most(config: StackWiseConfig) -> Any:
    """Return the largest possible number of stacks."""
    builder = ProgressiveRackBuilder(config)
    for count in range(5):
        try:
            builder.add_stack()
        except ValueError:
            return count
    return None


def longest(config: StackWiseConfig) -> Any:
    """Return the length of the longest sequence that is accepted."""
    rack = ProgressiveRackBuilder(config).build_rack()
    for length in range(1, 12):
        try:
            rack(torch.zeros(1, length, dtype=torch.int64))
        except UsageProblem:
            return length - 1
    return None


def history(config: StackWiseConfig) -> Any:
    """Return the history of a run to three stacks."""
    builder = ProgressiveRackBuilder(config)
    records = ProgressiveTrainer(config).train_rack(builder, batches(), target_stacks=3)
    return [record.to_json() for record in records]


def weights(config: StackWiseConfig) -> Any:
    """Return a digest of the weights after a run to three stacks."""
    builder = ProgressiveRackBuilder(config)
    ProgressiveTrainer(config).train_rack(builder, batches(), target_stacks=3)
    return digest(builder.build_rack())


def work(config: StackWiseConfig) -> Any:
    """Return how often a block runs in a run to three stacks."""
    count = 0

    def counted(module: nn.Module, *_: Any) -> None:
        nonlocal count
        count += isinstance(module, Block)

    with nn.modules.module.register_module_forward_hook(counted):
        weights(config)
    return count


def files(config: StackWiseConfig) -> Any:
    """Return whether a run leaves files in the cache's folder."""
    weights(config)
    folder = config.training.progressive.cache_folder
    return folder is not None and any(Path(folder).rglob("*"))


def time_steps(config: StackWiseConfig) -> Any:
    """Return the time step of each of four stacks."""
    strategy = TimeStepMasking(config)
    return [strategy.get_time_step_for_stack(stack_idx=stack) for stack in range(4)]


def masks(config: StackWiseConfig) -> Any:
    """Return the masks of the last of two stacks."""
    strategy = TimeStepMasking(config)
    return strategy.generate_masks_for_stack(batches()[0], stack_idx=1).tolist()


def doubled(stack_idx: int, max_stacks: int, num_time_steps: int) -> int:
    """Map a stack to a time step."""
    return min(2 * stack_idx, num_time_steps - 1)


# --- the table: key, two values, what differs, and what else must be set

BORN = {"progressive__zero_residual": False}
ADAPTED = {"progressive__qlora_enabled": True}
STAGED = {**ADAPTED, "progressive__qlora_strategy": "progressive"}
SECOND = {"progressive__progressive_qlora": True}
EPOCHS = {"training__steps_per_stack": None, "training__epochs_per_stack": 2}
TERNARY = {"progressive__new_stack_precision": "ternary"}
INPUT = {"progressive__time_interpretation": "input", "progressive__time_embedding_dim": 4}
FOUR = {"progressive__max_stacks": 4}
HIDING = {"progressive__training_objective": "mlm"}

Row = tuple[Any, Any, Observer, dict[str, Any]]
TABLE: dict[str, Row] = {
    "model.vocab_size": (24, 30, shapes, {}),
    "model.d_model": (16, 32, shapes, {}),
    "model.d_ff": (None, 24, shapes, {}),
    "model.n_heads": (2, 4, logits, BORN),
    "model.max_length": (8, 6, longest, {}),
    "model.causal": (True, False, logits, BORN),
    "training.epochs_per_stack": (1, 2, history, {"training__steps_per_stack": None}),
    "training.steps_per_stack": (2, 3, history, {}),
    "training.lr": (1e-3, 1e-2, weights, {}),
    "training.rate": (0.01, 3.0, weights, TERNARY),
    "progressive.enabled": (True, False, history, {}),
    "progressive.trunk_strategy": ("frozen", "qlora", weights, ADAPTED),
    "progressive.new_stack_precision": ("full", "nvfp4", shapes, ADAPTED),
    "progressive.blocks_per_stack": (1, 2, structure, {}),
    "progressive.max_stacks": (2, 3, most, {}),
    "progressive.building_mode": ("append", "prepend", structure, {}),
    "progressive.zero_residual": (True, False, logits, {}),
    "progressive.qlora_enabled": (True, False, structure, {}),
    "progressive.qlora_rank": (2, 4, shapes, ADAPTED),
    "progressive.qlora_alpha": (2, 4, weights, {**ADAPTED, **BORN}),
    "progressive.qlora_strategy": ("simplified", "progressive", structure, ADAPTED),
    "progressive.qlora_rank_pattern": ("linear", "decreasing", structure, STAGED),
    "progressive.qlora_alpha_pattern": ("constant", "linear", structure, STAGED),
    "progressive.qlora_configs": (
        {0: {"rank": 1, "alpha": 1}, 1: {"rank": 2, "alpha": 1}},
        {0: {"rank": 2, "alpha": 1}, 1: {"rank": 1, "alpha": 1}},
        structure,
        {**ADAPTED, "progressive__qlora_strategy": "variable"},
    ),
    "progressive.qlora_base": (
        "nvfp4",
        "ternary",
        shapes,
        {"progressive__new_stack_precision": "qlora"},
    ),
    "progressive.progressive_qlora": (True, False, structure, {}),
    "progressive.progressive_qlora_rank": (2, 4, shapes, SECOND),
    "progressive.progressive_qlora_alpha": (
        2,
        4,
        weights,
        {**SECOND, **BORN, "progressive__trunk_strategy": "qlora"},
    ),
    "progressive.adapter_dtype": ("float32", "ternary", shapes, ADAPTED),
    "progressive.cache_activations": (True, False, work, EPOCHS),
    "progressive.cache_bytes": (1 << 20, 1024, work, EPOCHS),
    "progressive.cache_folder": (None, "cache", files, {}),
    "progressive.cache_dtype": ("float32", "int8", weights, {}),
    "progressive.training_objective": ("mlm", "clm", weights, {}),
    "progressive.time_interpretation": ("depth", "input", shapes, {}),
    "progressive.time_embedding_dim": (4, 6, shapes, INPUT),
    "progressive.time_encoding_type": ("sinusoidal", "learned", shapes, INPUT),
    "progressive.time_sampling": ("batch", "sample", weights, INPUT),
    "progressive.stack_time_mapping": ("linear", "exponential", time_steps, FOUR),
    "progressive.custom_time_mapping": (
        doubled,
        min,
        time_steps,
        {"progressive__stack_time_mapping": "custom"},
    ),
    "progressive.time_per_stack": (
        1,
        2,
        time_steps,
        {"progressive__stack_time_mapping": "time_per_stack"},
    ),
    "progressive.num_time_steps": (8, 16, time_steps, FOUR),
    "progressive.time_step_fractions": (
        [0.1, 0.2],
        [0.1, 0.8],
        masks,
        {"progressive__num_time_steps": 2, "progressive__max_stacks": 2},
    ),
    "progressive.mask_token_id": (22, 23, weights, HIDING),
    "progressive.seed": (0, 1, weights, {}),
}


def test_the_table_has_every_key() -> None:
    keys = {
        f"{name}.{attribute.name}"
        for name, cls in SECTIONS.items()
        for attribute in attrs.fields(cls)
        if attribute.name != "progressive"
    }
    assert keys == set(TABLE)


@pytest.mark.extended
@pytest.mark.parametrize("key", TABLE)
def test_each_key_has_a_visible_effect(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first, second, observe, options = TABLE[key]
    option = key.replace(".", "__")
    seen = [observe(small(**{**options, option: value})) for value in (first, second)]
    assert seen[0] != seen[1]
    # Two equal runs do not differ.
    assert observe(small(**{**options, option: first})) == seen[0]
