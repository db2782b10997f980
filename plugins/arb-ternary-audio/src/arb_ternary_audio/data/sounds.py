"""The data source ``sounds``: a folder with one sub-folder of sound files per class."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

import attrs
import numpy as np

from arb_ternary.config.options import Rule, option, optional
from arb_ternary.errors import DataError, nearest
from arb_ternary_audio.data.decode import SUFFIXES, read_sound
from arb_ternary_audio.data.recordings import Recordings, as_pcm
from arb_ternary_audio.data.spectrograms import SpectrogramSource, spectrogram_source, tuning_split
from arb_ternary_audio.features.mel import MelConfig
from arb_ternary_text.data.source import DEFAULT_FRACTION, part
from arb_ternary_vision.data.source import split_by_class

#: Largest size of a source's 16-bit samples, in bytes.
_MEMORY: Final = 1 << 32

_seconds = Rule(
    "greater than 0 and at most 60",
    lambda value: 0 < value <= 60,
    {"exclusiveMinimum": 0, "maximum": 60},
)
_rate = Rule(
    "a whole number from 1000 to 384000",
    lambda value: type(value) is int and 1000 <= value <= 384_000,
    {"minimum": 1000, "maximum": 384_000},
)


@attrs.frozen(kw_only=True)
class SoundsConfig:
    """Options of the data source ``sounds``: wav, flac and ogg files.

    Paths are relative to the working directory.
    """

    path: str = option(
        help="a folder with one sub-folder of sound files per class; its name is the class"
    )
    validation: str | None = option(None, "the same for validation, with the same classes")
    validation_fraction: float | None = option(
        None,
        "share of each class that is kept for validation when `validation` is null "
        f"(null: {DEFAULT_FRACTION}); which files depends on their number alone",
        validator=optional(part),
    )
    sample_rate: int = option(
        8000,
        "sample rate in sample rate in sample rate in Hz; files of other rates are resampled",
        validator=_rate,
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
    tuning: bool = option(
        False,
        "validate on a fifth of the training sounds and train on the rest, to choose settings by; "
        "the held-out sounds then stay unseen",
        validator=attrs.validators.instance_of(bool),
    )

    def __attrs_post_init__(self) -> None:
        if self.validation is not None and self.validation_fraction is not None:
            raise ValueError(
                "validation and validation_fraction exclude each other; set only one of them"
            )


def build(config: SoundsConfig) -> SpectrogramSource:
    """Build the data source of ``config``.

    Raises:
        DataError: a folder or file is missing or cannot be used, the classes of the two folders
            differ, or a class has too few sounds. The message begins with the path.
    """
    train = read_folder(Path(config.path), config)
    if config.validation is None:
        kept, taken = split_by_class(
            train.labels, config.validation_fraction or DEFAULT_FRACTION, 0
        )
        if not taken.size:
            raise DataError(
                f"{config.path}: {len(train)} sounds in {len(train.classes)} classes are too few "
                "for a validation share of each",
                "Add sounds, raise `validation_fraction`, or set `validation` to a folder.",
            )
        train, validation = train.take(kept), train.take(taken)
    else:
        if Path(config.validation).resolve() == Path(config.path).resolve():
            raise DataError(f"{config.validation}: this is the folder of the training sounds")
        validation = read_folder(Path(config.validation), config)
        if different := sorted(set(train.classes) ^ set(validation.classes)):
            raise DataError(
                f"{config.validation}: its classes are not those of {config.path}: "
                f"{', '.join(different)}"
            )
    if config.tuning:
        train, validation = tuning_split(train)
    return spectrogram_source("sounds", train, validation, config.features)


def read_folder(folder: Path, config: SoundsConfig) -> Recordings:
    """Read the sounds of ``folder``, class by class, both in the order of names.

    Raises:
        DataError: the folder does not exist, has fewer than two classes, a class is empty or holds
            another kind of file, a file cannot be used, or all sounds together are too large.
    """
    files, classes = _listed(folder)
    length = round(config.seconds * config.sample_rate)
    if len(files) * length * 2 > _MEMORY:
        raise DataError(
            f"{folder}: {len(files)} sounds of {config.seconds:g} s at {config.sample_rate} Hz are "
            f"{len(files) * length * 2 / 2**30:.1f} GiB, and {_MEMORY / 2**30:.0f} are allowed",
            "Lower `seconds` or `sample_rate`, or use fewer files.",
        )
    samples = np.zeros((len(files), length), dtype=np.int16)
    for row, (path, _) in enumerate(files):
        wave = read_sound(path, config.sample_rate, config.seconds, config.longer)[:length]
        samples[row, : len(wave)] = as_pcm(wave)
    labels = np.array([label for _, label in files], dtype=np.int64)
    return Recordings(samples, labels, config.sample_rate, classes)


def _listed(folder: Path) -> tuple[list[tuple[Path, int]], tuple[str, ...]]:
    """Return the files with their labels, and the classes."""
    if not folder.is_dir():
        siblings = [each.name for each in folder.parent.iterdir()] if folder.parent.is_dir() else []
        close = nearest(folder.name, siblings)
        meant = f"Did you mean {folder.parent / close}? " if close else ""
        raise DataError(f"{folder}: no such folder", f"{meant}Paths are relative to {Path.cwd()}.")
    places = sorted(each for each in folder.iterdir() if not each.name.startswith("."))
    if strays := [each for each in places if not each.is_dir()]:
        raise DataError(
            f"{strays[0]}: a file next to the folders of the classes",
            "Move it into the folder of its class, or remove it.",
        )
    if len(places) < 2:
        raise DataError(
            f"{folder}: {len(places)} folders; there must be one per class, and at least two "
            f"classes",
            f"For example: {folder}/yes/1.wav and {folder}/no/1.wav",
        )
    files: list[tuple[Path, int]] = []
    for label, place in enumerate(places):
        found = sorted(each for each in place.iterdir() if not each.name.startswith("."))
        if not found:
            raise DataError(
                f"{place}: the folder is empty", "Add sounds of this class, or remove the folder."
            )
        for path in found:
            if path.suffix.lower() not in SUFFIXES or not path.is_file():
                raise DataError(
                    f"{path}: not a sound file; supported are {', '.join(SUFFIXES)}",
                    "Remove it, or convert it: ffmpeg -i FILE OTHER.wav",
                )
            files.append((path, label))
    return files, tuple(place.name for place in places)
