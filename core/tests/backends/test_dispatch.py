"""The reference stands in for optional kernels, whatever the layout of the backend that lacks them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from attrs import evolve, field, frozen
from torch import Tensor

from arb_ternary import TernaryEmbedding, TernaryLinear
from arb_ternary.backends import dispatch, reference, reference_scaled_votes, reference_votes
from arb_ternary.backends.protocol import NARROW_NOISE, NARROW_VOTES, OPTIONAL_OPS, REQUIRED_OPS, WeightShape
from arb_ternary.backends.select import use_backend
from arb_ternary.errors import EnvironmentProblem


@frozen
class Wide:
    """One byte a trit; on request also votes column by column, in as many bits as asked for."""

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
        monkeypatch.setattr(f"{module}.get_backend", lambda name: reference.build() if name == "torch" else made)
    with use_backend("torch"):  # of modules that name none
        yield made


def vote_bits(backend: Wide) -> list[int]:
    return [8, 4, 2] if NARROW_VOTES in backend.capabilities else [8]


def states(backend: Wide, bits: int) -> tuple[WeightShape, list[Tensor], list[Tensor]]:
    """The same weight and votes in the layout of the backend and in that of the reference."""
    shape = WeightShape(7, 45, 32, bits)
    generator = torch.Generator().manual_seed(bits)
    trits = torch.randint(-1, 2, (7, 45), dtype=torch.int8, generator=generator)
    votes = torch.randint(-1, 2, (7, 45), dtype=torch.int8, generator=generator) * shape.largest_vote
    theirs = [backend.kernels["pack"](trits), dispatch.pack_votes("wide", votes, bits)]
    return shape, theirs, [reference.pack(trits), reference.pack_votes(votes, bits)]


def logical(backend: Wide, held: list[Tensor], shape: WeightShape) -> tuple[Tensor, Tensor]:
    unpack_votes = backend.kernels.get("unpack_votes", reference.unpack_votes)
    return backend.kernels["unpack"](held[0], shape), unpack_votes(held[1], shape)


def test_scaled_votes_are_cast_in_the_layout_of_the_backend(backend: Wide) -> None:
    grad, x, ids = torch.randn(5, 7), torch.randn(5, 45), torch.tensor([3, 3, 0, 6, 3])
    for bits in vote_bits(backend):
        for op, operands in (("cast_scaled_votes", (grad, x)), ("embedding_scaled_votes", (ids, torch.randn(5, 45)))):
            shape, theirs, ours = states(backend, bits)
            sums = [[torch.zeros(7, 2, dtype=torch.int8), torch.zeros(53), torch.zeros(52)] for _ in range(2)]
            rest = (torch.ones(52), 1024, 2, 1, 2, 8, shape)
            dispatch.kernel("wide", op)(*operands, None, *theirs, *sums[0], *rest)
            getattr(reference_scaled_votes, op)(*operands, None, *ours, *sums[1], *rest)
            assert torch.equal(logical(backend, theirs, shape)[1], reference.unpack_votes(ours[1], shape))
            for one, other in zip(*sums, strict=True):
                assert torch.equal(one, other)


def test_scaled_votes_flip_the_trits_of_the_backend(backend: Wide) -> None:
    for bits in vote_bits(backend):
        shape, theirs, ours = states(backend, bits)
        rest = (1, 3000, True, 1, 2, 8, shape)
        flips = dispatch.kernel("wide", "apply_scaled_votes")(*theirs, *rest)
        assert int(flips) == int(reference_scaled_votes.apply_scaled_votes(*ours, *rest)) > 0
        trits, votes = logical(backend, theirs, shape)
        assert torch.equal(trits, reference.unpack(ours[0], shape))
        assert torch.equal(votes, reference.unpack_votes(ours[1], shape))


def test_a_lookup_votes_in_the_layout_of_the_backend(backend: Wide) -> None:
    ids, grad = torch.tensor([3, 3, 0]), torch.randn(3, 45)
    for bits in vote_bits(backend):
        shape, theirs, ours = states(backend, bits)
        rest = (None, None, None, torch.zeros(53), shape)
        dispatch.kernel("wide", "embedding_votes")(ids, grad, None, *theirs, *rest)
        reference_votes.embedding_votes(ids, grad, None, *ours, *rest)
        assert torch.equal(logical(backend, theirs, shape)[1], reference.unpack_votes(ours[1], shape))


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
        layer.noise_shift = noise_shift
        y = layer(torch.randn(4, 40)) if kind == "linear" else layer(torch.arange(4))
        (y * torch.randn(y.shape)).sum().backward()
        states.append(layer.logical_votes())
    assert torch.equal(*states)
    assert bool(states[0].any())


@pytest.mark.parametrize("kind", ["linear", "embedding"])
def test_a_module_learns_by_scaled_votes_on_a_backend_without_them(backend: Wide, kind: str) -> None:
    assert_learns_as_the_reference(kind, noise_shift=0)


@pytest.mark.parametrize("kind", ["linear", "embedding"])
def test_votes_with_less_noise_are_the_references_on_a_backend_without_them(
    backend: Wide, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: object) -> None:
        raise AssertionError("the backend's own kernel does not take noise_shift")

    assert isinstance(backend.kernels, dict)
    for op in ("cast_scaled_votes", "embedding_scaled_votes"):
        monkeypatch.setitem(backend.kernels, op, refuse)
    assert_learns_as_the_reference(kind, noise_shift=2)


def test_a_kernel_without_a_needed_capability_does_not_serve(backend: Wide, monkeypatch: pytest.MonkeyPatch) -> None:
    def own(*_arguments: object) -> None: ...

    made = evolve(backend, kernels={**backend.kernels, "cast_scaled_votes": own})
    monkeypatch.setattr("arb_ternary.backends.dispatch.get_backend", lambda _: made)
    assert dispatch.kernel("wide", "cast_scaled_votes") is own
    assert dispatch.kernel("wide", "cast_scaled_votes", needs=NARROW_NOISE) is not own
    monkeypatch.setenv("ARB_TERNARY_STRICT", "1")
    with pytest.raises(EnvironmentProblem, match="no kernel for 'cast_scaled_votes with narrow_noise'"):
        dispatch.kernel("wide", "cast_scaled_votes", needs=NARROW_NOISE)
    made = evolve(made, capabilities=frozenset({NARROW_NOISE}))
    assert dispatch.kernel("wide", "cast_scaled_votes", needs=NARROW_NOISE) is own


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
