"""A rack is a decoder: it runs, generates with a cache, evaluates, and keeps its tensor names."""

from __future__ import annotations

import itertools

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from arb_ternary.counters.hashing import SEED, STREAM
from arb_ternary.errors import CheckpointError, ConfigError, UsageProblem
from arb_ternary.ternary.models import ternary_modules
from arb_ternary_progressive.adapters import AdapterSpec
from arb_ternary_progressive.rack import DecoderRack, as_rack
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_text.models.generate import generate
from arb_ternary_train.audit import audit

FLOAT = DecoderConfig(
    width=32, heads=2, max_length=16, activations="float", float_parts=("embedding", "head")
)
TERNARY = DecoderConfig(width=32, heads=2, max_length=16, group_size=32)


def rack_of(
    *precisions: str, config: DecoderConfig = FLOAT, seed: int = 7, **options: object
) -> DecoderRack:
    rack = DecoderRack(config, 20, seed=seed)
    for precision in precisions:
        rack.insert_stack(
            len(rack.ordered_stacks), 1, precision=precision, zero_residual=False, **options
        )  # type: ignore[arg-type]
    return rack


def tokens(batch: int = 2, length: int = 7) -> torch.Tensor:
    return torch.randint(0, 20, (batch, length), generator=torch.Generator().manual_seed(0))


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


class Shift(nn.Module):
    """A time embedding that adds the time itself."""

    def forward(self, time: float | torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(time, dtype=torch.float32).reshape(-1, 1, 1).expand(-1, 1, 32)


def test_logits_are_those_of_the_parts_in_order() -> None:
    rack = rack_of("full", "ternary", "nvfp4")
    x_BSD = rack.embedding(tokens())
    for stack in rack.ordered_stacks:
        x_BSD = stack(x_BSD)
    expected = rack.head(rack.final_norm(x_BSD))
    torch.testing.assert_close(rack(tokens()), expected)
    torch.testing.assert_close(rack.logits(rack.run_stacks(rack.embed(tokens()))), expected)


def test_new_stacks_do_not_change_the_logits() -> None:
    rack = DecoderRack(FLOAT, 20)
    before = rack(tokens())
    for position in (0, 0, 1):
        rack.insert_stack(position, 2)
        assert torch.equal(rack(tokens()), before)


@pytest.mark.parametrize("until", [0, 1, 2, 3])
def test_hidden_states_of_the_trunk_give_the_same_logits(until: int) -> None:
    rack = rack_of("full", "ternary", "half")
    hidden_BSD = rack.trunk(tokens(), until)
    assert hidden_BSD.shape == (2, 7, 32)
    assert torch.equal(rack(tokens(), hidden=hidden_BSD, from_stack=until), rack(tokens()))


@pytest.mark.parametrize("config", [FLOAT, TERNARY])
def test_decoding_with_a_cache_equals_the_whole_pass(config: DecoderConfig) -> None:
    rack = rack_of("full", "ternary", "nvfp4", config=config).eval()
    rack.add_adapters(rack.newest, "stack", AdapterSpec(2, 4.0))
    cache = rack.new_cache(2)
    ids = tokens()
    pieces = [rack(ids[:, :3], cache), *(rack(ids[:, i : i + 1], cache) for i in range(3, 7))]
    torch.testing.assert_close(torch.cat(pieces, dim=1), rack(ids))
    drawn = list(generate(rack, [1, 2, 3], max_new_tokens=20, temperature=0))
    assert len(drawn) == 20
    first = int(rack(torch.tensor([[1, 2, 3]]))[0, -1].argmax())
    assert drawn[0] == first


def test_prepending_keeps_tensor_names() -> None:
    rack = rack_of("full", "ternary")
    before = {name: value.clone() for name, value in rack.state_dict().items()}
    new = rack.insert_stack(0, 1)
    assert new.stack_id == 2
    assert rack.position(2) == 0
    assert [stack.stack_id for stack in rack.ordered_stacks] == [2, 0, 1]
    assert rack.newest is new
    after = rack.state_dict()
    assert same({name: after[name] for name in before}, before)
    assert {name.split(".")[1] for name in after.keys() - before.keys()} == {"2"}
    assert rack.config.layers == 3


@settings(max_examples=8, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 2)), min_size=1, max_size=5))
def test_ids_follow_building_and_positions_follow_running(
    plan: list[tuple[float, int]],
) -> None:
    rack = DecoderRack(attrs.evolve(FLOAT, width=8), 5)
    order: list[int] = []
    for stack_id, (place, blocks) in enumerate(plan):
        position = round(place * len(order))
        order.insert(position, stack_id)
        rack.insert_stack(position, blocks)
        assert [stack.stack_id for stack in rack.ordered_stacks] == order
        assert [rack.position(number) for number in order] == list(range(len(order)))
        assert rack.newest.stack_id == stack_id
        assert list(rack.blocks) == [
            block for stack in rack.ordered_stacks for block in stack.blocks
        ]
        assert len(rack.new_cache(1).layers) == sum(count for _, count in plan[: stack_id + 1])
    other = DecoderRack(attrs.evolve(FLOAT, width=8), 5)
    other.restore_structure(rack.structure())
    assert list(other.state_dict()) == list(rack.state_dict())
    assert [stack.stack_id for stack in other.ordered_stacks] == order


