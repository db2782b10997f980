"""Find the trits in float matrices that hold a ternary weight."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from arb_ternary_interchange.decoder.published import ScaledTrits
from arb_ternary_interchange.decoder.scales import grouped, merged_scales, one_magnitude

#: Group sizes that are tried, finest first; a row and the whole matrix are tried too.
_GROUPS: Final = (32, 64, 128, 256)
#: Elements that are looked at together.
_CHUNK: Final = 1 << 22


def ternary_parts(weight_NK: Tensor) -> ScaledTrits | None:
    """Return trits and scales of a float matrix in which every group has one magnitude besides
    zero; None if a group has more.

    Groups are those of 32 columns, merged as far as their scales agree: to 64, 128, 256, a row, the
    whole matrix. A group of zeros agrees with every scale. Its own scale is the largest of the
    matrix, or 1 if all of the matrix is zero.
    """
    rows, columns = weight_NK.shape
    # The first row alone tells most float matrices apart, before memory is allocated.
    if not weight_NK.numel() or not _has_one_magnitude(weight_NK[:1]):
        return None
    finest = _GROUPS[0]
    scales = torch.empty(rows, -(-columns // finest))
    trits = torch.empty(rows, columns, dtype=torch.int8)
    step = max(_CHUNK // columns, 1)
    for start in range(0, rows, step):
        some = slice(start, start + step)
        part = weight_NK[some]
        if not _has_one_magnitude(part):
            return None
        scales[some] = grouped(part.float().abs(), finest).amax(dim=-1)
        trits[some] = part.float().sign().to(torch.int8)
    merged, size = merged_scales(scales, finest, columns, _GROUPS[::-1])
    largest = float(merged.max())
    merged[merged == 0] = largest or 1.0
    return ScaledTrits(trits, merged, size)


def absmean_trits(weight_NK: Tensor) -> ScaledTrits:
    """Return the trits that a BitNet linear makes of its float weight in every forward pass, as
    transformers computes them.
    """
    wide = weight_NK.float()
    scale = 1.0 / wide.abs().mean().clamp_(min=1e-5)
    trits = (wide * scale).round().clamp(-1, 1).to(torch.int8)
    magnitude = (torch.ones(1) / scale).to(weight_NK.dtype).float()
    return ScaledTrits(trits, magnitude, weight_NK.shape[1])


def _has_one_magnitude(part: Tensor) -> bool:
    """Whether every group of the finest size holds only zeros and one finite magnitude."""
    magnitude = grouped(part.float().abs(), _GROUPS[0])
    return one_magnitude(magnitude) and bool(magnitude.amax(dim=-1).isfinite().all())
