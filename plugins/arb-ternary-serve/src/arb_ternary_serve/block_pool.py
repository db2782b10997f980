"""Blocks of a cache of keys and values: who uses them, and what they hold.

A block is a number; it holds the keys and values of ``size`` consecutive positions. A block that is
full is known by the ids of its positions and of all positions before them, so that sequences with
the same beginning use the same blocks. A known block that nobody uses is kept until its memory is
needed, the one that was used least recently first.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

#: The serial of what no block comes before.
BEGINNING: Final = 0

#: The serial of the contents before a block, and the ids of its positions.
_Key = tuple[int, bytes]


class BlockPool:
    """Counts the users of ``count`` blocks of ``size`` positions."""

    def __init__(self, count: int, size: int) -> None:
        self.count = count
        self.size = size
        self._users = [0] * count
        self._unknown = list(range(count))[::-1]  # without users and contents
        self._idle: OrderedDict[int, None] = OrderedDict()  # known, without users
        self._block_of: dict[_Key, int] = {}
        self._key_of: dict[int, _Key] = {}
        # Contents have serials, not blocks: a block that holds other ids later gets another one, so
        # that no block after it is found by mistake.
        self._serial_of: dict[int, int] = {}
        self._last_serial = BEGINNING

    @property
    def available(self) -> int:
        """Number of blocks that :meth:`take` can give."""
        return len(self._unknown) + len(self._idle)

    def find(self, ids: Sequence[int]) -> tuple[list[int], int]:
        """Return the known blocks of the longest beginning of ``ids``, and the serial of the last.

        The serial is ``BEGINNING`` if there is none.
        """
        found: list[int] = []
        before = BEGINNING
        for first in range(0, len(ids) - self.size + 1, self.size):
            block = self._block_of.get(_key(before, ids[first : first + self.size]))
            if block is None:
                break
            found.append(block)
            before = self._serial_of[block]
        return found, before

    def share(self, blocks: Sequence[int]) -> None:
        """Count one more user of each block."""
        for block in blocks:
            self._users[block] += 1
            self._idle.pop(block, None)

    def take(self, count: int) -> list[int]:
        """Return ``count`` of the ``available`` blocks, each with one user."""
        taken: list[int] = []
        for _ in range(count):
            if self._unknown:
                block = self._unknown.pop()
            else:
                block, _ = self._idle.popitem(last=False)
                self._forget(block)
            self._users[block] = 1
            taken.append(block)
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """Count one user less of each block of a sequence."""
        # The last one first: a block is of no use without those before it.
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block]:
                continue
            if block in self._key_of:
                self._idle[block] = None
            else:
                self._unknown.append(block)

    def learn(self, block: int, ids: Sequence[int], before: int) -> int:
        """Make known what a full block holds; return the serial of that.

        If two sequences have computed the same, the first of their blocks is known.

        Args:
            block: a block with a user.
            ids: the ids of its positions.
            before: the serial of the block before it.
        """
        key = _key(before, ids)
        known = self._block_of.setdefault(key, block)
        if known not in self._serial_of:
            self._key_of[block] = key
            self._last_serial += 1
            self._serial_of[block] = self._last_serial
        return self._serial_of[known]

    def _forget(self, block: int) -> None:
        del self._block_of[self._key_of.pop(block)]
        del self._serial_of[block]


def _key(before: int, ids: Sequence[int]) -> _Key:
    return before, array("q", ids).tobytes()
