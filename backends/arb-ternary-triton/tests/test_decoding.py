"""The instructions by which weights are decoded on a GPU, restated in numpy from their manuals.

Triton's interpreter runs no instructions of a GPU. Here it is given these, so that the products run
as they would on a GPU, and are compared with the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import triton.language as tl
from torch import Tensor

from arb_ternary.backends import reference, reference_scaled_votes, reference_votes
from arb_ternary.backends.protocol import WeightShape
from arb_ternary.backends.select import get_backend
from arb_ternary.backends.vote_state import VoteLimits, VoteState, new_state
from arb_ternary_triton import casting, flips, products
from arb_ternary_triton.packing import check_packing
from arb_ternary_triton.tiles import ProductTile

interpreted = pytest.mark.interpreted
Words = npt.NDArray[np.uint32]


def _bytes(words: Words) -> npt.NDArray[np.uint8]:
    """The four bytes of each word, lowest first, on a new last axis."""
    return np.stack([(words >> (8 * byte) & 255).astype(np.uint8) for byte in range(4)], axis=-1)


def _words(bytes_of: npt.NDArray[np.uint8]) -> Words:
    shifted = bytes_of.astype(np.uint32) << (8 * np.arange(4, dtype=np.uint32))
    return shifted.sum(axis=-1, dtype=np.uint32)


def _chosen(bytes_of_two: npt.NDArray[np.uint8], places: npt.NDArray[np.uint32]) -> Words:
    return _words(np.take_along_axis(bytes_of_two, places.astype(np.int64), axis=-1))


def prmt(a: Words, b: Words, selector: Words) -> Words:
    """PTX ISA, prmt, default mode: bytes of {b, a} by the four lowest nibbles."""
    a, b, selector = np.broadcast_arrays(a, b, selector)
    nibbles = selector[..., None] >> (4 * np.arange(4, dtype=np.uint32)) & 15
    both = np.concatenate([_bytes(a), _bytes(b)], axis=-1)
    signs = (both.view(np.int8) >> 7).view(np.uint8)  # what the highest bit of a nibble asks for
    return _chosen(np.concatenate([both, signs], axis=-1), nibbles)


def v_perm_b32(first: Words, second: Words, selector: Words) -> Words:
    """CDNA3 ISA, V_PERM_B32: bytes of {S0, S1} by the four bytes of S2; S1 is the lower half."""
    places = _bytes(selector).astype(np.uint32)
    assert (places < 8).all()  # higher ones are signs and constants
    return _chosen(np.concatenate([_bytes(second), _bytes(first)], axis=-1), places)


def _dot(a: npt.NDArray[Any], b: npt.NDArray[Any], acc: Words) -> Words:
    products_of_bytes = a.astype(np.int64) * b.astype(np.int64)
    return (acc.astype(np.int64) + products_of_bytes.sum(axis=-1)).astype(np.uint32)


def dp4a(a: Words, b: Words, acc: Words) -> Words:
    """PTX ISA, dp4a.u32.s32: unsigned bytes of a, signed ones of b."""
    return _dot(_bytes(a), _bytes(b).view(np.int8), acc)


def dp2a(a: Words, b: Words, acc: Words, first: int) -> Words:
    """PTX ISA, dp2a.u32.u32: the halves of a times bytes ``first`` and the next of b."""
    bytes_of = _bytes(b).astype(np.uint64)
    low = (a & 0xFFFF).astype(np.uint64) * bytes_of[..., first]
    high = (a >> 16).astype(np.uint64) * bytes_of[..., first + 1]
    return (acc + low + high).astype(np.uint32)


def cvt_pack(parts: list[Words]) -> Words:
    """PTX ISA, cvt.pack.sat.s8.s32.b32 of two numbers, then of two more below the first two."""
    clipped = [np.clip(part.view(np.int32), -128, 127).astype(np.int8) for part in parts]
    return _words(np.stack(clipped, axis=-1).view(np.uint8))


def cvt_rpi(x: Words) -> Words:
    """PTX ISA, cvt.rpi.s32.f32: the next integer above; NaN becomes 0."""
    rounded = np.ceil(np.nan_to_num(x.view(np.float32), nan=0.0).astype(np.float64))
    return rounded.astype(np.int64).astype(np.int32).view(np.uint32)


def mad_hi(a: Words, b: Words, c: Words) -> Words:
    """PTX ISA, mad.hi.u32: the upper half of a product, plus c."""
    return (a.astype(np.uint64) * b >> 32).astype(np.uint32) + c


def signed_dot4(a: Words, b: Words, acc: Words) -> Words:
    """CDNA3 ISA, V_DOT4_I32_I8, and RDNA3 ISA, V_DOT4_I32_IU8 with both operands negated."""
    return _dot(_bytes(a).view(np.int8), _bytes(b).view(np.int8), acc)


#: What the text of an instruction computes from its operands in their order.
INSTRUCTIONS: dict[str, Callable[..., Words]] = {
    "prmt.b32 $0, $1, $2, $3;": prmt,
    "prmt.b32 $0, $1, 0, $2;": lambda a, selector: prmt(a, a * 0, selector),
    "prmt.b32 $0, $1, 0, $5;": lambda a, selector: prmt(a, a * 0, selector),
    "mov.b32 $0, $1;": lambda a, _: a,
    "dp4a.u32.s32 $0, $1, $2, $3;": dp4a,
    "dp4a.s32.s32 $0, $1, $2, $3;": lambda a, b, acc: signed_dot4(a, b, acc),
    "abs.s32 $0, $1;": lambda a: np.abs(a.view(np.int32)).view(np.uint32),
    "cvt.rpi.s32.f32 $0, $1;": cvt_rpi,
    "mad.hi.u32 $0, $1, $2, $3;": mad_hi,
    "cvt.pack.sat.s8.s32.b32 $0, $4, $3, 0; cvt.pack.sat.s8.s32.b32 $0, $2, $1, $0;": (
        lambda *parts: cvt_pack(list(parts))
    ),
    "dp2a.lo.u32.u32 $0, $1, $2, $3;": lambda a, b, acc: dp2a(a, b, acc, 0),
    "dp2a.hi.u32.u32 $0, $1, $2, $3;": lambda a, b, acc: dp2a(a, b, acc, 2),
    "v_perm_b32 $0, $2, $1, $3": lambda a, b, selector: v_perm_b32(b, a, selector),
    "v_dot4_i32_i8 $0, $1, $2, $3": signed_dot4,
    "v_dot4_i32_iu8 $0, $1, $2, $3 neg_lo:[1,1,0]": signed_dot4,
}


def _bits(data: npt.NDArray[Any]) -> Words:
    """The bits of numbers of 32, or of int8, as words."""
    return (
        data.view(np.uint32) if data.dtype.kind == "f" else data.astype(np.int64).astype(np.uint32)
    )


def _run(asm: str, _constraints: str, args: list[Any], dtype: Any, is_pure: bool, pack: int) -> Any:
    """Stand in for ``tl.inline_asm_elementwise``; four elements are those of the last axis."""
    shape = np.broadcast_shapes(*(tuple(arg.shape) for arg in args))
    words = [np.broadcast_to(_bits(arg.handle.data), shape) for arg in args]
    if pack == 1:
        found = INSTRUCTIONS[str(asm)](*words).view(np.float32 if dtype.is_floating() else np.int32)
    else:
        first = INSTRUCTIONS[str(asm)](*(word[..., 0] for word in words))
        found = _bytes(first).view(np.int8)
    like = args[0].to(tl.int64).to(dtype)  # a new tensor, whatever its dtype was
    like.handle.data = np.ascontiguousarray(found)
    return like


@pytest.fixture(params=[1, 2, 3], ids=["NVIDIA", "CDNA", "RDNA"])
def instruction_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(tl, "inline_asm_elementwise", _run)
    for module in (products, flips, casting):
        monkeypatch.setattr(module, "instruction_set", lambda _device: request.param)
    product = ProductTile(rows=16, outputs=32, blocks=2, split=2)
    monkeypatch.setattr(products, "choose_row", lambda *_: ProductTile(1, 8, 2, split=2))
    monkeypatch.setattr(products, "choose_linear", lambda *_: product)
    monkeypatch.setattr(products, "choose_grad_input", lambda *_: product)
    return int(request.param)


@interpreted
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels were not made for the interpreter")
@pytest.mark.parametrize("group", [32, 64, 96, 128, 256, 600])
@pytest.mark.parametrize("rows", [1, 19])
@pytest.mark.usefixtures("instruction_set")
def test_decoded_by_its_instructions_a_product_has_the_bits_of_the_reference(
    rows: int, group: int
) -> None:
    generator = torch.Generator().manual_seed(rows + group)
    shape = WeightShape(37, 600, group)

    def bytes_of(*size: int) -> Tensor:
        return torch.randint(-127, 128, size, dtype=torch.int8, generator=generator)

    trits = torch.randint(-1, 2, (37, 600), dtype=torch.int8, generator=generator)
    exponent = torch.randint(-7, 0, (37, shape.groups), dtype=torch.int8, generator=generator)
    x, grad = bytes_of(rows, 600), bytes_of(rows, 37)
    # the largest sums that a word of codes can come to
    trits[:3], x[0], grad[0] = 1, -127, 127
    kernels = get_backend("triton").kernels
    packed = kernels["pack"](trits)
    scale = torch.rand(rows, generator=generator)
    unit = torch.tensor(2.0**-9)
    got = kernels["linear"](x, scale, packed, exponent, None, shape, torch.float32)
    back = kernels["linear_grad_input"](grad, unit, packed, exponent, shape, torch.float32)

    plain = reference.pack(trits)
    wanted = reference.linear(x, scale, plain, exponent, None, shape, torch.float32)
    assert torch.equal(got, wanted)
    wanted = reference.linear_grad_input(grad, unit, plain, exponent, shape, torch.float32)
    assert torch.equal(back, wanted)


def _vote_state(pack: Callable[[Tensor], Tensor], columns: int) -> VoteState:
    """Every accumulator with every trit, so that all four bytes of a word have all values."""
    shape = WeightShape(3 * 4, columns, columns)
    values = torch.arange(-128, 128, dtype=torch.int16).to(torch.int8)
    trits = torch.arange(-1, 2, dtype=torch.int8).repeat_interleave(4)[:, None]
    votes = torch.stack([values.roll(turn).repeat(2)[:columns] for turn in range(4)] * 3)
    exponent = torch.zeros((12, 1), dtype=torch.int8)
    control = torch.tensor([11, 5, 77, 0])
    packed = pack(trits.expand(12, columns).contiguous())
    return new_state(shape, packed, exponent, votes.clone(), "triton", control=control)


# 300 columns are whole words of four accumulators; 299 are not.
@interpreted
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels were not made for the interpreter")
@pytest.mark.parametrize("columns", [300, 299])
@pytest.mark.parametrize("instruction_set", [0, 1, 2, 3], indirect=True)
@pytest.mark.usefixtures("instruction_set")
def test_accumulators_in_words_flip_and_fade_as_in_the_reference(columns: int) -> None:
    kernels = get_backend("triton").kernels

    def compare(op: str, wanted_op: Callable[..., Tensor], *options: Any) -> None:
        got = _vote_state(kernels["pack"], columns)
        wanted = _vote_state(reference.pack, columns)
        flipped = kernels[op](got, *options)
        assert flipped == wanted_op(wanted, *options), (op, options)
        assert torch.equal(got.votes, wanted.votes), (op, options)
        trits = reference.unpack(wanted.weight, wanted.shape)
        assert torch.equal(kernels["unpack"](got.weight, got.shape), trits), (op, options)

    for threshold in (1, 32, 127):
        for leak in (0, 1, 127, 200):
            compare("apply_votes", reference_votes.apply_votes, threshold, leak)
        for decay, carry in ((0, True), (256, False), (40000, True), (65535, True), (65536, False)):
            scaled = reference_scaled_votes.apply_scaled_votes
            compare("apply_scaled_votes", scaled, threshold, decay, carry)


def _cast_both(
    columns: int, grad: Tensor, x: Tensor, scale: Tensor | None, **fields: Tensor
) -> tuple[VoteState, VoteState]:
    """Cast votes with the kernels and with the reference, from the same state."""
    kernels = get_backend("triton").kernels
    states = []
    for pack in (kernels["pack"], reference.pack):
        copies = {name: field.clone() for name, field in fields.items()}
        states.append(_vote_state(pack, columns)._replace(**copies))
    got, wanted = states
    if "vote_scale" in fields:
        kernels["cast_scaled_votes"](grad, x, scale, got)
        reference_scaled_votes.cast_scaled_votes(grad, x, scale, wanted)
    else:
        kernels["cast_votes"](grad, x, scale, got)
        reference_votes.cast_votes(grad, x, scale, wanted)
    return got, wanted


@interpreted
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels were not made for the interpreter")
@pytest.mark.parametrize("columns", [300, 299])
@pytest.mark.parametrize("instruction_set", [0, 1, 2, 3], indirect=True)
@pytest.mark.usefixtures("instruction_set")
def test_votes_in_words_are_those_of_the_reference(columns: int) -> None:
    generator = torch.Generator().manual_seed(columns)
    grad = torch.randint(-127, 128, (9, 12), dtype=torch.int8, generator=generator)
    x = torch.randint(-127, 128, (9, columns), dtype=torch.int8, generator=generator)
    grad[:, 4] = 0
    scale = torch.tensor(2.0**-3)
    size = (12 + columns,)

    def compare(
        grad: Tensor, x: Tensor, scale: Tensor | None, close: bool = False, **fields: Tensor
    ) -> None:
        got, wanted = _cast_both(columns, grad, x, scale, **fields)
        assert torch.equal(got.votes, wanted.votes)
        assert torch.equal(got.learned, wanted.learned)
        assert torch.equal(got.stats[0], wanted.stats[0])
        assert torch.allclose(got.stats, wanted.stats, rtol=2.0**-18)
        if "magnitudes" in fields:
            assert got.magnitudes is not None
            assert wanted.magnitudes is not None
            same = torch.allclose if close else torch.equal
            assert same(got.magnitudes, wanted.magnitudes)

    compare(grad, x, scale)
    for limit in (300, 1024, 32512):
        # Shifts that are all in the usual range, and some that are above or on both sides.
        for low, high in ((0, 14), (14, 18), (-40, 40)):
            shifts = torch.randint(low, high, size, dtype=torch.int32, generator=generator)
            limits = torch.tensor(VoteLimits(limit, 2))
            compare(grad, x, scale, vote_scale=shifts, magnitudes=torch.zeros(size), limits=limits)
        for noise_shift in (0, 5):
            factors = 2.0 ** torch.randint(-9, 4, size, generator=generator)
            factors[3] = torch.inf  # times 0 is NaN
            limits = torch.tensor(VoteLimits(limit, 2, noise_shift))
            fields = {"vote_scale": factors, "magnitudes": torch.zeros(size), "limits": limits}
            compare(grad, x, scale, **fields)
            # One term, so that no sum is rounded.
            floats = grad[:1].float() / 8
            floats[0, 7] = torch.nan
            compare(floats, x[:1].float(), None, close=True, **fields)
    compare(floats, x[:1].float(), None)


# --- the order of a thread's elements

KERNEL = """
#blocked = #ttg.blocked<{{sizePerThread = [1, 1, 1], order = [2, 1, 0]}}>
#four = #ttg.blocked<{{sizePerThread = [1, 4, 4], warps = [2, 1, 1], order = [2, 0, 1]}}>
#turned = #ttg.blocked<{{sizePerThread = [1, 4, 4], order = [1, 2, 0]}}>
#linear = #ttg.linear<{{register = [[0, 0, 1], [0, 0, 2], [8, 0, 0]], lane = [[1, 0, 0]]}}>
#other = #ttg.linear<{{register = [[0, 1, 0], [0, 0, 1], [0, 0, 2]], lane = [[1, 0, 0]]}}>
%1 = tt.elementwise_inline_asm "prmt" {{packed_element = 4 : i32}} %0 : {kind} -> {kind}
"""


@pytest.mark.parametrize("layout", ["linear", "four"])
def test_four_neighbours_on_the_last_axis_are_taken(layout: str) -> None:
    check_packing(KERNEL.format(kind=f"tensor<64x8x4xi8, #{layout}>"))


@pytest.mark.parametrize(
    "kind",
    [
        "tensor<64x8x4xi8, #blocked>",
        "tensor<64x8x4xi8, #turned>",
        "tensor<64x8x4xi8, #other>",
        "tensor<64x8x1xi8, #linear>",
    ],
)
def test_four_elements_that_are_no_neighbours_are_refused(kind: str) -> None:
    with pytest.raises(RuntimeError, match="choose another tile"):
        check_packing(KERNEL.format(kind=kind))
