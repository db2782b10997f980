"""Votes against the torch backend, bit for bit, in sizes that cross tiles; and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from arb_ternary import TernaryLinear
from arb_ternary.backends import reference
from arb_ternary.backends.protocol import KernelBackend, WeightShape
from arb_ternary.backends.vote_state import VoteLimits, new_state
from arb_ternary_cpu import votes
from arb_ternary_cpu.backend import build
from arb_ternary_cpu.isa import usable_isas

# For each instruction set.
pytestmark = pytest.mark.sampled("backend")

#: Seed, step, stream and micro-batch.
CONTROL = (-3, 7, 0xCBF43926, 2)
TORCH = reference.build().kernels


@pytest.fixture(params=usable_isas())
def backend(request: pytest.FixtureRequest) -> KernelBackend:
    return build(request.param)


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> int:
    count: int = request.param
    return count


@contextmanager
def native_threads(count: int) -> Iterator[None]:
    """The number of threads that the kernels are told; torch itself goes on with as many as
    before.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(votes, "get_num_threads", lambda: count)
        yield


def numbers(seed: int, low: int, high: int, *size: int, dtype: torch.dtype = torch.int8) -> Tensor:
    return torch.randint(low, high + 1, size, generator=torch.Generator().manual_seed(seed)).to(
        dtype
    )


class Layer:
    """A weight and its accumulators under two backends."""

    def __init__(
        self,
        backend: KernelBackend,
        shape: WeightShape,
        seed: int = 0,
        low: int | None = None,
        threads: int = 1,
    ) -> None:
        self.threads = threads
        rows = shape.out_features
        columns = shape.in_features
        trits = numbers(seed, -1, 1, rows, columns)
        held = numbers(
            seed + 1, shape.smallest_vote if low is None else low, shape.largest_vote, rows, columns
        )
        bits = () if shape.vote_bits == 8 else (shape.vote_bits,)
        self.shape = shape
        self.kernels = TORCH, backend.kernels
        self.states = [
            new_state(
                shape,
                kernels["pack"](trits),
                torch.zeros(rows, shape.groups, dtype=torch.int8),
                kernels["pack_votes"](held, *bits),
                name,
                exponent_votes=numbers(seed + 2, -100, 100, rows, shape.groups),
                control=torch.tensor(CONTROL),
                magnitudes=torch.zeros(rows + columns),
            )
            for name, kernels in zip(("torch", "cpu"), self.kernels, strict=True)
        ]

    def change(self, **fields: Any) -> None:
        """Replace fields of both states, by a copy each."""
        for i, state in enumerate(self.states):
            copies = {
                name: value.clone() if isinstance(value, Tensor) else value
                for name, value in fields.items()
            }
            self.states[i] = state._replace(**copies)

    def both(self, field: str) -> list[Any]:
        return [getattr(state, field) for state in self.states]

    def cast(
        self,
        op: str,
        *operands: Any,
        vote_scale: Tensor | None = None,
        limits: tuple[int, ...] = (),
    ) -> None:
        """Cast votes by both kernels."""
        self.change(vote_scale=vote_scale, limits=torch.tensor(VoteLimits(*limits)))
        with native_threads(self.threads):
            for kernels, state in zip(self.kernels, self.states, strict=True):
                kernels[op](*operands, state)

    def apply(self, op: str, *settings: Any) -> list[int]:
        """What both kernels say that changed."""
        with native_threads(self.threads):
            return [
                int(kernels[op](s, *settings))
                for kernels, s in zip(self.kernels, self.states, strict=True)
            ]

    def check(self) -> None:
        unpacked = [
            k["unpack"](state.weight, self.shape)
            for k, state in zip(self.kernels, self.states, strict=True)
        ]
        assert torch.equal(*unpacked), "trits differ"
        assert torch.equal(self.states[1].weight, self.kernels[1]["pack"](unpacked[1])), (
            "padding has changed"
        )
        for field in ("votes", "exponent", "exponent_votes"):
            assert torch.equal(*self.both(field)), f"{field} differ"


SIZES = [
    # M, N, K, G: rows and columns beyond several tiles and tasks, ragged in each.
    (9, 100, 1100, 32),
    (130, 49, 513, 64),
    (600, 25, 1024, 128),
    (3, 1700, 70, 256),
    (17, 33, 600, 600),
    (5, 40, 1200, 48),
    (5, 30, 200, 2000),
]


