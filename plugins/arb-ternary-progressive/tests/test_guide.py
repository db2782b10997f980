"""The usage examples of the guide, unchanged except for their import lines.

What the guide leaves undefined (the data, the size of the model, cached activations) is small here.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from arb_ternary_progressive import ProgressiveRackBuilder, StackWiseConfig
from arb_ternary_progressive.time_embedding import TimeEmbedding

#: The guide's YAML, and the sizes that it leaves to the reader.
CONFIG = """\
model: {vocab_size: 24, d_model: 16, d_ff: 32, n_heads: 2, max_length: 8}
training:
  steps_per_stack: 2
  progressive:
    blocks_per_stack: 1
    enabled: true
    trunk_strategy: "frozen"        # "frozen" or "qlora"
    new_stack_precision: "full"    # "full", "half", "bfloat16", "qlora"
    cache_activations: true

    # Simplified QLoRA configuration
    qlora_enabled: true             # Enable QLoRA adapters on all stacks
    qlora_rank: 16                  # QLoRA rank for all stacks
    qlora_alpha: 32                 # QLoRA alpha parameter
    qlora_strategy: "simplified"    # "simplified" - add LoRA to all stacks

    max_stacks: 12
    building_mode: "append"          # "append" or "prepend"

    # Time interpretation
    time_interpretation: "depth"     # "input" or "depth"
    time_embedding_dim: 512        # For time-as-input
    time_encoding_type: "sinusoidal" # "sinusoidal" or "learned"
    stack_time_mapping: "linear"    # "linear", "exponential", "custom"
    time_per_stack: 100            # For time-as-depth
"""

BUILDER = """
from arb_ternary_progressive import ProgressiveRackBuilder

# Create builder (fully config-driven)
builder = ProgressiveRackBuilder(
    config=config,  # All parameters read from config (including max_stacks)
    building_mode="append",  # or "prepend"
    default_precision="full"
)

# Add stacks progressively with dual-LoRA approach
stack1 = builder.append_stack(n_blocks=4, precision="full")
stack2 = builder.append_stack(n_blocks=4, precision="half")
stack3 = builder.prepend_stack(n_blocks=4, precision="qlora")

# Build final rack
rack = builder.build_rack()
"""

STACK = """
from arb_ternary_progressive import create_stack_from_config

# Create stack using config (no redundant parameters)
stack = create_stack_from_config(
    stack_id=0,
    n_blocks=4,
    config=config  # All parameters read from config
)

# Or use the builder (recommended)
stack = builder.append_stack(n_blocks=4)  # Uses config internally
"""

LOADER = """
from arb_ternary_progressive import ProgressiveDataLoader
from arb_ternary_progressive import TimeStepMasking

# Create masking strategy
masking_strategy = TimeStepMasking(config)

# Create progressive dataloader
progressive_dataloader = ProgressiveDataLoader(
    base_dataloader=dataloader,
    masking_strategy=masking_strategy,
    stack_idx=0,
    trunk_activations=cached_activations,
    cache_activations=True
)
"""

TRAINER = """
from arb_ternary_progressive import ProgressiveTrainer

# Create trainer
trainer = ProgressiveTrainer(config)

# Train progressively
results = trainer.train_progressively(
    rack_builder=builder,
    dataloader=dataloader,
    target_stacks=6
)
"""

TIME_AS_DEPTH = """
from arb_ternary_progressive import TimeStepMasking

# Configuration
config.training.progressive.time_interpretation = "depth"
config.training.progressive.stack_time_mapping = "linear"  # or "exponential"
config.training.progressive.time_per_stack = 100

# Usage
masking_strategy = TimeStepMasking(config)
masks = masking_strategy.generate_masks_for_stack(batch, stack_idx=2)
time_step = masking_strategy.get_time_step_for_stack(stack_idx=2)
"""

EXAMPLE_1 = """
from arb_ternary_progressive import ProgressiveTrainer, ProgressiveRackBuilder
from arb_ternary_progressive import StackWiseConfig

