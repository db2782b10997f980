"""Scales as powers of two: a power of two comes back bit for bit, whatever shares it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from arb_ternary.errors import DataError
from arb_ternary_interchange.decoder.published import ScaledTrits
from arb_ternary_interchange.decoder.scales import (
    CELLS,
    coarsest_grouping,
    split_scales,
    ternary_rows,
)
from arb_ternary_votes.scaled_votes import CELLS as CELLS_OF_THE_RULE


@given(
    rows=st.integers(1, 5),
    columns=st.integers(1, 300),
    group=st.sampled_from([32, 64, 128, 256, "row", "tensor"]),
    factor=st.sampled_from([1.0, 0.75, 1.3]),
    seed=st.integers(0, 1000),
)
def test_exponents_come_back_and_the_factor_is_the_remainder(
    rows: int, columns: int, group: Any, factor: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    size = columns if isinstance(group, str) else group
    shape = (1, 1) if group == "tensor" else (rows, -(-columns // size))
    exponent = torch.randint(-20, 5, shape, generator=generator)
    trits = torch.randint(-1, 2, (rows, columns), generator=generator).to(torch.int8)
    scale = factor * torch.exp2(exponent.float())
    split = split_scales(
        "w", ScaledTrits(trits, scale.view(1) if group == "tensor" else scale, size)
    )
    # 0.75 is 2^0 times 0.75 and 1.3 is 2^0 times 1.3: both between the square roots of a half and
    # of two.
    assert split.remainder == pytest.approx(factor, rel=1e-7)
    assert split.error == pytest.approx(abs(1 / factor - 1), rel=1e-6, abs=1e-7)
    assert torch.equal(split.trits, trits)
    # Held in any finer division, an element has the exponent that it had.
    finer = [each for each in (32, 64, 128, 256) if size % each == 0 or isinstance(group, str)]
    for held in finer:
        groups = -(-columns // held)
        wide = split.exponents(rows, held, groups).repeat_interleave(held, dim=1)[:, :columns]
        expected = exponent.repeat_interleave(size, dim=1)[:, :columns].expand(rows, columns)
        assert torch.equal(wide.to(torch.int64), expected)


@pytest.mark.parametrize(
    ("found", "held"),
    [
        (["tensor", "tensor"], "tensor"),
        (["tensor", "row"], "row"),
        (["row", 256, "tensor"], 256),
        ([128, 256], 128),
        ([32, 256, "row"], 32),
        ([], "tensor"),
    ],
)
def test_the_coarsest_grouping_that_holds_all_is_chosen(found: list[Any], held: Any) -> None:
    assert coarsest_grouping(found) == held


def test_unknown_exponents_are_taken_from_the_row() -> None:
    scale = torch.tensor([[0.0, 0.25, 2.0], [0.0, 0.0, 0.0], [-4.0, 1.0, 1.0]])
    trits = torch.ones(3, 96, dtype=torch.int8)
    split = split_scales("w", ScaledTrits(trits, scale, 32))
    assert split.exponent.tolist() == [[-2, -2, 1], [-2, -2, -2], [2, 0, 0]]
    assert split.trits[:, ::32].tolist() == [[0, 1, 1], [0, 0, 0], [-1, 1, 1]]
    nothing = split_scales("w", ScaledTrits(trits, torch.zeros(1), 96))
    assert (nothing.grouping, nothing.remainder, int(nothing.trits.abs().max())) == (
        "tensor",
        1.0,
        0,
    )


@pytest.mark.parametrize("value", [1e-40, math.inf, math.nan])
def test_a_scale_beyond_the_exponents_is_refused(value: float) -> None:
    trits = torch.ones(2, 32, dtype=torch.int8)
    with pytest.raises(DataError, match=r"w: (a scale is not finite|scales from .* are beyond)"):
        split_scales("w", ScaledTrits(trits, torch.tensor([value]), 32))


def test_the_cells_are_those_of_the_default_rule() -> None:
    assert CELLS == CELLS_OF_THE_RULE


@pytest.mark.parametrize(("bits", "group", "columns"), [(8, 32, 70), (4, 70, 70), (2, 64, 128)])
def test_trits_and_accumulators_are_the_two_digits_of_a_weight(
    bits: int, group: int, columns: int
) -> None:
    weight = torch.randn(1030, columns, generator=torch.Generator().manual_seed(bits)) / 3
    weight[7] = 0
    trits, exponent, votes = ternary_rows(weight, group, bits)
    wide = exponent.double().repeat_interleave(group, dim=1)[:, :columns]
    for start in range(0, columns, group):
        mean = weight[:, start : start + group].double().abs().mean(dim=1)
        here = mean > 0
        assert torch.equal(exponent[here, start // group].double(), mean[here].log2().round())
    number = trits + votes / CELLS[bits]
    scaled = weight.double() / 2**wide
    limit = 2 - 1 / CELLS[bits]
    assert (
        float((number - scaled.clamp(-limit, limit)).abs().max())
        <= 0.5 / CELLS[bits] + (bits == 2) * 0.5
    )
    assert int(trits[7].abs().max()) == int(votes[7].abs().max()) == 0
