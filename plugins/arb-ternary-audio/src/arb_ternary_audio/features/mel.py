"""The mel filter bank: triangles on the mel scale of HTK.

``mel(f) = 2595 log10(1 + f / 700)`` (O'Shaughnessy, *Speech Communication*, 1987; Young et al.,
*The HTK Book*). The centres are equally spaced on that scale between two limits. Each triangle is 1
at its centre and reaches to the neighbouring centres (Davis and Mermelstein, 1980); it is not
divided by its area as in Slaney's variant. Between the first and the last centre the filters of
every frequency therefore add up to 1.

Shapes: ``M`` mel bands, ``F`` frequencies of a window, ``window / 2 + 1``.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from attrs import frozen

from arb_ternary.config.options import Rule, option, optional, positive, whole
from arb_ternary.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

#: Samples per window: even, so that half of the Fourier transform is exact.
_even = Rule(
    "an even number from 16 to 16384",
    lambda value: type(value) is int and 16 <= value <= 16384 and value % 2 == 0,
    {"minimum": 16, "maximum": 16384, "multipleOf": 2},
)
_bands = whole(2, 1024)


@frozen(kw_only=True)
class MelConfig:
    """How mel spectrograms are computed."""

    mels: int = option(32, "number of mel bands, the height of a spectrogram", validator=_bands)
    window: int = option(256, "samples per window (Hann), even", validator=_even)
    hop: int = option(
        160,
        "samples between windows; the width of a spectrogram is length / hop",
        validator=positive,
    )
    low: float = option(60.0, "lower end of the first band, Hz", validator=positive)
    high: float | None = option(
        None,
        "upper end of the last band, Hz; null = half the sample rate",
        validator=optional(positive),
    )
    range_db: float = option(
        80.0,
        "dynamic range in decibels below the loudest point of a sound; quieter points become -1",
        validator=positive,
    )

    def __attrs_post_init__(self) -> None:
        if 4 * self.hop > 3 * self.window:
            raise ValueError(
                "'hop' must be at most 3/4 of 'window', or samples between two windows hardly "
                f"count; {self.hop} > 3/4 of {self.window}"
            )
        if self.high is not None and self.high <= self.low:
            raise ValueError(f"'high' must be above 'low'; {self.high:g} <= {self.low:g}")


def to_mel(hertz: float) -> float:
    """Convert Hz to HTK's mel; 1000 Hz are 1000 mel, up to rounding of the constants."""
    return 2595.0 * math.log10(1.0 + hertz / 700.0)


def from_mel(mel: float) -> float:
    """Convert mel to Hz."""
    return 700.0 * (math.pow(10.0, mel / 2595.0) - 1.0)


def mel_filter_bank(config: MelConfig, sample_rate: int) -> Tensor:
    """Return the weights of the triangles, float64 ``[M, F]``.

    Raises:
        DataError: the limits do not lie within the spectrum, or a band is so narrow that it holds
            no frequency of the window.
    """
    import torch

    half = sample_rate / 2
    high = half if config.high is None else config.high
    if not config.low < high <= half:
        least = 2 * max(high, config.low)
        raise DataError(
            f"features: bands from {config.low:g} to {high:g} Hz need a sample rate above "
            f"{least:g}, not {sample_rate}",
            f"Set high to at most {half:g} and low below it.",
        )
    low_mel = to_mel(config.low)
    high_mel = to_mel(high)
    step = (high_mel - low_mel) / (config.mels + 1)
    corners = torch.tensor(
        [from_mel(low_mel + step * i) for i in range(config.mels + 2)], dtype=torch.float64
    )
    index_F = torch.arange(config.window // 2 + 1, dtype=torch.float64)
    frequency_F = index_F * sample_rate / config.window
    left = corners[:-2, None]
    centre = corners[1:-1, None]
    right = corners[2:, None]
    rising = (frequency_F - left) / (centre - left)
    falling = (right - frequency_F) / (right - centre)
    bank_MF = torch.minimum(rising, falling).clamp_min(0.0)
    if empty := (bank_MF.sum(dim=1) == 0).nonzero().flatten().tolist():
        raise DataError(
            f"features: band {empty[0]} of {config.mels}, from {corners[empty[0]]:.0f} to "
            f"{corners[empty[0] + 2]:.0f} Hz, holds none of the window's frequencies, which are "
            f"{sample_rate / config.window:g} Hz apart",
            "Use fewer mels or a longer window.",
        )
    return bank_MF
