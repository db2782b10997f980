"""The model ``bitnet``: the published quantisers and the straight-through gradient."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from arb_ternary.errors import ConfigError
from arb_ternary_interchange.decoder.weights import TernaryWeight, exported_weights
from arb_ternary_qat.bitnet import BitLinear, BitnetDecoder, absmax_int8, absmean_ternary
from arb_ternary_qat.config import BitnetConfig
from arb_ternary_testing.component import make_choice
from arb_ternary_text.models.config import FLOAT_PARTS, DecoderConfig
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_text.models.parts import FloatLinear

SMALL = {"width": 32, "layers": 2, "heads": 2, "max_length": 16}


def test_weight_is_rounded_over_its_mean() -> None:
    # mean |w| = 0.5: 0.24 and 0.26 lie on either side of half a unit.
    weight = torch.tensor([[0.24, -0.26, 1.5, -0.5], [0.0, 0.26, -0.74, 0.5]])
    trits, scale = absmean_ternary(weight)
    assert float(scale) == pytest.approx(0.5)
    assert trits.tolist() == [[0.0, -1.0, 1.0, -1.0], [0.0, 1.0, -1.0, 1.0]]


def test_input_rows_are_rounded_to_int8() -> None:
    x = torch.tensor([[1.27, -0.005, 0.0151, -1.27], [0.0, 0.0, 0.0, 0.0]])
    q, scale = absmax_int8(x)
    assert q.tolist() == [[127.0, -0.0, 2.0, -127.0], [0.0] * 4]
    assert float(scale[0, 0]) == pytest.approx(0.01)


def published(x: Tensor, weight: Tensor, *, int8: bool) -> Tensor:
    """The forward pass of the FAQ's listing, line by line, by detaching."""
    w_scale = 1.0 / weight.abs().mean().clamp_(min=1e-5)
    w = weight + ((weight * w_scale).round().clamp_(-1, 1) / w_scale - weight).detach()
    if int8:
        x_scale = 127.0 / x.abs().max(dim=-1, keepdim=True).values.clamp_(min=1e-5)
        x = x + ((x * x_scale).round().clamp_(-128, 127) / x_scale - x).detach()
    return nn.functional.linear(x, w)


