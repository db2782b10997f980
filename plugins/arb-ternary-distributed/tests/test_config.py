"""Distributed training from Python: configs with the names of guides, and the rank of a process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from arb_ternary.config.fields import to_plain
from arb_ternary.errors import ConfigError
from arb_ternary_distributed import (
    DistributedConfig,
    DistributedStrategy,
    get_rank,
    get_world_size,
    is_distributed,
    is_main_process,
)
from arb_ternary_train.config import RunConfig
from arb_ternary_train.loading import load_config

#: As the guide has it; only the package in the import lines is ours.
GUIDE = """
from arb_ternary_distributed import DistributedConfig, DistributedStrategy

dist_config = DistributedConfig(
    strategy=DistributedStrategy.DDP,
    ddp_find_unused_parameters=False,
)

print(dist_config.strategy.name)

dist_config = DistributedConfig(
    strategy=DistributedStrategy.FSDP,
    fsdp_sharding_strategy="FULL_SHARD",
    fsdp_mixed_precision=True,
    fsdp_activation_checkpointing=True,
    fsdp_transformer_layer_cls=["TransformerBlock"],
)

from arb_ternary_distributed import (
    is_distributed,
    get_rank,
    get_world_size,
    is_main_process,
)

if is_main_process():
    print(f"Training on {get_world_size()} GPUs")

print(dist_config.strategy.name, is_distributed(), get_rank(), "torch" in __import__("sys").modules)
"""


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    path = tmp_path / "run.yaml"
    path.write_text(
        "data: shakespeare\nmodel: {name: decoder, width: 32, layers: 1, heads: 2}\noptimizer: "
        "scaled_votes\n"
        "phases: [{name: standard, steps: 2, gradient_accumulation_steps: 4}]\n"
    )
    return load_config(path).config


def differences(config: RunConfig, other: RunConfig) -> dict[str, Any]:
    """Return what differs, of the config and of its only phase."""
    one = to_plain(config, given=False)
    two = to_plain(other, given=False)
    phase = one.pop("phases")[0]
    changed = two.pop("phases")[0]
    return {
        key: new[key]
        for old, new in ((one, two), (phase, changed))
        for key in new
        if old[key] != new[key]
    }


def test_calls_of_the_guide_work_without_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", GUIDE], capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["DDP", "Training on 1 GPUs", "FSDP False 0 False"]


def test_ddp_changes_nothing(config: RunConfig) -> None:
    assert DistributedConfig(ddp_find_unused_parameters=True).applied_to(config) == config


def test_fsdp_sets_options_of_the_run(config: RunConfig) -> None:
    wanted = DistributedConfig(
        strategy=DistributedStrategy.FSDP,
        fsdp_mixed_precision=True,
        fsdp_activation_checkpointing=True,
    )
    found = wanted.applied_to(config)
    assert differences(config, found) == {
        "ranks": {**to_plain(config.ranks), "weights": "sharded"},
        "use_amp": True,
        "activation_checkpointing": True,
    }
    assert {"use_amp", "activation_checkpointing"} <= found.phases[0].given


@pytest.mark.parametrize(
    ("options", "what", "hint"),
    [
        (
            {"fsdp_mixed_precision": True},
            "fsdp_mixed_precision: True has no effect with DistributedStrategy.DDP",
            "",
        ),
        (
            {"strategy": "fsdp", "ddp_find_unused_parameters": True},
            "ddp_find_unused_parameters: True has no",
            "",
        ),
        (
            {"strategy": "fsdp", "fsdp_sharding_strategy": "NO_SHARD"},
            "'NO_SHARD' is not",
            "DistributedStrategy.DDP",
        ),
        (
            {"strategy": "fsdp", "fsdp_sharding_strategy": "HYBRID_SHARD"},
            "'HYBRID_SHARD' is not",
            '"FULL_SHARD"',
        ),
    ],
)
def test_unsupported_options_are_refused(options: dict[str, Any], what: str, hint: str) -> None:
    with pytest.raises(ConfigError) as error:
        DistributedConfig(**options)
    assert what in error.value.what
    assert hint in error.value.hint


def test_rank_and_size_are_known_before_the_group_exists(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert (is_distributed(), get_rank(), get_world_size(), is_main_process()) == (
        False,
        0,
        1,
        True,
    )
    for name, value in {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
    }.items():
        monkeypatch.setenv(name, value)
    assert (is_distributed(), get_rank(), get_world_size(), is_main_process()) == (
        True,
        3,
        4,
        False,
    )


def test_an_initialised_group_precedes_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1
    )
    try:
        monkeypatch.setenv("RANK", "3")
        monkeypatch.setenv("WORLD_SIZE", "4")
        assert (get_rank(), get_world_size()) == (0, 1)
    finally:
        torch.distributed.destroy_process_group()
