"""Options of the masking strategies ``labels`` and ``captions``, which may augment images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

import attrs

from arb_ternary.config.fields import unused_options
from arb_ternary.config.options import fraction, option, optional, positive, unless

Change = Literal[
    "shift",
    "rotate",
    "scale",
    "shear",
    "flip",
    "erase",
    "erase_rows",
    "erase_columns",
    "noise",
    "brightness",
    "contrast",
]

#: Default of ``amount``; a change that is missing here has no amount.
_AMOUNTS: Final[Mapping[Change, float]] = {
    "shift": 0.1,
    "rotate": 10.0,
    "scale": 0.1,
    "shear": 10.0,
    "erase": 0.1,
    "erase_rows": 0.1,
    "erase_columns": 0.1,
    "noise": 0.1,
    "brightness": 0.2,
    "contrast": 0.2,
}
#: Changes whose amount is a share.
_SHARES: Final = ("shift", "scale", "erase", "erase_rows", "erase_columns", "contrast")


@attrs.frozen(kw_only=True)
class Augmentation:
    """One random change of an image, drawn again for every image and step."""

    name: Change = option(
        help="shift, rotate, scale, shear, flip (left and right), erase (a rectangle), erase_rows, "
        "erase_columns (a band), noise, brightness or contrast"
    )
    amount: float | None = option(
        None,
        "largest change: of shift in sides of the image; of rotate and shear in degrees; of scale "
        "and contrast as a share around 1; of erase as a share of the area, rows or columns; of "
        "noise the standard deviation and of brightness the largest difference, where black is -1 "
        "and white 1; null = 0.1, for rotate and shear 10, for brightness and contrast 0.2",
        validator=optional(positive),
        active_when=unless("name", "flip", reason="a flip has no amount"),
    )
    chance: float | None = option(
        None,
        "share of the images that are changed; null = all, for flip half",
        validator=optional(fraction),
    )

    def __attrs_post_init__(self) -> None:
        for name, message in unused_options(self):
            raise ValueError(f"'{name}' {message}")
        if self.name in _SHARES and self.largest >= 1:
            raise ValueError(f"'amount' must be less than 1 for {self.name}, not {self.amount}")

    @property
    def largest(self) -> float:
        """The largest change: ``amount``, or its default."""
        return _AMOUNTS.get(self.name, 0.0) if self.amount is None else self.amount

    @property
    def share(self) -> float:
        """The share of images that are changed: ``chance``, or its default."""
        if self.chance is not None:
            return self.chance
        return 0.5 if self.name == "flip" else 1.0


@attrs.frozen(kw_only=True)
class LabelsConfig:
    """Options of the masking strategies ``labels`` and ``captions``."""

    augment: list[Augmentation] = option(
        factory=list,
        help="random changes of the images in training, in this order, except that all changes of "
        "position and size come first, as one; each has a name, an amount and a chance",
    )

    def __attrs_post_init__(self) -> None:
        seen: set[Change] = set()
        for change in self.augment:
            if change.name in seen:
                raise ValueError(
                    f"'augment' has {change.name} more than once; give it a larger amount"
                )
            seen.add(change.name)