# Load configuration
config = StackWiseConfig.from_yaml("config.yaml")
config.validate()

# Create components
rack_builder = ProgressiveRackBuilder(
    vocab_size=config.model.vocab_size,
    d_model=config.model.d_model,
    d_ff=config.model.d_ff,
    n_heads=config.model.n_heads
)

trainer = ProgressiveTrainer(config)

# Train progressively
results = trainer.train_progressively(
    rack_builder=rack_builder,
    dataloader=dataloader,
    target_stacks=6
)
"""

EXAMPLE_2 = """
from arb_ternary_progressive import ProgressiveTrainer

# Configure for QLoRA trunk
config.training.progressive.trunk_strategy = "qlora"
config.training.progressive.cache_activations = True

# Train with QLoRA trunk
trainer = ProgressiveTrainer(config)
results = trainer.train_rack(rack_builder, dataloader, target_stacks=6)
"""

EXAMPLE_3 = """
from arb_ternary_progressive import ProgressiveTrainer

# Configure for time-as-input
config.training.progressive.time_interpretation = "input"
config.training.progressive.time_encoding_type = "learned"

# Train with time-as-input
trainer = ProgressiveTrainer(config)
results = trainer.train_rack(rack_builder, dataloader, target_stacks=6)
"""

EXAMPLE_4 = {
    "mlm": 'config.training.progressive.training_objective = "mlm"',
    "clm": 'config.training.progressive.training_objective = "clm"',
    "custom": 'config.training.progressive.training_objective = "custom"',
}

EXAMPLE_5 = """
# For CLM, use the provided CLM mask to exclude last position
for batch in progressive_dataloader:
    if batch['training_objective'] == 'clm':
        # Use combined_masks which excludes the last position
        loss_mask = batch['combined_masks']
        # Or use clm_mask for all positions except last
        clm_mask = batch['clm_mask']

        # Compute loss only on valid positions
        loss = compute_loss(logits, targets, loss_mask)
"""

MIXED = """
# Different precision for different stacks
rack_builder.append_stack(precision="full")    # First stack
rack_builder.append_stack(precision="half")    # Second stack
rack_builder.append_stack(precision="qlora")   # Third stack
"""

VARIABLE = """
config.training.progressive.qlora_strategy = "variable"
config.training.progressive.qlora_configs = {
    0: {"rank": 8, "alpha": 16},    # Stack 0: small QLoRA
    1: {"rank": 16, "alpha": 32},  # Stack 1: medium QLoRA
    2: {"rank": 32, "alpha": 64},  # Stack 2: large QLoRA
    3: {"rank": 64, "alpha": 128}  # Stack 3: very large QLoRA
}
"""

PROGRESSIVE = """
config.training.progressive.qlora_strategy = "progressive"
config.training.progressive.qlora_rank_pattern = "increasing"  # 16, 32, 64, 128...
config.training.progressive.qlora_alpha_pattern = "constant"   # 32, 32, 32, 32...
"""

CUSTOM_TIME = """
# Custom time mapping for time-as-depth
def custom_time_mapping(stack_idx, max_stacks, num_time_steps):
    # Custom logic here
    return min(stack_idx * 50, num_time_steps - 1)
"""


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the names that the guide's examples use without defining them."""
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(CONFIG)
    config = StackWiseConfig.from_yaml("config.yaml")
    generator = torch.Generator().manual_seed(0)
    # The last id of the vocabulary is the mask token.
    samples = [{"input_ids": torch.randint(0, 23, (8,), generator=generator)} for _ in range(8)]
    return {
        "config": config,
        "dataloader": DataLoader(samples, batch_size=4),
        "builder": ProgressiveRackBuilder(config),
        "rack_builder": ProgressiveRackBuilder(config),
    }


def run(code: str, names: dict[str, Any]) -> None:
    exec(compile(code, "example", "exec"), names)


