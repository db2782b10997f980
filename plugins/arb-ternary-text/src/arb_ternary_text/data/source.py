"""A data source: two token streams and their tokenizer.

It is built without torch; only its batches need it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import attrs
import numpy as np
from numpy.typing import NDArray

from arb_ternary.config.options import Rule
from arb_ternary.protocols.data import Batch, BatchRequest
from arb_ternary_text.data.entropy import bigram_entropy, unigram_entropy
from arb_ternary_text.data.sampler import WindowSampler, window_count
from arb_ternary_text.data.tokenizers import Tokenizer

if TYPE_CHECKING:
    from arb_ternary_text.data.loader import SampledBatches

#: Share of a stream that is kept for validation by default.
DEFAULT_FRACTION: Final = 0.1

#: Validator of an option that is a share of a stream, with something left on both sides.
part: Final = Rule(
    "greater than 0 and less than 1",
    lambda value: 0 < value < 1,
    {"exclusiveMinimum": 0, "exclusiveMaximum": 1},
)


def require_one_validation(validation: str | None, fraction: float | None) -> None:
    """Raise ValueError if a config has both options that say what validation data is."""
    if validation is not None and fraction is not None:
        raise ValueError("validation and validation_fraction exclude each other: give one of them")


#: A stream of up to this many bytes is hashed whole, a longer one in ``_SAMPLES`` pieces of
#: ``_PIECE`` bytes.
_WHOLE: Final = 1 << 28
_PIECE: Final = 1 << 20
_SAMPLES: Final = 256


@attrs.frozen(eq=False)
class StreamSource:
    """Token streams in memory or mapped from files.

    Attributes:
        name: name of the source in listings and errors.
        tokenizer: turns text into the ids of the streams.
        train: training ids ``[L]``, an integer dtype.
        validation: validation ids ``[L']``, an integer dtype.
    """

    name: str
    tokenizer: Tokenizer
    train: NDArray[Any] = attrs.field(repr=lambda ids: f"<{len(ids)} tokens>")
    validation: NDArray[Any] = attrs.field(repr=lambda ids: f"<{len(ids)} tokens>")

    def fingerprint(self) -> str:
        """Return the SHA-256 in hexadecimal of both streams and the tokenizer.

        It does not depend on paths.
        """
        tokenizer = json.dumps(self.tokenizer.to_json(), sort_keys=True)
        parts = (digest(self.train), digest(self.validation), tokenizer)
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids."""
        return self.tokenizer.vocabulary_size

    def batches(self, request: BatchRequest) -> SampledBatches:
        """Return batches of windows of the training stream."""
        from arb_ternary_text.data.loader import SampledBatches, read_windows

        sampler = WindowSampler(
            len(self.train),
            request.block_size,
            request.batch_size,
            seed=request.seed,
            order=request.order,
            name="the training stream",
        )
        return SampledBatches(
            sampler,
            lambda indices_B: read_windows(self.train, indices_B, request.block_size),
            workers=request.workers,
            pin_memory=request.pin_memory,
        )

    def samples_per_epoch(self, block_size: int) -> int:
        """Return the number of windows of the training stream."""
        return window_count(len(self.train), block_size, "the training stream")

    def held_out(self, batch_size: int, block_size: int, limit: int | None) -> Iterator[Batch]:
        """Yield batches of windows of the validation stream.

        All windows together predict each token but the first exactly once.
        """
        from arb_ternary_text.data.loader import evaluation_indices, read_windows

        windows = window_count(len(self.validation), block_size, "the validation stream")
        indices = evaluation_indices(windows, batch_size, limit)
        return (read_windows(self.validation, indices_B, block_size) for indices_B in indices)

    def baselines(self, block_size: int) -> Mapping[str, float]:
        """Return the entropies of the tokens that a whole evaluation predicts."""
        windows = window_count(len(self.validation), block_size, "the validation stream")
        seen = self.validation[: windows * block_size + 1]
        return {
            "unigram_entropy": unigram_entropy(seen[1:]),
            "bigram_entropy": bigram_entropy(seen),
        }

    def held_out_predictions(self, block_size: int) -> int:
        """Return the number of tokens that a whole evaluation predicts."""
        windows = window_count(len(self.validation), block_size, "the validation stream")
        return windows * block_size

    def attachments(self) -> Mapping[str, Any]:
        """Return the tokenizer as ``from_json`` reads it."""
        return {"tokenizer": self.tokenizer.to_json()}


def digest(ids_L: NDArray[Any]) -> str:
    """Return the SHA-256 in hexadecimal of a stream's dtype, length and content.

    Of a stream of more than 256 MiB only 256 pieces of 1 MiB are read, evenly spaced from its first
    byte to its last. This tells files apart without reading hundreds of gigabytes at every start.
    """
    hasher = hashlib.sha256(f"{ids_L.dtype.str} {len(ids_L)}".encode())
    content = np.ascontiguousarray(ids_L).view(np.uint8)
    if content.nbytes <= _WHOLE:
        hasher.update(content.data)
    else:
        for start in np.linspace(0, content.nbytes - _PIECE, _SAMPLES).astype(np.int64).tolist():
            hasher.update(content[start : start + _PIECE].data)
    return hasher.hexdigest()
