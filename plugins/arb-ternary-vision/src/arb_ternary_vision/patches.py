"""Cut images into the patches that a convolution reads, and add rows of patches back together.

A row holds what a window covers of ``x [B, C, H, W]``: ``K = C * kh * kw`` elements. There are
``M = B * L`` rows, with ``L = H' * W'`` windows in each image. Functions take a window as eight
integers: kernel size, dilation, padding and stride, height before width in each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from torch.nn.functional import fold, unfold

from arb_ternary_vision.sizes import Pair


class Window(NamedTuple):
    """The window of pixels that a convolution reads, each quantity as height and width."""

    kernel_size: Pair
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)

    @property
    def integers(self) -> tuple[int, ...]:
        """The eight integers that the functions of this module and kernels take."""
        return (*self.kernel_size, *self.dilation, *self.padding, *self.stride)


def output_size(size: Sequence[int], window: Sequence[int]) -> Pair:
    """Return ``H', W'`` for an image of ``H, W``.

    Raises:
        ValueError: the window does not fit into the image.
    """
    sides = []
    for side, kernel, dilation, padding, stride in zip(size, *_pairs(window), strict=True):
        span = dilation * (kernel - 1) + 1
        sides.append((side + 2 * padding - span) // stride + 1)
    height, width = sides
    if height < 1 or width < 1:
        raise ValueError(
            f"an image of {[*size]} with padding {[*window[4:6]]} is smaller than the kernel "
            f"{(*window[:2],)}"
        )
    return height, width


def unfold_patches(x: Tensor, window: Sequence[int]) -> Tensor:
    """Return the patches of each image, ``[B, L, K]``; pixels beyond the edge are zero."""
    return unfold(x, *_pairs(window)).transpose(1, 2)


def unfold_rows(x: Tensor, window: Sequence[int]) -> Tensor:
    """Return the patches of all images as rows, ``[M, K]``."""
    patches_BLK = unfold_patches(x, window)
    return patches_BLK.reshape(-1, patches_BLK.shape[2])


def fold_rows(rows: Tensor, size: Sequence[int], window: Sequence[int]) -> Tensor:
    """Add rows ``[M, K]`` where patches overlap, in the order of the kernel's elements.

    Args:
        rows: the patches.
        size: shape of the result, ``[B, H, W, C]``.
        window: the window that the patches were cut with.
    """
    patches_BKL = rows.view(size[0], -1, rows.shape[1]).transpose(1, 2)
    return fold(patches_BKL, tuple(size[1:3]), *_pairs(window)).permute(0, 2, 3, 1).contiguous()


def _pairs(window: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(window[start : start + 2]) for start in range(0, 8, 2))
