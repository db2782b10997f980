"""The trunk's hidden states: a trunk that learns is refused."""

from __future__ import annotations

import pytest
from torch import nn

from arb_ternary.errors import UsageProblem
from arb_ternary.ternary.linear import TernaryLinear
from arb_ternary_progressive.trunk import frozen_version


@pytest.mark.parametrize("learner", ["none", "float", "ternary"])
def test_a_trunk_that_learns_is_refused(learner: str) -> None:
    trunk = nn.Sequential(nn.Linear(4, 4), TernaryLinear(4, 4)).requires_grad_(False)
    trunk[1].frozen = learner != "ternary"  # type: ignore[assignment]
    trunk[0].requires_grad_(learner == "float")
    if learner == "none":
        assert frozen_version(trunk) == frozen_version(trunk)
        return
    with pytest.raises(UsageProblem, match="can learn") as refused:
        frozen_version(trunk)
    assert "streams" in refused.value.hint