@pytest.mark.parametrize("activations", ["int8", "float"])
def test_output_and_gradients_equal_the_published_code(activations: str) -> None:
    torch.manual_seed(0)
    layer = BitLinear(24, 10, activations=activations).double()  # type: ignore[arg-type]
    x = torch.randn(3, 5, 24, dtype=torch.float64, requires_grad=True)
    other = x.detach().clone().requires_grad_()
    weight = layer.weight.detach().clone().requires_grad_()
    direction = torch.randn(3, 5, 10, dtype=torch.float64)
    y = layer(x)
    expected = published(other, weight, int8=activations == "int8")
    (y * direction).sum().backward()
    (expected * direction).sum().backward()
    for ours, theirs in ((y, expected), (x.grad, other.grad), (layer.weight.grad, weight.grad)):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@given(
    rows=st.integers(0, 4),
    columns=st.integers(1, 40),
    outputs=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_integer_product_is_exact(rows: int, columns: int, outputs: int, seed: int) -> None:
    torch.manual_seed(seed)
    layer = BitLinear(columns, outputs, activations="int8")
    x = torch.randn(rows, columns)
    scale = np.abs(x.numpy()).max(axis=1, initial=0, keepdims=True).astype(np.float32) / np.float32(
        127
    )
    q = np.round(x.numpy() / np.maximum(scale, np.finfo(np.float32).tiny)).astype(np.int64)
    gamma = absmean_ternary(layer.weight)[1].numpy()
    expected = (q @ layer.trits().numpy().astype(np.int64).T).astype(np.float32) * (scale * gamma)
    np.testing.assert_array_equal(layer(x).detach().numpy(), expected)


def test_under_autocast_only_sums_are_rounded_to_bfloat16() -> None:
    torch.manual_seed(0)
    layer = BitLinear(64, 16, activations="int8")
    x = torch.randn(7, 64, requires_grad=True)
    exact = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = layer(x)
    assert rounded.dtype == torch.bfloat16
    # The product is rounded to 8 significant bits and then, scaled, once more: (1 + 2**-8)**2 - 1,
    # and float32's own.
    assert ((rounded.float() - exact).abs() <= exact.abs() * (2**-7 + 2**-16 + 2**-21)).all()
    rounded.float().sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32
    assert x.grad is not None
    assert x.grad.dtype == torch.float32


def test_zero_weight_gets_a_gradient() -> None:
    layer = BitLinear(8, 3, activations="int8")
    nn.init.zeros_(layer.weight)
    y = layer(torch.ones(2, 8))
    assert not y.any()
    y.sum().backward()
    assert layer.weight.grad is not None
    assert torch.equal(layer.weight.grad, torch.full((3, 8), 2.0))


def test_only_linears_of_blocks_are_ternary() -> None:
    model = make_choice("model", "bitnet", {**SMALL, "experts": 2, "activation": "swiglu"}).build(
        50
    )
    linears = {
        name: type(module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }
    assert linears.pop("head") is FloatLinear
    assert set(linears.values()) == {BitLinear}
    assert {name.split(".")[0] for name in linears} == {"blocks"}
    assert len(linears) == 2 * (4 + 1 + 2 * 3)
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_initial_weights_equal_the_float_decoder() -> None:
    torch.manual_seed(3)
    bitnet = BitnetDecoder(BitnetConfig(**SMALL), 50)
    torch.manual_seed(3)
    decoder = Decoder(DecoderConfig(**SMALL, float_parts=FLOAT_PARTS), 50)
    ours = bitnet.state_dict()
    theirs = decoder.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_zero_residual_starts_as_the_identity() -> None:
    model = BitnetDecoder(BitnetConfig(**SMALL, zero_residual=True), 50)
    x = torch.randn(1, 5, 32)
    assert torch.equal(model.run_blocks(x), x)


def test_cache_and_recomputation_change_nothing() -> None:
    torch.manual_seed(0)
    model = BitnetDecoder(BitnetConfig(**SMALL), 50)
    tokens = torch.randint(0, 50, (2, 12))
    whole = model(tokens)
    cache = model.new_cache(2)
    parts = torch.cat([model(tokens[:, :7], cache), model(tokens[:, 7:], cache)], dim=1)
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-4)
    whole.square().sum().backward()
    kept = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model.set_activation_checkpointing(True)
    model(tokens).square().sum().backward()
    assert all(
        torch.equal(p.grad, kept[name])
        for name, p in model.named_parameters()
        if p.grad is not None
    )


# torch.compile itself makes an instance of the function class.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiles_into_one_graph() -> None:
    layer = BitLinear(16, 4, activations="int8")
    x = torch.randn(3, 16)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), layer(x))
    compiled(x).sum().backward()
    assert layer.weight.grad is not None


def test_linears_that_are_not_float_are_refused() -> None:
    with pytest.raises(ConfigError, match="must name linears because model bitnet rounds"):
        make_choice("model", "bitnet", {"float_parts": ["head"]})


def test_exporters_get_trits_and_scale() -> None:
    torch.manual_seed(0)
    model = BitnetDecoder(BitnetConfig(width=16, layers=1, heads=2, architecture="bitnet"), 32)
    found = dict(exported_weights(model))["blocks.0.attention.value"]
    master = model.blocks[0].attention.value.weight.detach().numpy().astype(np.float64)
    gamma = np.abs(master).mean()
    assert isinstance(found, TernaryWeight)
    assert found.scale == pytest.approx(gamma, rel=1e-6)
    np.testing.assert_array_equal(found.trits.numpy(), np.clip(np.rint(master / gamma), -1, 1))
    np.testing.assert_allclose(found.dense().numpy(), found.trits.numpy() * gamma, rtol=1e-6)
