"""NVFP4: 4-bit floats in blocks of 16, with an 8-bit scale per block and a 32-bit scale per matrix.

``W[n, k] = code[n, k] * scale[n, k // 16] * tensor_scale``. Codes are E2M1 (0, 0.5, 1, 1.5, 2, 3,
4, 6 and their negatives), scales are E4M3. Two codes are stored per byte, the first in the low
half, whether the hardware supports the format or not.

Quantisation is NVIDIA's. ``tensor_scale = max|W| / (6 * 448)``, so that the largest block scale is
448, the largest value of E4M3. The scale of a block is ``max|block| / (6 * tensor_scale)``, rounded
to E4M3. Each weight is rounded to the nearest code; ties go to the even code.

Shapes: ``N`` rows, ``K`` columns, ``J = ceil(K / 16)`` blocks per row.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

#: Weights that share a block scale.
BLOCK: Final = 16
#: The magnitudes of the codes 0 to 7; code 8 + i is the negative of code i.
E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
#: Midpoints between neighbouring magnitudes.
_MIDPOINTS: Final = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_LARGEST_SCALE: Final = 448.0


class Packed(NamedTuple):
    """A matrix in NVFP4.

    Attributes:
        codes: uint8 ``[N, 8 J]``, two codes per byte.
        scales: float8_e4m3fn ``[N, J]``.
        tensor_scale: float32, a scalar.
    """

    codes: Tensor
    scales: Tensor
    tensor_scale: Tensor


def pack_nvfp4(weight_NK: Tensor) -> Packed:
    """Quantise a float matrix; columns beyond ``K`` in the last block are zero.

    Raises:
        ValueError: it is not a matrix, or an element is not finite.
    """
    if weight_NK.dim() != 2:
        raise ValueError(f"NVFP4 stores matrices, got shape {tuple(weight_NK.shape)}")
    wide_NK = weight_NK.detach().to(torch.float32)
    if not bool(wide_NK.isfinite().all()):
        raise ValueError("NVFP4 has no code for a number that is not finite")
    rows, columns = wide_NK.shape
    padded = torch.nn.functional.pad(wide_NK, (0, -columns % BLOCK))
    blocks_NJB = padded.view(rows, -1, BLOCK)
    largest = wide_NK.abs().amax() if wide_NK.numel() else wide_NK.new_zeros(())
    tensor_scale = largest / (E2M1[-1] * _LARGEST_SCALE)
    divisor = tensor_scale if bool(tensor_scale > 0) else torch.ones_like(tensor_scale)
    wanted_NJ = blocks_NJB.abs().amax(dim=-1) / (E2M1[-1] * divisor)
    scales_NJ = wanted_NJ.clamp_max(_LARGEST_SCALE).to(torch.float8_e4m3fn)
    unit_NJ = scales_NJ.to(torch.float32) * tensor_scale
    # A block with scale 0 has only zeros, or weights that are too small for any code.
    inverse_NJ = torch.where(unit_NJ > 0, 1.0 / unit_NJ, 0.0)
    scaled = blocks_NJB * inverse_NJ[..., None]
    code = _nearest_code(scaled.abs())
    code = torch.where(scaled.signbit(), code + 8, code).view(rows, -1).to(torch.uint8)
    return Packed(code[:, 0::2] | (code[:, 1::2] << 4), scales_NJ, tensor_scale)


def unpack_nvfp4(packed: Packed, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the matrix ``[N, columns]`` that ``packed`` represents."""
    rows, blocks = packed.scales.shape
    device = packed.codes.device
    magnitudes = torch.tensor(E2M1, device=device)
    table = torch.cat((magnitudes, -magnitudes))
    byte = torch.arange(256, device=device)
    # One look-up gives the two weights of a byte. An index per weight would take eight times the
    # memory of the codes.
    pairs = torch.stack((table[byte & 15], table[byte >> 4]), dim=1)
    values = pairs[packed.codes.int()].view(rows, blocks, BLOCK)
    unit_NJ = packed.scales.to(torch.float32) * packed.tensor_scale
    return (values * unit_NJ[..., None]).view(rows, -1)[:, :columns].to(dtype)


def _nearest_code(magnitude: Tensor) -> Tensor:
    code = torch.zeros(magnitude.shape, dtype=torch.int16, device=magnitude.device)
    for lower, midpoint in enumerate(_MIDPOINTS):
        # A midpoint goes to the even code: the upper one if the lower is odd.
        code += (magnitude >= midpoint) if lower % 2 else (magnitude > midpoint)
    return code
