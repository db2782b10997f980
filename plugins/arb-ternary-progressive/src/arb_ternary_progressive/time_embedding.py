"""Time as an input of the model: a vector per time, added to the embeddings of all positions.

Shapes: ``B`` samples, ``S`` positions, ``D`` width, ``E`` features of the time embedding.
"""

from __future__ import annotations

from typing import Final

import torch
from attrs import evolve
from torch import Tensor, nn

from arb_ternary.errors import UsageProblem
from arb_ternary_progressive.config import TimeEncoding
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.parts import FloatLinear, make_embedding, make_linear

#: Times in [0, 1] are scaled to the number of steps of diffusion models (Ho et al., 2020), so that
#: the wavelengths of the sinusoids, from 2 pi to 10000 times that, distinguish them.
_UNITS: Final = 1000.0
_LONGEST: Final = 10000.0


def sinusoid(time_B: Tensor, features: int) -> Tensor:
    """Return ``sin(1000 t f_i)``, then ``cos(1000 t f_i)``, float32 ``[B, E]``.

    ``f_i = 10000**(-2 i / E)`` for ``i`` in ``0 .. E / 2 - 1`` (Vaswani et al., 2017).
    """
    exponent_H = torch.arange(features // 2, dtype=torch.float64, device=time_B.device) * (
        -2.0 / features
    )
    # In float64, because times of up to 1000 leave a float32 only 14 bits for the fraction.
    angle_BH = (time_B.double() * _UNITS).unsqueeze(1) * (_LONGEST**exponent_H)
    return torch.cat((angle_BH.sin(), angle_BH.cos()), dim=1).float()


class TimeEmbedding(nn.Module):
    """A vector of the model's width for each time in [0, 1].

    ``sinusoidal`` is a fixed function of time; ``learned`` is a table with a row for each of
    ``num_time_steps`` equal steps. If ``dim`` is not the width, a linear without bias maps one to
    the other.

    Args:
        dim: features of the encoding, ``E``, even for a sinusoid.
        kind: ``sinusoidal`` or ``learned``.
        width: features of the residual stream, ``D``.
        num_time_steps: rows of the table.
        config: makes table and linear ternary if the model's embedding is; None = float32.
    """

    def __init__(
        self,
        dim: int,
        kind: TimeEncoding,
        width: int,
        *,
        num_time_steps: int = 8,
        config: DecoderConfig | None = None,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.kind = kind
        self.width = width
        self.num_time_steps = num_time_steps
        self.table: nn.Module | None = None
        if kind == "learned":
            self.table = _table(num_time_steps, dim, config)
        self.projection: nn.Module | None = None
        if dim != width:
            self.projection = _projection(dim, width, config)

    def forward(self, time: Tensor | float) -> Tensor:
        """Return what is added to embeddings ``[B, S, D]``: ``[B, 1, D]``.

        For a single time it is ``[1, 1, D]``.

        Args:
            time: in [0, 1]: a number, or a tensor with one per sample.

        Raises:
            UsageProblem: a time is outside [0, 1], or the tensor has more than one dimension.
        """
        time_B = torch.as_tensor(time, dtype=torch.float32, device=self._device())
        if time_B.dim() > 1:
            raise UsageProblem(
                f"time: must be one number, or one per sample, not a tensor of shape "
                f"{list(time_B.shape)}"
            )
        time_B = time_B.reshape(-1)
        if not bool(((time_B >= 0) & (time_B <= 1)).all()):
            raise UsageProblem(f"time: must be between 0 and 1, not {time_B.tolist()}")
        if self.table is None:
            encoded_BE = sinusoid(time_B, self.dim)
        else:
            steps_B = (time_B * self.num_time_steps).long().clamp_max(self.num_time_steps - 1)
            encoded_BE = self.table(steps_B)
        if self.projection is not None:
            encoded_BE = self.projection(encoded_BE)
        return encoded_BE.unsqueeze(1)

    def extra_repr(self) -> str:
        return (
            f"dim={self.dim}, kind={self.kind}, width={self.width}, "
            f"num_time_steps={self.num_time_steps}"
        )

    def _device(self) -> torch.device | None:
        for tensor in (*self.parameters(), *self.buffers()):
            return tensor.device
        return None


def _table(rows: int, features: int, config: DecoderConfig | None) -> nn.Module:
    if config is None:
        table = nn.Embedding(rows, features)
        nn.init.normal_(table.weight)
        return table
    # A table has no heads, so their number need not divide its width.
    made = evolve(
        config,
        architecture=None,
        width=features,
        heads=1,
        kv_heads=None,
        head_dim=2,
        rotary_factors=None,
        tie_embeddings=False,
    )
    return make_embedding(made, rows)


def _projection(features: int, width: int, config: DecoderConfig | None) -> nn.Module:
    # It belongs to the embedding, so it is float if the embedding is, whatever the linears of the
    # stacks are.
    if config is None or "embedding" in config.float_parts:
        return FloatLinear(features, width)
    return make_linear(evolve(config, float_parts=()), features, width)
