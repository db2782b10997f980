"""Loss on held-out samples; an evaluation leaves no trace in the training run.

Shapes: ``B`` samples, ``S`` predictions per sample, ``V`` ids that a prediction chooses among.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import zip_longest

import torch
from attrs import field, frozen
from torch import Tensor, nn
from torch.nn import functional as F

from arb_ternary.protocols.data import DataSource, MaskContext, MaskedBatch, MaskingStrategy
from arb_ternary_train.blocked import counted_losses
from arb_ternary_train.capabilities import takes_time
from arb_ternary_train.protocols import OwnLosses, Scores, SizedSamples
from arb_ternary_train.seeding import derived_generator, preserved_global_rng
from arb_ternary_train.world import SingleProcess, World

#: Largest loss whose perplexity is a float64.
_LARGEST_LOSS = 709.0


@frozen
class Evaluation:
    """Outcome of an evaluation.

    Attributes:
        loss: mean over the predictions that count; cross entropy in nats unless the masking judges
            predictions itself.
        tokens: how many predictions counted.
        metrics: means of the masking's scores over the same predictions, by name.
    """

    loss: float
    tokens: int
    metrics: Mapping[str, float] = field(factory=dict)

    def describe(self, noun: str) -> str:
        """Return the numbers in words; ``noun`` names one prediction."""
        text = f"validation loss {self.loss:.4f}"
        for name, value in self.metrics.items():
            text += f", {name.replace('_', ' ')} {value:.4f}"
        return f"{text} over {self.tokens:,} {noun}s"

    @property
    def perplexity(self) -> float:
        """``exp(loss)``; infinite if that overflows."""
        return math.exp(self.loss) if self.loss < _LARGEST_LOSS else math.inf


# --- losses


def losses(output: Tensor, batch: MaskedBatch, masking: MaskingStrategy | None = None) -> Tensor:
    """Return the loss of each prediction, float32, flat.

    It is the cross entropy of logits ``[B, V]`` or ``[B, S, V]``, as the targets, unless
    ``masking`` judges predictions itself.
    """
    if isinstance(masking, OwnLosses):
        return masking.losses(output, batch)
    return F.cross_entropy(output.float().flatten(0, -2), batch.targets.flatten(), reduction="none")


def masked_loss(
    output: Tensor, batch: MaskedBatch, masking: MaskingStrategy | None = None
) -> Tensor:
    """Return the mean of :func:`losses` over the predictions of ``loss_mask``, in float32.

    It is 0, with a graph, if none counts.
    """
    counts = batch.loss_mask.flatten()
    total = losses(output, batch, masking).masked_fill(~counts, 0.0).sum()
    return total / counts.sum().clamp_min(1)


def forward_arguments(model: nn.Module, batch: MaskedBatch) -> dict[str, Tensor]:
    """Return the keyword arguments of a forward pass: the batch's, and its times if taken."""
    if batch.times is None or not takes_time(model):
        return dict(batch.arguments)
    return {**batch.arguments, "time": batch.times}


# --- what a prediction is


def block_size_of(data: DataSource, asked: int) -> int:
    """Return the predictions per sample of ``data``: ``asked`` unless samples have their own."""
    return data.predictions_per_sample if isinstance(data, SizedSamples) else asked


def prediction_name(data: DataSource) -> str:
    """Return what a report calls one prediction, in the singular."""
    return data.prediction_noun if isinstance(data, SizedSamples) else "token"


def loss_unit_of(data: DataSource, masking: MaskingStrategy) -> str:
    """Return the unit of the loss of a run."""
    if isinstance(masking, OwnLosses):
        return masking.loss_unit
    return f"nats per {prediction_name(data)}"


# --- evaluation


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Set ``model.eval()`` within a ``with`` block; restore the mode of every module after it."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@frozen
class _BatchSums:
    """Sums over the predictions of one batch that count."""

    loss: float
    count: int
    scores: Mapping[str, float]


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
    """Evaluate ``model`` on held-out samples of ``data``.

    Training is not disturbed: no vote is cast, and modes and global generators are restored. Masks
    come from generators of their own, which are the same in each evaluation.

    The ranks of ``world`` take batches in turn. Sums of batches are added in the order of batches,
    so the result equals that of one process to the bit. Collective.

    Args:
        model: the model.
        data: where held-out samples come from.
        masking: turns samples into inputs and targets.
        batch_size: samples per batch.
        block_size: predictions per sample.
        batches: how many batches; None = all samples.
        seed: seed of the run.
        device: where the model is.
        step: step of the run.
        after_batch: called with the number of batches done, once per round of the ranks; what it
            raises ends the evaluation.
        world: the processes; None = this one alone.

    Raises:
        DataError: there is not one sample.
    """
    world = SingleProcess() if world is None else world
    context = MaskContext(
        step=step, seed=seed, vocabulary_size=data.vocabulary_size, training=False
    )
    own: list[_BatchSums] = []
    done = 0
    with evaluation_mode(model), preserved_global_rng(device), torch.no_grad():
        for index, batch in enumerate(data.held_out(batch_size, block_size, batches)):
            if index % world.size == world.rank:
                generator = derived_generator(seed, "evaluation", index)
                masked = masking.apply(batch, generator, context).to(device)
                own.append(_evaluate_batch(model, masked, masking))
            done = index + 1
            if done % world.size == 0:
                after_batch(done)
        if done % world.size:
            after_batch(done)
    return _mean(world, own)


def _evaluate_batch(model: nn.Module, masked: MaskedBatch, masking: MaskingStrategy) -> _BatchSums:
    """Return the sums of one batch."""
    arguments = forward_arguments(model, masked)
    losses_M = counted_losses(model, masked, masking, arguments)
    scores = {}
    if losses_M is None:
        output = model(masked.inputs, **arguments)
        counts = masked.loss_mask.flatten()
        losses_M = losses(output, masked, masking)[counts]
        if isinstance(masking, Scores):
            for name, values in masking.scores(output, masked).items():
                scores[name] = float(values[counts].double().sum())
    return _BatchSums(float(losses_M.double().sum()), losses_M.numel(), scores)


def _mean(world: World, own: list[_BatchSums]) -> Evaluation:
    """Return the means over the batches of all ranks, added in the order of batches."""
    gathered = world.gather([(each.loss, each.count, dict(each.scores)) for each in own])
    total = 0.0
    count = 0
    scores: dict[str, float] = {}
    for round_ in zip_longest(*gathered):
        for sums in round_:
            if sums is None:
                continue
            loss, number, scored = sums
            total += loss
            count += number
            for name, score in scored.items():
                scores[name] = scores.get(name, 0.0) + score
    divisor = max(1, count)
    metrics = {name: score / divisor for name, score in scores.items()}
    return Evaluation(loss=total / divisor, tokens=count, metrics=metrics)
