"""Adapters: initial zeros, formula, several sets, placement, ternary adapters, merging."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from arb_ternary.errors import UsageProblem
from arb_ternary.optim.protocol import collect_trainable
from arb_ternary.ternary.linear import TernaryLinear
from arb_ternary_progressive.adapters import AdaptedLinear, AdapterSpec, adapted_linears
from arb_ternary_progressive.stack import Stack
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_train.update import ternary_update
from arb_ternary_votes.config import SignVotesConfig
from arb_ternary_votes.sign_votes import build

CONFIG = DecoderConfig(
    width=32,
    heads=4,
    kv_heads=2,
    max_length=16,
    activation="swiglu",
    activations="float",
    group_size=32,
)
NAMES = {
    "attention.query",
    "attention.key",
    "attention.value",
    "attention.output",
    "feed_forward.gate",
    "feed_forward.up",
    "feed_forward.down",
}


def stack_with(
    *names: str, precision: str = "full", dtype: str = "float32", config: DecoderConfig = CONFIG
) -> Stack:
    torch.manual_seed(5)
    stack = Stack(0, 1, config, precision=precision)  # type: ignore[arg-type]
    for rank, name in enumerate(names, start=3):
        stack.add_adapters(name, AdapterSpec(rank, 2.0 * rank + 1, dtype))  # type: ignore[arg-type]
    return stack


def stir(stack: Stack) -> None:
    """Give every adapter's second matrix random weights."""
    for adapter in stack.adapter_modules():
        if isinstance(adapter.up, TernaryLinear):
            trits = torch.randint(-1, 2, adapter.up.trits().shape, dtype=torch.int8)
            adapter.up.set_trits(trits)
        else:
            nn.init.normal_(adapter.up.weight, std=0.1)


@pytest.mark.parametrize("precision", ["full", "half", "nvfp4", "ternary"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "ternary"])
def test_every_linear_gets_an_adapter_that_starts_at_zero(precision: str, dtype: str) -> None:
    plain = stack_with(precision=precision)
    stack = stack_with("stack", "progressive", precision=precision, dtype=dtype)
    found = {
        name
        for name, module in stack.blocks[0].named_modules()
        if isinstance(module, AdaptedLinear)
    }
    assert found == NAMES
    for linear in adapted_linears(stack):
        assert list(linear.adapters) == ["stack", "progressive"]
    x_BSD = torch.randn(2, 6, 32)
    assert torch.equal(stack(x_BSD), plain(x_BSD))
    assert stack.adapters == {
        "stack": AdapterSpec(3, 7.0, dtype),  # type: ignore[arg-type]
        "progressive": AdapterSpec(4, 9.0, dtype),  # type: ignore[arg-type]
    }


def test_output_is_base_plus_scaled_adapters() -> None:
    stack = stack_with("stack", "progressive")
    stir(stack)
    linear = stack.blocks[0].attention.query
    x = torch.randn(4, 32)
    first = linear.adapters["stack"]
    second = linear.adapters["progressive"]
    expected = x @ linear.base.weight.T
    expected = expected + 7 / 3 * (x @ first.down.weight.T @ first.up.weight.T)
    expected = expected + 9 / 4 * (x @ second.down.weight.T @ second.up.weight.T)
    torch.testing.assert_close(linear(x), expected)
    assert first.down.weight.shape == (3, 32)
    assert second.up.weight.shape == (32, 4)


def test_experts_have_adapters_but_no_router() -> None:
    config = DecoderConfig(width=32, heads=2, max_length=16, experts=3)
    stack = stack_with("stack", config=config)
    found = {
        name
        for name, module in stack.blocks[0].named_modules()
        if isinstance(module, AdaptedLinear)
    }
    assert {f"feed_forward.experts.{number}.up" for number in range(3)} < found
    assert "feed_forward.router" not in found


@pytest.mark.parametrize("precision", ["full", "half", "nvfp4", "qlora", "ternary"])
def test_learning_adapters_leaves_the_base_unchanged(precision: str) -> None:
    stack = stack_with("stack", "progressive", precision=precision)
    stir(stack)
    stack.set_learning("adapters")
    before = {name: value.clone() for name, value in stack.state_dict().items()}
    learning = [parameter for parameter in stack.parameters() if parameter.requires_grad]
    assert len(learning) == 2 * 2 * 7
    optimizer = torch.optim.AdamW(learning, lr=0.01)
    stack(torch.randn(2, 6, 32)).square().mean().backward()
    optimizer.step()
    for name, value in stack.state_dict().items():
        assert torch.equal(value, before[name]) != (".adapters." in name), name


def test_ternary_adapters_learn_on_a_frozen_ternary_base() -> None:
    stack = stack_with("stack", precision="ternary", dtype="ternary")
    stack.set_learning("adapters")
    assert list(stack.parameters()) == []
    trainable = collect_trainable(stack)
    assert len(trainable.ternary) == 2 * 7
    optimizer = build(SignVotesConfig(accum_threshold=1), trainable)
    before = {name: value.clone() for name, value in stack.state_dict().items()}
    x_BSD = torch.randn(2, 6, 32)
    target_BSD = torch.randn(2, 6, 32)
    losses = []
    for _ in range(8):
        loss = (stack(x_BSD) - target_BSD).square().mean()
        losses.append(loss.item())
        ternary_update(stack, optimizer, loss)
    for name, value in stack.state_dict().items():
        if ".base." in name:
            assert torch.equal(value, before[name]), name
    assert any(bool((adapter.up.trits() != 0).any()) for adapter in stack.adapter_modules())
    assert min(losses) < losses[0]


@pytest.mark.parametrize("precision", ["full", "half", "nvfp4", "ternary"])
@pytest.mark.parametrize(
    ("dtype", "activations"), [("float32", "float"), ("float32", "int8"), ("ternary", "float")]
)
def test_merging_keeps_the_function(precision: str, dtype: str, activations: str) -> None:
    config = DecoderConfig(width=32, heads=2, max_length=16, group_size=32, activations=activations)  # type: ignore[arg-type]
    stack = stack_with("stack", "progressive", precision=precision, dtype=dtype, config=config)
    stir(stack)
    x_BSD = torch.randn(2, 6, 32)
    before = stack(x_BSD).detach()
    stack.merge_adapters()
    assert stack.precision == "full"
    assert stack.adapters == {}
    assert list(adapted_linears(stack)) == []
    assert not any("adapters" in name or ".base" in name for name in stack.state_dict())
    torch.testing.assert_close(
        stack(x_BSD), before, rtol=1e-3, atol=2e-3 if activations == "int8" else 1e-4
    )


def test_merging_without_adapters_changes_nothing() -> None:
    stack = stack_with(precision="ternary")
    before = stack.state_dict()
    stack.merge_adapters()
    assert stack.precision == "ternary"
    assert stack.state_dict().keys() == before.keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1.0), "greater than 0"),
        ((2, 0.0), "greater than 0"),
        ((2, float("nan")), "greater than 0"),
        ((2, 1.0, "int8"), "dtype must be one of float32, bfloat16, float16, ternary"),
    ],
)
def test_invalid_adapter_specs_are_refused(arguments: tuple[float, ...], message: str) -> None:
    with pytest.raises(UsageProblem, match=message):
        AdapterSpec(*arguments)  # type: ignore[arg-type]


def test_a_set_is_added_once() -> None:
    stack = stack_with("stack")
    with pytest.raises(UsageProblem, match="it has the adapters 'stack' already"):
        stack.add_adapters("stack", AdapterSpec(2, 4.0))
