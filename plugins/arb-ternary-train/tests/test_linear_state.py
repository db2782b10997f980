"""Bits of training state per linear weight, counted by hand."""

from __future__ import annotations

import torch
from torch import nn

from arb_ternary.optim.protocol import Trainable, collect_trainable
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_train.linear_state import linear_state
from arb_ternary_train.optim.adamw import build as build_adamw
from arb_ternary_train.optim.config import AdamWConfig
from arb_ternary_train.optim.joined import JoinedOptimizer
from arb_ternary_votes.sign_votes import SignVotes

FLOATS = ("embedding", "head", "norms", "linears")
#: Query, key, value and output of width 128; up and down of 256.
WEIGHTS = 4 * 128 * 128 + 2 * 128 * 256


def decoder(**options: object) -> Decoder:
    return Decoder(
        DecoderConfig(width=128, layers=1, heads=2, feed_forward=256, max_length=8, **options), 40
    )


def stepped(model: Decoder, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    model(torch.zeros(1, 4, dtype=torch.int64)).sum().backward()
    optimizer.step()
    return optimizer


def test_float_weight_under_adamw_takes_96_bits() -> None:
    model = decoder(float_parts=FLOATS, activations="float")
    found = linear_state(
        model, stepped(model, build_adamw(AdamWConfig(), collect_trainable(model)))
    )
    assert found.weights == WEIGHTS
    # A weight, two moments, and a step counter of four bytes for each of the six matrices.
    assert found.state_bytes == 12 * WEIGHTS + 6 * 4
    assert found.gradient_bytes == 4 * WEIGHTS


def test_moments_of_an_embedding_are_not_charged_to_the_linears() -> None:
    model = decoder(group_size="row", float_parts=("embedding", "head"))
    found = collect_trainable(model)
    parts = {
        "ternary": SignVotes(found.ternary),
        "float": build_adamw(AdamWConfig(), Trainable(ternary={}, floats=found.floats)),
    }
    state = linear_state(model, stepped(model, JoinedOptimizer(parts)))
    assert state.weights == WEIGHTS
    assert state.gradient_bytes == 0
    # 2 bits of packed trits and 8 of votes; an exponent and a vote of it a row; an origin and 4
    # control words per matrix.
    assert state.state_bytes == 10 * WEIGHTS // 8 + 2 * (5 * 128 + 256) + 6 * (1 + 4 * 8)


def test_state_without_parameter_counts_for_linears() -> None:
    class Keeps(torch.optim.SGD):
        def state_dict(self) -> dict[str, object]:
            return {**super().state_dict(), "scales": [torch.zeros(100)]}

    model = nn.Sequential(nn.Linear(4, 3, bias=False))
    found = linear_state(model, Keeps(model.parameters(), lr=0.1))
    assert (found.weights, found.state_bytes, found.gradient_bytes) == (12, 4 * 12 + 400, 48)


def test_a_model_without_linears_has_none() -> None:
    found = linear_state(nn.LayerNorm(4))
    assert (found.weights, found.state_bytes, found.state_bits_per_weight) == (0, 0, 0.0)
