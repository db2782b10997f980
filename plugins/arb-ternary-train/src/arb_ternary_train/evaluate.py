"""Loss on held-out tokens, without a trace in the training run.

Shapes: ``B`` samples, ``S`` positions, ``V`` token ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from attrs import frozen
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from arb_ternary.protocols.data import MaskContext, MaskedBatch, MaskingStrategy
from arb_ternary_text.data.loader import evaluation_batches
from arb_ternary_text.data.sampler import window_count
from arb_ternary_train.seeding import derived_generator, preserved_global_rng

__all__ = ["Evaluation", "evaluate", "evaluation_mode", "masked_loss", "timed"]


@frozen
class Evaluation:
    """Outcome of an evaluation.

    Attributes:
        loss: mean cross entropy over the positions that count, nats a token.
        tokens: how many positions counted.
        span: length of the prefix of the stream that holds every whole block. Where all of them were read, inputs and
            targets are exactly its neighbouring pairs.
    """

    loss: float
    tokens: int
    span: int

    @property
    def perplexity(self) -> float:
        """``exp(loss)``; infinite where that overflows."""
        return float(np.exp(np.float64(min(self.loss, 709.0)))) if self.loss < 709.0 else float("inf")


def masked_loss(logits_BSV: Tensor, batch: MaskedBatch) -> Tensor:
    """Mean cross entropy over the positions of ``loss_mask``, in float32; 0 (with a graph) where none counts."""
    losses_BS = F.cross_entropy(logits_BSV.float().flatten(0, 1), batch.targets.flatten(), reduction="none")
    mask_BS = batch.loss_mask.flatten()
    return losses_BS.masked_fill(~mask_BS, 0.0).sum() / mask_BS.sum().clamp_min(1)


def timed(model: nn.Module, batch: MaskedBatch) -> dict[str, Tensor]:
    """Keyword arguments of a forward pass: the times, where the model takes them as an input (``takes_time``)."""
    return {"time": batch.times} if batch.times is not None and getattr(model, "takes_time", False) else {}


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """``model.eval()`` inside; afterwards every module is back in the mode that it had."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def evaluate(
    model: nn.Module,
    stream: NDArray[Any],
    masking: MaskingStrategy,
    *,
    block_size: int,
    batch_size: int,
    batches: int | None,
    seed: int,
    vocabulary_size: int,
    device: torch.device,
    step: int = 0,
) -> Evaluation:
    """Evaluate ``model`` on ``batches`` batches of blocks spread evenly over ``stream`` (None: on every whole block).

    Every block in order predicts each token but the first exactly once. Training is not disturbed: no vote is cast,
    modes and the global generators are put back, and masks come from generators of their own that are the same each
    time.

    Raises:
        DataError: the stream is shorter than one block.
    """
    total, count = torch.zeros((), dtype=torch.float64), 0
    context = MaskContext(step=step, seed=seed, vocabulary_size=vocabulary_size, training=False)
    with evaluation_mode(model), preserved_global_rng(device), torch.no_grad():
        for index, batch in enumerate(evaluation_batches(stream, block_size, batch_size, limit=batches)):
            masked = masking.apply(batch, derived_generator(seed, "evaluation", index), context).to(device)
            logits_BSV = model(masked.inputs, **timed(model, masked))
            losses_N = F.cross_entropy(logits_BSV.float().flatten(0, 1), masked.targets.flatten(), reduction="none")
            counted_M = losses_N[masked.loss_mask.flatten()]
            total += counted_M.double().sum().cpu()
            count += counted_M.numel()
    span = window_count(len(stream), block_size, "the validation stream") * block_size + 1
    return Evaluation(loss=float(total) / max(1, count), tokens=count, span=span)
