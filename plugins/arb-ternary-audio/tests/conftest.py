"""Sound files of tones in folders."""

from pathlib import Path

import numpy as np
import pytest
import soundfile


def tone(
    hertz: float, seconds: float = 0.2, rate: int = 8000, amplitude: float = 0.5
) -> np.ndarray:
    return amplitude * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)


@pytest.fixture
def tones(tmp_path: Path) -> Path:
    """Write ``low`` with five files and ``high`` with four, one of each flac."""
    folder = tmp_path / "tones"
    for name, base, count in (("high", 2000, 4), ("low", 300, 5)):
        (folder / name).mkdir(parents=True)
        for index in range(count):
            suffix = "flac" if index == 0 else "wav"
            soundfile.write(folder / name / f"{index}.{suffix}", tone(base + 50 * index), 8000)
    return folder
