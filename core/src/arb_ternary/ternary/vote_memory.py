"""What a ternary module holds within a step: statistics of its gradients, and how votes are scaled."""

from __future__ import annotations

from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from arb_ternary.backends.protocol import WeightShape
from arb_ternary.backends.vote_state import VoteLimits

ScaleRule = Literal["residual", "frozen", "correlation"]
#: What casting votes changes of a module.
_CAST: Final = ("votes", "exponent_votes", "bias_votes", "correlation", "steps", "control", "stats", "magnitudes")


class VoteMemory(nn.Module):
    """Working memory, not state: it is in no state dict, and an optimizer can write all of it anew before a step.

    ``stats``, ``magnitudes`` (both since the last ``zero_grad``), ``vote_scale`` (which an optimizer writes in place)
    and ``vote_limits`` are the fields of :class:`~arb_ternary.backends.vote_state.VoteState`.
    """

    shape: WeightShape
    gradients: str
    scale_rule: ScaleRule
    weight: Tensor
    control: Tensor
    votes: Tensor
    stats: Tensor
    magnitudes: Tensor | None
    vote_scale: Tensor | None
    vote_limits: Tensor

    #: Whether the first backward pass of a step keeps what its votes change, so that :meth:`undo_votes` can drop them.
    #: It costs a copy of the accumulators; off, votes that are cast stay.
    undoable = True
    #: What it keeps, by name; a checkpoint within a step needs it. Empty where votes are taken ahead.
    kept_votes: dict[str, Tensor] | None = None

    def allocate(self, shape: WeightShape) -> None:
        """Make the working memory of sign votes for a weight of this shape, on the CPU."""
        self.shape = shape
        self.stats = torch.zeros(1 + shape.out_features + shape.in_features)
        self.magnitudes = None
        self.vote_scale = None
        self.vote_limits = torch.tensor(VoteLimits())

    def use_scaled_votes(self, *, integer: bool = False) -> None:
        """Let backward cast scaled votes by factors (float32), or by shifts (int32) if ``integer``.

        The first factors are 0 and cast no votes, the first shifts are 31 and cast next to none. Write others in place
        (``copy_``): a compiled graph is then kept. ValueError: ``integer`` without int8 gradients and, in a linear,
        int8 activations.
        """
        if integer and (self.gradients, getattr(self, "activations", "int8")) != ("int8", "int8"):
            raise ValueError("integer votes need gradients 'int8' and activations 'int8'")
        size = self.shape.out_features + self.shape.in_features
        first, kind = (31, torch.int32) if integer else (0.0, torch.float32)
        self.magnitudes = torch.zeros(size, device=self.weight.device)
        self.vote_scale = torch.full((size,), first, dtype=kind, device=self.weight.device)

    @property
    def limits(self) -> VoteLimits:
        """How scaled votes are clipped and rounded; set, it is checked (ValueError)."""
        return VoteLimits(*self.vote_limits.tolist())

    @limits.setter
    def limits(self, value: VoteLimits) -> None:
        self.vote_limits.copy_(torch.tensor(value.check()))

    def clear_stats(self) -> None:
        """Zero the statistics of gradients."""
        self.stats.zero_()
        if self.magnitudes is not None:
            self.magnitudes.zero_()

    def keep_before_votes(self, y: Tensor) -> None:
        """Let backward from ``y``, an output of this module, keep what its votes change, if nothing is kept yet."""
        if torch.compiler.is_compiling():
            self._keep()  # a graph has no place for a hook: a copy is kept in forward
        else:
            y.register_hook(self._keep)  # type: ignore[no-untyped-call]

    def _keep(self, _grad: object = None) -> None:
        if self.undoable and self.kept_votes is None:
            found = ((name, getattr(self, name, None)) for name in _CAST)
            self.kept_votes = {name: tensor.detach().clone() for name, tensor in found if tensor is not None}

    def take_votes(self, *, ahead: bool = False) -> None:
        """Take the votes cast so far for good; ``ahead``: and those still to come, up to the next call or undoing."""
        self.kept_votes = {} if ahead else None

    @torch.no_grad()
    def undo_votes(self) -> None:
        """Put the module back to where it was before the first votes that are not taken yet, if it is ``undoable``."""
        kept, self.kept_votes = self.kept_votes, None
        for name, tensor in (kept or {}).items():
            getattr(self, name).copy_(tensor)

    def gradient_square_sum(self) -> Tensor:
        """Sum of squares of the gradients since the last ``zero_grad`` (summed over micro-batches), float32 scalar."""
        return self.stats[1 : 1 + self.shape.out_features].sum()

    def working_memory(self) -> list[Tensor]:
        """Every tensor of which nothing outlives a step; with 2 bits these include the accumulators."""
        scaled = [tensor for tensor in (self.magnitudes, self.vote_scale) if tensor is not None]
        cleared = [self.votes] if self.shape.vote_bits == 2 else []
        return [self.stats, self.vote_limits, *scaled, *cleared]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # Working memory follows the buffers to their device, but not to another dtype.
        # What the host reads at every pass, control words and limits, stays on the host.
        device = self.weight.device
        self.stats = self.stats.to(device)
        if self.control.device.type not in ("cpu", "meta"):
            self.control = self.control.cpu()
        if self.magnitudes is not None and self.vote_scale is not None:
            self.magnitudes, self.vote_scale = self.magnitudes.to(device), self.vote_scale.to(device)
        return self
