from __future__ import annotations

import math
import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from arb_ternary.errors import DataError
from arb_ternary.protocols.data import Batch, MaskContext, MaskedBatch
from arb_ternary_text.data.masking import CausalMasking
from arb_ternary_text.data.source import StreamSource
from arb_ternary_text.data.tokenizers import IdTokenizer
from arb_ternary_train.evaluate import Evaluation, evaluate, evaluation_mode, masked_loss
from arb_ternary_train.report import baselines_of

CPU = torch.device("cpu")


class Bigram(nn.Module):
    """A bigram model with a dropout that would show in training mode."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(table)
        self.dropout = nn.Dropout(0.9)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.table[tokens])


def run(
    model: nn.Module, stream: np.ndarray[Any, Any], masking: Any = None, **options: Any
) -> Evaluation:
    given: dict[str, Any] = {
        "block_size": 4,
        "batch_size": 3,
        "batches": None,
        "seed": 0,
        **options,
    }
    data = StreamSource("fake", IdTokenizer(5), stream, stream)
    return evaluate(model, data, masking or CausalMasking(), device=CPU, **given)


def test_loss_is_mean_cross_entropy_of_all_pairs() -> None:
    generator = np.random.default_rng(0)
    stream = generator.integers(0, 5, 30)
    table = generator.normal(size=(5, 5))
    logs = table - np.log(np.exp(table).sum(1, keepdims=True))
    result = run(Bigram(torch.tensor(table, dtype=torch.float64).float()), stream)
    expected = -np.mean([logs[a, b] for a, b in pairwise(stream[:29])])
    assert result.loss == pytest.approx(expected, rel=1e-6)
    assert result.tokens == 28
    assert result.perplexity == pytest.approx(math.exp(expected), rel=1e-6)


def test_an_evaluation_can_be_limited_to_some_batches() -> None:
    result = run(Bigram(torch.zeros(5, 5)), np.arange(100) % 5, batches=2)
    assert result.tokens == 2 * 3 * 4
    assert result.loss == pytest.approx(math.log(5))


def test_modes_generators_and_gradients_are_left_as_they_were() -> None:
    model = Bigram(torch.zeros(5, 5))
    model.dropout.eval()
    torch.manual_seed(1)
    random.seed(1)
    expected = torch.rand(3), random.random()
    torch.manual_seed(1)
    random.seed(1)
    run(model, np.arange(100) % 5)
    assert torch.equal(torch.rand(3), expected[0])
    assert random.random() == expected[1]
    assert model.training
    assert not model.dropout.training
    assert model.table.grad is None


def test_modes_are_put_back_after_an_error() -> None:
    model = Bigram(torch.zeros(5, 5))
    seen = []

    def fail() -> None:
        with evaluation_mode(model):
            seen.append(model.dropout.training)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert seen == [False]
    assert model.dropout.training


class RandomHalf:
    """Counts a random half of the positions."""

    def __init__(self) -> None:
        self.contexts: list[MaskContext] = []

    def apply(self, batch: Batch, generator: torch.Generator, context: MaskContext) -> MaskedBatch:
        self.contexts.append(context)
        masked = CausalMasking().apply(batch, generator, context)
        return MaskedBatch(
            masked.inputs,
            masked.targets,
            torch.rand(masked.inputs.shape, generator=generator) < 0.5,
        )


def test_masks_of_evaluations_depend_on_the_seed_only() -> None:
    model = Bigram(torch.randn(5, 5))
    stream = np.arange(200) % 5
    masking = RandomHalf()
    first = run(model, stream, masking)
    torch.rand(7)
    assert run(model, stream, masking, step=100) == first
    assert run(model, stream, masking, seed=1) != first
    assert not any(context.training for context in masking.contexts)


def test_a_stream_that_is_too_short_is_an_error_that_names_it() -> None:
    with pytest.raises(DataError, match="the validation stream: 3 tokens are too few"):
        run(Bigram(torch.zeros(5, 5)), np.arange(3))


def test_the_training_loss_counts_only_the_positions_of_the_mask() -> None:
    logits = torch.randn(2, 3, 4, requires_grad=True)
    targets = torch.tensor([[0, 1, 2], [3, 2, 1]])
    mask = torch.tensor([[True, False, False], [False, True, True]])
    batch = MaskedBatch(torch.zeros(2, 3, dtype=torch.int64), targets, mask)
    loss = masked_loss(logits, batch)
    numbers = logits.detach().double().numpy()
    logs = numbers - np.log(np.exp(numbers).sum(-1, keepdims=True))
    expected = -(logs[0, 0, 0] + logs[1, 1, 2] + logs[1, 2, 1]) / 3
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-6)
    loss.backward()
    assert logits.grad is not None
    assert not logits.grad[0, 1:].any()
    assert not logits.grad[1, 0].any()


def test_infinite_loss_that_does_not_count_is_ignored() -> None:
    logits = torch.tensor([[[0.0, -math.inf], [0.0, 0.0]]])
    batch = MaskedBatch(
        torch.zeros(1, 2).long(), torch.ones(1, 2).long(), torch.tensor([[False, True]])
    )
    assert float(masked_loss(logits, batch)) == pytest.approx(math.log(2))


def test_batch_without_predictions_has_zero_loss_and_gradient() -> None:
    logits = torch.randn(1, 2, 4, requires_grad=True)
    tokens = torch.zeros(1, 2, dtype=torch.int64)
    loss = masked_loss(logits, MaskedBatch(tokens, tokens, torch.zeros(1, 2, dtype=torch.bool)))
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert logits.grad is not None
    assert not logits.grad.any()


def test_an_infinite_loss_has_an_infinite_perplexity() -> None:
    assert Evaluation(loss=1e6, tokens=1).perplexity == math.inf


def test_baselines_are_left_out_for_other_losses() -> None:
    class Counted:
        def baselines(self, block_size: int) -> dict[str, float]:
            return {"unigram_entropy": float(block_size)}

    class Squared(CausalMasking):
        loss_unit = "squared error"

        def losses(self, output: torch.Tensor, batch: MaskedBatch) -> torch.Tensor:
            return output.square().flatten()

    source: Any = Counted()
    assert baselines_of(source, CausalMasking(), (4, 8)) == {"unigram_entropy": 8.0}
    assert baselines_of(source, Squared(), (4, 8)) == {}
