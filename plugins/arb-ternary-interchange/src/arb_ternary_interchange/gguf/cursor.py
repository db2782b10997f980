"""A position in a mapped GGUF file that moves forward and never beyond the end of the file."""

from __future__ import annotations

import codecs
import mmap
import struct
from pathlib import Path
from typing import Any

from arb_ternary.errors import DataError
from arb_ternary_interchange.gguf.values import FORMATS, Kind

#: Longest text in bytes that is read: of a name, a token or a value. A file may hold longer ones.
MAX_TEXT = 65535

#: Strings are checked for UTF-8 in pieces of this many bytes, so that a long one takes no memory.
_PIECE = 1 << 16


class Cursor:
    """Reads little-endian values from ``data`` at ``position``.

    Every read is checked against the end of the file first. Every method raises DataError if the
    file ends before the value does, or if the value is not one of its kind.
    """

    def __init__(self, data: mmap.mmap, path: Path, position: int = 0) -> None:
        self.data = data
        self.path = path
        self.position = position

    def fail(self, what: str) -> DataError:
        """Return the error for a fault at this position."""
        return DataError(
            f"{self.path}: byte {self.position}: {what}",
            "The file is damaged, or is not GGUF of a model.",
        )

    def skip(self, size: int, what: str) -> int:
        """Step over the ``size`` bytes of ``what`` and return their start."""
        start = self.position
        if size > len(self.data) - start:
            raise self.fail(
                f"{what} takes {size} bytes, and the file ends after {len(self.data) - start}"
            )
        self.position = start + size
        return start

    def number(self, kind: Kind, what: str) -> Any:
        """Read a number or boolean."""
        letter = FORMATS[kind]
        start = self.skip(struct.calcsize(f"<{letter}"), what)
        if kind is Kind.BOOL and self.data[start] > 1:
            self.position = start
            raise self.fail(f"{what} is {self.data[start]}; a boolean is 0 or 1")
        return struct.unpack_from(f"<{letter}", self.data, start)[0]

    def u32(self, what: str) -> int:
        value: int = self.number(Kind.UINT32, what)
        return value

    def u64(self, what: str) -> int:
        value: int = self.number(Kind.UINT64, what)
        return value

    def kind(self, what: str) -> Kind:
        """Read the kind of a value."""
        number = self.u32(f"the kind of {what}")
        try:
            return Kind(number)
        except ValueError:
            self.position -= 4
            raise self.fail(
                f"{what} is of the unknown kind {number}; kinds are 0 to {max(Kind)}"
            ) from None

    def text(self, what: str) -> str:
        """Read a string of up to :data:`MAX_TEXT` bytes."""
        length = self.u64(f"the length of {what}")
        if length > MAX_TEXT:
            self.position -= 8
            raise self.fail(f"{what} has {length} bytes; texts of up to {MAX_TEXT} are read")
        start = self.skip(length, what)
        return self._decode(start, length, what)

    def check_string(self, what: str) -> None:
        """Step over a string and check that it is UTF-8."""
        length = self.u64(f"the length of {what}")
        start = self.skip(length, what)
        if length <= _PIECE:
            self._decode(start, length, what)
            return
        decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            for piece in range(start, start + length, _PIECE):
                end = min(piece + _PIECE, start + length)
                decoder.decode(self.data[piece:end], final=end == start + length)
        except UnicodeDecodeError as error:
            raise self._not_utf8(start, what) from error

    def check_strings(self, count: int, what: str) -> None:
        """Step over ``count`` strings and check that they are UTF-8.

        Vocabularies have hundreds of thousands of strings. The loop therefore makes no calls until
        something is wrong.
        """
        data = self.data
        size = len(self.data)
        position = self.position
        length_at = struct.Struct("<Q").unpack_from
        for i in range(count):
            start = position + 8
            length = length_at(data, position)[0] if start <= size else size
            position = start + length
            if length <= _PIECE and position <= size:
                try:
                    data[start:position].decode("utf-8")
                    continue
                except UnicodeDecodeError:
                    pass
            self.position = start - 8
            self.check_string(f"item {i} of {what}")
        self.position = position

    def _decode(self, start: int, length: int, what: str) -> str:
        try:
            return self.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._not_utf8(start, what) from error

    def _not_utf8(self, start: int, what: str) -> DataError:
        self.position = start
        return self.fail(f"{what} is not UTF-8")
