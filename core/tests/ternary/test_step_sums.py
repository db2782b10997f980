"""Votes that are summed over the micro-batches of a step: exact in any order, and clipped once."""

from __future__ import annotations

import copy
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from arb_ternary.backends import ops
from arb_ternary.backends.vote_state import VoteLimits
from arb_ternary.counters.hashing import MICRO
from arb_ternary.errors import UsageProblem
from arb_ternary.optim.ternary import SingleProcessExchange
from arb_ternary.ternary.embedding import TernaryEmbedding
from arb_ternary.ternary.linear import TernaryLinear
from arb_ternary.ternary.step_sums import StepSums


class _Rule:
    """The part of an optimizer that an exchange reads."""

    def __init__(self, module: Any, unit: int = 1) -> None:
        self.modules = [module]
        self.unit = unit

    def whole_votes(self, module: Any, sums: Tensor, first_row: int) -> Tensor:
        return self.unit * sums


def collect(module: Any, unit: int = 1) -> None:
    SingleProcessExchange().reduce_votes(_Rule(module, unit))  # type: ignore[arg-type]


def signs(module: TernaryLinear, votes: Tensor) -> None:
    """Cast the votes ``votes`` (int8 ``[N, K]`` in -1..1) of one micro-batch: activations are the
    identity.
    """
    identity = torch.eye(module.in_features)
    ops.cast_votes(-votes.T.to(torch.float32), identity, None, *module.vote_state())


@pytest.mark.parametrize(("bits", "low", "high"), [(8, -128, 127), (4, -7, 7), (2, -1, 1)])
def test_the_votes_of_a_step_are_clipped_once(bits: int, low: int, high: int) -> None:
    module = TernaryLinear(5, 3, activations="float", vote_bits=bits, group_size="row")
    module.sum_votes()
    draw = np.random.default_rng(0)
    start = draw.integers(low + (bits == 8), high + 1, size=(3, 5))
    module.set_votes(torch.tensor(start, dtype=torch.int8))
    cast = draw.integers(-1, 2, size=(9, 3, 5))
    for index, votes in enumerate(cast):
        module.begin_microbatch(index)
        signs(module, torch.tensor(votes))
        module.end_microbatch()
    assert module.casts == 9
    np.testing.assert_array_equal(module.logical_votes(), start)
    collect(module)
    np.testing.assert_array_equal(module.logical_votes(), (start + cast.sum(0)).clip(low, high))


def test_a_rule_may_have_units_of_its_own() -> None:
    module = TernaryLinear(5, 3, activations="float", group_size="row")
    module.sum_votes()
    votes = torch.tensor(np.random.default_rng(1).integers(-1, 2, size=(3, 5)))
    signs(module, votes)
    collect(module, unit=9)
    np.testing.assert_array_equal(module.logical_votes(), 9 * votes)


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("kind", ["linear", "embedding"])
def test_the_order_of_micro_batches_changes_no_accumulator(kind: str, bits: int) -> None:
    torch.manual_seed(0)
    made = (
        TernaryLinear(40, 7, vote_bits=bits, bias=True, group_size=32)
        if kind == "linear"
        else TernaryEmbedding(7, 40, vote_bits=bits, group_size=32)
    )
    made.use_scaled_votes()
    assert made.vote_scale is not None
    made.vote_scale.fill_(3.0)
    made.limits = VoteLimits(5 * 256, 1)
    made.sum_votes()
    inputs = torch.randn(3, 6, 40) if kind == "linear" else torch.randint(0, 7, (3, 6))
    found = []
    for order in permutations(range(3)):
        module = copy.deepcopy(made)
        for index in order:
            module.begin_microbatch(index)
            module(inputs[index]).square().sum().backward()
            module.end_microbatch()
        collect(module)
        state = module.state_dict()
        found.append({name: state[name] for name in state if name.endswith("votes")})
    assert any(bool(votes.any()) for votes in found[0].values())
    for other in found[1:]:
        for name, votes in other.items():
            assert torch.equal(votes, found[0][name]), name


def test_statistics_are_added_a_micro_batch_at_a_time() -> None:
    """A module that is used twice: ``(a0 + a1) + (b0 + b1)`` and not ``((a0 + a1) + b0) + b1``."""
    module = TernaryLinear(1, 1, activations="float")
    module.use_scaled_votes()
    module.sum_votes()
    sizes = [[1.0, 2.0**-24], [2.0**-24, 2.0**-24]]
    for index, uses in enumerate(sizes):
        module.begin_microbatch(index)
        for size in uses:
            ops.cast_votes(torch.tensor([[size]]), torch.ones(1, 1), None, *module.vote_state())
        module.end_microbatch()
    folds = [np.float32(first) + np.float32(second) for first, second in sizes]
    assert module.magnitudes is not None
    assert module.magnitudes[0] == folds[0] + folds[1] != np.float32(1.0)


def test_hash_words_follow_from_index_and_use() -> None:
    module = TernaryLinear(4, 4, activations="float")
    module.sum_votes()
    seen = []
    for index in (2, 0):
        module.begin_microbatch(index)
        for _ in range(2):
            seen.append(int(module.control[MICRO]))
            signs(module, torch.ones(4, 4))
        module.end_microbatch()
    assert seen == [512, 513, 0, 1]
    assert (module.casts, int(module.control[MICRO])) == (4, 0)


def test_what_was_summed_can_be_dropped() -> None:
    module = TernaryLinear(4, 4, bias=True, activations="float")
    module.sum_votes()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    module.begin_microbatch(1)  # that with index 0 had no finite loss
    module(torch.randn(3, 4)).sum().backward()
    module.end_microbatch()
    assert module.sums is not None
    assert module.sums.votes.any()
    assert module.sums.bias is not None
    assert module.sums.bias.any()
    module.undo_votes()
    assert not any(tensor.any() for tensor in module.sums.tensors().values())
    assert module.casts == 0
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_what_is_kept_of_a_sum_has_one_order() -> None:
    """A checkpoint within a step stores it: in the order of a set, its bytes would differ from
    process to process.
    """
    module = TernaryLinear(4, 4, activations="float")
    module.use_scaled_votes()
    module.sum_votes()
    module(torch.randn(3, 4)).sum().backward()
    assert module.kept_votes is not None
    assert list(module.kept_votes) == ["control", "stats", "magnitudes"]


def test_more_votes_than_sums_hold_are_refused() -> None:
    StepSums.check(257, 127)
    with pytest.raises(UsageProblem, match="258 casts of votes up to 127") as raised:
        StepSums.check(258, 127)
    assert "for 257 casts" in raised.value.hint


@given(st.integers(1, 127 * 256), st.sampled_from([0, 2, 5]), st.floats(-200, 200, width=32))
def test_no_vote_exceeds_its_bound(limit: int, noise_shift: int, wanted: float) -> None:
    limits = VoteLimits(limit, 0, noise_shift)
    largest = np.float32(limit / 256)
    half = 1 << 24
    quarter = 1 << 24 - noise_shift
    top = np.float32(((half - quarter) >> 1) + quarter - 1) * np.float32(2.0**-24)
    vote = np.floor(np.clip(np.float32(wanted), -largest, largest) + top)
    assert abs(vote) <= limits.largest_vote(shifts=False)
    # By shifts: the largest gradient of a shift of 7, and the largest noise.
    bound = (limit << 7) >> 8
    assert (bound + 127) >> 7 <= limits.largest_vote(shifts=True)
