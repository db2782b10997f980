"""Vote thresholds for training loops of your own."""

from __future__ import annotations

import pytest
from torch import nn

from arb_ternary import TernaryLinear
from arb_ternary_train.update import configure_ternary_training


def test_configuring_sets_every_module_and_returns_the_threshold() -> None:
    model = nn.Sequential(TernaryLinear(4, 4), nn.Sequential(TernaryLinear(6, 2)))
    assert configure_ternary_training(model) == 32
    assert configure_ternary_training(model, accum_threshold=8, e_accum_threshold=16) == 8
    assert {(m.accum_threshold, m.e_accum_threshold) for m in (model[0], model[1][0])} == {(8, 16)}
    with pytest.raises(ValueError, match=r"1\.\.127"):
        configure_ternary_training(model, accum_threshold=128)


def test_threshold_beyond_the_accumulators_is_refused() -> None:
    model = nn.Sequential(TernaryLinear(4, 4), TernaryLinear(8, 4, vote_bits=4))
    with pytest.raises(ValueError, match="1: accumulators of 4 bits end at 7"):
        configure_ternary_training(model)
    assert configure_ternary_training(model, accum_threshold=5) == 5
