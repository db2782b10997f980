"""Random changes of images in training.

Everything that is drawn is a hash of one number per batch and of the sample's identity. The same
image is therefore changed alike in any row of the batch, and no generator of the process is used.

kornia moves the pixels. torchvision could do it as well, but its wheel on the package index does
not load with a CPU build of torch.

Shapes: ``B`` images, ``C`` channels, ``H`` and ``W`` rows and columns of pixels, ``D`` random
numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from kornia.geometry.transform import get_affine_matrix2d, warp_affine
from torch import Tensor

from arb_ternary.counters.hashing import counter_hash_rows, uniform_
from arb_ternary_vision.masking.config import Augmentation, Change

#: Random numbers that a change uses per image, besides those of noise: one decides whether it
#: happens, four decide how.
_DRAWS: Final = 5
#: Changes of position and size.
_AFFINE: Final = ("shift", "rotate", "scale", "shear", "flip")
_ERASURES: Final = ("erase", "erase_rows", "erase_columns")


def augment(
    images: Tensor, changes: Sequence[Augmentation], sample_ids: Tensor, salt: int
) -> Tensor:
    """Return ``images`` changed: float32 ``[B, C, H, W]`` in [-1, 1] again.

    Pixels that come in from outside repeat the edge. Erased pixels become 0, the grey between black
    and white.

    Args:
        images: float32 ``[B, C, H, W]`` in [-1, 1]; they are not modified.
        changes: applied in order, except that all changes of position and size come first, in one
            interpolation.
        sample_ids: int64 ``[B]``.
        salt: makes this batch's draws different from those of other batches.
    """
    drawn = {
        change.name: uniform_(counter_hash_rows(sample_ids, _DRAWS, salt, 0, index))
        for index, change in enumerate(changes)
    }
    out = warp(images, [change for change in changes if change.name in _AFFINE], drawn)
    for index, change in enumerate(changes):
        if change.name in _AFFINE:
            continue
        draws_BD = drawn[change.name]
        changed_B111 = (draws_BD[:, 0] < change.share)[:, None, None, None]
        if change.name in _ERASURES:
            erased = erased_pixels(out.shape, change, draws_BD)
            out = out.masked_fill(erased & changed_B111, 0.0)
        else:
            stream = len(changes) + index
            shaded = _shade(out, change, draws_BD, sample_ids, salt, stream)
            out = torch.where(changed_B111, shaded.clamp(-1, 1), out)
    return out


def warp(images: Tensor, changes: Sequence[Augmentation], drawn: Mapping[Change, Tensor]) -> Tensor:
    """Shift, rotate, scale, shear and flip images about their centre."""
    if not changes:
        return images.clone()
    rows = len(images)
    height, width = images.shape[2:]
    centre = torch.tensor([(width - 1) / 2, (height - 1) / 2]).expand(rows, 2)
    whole = torch.eye(3).expand(rows, 3, 3)
    for change in changes:
        draws_BD = drawn[change.name]
        amounts = (2 * draws_BD[:, 1:] - 1) * change.largest
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
        changed_B = draws_BD[:, 0] < change.share
        whole = torch.where(changed_B[:, None, None], step, torch.eye(3)) @ whole
    return warp_affine(images, whole[:, :2], (height, width), padding_mode="border")


def erased_pixels(shape: torch.Size, change: Augmentation, draws_BD: Tensor) -> Tensor:
    """Return where a rectangle or a band of each image is erased, bool ``[B, 1, H, W]``."""
    height, width = shape[2:]
    largest = change.largest
    size = draws_BD[:, 1]
    if change.name == "erase":
        # A share of the area up to the largest, and a ratio of height to width from 1/2 to 2.
        area = size * largest
        ratio = torch.exp2(2 * draws_BD[:, 2] - 1)
        tall = (area * ratio).sqrt().clamp_max(1) * height
        wide = (area / ratio).sqrt().clamp_max(1) * width
    elif change.name == "erase_rows":
        tall = size * largest * height
        wide = torch.full_like(size, width)
    else:
        tall = torch.full_like(size, height)
        wide = size * largest * width
    top = draws_BD[:, 3] * (height - tall)
    left = draws_BD[:, 4] * (width - wide)
    y = torch.arange(height) + 0.5
    x = torch.arange(width) + 0.5
    within_y = (y >= top[:, None]) & (y < (top + tall)[:, None])
    within_x = (x >= left[:, None]) & (x < (left + wide)[:, None])
    return (within_y[:, :, None] & within_x[:, None, :])[:, None]


def _shade(
    images: Tensor,
    change: Augmentation,
    draws_BD: Tensor,
    sample_ids: Tensor,
    salt: int,
    stream: int,
) -> Tensor:
    """Change brightness or contrast, or add noise; the result may exceed [-1, 1]."""
    amount = ((2 * draws_BD[:, 1] - 1) * change.largest)[:, None, None, None]
    if change.name == "brightness":
        return images + amount
    if change.name == "contrast":
        mean = images.mean(dim=(1, 2, 3), keepdim=True)
        return mean + (images - mean) * (1 + amount)
    pixels = images[0].numel()
    uniform = uniform_(counter_hash_rows(sample_ids, 2 * pixels, salt, 0, stream))
    # Box and Muller (1958): two uniform numbers make a normal one; 1 - first is never 0.
    first, second = uniform.chunk(2, dim=1)
    normal = (-2 * torch.log(1 - first)).sqrt() * torch.cos(2 * torch.pi * second)
    return images + change.largest * normal.view_as(images)
