"""Patches of images as rows of a product, in torch: what kernels of convolutions have to do.

A row is what a window covers of ``x [B, C, H, W]``: ``K = C * kh * kw`` elements; there are ``M = B
* H' * W'`` rows. A ``window`` is eight integers: taps, dilation, padding and stride, each down and
across.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn.functional import fold, unfold


def places(size: Sequence[int], window: Sequence[int]) -> tuple[int, int]:
    """``H', W'``: where a window fits into an image of ``H, W``; ValueError if nowhere."""
    dimensions = zip(size, window[:2], window[2:4], window[4:6], window[6:], strict=True)
    high, wide = (
        (n + 2 * pad - gap * (taps - 1) - 1) // step + 1 for n, taps, gap, pad, step in dimensions
    )
    if high < 1 or wide < 1:
        raise ValueError(
            f"an image of {[*size]} with padding {[*window[4:6]]} is smaller than the kernel "
            f"{(*window[:2],)}"
        )
    return high, wide


def _pairs(window: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(window[start : start + 2]) for start in range(0, 8, 2))


def unfold_rows(x: Tensor, window: Sequence[int]) -> Tensor:
    """The patches of ``x`` as rows ``[M, K]``."""
    patches_BKL = unfold(x, *_pairs(window))
    return patches_BKL.transpose(1, 2).reshape(-1, patches_BKL.shape[1])


def fold_rows(rows: Tensor, size: Sequence[int], window: Sequence[int]) -> Tensor:
    """Rows ``[M, K]`` summed where patches overlap, over the taps in order, to ``size``: ``[B, H,
    W, C]``.
    """
    patches_BKL = rows.view(size[0], -1, rows.shape[1]).transpose(1, 2)
    return fold(patches_BKL, tuple(size[1:3]), *_pairs(window)).permute(0, 2, 3, 1).contiguous()
