"""Options of every importer of published models."""

from __future__ import annotations

from typing import Literal

from attrs import frozen
from attrs.validators import in_

from arb_ternary.config.options import option

# : What becomes of float scales: into gains and eps, to the nearest power of two, or a float factor
# a linear.
Scales = Literal["fold", "round", "float"]
#: What becomes of float matrices: float parts, or trits.
FloatSources = Literal["keep", "ternary"]


@frozen(kw_only=True)
class ImportConfig:
    """What becomes of scales that are no powers of two, and of float matrices."""

    scales: Scales = option(
        "fold",
        "scales that are no powers of two: fold = exactly into gains of norms, round = to the "
        "nearest power of two, float = kept as a float factor of each linear",
        validator=in_(("fold", "round", "float")),
    )
    float_sources: FloatSources = option(
        "keep",
        "float matrices: keep = as float parts, ternary = rounded to trits, what is left going to "
        "the votes",
        validator=in_(("keep", "ternary")),
    )
