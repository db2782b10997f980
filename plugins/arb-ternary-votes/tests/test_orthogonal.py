"""Votes cast from half-orthogonalised gradients."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor

from arb_ternary import TernaryEmbedding, TernaryLinear
from arb_ternary.ternary.models import seed_votes
from arb_ternary_votes.orthogonal import half_orthogonal, orthogonalised
from arb_ternary_votes.scaled_votes import ScaledVotes
from arb_ternary_votes.sign_votes import SignVotes

SEED = 7
SHAPES = [(6, 10), (10, 6), (8, 8), (1, 5)]


def even(matrix: np.ndarray) -> np.ndarray:
    return matrix / np.sqrt((matrix**2).mean())


def by_singular_values(gradient: np.ndarray) -> np.ndarray:
    """Return the orthogonalised gradient by a decomposition."""
    u, s, vt = np.linalg.svd(gradient, full_matrices=False)
    s = s / np.sqrt((s**2).sum())
    for _ in range(3):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return (u * s) @ vt


def gradient_of(shape: tuple[int, int], seed: int = 0) -> np.ndarray:
    """Return a matrix with a large mean, as gradients have it: one large singular value."""
    return np.random.default_rng(seed).normal(0.8, 1.0, shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_half_orthogonal_is_gradient_plus_orthogonal(
    shape: tuple[int, int],
) -> None:
    gradient = gradient_of(shape)
    orthogonal = by_singular_values(gradient)
    found = half_orthogonal(torch.tensor(gradient, dtype=torch.float32))
    assert found.dtype == torch.float32
    assert np.allclose(found.numpy(), even(gradient) + even(orthogonal), atol=1e-4)


def test_singular_values_are_near_one() -> None:
    gradient = torch.tensor(gradient_of((24, 40)), dtype=torch.float32)
    before, after = (
        np.linalg.svd(m.numpy(), compute_uv=False) for m in (gradient, orthogonalised(gradient))
    )
    assert before[0] > 2 * before[1]
    assert after.max() < 1.21
    assert np.median(after) > 0.65
    coarse = half_orthogonal(gradient.bfloat16())
    # of a root mean square of 2
    assert float((coarse - half_orthogonal(gradient)).square().mean().sqrt()) < 0.05


def test_whatever_its_size_a_gradient_casts_the_same() -> None:
    gradient = torch.tensor(gradient_of((8, 12)), dtype=torch.float32)
    assert torch.equal(half_orthogonal(gradient), half_orthogonal(gradient * 2**-20))
    assert not half_orthogonal(torch.zeros(3, 4)).any()
    assert half_orthogonal(torch.zeros(0, 4)).shape == (0, 4)


def layer(rows: int, columns: int, **options: str) -> TernaryLinear:
    given = {"group_size": "row", "activations": "float", "scale_rule": "frozen", **options}
    module = TernaryLinear(columns, rows, **given)  # type: ignore[arg-type]
    torch.manual_seed(0)
    module.set_trits(torch.randint(-1, 2, (rows, columns), dtype=torch.int8))
    seed_votes(torch.nn.ModuleDict({"layer": module}), SEED)
    return module


def cast(module: TernaryLinear, gradient: Tensor) -> None:
    """Give the module this weight gradient."""
    module(torch.eye(module.in_features)).backward(gradient.T)


@pytest.mark.parametrize("shape", SHAPES)
def test_votes_equal_those_of_the_transformed_gradient(
    shape: tuple[int, int],
) -> None:
    mixed = layer(*shape)
    plain = layer(*shape)
    optimizers = [ScaledVotes({"layer": mixed}, orthogonal=True), ScaledVotes({"layer": plain})]
    cast_any = False
    for step in range(12):
        gradient = torch.tensor(gradient_of(shape, step), dtype=torch.float32)
        cast(mixed, gradient)
        cast(plain, half_orthogonal(gradient))
        outcomes = [optimizer.step() for optimizer in optimizers]
        for optimizer in optimizers:
            optimizer.zero_grad()
        assert outcomes[0].flips == outcomes[1].flips
        assert torch.equal(mixed.logical_votes(), plain.logical_votes())
        assert torch.equal(mixed.trits(), plain.trits())
        cast_any = cast_any or bool(mixed.logical_votes().any())
    assert cast_any


def test_norms_are_those_of_the_gradient_itself() -> None:
    module = layer(6, 10)
    optimizer = ScaledVotes({"layer": module}, orthogonal=True)
    gradient = torch.tensor(gradient_of((6, 10)), dtype=torch.float32)
    cast(module, gradient)
    wanted = np.concatenate([[0.0], (gradient.numpy() ** 2).sum(1), (gradient.numpy() ** 2).sum(0)])
    assert np.allclose(module.stats.numpy(), wanted, rtol=1e-5)
    assert optimizer.step().grad_norm == pytest.approx(float(gradient.norm()), rel=1e-5)


def test_nonfinite_gradient_casts_no_votes() -> None:
    module = layer(6, 10)
    optimizer = ScaledVotes({"layer": module}, orthogonal=True)
    gradient = torch.tensor(gradient_of((6, 10)), dtype=torch.float32)
    cast(module, gradient)
    optimizer.step()
    optimizer.zero_grad()
    gradient[2, 3] = torch.nan
    cast(module, gradient)
    assert not module.logical_votes().any()
    # one NaN of the outputs makes a row of the product with the inputs
    assert int(module.stats[0]) == 10


def test_integers_of_eight_bits_cast_what_their_floats_do() -> None:
    rows = 8
    columns = 12
    tokens = 6
    generator = np.random.default_rng(3)
    x = torch.tensor(generator.integers(-4, 5, (tokens, columns)), dtype=torch.float32)
    x[:, 0] = 127.0  # a scale of 1 for every row, so that activations in int8 are these integers
    integers = layer(rows, columns, activations="int8", gradients="int8")
    floats = layer(rows, columns)
    optimizers = [ScaledVotes({"layer": module}, orthogonal=True) for module in (integers, floats)]
    for _ in range(3):
        # With 64 as the largest of a gradient these are integers in its scale, which rounding
        # leaves as they are.
        grad = torch.tensor(
            generator.choice([-64.0, 0.0, 64.0, 32.0], (tokens, rows)), dtype=torch.float32
        )
        for module, optimizer in zip((integers, floats), optimizers, strict=True):
            module(x).backward(grad)
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(integers.logical_votes(), floats.logical_votes())
    assert integers.logical_votes().any()


@pytest.mark.parametrize(
    ("name", "changed"), [("head", False), ("decoder.head", False), ("head.up", True)]
)
def test_a_head_casts_the_votes_of_its_gradient(name: str, changed: bool) -> None:
    module = layer(6, 10)
    ScaledVotes({name: module}, orthogonal=True)
    assert (module.transform is not None) == changed


def test_an_embedding_casts_the_votes_of_its_gradient() -> None:
    votes = {}
    for orthogonal in (False, True):
        module = TernaryEmbedding(9, 6, group_size="row", scale_rule="frozen")
        torch.manual_seed(0)
        module.set_trits(torch.randint(-1, 2, (9, 6), dtype=torch.int8))
        seed_votes(torch.nn.ModuleDict({"embedding": module}), SEED)
        optimizer = ScaledVotes({"embedding": module}, orthogonal=orthogonal)
        for step in range(3):
            module(torch.arange(9)).backward(
                torch.tensor(gradient_of((9, 6), step), dtype=torch.float32)
            )
            optimizer.step()
            optimizer.zero_grad()
        votes[orthogonal] = module.logical_votes()
    assert votes[True].any()
    assert torch.equal(votes[False], votes[True])


def test_next_optimizer_sets_the_transform_anew() -> None:
    module = layer(6, 10)
    for build, orthogonal in (
        (lambda: ScaledVotes({"layer": module}, orthogonal=True), True),
        (lambda: ScaledVotes({"layer": module}), False),
        (lambda: ScaledVotes({"layer": module}, orthogonal=True), True),
        (lambda: SignVotes({"layer": module}), False),
    ):
        build()
        assert (module.transform is not None) == orthogonal


def test_a_resumed_run_casts_the_same() -> None:
    def learn(module: TernaryLinear, optimizer: ScaledVotes, steps: range) -> None:
        for step in steps:
            cast(module, torch.tensor(gradient_of((8, 12), step), dtype=torch.float32))
            optimizer.step()
            optimizer.zero_grad()

    module = layer(8, 12)
    optimizer = ScaledVotes({"layer": module}, orthogonal=True, lr=0.3)
    learn(module, optimizer, range(4))
    resumed = layer(8, 12)
    resumed.load_state_dict(copy.deepcopy(module.state_dict()))
    other = ScaledVotes({"layer": resumed}, orthogonal=True, lr=0.3)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    before = module.trits()
    learn(module, optimizer, range(4, 12))
    learn(resumed, other, range(4, 12))
    assert torch.equal(module.logical_votes(), resumed.logical_votes())
    assert torch.equal(module.trits(), resumed.trits())
    assert not torch.equal(module.trits(), before)
