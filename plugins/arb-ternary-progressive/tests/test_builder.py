"""The builder: returned stacks, positions, adapters, learning, files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from torch import nn

from arb_ternary.errors import ArbError, CheckpointError, ConfigError, UsageProblem
from arb_ternary.optim.protocol import Trainable, collect_trainable
from arb_ternary_progressive import (
    AdapterSpec,
    ModelConfig,
    ProgressiveConfig,
    ProgressiveRackBuilder,
    StackWiseConfig,
    create_stack_from_config,
)
from arb_ternary_progressive.time_embedding import TimeEmbedding
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_train.exact_arithmetic import exact_arithmetic
from arb_ternary_train.optim.adamw import build as adamw
from arb_ternary_train.optim.config import AdamWConfig
from arb_ternary_train.update import ternary_update
from arb_ternary_votes.config import SignVotesConfig
from arb_ternary_votes.sign_votes import build as sign_votes


def config_with(**options: Any) -> StackWiseConfig:
    config = StackWiseConfig(model=ModelConfig(vocab_size=20, d_model=32, n_heads=2, max_length=16))
    config.training.progressive.blocks_per_stack = 1
    for key, value in options.items():
        setattr(config.training.progressive, key, value)
    return config


def builder_with(**options: Any) -> ProgressiveRackBuilder:
    return ProgressiveRackBuilder(config_with(**options))


def tokens() -> torch.Tensor:
    return torch.randint(0, 20, (2, 7), generator=torch.Generator().manual_seed(0))


def snapshot(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


def train(rack: nn.Module, steps: int = 4) -> None:
    """Take a few steps on everything that learns."""
    trainable = collect_trainable(rack)
    votes = sign_votes(SignVotesConfig(accum_threshold=1), trainable) if trainable.ternary else None
    floats = None
    if trainable.floats:
        floats = adamw(AdamWConfig(lr=0.01), Trainable(floats=trainable.floats))
    for step in range(steps):
        ids = torch.randint(0, 20, (4, 9), generator=torch.Generator().manual_seed(step))
        logits = rack(ids[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        if floats is not None:
            floats.zero_grad()
        if votes is not None:
            ternary_update(rack, votes, loss)
        else:
            loss.backward()
        if floats is not None:
            floats.step()


# --- where stacks go


def test_new_stacks_are_returned_with_stable_ids() -> None:
    builder = ProgressiveRackBuilder(
        config=config_with(), building_mode="append", default_precision="full"
    )
    first = builder.append_stack(n_blocks=2, precision="full")
    second = builder.append_stack(n_blocks=1, precision="half")
    third = builder.prepend_stack(n_blocks=3, precision="qlora")
    rack = builder.build_rack()
    assert rack.ordered_stacks == [third, first, second]
    assert [stack.stack_id for stack in (first, second, third)] == [0, 1, 2]
    found = [
        (entry["position"], entry["stack_id"], entry["n_blocks"], entry["precision"])
        for entry in builder.rack_info()["stacks"]
    ]
    assert found == [(0, 2, 3, "qlora"), (1, 0, 2, "full"), (2, 1, 1, "half")]
    assert list(rack.blocks) == [*third.blocks, *first.blocks, *second.blocks]


def test_build_rack_returns_the_same_current_object() -> None:
    builder = builder_with()
    rack = builder.build_rack()
    embedding = rack.embedding
    head = rack.head
    for count in range(1, 4):
        builder.add_stack()
        assert builder.build_rack() is rack
        assert len(rack.ordered_stacks) == count
    assert rack.embedding is embedding
    assert rack.head is head


@pytest.mark.parametrize(("mode", "order"), [("append", [0, 1, 2]), ("prepend", [2, 1, 0])])
def test_a_stack_is_added_where_the_mode_says(mode: str, order: list[int]) -> None:
    of_config = builder_with(building_mode=mode)
    of_argument = ProgressiveRackBuilder(config_with(), mode)  # type: ignore[arg-type]
    for builder in (of_config, of_argument):
        for _ in range(3):
            builder.add_stack()
        assert [stack.stack_id for stack in builder.build_rack().ordered_stacks] == order


def test_more_than_max_stacks_is_a_value_error() -> None:
    builder = builder_with(max_stacks=2)
    builder.append_stack()
    builder.append_stack()
    with pytest.raises(ValueError, match="max_stacks: the rack has 2 stacks, and 2 is the most"):
        builder.prepend_stack()
    assert len(builder.build_rack().ordered_stacks) == 2
    default = builder_with()
    for _ in range(12):
        default.append_stack(n_blocks=1)
    with pytest.raises(ValueError, match="12"):
        default.append_stack()


def test_blocks_and_precision_default_to_the_config() -> None:
    builder = builder_with(blocks_per_stack=2, new_stack_precision="half")
    assert (len(builder.append_stack().blocks), builder.append_stack().precision) == (2, "half")
    assert ProgressiveConfig().blocks_per_stack == 4
    builder.config.training.progressive.new_stack_precision = "ternary"
    assert builder.append_stack(n_blocks=1).precision == "ternary"
    fixed = ProgressiveRackBuilder(
        config_with(new_stack_precision="half"), default_precision="bfloat16"
    )
    assert fixed.append_stack().precision == "bfloat16"


@pytest.mark.parametrize("mode", ["append", "prepend"])
@pytest.mark.parametrize("precision", ["full", "half", "bfloat16", "nvfp4", "ternary", "qlora"])
def test_a_new_stack_changes_no_logit_with_zero_residual(mode: str, precision: str) -> None:
    builder = builder_with(building_mode=mode, zero_residual=False)
    builder.add_stack()
    before = builder.build_rack()(tokens())
    builder.config.training.progressive.zero_residual = True
    builder.add_stack(precision=precision)  # type: ignore[arg-type]
    assert torch.equal(builder.build_rack()(tokens()), before)
    builder.config.training.progressive.zero_residual = False
    builder.add_stack(precision=precision)  # type: ignore[arg-type]
    assert not torch.equal(builder.build_rack()(tokens()), before)


# --- adapters


@pytest.mark.parametrize(
    ("pattern", "ranks"),
    [("increasing", [16, 32, 64]), ("decreasing", [16, 8, 4]), ("linear", [16, 24, 32])],
)
@pytest.mark.parametrize("mode", ["append", "prepend"])
def test_ranks_follow_the_order_of_building(pattern: str, ranks: list[int], mode: str) -> None:
    builder = builder_with(
        qlora_enabled=True,
        qlora_strategy="progressive",
        qlora_rank_pattern=pattern,
        building_mode=mode,
    )
    for rank in ranks:
        stack = builder.add_stack()
        assert stack.adapters == {"stack": AdapterSpec(rank, 32.0)}
        assert {adapter.down.weight.shape[0] for adapter in stack.adapter_modules()} == {rank}


def test_the_trunk_gets_second_adapters_with_each_new_stack() -> None:
    builder = builder_with(
        qlora_enabled=True,
        qlora_rank=4,
        qlora_alpha=8,
        progressive_qlora=True,
        progressive_qlora_rank=2,
        progressive_qlora_alpha=6,
        adapter_dtype="bfloat16",
    )
    first = builder.append_stack()
    assert set(first.adapters) == {"stack"}
    second = builder.prepend_stack()
    assert first.adapters == {
        "stack": AdapterSpec(4, 8, "bfloat16"),
        "progressive": AdapterSpec(2, 6, "bfloat16"),
    }
    assert set(second.adapters) == {"stack"}
    third = builder.append_stack()
    assert set(second.adapters) == {"stack", "progressive"}
    assert set(third.adapters) == {"stack"}
    names = [
        name
        for name in builder.build_rack().state_dict()
        if name.startswith("blocks.0.blocks.0.attention.query")
    ]
    assert {name.split(".adapters.")[1].split(".")[0] for name in names if "adapters" in name} == {
        "stack",
        "progressive",
    }


def test_a_qlora_stack_has_adapters_on_the_configured_base() -> None:
    four_bit = builder_with().append_stack(precision="qlora")
    ternary = builder_with(qlora_base="ternary")
    assert set(four_bit.adapters) == {"stack"}
    assert any("codes" in name for name in four_bit.state_dict())
    stack = ternary.append_stack(precision="qlora")
    assert any("votes" in name for name in stack.state_dict())
    assert not any("codes" in name for name in stack.state_dict())


def test_adapters_can_be_chosen_for_one_stack() -> None:
    builder = builder_with(adapter_dtype="float16")
    chosen = AdapterSpec(2, 4.0, "ternary")
    assert builder.append_stack(adapter=chosen).adapters["stack"] == chosen
    assert builder.append_stack().adapters == {}


def test_an_error_leaves_the_rack_unchanged() -> None:
    builder = builder_with(
        qlora_enabled=True, qlora_strategy="variable", qlora_configs={0: {"rank": 2, "alpha": 4}}
    )
    builder.append_stack()
    before = builder.build_rack().structure()
    with pytest.raises(ConfigError, match="no entry for stack 1"):
        builder.append_stack()
    with pytest.raises(UsageProblem, match="did you mean 'bfloat16'"):
        builder.append_stack(precision="bfloat61")  # type: ignore[arg-type]
    assert builder.build_rack().structure() == before


# --- what learns


@pytest.mark.parametrize("mode", ["append", "prepend"])
@pytest.mark.parametrize("precision", ["full", "half", "bfloat16", "nvfp4", "ternary", "qlora"])
def test_a_frozen_trunk_is_bit_identical_after_training(mode: str, precision: str) -> None:
    builder = builder_with(
        building_mode=mode, qlora_enabled=True, qlora_rank=2, progressive_qlora=True
    )
    trunk = builder.add_stack(precision=precision)  # type: ignore[arg-type]
    train(builder.build_rack())
    new = builder.add_stack(precision="ternary")
    builder.freeze_trunk()
    frozen = snapshot(trunk)
    before = snapshot(new)
    head = snapshot(builder.build_rack().head)
    train(builder.build_rack())
    assert same(snapshot(trunk), frozen)
    assert not same(snapshot(new), before)
    assert not same(snapshot(builder.build_rack().head), head)
    assert trunk.learning == "nothing"


@pytest.mark.parametrize("dtype", ["float32", "ternary"])
@pytest.mark.parametrize("precision", ["full", "nvfp4", "ternary"])
def test_only_adapters_of_a_qlora_trunk_change(precision: str, dtype: str) -> None:
    builder = builder_with(
        qlora_enabled=True,
        qlora_rank=4,
        progressive_qlora=True,
        zero_residual=False,
        adapter_dtype=dtype,
    )
    trunk = builder.append_stack(precision=precision)  # type: ignore[arg-type]
    builder.append_stack()
    builder.freeze_all_but_qlora()
    before = snapshot(trunk)
    train(builder.build_rack(), steps=12)
    after = snapshot(trunk)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all(".adapters." in name for name in changed)
    for name in ("stack", "progressive"):
        attention = (f"attention.{each}" for each in ("query", "key", "value", "output"))
        for part in (*attention, "feed_forward.up", "feed_forward.down"):
            assert any(f"{part}.adapters.{name}.up" in key for key in changed), (part, name)


def test_freezing_takes_positions_or_all_but_the_newest() -> None:
    builder = builder_with(building_mode="prepend", qlora_enabled=True)
    for _ in range(3):
        builder.add_stack()
    stacks = builder.build_rack().ordered_stacks
    builder.freeze_trunk([0, 2])
    assert [stack.learning for stack in stacks] == ["nothing", "all", "nothing"]
    builder.freeze_all_but_qlora([1])
    assert [stack.learning for stack in stacks] == ["nothing", "adapters", "nothing"]
    builder.freeze_all_but_qlora()
    assert [stack.learning for stack in stacks] == ["nothing", "adapters", "adapters"]
    builder.freeze_trunk()
    assert [stack.learning for stack in stacks] == ["nothing"] * 3
    builder.freeze_trunk([])
    with pytest.raises(UsageProblem, match="no stack at position 3; the rack has 3"):
        builder.freeze_trunk([3])


def test_freeze_all_but_qlora_needs_adapters() -> None:
    builder = builder_with()
    builder.append_stack(adapter=AdapterSpec(2, 4.0))
    builder.append_stack()
    builder.append_stack()
    with pytest.raises(UsageProblem, match="stack 1: only its adapters can learn, and it has none"):
        builder.freeze_all_but_qlora()
    assert [stack.learning for stack in builder.build_rack().ordered_stacks] == ["all"] * 3


# --- saving


OPTIONS: dict[str, Any] = {
    "qlora_enabled": True,
    "qlora_rank": 2,
    "progressive_qlora": True,
    "zero_residual": False,
}


def saved(tmp_path: Path) -> tuple[ProgressiveRackBuilder, Path]:
    builder = builder_with(**OPTIONS)
    builder.append_stack(precision="full")
    builder.prepend_stack(precision="qlora")
    builder.append_stack(precision="ternary")
    builder.append_stack(precision="half")
    train(builder.build_rack())
    path = tmp_path / "deep" / "rack.safetensors"
    builder.save(path)
    return builder, path


def test_save_and_load_keep_both_sets_of_adapters(tmp_path: Path) -> None:
    builder, path = saved(tmp_path)
    fresh = builder_with(**OPTIONS, seed=5)
    rack = fresh.load(path)
    assert rack is fresh.build_rack()
    assert same(snapshot(rack), snapshot(builder.build_rack()))
    assert torch.equal(rack(tokens()), builder.build_rack()(tokens()))
    assert fresh.rack_info() == builder.rack_info()
    added = fresh.append_stack()
    assert added.stack_id == 4
    with safetensors.safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["arb_ternary"])
    assert [entry["id"] for entry in header["structure"]["stacks"]] == [1, 0, 2, 3]
    # Options of the initial weights are not stored, so that files from before such an option can be
    # read.
    assert not {"layers", "zero_head", "zero_residual"} & header["model"].keys()


def test_saving_is_atomic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builder, path = saved(tmp_path)
    before = path.read_bytes()

    def fails(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("arb_ternary_train.durable.os.fsync", fails)
    with pytest.raises(ArbError, match="disk full"):
        builder.save(path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_damaged_and_foreign_files_are_refused(tmp_path: Path) -> None:
    _, path = saved(tmp_path)
    whole = path.read_bytes()
    with pytest.raises(CheckpointError, match=r"absent\.safetensors: cannot be read: No such file"):
        builder_with().load(tmp_path / "absent.safetensors")
    path.write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match="damaged or truncated"):
        builder_with(**OPTIONS).load(path)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"tensor '.*' is damaged"):
        builder_with(**OPTIONS).load(path)
    import safetensors.torch

    other = tmp_path / "other.safetensors"
    safetensors.torch.save_file({"weight": torch.zeros(1)}, other)
    with pytest.raises(CheckpointError, match="this is not the file of a rack"):
        builder_with().load(other)


def test_loading_needs_an_empty_builder_of_the_same_model(tmp_path: Path) -> None:
    builder, path = saved(tmp_path)
    with pytest.raises(UsageProblem, match="it has 4 stacks already"):
        builder.load(path)
    wider = config_with(**OPTIONS)
    wider.model.d_model = 64
    with pytest.raises(CheckpointError, match="width: 32 there, 64 here"):
        ProgressiveRackBuilder(wider).load(path)
    with pytest.raises(CheckpointError, match="time: None there"):
        builder_with(**OPTIONS, time_interpretation="input").load(path)


def test_a_structure_restores_the_rack_in_a_new_builder(tmp_path: Path) -> None:
    builder, _ = saved(tmp_path)
    builder.freeze_trunk()
    structure = json.loads(json.dumps(builder.build_rack().structure()))
    fresh = builder_with(**OPTIONS)
    fresh.build_rack().restore_structure(structure)
    assert fresh.build_rack().structure() == builder.build_rack().structure()
    fresh.build_rack().load_state_dict(builder.build_rack().state_dict())
    assert torch.equal(fresh.build_rack()(tokens()), builder.build_rack()(tokens()))


def test_a_merged_copy_computes_the_same() -> None:
    builder = builder_with(**OPTIONS)
    builder.append_stack()
    builder.append_stack(precision="nvfp4")
    train(builder.build_rack())
    merged = builder.build_rack().merged()
    assert merged is not builder.build_rack()
    torch.testing.assert_close(
        merged(tokens()), builder.build_rack()(tokens()), rtol=1e-3, atol=1e-3
    )
    assert not any("adapters" in name for name in merged.state_dict())


# --- making a builder


def test_a_builder_from_keywords_adopts_a_config() -> None:
    builder = ProgressiveRackBuilder(vocab_size=20, d_model=32, d_ff=48, n_heads=2, max_length=8)
    config = config_with(new_stack_precision="half", qlora_enabled=True)
    config.model.max_length = 99
    config.model.causal = True
    builder.adopt(config)
    rack = builder.build_rack()
    stack = builder.append_stack()
    assert (
        rack.vocabulary_size,
        rack.config.width,
        rack.config.hidden,
        rack.config.max_length,
    ) == (20, 32, 48, 8)
    assert (rack.config.heads, rack.config.causal) == (2, True)
    assert (stack.precision, set(stack.adapters)) == ("half", {"stack"})
    own = builder_with()
    own.adopt(config)
    assert own.append_stack().precision == "full"


def test_a_builder_needs_exactly_one_description_of_the_model() -> None:
    for arguments, message in (
        ({}, "needs a config, or vocab_size and d_model"),
        ({"d_model": 32}, "needs a config, or vocab_size and d_model"),
        ({"config": config_with(), "d_model": 32}, "d_model given together with a config"),
        (
            {"config": config_with(), "building_mode": "insert"},
            "must be append or prepend, not 'insert'",
        ),
        ({"config": config_with(), "default_precision": "int4"}, "precision: must be one of"),
    ):
        with pytest.raises(UsageProblem, match=message):
            ProgressiveRackBuilder(**arguments)
    contradictory = builder_with(trunk_strategy="qlora")
    with pytest.raises(ConfigError, match="trunk_strategy"):
        contradictory.append_stack()


def test_a_builder_continues_a_decoder_or_a_rack() -> None:
    torch.manual_seed(0)
    decoder = Decoder(DecoderConfig(width=32, heads=2, layers=2, max_length=16), 20)
    # Layers with adapters are computed by torch's operations, others by kernels that add up in
    # another order.
    with exact_arithmetic():
        before = decoder(tokens())
    options = ProgressiveConfig(
        new_stack_precision="ternary", blocks_per_stack=1, qlora_enabled=True, qlora_rank=2
    )
    builder = ProgressiveRackBuilder.from_model(decoder, options, seed=3)
    rack = builder.build_rack()
    assert rack.ordered_stacks[0].precision == "ternary"
    assert set(rack.ordered_stacks[0].adapters) == {"stack"}
    builder.append_stack()
    with exact_arithmetic():
        assert torch.equal(rack(tokens()), before)
    again = ProgressiveRackBuilder.from_model(rack, options)
    assert again.build_rack() is rack
    assert again.append_stack().stack_id == 2
    floats = DecoderConfig(
        width=32, heads=2, layers=1, float_parts=("embedding", "head", "linears")
    )
    made = ProgressiveRackBuilder.from_model(Decoder(floats, 20), ProgressiveConfig()).build_rack()
    assert made.ordered_stacks[0].precision == "full"


def test_time_as_input_adds_the_configured_time_embedding() -> None:
    builder = builder_with(
        time_interpretation="input",
        time_embedding_dim=6,
        time_encoding_type="learned",
        num_time_steps=5,
    )
    embedding = builder.build_rack().time_embedding
    assert isinstance(embedding, TimeEmbedding)
    assert (embedding.dim, embedding.kind, embedding.width, embedding.num_time_steps) == (
        6,
        "learned",
        32,
        5,
    )
    assert builder_with().build_rack().time_embedding is None


def test_create_stack_from_config_equals_the_builder() -> None:
    config = config_with(
        new_stack_precision="qlora", qlora_strategy="progressive", qlora_rank=2, seed=4
    )
    stack = create_stack_from_config(stack_id=1, n_blocks=4, config=config)
    assert (stack.stack_id, len(stack.blocks), stack.precision) == (1, 4, "qlora")
    assert stack.adapters["stack"].rank == 4
    builder = ProgressiveRackBuilder(config)
    builder.append_stack()
    built = builder.append_stack(n_blocks=4)
    assert same(snapshot(stack), snapshot(built))
    x_BSD = torch.randn(2, 5, 32)
    assert torch.equal(stack(x_BSD), x_BSD)


def test_rack_info_counts_parameters() -> None:
    builder = builder_with(qlora_rank=2)
    builder.append_stack(n_blocks=2)
    builder.append_stack(precision="qlora")
    builder.freeze_trunk()
    info = builder.rack_info()
    weights = 4 * 32 * 32 + 2 * 32 * 128
    adapter = 4 * 2 * (32 + 32) + 2 * 2 * (32 + 128)
    assert (info["total_stacks"], info["total_blocks"], info["building_mode"]) == (2, 3, "append")
    assert [entry["parameters"] for entry in info["stacks"]] == [2 * weights, weights + adapter]
    assert [entry["trainable_parameters"] for entry in info["stacks"]] == [0, adapter]
    assert info["stack_parameters"] == 3 * weights + adapter
    json.dumps(info)
