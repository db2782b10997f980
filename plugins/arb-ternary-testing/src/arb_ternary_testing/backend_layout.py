"""Backend suite, part 1: the protocol, and conversions to and from the backend's layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

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
from arb_ternary_testing.backend_case import BackendCase, examples


class LayoutTests(BackendCase):
    """Protocol and layout."""

    def test_it_keeps_the_protocol_of_a_backend(self) -> None:
        assert isinstance(self.backend, KernelBackend)
        assert self.backend.name
        if self.component:
            assert self.backend.name == self.component

    @pytest.mark.parametrize("op", REQUIRED_OPS)
    def test_it_has_every_required_op(self, op: str) -> None:
        assert op in self.backend.kernels, f"required op {op!r} is missing"

    def test_it_has_no_op_that_is_never_called(self) -> None:
        own = {op for op in self.backend.kernels if "." not in op}
        unknown = own - set(CORE_OPS)
        assert not unknown, f"not ops of a backend: {sorted(unknown)}"
        assert all(callable(kernel) for kernel in self.backend.kernels.values())

    def test_it_declares_only_capabilities_that_exist(self) -> None:
        assert set(self.backend.capabilities) <= {
            FUSED_VOTES,
            NARROW_NOISE,
            NARROW_VOTES,
            ROW_SHARDS,
        }

    @pytest.mark.parametrize("rows", [1, 3])
    def test_unpacking_what_was_packed_is_lossless_for_every_remainder_of_k(
        self, rows: int
    ) -> None:
        rng = np.random.default_rng(rows)
        # 0..132 has every remainder by 5, by 32 and by 128; the others lie around larger tiles.
        for columns in (*range(133), 255, 256, 257, 639, 641, 1024):
            trits = rng.integers(-1, 2, (rows, columns)).astype(np.int8)
            shape = WeightShape(rows, columns, 128)
            out = self.run("unpack", self.run("pack", self.tensor(trits)), shape)
            assert out.dtype == torch.int8
            assert tuple(out.shape) == (rows, columns)
            np.testing.assert_array_equal(self.array(out), trits, err_msg=f"K = {columns}")

    def test_all_243_words_of_five_trits_survive(self) -> None:
        codes = np.arange(243)
        trits = np.stack([(codes // 3**i) % 3 - 1 for i in range(5)], axis=1).astype(np.int8)
        assert len(np.unique(trits, axis=0)) == 243
        np.testing.assert_array_equal(
            self.trits_out(self.run("pack", self.tensor(trits)), WeightShape(243, 5, 32)), trits
        )

    @examples(20)
    @given(rows=st.integers(1, 9), columns=st.integers(1, 300), seed=st.integers(0, 2**16))
    def test_the_form_at_rest_does_not_depend_on_the_layout(
        self, rows: int, columns: int, seed: int
    ) -> None:
        from arb_ternary.ternary.encoding import encode_at_rest

        trits = np.random.default_rng(seed).integers(-1, 2, (rows, columns)).astype(np.int8)
        unpacked = self.run(
            "unpack", self.run("pack", self.tensor(trits)), WeightShape(rows, columns, 64)
        )
        np.testing.assert_array_equal(
            self.array(encode_at_rest(unpacked.cpu())), expected.pack_base3(trits)
        )

    def test_packing_takes_non_contiguous_trits_and_leaves_them_alone(self) -> None:
        trits = np.random.default_rng(0).integers(-1, 2, (70, 140)).astype(np.int8)
        whole = self.tensor(trits)
        for view, wanted in (
            (whole.t(), trits.T),
            (whole[:, ::2], trits[:, ::2]),
            (whole[3:, 5:], trits[3:, 5:]),
            (whole[:1].expand(4, -1), np.repeat(trits[:1], 4, axis=0)),
        ):
            out = self.trits_out(
                self.run("pack", view), WeightShape(wanted.shape[0], wanted.shape[1], 32)
            )
            np.testing.assert_array_equal(out, wanted)
        np.testing.assert_array_equal(self.array(whole), trits)

    def test_a_packed_weight_takes_at_most_two_bits_a_trit_and_its_padding(self) -> None:
        packed = self.run("pack", self.tensor(np.ones((256, 4096), np.int8)))
        assert packed.dtype == torch.uint8
        assert packed.numel() == 256 * 4096 // 4

    def test_packing_is_a_function_of_the_trits(self) -> None:
        """A weight is compared, hashed and voted on in its layout: equal trits have equal bytes,
        padding too.
        """
        trits = np.random.default_rng(1).integers(-1, 2, (5, 77)).astype(np.int8)
        first = self.run("pack", self.tensor(trits))
        assert torch.equal(first, self.run("pack", self.tensor(trits)))

    def test_unpacking_gives_memory_of_its_own(self) -> None:
        weight = self.weight(2, 4, 128, 32)
        before = weight.packed.clone()
        self.run("unpack", weight.packed, weight.shape).fill_(0)
        assert torch.equal(weight.packed, before)

    @pytest.mark.parametrize("columns", [0, 1, 31, 128, 129, 300])
    def test_votes_survive_their_layout_for_every_value_of_int8(self, columns: int) -> None:
        if ("pack_votes" in self.backend.kernels) != ("unpack_votes" in self.backend.kernels):
            pytest.fail("pack_votes and unpack_votes come together: the layout of votes is theirs")
        rng = np.random.default_rng(columns)
        votes = rng.integers(-128, 128, (5, columns)).astype(np.int8)
        shape = WeightShape(5, columns, 128)
        out = self.run("unpack_votes", self.run("pack_votes", self.tensor(votes)), shape)
        assert out.dtype == torch.int8
        np.testing.assert_array_equal(self.array(out).reshape(5, columns), votes)