def test_a_new_stack_depends_on_seed_and_id_alone() -> None:
    torch.manual_seed(1)
    first = rack_of("full", "ternary")
    torch.manual_seed(2)
    second = DecoderRack(FLOAT, 20, seed=7)
    state = torch.get_rng_state()
    second.insert_stack(0, 1, precision="full", zero_residual=False)
    second.insert_stack(0, 1, precision="ternary", zero_residual=False)
    assert torch.equal(torch.get_rng_state(), state)
    assert same(first.state_dict(), second.state_dict())
    assert not same(first.state_dict(), rack_of("full", "ternary", seed=8).state_dict())
    weights = [
        stack.blocks[0].attention.query.weight for stack in rack_of("full", "full").ordered_stacks
    ]
    assert not torch.equal(*weights)


def test_later_ternary_modules_have_their_own_streams() -> None:
    rack = rack_of("ternary", config=TERNARY, seed=11)
    before = {name: module.control.clone() for name, module in ternary_modules(rack)}
    rack.insert_stack(0, 1, precision="ternary")
    rack.add_adapters(rack.stack(0), "progressive", AdapterSpec(2, 4.0, "ternary"))
    streams = {int(module.control[STREAM]) for _, module in ternary_modules(rack)}
    assert len(streams) == len(ternary_modules(rack))
    assert {int(module.control[SEED]) for _, module in ternary_modules(rack)} == {11}
    # A linear that gets adapters keeps its stream, though its name has changed.
    found = {name.replace(".base", ""): module.control for name, module in ternary_modules(rack)}
    assert all(torch.equal(found[name], control) for name, control in before.items())


def test_a_pure_rack_is_pure() -> None:
    rack = rack_of("ternary", "ternary", config=TERNARY)
    rack.add_adapters(rack.newest, "stack", AdapterSpec(2, 4.0, "ternary"))
    assert audit(rack).pure


@pytest.mark.parametrize("precision", ["full", "half", "bfloat16", "nvfp4", "ternary", "qlora"])
def test_a_structure_and_a_state_dict_make_the_same_rack(precision: str) -> None:
    rack = rack_of("ternary", precision, base="ternary")
    rack.insert_stack(0, 2, precision="full")
    rack.add_adapters(rack.stack(1), "stack", AdapterSpec(2, 4.0, "bfloat16"))
    rack.add_adapters(rack.stack(1), "progressive", AdapterSpec(3, 1.0, "ternary"))
    rack.stack(0).set_learning("nothing")
    rack.stack(1).set_learning("adapters")
    other = DecoderRack(FLOAT, 20, seed=99)
    other.restore_structure(rack.structure())
    assert list(other.state_dict()) == list(rack.state_dict())
    other.load_state_dict(rack.state_dict())
    assert torch.equal(other(tokens()), rack(tokens()))
    assert other.structure() == rack.structure()
    assert [p.requires_grad for p in other.parameters()] == [
        p.requires_grad for p in rack.parameters()
    ]
    assert [m.frozen for _, m in ternary_modules(other)] == [
        m.frozen for _, m in ternary_modules(rack)
    ]
    # The next stack has the same name in both.
    assert other.next_id == rack.next_id == 3


def test_a_structure_of_another_rack_is_refused() -> None:
    rack = rack_of("full", "full")
    with pytest.raises(
        CheckpointError,
        match="it has stack 1 of 1 blocks in full, which the saved structure has not",
    ):
        rack.restore_structure(rack_of("full").structure())
    with pytest.raises(CheckpointError, match="stack 1"):
        rack.restore_structure(rack_of("full", "half").structure())
    adapted = rack_of("full", "full")
    adapted.add_adapters(adapted.newest, "stack", AdapterSpec(2, 4.0))
    with pytest.raises(CheckpointError, match="adapters of stack 1"):
        adapted.restore_structure(rack.structure())


@pytest.mark.parametrize("config", [FLOAT, TERNARY])
def test_a_decoder_becomes_a_rack_with_the_same_objects(config: DecoderConfig) -> None:
    torch.manual_seed(0)
    decoder = Decoder(config, 20)
    logits = decoder(tokens())
    embedding = decoder.embedding
    head = decoder.head
    first = decoder.blocks[0]
    rack = as_rack(decoder, precision="ternary", seed=3)
    assert rack.embedding is embedding
    assert rack.head is head
    assert rack.ordered_stacks[0].blocks[0] is first
    assert torch.equal(rack(tokens()), logits)
    rack.insert_stack(1, 1, precision="ternary")
    assert torch.equal(rack(tokens()), logits)
    assert rack.config.layers == config.layers + 1


