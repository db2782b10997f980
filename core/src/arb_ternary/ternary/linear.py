"""The linear layer with a ternary weight."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from arb_ternary.backends import ops
from arb_ternary.backends.vote_state import EXPONENT_RANGE
from arb_ternary.ternary.module import GroupSize, TernaryModule, VoteOptions


class TernaryLinear(TernaryModule):
    """``y = x @ W.T + b`` with ``W = T * 2**E`` and an optional integer bias ``b = B * 2**e``.

    In ``int8`` activation mode every row of ``x`` is quantised by its absolute maximum, and the
    products are summed exactly in integers. The straight-through gradient passes the quantiser. In
    backward the module casts its votes; the weight gradient never becomes the ``grad`` of a
    parameter.

    Args:
        in_features: ``K``.
        out_features: ``N``.
        bias: whether to add an integer bias: int32 ``[N]`` with one int8 exponent, which learns by
            votes as the trits do.
        group_size: columns that share an exponent: 32, 64, 128, 256 or "row".
        activations: ``int8`` or ``float``; ``int8`` with int8 gradients makes all three products
            exact integers.
        exponent_offset: added to the initial exponent, which follows from the fan-in.
        device: the device of the buffers.
        options: see :class:`~arb_ternary.ternary.module.VoteOptions`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        group_size: GroupSize = 128,
        activations: str = "int8",
        exponent_offset: int = 0,
        device: torch.device | str | None = None,
        **options: Unpack[VoteOptions],
    ) -> None:
        if activations not in ops.ACTIVATION_MODES:
            raise ValueError(
                f"activations must be one of {ops.ACTIVATION_MODES}, got {activations!r}"
            )
        super().__init__(
            out_features,
            in_features,
            group_size=group_size,
            fan_in=in_features,
            exponent_offset=exponent_offset,
            **options,
        )
        self.in_features = in_features
        self.out_features = out_features
        self.activations = activations
        self.bias: Tensor | None
        self.bias_exponent: Tensor | None
        self.bias_votes: Tensor | None
        self.register_buffer("bias", None)
        self.register_buffer("bias_exponent", None)
        self.register_buffer("bias_votes", None)
        if bias:
            # One quantum of the bias is a sixteenth of the step of a trit in the output.
            start = 0
            if self.exponent.numel():
                start = max(int(self.exponent.flatten()[0]) - 4, EXPONENT_RANGE[0])
            self.bias = torch.zeros(out_features, dtype=torch.int32)
            self.bias_exponent = torch.full((1,), start, dtype=torch.int8)
            self.bias_votes = torch.zeros(out_features, dtype=torch.int8)
        if device is not None:
            self.to(device)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x [..., K]`` (float) to ``[..., N]`` in the dtype of ``x``."""
        return self.multiply(x, self.activations, self.integer_bias())

    def integer_bias(self) -> Tensor | None:
        """``B * 2**e`` as float32 ``[N]``; backward casts its votes."""
        if self.bias is None or self.bias_exponent is None or self.bias_votes is None:
            return None
        votes = self.bias_votes
        if self.sums is not None and self.sums.bias is not None:
            votes = self.sums.bias
        bias: Tensor = ops.bias(self.vote_anchor(), self.bias, self.bias_exponent, votes)
        return bias

    @torch.no_grad()
    def apply_bias_votes(self, threshold: int) -> None:
        """Move each element of the bias whose votes have reached ``threshold`` by one unit.

        Those votes, which are always int8, are cleared.
        """
        if self.bias is None or self.bias_votes is None:
            return
        above = (self.bias_votes >= threshold).to(torch.int32)
        below = (self.bias_votes <= -threshold).to(torch.int32)
        crossed = above - below
        self.bias += crossed
        self.bias_votes.masked_fill_(crossed != 0, 0)

    def extra_repr(self) -> str:
        """The facts that ``print(model)`` shows."""
        bias = self.bias is not None
        return f"{super().extra_repr()}, activations={self.activations}, bias={bias}"
