"""The reference stands in for optional kernels of a backend with any layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from attrs import evolve, field, frozen
from torch import Tensor

from arb_ternary import TernaryEmbedding, TernaryLinear
from arb_ternary.backends import dispatch, reference, reference_scaled_votes, reference_votes
from arb_ternary.backends.protocol import (
    NARROW_NOISE,
    NARROW_VOTES,
    OPTIONAL_OPS,
    REQUIRED_OPS,
    ROW_SHARDS,
    WeightShape,
)
from arb_ternary.backends.select import use_backend
from arb_ternary.backends.vote_state import VoteLimits, VoteState, new_state
from arb_ternary.errors import EnvironmentProblem


@frozen
class Wide:
    """One byte per trit; optionally also votes column by column, with any number of bits."""

    name: str = "wide"
    capabilities: frozenset[str] = frozenset()
    kernels: Mapping[str, Callable[..., Any]] = field(factory=dict)


def pack_columns(votes: Tensor, bits: int = 8) -> Tensor:
    return torch.cat([votes.t().contiguous().flatten(), torch.tensor([bits], dtype=torch.int8)])


def unpack_columns(votes: Tensor, shape: WeightShape) -> Tensor:
    assert int(votes[-1]) == shape.vote_bits
    return votes[:-1].view(shape.in_features, shape.out_features).t().contiguous()


def wide(own_votes: bool) -> Wide:
    known = {op: reference.build().kernels[op] for op in REQUIRED_OPS}
    known["pack"] = lambda trits: (trits + 1).to(torch.uint8)
    known["unpack"] = lambda packed, shape: packed.to(torch.int8) - 1
    known["linear"] = lambda x, scale, packed, *rest: reference.linear(
        x, scale, reference.pack(packed.char() - 1), *rest
    )
    if not own_votes:
        return Wide(kernels=known)
    known |= {"pack_votes": pack_columns, "unpack_votes": unpack_columns}
    return Wide(capabilities=frozenset({NARROW_VOTES}), kernels=known)


@pytest.fixture(params=[False, True], ids=["votes of the reference", "votes of its own"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Wide]:
    made = wide(request.param)
    for module in ("arb_ternary.backends.dispatch", "arb_ternary.ternary.module"):
        monkeypatch.setattr(
            f"{module}.get_backend", lambda name: reference.build() if name == "torch" else made
        )
    monkeypatch.setattr("arb_ternary.ternary.module.serves", lambda name, device: True)
    with use_backend("torch"):  # of modules that name none
        yield made


def vote_bits(backend: Wide) -> list[int]:
    return [8, 4, 2] if NARROW_VOTES in backend.capabilities else [8]


def states(backend: Wide, bits: int) -> tuple[VoteState, VoteState]:
    """Return one weight and its votes in the layout of the backend and in that of the reference."""
    shape = WeightShape(7, 45, 32, bits)
    generator = torch.Generator().manual_seed(bits)
    trits = torch.randint(-1, 2, (7, 45), dtype=torch.int8, generator=generator)
    votes = (
        torch.randint(-1, 2, (7, 45), dtype=torch.int8, generator=generator) * shape.largest_vote
    )
    theirs = backend.kernels["pack"](trits), dispatch.pack_votes("wide", votes, bits)
    ours = reference.pack(trits), reference.pack_votes(votes, bits)
    made = []
    for name, (weight, held) in (("wide", theirs), ("torch", ours)):
        state = new_state(shape, weight, torch.zeros(7, 2, dtype=torch.int8), held, name)
        state = state._replace(
            control=torch.tensor([1, 0, 1, 2]), limits=torch.tensor(VoteLimits(1024, 2))
        )
        made.append(state._replace(magnitudes=torch.zeros(52), vote_scale=torch.ones(52)))
    return made[0], made[1]


def assert_same(backend: Wide, theirs: VoteState, ours: VoteState) -> None:
    """Return a state with logical weight and votes."""
    shape = ours.shape
    unpack_votes = backend.kernels.get("unpack_votes", reference.unpack_votes)
    assert torch.equal(
        backend.kernels["unpack"](theirs.weight, shape), reference.unpack(ours.weight, shape)
    )
    assert torch.equal(unpack_votes(theirs.votes, shape), reference.unpack_votes(ours.votes, shape))
    for name in ("exponent_votes", "stats", "magnitudes"):
        assert torch.equal(getattr(theirs, name), getattr(ours, name)), name


def test_scaled_votes_are_cast_in_the_layout_of_the_backend(backend: Wide) -> None:
    grad = torch.randn(5, 7)
    x = torch.randn(5, 45)
    ids = torch.tensor([3, 3, 0, 6, 3])
    for bits in vote_bits(backend):
        for op, operands in (
            ("cast_scaled_votes", (grad, x)),
            ("embedding_scaled_votes", (ids, torch.randn(5, 45))),
        ):
            theirs, ours = states(backend, bits)
            before = ours.votes.clone()
            dispatch.kernel("wide", op)(*operands, None, theirs)
            getattr(reference_scaled_votes, op)(*operands, None, ours)
            assert not torch.equal(ours.votes, before)
            assert_same(backend, theirs, ours)


def test_scaled_votes_flip_the_trits_of_the_backend(backend: Wide) -> None:
    for bits in vote_bits(backend):
        theirs, ours = states(backend, bits)
        flips = dispatch.kernel("wide", "apply_scaled_votes")(theirs, 1, 3000, True)
        assert int(flips) == int(reference_scaled_votes.apply_scaled_votes(ours, 1, 3000, True)) > 0
        assert_same(backend, theirs, ours)


def test_a_lookup_votes_in_the_layout_of_the_backend(backend: Wide) -> None:
    ids = torch.tensor([3, 3, 0])
    grad = torch.randn(3, 45)
    for bits in vote_bits(backend):
        theirs, ours = states(backend, bits)
        dispatch.kernel("wide", "embedding_votes")(ids, grad, None, theirs)
        reference_votes.embedding_votes(ids, grad, None, ours)
        assert_same(backend, theirs, ours)


def test_every_optional_op_has_a_stand_in(backend: Wide, monkeypatch: pytest.MonkeyPatch) -> None:
    for op in OPTIONAL_OPS:
        assert callable(dispatch.kernel("wide", op))
    monkeypatch.setenv("ARB_TERNARY_STRICT", "1")
    with pytest.raises(EnvironmentProblem, match="no kernel for 'apply_scaled_votes'"):
        dispatch.kernel("wide", "apply_scaled_votes")


def assert_learns_as_the_reference(kind: str, noise_shift: int) -> None:
    """A module casts scaled votes on the backend ``wide``, the same as on ``torch``."""
    states = []
    for name in ("wide", "torch"):
        torch.manual_seed(0)
        layer = TernaryLinear(40, 9) if kind == "linear" else TernaryEmbedding(9, 40)
        layer.set_backend(name)
        layer.use_scaled_votes()
        assert layer.vote_scale is not None
        layer.vote_scale.fill_(1.0)
        layer.limits = VoteLimits(noise_shift=noise_shift)
        y = layer(torch.randn(4, 40)) if kind == "linear" else layer(torch.arange(4))
        (y * torch.randn(y.shape)).sum().backward()
        states.append(layer.logical_votes())
    assert torch.equal(*states)
    assert bool(states[0].any())


@pytest.mark.parametrize("kind", ["linear", "embedding"])
def test_scaled_votes_work_on_a_backend_without_them(backend: Wide, kind: str) -> None:
    assert_learns_as_the_reference(kind, noise_shift=0)


@pytest.mark.parametrize("kind", ["linear", "embedding"])
def test_the_reference_casts_narrow_noise_for_other_backends(
    backend: Wide, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: object) -> None:
        raise AssertionError("the backend's own kernel does not take noise_shift")

    assert isinstance(backend.kernels, dict)
    for op in ("cast_scaled_votes", "embedding_scaled_votes"):
        monkeypatch.setitem(backend.kernels, op, refuse)
    assert_learns_as_the_reference(kind, noise_shift=2)


def test_a_kernel_without_a_needed_capability_does_not_serve(
    backend: Wide, monkeypatch: pytest.MonkeyPatch
) -> None:
    def own(*_arguments: object) -> None: ...

    made = evolve(backend, kernels={**backend.kernels, "cast_scaled_votes": own})
    monkeypatch.setattr("arb_ternary.backends.dispatch.get_backend", lambda _: made)
    ops = ("cast_votes", "cast_scaled_votes")
    _, state = states(backend, 8)
    state = state._replace(backend="wide")
    assert (
        dispatch.vote_kernel(state._replace(vote_scale=None), *ops) is backend.kernels["cast_votes"]
    )
    assert dispatch.vote_kernel(state, *ops) is own
    state = state._replace(limits=torch.tensor(VoteLimits(noise_shift=1)))
    assert dispatch.vote_kernel(state, *ops) is not own
    monkeypatch.setenv("ARB_TERNARY_STRICT", "1")
    with pytest.raises(
        EnvironmentProblem, match="no kernel for 'cast_scaled_votes with narrow_noise'"
    ):
        dispatch.vote_kernel(state, *ops)
    made = evolve(made, capabilities=frozenset({NARROW_NOISE}))
    assert dispatch.vote_kernel(state, *ops) is own


def test_votes_of_some_rows_go_to_a_kernel_that_knows_which(
    backend: Wide, monkeypatch: pytest.MonkeyPatch
) -> None:
    def own(*_arguments: object) -> None: ...

    made = evolve(backend, kernels={**backend.kernels, "apply_scaled_votes": own})
    monkeypatch.setattr("arb_ternary.backends.dispatch.get_backend", lambda _: made)
    op = "apply_scaled_votes"
    assert dispatch.kernel("wide", op) is own
    theirs, ours = (state._replace(first_row=3) for state in states(backend, 8))
    assert int(dispatch.kernel("wide", op, ROW_SHARDS)(theirs, 1, 3000, True)) > 0
    reference_scaled_votes.apply_scaled_votes(ours, 1, 3000, True)
    assert_same(backend, theirs, ours)
    made = evolve(made, capabilities=frozenset({ROW_SHARDS}))
    assert dispatch.kernel("wide", op, ROW_SHARDS) is own


def test_narrow_votes_need_a_backend_that_has_them(backend: Wide) -> None:
    if NARROW_VOTES in backend.capabilities:
        layer = TernaryLinear(40, 6, vote_bits=4)
        votes = torch.randint(-7, 8, (6, 40), dtype=torch.int8)
        layer.set_trits(layer.trits(), votes=votes)
        layer.set_backend("wide")
        assert torch.equal(layer.logical_votes(), votes)
        return
    message = "backend 'wide' lacks the capability 'narrow_votes'"
    with pytest.raises(EnvironmentProblem, match=message):
        TernaryLinear(40, 6, vote_bits=4, backend="wide")
    layer = TernaryLinear(40, 6, vote_bits=2)
    with pytest.raises(EnvironmentProblem, match=message):
        layer.set_backend("wide")
    assert layer.backend == "torch"
    TernaryLinear(40, 6).set_backend("wide")
