"""Loss on held-out samples, without a trace in the training run.

Shapes: ``B`` samples, ``S`` predictions a sample, ``V`` ids that a prediction chooses among.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import zip_longest

import numpy as np
import torch
from attrs import field, frozen
from torch import Tensor, nn
from torch.nn import functional as F

from arb_ternary.protocols.data import DataSource, MaskContext, MaskedBatch, MaskingStrategy
from arb_ternary_train.blocked import counted_losses
from arb_ternary_train.protocols import OwnLosses, Scores, SizedSamples, TakesTime
from arb_ternary_train.seeding import derived_generator, preserved_global_rng
from arb_ternary_train.world import SingleProcess, World


@frozen
class Evaluation:
    """Outcome of an evaluation.

    Attributes:
        loss: mean over the predictions that count: cross entropy in nats, where the masking does
            not judge itself.
        tokens: how many predictions counted.
        metrics: means of the masking's scores over the same predictions, by name.
    """

    loss: float
    tokens: int
    metrics: Mapping[str, float] = field(factory=dict)

    def told(self, noun: str) -> str:
        """The numbers in words; ``noun`` names one prediction."""
        scores = "".join(
            f", {name.replace('_', ' ')} {value:.4f}" for name, value in self.metrics.items()
        )
        return f"validation loss {self.loss:.4f}{scores} over {self.tokens:,} {noun}s"

    @property
    def perplexity(self) -> float:
        """``exp(loss)``; infinite where that overflows."""
        return (
            float(np.exp(np.float64(min(self.loss, 709.0)))) if self.loss < 709.0 else float("inf")
        )


def losses(output: Tensor, batch: MaskedBatch, masking: MaskingStrategy | None = None) -> Tensor:
    """Loss of each prediction, float32, flat, as ``masking`` judges it; the cross entropy where it
    does not.

    Logits are then ``[B, V]`` or ``[B, S, V]``, as the targets.
    """
    if isinstance(masking, OwnLosses):
        return masking.losses(output, batch)
    return F.cross_entropy(output.float().flatten(0, -2), batch.targets.flatten(), reduction="none")


def masked_loss(
    output: Tensor, batch: MaskedBatch, masking: MaskingStrategy | None = None
) -> Tensor:
    """Mean of :func:`losses` over the predictions of ``loss_mask``, in float32; 0 (with a graph)
    where none counts.
    """
    counts = batch.loss_mask.flatten()
    return losses(output, batch, masking).masked_fill(~counts, 0.0).sum() / counts.sum().clamp_min(
        1
    )


def forward_arguments(model: nn.Module, batch: MaskedBatch) -> dict[str, Tensor]:
    """Keyword arguments of a forward pass: those of the batch, and its times where the model takes
    them.
    """
    takes = isinstance(model, TakesTime) and model.takes_time
    times = {"time": batch.times} if batch.times is not None and takes else {}
    return {**batch.arguments, **times}


def block_size_of(data: DataSource, asked: int) -> int:
    """Predictions in a sample of ``data``: as were ``asked`` for, unless samples have a size of
    their own.
    """
    return data.predictions_per_sample if isinstance(data, SizedSamples) else asked


def prediction_name(data: DataSource) -> str:
    """What a report calls one prediction, in the singular."""
    return data.prediction_noun if isinstance(data, SizedSamples) else "token"


def loss_unit_of(data: DataSource, masking: MaskingStrategy) -> str:
    """What the loss of a run is measured in."""
    if isinstance(masking, OwnLosses):
        return masking.loss_unit
    noun = prediction_name(data)
    return f"nats {'an' if noun[0] in 'aeiou' else 'a'} {noun}"


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
) -> Evaluation:
    """Evaluate ``model`` on ``batches`` batches of the held-out samples of ``data`` (None: on all
    of them).

    Training is not disturbed: no vote is cast, modes and the global generators are put back, and
    masks come from generators of their own that are the same each time. ``after_batch`` is called
    with the number of batches that are done; what it raises ends the evaluation.

    The ranks of ``world`` take batches in turn; sums of batches are added in their order, so that
    the outcome is to the bit that of one process. Collective, and so is ``after_batch``, which is
    called once per round.

    Raises:
        DataError: there is not one sample.
    """
    world = SingleProcess() if world is None else world
    sums: list[tuple[float, int, dict[str, float]]] = []
    done = 0
    context = MaskContext(
        step=step, seed=seed, vocabulary_size=data.vocabulary_size, training=False
    )
    with evaluation_mode(model), preserved_global_rng(device), torch.no_grad():
        for index, batch in enumerate(data.held_out(batch_size, block_size, batches)):
            if index % world.size == world.rank:
                masked = masking.apply(
                    batch, derived_generator(seed, "evaluation", index), context
                ).to(device)
                arguments = forward_arguments(model, masked)
                counted_M = counted_losses(model, masked, masking, arguments)
                scored = {}
                if counted_M is None:
                    output = model(masked.inputs, **arguments)
                    counts = masked.loss_mask.flatten()
                    counted_M = losses(output, masked, masking)[counts]
                    scores = masking.scores(output, masked) if isinstance(masking, Scores) else {}
                    scored = {
                        name: float(values[counts].double().sum())
                        for name, values in scores.items()
                    }
                sums.append((float(counted_M.double().sum()), counted_M.numel(), scored))
            done = index + 1
            if done % world.size == 0:
                world.end_evaluation_round()
                after_batch(done)
        if done % world.size:
            world.end_evaluation_round()
            after_batch(done)
    total = 0.0
    count = 0
    totals: dict[str, float] = {}
    for round_ in zip_longest(*world.gather(sums)):
        for value, number, scored in (each for each in round_ if each is not None):
            total = total + value
            count = count + number
            for name, score in scored.items():
                totals[name] = totals.get(name, 0.0) + score
    return Evaluation(
        loss=total / max(1, count),
        tokens=count,
        metrics={name: score / max(1, count) for name, score in totals.items()},
    )
