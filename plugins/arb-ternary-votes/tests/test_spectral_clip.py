"""Votes cast from gradients with cut singular values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from arb_ternary import TernaryLinear
from arb_ternary.ternary.models import seed_votes
from arb_ternary_votes.scaled_votes import ScaledVotes
from arb_ternary_votes.spectral_clip import clipped


def even(matrix: np.ndarray) -> np.ndarray:
    return matrix / np.sqrt((matrix**2).mean())


def with_singular_values(
    values: np.ndarray, rows: int, columns: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return a matrix of random directions with these singular values."""
    rng = np.random.default_rng(5)
    left = np.linalg.qr(rng.normal(size=(rows, len(values))))[0]
    right = np.linalg.qr(rng.normal(size=(columns, len(values))))[0]
    return left, values, right.T


@pytest.mark.parametrize(("rows", "columns"), [(40, 56), (56, 40), (40, 40), (160, 200)])
def test_largest_singular_values_are_cut_to_the_least(rows: int, columns: int) -> None:
    count = min(rows, columns)
    rank = min(32, count // 4)
    values = np.concatenate([np.linspace(60.0, 40.0, rank), np.linspace(0.4, 0.1, count - rank)])
    left, values, right = with_singular_values(values, rows, columns)
    found = clipped(torch.tensor((left * values) @ right, dtype=torch.float32))
    assert found.dtype == torch.float32
    assert found.is_contiguous()
    wanted = even((left * np.minimum(values, values[rank - 1])) @ right)
    assert np.allclose(found.numpy(), wanted, atol=1e-3)


def test_without_a_gap_they_are_nearly_cut_so() -> None:
    """Singular values fall by a power law, and one product finds them nearly."""
    left, values, right = with_singular_values(50.0 / np.arange(1, 129), 128, 192)
    gradient = torch.tensor((left * values) @ right, dtype=torch.float32)
    found = np.linalg.svd(clipped(gradient).numpy(), compute_uv=False)
    wanted = np.minimum(values, values[31])
    wanted = wanted / np.sqrt((wanted**2).sum()) * np.sqrt(128 * 192)
    assert found[0] < 1.5 * wanted[0]
    assert np.abs(np.log(found / wanted)).mean() < 0.1
    coarse = clipped(gradient.bfloat16())
    assert float((coarse - clipped(gradient)).square().mean().sqrt()) < 0.1


def test_whatever_its_size_a_gradient_casts_the_same() -> None:
    gradient = torch.tensor(
        np.random.default_rng(0).normal(0.8, 1.0, (24, 40)), dtype=torch.float32
    )
    for size in (2.0**-60, 2.0**60):
        torch.testing.assert_close(
            clipped(gradient * size), clipped(gradient), rtol=1e-4, atol=1e-4
        )
    assert torch.equal(clipped(gradient), clipped(gradient))
    assert not clipped(torch.zeros(8, 4)).any()
    assert clipped(torch.zeros(0, 4)).shape == (0, 4)
    for wrong in (torch.nan, torch.inf):
        broken = gradient.clone()
        broken[2, 3] = wrong
        assert clipped(broken).isnan().all()


def test_of_one_sample_the_gradient_stays_as_it_is() -> None:
    """The gradient has one direction; the other seven are only rounding."""
    rng = np.random.default_rng(1)
    gradient = np.outer(rng.normal(size=32), rng.normal(size=48))
    found = clipped(torch.tensor(gradient, dtype=torch.float32)).numpy()
    assert np.allclose(found, even(gradient), atol=0.02)


def layer() -> TernaryLinear:
    module = TernaryLinear(40, 24, group_size="row", activations="float", scale_rule="frozen")
    torch.manual_seed(0)
    module.set_trits(torch.randint(-1, 2, (24, 40), dtype=torch.int8))
    seed_votes(torch.nn.ModuleDict({"layer": module}), 7)
    return module


def cast(module: TernaryLinear, gradient: Tensor) -> None:
    """Give the module this weight gradient."""
    module(torch.eye(module.in_features)).backward(gradient.T)


def test_votes_equal_those_of_the_transformed_gradient() -> None:
    cut = layer()
    plain = layer()
    optimizers = [ScaledVotes({"layer": cut}, spectral_clip=True), ScaledVotes({"layer": plain})]
    for step in range(8):
        gradient = torch.tensor(
            np.random.default_rng(step).normal(0.8, 1.0, (24, 40)), dtype=torch.float32
        )
        cast(cut, gradient)
        wanted = np.concatenate(
            [[0.0], (gradient.numpy() ** 2).sum(1), (gradient.numpy() ** 2).sum(0)]
        )
        assert np.allclose(cut.stats.numpy(), wanted, rtol=1e-5)
        cast(plain, clipped(gradient))
        outcomes = [optimizer.step() for optimizer in optimizers]
        for optimizer in optimizers:
            optimizer.zero_grad()
        assert outcomes[0].flips == outcomes[1].flips
        assert torch.equal(cut.logical_votes(), plain.logical_votes())
    assert cut.logical_votes().any()


def test_a_head_casts_the_votes_of_its_gradient() -> None:
    modules = {"head": layer(), "up": layer()}
    ScaledVotes(modules, spectral_clip=True)
    assert modules["head"].transform is None
    assert modules["up"].transform is not None


def test_two_ways_to_change_a_gradient_are_refused() -> None:
    with pytest.raises(ValueError, match="both choose what votes are cast from"):
        ScaledVotes({"up": layer()}, orthogonal=True, spectral_clip=True)
