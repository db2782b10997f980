"""Recordings as a data source of spectrograms, which image models can train on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import attrs

from arb_ternary.errors import DataError
from arb_ternary_audio.data.recordings import Recordings
from arb_ternary_audio.features.mel import MelConfig
from arb_ternary_vision.data.source import (
    LABELS,
    TUNING_FRACTION,
    TUNING_SEED,
    LabelledSource,
    split_by_class,
)


@attrs.frozen(eq=False, kw_only=True)
class SpectrogramSource(LabelledSource):
    """Log-mel spectrograms of labelled sounds, and the sounds themselves.

    Attributes:
        train_sounds: the sounds of the training samples.
        validation_sounds: the sounds of the held-out samples.
        features: how the spectrograms were computed.
    """

    train_sounds: Recordings
    validation_sounds: Recordings
    features: MelConfig

    def fingerprint(self) -> str:
        """Return the SHA-256 of sounds and features, in hexadecimal; paths do not count."""
        features = json.dumps(attrs.asdict(self.features), sort_keys=True)
        parts = (self.train_sounds.digest(), self.validation_sounds.digest(), features)
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def attachments(self) -> Mapping[str, Any]:
        """Return the names of the classes, and how to compute spectrograms of new sounds."""
        sounds = {
            "sample_rate": self.train_sounds.sample_rate,
            "samples": self.train_sounds.samples.shape[1],
            "features": attrs.asdict(self.features),
        }
        return {**super().attachments(), "sounds": sounds}


def spectrogram_source(
    name: str, train: Recordings, validation: Recordings, features: MelConfig
) -> SpectrogramSource:
    """Build the source of two sets of sounds of equal length, rate and classes.

    Raises:
        DataError: the features do not fit the rate or the length of the sounds.
    """
    from arb_ternary_audio.features.spectrogram import LEVELS, mel_images
    from arb_ternary_vision.data.batches import MemorySamples

    def spectrograms(part: str, sounds: Recordings) -> MemorySamples:
        images = mel_images(sounds.samples, features, sounds.sample_rate)
        labels = {LABELS: sounds.labels}
        return MemorySamples(f"{name}, {part} sounds", images, labels, levels=LEVELS)

    return SpectrogramSource(
        name=name,
        classes=train.classes,
        train=spectrograms("training", train),
        validation=spectrograms("held-out", validation),
        prediction_noun="sound",
        train_sounds=train,
        validation_sounds=validation,
        features=features,
    )


def tuning_split(sounds: Recordings) -> tuple[Recordings, Recordings]:
    """Split ``sounds`` into four fifths and one fifth of each class, for choosing settings.

    Raises:
        DataError: a class is too small for that.
    """
    kept, taken = split_by_class(sounds.labels, TUNING_FRACTION, TUNING_SEED)
    if not taken.size:
        raise DataError(
            f"tuning: {len(sounds)} training sounds in {len(sounds.classes)} classes are too few "
            f"for a fifth of each",
            "Add sounds, or remove `tuning`.",
        )
    return sounds.take(kept), sounds.take(taken)
