"""The model ``direct``: stored codes, products and gradients."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from arb_ternary.backends.layout import packed_columns
from arb_ternary.counters.hashing import SEED, STREAM, stream_id
from arb_ternary.errors import ConfigError
from arb_ternary.optim.protocol import collect_trainable
from arb_ternary.ternary.models import seed_votes
from arb_ternary_qat.config import DirectConfig
from arb_ternary_qat.direct import DirectDecoder, DirectLinear
from arb_ternary_testing.component import make_choice
from arb_ternary_text.models.config import FLOAT_PARTS, DecoderConfig
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_text.models.parts import FloatLinear
from arb_ternary_train.audit import audit
from arb_ternary_train.linear_state import linear_state

SMALL = {"width": 32, "layers": 2, "heads": 2, "max_length": 16}
DECOUPLED = {"attention": "decoupled", "sem_dim": 4, "geo_dim": 4}


def test_ternary_codes_are_weights_over_their_mean() -> None:
    layer = DirectLinear(torch.tensor([[0.24, -0.26, 1.5, -0.5], [0.0, 0.26, -0.74, 0.5]]))
    assert layer.codes().tolist() == [[0, -1, 1, -1], [0, 1, -1, 1]]
    assert float(layer.scale) == pytest.approx(0.5)
    assert torch.equal(layer.dense_weight(), layer.codes() * layer.scale)


def test_int8_codes_leave_room_for_twice_the_largest() -> None:
    layer = DirectLinear(torch.tensor([[1.0, -0.5, 0.1]]), levels="int8")
    assert float(layer.scale) == pytest.approx(2 / 127)
    # 63.5 rounds half to even.
    assert layer.codes().tolist() == [[64, -32, 6]]


@pytest.mark.parametrize(
    ("levels", "scale"), [("ternary", math.sqrt(2 / math.pi) / 4), ("int8", 2 * 4 / 4 / 127)]
)
def test_zero_weight_gets_the_scale_of_a_gaussian(levels: str, scale: float) -> None:
    layer = DirectLinear(torch.zeros(3, 16), levels=levels)  # type: ignore[arg-type]
    assert float(layer.scale) == pytest.approx(scale)
    assert not layer.codes().any()


@pytest.mark.parametrize("levels", ["ternary", "int8"])
@pytest.mark.parametrize("activations", ["int8", "float"])
def test_output_and_gradients_equal_the_dense_weight(levels: str, activations: str) -> None:
    torch.manual_seed(0)
    layer = DirectLinear(torch.randn(10, 24), levels=levels, activations=activations)  # type: ignore[arg-type]
    x = torch.randn(3, 5, 24, requires_grad=True)
    dense = FloatLinear(24, 10, activations=activations)  # type: ignore[arg-type]
    dense.weight = nn.Parameter(layer.dense_weight())
    other = x.detach().clone().requires_grad_()
    direction = torch.randn(3, 5, 10)
    y = layer(x)
    expected = dense(other)
    (y * direction).sum().backward()
    (expected * direction).sum().backward()
    for ours, theirs in ((y, expected), (x.grad, other.grad), (layer.gradient, dense.weight.grad)):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_gradients_add_up_without_earlier_learning() -> None:
    layer = DirectLinear(torch.randn(4, 6))
    x = torch.randn(2, 6)
    layer(x).sum().backward()
    assert layer.gradient is not None
    once = layer.gradient.clone()
    layer(x).sum().backward()
    assert torch.equal(layer.gradient, 2 * once)


def test_frozen_and_evaluated_modules_keep_no_gradient() -> None:
    layer = DirectLinear(torch.randn(4, 6))
    x = torch.randn(2, 6, requires_grad=True)
    with torch.no_grad():
        assert not layer(x).requires_grad
    layer.frozen = True
    layer(x).sum().backward()
    assert x.grad is not None
    assert layer.gradient is None
    assert layer.gradient_bytes == 0
    assert collect_trainable(nn.Sequential(layer)).stored == {}


def test_under_autocast_the_gradient_is_kept_in_float32() -> None:
    layer = DirectLinear(torch.randn(4, 6), activations="int8")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(torch.randn(2, 6))
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert layer.gradient is not None
    assert layer.gradient.dtype == torch.float32


def direct(**options: object) -> DirectDecoder:
    torch.manual_seed(3)
    return DirectDecoder(DirectConfig(**SMALL, **options), 50)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "vectors", [{}, {"query_key_value_bias": True}, {**DECOUPLED, "attention_gate": True}]
)
def test_float_vectors_in_attention_are_planned(vectors: dict[str, object]) -> None:
    config = DirectConfig(**SMALL, float_parts=("linears",), **vectors)  # type: ignore[arg-type]
    assert config.planned().kinds == set(collect_trainable(DirectDecoder(config, 50)).parts)
    assert not config.planned().matrices


def linears(model: nn.Module) -> list[DirectLinear]:
    return [module for module in model.modules() if isinstance(module, DirectLinear)]


@pytest.mark.parametrize("levels", ["ternary", "int8"])
def test_initial_codes_are_rounded_float_weights(
    levels: str,
) -> None:
    model = direct(levels=levels)
    torch.manual_seed(3)
    decoder = Decoder(DecoderConfig(**SMALL, float_parts=FLOAT_PARTS), 50)
    dense = [module for module in decoder.blocks.modules() if isinstance(module, FloatLinear)]
    assert len(dense) == len(linears(model)) == 2 * 6
    for ours, theirs in zip(linears(model), dense, strict=True):
        weight = theirs.weight.detach().numpy()
        unit = np.abs(weight).mean() if levels == "ternary" else 2 * np.abs(weight).max() / 127
        expected = np.clip(np.round(weight / unit), -ours.limit, ours.limit)
        # The two sums of magnitudes differ in the last bits, so that a weight on a boundary may
        # round either way.
        assert (ours.codes().numpy() != expected).mean() < 1e-3
    assert torch.equal(model.head.weight, decoder.head.weight)


def test_no_linear_of_the_blocks_has_a_float_parameter() -> None:
    names = {name for name, _ in direct().named_parameters()}
    assert all(
        name.startswith(("embedding", "head", "final_norm")) or ".norm." in name for name in names
    )


@pytest.mark.parametrize(("levels", "row_bytes"), [("ternary", packed_columns), ("int8", int)])
def test_audit_counts_codes_and_stored_bytes(levels: str, row_bytes: object) -> None:
    model = direct(levels=levels)
    shapes = [(module.out_features, module.in_features) for module in linears(model)]
    counted = audit(model)
    row = next(row for row in counted.rows if row.what == "integer weights of other formats")
    assert row.elements == sum(n * k for n, k in shapes)
    assert row.nbytes == sum(n * row_bytes(k) for n, k in shapes)  # type: ignore[operator]
    assert counted.float_buffers == len(shapes)
    floats = sum(p.numel() for p in model.parameters())
    assert counted.parameters == row.elements + floats
    stored = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    assert counted.state_bytes == stored
    assert not counted.pure
    blocks = linear_state(model)
    assert blocks.gradient_bytes == 4 * blocks.weights + sum(
        4 * p.numel()
        for m in model.blocks.modules()
        for p in m.parameters(recurse=False)
        if p.dim() > 1
    )
    assert blocks.weights == row.elements


def test_audit_has_no_row_without_direct_linears() -> None:
    assert "integer weights of other formats" not in {
        row.what for row in audit(nn.Linear(2, 2)).rows
    }


def test_noise_depends_on_seed_and_module_name() -> None:
    model = direct()
    seed_votes(model, 11)
    name = "blocks.1.attention.key"
    control = model.get_submodule(name).control
    assert (int(control[SEED]), int(control[STREAM])) == (11, stream_id(name))


def test_state_dict_restores_the_codes() -> None:
    model = direct()
    other = direct(zero_residual=True)
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    tokens = torch.randint(0, 50, (2, 9))
    assert torch.equal(model(tokens), other(tokens))


def test_recomputed_activations_change_no_gradient() -> None:
    model = direct()
    tokens = torch.randint(0, 50, (2, 9))

    def gradients() -> list[Tensor]:
        for module in linears(model):
            module.gradient = None
        model(tokens).square().sum().backward()
        return [module.gradient for module in linears(model) if module.gradient is not None]

    kept = gradients()
    model.set_activation_checkpointing(True)
    again = gradients()
    assert len(kept) == len(again) == 12
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))


def test_compiled_model_breaks_at_the_linears() -> None:
    layer = DirectLinear(torch.randn(4, 6))
    x = torch.randn(2, 6)
    compiled = torch.compile(nn.Sequential(nn.Identity(), layer), backend="eager")
    y = compiled(x)
    assert torch.equal(y, layer(x))
    y.sum().backward()
    assert layer.gradient is not None


@pytest.mark.parametrize("option", [{"float_parts": ["head"]}, {"levels": "int4"}])
def test_options_outside_their_range_are_refused(option: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        make_choice("model", "direct", option)
