"""Vectors of trits as gains and as factors of rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from arb_ternary.backends.select import candidates, use_backend
from arb_ternary.ternary.linear import TernaryLinear
from arb_ternary.ternary.models import ternary_modules
from arb_ternary.ternary.module import TernaryModule
from arb_ternary_text.models import trit_vector
from arb_ternary_text.models.config import VECTOR_TRITS, DecoderConfig
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_text.models.rms_norm import RMSNorm
from arb_ternary_text.models.scaled_linear import ScaledTernaryLinear
from arb_ternary_text.models.trit_vector import TritVector
from arb_ternary_train.audit import audit
from arb_ternary_votes.scaled_votes import ScaledVotes
from arb_ternary_votes.sign_votes import SignVotes

SMALL: dict[str, Any] = {"width": 32, "layers": 1, "heads": 2, "feed_forward": 64, "max_length": 16}


def drawn(vector: TritVector, seed: int = 1) -> np.ndarray:
    """Give a vector random trits, and return them as numbers ``[N, D]``."""
    shape = (vector.shape.out_features, vector.shape.in_features)
    trits = torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed)).to(
        torch.int8
    )
    vector.set_trits(trits)
    return trits.numpy().astype(np.float64)


@pytest.mark.parametrize("trits", VECTOR_TRITS)
def test_numbers_are_1_plus_the_mean_of_their_trits(trits: int) -> None:
    vector = TritVector(5, trits)
    assert torch.equal(vector(), torch.ones(5))
    expected = 1 + drawn(vector).mean(axis=1)
    assert np.array_equal(vector().detach().numpy(), expected)
    assert np.array_equal(vector.values().numpy(), expected)
    vector.set_trits(torch.full((5, trits), -1, dtype=torch.int8))
    assert torch.equal(vector.values(), torch.zeros(5))


@pytest.mark.parametrize("trits", VECTOR_TRITS)
def test_every_number_is_exact_in_bfloat16(trits: int) -> None:
    vector = TritVector(2 * trits + 1, trits)
    held = torch.zeros(2 * trits + 1, trits, dtype=torch.int8)
    for row in range(2 * trits + 1):
        held[row, : abs(row - trits)] = 1 if row > trits else -1
    vector.set_trits(held)
    assert torch.equal(vector().bfloat16().float(), torch.arange(2 * trits + 1) / trits)


def test_a_number_of_trits_that_is_no_power_of_two_is_refused() -> None:
    with pytest.raises(ValueError, match=r"trits must be one of \(4, 8, 16, 32\), got 12"):
        TritVector(3, 12)


def test_each_trit_gets_the_vote_of_its_number() -> None:
    vector = TritVector(3, 8)
    SignVotes({"vector": vector})
    before = vector.logical_votes().clone()
    assert len(before[0].unique()) == 8  # they are spread, so that they turn one after another
    assert torch.equal(before, before[:1].expand_as(before))
    (vector() * torch.tensor([2.0, 0.0, -0.5])).sum().backward()
    # A vote is the sign of the gradient, negated.
    assert torch.equal(
        vector.logical_votes() - before,
        torch.tensor([-1, 0, 1], dtype=torch.int8)[:, None].expand(3, 8),
    )


def test_trit_vectors_learn_arbitrary_numbers() -> None:
    """Every number of a least-squares problem is found to within a step."""
    wanted = torch.tensor([1.0, 0.7, 1.3, 0.4, 1.75, 1.05])
    torch.manual_seed(0)
    vector = TritVector(6, 16)
    optimizer = ScaledVotes({"vector": vector}, lr=0.4, leak=0.0)
    assert [group["lr"] for group in optimizer.param_groups] == [0.05]
    for _ in range(300):
        optimizer.zero_grad()
        noise = 0.05 * torch.randn(6)
        (vector() - wanted + noise).square().sum().backward()
        optimizer.step()
    assert (vector.values() - wanted).abs().max() <= 1 / 16


def test_rows_are_multiplied_and_votes_have_their_gradients() -> None:
    torch.manual_seed(3)
    scaled = ScaledTernaryLinear(64, 5, factors="rows", trits=8, group_size=32, activations="float")
    plain = TernaryLinear(64, 5, group_size=32, activations="float")
    plain.set_trits(scaled.trits(), scaled.exponent)
    factors = torch.from_numpy(1 + drawn(scaled.row_trits).mean(axis=1)).float()
    x, other = (
        torch.randn(4, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        for _ in range(2)
    )
    grad = torch.randn(4, 5, generator=torch.Generator().manual_seed(2))
    y = scaled(x)
    products = plain(other)
    torch.testing.assert_close(y, factors * products, rtol=1e-6, atol=0)
    before = scaled.row_trits.logical_votes().clone()
    y.backward(grad)
    products.backward(factors * grad)
    torch.testing.assert_close(x.grad, other.grad, rtol=1e-5, atol=1e-6)
    assert torch.equal(scaled.votes, plain.votes)
    # The vote of a factor's trits is the negated sign of d/ds_n of sum(g s y), the sum over rows of
    # g y.
    voted = scaled.row_trits.logical_votes() - before
    expected = -(grad * products).sum(dim=0).sign().to(torch.int8)
    assert torch.equal(voted, expected[:, None].expand(5, 8))
    torch.testing.assert_close(scaled.dense_weight(), factors.unsqueeze(1) * plain.dense_weight())


@pytest.mark.parametrize("name", [each.name for each in candidates() if each.usable])
def test_factors_compute_with_the_backend_of_their_linear(name: str) -> None:
    linear = ScaledTernaryLinear(16, 4, factors="rows", trits=8, backend=name)
    assert linear.row_trits.chosen_backend == linear.chosen_backend == name


def test_a_norm_multiplies_by_its_gains() -> None:
    norm = RMSNorm(16, eps=1e-5, gain=True, trits=8)
    gains = 1 + drawn(norm.gains).mean(axis=1)
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(1))
    numbers = x.double().numpy()
    expected = numbers / np.sqrt((numbers**2).mean(axis=1, keepdims=True) + 1e-5) * gains
    np.testing.assert_allclose(norm(x).detach().numpy(), expected, rtol=1e-5, atol=1e-6)


def test_a_decoder_with_trit_vectors_is_pure() -> None:
    config = DecoderConfig(
        **SMALL,
        row_scales=True,
        learned_norms=True,
        inner_gains=True,
        query_key_norm=True,
        vector_trits=8,
    )
    model = Decoder(config, 16)
    counted = audit(model)
    assert (counted.float_parameters, counted.float_buffers) == (0, 0)
    assert config.pure
    assert config.planned().kinds == {"ternary"}
    kinds = {
        type(module) for module in model.modules() if isinstance(module, TernaryModule | RMSNorm)
    }
    assert {kind.__name__ for kind in kinds} == {
        "TernaryEmbedding",
        "ScaledTernaryLinear",
        "RMSNorm",
        "TritVector",
    }
    # A factor per row of the six linears and the head, and a gain per feature of six norms and the
    # final one.
    rows = 4 * 32 + 64 + 32 + 16
    gains = 3 * 32 + 64 + 2 * 16 + 32
    numbers = [each.shape.out_features for each in model.modules() if isinstance(each, TritVector)]
    assert sum(numbers) == rows + gains


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"vector_trits": 8}, "'vector_trits' has no effect"),
        (
            {"vector_trits": 8, "float_parts": ("norms",)},
            "'vector_trits' has no effect",
        ),
        ({"vector_trits": 5, "row_scales": True}, "vector_trits"),
    ],
)
def test_invalid_vector_trits_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DecoderConfig(**options)


def _steps(gradients: str, summed: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train a decoder whose vectors are of trits; return losses and buffers."""
    torch.manual_seed(5)
    vectors = {"row_scales": True, "learned_norms": True, "inner_gains": True, "vector_trits": 8}
    with use_backend("cpu"):
        model = Decoder(DecoderConfig(**SMALL, **vectors, gradients=gradients), 16)
    modules = dict(ternary_modules(model))
    modules["blocks.0.attention.norm.gains"].frozen = True
    optimizer = ScaledVotes(modules, lr=0.4)
    for module in modules.values():
        module.sum_votes(summed)
    tokens = torch.randint(0, 16, (2, 16), generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(3):
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {name: buffer.clone() for name, buffer in model.named_buffers()}


@pytest.mark.skipif(
    not any(each.name == "cpu" and each.usable for each in candidates()),
    reason="the native backend is not usable here",
)
@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("gradients", ["float", "int8"])
def test_vectors_computed_together_learn_as_those_computed_one_by_one(
    gradients: str, summed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    values = trit_vector._Values.forward

    def counted(ctx: Any, anchor: torch.Tensor, vectors: list[TritVector]) -> Any:
        calls.append(len(vectors))
        return values(ctx, anchor, vectors)

    monkeypatch.setattr(trit_vector._Values, "forward", staticmethod(counted))
    together = _steps(gradients, summed)
    # Factors of six linears and three gains that are not frozen; those of final norm and head.
    assert calls == [9, 2] * 3
    monkeypatch.setattr(trit_vector, "_has_kernels", lambda module: False)
    losses, buffers = _steps(gradients, summed)
    assert together[0] == losses
    for name, buffer in buffers.items():
        assert torch.equal(buffer, together[1][name]), name
