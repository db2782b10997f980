"""A cache of decoded int8 weights for the torch backend.

Unpacking two-bit codes in torch costs more than the product with one row of activations. Therefore
the int8 form that the library's GEMM takes is kept per packed tensor, as long as the version
counters of the tensors do not change, within a budget of bytes (``ARB_TERNARY_DECODE_CACHE_MB``).
The least recently used one is dropped first. It is a cache, not state: dropping it changes no bit.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from weakref import ref

from attrs import frozen
from torch import Tensor

from arb_ternary.environment import DECODE_CACHE_MB


@frozen(eq=False)
class Decoded:
    """A weight for the int8 GEMM: ``W[n, k] = codes[n, k] * 2**floor[n]``.

    Attributes:
        codes: int8 ``[N, K]``, ``T << (E - floor)``.
        floor: int32 ``[N]``, the smallest exponent of each row.
    """

    codes: Tensor
    floor: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors."""
        return self.codes.nbytes + self.floor.nbytes


@frozen(eq=False)
class _Entry:
    """A decoded weight, and the tensors and versions that it was decoded from."""

    packed: ref[Tensor]
    exponent: ref[Tensor]
    versions: tuple[int, int]
    decoded: Decoded


class DecodeCache:
    """A map from (packed, exponent) tensors to :class:`Decoded`, for any number of threads."""

    def __init__(self) -> None:
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self._lock = Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of the decoded weights in the cache."""
        return sum(entry.decoded.nbytes for entry in [*self._entries.values()])

    def get(self, packed: Tensor, exponent: Tensor) -> Decoded | None:
        """Return the decoded form; None if it is absent, or either tensor has changed since."""
        if packed.is_inference() or exponent.is_inference():
            return None
        with self._lock:
            entry = self._entries.get(id(packed))
            if entry is None or entry.exponent() is not exponent:
                return None
            if entry.versions != (packed._version, exponent._version):
                return None
            self._entries.move_to_end(id(packed))
            return entry.decoded

    def put(self, packed: Tensor, exponent: Tensor, decoded: Decoded) -> None:
        """Keep ``decoded`` if it fits in the budget.

        Tensors of inference mode have no version, so their decoded forms are not kept.
        """
        budget = DECODE_CACHE_MB.integer() * 2**20
        if packed.is_inference() or exponent.is_inference() or decoded.nbytes > budget:
            return
        key = id(packed)
        versions = (packed._version, exponent._version)
        alive = ref(packed, lambda _: self._entries.pop(key, None))
        with self._lock:
            self._entries[key] = _Entry(alive, ref(exponent), versions, decoded)
            self._entries.move_to_end(key)
            while self.nbytes > budget:
                self._entries.popitem(last=False)


#: The cache of this process, for all modules.
CACHE = DecodeCache()
