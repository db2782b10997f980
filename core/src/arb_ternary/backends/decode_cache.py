"""Decoded int8 weights of the torch backend, kept while they are unchanged.

Unpacking two-bit codes in torch costs more than the product with one row of activations. So the
int8 form that feeds the library's GEMM is kept per packed tensor, guarded by the tensors' version
counters, within a byte budget (``ARB_TERNARY_DECODE_CACHE_MB``, least recently used first out). It
is a cache, not state: dropping it changes no bit.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from weakref import ref

from attrs import define, frozen
from torch import Tensor

from arb_ternary.environment import DECODE_CACHE_MB


@frozen(eq=False)
class Decoded:
    """A weight ready for the int8 GEMM: ``W[n, k] = codes[n, k] * 2**floor[n]``.

    ``codes`` are int8 ``[N, K]``, ``T << (E - floor)``; ``floor`` is int32 ``[N]``, smallest
    exponent of each row.
    """

    codes: Tensor
    floor: Tensor

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.floor.nbytes


@define(eq=False)
class _Entry:
    packed: ref[Tensor]
    exponent: ref[Tensor]
    versions: tuple[int, int]
    decoded: Decoded


class DecodeCache:
    """A least-recently-used map from (packed, exponent) tensors to :class:`Decoded`, safe between
    threads.

    ``nbytes`` are held now.
    """

    def __init__(self) -> None:
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self.nbytes = 0
        self._lock = Lock()

    def get(self, packed: Tensor, exponent: Tensor) -> Decoded | None:
        """The decoded form, or None when it is absent or either tensor has changed since."""
        if packed.is_inference() or exponent.is_inference():
            return None
        with self._lock:
            entry = self._entries.get(id(packed))
            current = (packed._version, exponent._version)
            if entry is None:
                return None
            if (
                entry.packed() is not packed
                or entry.exponent() is not exponent
                or entry.versions != current
            ):
                self._drop(id(packed))
                return None
            self._entries.move_to_end(id(packed))
            return entry.decoded

    def put(self, packed: Tensor, exponent: Tensor, decoded: Decoded) -> None:
        """Keep ``decoded`` if it fits in the budget; tensors of inference mode have no version and
        are not kept.
        """
        budget = DECODE_CACHE_MB.integer() * 2**20
        if packed.is_inference() or exponent.is_inference() or decoded.nbytes > budget:
            return
        versions = (packed._version, exponent._version)
        with self._lock:
            self._drop(id(packed))
            self._entries[id(packed)] = _Entry(ref(packed), ref(exponent), versions, decoded)
            self.nbytes += decoded.nbytes
            for key in [key for key, entry in self._entries.items() if entry.packed() is None]:
                self._drop(key)
            while self.nbytes > budget:
                self._drop(next(iter(self._entries)))

    def _drop(self, key: int) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.nbytes -= entry.decoded.nbytes


#: One cache a process serves every module.
CACHE = DecodeCache()
