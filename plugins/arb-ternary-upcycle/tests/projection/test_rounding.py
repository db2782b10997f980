"""Rounding of matrices, against exhaustive search and plain restatements in numpy."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from arb_ternary_interchange.decoder.scales import ternary_rows
from arb_ternary_upcycle.projection.config import Policy, ProjectionConfig
from arb_ternary_upcycle.projection.correction import corrected, damped
from arb_ternary_upcycle.projection.gptq import compensate, inverse_factor
from arb_ternary_upcycle.projection.rounded import Rounded
from arb_ternary_upcycle.projection.scales import absmean, least_squares
from arb_ternary_upcycle.projection.solve import project
from arb_ternary_upcycle.projection.statistics import InputStatistics


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mixed(tokens: int, columns: int, seed: int = 1) -> torch.Tensor:
    """Draw correlated inputs, a few of them strong."""
    mix = normal(columns, columns, seed=seed) * (1 + torch.arange(columns)) ** -0.7
    return normal(tokens, columns, seed=seed + 1) @ mix.mT


def least_error(row: np.ndarray[Any, Any], hessian: np.ndarray[Any, Any]) -> float:
    """Return the least error over all trits and powers of two from 2^-10 to 2^6."""
    trits = np.array(list(itertools.product((-1, 0, 1), repeat=len(row))), dtype=np.float64)
    errors = []
    for power in range(-10, 7):
        d = trits * 2.0**power - row
        errors.append(np.einsum("tk,kl,tl->t", d, hessian, d).min())
    return float(min(errors))


def errors_of(weight: torch.Tensor, rounded: Rounded, hessian: torch.Tensor) -> torch.Tensor:
    d = rounded.dense().double() - weight.double()
    return ((d @ hessian.double()) * d).sum(dim=1)


@pytest.mark.parametrize("columns", [1, 2, 5, 6])
def test_least_squares_equals_exhaustive_search(columns: int) -> None:
    weight = normal(40, columns) * torch.exp2(3 * normal(40, 1, seed=9))
    weight = weight * torch.exp2(2 * normal(40, columns, seed=10))
    weight = weight.clamp(-30, 30)
    found = errors_of(weight, least_squares(weight, "row"), torch.eye(columns))
    best = [least_error(row, np.eye(columns)) for row in weight.double().numpy()]
    np.testing.assert_allclose(found.numpy(), best, rtol=1e-5, atol=1e-9)


def test_groups_and_matrices_share_the_best_exponent() -> None:
    weight = normal(3, 80) * torch.exp2(torch.arange(3.0))[:, None]
    grouped = least_squares(weight, 32)
    assert grouped.exponent.shape == (3, 3)
    for start in (0, 32, 64):
        alone = least_squares(weight[:, start : start + 32], "row")
        assert torch.equal(grouped.exponent[:, start // 32], alone.exponent[:, 0])
        assert torch.equal(grouped.trits[:, start : start + 32], alone.trits)
    whole = least_squares(weight, "tensor")
    assert whole.exponent.shape == (3, 1)
    assert len(set(whole.exponent.flatten().tolist())) == 1
    assert torch.equal(whole.trits.flatten(), least_squares(weight.reshape(1, -1), "row").trits[0])


def test_absmean_equals_an_import() -> None:
    weight = normal(7, 100)
    weight[2] = 0
    found = absmean(weight, 64)
    trits, exponent, votes = ternary_rows(weight, 64, 8)
    assert torch.equal(found.trits, trits)
    assert torch.equal(found.exponent, exponent)
    assert torch.equal(found.votes(8), votes)


@pytest.mark.parametrize("policy", ["absmean", "ls", "gptq", "gptq_cd"])
def test_rows_of_zeros_stay_zeros(policy: Policy) -> None:
    weight = normal(3, 8)
    weight[1] = 0
    found = project(weight, ProjectionConfig(policy=policy), "row", mixed(64, 8).mT @ mixed(64, 8))
    assert torch.equal(found.dense()[1], torch.zeros(8))
    assert bool(torch.isfinite(found.residue).all())
    nothing = project(torch.zeros(2, 8), ProjectionConfig(policy=policy), "row", torch.zeros(8, 8))
    assert not nothing.dense().any()


def restated_gptq(
    weight: np.ndarray[Any, Any], hessian: np.ndarray[Any, Any], scale: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """Optimal brain surgeon, one column at a time, with a new inverse for each."""
    left, rows, columns = weight.copy(), *weight.shape
    trits = np.zeros((rows, columns))
    for k in range(columns):
        inverse = np.linalg.inv(hessian[k:, k:])
        trits[:, k] = np.clip(np.round(left[:, k] / scale[:, k]), -1, 1)
        error = left[:, k] - trits[:, k] * scale[:, k]
        left[:, k:] -= np.outer(error / inverse[0, 0], inverse[0])
    return trits


@pytest.mark.parametrize("columns", [5, 32, 70])
def test_gptq_equals_a_plain_restatement(columns: int) -> None:
    weight = normal(12, columns).double()
    inputs = mixed(300, columns).double()
    hessian = damped(inputs.mT @ inputs, 0.01)
    scale = torch.exp2(
        torch.randint(-1, 1, (columns, 12), generator=torch.Generator().manual_seed(3))
    ).double()
    trits, _ = compensate(weight.mT.contiguous(), inverse_factor(hessian), scale)
    expected = restated_gptq(weight.numpy(), hessian.numpy(), scale.mT.numpy())
    np.testing.assert_array_equal(trits.mT.numpy(), expected)


@pytest.mark.parametrize("policy", ["gptq", "gptq_cd"])
def test_trit_is_nearest_to_trit_plus_residue(policy: Policy) -> None:
    weight = normal(6, 40)
    inputs = mixed(200, 40)
    found = project(
        weight, ProjectionConfig(policy=policy, descent_passes=100), 32, inputs.mT @ inputs
    )
    value = found.trits + found.residue
    assert torch.equal(value.round().clamp(-1, 1).to(torch.int8), found.trits)


@pytest.mark.parametrize("grouping", ["row", 32, "tensor"])
def test_descent_beats_gptq_beats_least_squares(grouping: Any) -> None:
    weight = normal(24, 96)
    inputs = mixed(400, 96)
    gram = inputs.mT @ inputs
    hessian = damped(gram, 0.01)
    found = {
        policy: errors_of(
            weight, project(weight, ProjectionConfig(policy=policy), grouping, gram), hessian
        )
        for policy in ("ls", "gptq", "gptq_cd")
    }
    if grouping == "tensor":
        found = {policy: error.sum(dim=0, keepdim=True) for policy, error in found.items()}
    assert bool((found["gptq_cd"] <= found["gptq"] * (1 + 1e-5)).all())
    assert float(found["gptq_cd"].sum()) < 0.97 * float(found["gptq"].sum())
    assert float(found["gptq"].sum()) < 0.3 * float(found["ls"].sum())


def test_descent_ends_at_a_local_optimum() -> None:
    weight = normal(5, 12)
    inputs = mixed(100, 12)
    gram = inputs.mT @ inputs
    hessian = damped(gram, 0.01)
    found = project(weight, ProjectionConfig(descent_passes=100), "row", gram)
    best = errors_of(weight, found, hessian)
    for k, trit in itertools.product(range(12), (-1, 0, 1)):
        trits = found.trits.clone()
        trits[:, k] = trit
        other = errors_of(
            weight, Rounded(trits, found.exponent, found.residue, found.size), hessian
        )
        assert bool((other >= best * (1 - 1e-4)).all())


def test_small_rows_are_near_the_optimum() -> None:
    """Optimal for independent inputs, within a third in total for dependent ones."""
    weight = normal(60, 5)
    diagonal = torch.diag(torch.tensor([4.0, 1.0, 0.5, 2.0, 1.0]))
    dependent = mixed(60, 5).mT @ mixed(60, 5)
    for gram, slack in ((diagonal, 1.0001), (dependent, 1.35)):
        hessian = damped(gram, 0.001)
        found = errors_of(
            weight, project(weight, ProjectionConfig(damping=0.001), "row", gram), hessian
        )
        best = [least_error(row, hessian.numpy()) for row in weight.double().numpy()]
        assert bool((found.numpy() >= np.array(best) * (1 - 1e-5)).all())
        assert float(found.sum()) <= slack * sum(best)


def test_each_row_takes_the_better_order() -> None:
    weight = normal(30, 48)
    inputs = mixed(300, 48)
    gram = inputs.mT @ inputs
    hessian = damped(gram, 0.01)
    never, always, auto = (
        errors_of(
            weight,
            project(weight, ProjectionConfig(policy="gptq", activation_order=order), "row", gram),
            hessian,
        )
        for order in ("never", "always", "auto")
    )
    np.testing.assert_allclose(auto.numpy(), torch.minimum(never, always).numpy(), rtol=1e-4)
    assert bool((never < always).any())
    assert bool((always < never).any())


def test_correction_is_ridge_regression_onto_teacher_outputs() -> None:
    weight = normal(4, 10).double()
    student = mixed(80, 10).double()
    teacher = mixed(80, 10, seed=5).double()
    gram = student.mT @ student
    cross = teacher.mT @ student
    found = corrected(weight, gram, cross, 0.05)
    ridge = 0.05 * gram.diagonal().mean().item()
    rows = np.concatenate([student.numpy(), np.sqrt(ridge) * np.eye(10)])
    wanted = np.concatenate([(teacher @ weight.mT).numpy(), np.sqrt(ridge) * weight.mT.numpy()])
    expected, *_ = np.linalg.lstsq(rows, wanted, rcond=None)
    np.testing.assert_allclose(found.numpy(), expected.T, rtol=1e-9)
    np.testing.assert_allclose(
        corrected(weight, gram, gram, 0.05).numpy(), weight.numpy(), rtol=1e-9
    )


def test_output_and_rounding_errors() -> None:
    weight = normal(4, 10)
    student = mixed(80, 10)
    teacher = mixed(80, 10, seed=5)
    statistics = InputStatistics(10)
    for x, y in zip(student.split(30), teacher.split(30), strict=True):
        statistics.add(x, y)
    rounded = least_squares(weight, "row")
    outputs = teacher @ weight.mT
    expected = torch.linalg.norm(student @ rounded.dense().mT - outputs) / torch.linalg.norm(
        outputs
    )
    assert statistics.output_error(weight, rounded) == pytest.approx(float(expected), rel=1e-4)
    own = student @ weight.mT
    expected = torch.linalg.norm(student @ rounded.dense().mT - own) / torch.linalg.norm(own)
    assert statistics.rounding_error(weight, rounded) == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize(("bits", "cell"), [(8, 64), (4, 7), (2, 1)])
def test_accumulators_hold_the_residue(bits: int, cell: int) -> None:
    weight = normal(6, 40)
    inputs = mixed(200, 40)
    for policy in ("absmean", "ls", "gptq", "gptq_cd"):
        found = project(weight, ProjectionConfig(policy=policy), 32, inputs.mT @ inputs)
        votes = found.votes(bits)
        assert int(votes.abs().max()) <= cell - 1
        inside = found.residue.abs() <= (cell - 1) / cell
        error = (votes.double() / cell - found.residue).abs()[inside]
        assert not len(error) or float(error.max()) <= 0.5 / cell + 1e-6
        if policy in ("absmean", "ls"):
            whole = torch.ldexp(
                found.trits + found.residue,
                found.exponent.int().repeat_interleave(32, dim=1)[:, :40],
            )
            torch.testing.assert_close(whole, weight)
