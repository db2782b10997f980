"""Number formats of cached hidden states: float32, bfloat16, or int8 with a scale per position.

Shapes: ``B`` samples, ``S`` positions, ``D`` width.
"""

from __future__ import annotations

from typing import Final, get_args

import torch
from attrs import frozen
from torch import Tensor

from arb_ternary.errors import UsageProblem, nearest
from arb_ternary_progressive.config import CacheDtype

CACHE_DTYPES: Final[tuple[CacheDtype, ...]] = get_args(CacheDtype)

#: Bytes per number.
_WIDTHS: Final[dict[CacheDtype, int]] = {"float32": 4, "bfloat16": 2, "int8": 1}


@frozen
class HiddenCodec:
    """Encodes hidden states as bytes, and decodes them.

    ``float32`` is exact. ``bfloat16`` rounds to nearest even. ``int8`` stores ``s = max|x| / 127``
    of each position in float32 and ``round_half_even(x / s)``; a position of zeros stays zero. The
    encoding of a sample does not depend on the other samples of its batch.

    Raises:
        UsageProblem: there is no such format.
    """

    dtype: CacheDtype

    def __attrs_post_init__(self) -> None:
        if self.dtype not in CACHE_DTYPES:
            close = nearest(str(self.dtype), CACHE_DTYPES)
            raise UsageProblem(
                f"cache dtype: must be one of {', '.join(CACHE_DTYPES)}, not {self.dtype!r}",
                f"Did you mean {close!r}?" if close else "",
            )

    @property
    def exact(self) -> bool:
        """Whether decoding gives the original numbers."""
        return self.dtype == "float32"

    def sample_bytes(self, positions: int, width: int) -> int:
        """Return the bytes of one sample."""
        scales = 4 * positions if self.dtype == "int8" else 0
        return positions * width * _WIDTHS[self.dtype] + scales

    def encode(self, hidden_BSD: Tensor) -> Tensor:
        """Return uint8 ``[B, sample_bytes]`` on the host: numbers of a sample, then its scales."""
        x_BSD = hidden_BSD.detach().to(device="cpu", dtype=torch.float32).contiguous()
        samples = x_BSD.size(0)
        if self.dtype == "float32":
            return x_BSD.view(torch.uint8).view(samples, -1)
        if self.dtype == "bfloat16":
            return x_BSD.to(torch.bfloat16).view(torch.uint8).view(samples, -1)
        scale_BS1 = x_BSD.abs().amax(dim=-1, keepdim=True) / 127
        codes_BSD = torch.round(x_BSD / scale_BS1.clamp_min(torch.finfo(torch.float32).tiny)).to(
            torch.int8
        )
        return torch.cat(
            [
                codes_BSD.view(torch.uint8).view(samples, -1),
                scale_BS1.view(torch.uint8).view(samples, -1),
            ],
            dim=1,
        )

    def decode(self, bytes_BN: Tensor, positions: int, width: int) -> Tensor:
        """Return float32 ``[B, S, D]`` from the result of :meth:`encode`."""
        samples = bytes_BN.size(0)
        if self.dtype == "float32":
            return bytes_BN.contiguous().view(torch.float32).view(samples, positions, width)
        if self.dtype == "bfloat16":
            return (
                bytes_BN.contiguous()
                .view(torch.bfloat16)
                .view(samples, positions, width)
                .to(torch.float32)
            )
        numbers = positions * width
        codes_BSD = (
            bytes_BN[:, :numbers].contiguous().view(torch.int8).view(samples, positions, width)
        )
        scale_BS1 = (
            bytes_BN[:, numbers:].contiguous().view(torch.float32).view(samples, positions, 1)
        )
        return codes_BSD.to(torch.float32) * scale_BS1

    def rounded(self, hidden_BSD: Tensor) -> Tensor:
        """Return ``decode(encode(hidden))``, float32 on the device of ``hidden``."""
        _, positions, width = hidden_BSD.shape
        if self.exact:
            return hidden_BSD.detach().to(torch.float32)
        return self.decode(self.encode(hidden_BSD), positions, width).to(hidden_BSD.device)
