"""Find the trits in float matrices that hold a ternary weight."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from arb_ternary_interchange.decoder.published import ScaledTrits

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
        scales[some] = _grouped(part.float().abs(), finest).amax(dim=-1)
        trits[some] = part.float().sign().to(torch.int8)
    size, merged = _merged(scales, columns)
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


def _grouped(part: Tensor, size: int) -> Tensor:
    """Return ``[n, K]`` as ``[n, J, size]``, filled up with zeros."""
    return torch.nn.functional.pad(part, (0, -part.shape[1] % size)).view(part.shape[0], -1, size)


def _has_one_magnitude(part: Tensor) -> bool:
    """Whether every group of the finest size holds only zeros and one finite magnitude."""
    magnitude = _grouped(part.float().abs(), _GROUPS[0])
    return _agree(magnitude) and bool(magnitude.amax(dim=-1).isfinite().all())


def _merged(scales: Tensor, columns: int) -> tuple[int, Tensor]:
    """Return the size of the largest groups within which all scales that are not zero agree, and
    their scales.
    """
    if _agree(scales.reshape(1, 1, -1)):
        return columns, scales.max().reshape(1)
    if _agree(scales.unsqueeze(1)):
        return columns, scales.amax(dim=1, keepdim=True)
    for size in reversed(_GROUPS):
        together = _grouped(scales, size // _GROUPS[0])
        if size < columns and _agree(together):
            return size, together.amax(dim=-1)
    return _GROUPS[0], scales


def _agree(scales: Tensor) -> bool:
    """Whether the last dimension holds only zeros and one other value."""
    largest = scales.amax(dim=-1, keepdim=True)
    return bool(((scales == largest) | (scales == 0)).all())