def states(builder: ProgressiveRackBuilder) -> dict[int, dict[str, Tensor]]:
    stacks = builder.build_rack().ordered_stacks
    return {
        stack.stack_id: {name: value.clone() for name, value in stack.state_dict().items()}
        for stack in stacks
    }


def check_results(names: dict[str, Any], builder: str = "rack_builder") -> None:
    results = names["results"]
    rack = names[builder].build_rack()
    assert [record.stack_id for record in results] == [0, 1, 2, 3, 4, 5]
    assert [record.steps for record in results] == [2] * 6
    assert all(record.last_loss > 0 for record in results)
    assert len(rack.ordered_stacks) == 6
    assert torch.isfinite(rack(torch.arange(8)[None])).all()


def test_the_builder_builds_as_shown(names: dict[str, Any]) -> None:
    run(BUILDER, names)
    stacks = names["rack"].ordered_stacks
    assert stacks == [names["stack3"], names["stack1"], names["stack2"]]
    assert [stack.precision for stack in stacks] == ["qlora", "full", "half"]
    assert [len(stack.blocks) for stack in stacks] == [4, 4, 4]
    run(STACK, names)
    assert names["stack"] is names["builder"].build_rack().ordered_stacks[-1]


def test_the_dataloader_loads_as_shown(names: dict[str, Any]) -> None:
    names["cached_activations"] = torch.randn(4, 8, 16)
    run(LOADER, names)
    batches = list(names["progressive_dataloader"])
    assert len(batches) == 2
    keys = {
        "input_ids",
        "targets",
        "masks",
        "loss_mask",
        "time_step",
        "stack_idx",
        "trunk_activations",
        "training_objective",
    }
    assert keys <= batches[0].keys()
    assert torch.equal(batches[0]["trunk_activations"], names["cached_activations"])
    assert batches[0]["masks"].sum(dim=1).tolist() == [1] * 4  # floor(0.15 * 8)


def test_the_trainer_trains_as_shown(names: dict[str, Any]) -> None:
    run(TRAINER, names)
    check_results(names, "builder")


def test_time_as_depth_works_as_shown(names: dict[str, Any]) -> None:
    names["batch"] = next(iter(names["dataloader"]))
    run(TIME_AS_DEPTH, names)
    # Twelve stacks over eight steps: 2 * 7 // 11.
    assert names["time_step"] == 1
    assert names["masks"].dtype == torch.bool
    assert names["masks"].sum(dim=1).tolist() == [2] * 4  # floor(0.25 * 8)


def test_example_1_basic_progressive_training(names: dict[str, Any]) -> None:
    del names["config"]
    run(EXAMPLE_1, names)
    check_results(names)
    assert [record.trunk for record in names["results"]] == ["none", *["frozen"] * 5]
    assert [record.time_step for record in names["results"]] == [0, 1, 2, 4, 5, 7]


