"""Encode sounds as codes and decode them: the vocabulary of a language model of sounds.

Shapes: ``N`` sounds, ``L`` samples, ``T`` frames, ``M`` mel bands, ``K`` codes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from arb_ternary.errors import DataError
from arb_ternary_audio.codes.codebook import nearest_codes
from arb_ternary_audio.features.mel import MelConfig


@attrs.frozen(eq=False)
class SoundCodec:
    """One code per frame of a log-mel spectrogram, and one more code that separates sounds.

    Attributes:
        codebook: codebook entries, uint8 ``[K, M]``.
        features: how spectrograms are computed.
        sample_rate: Hz.
    """

    codebook: NDArray[np.uint8] = attrs.field(repr=lambda book: f"<{len(book)} codes>")
    features: MelConfig
    sample_rate: int

    @property
    def boundary(self) -> int:
        """The code that separates sounds; it comes before each sound and after the last."""
        return len(self.codebook)

    @property
    def vocabulary_size(self) -> int:
        """Number of codes, the separator included."""
        return len(self.codebook) + 1

    def encode(self, samples_NL: NDArray[np.int16]) -> NDArray[np.int64]:
        """Return the codes ``[N, T]`` of 16-bit samples.

        Raises:
            DataError: the sounds are shorter than one frame.
        """
        from arb_ternary_audio.features.spectrogram import mel_images

        return self.encode_spectrograms(mel_images(samples_NL, self.features, self.sample_rate))

    def encode_spectrograms(self, levels_N1MT: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Return the codes ``[N, T]`` of grey levels ``[N, 1, M, T]``."""
        frames_NTM = levels_N1MT[:, 0].transpose(0, 2, 1)
        codes = nearest_codes(frames_NTM.reshape(-1, frames_NTM.shape[2]), self.codebook)
        return codes.reshape(frames_NTM.shape[:2])

    def spectrogram(self, codes_T: Sequence[int]) -> NDArray[np.uint8]:
        """Return the grey levels ``[M, T]`` of codes of frames."""
        return self.codebook[np.asarray(codes_T, dtype=np.int64)].T

    def decode(self, codes_T: Sequence[int]) -> NDArray[np.float64]:
        """Return samples ``[T * hop]`` with a peak of 0.9; see ``features.inversion``."""
        from arb_ternary_audio.features.inversion import to_waves
        from arb_ternary_audio.features.spectrogram import as_floats

        if not len(codes_T):
            return np.zeros(0)
        level_1MT = as_floats(np.ascontiguousarray(self.spectrogram(codes_T)))[None]
        return np.asarray(to_waves(level_1MT, self.features, self.sample_rate)[0].numpy())

    def to_json(self) -> dict[str, Any]:
        """Return everything that :meth:`from_json` needs."""
        return {
            "codebook": self.codebook.tolist(),
            "features": attrs.asdict(self.features),
            "sample_rate": self.sample_rate,
        }

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> SoundCodec:
        """Return the codec that :meth:`to_json` described.

        Raises:
            DataError: ``state`` does not describe a codec.
        """
        try:
            book = np.asarray(state["codebook"])
            features = MelConfig(**state["features"])
            rate = int(state["sample_rate"])
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"sound codec: {error!r}") from error
        integers = book.ndim == 2 and book.dtype.kind == "i"
        if not integers or book.shape[1] != features.mels or book.min() < 0 or book.max() > 255:
            raise DataError(
                "sound codec: each row of the codebook must have one grey level (0 to 255) per mel "
                "band"
            )
        if rate < 1:
            raise DataError(f"sound codec: the sample rate must be at least 1, not {rate}")
        return cls(book.astype(np.uint8), features, rate)
