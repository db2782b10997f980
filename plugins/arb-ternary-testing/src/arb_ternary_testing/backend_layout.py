"""Backend suite, part 1: the protocol, and conversions to and from the backend's layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from arb_ternary.backends.protocol import (
    CORE_OPS,
    FUSED_VOTES,
    NARROW_NOISE,
    NARROW_VOTES,
    REQUIRED_OPS,
    ROW_SHARDS,
    KernelBackend,
    WeightShape,
)
from arb_ternary_testing import restatement as expected
from arb_ternary_testing.backend_case import (
    BackendCase,
    any_int8,
    examples,
    filled,
    random_trits,
)
from arb_ternary_testing.restatement import int8

_CAPABILITIES = {FUSED_VOTES, NARROW_NOISE, NARROW_VOTES, ROW_SHARDS}


class LayoutTests(BackendCase):
    """Tests of the protocol and of the layout."""

    def test_implements_the_backend_protocol(self) -> None:
        assert isinstance(self.backend, KernelBackend)
        assert self.backend.name
        if self.component:
            assert self.backend.name == self.component

    @pytest.mark.parametrize("op", REQUIRED_OPS)
    def test_has_every_required_op(self, op: str) -> None:
        assert op in self.backend.kernels, f"required op {op!r} is missing"

    def test_has_no_unknown_op(self) -> None:
        own = {op for op in self.backend.kernels if "." not in op}
        unknown = own - set(CORE_OPS)
        assert not unknown, f"not ops of a backend: {sorted(unknown)}"
        for kernel in self.backend.kernels.values():
            assert callable(kernel)

    def test_declares_only_known_capabilities(self) -> None:
        assert set(self.backend.capabilities) <= _CAPABILITIES

    @pytest.mark.parametrize("rows", [1, 3])
    def test_pack_and_unpack_are_lossless_for_any_k(self, rows: int) -> None:
        rng = np.random.default_rng(rows)
        # 0..132 has every remainder by 5, by 32 and by 128; the others lie around larger tiles.
        for columns in (*range(133), 255, 256, 257, 639, 641, 1024):
            trits = int8(rng.integers(-1, 2, (rows, columns)))
            shape = WeightShape(rows, columns, 128)
            packed = self.pack(trits)

            out = self.run("unpack", packed, shape)

            assert out.dtype == torch.int8
            assert tuple(out.shape) == (rows, columns)
            assert_array_equal(self.array(out), trits, err_msg=f"K = {columns}")

    def test_all_243_words_of_five_trits_survive(self) -> None:
        codes = np.arange(243)
        digits = [codes // 3**place % 3 for place in range(5)]
        trits = int8(np.stack(digits, axis=1)) - 1
        words = np.unique(trits, axis=0)
        assert len(words) == 243

        packed = self.pack(trits)
        out = self.trits_out(packed, WeightShape(243, 5, 32))

        assert_array_equal(out, trits)

    @examples(20)
    @given(
        rows=st.integers(1, 9),
        columns=st.integers(1, 300),
        seed=st.integers(0, 2**16),
    )
    def test_at_rest_form_is_independent_of_the_layout(
        self,
        rows: int,
        columns: int,
        seed: int,
    ) -> None:
        from arb_ternary.ternary.encoding import encode_at_rest

        trits = random_trits(seed, rows, columns)
        shape = WeightShape(rows, columns, 64)
        unpacked = self.run("unpack", self.pack(trits), shape)

        at_rest = encode_at_rest(unpacked.cpu())
        self.assert_equal(at_rest, expected.pack_base3(trits))

    def test_pack_accepts_non_contiguous_trits(self) -> None:
        trits = random_trits(0, 70, 140)
        whole = self.tensor(trits)
        cases = (
            (whole.t(), trits.T),
            (whole[:, ::2], trits[:, ::2]),
            (whole[3:, 5:], trits[3:, 5:]),
            (whole[:1].expand(4, -1), np.repeat(trits[:1], 4, axis=0)),
        )
        for view, wanted in cases:
            rows, columns = wanted.shape
            shape = WeightShape(rows, columns, 32)
            packed = self.run("pack", view)
            assert_array_equal(self.trits_out(packed, shape), wanted)
        self.assert_equal(whole, trits)

    def test_packed_weight_takes_two_bits_per_trit(self) -> None:
        packed = self.pack(filled(1, 256, 4096))
        assert packed.dtype == torch.uint8
        assert packed.numel() == 256 * 4096 // 4

    def test_equal_trits_pack_to_equal_bytes(self) -> None:
        """Weights are compared, hashed and voted on in their layout, padding included."""
        trits = random_trits(1, 5, 77)
        assert torch.equal(self.pack(trits), self.pack(trits))

    def test_unpack_returns_new_memory(self) -> None:
        weight = self.weight(2, 4, 128, 32)
        before = weight.packed.clone()
        trits = self.run("unpack", weight.packed, weight.shape)
        trits.fill_(0)
        assert torch.equal(weight.packed, before)

    @pytest.mark.parametrize("columns", [0, 1, 31, 128, 129, 300])
    def test_vote_layout_keeps_every_int8_value(self, columns: int) -> None:
        kernels = self.backend.kernels
        if ("pack_votes" in kernels) != ("unpack_votes" in kernels):
            pytest.fail("a backend with its own layout of votes needs pack_votes and unpack_votes")
        votes = any_int8(columns, 5, columns)

        packed = self.run("pack_votes", self.tensor(votes))
        out = self.run("unpack_votes", packed, WeightShape(5, columns, 128))

        assert out.dtype == torch.int8
        unpacked = self.array(out).reshape(5, columns)
        assert_array_equal(unpacked, votes)
