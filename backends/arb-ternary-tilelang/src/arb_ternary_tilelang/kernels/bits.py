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
        def hashed(index: Any, key_0: Any, key_1: Any) -> Any:
            x = T.alloc_var("uint32")
            # A comparison, not a shift by 32 bits: TVM narrows the index to 32 bits where a
            # tensor is small, and refuses the shift then.
            key = T.if_then_else(index < T.int64(1 << 32), key_0, key_1)
            x = T.cast(index, "uint32") * T.uint32(0x9E3779B1) + T.reinterpret(key, "uint32")
            x = x ^ (x >> T.uint32(16))
            x = x * T.uint32(0x7FEB352D)
            x = x ^ (x >> T.uint32(15))
            x = x * T.uint32(0x846CA68B)
            x = x ^ (x >> T.uint32(16))
            return x  # noqa: RET504 - a macro, which is read as text

        self.T = T
        self._cuda = lane.cuda
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
        T = self.T
        if self._cuda:
            return T.call_extern("uint32", "__byte_perm", left, right, selector)
        both = (T.cast(right, "uint64") << T.uint64(32)) | T.cast(left, "uint64")
        picked = T.uint32(0)
        for place in range(4):
            digit = (selector >> T.uint32(4 * place)) & T.uint32(7)
            byte = T.cast(both >> T.cast(digit * T.uint32(8), "uint64"), "uint32") & T.uint32(0xFF)
            picked = picked | (byte << T.uint32(8 * place))
        return picked

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
        biased = exponent + 127
        return self.T.reinterpret(biased << 23, "float32")

    def _fraction(self, drawn: Any) -> Any:
        """``drawn * 2**-24``.

        In C++ TileLang writes constants with seven digits, in which ``2**-8`` is exact: there it
        takes three products.
        """
        value = self.T.cast(drawn, "float32")
        if self._cuda:
            return value * self.T.float32(2.0**-24)
        for _ in range(3):
            value = value * self.T.float32(2.0**-8)
        return value

    def uniform(self, bits: Any) -> Any:
        """A float32 in [0, 1) of hash bits."""
        drawn = bits >> self.T.uint32(8)
        return self._fraction(drawn)

    def narrowed(self, bits: Any, noise_shift: Any) -> Any:
        """A float32 of hash bits around one half, in an interval of ``2**-noise_shift``."""
        T = self.T
        width = 1 << (24 - noise_shift)
        least = ((1 << 24) - width) >> 1
        shift = T.uint32(8) + T.cast(noise_shift, "uint32")
        drawn = T.cast(bits >> shift, "int32")
        return self._fraction(drawn + least)
