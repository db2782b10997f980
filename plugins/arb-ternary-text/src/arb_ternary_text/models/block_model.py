"""The base of models that run blocks one after another."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from arb_ternary.errors import UsageProblem


class BlockModel(nn.Module):
    """Computes in a chosen dtype and can recompute the activations of its blocks in backward.

    A subclass casts its residual stream to ``_dtype`` and calls :meth:`run_block`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._dtype: torch.dtype | None = None
        self._checkpoint_from: int | None = None

    def set_dtype(self, dtype: torch.dtype) -> None:
        """Compute in ``dtype``: float parameters, and the activations between ternary modules."""
        self.to(dtype)
        self._dtype = dtype

    def set_activation_checkpointing(self, enabled: bool, threshold: int | None = None) -> None:
        """Keep only each block's input in training and recompute the rest in backward.

        Args:
            enabled: False keeps every activation.
            threshold: smallest batch that enables it, in positions or images; None = any.

        Raises:
            UsageProblem: the threshold is negative.
        """
        if threshold is not None and threshold < 0:
            raise UsageProblem(
                f"activation checkpointing: the threshold must be at least 0, not {threshold}"
            )
        self._checkpoint_from = (threshold or 0) if enabled else None

    def run_block(self, block: nn.Module, size: int, x: Tensor, *arguments: object) -> Tensor:
        """Return ``block(x, *arguments)``.

        Args:
            block: the block.
            size: size of the batch, in the unit of the threshold of activation checkpointing.
            x: the residual stream.
            arguments: further arguments of the block.
        """
        result: Tensor
        if self._recomputes(size):
            # There is no randomness inside a block: votes are cast in backward only.
            result = checkpoint(block, x, *arguments, use_reentrant=False, preserve_rng_state=False)
        else:
            result = block(x, *arguments)
        return result

    def _recomputes(self, size: int) -> bool:
        if self._checkpoint_from is None or size < self._checkpoint_from:
            return False
        return self.training and torch.is_grad_enabled()