@pytest.mark.parametrize(
    ("sizes", "bits", "low", "high"),
    [
        *((sizes, 8, 0, 4) for sizes in SIZES),
        (SIZES[0], 8, -12, 9),
        (SIZES[2], 8, 15, 17),
        (SIZES[1], 8, 11, 11),
        (SIZES[1], 8, 11, 12),
        (SIZES[0], 4, 0, 4),
        (SIZES[4], 4, 0, 4),
        (SIZES[1], 2, 0, 4),
        (SIZES[6], 2, -12, 9),
    ],
)
def test_votes_by_shifts_are_bitwise_those_of_torch(
    backend: KernelBackend,
    threads: int,
    sizes: tuple[int, int, int, int],
    low: int,
    high: int,
    bits: int,
) -> None:
    tokens, rows, columns, group = sizes
    layer = Layer(backend, WeightShape(rows, columns, group, bits), low=-1, threads=threads)
    grad = numbers(5, -127, 127, tokens, rows)
    x = numbers(6, -127, 127, tokens, columns)
    shifts = numbers(7, low, high, rows + columns, dtype=torch.int32)
    layer.cast("cast_scaled_votes", grad, x, torch.tensor(0.25), vote_scale=shifts, limits=(900, 5))
    layer.check()
    assert torch.equal(*layer.both("magnitudes"))
    torch.testing.assert_close(*layer.both("stats"), rtol=1e-5, atol=0)


@pytest.mark.parametrize("sizes", SIZES)
def test_integer_votes_by_factors_are_bitwise_those_of_torch(
    backend: KernelBackend, threads: int, sizes: tuple[int, int, int, int]
) -> None:
    tokens, rows, columns, group = sizes
    layer = Layer(backend, WeightShape(rows, columns, group), threads=threads)
    grad = numbers(5, -128, 127, tokens, rows)
    x = numbers(6, -128, 127, tokens, columns)
    factors = torch.rand(rows + columns, generator=torch.Generator().manual_seed(1)) * 0.05
    layer.cast(
        "cast_scaled_votes", grad, x, torch.tensor(0.25), vote_scale=factors, limits=(4000, 3)
    )
    layer.check()
    assert torch.equal(*layer.both("magnitudes"))


@pytest.mark.parametrize("sizes", SIZES)
def test_integer_sign_votes_are_bitwise_those_of_torch(
    backend: KernelBackend, threads: int, sizes: tuple[int, int, int, int]
) -> None:
    tokens, rows, columns, group = sizes
    layer = Layer(backend, WeightShape(rows, columns, group), threads=threads)
    grad = numbers(5, -128, 127, tokens, rows)
    x = numbers(6, -128, 127, tokens, columns)
    operands = (grad, x, torch.tensor(2.0))
    layer.cast("cast_votes", *operands)
    layer.check()
    torch.testing.assert_close(*layer.both("stats"), rtol=1e-5, atol=0)


