"""Every kernel for CUDA with every option that a call can ask for.

A test trains and generates on a CUDA lane whose compiler is faked and finds each kernel that they
launch in :func:`every_variant`. Compiled are those of :func:`covering`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain, product
from types import MappingProxyType
from typing import Any, Final

from attrs import field, frozen

from arb_ternary.backends.protocol import VOTE_BITS
from arb_ternary_tilelang.arguments import FLOATS
from arb_ternary_tilelang.kernels import flips, products, rows, storage, votes
from arb_ternary_tilelang.lane import CUDA_TILES, Lane, Tiles
from arb_ternary_tilelang.products import MOST_SPLITS

#: A weight of a layer with an exponent for 128 columns, and one whose sizes fill no tile.
LAYER: Final[Mapping[str, int]] = MappingProxyType({"N": 4096, "K": 4096, "G": 128})
ODD: Final[Mapping[str, int]] = MappingProxyType({"N": 1000, "K": 300, "G": 32})
_FLOATS: Final = tuple(FLOATS.values())
_BOTH: Final = (False, True)


_KINDS: Final = {
    votes.SIGN: "sign",
    votes.FACTORS: "factors",
    votes.SHIFTS: "shifts",
}


def _rule_name(rule: votes.Rule) -> str:
    kind = _KINDS.get(rule.kind or votes.SIGN)
    scores = "scores" if rule.learns else "no scores"
    return f"{rule.source} {kind} {rule.grad} {rule.x} {rule.bits} bits {scores}"


@frozen
class Variant:
    """A kernel with its options.

    Attributes:
        make: the function that describes the kernel.
        options: its options, in the order of its arguments.
        sizes: names of the sizes of the weight that it is compiled for.
    """

    make: Callable[..., Any]
    options: tuple[object, ...]
    sizes: tuple[str, ...] = field(default=("N", "K", "G"))

    @property
    def name(self) -> str:
        """The kernel and its options in words."""
        words = [self.make.__name__]
        for option in self.options:
            if isinstance(option, votes.Rule):
                words.append(_rule_name(option))
            elif isinstance(option, Tiles):
                words.append(f"{option.rows}x{option.columns}")
            else:
                words.append(str(option))
        return " ".join(words)

    def program(self, lane: Lane, weight: Mapping[str, int] = LAYER) -> Any:
        """Describe the kernel for a lane and the sizes of a weight."""
        return self.make(lane, *self.options, **{name: weight[name] for name in self.sizes})


#: Variants that differ only in the dtype of a result, a bias, splits, or whether scores are wanted.
Family = tuple[Variant, ...]


def _products() -> Iterator[Family]:
    for turned, tiles in product(_BOTH, (CUDA_TILES.many, CUDA_TILES.few)):
        for mode in ("int8", *_FLOATS):
            yield tuple(_results_of_product(turned, mode, tiles))
        yield tuple(_sums(turned, tiles))


def _results_of_product(turned: bool, mode: str, tiles: Tiles) -> Iterator[Variant]:
    biases = (False,) if turned else _BOTH
    for out in _FLOATS:
        for bias in biases:
            options = (turned, mode, out, bias, tiles, 1)
            yield Variant(products.product, options)


def _sums(turned: bool, tiles: Tiles) -> Iterator[Variant]:
    most = MOST_SPLITS if tiles == CUDA_TILES.few else 1
    for splits in range(1, most + 1):
        options = (turned, products.SUMS, "int32", False, tiles, splits)
        yield Variant(products.product, options)


def _rows_of_products() -> Iterator[Variant]:
    """Kernels of products that use no matrix unit."""
    for out in _FLOATS:
        yield Variant(products.lookup, (out,))
        yield Variant(products.finish, (True, out, False), sizes=())
        for bias in _BOTH:
            yield Variant(products.finish, (False, out, bias), sizes=())
            for chunk in (1, 4):
                yield Variant(products.gemv, (out, bias, chunk))


def _sources() -> Iterator[tuple[str, str, str]]:
    """Where the gradient of a weight comes from, its dtype, and that of the activations."""
    for grad in ("int8", *_FLOATS):
        yield votes.LOOKUP, grad, "int8"
        yield votes.PRODUCT, grad, "int8"
        if grad != "int8":
            yield votes.PRODUCT, grad, grad


def _votes() -> Iterator[Family]:
    for source, grad, x in _sources():
        tiles = CUDA_TILES.votes
        if source == votes.LOOKUP:
            tiles = CUDA_TILES.lookups
        kinds = list(_KINDS)
        if grad != "int8":
            kinds.remove(votes.SHIFTS)
        for bits, kind in product(VOTE_BITS, kinds):
            family = []
            for learns in _BOTH:
                rule = votes.Rule(source, kind, grad, x, bits, learns)
                family.append(Variant(votes.cast, (rule, tiles)))
            yield tuple(family)


def _elementwise() -> Iterator[Variant]:
    for make in (storage.pack, storage.unpack, storage.pack_nibbles, storage.unpack_nibbles):
        yield Variant(make, (), sizes=("N", "K"))
    for dtype in _FLOATS:
        yield Variant(rows.largest, (dtype,), sizes=())
        yield Variant(rows.quantize_gradient, (dtype,), sizes=())
        for norm in _BOTH:
            yield Variant(rows.quantize_rows, (dtype, norm), sizes=("K",))
    for bits in VOTE_BITS:
        for scaled, carry in product(_BOTH, _BOTH):
            yield Variant(flips.flip_trits, (bits, scaled, carry), sizes=("N", "K"))
    yield Variant(flips.flip_exponents, (), sizes=())
    for scaled in _BOTH:
        for mapped in _BOTH:
            yield Variant(votes.settle, (scaled, mapped), sizes=())


def _families() -> Iterator[Family]:
    yield from _products()
    yield from _votes()
    for variant in (*_rows_of_products(), *_elementwise()):
        yield (variant,)


def every_variant() -> tuple[Variant, ...]:
    """Return every variant."""
    return tuple(chain.from_iterable(_families()))


def covering() -> tuple[Variant, ...]:
    """Return one variant of each family, in turn, so that every value of every option occurs."""
    chosen = []
    for index, family in enumerate(_families()):
        place = index % len(family)
        chosen.append(family[place])
    return tuple(chosen)
