"""The analytic model of an op on a GPU: closed forms."""

from __future__ import annotations

import pytest

from arb_ternary.backends.protocol import WeightShape
from arb_ternary_bench.roofline import GPUS, OPS, occupancy, work

SHAPE = WeightShape(4096, 4096, 128)
H100 = GPUS[0]


def test_one_row_is_bound_by_memory_and_reads_two_bits_a_weight() -> None:
    least = work("linear", 1, SHAPE)
    weight = 4096 * 4096 // 4 + 4096 * 32
    assert least.bytes_moved == weight + 4096 + 4 + 2 * 4096
    assert least.operations == 2 * 4096 * 4096
    assert least.bound(H100) == "memory"
    assert least.floor(H100) == pytest.approx(least.bytes_moved / 3.35e12)


def test_many_rows_are_bound_by_arithmetic_twice_as_fast_in_int8() -> None:
    integer = work("linear", 8192, SHAPE)
    floating = work("linear", 8192, SHAPE, integer=False)
    assert (integer.bound(H100), floating.bound(H100)) == ("arithmetic", "arithmetic")
    assert integer.floor(H100) == pytest.approx(2 * 8192 * 4096 * 4096 / 1979e12)
    assert floating.floor(H100) / integer.floor(H100) == pytest.approx(1979 / 989)


def test_votes_read_and_write_every_accumulator_and_no_gradient() -> None:
    least = work("cast_votes", 16, SHAPE)
    assert 2 * 4096 * 4096 < least.bytes_moved < 2.6 * 4096 * 4096
    assert work("apply_votes", 1, SHAPE).bytes_moved == 4096 * 4096
    assert work("apply_votes", 1, WeightShape(4096, 4096, 128, 4)).bytes_moved == 4096 * 4096 // 2


@pytest.mark.parametrize("op", OPS)
def test_faster_memory_never_raises_a_floor(op: str) -> None:
    least = work(op, 64, SHAPE)
    assert 0 < least.floor(GPUS[1]) <= least.floor(H100)


@pytest.mark.parametrize(
    ("uses", "programs", "limit"),
    [
        # 168 registers: 5376 a warp, 21504 a program of 4 warps; three fit in 65536.
        ({"registers": 168, "shared": 0, "warps": 4}, 3, "registers"),
        ({"registers": 32, "shared": 115712, "warps": 8}, 2, "shared memory"),
        ({"registers": 16, "shared": 0, "warps": 8}, 8, "warps"),
        ({"registers": 16, "shared": 0, "warps": 1}, 32, "programs"),
    ],
)
def test_occupancy_follows_from_what_a_program_uses(
    uses: dict[str, int], programs: int, limit: str
) -> None:
    found = occupancy(H100, **uses, programs=1320)
    assert (found.programs, found.limit) == (programs, limit)
    assert found.warps == programs * uses["warps"]
    assert found.waves == pytest.approx(1320 / (programs * 132))