def test_example_2_qlora_trunk_training(
    names: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    run(EXAMPLE_2, names)
    check_results(names)
    assert [record.trunk for record in names["results"]] == ["none", *["qlora"] * 5]
    assert "the activation cache is not used" in caplog.text
    rack = names["rack_builder"].build_rack()
    assert all(set(stack.adapters) == {"stack"} for stack in rack.ordered_stacks)


def test_example_3_time_as_input_training(names: dict[str, Any]) -> None:
    run(EXAMPLE_3, names)
    check_results(names)
    assert [record.time_step for record in names["results"]] == [None] * 6
    embedding = names["rack_builder"].build_rack().time_embedding
    assert isinstance(embedding, TimeEmbedding)
    assert (embedding.kind, embedding.dim) == ("learned", 512)


@pytest.mark.parametrize("objective", ["mlm", "clm", "custom"])
def test_example_4_different_training_objectives(names: dict[str, Any], objective: str) -> None:
    run(EXAMPLE_4[objective], names)
    if objective == "custom":
        # Targets must be provided in the batch.
        names["dataloader"] = [
            {**batch, "targets": 22 - batch["input_ids"]} for batch in names["dataloader"]
        ]
    names["cached_activations"] = None
    run(LOADER.replace("cache_activations=True", "cache_activations=False"), names)
    batch = next(iter(names["progressive_dataloader"]))
    raw = next(iter(names["dataloader"]))
    clean = raw["input_ids"]
    if objective == "mlm":
        assert torch.equal(batch["targets"], clean)
        assert torch.equal(batch["loss_mask"], batch["masks"])
    elif objective == "clm":
        assert torch.equal(batch["targets"][:, :-1], clean[:, 1:])
        assert torch.equal(batch["targets"][:, -1], clean[:, -1])
    else:
        assert torch.equal(batch["targets"], 22 - clean)
    run(TRAINER.replace("target_stacks=6", "target_stacks=2"), names)
    assert len(names["results"]) == 2
    assert names["builder"].build_rack().config.causal == (objective == "clm")


def test_example_5_handling_clm_limitations(names: dict[str, Any]) -> None:
    names["config"].training.progressive.training_objective = "clm"
    names["cached_activations"] = None
    run(LOADER.replace("cache_activations=True", "cache_activations=False"), names)
    names["logits"] = torch.randn(4, 8, 24)
    names["targets"] = torch.randint(0, 23, (4, 8))
    seen: list[Tensor] = []

    def compute_loss(logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
        seen.append(mask)
        return torch.nn.functional.cross_entropy(logits[mask], targets[mask])

    names["compute_loss"] = compute_loss
    run(EXAMPLE_5, names)
    assert len(seen) == 2
    assert not names["clm_mask"][:, -1].any()
    assert names["clm_mask"][:, :-1].all()
    assert all(not mask[:, -1].any() for mask in seen)
    assert torch.isfinite(names["loss"])


def test_mixed_precision_training(names: dict[str, Any]) -> None:
    run(MIXED, names)
    stacks = names["rack_builder"].build_rack().ordered_stacks
    assert [stack.precision for stack in stacks] == ["full", "half", "qlora"]


@pytest.mark.parametrize(
    ("code", "ranks"), [(VARIABLE, [8, 16, 32, 64]), (PROGRESSIVE, [16, 32, 64, 128])]
)
def test_per_stack_configurations(names: dict[str, Any], code: str, ranks: list[int]) -> None:
    run(code, names)
    found = [names["rack_builder"].append_stack().adapters["stack"] for _ in range(4)]
    assert [spec.rank for spec in found] == ranks
    assert [spec.alpha for spec in found] == ([16, 32, 64, 128] if code == VARIABLE else [32] * 4)


def test_a_custom_time_mapping(names: dict[str, Any]) -> None:
    run(CUSTOM_TIME, names)
    progressive = names["config"].training.progressive
    progressive.stack_time_mapping = "custom"
    progressive.num_time_steps = 120
    progressive.custom_time_mapping = names["custom_time_mapping"]
    names["batch"] = next(iter(names["dataloader"]))
    run(
        TIME_AS_DEPTH.replace('stack_time_mapping = "linear"', 'stack_time_mapping = "custom"'),
        names,
    )
    assert names["time_step"] == 100


def test_each_stack_learns_in_turn_on_a_frozen_trunk(names: dict[str, Any]) -> None:
    seen: list[dict[int, dict[str, Tensor]]] = []
    from arb_ternary_progressive import ProgressiveTrainer

    builder = names["rack_builder"]
    trainer = ProgressiveTrainer(names["config"], on_step=lambda *_: seen.append(states(builder)))
    trainer.train_rack(builder, names["dataloader"], target_stacks=3)
    for earlier, later in itertools.pairwise(seen):
        newest = max(later)
        for stack_id, state in earlier.items():
            same = all(torch.equal(state[name], later[stack_id][name]) for name in state)
            assert same == (stack_id != newest)
