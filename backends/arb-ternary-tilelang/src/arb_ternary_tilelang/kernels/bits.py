"""Pieces that kernels share: the counter hash, trits and accumulators in words, clamping, NaN.

A word is 32 bits and holds 16 columns of a row as codes ``t + 1`` of two bits: byte ``b``, bits ``2
p`` and ``2 p + 1`` is column ``4 p + b``. So ``(word >> 2 p) & 0x03030303`` is four consecutive
columns, one in each byte, as the int8 dot product wants them.
"""

from __future__ import annotations

from typing import Any, Final

from arb_ternary_tilelang.lane import Lane

#: Columns of a word.
UNIT: Final = 16
#: The bits of an infinity; those of a NaN are larger.
INFINITY: Final = 0x7F800000


class Bits:
    """Macros and expressions for a lane."""

    def __init__(self, lane: Lane) -> None:
        T = lane.T

        @T.macro
        def mixed(index: Any, key_0: Any, key_1: Any) -> Any:
            x = T.alloc_var("uint32")
            # A comparison, not a shift by 32 bits: TVM narrows the index to 32 bits where a
            # tensor is small, and refuses the shift then.
            key = T.if_then_else(index < T.int64(1 << 32), key_0, key_1)
            x = T.cast(index, "uint32") * T.uint32(0x9E3779B1) + T.reinterpret(key, "uint32")
            x = x ^ (x >> T.uint32(16))
            x = x * T.uint32(0x7FEB352D)
            x = x ^ (x >> T.uint32(15))
            x = x * T.uint32(0x846CA68B)
            return x  # noqa: RET504 - a macro, which is read as text

        @T.macro
        def hashed(index: Any, key_0: Any, key_1: Any) -> Any:
            x = T.alloc_var("uint32")
            x = mixed(index, key_0, key_1)
            return x ^ (x >> T.uint32(16))

        self.T = T
        #: The hash but for its last step, ``x ^ (x >> 16)``.
        self.mixed = mixed
        #: ``(int64 index, key of indices below 2**32, key of those above) -> uint32``.
        self.hashed = hashed

    def index(self, row: Any, columns: Any, column: Any) -> Any:
        """The index of an element of a matrix as the hash takes it, int64."""
        return self.T.cast(row, "int64") * columns + column

    def place(self, column: Any) -> Any:
        """The bit of a word at which the code of a column begins."""
        byte = column % 4
        pair = column // 4
        return self.T.cast(8 * byte + 2 * pair, "uint32")

    def trit(self, word: Any, column: Any) -> Any:
        """The trit of a column of a word, int32."""
        place = self.place(column)
        code = self._code(word, place, 3)
        return self.T.cast(code, "int32") - 1

    def with_trit(self, word: Any, column: Any, trit: Any) -> Any:
        """The word with another trit in a column."""
        place = self.place(column)
        return self._with_code(word, place, 3, trit + 1)

    def nibble(self, word: Any, column: Any) -> Any:
        """The 4-bit accumulator of a column of 8, int32."""
        place = self.T.cast(4 * column, "uint32")
        code = self._code(word, place, 15)
        return self.T.cast(code, "int32") - 8

    def with_nibble(self, word: Any, column: Any, value: Any) -> Any:
        """The word with another 4-bit accumulator in a column of 8."""
        place = self.T.cast(4 * column, "uint32")
        return self._with_code(word, place, 15, value + 8)

    def _code(self, word: Any, place: Any, mask: int) -> Any:
        """The bits ``mask`` of ``word >> place``, uint32."""
        shifted = word >> place
        return shifted & self.T.uint32(mask)

    def _with_code(self, word: Any, place: Any, mask: int, code: Any) -> Any:
        """The word with ``code`` in its bits ``mask << place``."""
        T = self.T
        cleared = word & ~(T.uint32(mask) << place)
        wanted = T.cast(code, "uint32") << place
        return cleared | wanted

    def pick(self, left: Any, right: Any, selector: Any) -> Any:
        """Four of the eight bytes of two words, named by the low digits of a selector, uint32."""
        return self.call("uint32", "arb_pick", left, right, selector)

    def byte(self, word: Any, place: Any) -> Any:
        """A signed byte of a word, int32."""
        first = self.T.reinterpret(word << self.T.cast(24 - 8 * place, "uint32"), "int32")
        return first >> 24

    def bytes_of(self, numbers: Any, first: int) -> Any:
        """The low bytes of four numbers of an array, uint32."""
        four = [numbers[first + i] for i in range(4)]
        return self.call("uint32", "arb_bytes", *four)

    def call(self, dtype: str, name: str, *arguments: Any) -> Any:
        """Call a function of ``intrinsics.h``."""
        return self.T.call_extern(dtype, name, *arguments)

    def fused(self, left: Any, right: Any, more: Any) -> Any:
        """``left * right + more`` with one rounding, float32."""
        return self.call("float32", "arb_fused", left, right, more)

    def clamp(self, value: Any, low: Any, high: Any) -> Any:
        """``min(max(value, low), high)``."""
        raised = self.T.max(value, low)
        return self.T.min(raised, high)

    def crossed(self, value: Any, threshold: Any) -> Any:
        """int32: 1 from ``threshold`` up, -1 from ``-threshold`` down, else 0."""
        T = self.T
        up = T.cast(value >= threshold, "int32")
        down = T.cast(value <= -threshold, "int32")
        return up - down

    def sign(self, value: Any, zero: Any, dtype: str) -> Any:
        """The sign of a value as ``dtype``; ``zero`` is a zero of the value's own dtype."""
        T = self.T
        positive = T.cast(value > zero, dtype)
        negative = T.cast(value < zero, dtype)
        return positive - negative

    def low_mask(self, count: Any) -> Any:
        """``2**count - 1``, int64."""
        T = self.T
        power = T.int64(1) << T.cast(count, "int64")
        return power - T.int64(1)

    def magnitude(self, value: Any) -> Any:
        """The bits of ``|value|`` of a float32; as integers they are in the order of the values."""
        return self.T.reinterpret(value, "int32") & 0x7FFFFFFF

    def power_of_two(self, exponent: Any) -> Any:
        """float32 ``2**exponent`` of an int32 in -126..127."""
        biased = self.T.cast(exponent + 127, "int32")
        return self.T.reinterpret(biased << 23, "float32")

    def uniform(self, bits: Any) -> Any:
        """A float32 in [0, 1) of hash bits."""
        return self.call("float32", "arb_fraction", bits >> self.T.uint32(8))
