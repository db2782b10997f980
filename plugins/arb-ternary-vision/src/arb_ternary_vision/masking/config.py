"""Options of the masking strategy ``labels`` and of the changes that it makes to images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, get_args

import attrs

from arb_ternary.config.options import Rule, fraction, option, optional

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

#: What ``amount`` is where it is null; a change that is not here has none.
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

_amount: Final = Rule("greater than 0", lambda value: value > 0, {"exclusiveMinimum": 0})


@attrs.frozen(kw_only=True)
class Augmentation:
    """One change of an image, drawn anew for every image and step."""

    name: Change = option(
        help="shift, rotate, scale, shear, flip (left and right), erase (a rectangle), erase_rows, "
        "erase_columns (a band), noise, brightness or contrast"
    )
    amount: float | None = option(
        None,
        "most that is changed: shift in sides of the image, rotate and shear in degrees, scale and "
        "contrast as a share around 1, erased share of the area, or of the rows or columns, "
        "standard deviation of noise and most of brightness where black is -1 and white 1; null = "
        "0.1, rotate and shear 10, brightness and contrast 0.2",
        validator=optional(_amount),
    )
    chance: float | None = option(
        None,
        "share of the images that are changed; null = all, of flip half",
        validator=optional(fraction),
    )

    def __attrs_post_init__(self) -> None:
        if self.name == "flip" and self.amount is not None:
            raise ValueError("'amount' has no effect on flip, which is done or not; remove it")
        if self.name in _SHARES and self.most >= 1:
            raise ValueError(f"'amount' must be less than 1 for {self.name}, not {self.amount}")

    @property
    def most(self) -> float:
        """The amount that takes effect."""
        return self.amount if self.amount is not None else _AMOUNTS.get(self.name, 0.0)

    @property
    def share(self) -> float:
        """The chance that takes effect."""
        if self.chance is not None:
            return self.chance
        return 0.5 if self.name == "flip" else 1.0


@attrs.frozen(kw_only=True)
class LabelsConfig:
    """Options of the masking strategy ``labels``."""

    augment: list[Augmentation] = option(
        factory=list,
        help="changes made to images in training, in this order, those of place and size all at "
        "once and first; each with a name, an amount and a chance",
    )

    def __attrs_post_init__(self) -> None:
        names = [each.name for each in self.augment]
        if twice := [name for name in get_args(Change) if names.count(name) > 1]:
            raise ValueError(f"'augment' has {twice[0]} more than once; give it a larger amount")
