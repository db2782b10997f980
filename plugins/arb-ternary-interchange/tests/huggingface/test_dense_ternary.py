"""Find trits in float matrices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arb_ternary_interchange.huggingface.dense_ternary import absmean_trits, ternary_parts


def random_trits(rows: int, columns: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    trits = torch.randint(-1, 2, (rows, columns), generator=generator, dtype=torch.int8)
    trits[:, ::7] = trits[:, -1] = 1  # no group is all zero
    return trits


@settings(max_examples=80, deadline=None)
@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 600),
    group=st.sampled_from([32, 64, 128, 256, "row", "tensor"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**32),
)
def test_trits_and_exponents_are_found(
    rows: int, columns: int, group: object, dtype: torch.dtype, seed: int
) -> None:
    size = columns if isinstance(group, str) else int(str(group))
    trits = random_trits(rows, columns, seed)
    generator = torch.Generator().manual_seed(seed)
    shape = (1, 1) if group == "tensor" else (rows, -(-columns // size))
    scale = torch.exp2(torch.randint(-20, 5, shape, generator=generator).float()).expand(rows, -1)
    spread = scale.repeat_interleave(size, dim=1)[:, :columns]
    found = ternary_parts((trits * spread).to(dtype))
    assert found is not None
    assert torch.equal(found.trits, trits)
    assert found.group_size >= min(size, columns)  # neighbours may happen to agree
    assert torch.equal(
        found.scale.expand(rows, -1).repeat_interleave(found.group_size, dim=1)[:, :columns], spread
    )


def test_the_largest_groups_are_taken() -> None:
    trits = random_trits(6, 512, 0)
    for group, shape in ((32, (6, 16)), (64, (6, 8)), (128, (6, 4)), (256, (6, 2)), (512, (6, 1))):
        scale = torch.arange(1, 1 + shape[0] * shape[1]).view(shape).float()
        found = ternary_parts(trits * scale.repeat_interleave(group, dim=1))
        assert found is not None
        assert (found.group_size, tuple(found.scale.shape)) == (group, shape)
    found = ternary_parts(trits * 0.3)
    assert found is not None
    assert (found.group_size, found.scale.tolist()) == (512, pytest.approx([0.3]))


def test_a_matrix_of_two_magnitudes_is_not_ternary() -> None:
    weight = random_trits(40, 64, 0).float()
    weight[39, 63] = 0.5
    assert ternary_parts(weight) is None
    assert ternary_parts(torch.randn(4, 64)) is None
    assert ternary_parts(torch.full((1, 64), torch.inf)) is None


def test_zeros_agree_with_every_scale() -> None:
    weight = 0.25 * random_trits(4, 128, 0).float()
    weight[1, 32:64] = 0
    weight[2] = 0
    found = ternary_parts(weight)
    assert found is not None
    assert found.scale.tolist() == [0.25]
    nothing = ternary_parts(torch.zeros(4, 64))
    assert nothing is not None
    assert (nothing.scale.tolist(), int(nothing.trits.abs().sum())) == ([1.0], 0)


def test_online_weights_are_rounded_by_their_mean() -> None:
    weight = torch.tensor([[0.1, -0.6, 0.4], [0.9, -0.2, 0.2]])  # mean |w| = 0.4
    found = absmean_trits(weight)
    assert found.trits.tolist() == [[0, -1, 1], [1, 0, 0]]
    assert found.scale.tolist() == pytest.approx([0.4])
