"""The characters by which GPT-2's tokenizers write bytes (Radford et al., 2019).

Bytes that print stand for themselves, in Latin-1; the others are the characters from U+0100 on, in their order.
"""

from __future__ import annotations

from typing import Final

__all__ = ["BYTE_CHARACTERS"]

_PRINT: Final = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_OTHERS: Final = [byte for byte in range(256) if byte not in _PRINT]

#: The character of each byte.
BYTE_CHARACTERS: Final = tuple(chr(byte) if byte in _PRINT else chr(0x100 + _OTHERS.index(byte)) for byte in range(256))
