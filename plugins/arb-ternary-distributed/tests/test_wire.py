"""Digits, flip lists and row bounds against numpy and numbers worked out by hand."""

from __future__ import annotations

from types import MappingProxyType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arb_ternary.backends import reference
from arb_ternary.backends.protocol import WeightShape
from arb_ternary.errors import EnvironmentProblem
from arb_ternary_distributed.wire import wire_kernel
from arb_ternary_distributed.wire.digits import (
    add_digits_,
    base_for,
    bytes_for,
    digits_to_bytes,
)
from arb_ternary_distributed.wire.flips import (
    apply_flips_,
    count_bytes,
    decode_flips,
    encode_flips,
    flip_list,
    flips_counted,
    repacked_flips_,
    unpacked_flip_list,
)
from arb_ternary_distributed.wire.rows import repacked_rows, row_bounds, weight_rows

BASES = (3, 5, 15, 255, 65535)
SIZES = (0, 1, 2, 4, 5, 6, 97, 32_769, 70_001)


def digits(count: int, base: int, seed: int = 0) -> torch.Tensor:
    half = base // 2
    drawn = np.random.default_rng(seed).integers(-half, half, count, endpoint=True)
    return torch.from_numpy(drawn.astype(np.int16))


def by_hand(values: np.ndarray, base: int) -> bytes:
    """Return the bytes of digits, computed one after another."""
    if base == 65535:
        return values.astype("<i2").tobytes()
    each = {3: 5, 5: 3, 15: 2, 255: 1}[base]
    width = -(-len(values) // each)
    padded = np.zeros(each * width, np.int64)
    padded[: len(values)] = values
    weights = [base**place for place in range(each)]
    return bytes(
        sum(
            weight * (int(padded[i + place * width]) + base // 2)
            for place, weight in enumerate(weights)
        )
        for i in range(width)
    )


def test_base_follows_from_the_limit() -> None:
    expected = {0: 3, 1: 3, 2: 5, 3: 15, 7: 15, 8: 255, 127: 255, 128: 65535, 32767: 65535}
    assert {limit: base_for(limit) for limit in expected} == expected
    for beyond in (-1, 32768):
        with pytest.raises(ValueError, match=r"0\.\.32767"):
            base_for(beyond)


def test_bytes_of_a_few_digits() -> None:
    # (1 + 1) * 1 + (0 + 1) * 3 + (-1 + 1) * 9 + (0 + 1) * 27 + (1 + 1) * 81 = 194
    assert digits_to_bytes(torch.tensor([1, 0, -1, 0, 1], dtype=torch.int16), 3).tolist() == [194]
    # Two bytes: the first holds values 0, 2, 4 and 6, the second 1, 3 and 5; what is missing is 0.
    values = torch.tensor([-1, 1, -1, -1, -1, -1, -1], dtype=torch.int16)
    assert digits_to_bytes(values, 3).tolist() == [81, 2 + 27 + 81]
    assert digits_to_bytes(torch.tensor([-300, 5], dtype=torch.int16), 65535).tolist() == [
        0xD4,
        0xFE,
        5,
        0,
    ]


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("count", SIZES)
def test_digits_match_numpy_and_come_back(base: int, count: int) -> None:
    values = digits(count, base)
    packed = digits_to_bytes(values, base)
    assert packed.numel() == bytes_for(count, base)
    assert packed.numpy().tobytes() == by_hand(values.numpy(), base)
    for dtype in (torch.int16, torch.int32):
        total = torch.arange(count).remainder(200).to(dtype)
        expected = total + values.to(dtype)
        add_digits_(total, packed, base)
        assert torch.equal(total, expected)


@given(base=st.sampled_from(BASES), data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_digits_come_back(base: int, data: st.DataObject) -> None:
    listed = data.draw(st.lists(st.integers(-(base // 2), base // 2), max_size=40))
    values = torch.tensor(listed, dtype=torch.int16)
    total = torch.zeros_like(values)
    add_digits_(total, digits_to_bytes(values, base), base)
    assert total.tolist() == listed


@pytest.mark.parametrize(("base", "value"), [(3, 2), (3, -2), (5, 3), (15, -8), (255, 128)])
def test_value_without_a_digit_is_an_error(base: int, value: int) -> None:
    with pytest.raises(ValueError, match=f"digits of base {base}"):
        digits_to_bytes(torch.tensor([0, 0, value], dtype=torch.int16), base)


def test_wrong_operands_are_refused() -> None:
    with pytest.raises(ValueError, match="int16"):
        digits_to_bytes(torch.zeros(3, dtype=torch.int8), 3)
    with pytest.raises(ValueError, match="base must be one of"):
        digits_to_bytes(torch.zeros(3, dtype=torch.int16), 4)


@given(rows=st.integers(0, 70), size=st.integers(1, 9))
@settings(deadline=None)
def test_row_bounds_are_those_of_chunks(rows: int, size: int) -> None:
    chunks = torch.arange(rows).chunk(size)
    expected = [(int(chunk[0]), int(chunk[-1]) + 1) for chunk in chunks if len(chunk)]
    bounds = row_bounds(rows, size)
    assert bounds[: len(expected)] == expected
    assert all(bound == (rows, rows) for bound in bounds[len(expected) :])
    assert len(bounds) == size


def test_row_bounds_refuse_no_rank() -> None:
    with pytest.raises(ValueError, match="ranks 1 or more"):
        row_bounds(4, 0)


SHAPES = ((0, 5), (3, 0), (1, 1), (5, 3), (7, 128), (4, 130), (9, 257), (300, 190))


def moved(rows: int, columns: int, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return trits before and after a step in which some move by one."""
    rng = np.random.default_rng(seed)
    before = rng.integers(-1, 2, (rows, columns)).astype(np.int8)
    step = np.where(rng.random(before.shape) < share, rng.choice([-1, 1], before.shape), 0)
    return before, np.clip(before + step, -1, 1).astype(np.int8)


@pytest.mark.parametrize("size", SHAPES)
@pytest.mark.parametrize("share", [0.0, 0.01, 1.0])
def test_flips_of_a_weight_are_listed_and_applied(size: tuple[int, int], share: float) -> None:
    before, after = moved(*size, share, seed=1)
    shape = WeightShape(*size, 32)
    packed = reference.pack(torch.from_numpy(before))
    wanted = reference.pack(torch.from_numpy(after))
    difference = (after - before).reshape(-1)
    expected = np.flatnonzero(difference)
    for positions, directions in (
        flip_list(packed, wanted, shape),
        unpacked_flip_list("torch", packed, wanted, shape),
    ):
        assert (positions.dtype, directions.dtype) == (torch.int64, torch.int8)
        assert positions.tolist() == expected.tolist()
        assert directions.tolist() == difference[expected].tolist()
    for apply in (apply_flips_, lambda *arguments: repacked_flips_("torch", *arguments)):
        changed = packed.clone()
        apply(changed, shape, positions, directions)
        assert torch.equal(changed, wanted)
        shuffled = torch.randperm(len(positions), generator=torch.Generator().manual_seed(1))
        apply(changed, shape, positions[shuffled], -directions[shuffled])
        assert torch.equal(changed, packed)


def test_a_flip_beyond_one_is_refused() -> None:
    shape = WeightShape(1, 4, 32)
    packed = reference.pack(torch.tensor([[1, 0, 0, -1]], dtype=torch.int8))
    for place, direction in ((0, 1), (3, -1)):
        flip = torch.tensor([place]), torch.tensor([direction], dtype=torch.int8)
        with pytest.raises(ValueError, match="replicas of this weight differ"):
            apply_flips_(packed, shape, *flip)
        with pytest.raises(ValueError, match="replicas of this weight differ"):
            repacked_flips_("torch", packed, shape, *flip)


def test_a_flip_outside_the_weight_is_refused() -> None:
    shape = WeightShape(3, 40, 32)
    packed = reference.pack(torch.ones(3, 40, dtype=torch.int8))
    for place in (-1, 120):
        flips = torch.tensor([0, place]), torch.tensor([-1, -1], dtype=torch.int8)
        with pytest.raises(ValueError, match="outside a weight of 3 x 40"):
            apply_flips_(packed, shape, *flips)
        with pytest.raises(ValueError, match="outside a weight of 3 x 40"):
            repacked_flips_("torch", packed, shape, *flips)


def message_by_hand(flips: dict[int, int], size: int) -> bytes:
    blocks: list[list[int]] = [[] for _ in range(-(-size // 32768))]
    for place, direction in sorted(flips.items()):
        blocks[place // 32768].append(place % 32768 + (32768 if direction > 0 else 0))
    words = [len(block) for block in blocks] + [word for block in blocks for word in block]
    return np.array(words, "<u2").tobytes()


@given(size=st.sampled_from((1, 5, 32_768, 32_769, 100_000)), data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_message_of_flips_matches_numpy_and_comes_back(size: int, data: st.DataObject) -> None:
    flips = data.draw(
        st.dictionaries(st.integers(0, size - 1), st.sampled_from((-1, 1)), max_size=30)
    )
    positions = torch.tensor(sorted(flips), dtype=torch.int64)
    directions = torch.tensor([flips[place] for place in sorted(flips)], dtype=torch.int8)
    message = encode_flips(positions, directions, size)
    assert message.numpy().tobytes() == message_by_hand(flips, size)
    assert flips_counted(message[: count_bytes(size)]) == len(flips)
    back = decode_flips(message, size)
    assert torch.equal(back[0], positions)
    assert torch.equal(back[1], directions)


def test_every_weight_of_a_block_may_flip() -> None:
    positions = torch.arange(32_768 + 3)
    directions = torch.ones(len(positions), dtype=torch.int8)
    message = encode_flips(positions, directions, len(positions))
    assert message[:4].tolist() == [0, 128, 3, 0]
    back = decode_flips(message, len(positions))
    assert torch.equal(back[0], positions)
    assert torch.equal(back[1], directions)


def test_no_weight_makes_an_empty_message() -> None:
    none = torch.empty(0, dtype=torch.int64)
    message = encode_flips(none, none.to(torch.int8), 0)
    assert message.numel() == count_bytes(0) == 0
    assert decode_flips(message, 0)[0].numel() == 0


@pytest.mark.parametrize("length", [4, 8])
def test_a_message_of_another_length_is_refused(length: int) -> None:
    message = encode_flips(torch.tensor([1, 2]), torch.tensor([1, -1]), 10)
    with pytest.raises(ValueError, match=f"has {length} bytes"):
        decode_flips(torch.cat([message, message])[:length], 10)


def test_a_piece_may_start_at_an_odd_byte() -> None:
    values = digits(7, 65535)
    message = torch.cat([torch.zeros(1, dtype=torch.uint8), digits_to_bytes(values, 65535)])
    total = torch.zeros_like(values)
    add_digits_(total, message[1:], 65535)
    assert torch.equal(total, values)


@pytest.mark.parametrize(("first", "last"), [(0, 7), (2, 5), (3, 3), (6, 7)])
def test_rows_of_a_weight_are_those_of_its_trits(first: int, last: int) -> None:
    trits = torch.from_numpy(moved(7, 150, 0.0, seed=2)[0])
    shape = WeightShape(7, 150, 32)
    packed = reference.pack(trits)
    for rows in (
        weight_rows(packed, shape, first, last),
        repacked_rows("torch", packed, shape, first, last),
    ):
        assert torch.equal(rows, reference.pack(trits[first:last]))


def test_a_backend_without_wire_kernels_uses_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Bare:
        name = "bare"
        kernels = MappingProxyType(
            {"pack": lambda trits: trits.clone(), "unpack": lambda packed, shape: packed.clone()}
        )

    wire = "arb_ternary_distributed.wire"
    monkeypatch.setattr(f"{wire}.kernels.get_backend", lambda name: Bare)
    for module in ("flips", "rows"):
        monkeypatch.setattr(f"{wire}.{module}.kernel", lambda name, op: Bare.kernels[op])
    before, after = (torch.from_numpy(trits) for trits in moved(5, 9, 0.5, seed=3))
    shape = WeightShape(5, 9, 32)
    positions, directions = wire_kernel("bare", "distributed.flip_list")(before, after, shape)
    changed = before.clone()
    wire_kernel("bare", "distributed.apply_flips_")(changed, shape, positions, directions)
    assert torch.equal(changed, after)
    assert positions.numel()
    assert torch.equal(
        wire_kernel("bare", "distributed.weight_rows")(after, shape, 1, 3), after[1:3]
    )
    assert wire_kernel("bare", "distributed.digits_to_bytes") is digits_to_bytes
    monkeypatch.setenv("ARB_TERNARY_STRICT", "1")
    with pytest.raises(EnvironmentProblem, match=r"no kernel for 'distributed\.flip_list'"):
        wire_kernel("bare", "distributed.flip_list")
    assert wire_kernel("torch", "distributed.flip_list") is flip_list
