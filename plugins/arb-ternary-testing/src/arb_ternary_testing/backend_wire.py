"""Backend suite, part 6: messages between processes, votes of some rows, and sums of a step.

A backend may leave all of these to the torch code of ``arb_ternary_distributed``.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal
from torch import Tensor

from arb_ternary.backends.protocol import ROW_SHARDS, WeightShape
from arb_ternary_distributed.wire import WIRE_KERNELS
from arb_ternary_testing import restatement_votes as expected
from arb_ternary_testing.backend_case import BackendCase, filled, integers, random_int8
from arb_ternary_testing.restatement import Array, int8

_BASES: Final = (3, 5, 15, 255, 65535)
#: Numbers of values: none, fewer than a byte has digits, around whole bytes, and more than one
#: task or program takes.
_COUNTS: Final = (0, 1, 2, 4, 5, 6, 11, 1023, 1026, 32_769, 200_003)
#: Rows and columns of weights whose trits move.
_SIZES: Final = ((1, 1), (5, 3), (7, 128), (17, 130), (33, 257), (300, 190))
_SUM_TYPES: Final = (torch.int16, torch.int32)
_DRAW: Final = expected.Draw(seed=5, step=(7 << 20) + 2, stream=1 << 3)

_every_base = pytest.mark.parametrize("base", _BASES)
_every_sum_type = pytest.mark.parametrize("dtype", _SUM_TYPES)


def _values(count: int, base: int) -> Array:
    """Return ``count`` random digits of ``base``: values from ``-(base // 2)`` to ``base // 2``."""
    half = base // 2
    rng = np.random.default_rng(count)
    values = rng.integers(-half, half, count, endpoint=True)
    return values.astype(np.int16)


def _reference_bytes(values: Array, base: int) -> Tensor:
    """Return the digits of ``values`` as the torch code packs them."""
    pack = WIRE_KERNELS["distributed.digits_to_bytes"]
    packed: Tensor = pack(torch.from_numpy(values), base)
    return packed


def _moved(rows: int, columns: int, share: float) -> tuple[Array, Array]:
    """Return trits before and after a step that moves about this share of them by one."""
    rng = np.random.default_rng(rows)
    before = rng.integers(-1, 2, (rows, columns))
    moves = rng.random(before.shape) < share
    directions = rng.choice([-1, 1], before.shape)
    step = np.where(moves, directions, 0)
    after = np.clip(before + step, -1, 1)
    return int8(before), int8(after)


class WireTests(BackendCase):
    """Tests of digits, flip lists, votes by rows and sums of a step."""

    def _skip_unless_on_the_host(self) -> None:
        if self.device != "cpu":
            pytest.skip("a failed assertion on a GPU would end the process")

    @_every_base
    @pytest.mark.parametrize("count", _COUNTS)
    def test_digits_are_packed_as_the_reference_packs_them(self, base: int, count: int) -> None:
        values = _values(count, base)

        packed = self.run("distributed.digits_to_bytes", self.tensor(values), base)
        assert packed.dtype == torch.uint8
        wanted = _reference_bytes(values, base)
        assert torch.equal(packed.cpu(), wanted)

        unpacked = self.tensor(np.zeros_like(values))
        self.run("distributed.add_digits_", unpacked, packed, base)
        assert torch.equal(unpacked.cpu(), torch.from_numpy(values))

    @_every_base
    @_every_sum_type
    @pytest.mark.parametrize("count", [0, 1, 6, 70_001])
    def test_digits_are_added_to_sums_in_place(
        self,
        base: int,
        dtype: torch.dtype,
        count: int,
    ) -> None:
        first = _values(count, base)
        second = first[::-1].copy()
        # The digits lie within a message, from an odd byte on.
        pieces = [_reference_bytes(values, base) for values in (first, second)]
        before = torch.zeros(1, dtype=torch.uint8)
        message = torch.cat([before, *pieces]).to(self.device)
        start = np.arange(count) % 50
        if base == 65535:
            start = -first.astype(np.int64)
        total = self.tensor(start, dtype)

        offset = 1
        for piece in pieces:
            end = offset + len(piece)
            digits = message[offset:end]
            self.run("distributed.add_digits_", total, digits, base)
            offset = end

        self.assert_equal(total, start + first + second)

    @pytest.mark.parametrize(
        ("base", "value"),
        [(3, 2), (3, -2), (5, 3), (15, -8), (255, 128), (255, -32768)],
    )
    @pytest.mark.parametrize("place", [0, 70_000])
    def test_value_without_a_digit_is_an_error(self, base: int, value: int, place: int) -> None:
        self._skip_unless_on_the_host()
        values = torch.zeros(70_001, dtype=torch.int16)
        values[place] = value
        with pytest.raises(ValueError, match=f"digits of base {base}"):
            self.run("distributed.digits_to_bytes", values, base)

    @pytest.mark.parametrize("size", _SIZES)
    @pytest.mark.parametrize("share", [0.0, 0.02, 1.0])
    def test_flips_are_listed_in_ascending_order_and_applied(
        self,
        size: tuple[int, int],
        share: float,
    ) -> None:
        rows, columns = size
        before, after = _moved(rows, columns, share)
        shape = WeightShape(rows, columns, 32)
        packed = self.pack(before)
        wanted = self.pack(after)
        difference = (after.astype(int) - before).reshape(-1)

        places, directions = self.run("distributed.flip_list", packed, wanted, shape)
        assert places.dtype == torch.int64
        assert directions.dtype == torch.int8
        self.assert_equal(places, np.flatnonzero(difference))
        self.assert_equal(directions, difference[difference != 0])

        self.run("distributed.apply_flips_", packed, shape, places, directions)
        assert torch.equal(packed, wanted)

        order = torch.randperm(len(places)).to(self.device)
        shuffled = places[order]
        back = -directions[order]
        self.run("distributed.apply_flips_", packed, shape, shuffled, back)
        assert torch.equal(packed, self.pack(before))

    def test_impossible_flips_are_errors_and_change_nothing(self) -> None:
        self._skip_unless_on_the_host()
        shape = WeightShape(3, 40, 32)
        before = filled(1, 3, 40)
        packed = self.pack(before)
        down = torch.tensor([-1, -1], dtype=torch.int8)
        cases = (
            ([0, 79], -down, "replicas of this weight differ"),
            ([0, 120], down, "outside a weight of 3 x 40"),
            ([0, -1], down, "outside a weight of 3 x 40"),
        )
        for places, directions, message in cases:
            indices = torch.tensor(places)
            with pytest.raises(ValueError, match=message):
                self.run("distributed.apply_flips_", packed, shape, indices, directions)
        assert torch.equal(packed, self.pack(before))

    @pytest.mark.parametrize(
        ("first", "last"),
        [(0, 70), (0, 35), (35, 70), (16, 33), (64, 70), (7, 7), (69, 70)],
    )
    def test_rows_of_a_weight_are_packed_as_those_trits(self, first: int, last: int) -> None:
        trits, _ = _moved(70, 150, 0.0)
        whole = WeightShape(70, 150, 32)
        wanted = trits[first:last]
        packed = self.pack(trits)
        rows = self.run("distributed.weight_rows", packed, whole, first, last)
        if first < last:
            assert torch.equal(rows, self.pack(wanted))
        part = self.trits_out(rows, WeightShape(last - first, 150, 32))
        assert_array_equal(part, wanted)

    # Rows at which the index of a hash stays below 2**32, crosses it, and is beyond it.
    @pytest.mark.parametrize("first_row", [0, 3, 2**32 // 200 - 2, 2**32 // 200 + 5])
    @pytest.mark.parametrize("bits", [8, 4])
    def test_votes_of_a_shard_decay_by_their_index_in_the_weight(
        self,
        bits: int,
        first_row: int,
    ) -> None:
        self.require(ROW_SHARDS)
        weight = self.weight(4, 9, 200, 64, vote_bits=bits)
        largest = weight.shape.largest_vote
        votes = random_int8(1, 9, 200, largest)
        state = self.state(weight, votes, control=torch.from_numpy(_DRAW.control))
        state = state._replace(first_row=first_row)

        threshold = largest - 1
        flips = self.run("apply_scaled_votes", state, threshold, 9000, True)

        trits, left, count = expected.apply_scaled_votes(
            weight.trits,
            votes,
            threshold,
            9000,
            carry=True,
            draw=_DRAW,
            first_row=first_row,
        )
        self.assert_trits(weight, trits)
        self.assert_votes(state, left)
        assert int(flips) == count

    # --- sums of a step

    @_every_sum_type
    @pytest.mark.parametrize("largest", [1, 127, 128, 30_000])
    @pytest.mark.parametrize("unit", [0.0, 0.3, 3.71, 127.0])
    def test_sums_of_votes_become_quanta(
        self,
        dtype: torch.dtype,
        largest: int,
        unit: float,
    ) -> None:
        start = 2**32 - 100  # The key of the hash changes on the way.
        sums = integers(largest, 3, 70, largest)
        factor = round(unit * 2**24)
        whole, fraction = divmod(factor, 2**24)
        words = (_DRAW.seed, _DRAW.step, _DRAW.stream + 6)

        votes = self.tensor(sums, dtype)
        quanta = self.run("votes.sums_to_quanta", votes, whole, fraction, words, start)

        assert quanta.dtype == torch.int32
        noise = _DRAW.bits((3, 70), 6, start) >> 8
        self.assert_equal(quanta, (sums * factor + noise) >> 24)

    @_every_sum_type
    @pytest.mark.parametrize("largest", [2, 30_000])
    @pytest.mark.parametrize("bits", [8, 4, 2])
    def test_added_votes_saturate(self, bits: int, largest: int, dtype: torch.dtype) -> None:
        weight = self.weight(7, 9, 333, 64, vote_bits=bits)
        highest = weight.shape.largest_vote
        votes = random_int8(bits, 9, 333, highest)
        added = integers(bits + 1, 9, 333, largest)
        for low in (-highest, weight.shape.smallest_vote):
            stored = self.votes_in(votes, bits)
            self.run("add_votes", stored, weight.shape, self.tensor(added, dtype), low)

            wanted = np.clip(votes + added, low, highest)
            left = self.votes_out(stored, weight.shape)
            assert_array_equal(left, wanted)
            packed = self.votes_in(int8(wanted), bits)
            assert torch.equal(stored, packed), "padding of the votes has changed"
