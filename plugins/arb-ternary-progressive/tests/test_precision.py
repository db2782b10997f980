"""The formats of a stack: stored values and bytes, and what is computed from them."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from arb_ternary.errors import UsageProblem
from arb_ternary.ternary.linear import TernaryLinear
from arb_ternary.ternary.module import TernaryModule
from arb_ternary_progressive.adapters import AdapterSpec
from arb_ternary_progressive.config import PRECISIONS
from arb_ternary_progressive.nvfp4 import pack_nvfp4, unpack_nvfp4
from arb_ternary_progressive.precision import (
    NVFP4Linear,
    StoredLinear,
    dense_weight,
    store_block,
)
from arb_ternary_progressive.stack import Stack, count_learning
from arb_ternary_text.models.block import Block
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.parts import FloatLinear
from arb_ternary_text.models.trit_vector import TritVector
from arb_ternary_train.checkpoint_format import tensor_digest

CONFIG = DecoderConfig(
    width=32, heads=2, max_length=16, activations="float", float_parts=("embedding", "head")
)
#: Weights of a block: four matrices of attention, two of the feed-forward layer.
WEIGHTS = 4 * 32 * 32 + 2 * 32 * 128


def stack_of(precision: str, blocks: int = 1, config: DecoderConfig = CONFIG) -> Stack:
    torch.manual_seed(3)
    return Stack(0, blocks, config, precision=precision)  # type: ignore[arg-type]


def linears(stack: Stack) -> list[nn.Module]:
    return [m for m in stack.modules() if isinstance(m, FloatLinear | TernaryLinear | NVFP4Linear)]


@pytest.mark.parametrize(
    ("precision", "dtype", "bytes_a_weight"),
    [("full", torch.float32, 4), ("half", torch.float16, 2), ("bfloat16", torch.bfloat16, 2)],
)
def test_a_float_stack_stores_parameters_of_its_dtype(
    precision: str, dtype: torch.dtype, bytes_a_weight: int
) -> None:
    stack = stack_of(precision)
    assert len(linears(stack)) == 6
    assert {parameter.dtype for parameter in stack.parameters()} == {dtype}
    assert sum(each.nbytes for each in stack.parameters()) == bytes_a_weight * WEIGHTS
    assert (stack.count(), count_learning(stack)) == (WEIGHTS, WEIGHTS)
    full = stack_of("full").state_dict()
    for name, value in stack.state_dict().items():
        assert torch.equal(value, full[name].to(dtype)), name


@pytest.mark.parametrize("precision", ["nvfp4", "qlora"])
def test_a_four_bit_stack_stores_codes_and_block_scales(precision: str) -> None:
    stack = stack_of(precision)
    assert list(stack.parameters()) == []
    # Half a byte per weight, a byte per 16 weights, and 4 bytes per matrix.
    assert sum(each.nbytes for each in stack.buffers()) == WEIGHTS // 2 + WEIGHTS // 16 + 6 * 4
    assert (stack.count(), count_learning(stack)) == (WEIGHTS, 0)
    full = dict(stack_of("full").named_modules())
    for name, module in stack.named_modules():
        if isinstance(module, NVFP4Linear):
            expected = unpack_nvfp4(pack_nvfp4(full[name].weight), module.in_features)
            assert torch.equal(module.dense_weight(), expected)
            assert module.codes.dtype == torch.uint8
            assert module.scales.dtype == torch.float8_e4m3fn


def test_a_ternary_stack_has_the_cores_linears() -> None:
    stack = stack_of("ternary")
    assert list(stack.parameters()) == []
    assert all(isinstance(linear, TernaryLinear) for linear in linears(stack))
    assert (stack.count(), count_learning(stack)) == (WEIGHTS, WEIGHTS)


def test_a_ternary_base_of_qlora_never_learns() -> None:
    torch.manual_seed(3)
    stack = Stack(0, 1, CONFIG, precision="qlora", base="ternary")
    stack.add_adapters("stack", AdapterSpec(2, 4.0))
    stack.set_learning("all")
    bases = [m for m in stack.modules() if isinstance(m, TernaryLinear)]
    assert len(bases) == 6
    assert all(base.frozen for base in bases)
    assert all(parameter.requires_grad for parameter in stack.parameters())


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("zero", [True, False])
def test_a_new_stack_is_the_identity_only_on_request(precision: str, zero: bool) -> None:
    config = DecoderConfig(
        width=32,
        heads=2,
        max_length=16,
        float_parts=("embedding", "head"),
        learned_norms=True,
        zero_residual=zero,
    )
    stack = stack_of(precision, 2, config)
    x_BSD = torch.randn(2, 5, 32)
    assert torch.equal(stack(x_BSD), x_BSD) == zero


@pytest.mark.parametrize("precision", ["half", "bfloat16", "nvfp4"])
@pytest.mark.parametrize("activations", ["float", "int8"])
def test_products_and_gradients_are_those_of_the_decoded_weight(
    precision: str, activations: str
) -> None:
    torch.manual_seed(1)
    plain = FloatLinear(24, 10, activations=activations)  # type: ignore[arg-type]
    dtype = {"half": torch.float16, "bfloat16": torch.bfloat16}.get(precision)
    stored = NVFP4Linear(plain) if dtype is None else StoredLinear(plain, dtype)
    dense = FloatLinear(24, 10, activations=activations)  # type: ignore[arg-type]
    dense.weight = nn.Parameter(dense_weight(stored))
    x, y = (torch.randn(2, 3, 24).requires_grad_() for _ in range(2))
    with torch.no_grad():
        y.copy_(x)
    found = stored(x)
    expected = dense(y)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    found.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    if dtype is not None:
        assert stored.weight.grad.dtype == dtype
        torch.testing.assert_close(
            stored.weight.grad.float(), dense.weight.grad.to(dtype).float(), rtol=0.01, atol=1e-3
        )


def test_a_product_keeps_no_dense_weight_for_the_backward() -> None:
    linear = NVFP4Linear(FloatLinear(64, 64))
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor.numel()) or tensor, lambda t: t
    ):
        linear(torch.randn(1, 64).requires_grad_())
    assert sum(kept) < 64 * 64


def test_autocast_computes_in_its_dtype() -> None:
    linear = StoredLinear(FloatLinear(8, 8), torch.float16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = linear(torch.randn(2, 8))
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert linear.weight.grad is not None
    assert linear.weight.grad.dtype == torch.float16


@pytest.mark.parametrize("precision", ["half", "bfloat16", "nvfp4", "qlora"])
def test_casting_the_model_keeps_stored_dtypes(precision: str) -> None:
    config = DecoderConfig(
        width=32, heads=2, max_length=16, float_parts=("embedding", "head"), learned_norms=True
    )
    stack = stack_of(precision, 1, config)
    before = {
        name: value.clone() for name, value in stack.state_dict().items() if "norm" not in name
    }
    for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.float32):
        stack.to(dtype)
        for name, value in before.items():
            found = stack.state_dict()[name]
            assert found.dtype == value.dtype
            assert tensor_digest(found) == tensor_digest(value)


@pytest.mark.parametrize("precision", ["half", "bfloat16"])
def test_gains_are_stored_like_the_rest_of_the_stack(precision: str) -> None:
    config = DecoderConfig(
        width=32, heads=2, max_length=16, float_parts=("embedding", "head"), learned_norms=True
    )
    stack = stack_of(precision, 1, config)
    gains = [value for name, value in stack.named_parameters() if "norm" in name]
    assert len(gains) == 2
    assert (
        len({gain.dtype for gain in gains} | {linear.weight.dtype for linear in linears(stack)})
        == 1
    )
    norm = stack.blocks[0].attention.norm
    x = torch.randn(3, 32)
    torch.testing.assert_close(norm(x), F.rms_norm(x, (32,), eps=1e-6))


def test_float_stacks_have_float_gains() -> None:
    config = DecoderConfig(width=32, heads=2, max_length=16, learned_norms=True, vector_trits=8)
    stack = stack_of("full", 1, config)
    assert sum("norm" in name for name, _ in stack.named_parameters()) == 2
    assert not any(isinstance(module, TernaryModule) for module in stack.modules())
    ternary = stack_of("ternary", 1, config)
    assert not [*ternary.parameters()]
    assert sum(isinstance(module, TritVector) for module in ternary.modules()) == 2


def test_a_stored_eps_survives_another_precision() -> None:
    config = DecoderConfig(
        width=32, heads=2, max_length=16, float_parts=("linears", "norms"), learned_norms=False
    )
    block = Block(attrs.evolve(config, inner_gains=True, stored_eps=True))
    norm: Any = block.attention.output_norm
    norm.eps = 0.25
    store_block(block, "half", "nvfp4")
    assert block.attention.output_norm is not norm
    assert block.state_dict()["attention.output_norm._extra_state"] == 0.25


def test_impossible_formats_are_errors() -> None:
    with pytest.raises(UsageProblem, match="precision: must be one of full, half"):
        stack_of("int4")
    with pytest.raises(UsageProblem, match="at least 1 block"):
        stack_of("full", 0)


def test_a_four_bit_base_cannot_learn() -> None:
    stack = stack_of("nvfp4")
    assert not stack.can_learn
    with pytest.raises(
        UsageProblem, match="a base of precision nvfp4 cannot learn, and the stack has no adapters"
    ):
        stack.set_learning("all")
    with pytest.raises(UsageProblem, match="only its adapters can learn, and it has none"):
        stack.set_learning("adapters")
    stack.set_learning("nothing")
    stack.add_adapters("stack", AdapterSpec(2, 4.0))
    stack.set_learning("all")
    assert all(parameter.requires_grad for parameter in stack.parameters())
