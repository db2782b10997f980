from __future__ import annotations

import torch

from arb_ternary.protocols.data import Batch, MaskContext, MaskingStrategy
from arb_ternary_text.data.masking import build_causal


def _masked(tokens, training=True):
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    context = MaskContext(step=0, seed=0, vocabulary_size=100, training=training)
    masked = build_causal().apply(Batch(tokens, torch.arange(len(tokens))), generator, context)
    assert torch.equal(generator.get_state(), before), "causal masking must draw nothing"
    return masked


def test_every_position_predicts_the_next_token():
    masked = _masked(torch.tensor([[5, 6, 7, 8], [1, 2, 3, 4]]))
    assert masked.inputs.tolist() == [[5, 6, 7], [1, 2, 3]]
    assert masked.targets.tolist() == [[6, 7, 8], [2, 3, 4]]
    assert masked.loss_mask.dtype == torch.bool
    assert masked.loss_mask.tolist() == [[True] * 3] * 2


def test_changing_inputs_leaves_targets_and_batch_alone():
    tokens = torch.tensor([[5, 6, 7, 8]])
    masked = _masked(tokens)
    masked.inputs.zero_()
    assert masked.targets.tolist() == [[6, 7, 8]]
    assert tokens.tolist() == [[5, 6, 7, 8]]


def test_the_strategy_keeps_the_protocol():
    assert isinstance(build_causal(None), MaskingStrategy)
