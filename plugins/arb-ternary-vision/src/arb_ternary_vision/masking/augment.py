"""Changes of images in training. All that is drawn is a hash of a number a batch and of the
sample's identity.

The same image in another row of the batch is changed alike, and no generator of the process is
touched. kornia moves the pixels; torchvision would do as well, but its wheel on the package index
does not load beside a CPU build of torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from kornia.geometry.transform import get_affine_matrix2d, warp_affine
from torch import Tensor

from arb_ternary.counters.hashing import counter_hash_rows, uniform_
from arb_ternary_vision.masking.config import Augmentation, Change

# : Random numbers that a change draws for an image, beside those of noise: whether it is made, and
# four for how.
_DRAWS: Final = 5
_OF_PLACE: Final = ("shift", "rotate", "scale", "shear", "flip")


def augmented(
    images: Tensor, changes: Sequence[Augmentation], sample_ids: Tensor, salt: int
) -> Tensor:
    """``images [B, C, H, W]``, float32 in [-1, 1], changed; others of the same shape, within [-1,
    1].

    What comes in from beyond an edge continues the edge; what is erased becomes 0, the grey between
    black and white.

    Args:
        images: they are left alone.
        changes: what is done, in order; those of place and size first, in one interpolation.
        sample_ids: int64 ``[B]``.
        salt: tells this batch's draws from those of other batches.
    """
    drawn = {
        change.name: uniform_(counter_hash_rows(sample_ids, _DRAWS, salt, 0, place))
        for place, change in enumerate(changes)
    }
    out = _moved(images, [change for change in changes if change.name in _OF_PLACE], drawn)
    for place, change in enumerate(changes):
        draws_BD = drawn[change.name]
        hit_B = draws_BD[:, 0] < change.share
        if change.name.startswith("erase"):
            out = out.masked_fill(
                _erased(out.shape, change, draws_BD) & hit_B[:, None, None, None], 0.0
            )
        elif change.name not in _OF_PLACE:
            changed = _shaded(out, change, draws_BD, sample_ids, salt, len(changes) + place)
            out = torch.where(hit_B[:, None, None, None], changed.clamp(-1, 1), out)
    return out


def _moved(
    images: Tensor, changes: Sequence[Augmentation], drawn: Mapping[Change, Tensor]
) -> Tensor:
    """Shifted, turned, scaled, sheared and mirrored, about the centre."""
    if not changes:
        return images.clone()
    rows = len(images)
    (height, width) = images.shape[2:]
    centre = torch.tensor([(width - 1) / 2, (height - 1) / 2]).expand(rows, 2)
    whole = torch.eye(3).expand(rows, 3, 3)
    for change in changes:
        draws_BD = drawn[change.name]
        amounts = (2 * draws_BD[:, 1:] - 1) * change.most
        shift = torch.zeros(rows, 2)
        scale = torch.ones(rows, 2)
        angle = torch.zeros(rows)
        shear = torch.zeros(rows)
        match change.name:
            case "shift":
                shift = amounts[:, :2] * torch.tensor([width, height])
            case "rotate":
                angle = amounts[:, 0]
            case "scale":
                scale = 1 + amounts[:, :1].expand(rows, 2)
            case "shear":
                shear = torch.deg2rad(amounts[:, 0])
            case _:
                scale = torch.tensor([-1.0, 1.0]).expand(rows, 2)
        step = get_affine_matrix2d(shift, centre, scale, angle, shear)
        hit_B = draws_BD[:, 0] < change.share
        whole = torch.where(hit_B[:, None, None], step, torch.eye(3)) @ whole
    return warp_affine(images, whole[:, :2], (height, width), padding_mode="border")


def _erased(shape: torch.Size, change: Augmentation, draws_BD: Tensor) -> Tensor:
    """Where a rectangle or a band of each image is erased, bool ``[B, 1, H, W]``."""
    height, width = shape[2:]
    most = change.most
    size = draws_BD[:, 1]
    if change.name == "erase":
        # A share of the area up to the most, between twice as wide as high and twice as high as
        # wide.
        area = size * most
        ratio = torch.exp2(2 * draws_BD[:, 2] - 1)
        tall = (area * ratio).sqrt().clamp_max(1) * height
        wide = (area / ratio).sqrt().clamp_max(1) * width
    elif change.name == "erase_rows":
        tall = size * most * height
        wide = torch.full_like(size, width)
    else:
        tall = torch.full_like(size, height)
        wide = size * most * width
    top = draws_BD[:, 3] * (height - tall)
    left = draws_BD[:, 4] * (width - wide)
    y = torch.arange(height) + 0.5
    x = torch.arange(width) + 0.5
    within_y = (y >= top[:, None]) & (y < (top + tall)[:, None])
    within_x = (x >= left[:, None]) & (x < (left + wide)[:, None])
    return (within_y[:, :, None] & within_x[:, None, :])[:, None]


def _shaded(
    images: Tensor,
    change: Augmentation,
    draws_BD: Tensor,
    sample_ids: Tensor,
    salt: int,
    stream: int,
) -> Tensor:
    amount = ((2 * draws_BD[:, 1] - 1) * change.most)[:, None, None, None]
    if change.name == "brightness":
        return images + amount
    if change.name == "contrast":
        mean = images.mean(dim=(1, 2, 3), keepdim=True)
        return mean + (images - mean) * (1 + amount)
    pixels = images[0].numel()
    # Box and Muller (1958): two uniform numbers a normal one; 1 - u is never 0.
    first, second = uniform_(counter_hash_rows(sample_ids, 2 * pixels, salt, 0, stream)).chunk(
        2, dim=1
    )
    normal = (-2 * torch.log(1 - first)).sqrt() * torch.cos(2 * torch.pi * second)
    return images + change.most * normal.view_as(images)