@pytest.mark.parametrize("activations", [torch.int8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sizes", [(9, 100, 1100, 32), (130, 49, 513, 64), (1, 25, 70, 70)])
def test_bfloat16_votes_are_those_of_the_exact_product(
    backend: KernelBackend, threads: int, sizes: tuple[int, int, int, int], activations: torch.dtype
) -> None:
    """Sparse ones, so that sums stay below 256: the torch backend rounds them to bfloat16."""
    tokens, rows, columns, group = sizes
    layer = Layer(backend, WeightShape(rows, columns, group), threads=threads)
    grad = (numbers(5, -1, 1, tokens, rows) * 2.0**-9).to(torch.bfloat16)
    x = numbers(6, -1, 1, tokens, columns).to(activations)
    factors = numbers(7, 1, 9, rows + columns).float() * 4
    layer.cast("cast_scaled_votes", grad, x, None, vote_scale=factors, limits=(900, 2))
    layer.check()
    torch.testing.assert_close(*layer.both("stats"), rtol=1e-5, atol=0)
    torch.testing.assert_close(*layer.both("magnitudes"), rtol=1e-5, atol=0)


def test_no_tokens_cast_no_votes(backend: KernelBackend) -> None:
    layer = Layer(backend, WeightShape(20, 70, 32))
    grad = torch.zeros(0, 20, dtype=torch.int8)
    x = torch.zeros(0, 70, dtype=torch.int8)
    for given in (grad, grad.float()):
        operands = (given, x.to(given.dtype), torch.tensor(1.0))
        layer.cast("cast_votes", *operands)
        layer.cast("cast_scaled_votes", *operands, vote_scale=torch.ones(90))
        layer.check()
        assert not layer.states[1].stats.any()
        assert not layer.states[1].scaling[0].any()


def test_sums_beyond_32_bits_are_exact(backend: KernelBackend) -> None:
    tokens = 140_000
    rows = 7
    columns = 20
    layer = Layer(backend, WeightShape(rows, columns, 32))
    grad = numbers(5, 100, 127, tokens, rows)
    x = numbers(6, 100, 127, tokens, columns)
    grad[:, ::2] *= -1
    for scale in (torch.full((27,), 15, dtype=torch.int32), torch.full((27,), 1e-5)):
        operands = (grad, x, torch.tensor(0.5))
        layer.cast("cast_scaled_votes", *operands, vote_scale=scale, limits=(5000, 3))
        layer.check()
        assert torch.equal(*layer.both("magnitudes"))
    layer.cast("cast_votes", grad, x, None)
    layer.check()


def test_shifts_that_leave_32_bits_are_added_in_64(backend: KernelBackend) -> None:
    layer = Layer(backend, WeightShape(40, 70, 32))
    grad = numbers(5, -127, 127, 6, 40)
    x = numbers(6, -127, 127, 6, 70)
    largest = 2**31 - 1
    shifts = (
        torch.tensor([largest, -largest - 1, 3, -largest], dtype=torch.int32)
        .repeat(28)[:110]
        .contiguous()
    )
    operands = (grad, x, torch.tensor(0.5))
    layer.cast("cast_scaled_votes", *operands, vote_scale=shifts, limits=(5000, 3))
    layer.check()


@pytest.mark.parametrize(
    "columns", [[0.0, 1.0, 1e-38], [1.0, -2.0, 1e-38]], ids=["some are 0", "none is 0"]
)
@pytest.mark.parametrize("row", [1.0, 1e20])
def test_products_beyond_float32_are_clipped(
    backend: KernelBackend, row: float, columns: list[float]
) -> None:
    layer = Layer(backend, WeightShape(3, 150, 32), low=-1)
    grad = torch.tensor([[1e30, -1.0, -torch.inf]])
    x = torch.tensor([[1.0, -3e8, 0.5]]).repeat(1, 50).contiguous()
    factors = torch.cat([torch.full((3,), row), torch.tensor(columns).repeat_interleave(50)])
    layer.cast("cast_scaled_votes", grad, x, None, vote_scale=factors, limits=(900, 2))
    layer.check()


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("mode", ["sign", "shifts", "factors", "float"])
def test_lookup_votes_are_bitwise_those_of_torch(
    backend: KernelBackend, threads: int, mode: str, bits: int
) -> None:
    rows = 900
    columns = 600
    tokens = 700
    layer = Layer(backend, WeightShape(rows, columns, 64, bits), low=-1, threads=threads)
    ids = numbers(3, 0, rows - 1, tokens, dtype=torch.int64)
    ids[100:140] = 5
    grad = numbers(4, -127, 127, tokens, columns)
    if mode == "sign":
        correlation = numbers(8, -(2**15), 2**15 - 1, rows, 10, dtype=torch.int16)
        steps = torch.full((rows, 10), 2)
        layer.change(correlation=correlation, steps=steps.to(torch.int32))
        layer.cast("embedding_votes", ids, grad, torch.tensor(1.0))
        assert torch.equal(*layer.both("correlation"))
        assert torch.equal(*layer.both("steps"))
    else:
        scale = None if mode == "float" else torch.tensor(0.5)
        given = numbers(4, -9, 9, tokens, columns).float() if mode == "float" else grad
        factors = numbers(9, 1, 3, rows + columns).float() / 7
        size = numbers(9, 1, 3, rows + columns, dtype=torch.int32) if mode == "shifts" else factors
        layer.cast("embedding_scaled_votes", ids, given, scale, vote_scale=size, limits=(900, 2))
        assert torch.equal(*layer.both("magnitudes"))
    layer.check()
    torch.testing.assert_close(*layer.both("stats"), rtol=1e-5, atol=0)


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("mode", ["sign", "factors"])
def test_votes_of_vectors_are_bitwise_those_of_torch_for_repeated_gradients(
    backend: KernelBackend, mode: str, bits: int
) -> None:
    rows = 700
    columns = 20
    layer = Layer(backend, WeightShape(rows, columns, 32, bits), low=-1)
    grad = numbers(4, -9, 9, rows).float()
    grad[:4] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])
    if mode == "factors":
        factors = numbers(9, 1, 3, rows + columns).float() / 7
        layer.change(vote_scale=factors, limits=torch.tensor(VoteLimits(900, 2)))
    scaled = "" if mode == "sign" else "scaled_"
    lookup = layer.kernels[0][f"embedding_{scaled}votes"]
    lookup(torch.arange(rows), grad.unsqueeze(1).repeat(1, columns), None, layer.states[0])
    cast = layer.kernels[1]["text.cast_vectors"]
    cast([grad, grad[:0]], [layer.states[1], Layer(backend, WeightShape(0, 8, 8, 8)).states[1]])
    layer.check()
    torch.testing.assert_close(*layer.both("stats"), rtol=1e-5, atol=0)
    torch.testing.assert_close(*layer.both("magnitudes"), rtol=1e-5, atol=0)
    assert layer.states[1].control.tolist() == [*CONTROL[:3], CONTROL[3] + 1]


