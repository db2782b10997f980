"""Pieces that kernels share: the counter hash, codes of trits and accumulators in their words.

A word is 32 bits and holds 16 columns of a row as codes ``t + 1`` of two bits: byte ``b``, bits ``2
p`` and ``2 p + 1`` is column ``4 p + b``. So ``(word >> 2 p) & 0x03030303`` is four consecutive
columns, one in each byte, as the int8 dot product wants them.
"""

from __future__ import annotations

from typing import Any, Final

#: Columns of a word.
UNIT: Final = 16


class Bits:
    """Macros for the dialect of a lane."""

    def __init__(self, T: Any) -> None:
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
        #: ``(int64 index, key of indices below 2**32, key of those above) -> uint32``.
        self.hashed = hashed

    def place(self, column: Any) -> Any:
        """Where the code of a column of a word begins."""
        return self.T.cast(8 * (column % 4) + 2 * (column // 4), "uint32")

    def trit(self, word: Any, column: Any) -> Any:
        """The trit of a column of a word, int32."""
        T = self.T
        return T.cast((word >> self.place(column)) & T.uint32(3), "int32") - 1

    def with_trit(self, word: Any, column: Any, trit: Any) -> Any:
        """The word with another trit in a column."""
        T = self.T
        place = self.place(column)
        return (word & ~(T.uint32(3) << place)) | (T.cast(trit + 1, "uint32") << place)

    def nibble(self, word: Any, column: Any) -> Any:
        """The 4-bit accumulator of a column of 8, int32."""
        T = self.T
        return T.cast((word >> T.cast(4 * column, "uint32")) & T.uint32(15), "int32") - 8

    def with_nibble(self, word: Any, column: Any, value: Any) -> Any:
        """The word with another 4-bit accumulator in a column of 8."""
        T = self.T
        place = T.cast(4 * column, "uint32")
        return (word & ~(T.uint32(15) << place)) | (T.cast(value + 8, "uint32") << place)

    def power_of_two(self, exponent: Any) -> Any:
        """float32 ``2**exponent`` of an int32 in -126..127."""
        T = self.T
        return T.reinterpret((exponent + 127) << 23, "float32")

    def _fraction(self, drawn: Any) -> Any:
        """``drawn * 2**-24``: by a number that is exact in the seven digits with which a constant
        is written.
        """
        T = self.T
        sixth = T.float32(2.0**-6)
        return T.cast(drawn, "float32") * sixth * sixth * sixth * sixth

    def uniform(self, bits: Any) -> Any:
        """A float32 in [0, 1) of hash bits."""
        T = self.T
        return self._fraction(bits >> T.uint32(8))

    def narrowed(self, bits: Any, noise_shift: Any) -> Any:
        """The same around one half, in an interval of ``2**-noise_shift``."""
        T = self.T
        least = ((1 << 24) - (1 << (24 - noise_shift))) >> 1
        drawn = T.cast(bits >> (T.uint32(8) + T.cast(noise_shift, "uint32")), "int32")
        return self._fraction(drawn + least)
