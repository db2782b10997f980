"""Rotary positions of a grid of patches.

Shapes: ``L`` patches, ``P`` planes of a head, two features each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from arb_ternary_text.models.attention import Positions
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.rotary import rotary_angles
from arb_ternary_vision.models.vit_config import PatchModelConfig
from arb_ternary_vision.sizes import Pair


def patch_positions(options: PatchModelConfig, x_BLD: Tensor) -> Positions:
    """Return the positions of the patches ``x``, which all see each other.

    If positions are only learned, they are in ``x`` already, and queries and keys are not rotated.
    """
    config = options.decoder
    if options.has_rotary:
        return grid_positions(config, options.grid, dtype=x_BLD.dtype, device=x_BLD.device)
    cos_LP = torch.ones(
        x_BLD.size(1),
        config.rotary_features // 2,
        dtype=_angle_dtype(x_BLD.dtype),
        device=x_BLD.device,
    )
    return Positions(cos_LP, torch.zeros_like(cos_LP), mask=None, is_causal=False)


def grid_positions(
    config: DecoderConfig,
    size: Pair,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Positions:
    """Return rotary positions of a grid of patches, row by row.

    Half of the planes of a head are rotated by the row, the other half by the column (Heo et al.,
    "Rotary Position Embedding for Vision Transformer", 2024, axial), as fast as those of a text
    model with heads of half the size. The product of a query and a key then depends only on their
    distance in rows and in columns.

    Args:
        config: its heads, with an even number of planes, ``rotary_base`` and ``rotary_scaling``.
        size: rows and columns of patches.
        dtype: dtype of the residual stream; angles are float32 at least.
        device: device of the result.
    """
    rows, columns = size

    def angles(side: int) -> tuple[Tensor, Tensor]:
        return rotary_angles(
            0,
            side,
            config.rotary_features // 2,
            config.rotary_base,
            scaling=config.rotary_scaling,
            dtype=_angle_dtype(dtype),
            device=torch.device(device),
        )

    def on_grid(by_row: Tensor, by_column: Tensor) -> Tensor:
        row_part = by_row[:, None].expand(-1, columns, -1)
        column_part = by_column[None].expand(rows, -1, -1)
        return torch.cat((row_part, column_part), dim=-1).flatten(0, 1)

    row_cos, row_sin = angles(rows)
    column_cos, column_sin = angles(columns)
    cos_LP = on_grid(row_cos, column_cos)
    sin_LP = on_grid(row_sin, column_sin)
    return Positions(cos_LP, sin_LP, mask=None, is_causal=False)


def _angle_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