def test_values_of_vectors_are_1_plus_the_sums_of_their_rows(backend: KernelBackend) -> None:
    states = []
    wanted = []
    for rows, columns in ((33, 20), (1, 4), (0, 8)):
        state = Layer(backend, WeightShape(rows, columns, 32, 8)).states[1]
        state = state._replace(exponent=numbers(5, -6, 2, rows, 1))
        trits = backend.kernels["unpack"](state.weight, state.shape)
        wanted.append(1 + (trits.double().sum(dim=1) * 2.0 ** state.exponent.double().squeeze(1)))
        states.append(state)
    found = backend.kernels["text.vector_values"](states)
    for values, numbers_of_rows in zip(found, wanted, strict=True):
        assert values.dtype is torch.float32
        assert torch.equal(values.double(), numbers_of_rows)
    grouped = Layer(backend, WeightShape(4, 64, 32, 8)).states[1]
    with pytest.raises(ValueError, match="one exponent a row is needed, got 2"):
        backend.kernels["text.vector_values"]([grouped])


@pytest.mark.slow
def test_the_noise_goes_on_beyond_2_to_the_32_elements() -> None:
    """The high half of an index is part of the hash's key; row 4095 of this table has elements on
    either side.
    """
    backend = build()
    rows = 4098
    columns = 2**20 + 37
    shape = WeightShape(rows, columns, columns, 2)
    ids = torch.tensor([4097, 4095, 1])
    grad = numbers(4, -127, 127, 3, columns)
    shifts = torch.full((rows + columns,), 4, dtype=torch.int32)
    results = []
    for kernels in (TORCH, backend.kernels):
        # Zeros are trits of -1 and accumulators of -1. Memory that is never touched is never there.
        packed_shape = (
            (rows, -(-columns // 4))
            if kernels is TORCH
            else (-(-rows // 16), -(-columns // 16), 64)
        )
        packed = torch.zeros(packed_shape, dtype=torch.uint8)
        held = torch.zeros(rows, -(-columns // 4), dtype=torch.uint8)
        others = {
            "magnitudes": torch.zeros(rows + columns),
            "limits": torch.tensor(VoteLimits(900, 20)),
        }
        exponent = torch.zeros(rows, 1, dtype=torch.int8)
        state = new_state(
            shape,
            packed,
            exponent,
            held,
            "",
            vote_scale=shifts,
            control=torch.tensor(CONTROL),
            **others,
        )
        kernels["embedding_scaled_votes"](ids, grad, torch.tensor(1.0), state)
        results.append((held[ids], state.learned, state.scaling[0]))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert (results[0][0] != 0).any()


def test_a_table_much_longer_than_the_batch_is_looked_up_too(backend: KernelBackend) -> None:
    layer = Layer(backend, WeightShape(100_000, 33, 32))
    ids = torch.tensor([99_999, 4, 70_000, 4, 0])
    grad = numbers(4, -127, 127, 5, 33)
    layer.cast("embedding_votes", ids, grad, torch.tensor(1.0))
    layer.check()


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("decay", [0, 77, 40_000, 65_535, 65_536])
@pytest.mark.parametrize("carry", [False, True])
def test_scaled_flips_are_bitwise_those_of_torch(
    backend: KernelBackend, threads: int, carry: bool, decay: int, bits: int
) -> None:
    for rows, columns in ((70, 1000), (3, 17_000)):
        layer = Layer(backend, WeightShape(rows, columns, 128, bits), threads=threads)
        threshold = max(1, layer.shape.largest_vote // 3)
        moved = layer.apply("apply_scaled_votes", threshold, decay, carry)
        assert moved[0] == moved[1] > 0
        layer.check()


@pytest.mark.parametrize("leak", [0, 1, 3, 127, 1000])
@pytest.mark.parametrize("threshold", [1, 40, 127])
def test_flips_are_bitwise_those_of_torch(
    backend: KernelBackend, threads: int, threshold: int, leak: int
) -> None:
    layer = Layer(backend, WeightShape(50, 777, 32), threads=threads)
    moved = layer.apply("apply_votes", threshold, leak)
    assert moved[0] == moved[1]
    layer.check()


@pytest.mark.parametrize("spread", ["one", "row", "all", "column"])
def test_exponents_move_as_the_torch_backends(
    backend: KernelBackend, threads: int, spread: str
) -> None:
    rows = 70
    groups = 1000
    origin = {
        "one": numbers(1, -5, 5, 1, 1),
        "row": numbers(1, -5, 5, rows, 1),
        "all": numbers(1, -5, 5, rows, groups),
        "column": numbers(1, -5, 5, groups, rows).t(),
    }[spread]
    for leak, band, threshold in ((0, 2, 9), (3, 1000, 100), (200, 0, 1)):
        layer = Layer(backend, WeightShape(rows, 16 * groups, 16), threads=threads)
        exponent = (origin + numbers(2, -1, 1, rows, groups)).contiguous()
        layer.change(exponent=exponent, exponent_votes=numbers(3, -128, 127, rows, groups))
        # with the strides that it has
        layer.states = [state._replace(origin=origin) for state in layer.states]
        moved = layer.apply("apply_exponent_votes", threshold, band, leak)
        assert moved[0] == moved[1]
        layer.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float_votes_do_not_depend_on_the_number_of_threads(
    backend: KernelBackend, dtype: torch.dtype
) -> None:
    shape = WeightShape(200, 1100, 64)
    generator = torch.Generator().manual_seed(0)
    grad, x = (torch.randn(150, size, generator=generator).to(dtype) for size in (200, 1100))
    factors = torch.rand(1300, generator=generator)
    results = []
    for count in (1, 2, 3):
        layer = Layer(backend, shape)
        layer.change(vote_scale=factors, limits=torch.tensor(VoteLimits(700, 4)))
        state = layer.states[1]
        with native_threads(count):
            backend.kernels["cast_votes"](grad, x, None, state)
            backend.kernels["cast_scaled_votes"](grad, x, None, state)
        results.append((state.weight, state.votes, state.learned, state.stats, state.scaling[0]))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_integer_votes_are_the_same_in_every_instruction_set() -> None:
    results = []
    for isa in usable_isas():
        chosen = build(isa)
        layer = Layer(chosen, WeightShape(100, 1100, 32))
        operands = (
            numbers(5, -127, 127, 90, 100),
            numbers(6, -127, 127, 90, 1100),
            torch.tensor(0.25),
        )
        state = layer.states[1]
        chosen.kernels["cast_votes"](*operands, state)
        results.append((state.votes, state.learned, state.stats))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("bits", [4, 2])
def test_narrow_votes_have_the_storage_of_the_torch_backend(
    backend: KernelBackend, threads: int, bits: int
) -> None:
    for rows, columns in ((300, 257), (2, 5000), (3, 0), (0, 7)):
        shape = WeightShape(rows, columns, 32, bits)
        held = numbers(1, -shape.largest_vote, shape.largest_vote, rows, columns)
        with native_threads(threads):
            stored = backend.kernels["pack_votes"](held, bits)
            assert torch.equal(stored, TORCH["pack_votes"](held, bits))
            assert torch.equal(backend.kernels["unpack_votes"](stored, shape), held)


def test_only_changed_operands_must_be_contiguous(backend: KernelBackend) -> None:
    layer = Layer(backend, WeightShape(40, 70, 32))
    grad = numbers(5, -9, 9, 40, 6).t()
    x = numbers(6, -9, 9, 6, 140)[:, ::2]
    layer.cast("cast_votes", grad, x, None)
    layer.check()
    turned = layer.states[1]._replace(
        votes=layer.states[1].votes.t().contiguous().t(), exponent_votes=None
    )
    with pytest.raises(ValueError, match="votes is written in place and must be contiguous"):
        backend.kernels["cast_votes"](grad, x, None, turned)


def test_offset_tensors_are_read_and_written_where_they_lie(backend: KernelBackend) -> None:
    layer = Layer(backend, WeightShape(40, 70, 32))

    def offset(tensor: Tensor) -> Tensor:
        whole = torch.zeros(tensor.numel() + 3, dtype=tensor.dtype)
        return whole[3:].view(tensor.shape).copy_(tensor)

    state = layer.states[1]
    moved = {
        name: offset(getattr(state, name))
        for name in ("weight", "votes", "exponent_votes", "stats")
    }
    layer.states[1] = state._replace(**moved)
    operands = (
        offset(numbers(5, -9, 9, 6, 40)),
        offset(numbers(6, -9, 9, 6, 70)),
        offset(torch.tensor(0.5)),
    )
    layer.cast("cast_votes", *operands)
    layer.apply("apply_scaled_votes", 9, 500, True)
    layer.check()


def test_what_does_not_fit_is_refused_by_name(backend: KernelBackend) -> None:
    shape = WeightShape(40, 70, 32)
    layer = Layer(backend, shape)
    grad = numbers(5, -9, 9, 6, 40)
    x = numbers(6, -9, 9, 6, 70)
    state = layer.states[1]

    def cast(
        grad: Tensor = grad, x: Tensor = x, scale: Tensor | None = None, **changed: Tensor
    ) -> None:
        backend.kernels["cast_votes"](grad, x, scale, state._replace(**changed))

    cast()
    for name, called in (
        ("weight", "packed"),
        *((name, name) for name in ("votes", "exponent_votes", "stats")),
    ):
        tensor = getattr(state, name)
        with pytest.raises(ValueError, match=called):
            cast(**{name: tensor[..., :-1].contiguous()})
        with pytest.raises(TypeError, match=called):
            cast(**{name: tensor.to(torch.int64)})
        with pytest.raises((TypeError, ValueError), match=called):
            cast(**{name: tensor.to("meta")})
    with pytest.raises(ValueError, match="grad"):
        cast(grad=grad[:, :-1])
    with pytest.raises(ValueError, match="x must be"):
        cast(x=x[0])
    with pytest.raises(ValueError, match="int8 gradient needs int8 activations"):
        cast(x=x.float())
    with pytest.raises(ValueError, match="scale must be one number"):
        cast(scale=torch.ones(2))
    scaled = state._replace(vote_scale=torch.ones(110, dtype=torch.int32))
    with pytest.raises(ValueError, match="need an int8 gradient"):
        backend.kernels["cast_scaled_votes"](grad.float(), x, None, scaled)
    for limit, shift in ((0, 0), (127 * 256 + 1, 0), (1, -1), (1, 32)):
        beyond = scaled._replace(limits=torch.tensor([limit, shift, 0]))
        with pytest.raises(ValueError, match="vote_limit" if shift == 0 else "exponent_shift"):
            backend.kernels["cast_scaled_votes"](grad, x, torch.tensor(1.0), beyond)
    with pytest.raises(ValueError, match="threshold"):
        backend.kernels["apply_votes"](state, 128, 0)
    with pytest.raises(ValueError, match="decay"):
        backend.kernels["apply_scaled_votes"](state, 9, 65537, True)


@pytest.mark.parametrize("wrong", [-1, 40, 2**40])
def test_id_beyond_the_table_is_an_index_error(backend: KernelBackend, wrong: int) -> None:
    layer = Layer(backend, WeightShape(40, 70, 32))
    before = layer.states[1].votes.clone()
    with pytest.raises(IndexError, match=r"ids must be in 0\.\.39"):
        backend.kernels["embedding_votes"](
            torch.tensor([1, wrong]), torch.ones(2, 70), None, layer.states[1]
        )
    assert torch.equal(layer.states[1].votes, before)


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_module_settles_a_step_as_in_torch(bits: int, scaled: bool) -> None:
    settled = []
    for name in ("torch", "cpu"):
        torch.manual_seed(3)
        layer = TernaryLinear(77, 20, vote_bits=bits, backend=name)
        largest = layer.shape.largest_vote
        layer.set_votes(torch.randint(-largest, largest + 1, (20, 77)).to(torch.int8))
        if scaled:
            layer.use_scaled_votes()
        layer.sum_votes()
        version = layer.votes._version
        layer.add_step_votes(torch.randint(-largest, largest + 1, (20, 77)).to(torch.int16))
        assert layer.votes._version > version
        settled.append(layer.logical_votes())
    assert torch.equal(*settled)
