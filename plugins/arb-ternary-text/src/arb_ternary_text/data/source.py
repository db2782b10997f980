"""A data source: two token streams, their tokenizer and a fingerprint."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final

import attrs
import numpy as np
from numpy.typing import NDArray

from arb_ternary.config.options import Rule
from arb_ternary.protocols.data import Tokenizer

__all__ = ["DEFAULT_FRACTION", "StreamSource", "digest", "part"]

#: Share of a stream that is kept for validation when the config says nothing about validation.
DEFAULT_FRACTION: Final = 0.1

#: Validator of an option that is a share of a stream, of which something must be left on both sides.
part: Final = Rule(
    "greater than 0 and less than 1", lambda value: 0 < value < 1, {"exclusiveMinimum": 0, "exclusiveMaximum": 1}
)

#: A stream up to this many bytes is hashed whole, a longer one in ``_SAMPLES`` pieces of ``_PIECE`` bytes.
_WHOLE: Final = 1 << 28
_PIECE: Final = 1 << 20
_SAMPLES: Final = 256


@attrs.frozen(eq=False)
class StreamSource:
    """Token streams in memory or mapped from files.

    Attributes:
        name: what listings and errors call the source.
        tokenizer: how text becomes the ids in the streams.
        train: training ids ``[L]``, an integer dtype.
        validation: validation ids ``[L']``, an integer dtype.
    """

    name: str
    tokenizer: Tokenizer
    train: NDArray[Any] = attrs.field(repr=lambda ids: f"<{len(ids)} tokens>")
    validation: NDArray[Any] = attrs.field(repr=lambda ids: f"<{len(ids)} tokens>")

    def fingerprint(self) -> str:
        """SHA-256 in hexadecimal of both streams and the tokenizer; the paths that they came from do not count."""
        tokenizer = json.dumps(self.tokenizer.to_json(), sort_keys=True)
        parts = (digest(self.train), digest(self.validation), tokenizer)
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def digest(ids_L: NDArray[Any]) -> str:
    """SHA-256 in hexadecimal of a stream's dtype, length and content.

    Of a stream beyond 256 MiB only 256 pieces of 1 MiB are read, evenly spaced from its first byte to its last:
    enough to tell a file from another, without reading hundreds of gigabytes each time a run starts.
    """
    hasher = hashlib.sha256(f"{ids_L.dtype.str} {len(ids_L)}".encode())
    content = np.ascontiguousarray(ids_L).view(np.uint8)
    if content.nbytes <= _WHOLE:
        hasher.update(content.data)
    else:
        for start in np.linspace(0, content.nbytes - _PIECE, _SAMPLES).astype(np.int64).tolist():
            hasher.update(content[start : start + _PIECE].data)
    return hasher.hexdigest()
