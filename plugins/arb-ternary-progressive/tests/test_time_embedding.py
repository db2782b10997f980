"""Time as an input of the model."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from arb_ternary.errors import UsageProblem
from arb_ternary.ternary.embedding import TernaryEmbedding
from arb_ternary.ternary.linear import TernaryLinear
from arb_ternary_progressive.time import time_of_step
from arb_ternary_progressive.time_embedding import TimeEmbedding
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_train.audit import audit

PURE = DecoderConfig(width=32, layers=1, heads=4, max_length=16)
FLOAT_ENDS = DecoderConfig(
    width=32, layers=1, heads=4, max_length=16, float_parts=("embedding", "head")
)


@pytest.mark.parametrize("time", [0.0, 0.1, 0.5, 0.937, 1.0])
def test_the_sinusoid_has_its_closed_form(time: float) -> None:
    features = 12
    angles = [1000 * time * 10000 ** (-2 * i / features) for i in range(features // 2)]
    expected = [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
    # A time is a float32; the error of the angle is up to 1000 times as large.
    found = TimeEmbedding(features, "sinusoidal", features)(torch.tensor(time, dtype=torch.float32))
    assert found[0, 0].tolist() == pytest.approx(expected, abs=1e-4)


def test_a_sinusoid_of_the_models_width_has_no_parameters() -> None:
    embedding = TimeEmbedding(32, "sinusoidal", 32)
    assert not list(embedding.parameters())
    assert not embedding.state_dict()


def test_another_dimension_is_projected_to_the_width() -> None:
    embedding = TimeEmbedding(12, "sinusoidal", 32)
    plain = TimeEmbedding(12, "sinusoidal", 12)
    time = torch.tensor([0.25, 0.75])
    assert torch.allclose(embedding(time), plain(time) @ embedding.projection.weight.T)
    assert embedding.projection.weight.shape == (32, 12)


def test_a_learned_embedding_is_the_row_of_the_time_step() -> None:
    embedding = TimeEmbedding(32, "learned", 32, num_time_steps=8)
    assert embedding.table.weight.shape == (8, 32)
    times = torch.tensor([0.0, 0.124, 0.125, 0.5, 0.99, 1.0])
    assert torch.equal(embedding(times)[:, 0], embedding.table.weight[[0, 0, 1, 4, 7, 7]])
    for step in range(8):
        assert torch.equal(embedding(time_of_step(step, 8))[0, 0], embedding.table.weight[step])


def test_it_is_added_to_tokens_and_given_embeddings() -> None:
    tokens = nn.Embedding(50, 32)(torch.arange(12).view(3, 4))
    given = torch.randn(3, 4, 32)
    embedding = TimeEmbedding(32, "learned", 32)
    times = torch.tensor([0.1, 0.5, 0.9])
    for x in (tokens, given):
        y = x + embedding(times)
        assert y.shape == x.shape
        for row, time in enumerate(times.tolist()):
            assert torch.allclose(y[row] - x[row], embedding(time)[0].expand(4, 32), atol=1e-6)


@pytest.mark.parametrize("time", [0.5, torch.tensor(0.5), torch.tensor([0.5])])
def test_one_time_serves_every_sample(time: object) -> None:
    assert TimeEmbedding(32, "sinusoidal", 32)(time).shape == (1, 1, 32)


def test_a_learned_embedding_learns() -> None:
    embedding = TimeEmbedding(12, "learned", 32, num_time_steps=4)
    embedding(torch.tensor([0.1, 0.9])).square().sum().backward()
    touched = embedding.table.weight.grad.abs().sum(dim=1) > 0
    assert touched.tolist() == [True, False, False, True]
    assert embedding.projection.weight.grad.abs().sum() > 0


def test_in_a_ternary_model_it_is_ternary() -> None:
    embedding = TimeEmbedding(13, "learned", 32, config=PURE)
    assert isinstance(embedding.table, TernaryEmbedding)
    assert isinstance(embedding.projection, TernaryLinear)
    assert audit(embedding).pure
    assert embedding(torch.tensor([0.2, 0.4, 0.6])).shape == (3, 1, 32)
    assert audit(TimeEmbedding(16, "sinusoidal", 32, config=PURE)).pure


def test_it_is_float_if_the_models_embedding_is() -> None:
    embedding = TimeEmbedding(13, "learned", 32, config=FLOAT_ENDS)
    assert isinstance(embedding.table, nn.Embedding)
    assert isinstance(embedding.projection, nn.Linear)


@pytest.mark.parametrize("time", [-0.1, 1.5, torch.tensor([0.5, 2.0]), math.nan])
def test_a_time_outside_its_range_is_an_error(time: object) -> None:
    with pytest.raises(UsageProblem, match="time: must be between 0 and 1"):
        TimeEmbedding(32, "sinusoidal", 32)(time)


def test_times_by_position_are_an_error() -> None:
    with pytest.raises(UsageProblem, match="one per sample"):
        TimeEmbedding(32, "sinusoidal", 32)(torch.zeros(2, 3))
