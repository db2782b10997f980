"""Backend suite, part 6: what processes exchange that share a weight, the votes of some of its
rows, sums of a step.

A backend may leave all of it to code in torch, that of ``arb_ternary_distributed`` and of those who
sum.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pytest
import torch
from torch import Tensor

from arb_ternary.backends.protocol import ROW_SHARDS, WeightShape
from arb_ternary_distributed.wire import WIRE_KERNELS
from arb_ternary_testing import restatement_votes as expected
from arb_ternary_testing.backend_case import Array, BackendCase

_BASES: Final = (3, 5, 15, 255, 65535)
# : Numbers of values: none, fewer than a byte has digits, around whole bytes, more than a task or a
# program takes.
_COUNTS: Final = (0, 1, 2, 4, 5, 6, 11, 1023, 1026, 32_769, 200_003)
#: Rows and columns of weights whose trits move.
_SIZES: Final = ((1, 1), (5, 3), (7, 128), (17, 130), (33, 257), (300, 190))
_DRAW: Final = expected.Draw(seed=5, step=(7 << 20) + 2, stream=1 << 3)


def _values(count: int, base: int) -> Array:
    half = base // 2
    return np.random.default_rng(count).integers(-half, half, count, endpoint=True).astype(np.int16)


def _moved(rows: int, columns: int, share: float) -> tuple[Array, Array]:
    """Trits before and after a step in which about this share of them moves by one."""
    rng = np.random.default_rng(rows)
    before = rng.integers(-1, 2, (rows, columns))
    step = np.where(rng.random(before.shape) < share, rng.choice([-1, 1], before.shape), 0)
    return before.astype(np.int8), np.clip(before + step, -1, 1).astype(np.int8)


class WireTests(BackendCase):
    """Digits, flip lists and votes by rows."""

    @pytest.mark.parametrize("base", _BASES)
    @pytest.mark.parametrize("count", _COUNTS)
    def test_digits_are_packed_as_the_reference_packs_them(self, base: int, count: int) -> None:
        values = torch.from_numpy(_values(count, base))
        packed = self.run("distributed.digits_to_bytes", values.to(self.device), base)
        assert packed.dtype == torch.uint8
        assert torch.equal(packed.cpu(), WIRE_KERNELS["distributed.digits_to_bytes"](values, base))
        assert torch.equal(
            self.run("distributed.bytes_to_digits", packed, count, base).cpu(), values
        )

    @pytest.mark.parametrize("base", _BASES)
    @pytest.mark.parametrize("dtype", [torch.int16, torch.int32])
    @pytest.mark.parametrize("count", [0, 1, 6, 70_001])
    def test_digits_are_added_to_sums_in_place(
        self, base: int, dtype: torch.dtype, count: int
    ) -> None:
        first = _values(count, base)
        second = _values(count, base)[::-1].copy()
        # What is added lies within a message, at an odd byte.
        pieces = [
            WIRE_KERNELS["distributed.digits_to_bytes"](torch.from_numpy(values), base)
            for values in (first, second)
        ]
        message = torch.cat([torch.zeros(1, dtype=torch.uint8), *pieces]).to(self.device)
        start = np.arange(count) % 50 if base < 65535 else -first.astype(np.int64)
        total = self.tensor(start).to(dtype)
        for place, piece in zip((1, 1 + pieces[0].numel()), pieces, strict=True):
            self.run("distributed.add_digits_", total, message[place : place + piece.numel()], base)
        np.testing.assert_array_equal(self.array(total), start + first + second)

    @pytest.mark.parametrize(
        ("base", "value"), [(3, 2), (3, -2), (5, 3), (15, -8), (255, 128), (255, -32768)]
    )
    @pytest.mark.parametrize("place", [0, 70_000])
    def test_a_value_without_a_digit_is_refused(self, base: int, value: int, place: int) -> None:
        if self.device != "cpu":
            pytest.skip("an assertion of the device would end the process")
        values = torch.zeros(70_001, dtype=torch.int16)
        values[place] = value
        with pytest.raises(ValueError, match=f"digits of base {base}"):
            self.run("distributed.digits_to_bytes", values, base)

    @pytest.mark.parametrize("size", _SIZES)
    @pytest.mark.parametrize("share", [0.0, 0.02, 1.0])
    def test_flips_are_listed_in_ascending_order_and_applied(
        self, size: tuple[int, int], share: float
    ) -> None:
        before, after = _moved(*size, share)
        shape = WeightShape(*size, 32)
        packed = self._packed(before)
        wanted = self._packed(after)
        places, directions = self.run("distributed.flip_list", packed, wanted, shape)
        assert (places.dtype, directions.dtype) == (torch.int64, torch.int8)
        difference = (after.astype(int) - before).reshape(-1)
        np.testing.assert_array_equal(self.array(places), np.flatnonzero(difference))
        np.testing.assert_array_equal(self.array(directions), difference[difference != 0])
        self.run("distributed.apply_flips_", packed, shape, places, directions)
        assert torch.equal(packed, wanted)
        order = torch.randperm(len(places)).to(self.device)
        self.run("distributed.apply_flips_", packed, shape, places[order], -directions[order])
        assert torch.equal(packed, self._packed(before))

    def test_flips_that_lead_nowhere_are_refused_and_change_nothing(self) -> None:
        if self.device != "cpu":
            pytest.skip("an assertion of the device would end the process")
        shape = WeightShape(3, 40, 32)
        before = np.ones((3, 40), np.int8)
        packed = self._packed(before)
        down = torch.tensor([-1, -1], dtype=torch.int8)
        for places, directions, message in (
            ([0, 79], -down, "replicas of this weight differ"),
            ([0, 120], down, "outside a weight of 3 x 40"),
            ([0, -1], down, "outside a weight of 3 x 40"),
        ):
            with pytest.raises(ValueError, match=message):
                self.run(
                    "distributed.apply_flips_", packed, shape, torch.tensor(places), directions
                )
        assert torch.equal(packed, self._packed(before))

    @pytest.mark.parametrize(
        ("first", "last"), [(0, 70), (0, 35), (35, 70), (16, 33), (64, 70), (7, 7), (69, 70)]
    )
    def test_rows_of_a_weight_are_packed_as_those_trits(self, first: int, last: int) -> None:
        trits, _ = _moved(70, 150, 0.0)
        rows = self.run(
            "distributed.weight_rows", self._packed(trits), WeightShape(70, 150, 32), first, last
        )
        if first < last:
            assert torch.equal(rows, self._packed(trits[first:last]))
        shape = WeightShape(last - first, 150, 32)
        np.testing.assert_array_equal(self.trits_out(rows, shape), trits[first:last])

    # Rows at which the index of a hash stays below 2**32, crosses it, and is beyond it.
    @pytest.mark.parametrize("first_row", [0, 3, 2**32 // 200 - 2, 2**32 // 200 + 5])
    @pytest.mark.parametrize("bits", [8, 4])
    def test_votes_of_some_rows_decay_by_the_places_in_the_whole_weight(
        self, bits: int, first_row: int
    ) -> None:
        if ROW_SHARDS not in self.backend.capabilities:
            pytest.skip(f"backend {self.backend.name!r} does not declare {ROW_SHARDS}")
        weight = self.weight(4, 9, 200, 64, vote_bits=bits)
        largest = weight.shape.largest_vote
        votes = (
            np.random.default_rng(1)
            .integers(-largest, largest, (9, 200), endpoint=True)
            .astype(np.int8)
        )
        state = self.state(weight, votes, control=torch.from_numpy(_DRAW.control))._replace(
            first_row=first_row
        )
        flips = self.run("apply_scaled_votes", state, largest - 1, 9000, True)
        trits, left, count = expected.apply_scaled_votes(
            weight.trits, votes, largest - 1, 9000, carry=True, draw=_DRAW, first_row=first_row
        )
        np.testing.assert_array_equal(self.trits_out(weight.packed, weight.shape), trits)
        np.testing.assert_array_equal(self.votes_out(state.votes, weight.shape), left)
        assert int(flips) == count

    # --- sums of a step

    @pytest.mark.parametrize("dtype", [torch.int16, torch.int32])
    @pytest.mark.parametrize("largest", [1, 127, 128, 30_000])
    @pytest.mark.parametrize("unit", [0.0, 0.3, 3.71, 127.0])
    def test_sums_of_votes_become_quanta(
        self, dtype: torch.dtype, largest: int, unit: float
    ) -> None:
        start = 2**32 - 100  # the key of the hash changes on the way
        sums = np.random.default_rng(largest).integers(-largest, largest, (3, 70), endpoint=True)
        factor = round(unit * 2**24)
        words = (_DRAW.seed, _DRAW.step, _DRAW.stream + 6)
        given = self.tensor(sums).to(dtype)
        quanta = self.run("votes.sums_to_quanta", given, factor >> 24, factor % 2**24, words, start)
        assert quanta.dtype == torch.int32
        noise = _DRAW.bits((3, 70), 6, start) >> 8
        np.testing.assert_array_equal(self.array(quanta), (sums * factor + noise) >> 24)

    @pytest.mark.parametrize("dtype", [torch.int16, torch.int32])
    @pytest.mark.parametrize("largest", [2, 30_000])
    @pytest.mark.parametrize("bits", [8, 4, 2])
    def test_accumulators_settle_at_their_ends(
        self, bits: int, largest: int, dtype: torch.dtype
    ) -> None:
        weight = self.weight(7, 9, 333, 64, vote_bits=bits)
        highest = weight.shape.largest_vote
        rng = np.random.default_rng(bits)
        votes = rng.integers(-highest, highest, (9, 333), endpoint=True).astype(np.int8)
        whole = rng.integers(-largest, largest, (9, 333), endpoint=True)
        for low in (-highest, weight.shape.smallest_vote):
            stored = self.votes_in(votes, bits)
            self.run("add_votes", stored, weight.shape, self.tensor(whole).to(dtype), low)
            settled = np.clip(votes.astype(np.int64) + whole, low, highest)
            np.testing.assert_array_equal(self.votes_out(stored, weight.shape), settled)
            assert torch.equal(stored, self.votes_in(settled.astype(np.int8), bits)), (
                "padding of the votes has changed"
            )

    def _packed(self, trits: Array) -> Tensor:
        packed = self.run("pack", self.tensor(trits))
        assert isinstance(packed, Tensor)
        return packed
