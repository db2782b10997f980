"""Ternary modules under autocast."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from arb_ternary import TernaryLinear, use_backend


@pytest.mark.parametrize("activations", ["int8", "float"])
def test_kernels_are_not_rounded_by_autocast(activations: Any) -> None:
    """Autocast gives the module its input in bfloat16; products of integers stay exact."""
    with use_backend("torch"):
        torch.manual_seed(0)
        plain = TernaryLinear(96, 32, activations=activations)
        cast = TernaryLinear(96, 32, activations=activations)
        cast.load_state_dict(plain.state_dict())
        x = torch.randn(50, 96)
        y = plain(x.bfloat16())
        y.float().square().sum().backward()
        with torch.autocast("cpu", torch.bfloat16):
            y_cast = cast(x)
            y_cast.float().square().sum().backward()
    assert y_cast.dtype == torch.bfloat16
    assert torch.equal(y_cast, y)
    assert torch.equal(cast.votes, plain.votes)
    assert cast.votes.count_nonzero() > 0
