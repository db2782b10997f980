"""The data source ``sounds``: a folder with one sub-folder of sound files per class."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

import attrs
import numpy as np

from arb_ternary.config.options import Rule, option, whole
from arb_ternary.errors import DataError
from arb_ternary_audio.data.decode import SUFFIXES, read_sounds
from arb_ternary_audio.data.recordings import Recordings
from arb_ternary_audio.data.spectrograms import SpectrogramSource, spectrogram_source, tuning_split
from arb_ternary_audio.features.mel import MelConfig
from arb_ternary_vision.data.class_folders import (
    ClassFolders,
    ClassFoldersConfig,
    list_class_folders,
    list_validation,
)
from arb_ternary_vision.data.source import hold_out, tuning_option

_NOUN: Final = "sound"
#: Largest size of a source's 16-bit samples, in bytes.
_MEMORY: Final = 1 << 32

_seconds = Rule(
    "greater than 0 and at most 60",
    lambda value: 0 < value <= 60,
    {"exclusiveMinimum": 0, "maximum": 60},
)
_rate = whole(1000, 384_000)


@attrs.frozen(kw_only=True)
class SoundsConfig(ClassFoldersConfig):
    """Options of the data source ``sounds``: wav, flac and ogg files.

    Paths are relative to the working directory.
    """

    sample_rate: int = option(
        8000, "sample rate in Hz; files of other rates are resampled", validator=_rate
    )
    seconds: float = option(
        1.0,
        "duration of a sample; shorter sounds are padded with silence",
        validator=_seconds,
        converter=float,
    )
    longer: Literal["error", "cut"] = option(
        "error", "what to do with a longer sound: an error, or keep its beginning"
    )
    features: MelConfig = option(help="how spectrograms are computed", factory=MelConfig)
    tuning: bool = tuning_option(_NOUN)


def build(config: SoundsConfig) -> SpectrogramSource:
    """Build the data source of ``config``.

    Raises:
        DataError: a folder or file is missing or cannot be used, there are fewer than two classes,
            or a class has too few sounds. The message begins with the path.
    """
    listed = list_class_folders(Path(config.path), _NOUN, SUFFIXES)
    if len(listed.classes) < 2:
        raise DataError(
            f"{config.path}: there must be at least two classes, and there is one",
            f"For example: {config.path}/yes/1.wav and {config.path}/no/1.wav",
        )
    train = read_recordings(listed, config)
    if config.validation is None:
        kept, held_out = hold_out(config.path, train.labels, config.validation_fraction)
        validation = train.take(held_out)
        train = train.take(kept)
    else:
        validation = read_recordings(
            list_validation(config.validation, listed, _NOUN, SUFFIXES), config
        )
    if config.tuning:
        train, validation = tuning_split(train)
    return spectrogram_source("sounds", train, validation, config.features)


def read_recordings(listed: ClassFolders, config: SoundsConfig) -> Recordings:
    """Read sound files, in the order of ``listed``.

    Raises:
        DataError: a file cannot be used, or all sounds together are too large.
    """
    length = round(config.seconds * config.sample_rate)
    size = len(listed.files) * length * 2
    if size > _MEMORY:
        raise DataError(
            f"{listed.folder}: {len(listed.files)} sounds of {config.seconds:g} s at "
            f"{config.sample_rate} Hz are {size / 2**30:.1f} GiB, and {_MEMORY / 2**30:.0f} are "
            f"allowed",
            "Lower `seconds` or `sample_rate`, or use fewer files.",
        )
    samples = read_sounds(
        listed.files, config.sample_rate, length, config.seconds, longer=config.longer
    )
    labels = np.array(listed.labels, dtype=np.int64)
    return Recordings(samples, labels, config.sample_rate, listed.classes)
