"""Wrong kernels are found before they are timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from arb_ternary.backends import reference, reference_scaled_votes
from arb_ternary.backends.vote_state import VoteState
from arb_ternary.errors import ArbError
from arb_ternary_bench.kernels.cells import Cell, check_close, check_equal, poisoned
from arb_ternary_bench.kernels.operands import Operands, exact_grad_input, exact_linear
from arb_ternary_bench.kernels.ops import OPS
from arb_ternary_testing import restatement


def check_all(cell: Cell, backend: str) -> None:
    for contender in OPS[cell.op].contenders(cell, Operands(cell, 7), [backend]):
        contender.check()


@pytest.mark.parametrize(
    "sizes", [(3, 48, 160, 32), (1, 64, 128, 128), (5, 33, 70, 32), (2, 7, 65, 65)]
)
@pytest.mark.parametrize("op", OPS)
def test_the_torch_backend_passes_every_check(
    op: str, sizes: tuple[int, int, int, int], make_cell: Callable[..., Cell]
) -> None:
    rows, out_features, in_features, group = sizes
    check_all(
        make_cell(
            op, rows=rows, out_features=out_features, in_features=in_features, group_size=group
        ),
        "torch",
    )


def nudged(result: Tensor) -> Tensor:
    """The last element changed in its last bit."""
    flat = result.flatten()
    flat[-1] = torch.nextafter(flat[-1], torch.tensor(torch.inf))
    return result


def test_one_wrong_bit_of_an_integer_product_is_found(
    changed: Callable[..., str], make_cell: Callable[..., Cell]
) -> None:
    name = changed(linear=lambda *arguments: nudged(reference.linear(*arguments)))
    with pytest.raises(
        ArbError,
        match=r"linear 48x160, M = 3, hot: changed: 1 of 144 elements are wrong; .* \(2, 47\)",
    ):
        check_all(make_cell("linear"), name)


def test_one_wrong_bit_of_an_input_gradient_is_found(
    changed: Callable[..., str], make_cell: Callable[..., Cell]
) -> None:
    name = changed(
        linear_grad_input=lambda *arguments: nudged(reference.linear_grad_input(*arguments))
    )
    with pytest.raises(ArbError, match="1 of 480 elements are wrong"):
        check_all(make_cell("linear_grad_input"), name)


def unwritten(*arguments: Any) -> Tensor:
    """A product that forgets its last row."""
    right = reference.linear(*arguments)
    out = torch.empty_like(right)
    out[:-1] = right[:-1]
    return out


@pytest.mark.parametrize("op", ["linear", "linear_float"])
def test_a_row_that_is_not_written_is_found(
    op: str, changed: Callable[..., str], make_cell: Callable[..., Cell]
) -> None:
    with pytest.raises(
        ArbError, match=r"changed: (48 of 144 elements are wrong|the largest error is nan)"
    ):
        check_all(make_cell(op), changed(linear=unwritten))


def test_a_wrong_float_product_is_found(
    changed: Callable[..., str], make_cell: Callable[..., Cell]
) -> None:
    name = changed(linear=lambda *arguments: reference.linear(*arguments) * 1.5)
    with pytest.raises(ArbError, match="the largest error is"):
        check_all(make_cell("linear_float"), name)


def test_a_wrong_quantisation_is_found(
    changed: Callable[..., str], make_cell: Callable[..., Cell]
) -> None:
    def truncating(x: Tensor) -> tuple[Tensor, Tensor]:
        scale = x.abs().amax(dim=1) / 127
        return (x / scale.unsqueeze(1)).to(torch.int8), scale

    with pytest.raises(ArbError, match=r"rows: .* elements are wrong"):
        check_all(make_cell("quantize_rows"), changed(quantize_rows=truncating))


@pytest.mark.parametrize("op", ["cast_scaled_votes", "cast_scaled_votes_int8"])
def test_wrong_votes_are_found(
    op: str, changed: Callable[..., str], make_cell: Callable[..., Cell]
) -> None:
    def of_another_stream(*operands: Any) -> None:
        *most, state = operands
        control = state.control + torch.tensor([0, 0, 1, 0])
        reference_scaled_votes.cast_scaled_votes(*most, state._replace(control=control))

    def none_at_all(*operands: Any) -> None:
        operands[-1].magnitudes.fill_(1.0)

    with pytest.raises(ArbError, match="votes"):
        check_all(make_cell(op, rows=32), changed(cast_scaled_votes=none_at_all))
    if op.endswith("int8"):
        from arb_ternary.plugins.manager import reset_manager

        reset_manager()
        with pytest.raises(ArbError, match="votes"):
            check_all(make_cell(op, rows=32), changed(cast_scaled_votes=of_another_stream))


def test_a_flip_that_is_missed_is_found(
    changed: Callable[..., str], make_cell: Callable[..., Cell]
) -> None:
    def lazy(state: VoteState, *settings: Any) -> Tensor:
        before = state.weight.clone()
        flips = reference_scaled_votes.apply_scaled_votes(state, *settings)
        state.weight[-1] = before[-1]
        return flips

    with pytest.raises(ArbError, match=r"apply_scaled_votes .*weight"):
        check_all(
            make_cell("apply_scaled_votes", out_features=64, in_features=512),
            changed(apply_scaled_votes=lazy),
        )


def test_poisoned_memory_is_nan_and_is_restored() -> None:
    with poisoned(((64, 64), torch.float32)):
        assert bool(torch.isnan(torch.empty(100)).all())
        assert int(torch.empty(100, dtype=torch.int8).min()) == 127
    assert not torch.are_deterministic_algorithms_enabled()


def test_exact_products_agree_with_the_number_format(
    make_cell: Callable[..., Cell],
) -> None:
    cell = make_cell("linear", rows=5, out_features=21, in_features=90, group_size=32)
    made = Operands(cell, 3)
    y = exact_linear(made.q, made.scale, made.trits, made.exponent, cell.shape)
    arrays = [tensor.numpy() for tensor in (made.q, made.scale, made.trits, made.exponent)]
    assert y.numpy().tolist() == restatement.linear_int8(*arrays, 32, None).tolist()
    dx = exact_grad_input(
        made.int8_gradient, made.gradient_scale, made.trits, made.exponent, cell.shape
    )
    wanted = restatement.linear_int8_grad_input(
        made.int8_gradient.numpy(),
        float(made.gradient_scale),
        made.trits.numpy(),
        made.exponent.numpy(),
        32,
    )
    assert dx.numpy().tolist() == wanted.tolist()


def test_operands_are_fresh_and_never_zeros(make_cell: Callable[..., Cell]) -> None:
    one = Operands(make_cell(), 1)
    other = Operands(make_cell(), 2)
    for name in ("trits", "exponent", "x", "q", "scale", "gradient", "int8_gradient"):
        tensor = getattr(one, name)
        assert bool(tensor.any()), name
        assert not torch.equal(tensor, getattr(other, name)), name


def test_comparisons_tell_dtype_shape_and_size_apart() -> None:
    check_equal("x", torch.ones(2), torch.ones(2))
    check_close("x", torch.ones(2) * 1.01, torch.ones(2))
    with pytest.raises(ArbError, match=r"torch.float64 \(2,\), not torch.float32"):
        check_equal("x", torch.ones(2, dtype=torch.float64), torch.ones(2))
    with pytest.raises(ArbError, match="is nan"):
        check_close("x", torch.tensor([1.0, torch.nan]), torch.ones(2))
    with pytest.raises(ArbError, match=r"\(3,\), not \(2,\)"):
        check_close("x", torch.ones(3), torch.ones(2))
