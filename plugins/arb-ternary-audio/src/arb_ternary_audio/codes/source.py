"""The data source ``audio_codes``: the sounds of another source as a stream of codes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs
import numpy as np
from numpy.typing import NDArray

from arb_ternary.config.choice import DataChoice
from arb_ternary.config.options import (
    LARGEST_INT64,
    default_choice,
    non_negative,
    option,
    positive,
    whole,
)
from arb_ternary.errors import DataError
from arb_ternary_audio.codes.codebook import fit_codebook
from arb_ternary_audio.codes.codec import SoundCodec
from arb_ternary_audio.data.spectrograms import SpectrogramSource
from arb_ternary_text.data.source import StreamSource
from arb_ternary_text.data.tokenizers import IdTokenizer

#: Name of the run's attachment that holds the codec.
CODEC: Final = "sound_codec"
#: Number of frames that the codebook is fitted to, evenly spaced over all frames.
_FRAMES: Final = 20_000

_codes = whole(2, 4096)


@attrs.frozen(kw_only=True)
class AudioCodesConfig:
    """Options of the data source ``audio_codes``."""

    sounds: DataChoice = default_choice(
        "formants",
        "source of the sounds: formants, sounds, or another source of spectrograms",
    )
    codes: int = option(
        256,
        "codebook entries; the vocabulary has one more id, which begins each sound",
        validator=_codes,
    )
    rounds: int = option(50, "largest number of k-means rounds", validator=positive)
    seed: int = option(
        0, "seed of the k-means initialisation", validator=non_negative, largest=LARGEST_INT64
    )


@attrs.frozen
class CodesSource(StreamSource):
    """Streams of codes; each sound begins with the separator.

    Attributes:
        codec: encodes and decodes the sounds.
    """

    codec: SoundCodec

    def attachments(self) -> Mapping[str, Any]:
        """Return the ids as a tokenizer of numbers, and the codec."""
        return {**super().attachments(), CODEC: self.codec.to_json()}


def build(config: AudioCodesConfig) -> CodesSource:
    """Build the data source of ``config``; the codebook is fitted to the training sounds.

    Raises:
        DataError: the other source has no sounds, or too few distinct frames.
    """
    source = config.sounds.build()
    if not isinstance(source, SpectrogramSource):
        raise DataError(
            f"audio_codes: the data source {config.sounds.name!r} has no sounds",
            "Name formants or sounds as `sounds`.",
        )
    levels = source.train.data[:, 0].transpose(0, 2, 1)
    frames = levels.reshape(-1, levels.shape[2])
    count = min(len(frames), _FRAMES)
    fitted = frames[np.arange(count) * len(frames) // count]
    book = fit_codebook(fitted, config.codes, config.rounds, config.seed % 2**32)
    codec = SoundCodec(book, source.features, source.train_sounds.sample_rate)
    train = _stream(codec, source.train.data)
    validation = _stream(codec, source.validation.data)
    return CodesSource(
        f"codes of {source.name}", IdTokenizer(codec.vocabulary_size), train, validation, codec
    )


def _stream(codec: SoundCodec, levels: NDArray[Any]) -> NDArray[Any]:
    """Concatenate the codes of all sounds, with a separator before each and at the end."""
    codes_NT = codec.encode_spectrograms(levels)
    separated = np.pad(codes_NT, ((0, 0), (1, 0)), constant_values=codec.boundary)
    stream = np.append(separated.reshape(-1), codec.boundary)
    return stream.astype(np.min_scalar_type(codec.vocabulary_size - 1))