def test_a_decoder_of_another_kind_is_refused() -> None:
    class Other(Decoder):
        def __init__(self) -> None:
            super().__init__(FLOAT, 20)
            self.blocks[1].feed_forward.up = nn.Linear(32, 128)

    with pytest.raises(ConfigError, match="a Other has others"):
        as_rack(Other(), precision="full")


def test_a_model_with_its_own_ends_keeps_them() -> None:
    class Halved(Decoder):
        def logits(self, x_BSD: torch.Tensor) -> torch.Tensor:
            return super().logits(x_BSD) / 2

    torch.manual_seed(0)
    model = Halved(FLOAT, 20)
    logits = model(tokens())
    state = torch.random.get_rng_state()
    rack = as_rack(model, precision="full")
    assert torch.equal(torch.random.get_rng_state(), state)
    assert isinstance(rack, Halved)
    assert torch.equal(rack(tokens()), logits)


def test_time_is_added_to_the_input_of_the_first_stack() -> None:
    rack = rack_of("full", "full")
    rack.set_time_embedding(Shift())
    plain = rack.embedding(tokens())
    torch.testing.assert_close(rack.embed(tokens(), 0.25), plain + 0.25)
    times_B = torch.tensor([0.5, 1.0])
    torch.testing.assert_close(rack.embed(tokens(), times_B), plain + times_B[:, None, None])
    # No time is time 0: nothing is hidden.
    assert torch.equal(rack(tokens()), rack(tokens(), time=0.0))
    assert not torch.equal(rack(tokens()), rack(tokens(), time=0.5))
    hidden_BSD = rack.trunk(tokens(), 1, time=0.5)
    torch.testing.assert_close(
        rack(tokens(), hidden=hidden_BSD, from_stack=1), rack(tokens(), time=0.5)
    )
    cache = rack.new_cache(2)
    assert rack(tokens(), cache).shape == (2, 7, 20)


def test_arguments_that_do_not_go_together_are_refused() -> None:
    rack = rack_of("full", "full")
    with pytest.raises(UsageProblem, match="no time embedding"):
        rack(tokens(), time=0.5)
    with pytest.raises(UsageProblem, match="the rack has 2"):
        rack(tokens(), hidden=rack.trunk(tokens(), 1), from_stack=3)
    for call, message in (
        (lambda: DecoderRack(FLOAT, 20).newest, "no stack yet"),
        (lambda: DecoderRack(FLOAT, 20, mask_token=20), "mask_token_id: must be from 0 to 19"),
    ):
        with pytest.raises(UsageProblem, match=message):
            call()
    assert rack.mask_token == 19
    assert DecoderRack(FLOAT, 20, mask_token=4).mask_token == 4


def test_calls_of_the_core_work() -> None:
    rack = rack_of("full", "half", "nvfp4", "ternary")
    logits = rack(tokens())
    loss = logits.square().mean()
    loss.backward()
    gradient = rack.embedding.weight.grad.clone()
    rack.zero_grad()
    rack.set_activation_checkpointing(True)
    rack(tokens()).square().mean().backward()
    torch.testing.assert_close(rack.embedding.weight.grad, gradient)
    rack.set_activation_checkpointing(False)
    assert rack.max_length == 16
    causal = rack.train()
    causal.set_state_preservation(True)
    first = causal(tokens(2, 4))
    assert causal.runtime_state() is not None
    assert not torch.equal(causal(tokens(2, 4)), first)
    causal.insert_stack(0, 1)
    assert causal.runtime_state() is None
    torch.testing.assert_close(causal(tokens(2, 4)), first)


def test_a_cast_applies_to_later_stacks_and_adapters() -> None:
    rack = rack_of("full", "half")
    rack.set_dtype(torch.bfloat16)
    rack.insert_stack(2, 1)
    rack.insert_stack(3, 1, precision="half")
    rack.add_adapters(rack.stack(2), "stack", AdapterSpec(2, 4.0))
    dtypes = {
        stack.stack_id: {p.dtype for p in stack.parameters()} for stack in rack.ordered_stacks
    }
    assert dtypes == {
        0: {torch.bfloat16},
        1: {torch.float16},
        2: {torch.bfloat16},
        3: {torch.float16},
    }
    assert rack(tokens()).dtype == torch.bfloat16
    assert rack.trunk(tokens(), 2).dtype == torch.bfloat16


def test_merging_leaves_the_rack_unchanged() -> None:
    rack = rack_of("full", "nvfp4", "ternary")
    for stack, name in itertools.product(rack.ordered_stacks[:2], ("stack", "progressive")):
        rack.add_adapters(stack, name, AdapterSpec(2, 4.0))
        for adapter in stack.adapter_modules(name):
            nn.init.normal_(adapter.up.weight, std=0.1)
    before = {name: value.clone() for name, value in rack.state_dict().items()}
    merged = rack.merged()
    assert [stack.precision for stack in merged.ordered_stacks] == ["full", "full", "ternary"]
    assert not any("adapters" in name for name in merged.state_dict())
    torch.testing.assert_close(merged(tokens()), rack(tokens()), rtol=1e-4, atol=1e-4)
    assert same(rack.state_dict(), before)
