"""Loss on held-out samples, without a trace in the training run.

Shapes: ``B`` samples, ``S`` predictions a sample, ``V`` ids that a prediction chooses among.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import zip_longest

import numpy as np
import torch
from attrs import frozen
from torch import Tensor, nn
from torch.nn import functional as F

from arb_ternary.protocols.data import DataSource, MaskContext, MaskedBatch, MaskingStrategy
from arb_ternary_train.protocols import TakesTime
from arb_ternary_train.ranks.weights import Weights, WholeWeights
from arb_ternary_train.ranks.world import Alone, World
from arb_ternary_train.seeding import derived_generator, preserved_global_rng

__all__ = ["Evaluation", "evaluate", "evaluation_mode", "masked_loss", "time_arguments"]


@frozen
class Evaluation:
    """Outcome of an evaluation.

    Attributes:
        loss: mean cross entropy over the predictions that count, nats each.
        tokens: how many predictions counted.
    """

    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """``exp(loss)``; infinite where that overflows."""
        return float(np.exp(np.float64(min(self.loss, 709.0)))) if self.loss < 709.0 else float("inf")


def losses(logits: Tensor, batch: MaskedBatch) -> Tensor:
    """Cross entropy of each prediction, float32, flat; ``logits`` are ``[B, V]`` or ``[B, S, V]``, as the targets."""
    return F.cross_entropy(logits.float().flatten(0, -2), batch.targets.flatten(), reduction="none")


def masked_loss(logits: Tensor, batch: MaskedBatch) -> Tensor:
    """Mean cross entropy over the predictions of ``loss_mask``, in float32; 0 (with a graph) where none counts."""
    counts = batch.loss_mask.flatten()
    return losses(logits, batch).masked_fill(~counts, 0.0).sum() / counts.sum().clamp_min(1)


def time_arguments(model: nn.Module, batch: MaskedBatch) -> dict[str, Tensor]:
    """Keyword arguments of a forward pass: the times, where there are some and the model takes them."""
    takes = isinstance(model, TakesTime) and model.takes_time
    return {"time": batch.times} if batch.times is not None and takes else {}


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
    data: DataSource,
    masking: MaskingStrategy,
    *,
    batch_size: int,
    block_size: int,
    batches: int | None,
    seed: int,
    device: torch.device,
    step: int = 0,
    after_batch: Callable[[int], None] = lambda _: None,
    world: World | None = None,
    weights: Weights | None = None,
) -> Evaluation:
    """Evaluate ``model`` on ``batches`` batches of the held-out samples of ``data`` (None: on all of them).

    Training is not disturbed: no vote is cast, modes and the global generators are put back, and masks come from
    generators of their own that are the same each time. ``after_batch`` is called with the number of batches that are
    done; what it raises ends the evaluation.

    The ranks of ``world`` take batches in turn; sums of batches are added in their order, so that the outcome is to the
    bit that of one process. ``weights`` are those of the model. Collective, ``after_batch`` too, which is called once a
    round.

    Raises:
        DataError: there is not one sample.
    """
    world = Alone() if world is None else world
    held = WholeWeights() if weights is None else weights
    sums: list[tuple[float, int]] = []
    done = 0
    context = MaskContext(step=step, seed=seed, vocabulary_size=data.vocabulary_size, training=False)
    with evaluation_mode(model), preserved_global_rng(device), torch.no_grad():
        for index, batch in enumerate(data.held_out(batch_size, block_size, batches)):
            if index % world.size == world.rank:
                masked = masking.apply(batch, derived_generator(seed, "evaluation", index), context).to(device)
                logits = model(masked.inputs, **time_arguments(model, masked))
                counted_M = losses(logits, masked)[masked.loss_mask.flatten()]
                sums.append((float(counted_M.double().sum()), counted_M.numel()))
            done = index + 1
            if done % world.size == 0:
                held.end_evaluation_round()
                after_batch(done)
        if done % world.size:
            held.end_evaluation_round()
            after_batch(done)
    total, count = 0.0, 0
    for round_ in zip_longest(*world.gather(sums), fillvalue=(0.0, 0)):
        for value, number in round_:
            total, count = total + value, count + number
    return Evaluation(loss=total / max(1, count), tokens=count)
