"""The kit's suite on a GPU."""

from __future__ import annotations

import pytest
import torch

from arb_ternary_testing import BackendSuite
from arb_ternary_tilelang.probe import probe


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.version.cuda is None, reason="no CUDA device"
)
class TestCuda(BackendSuite):
    """Every op, on the current device."""

    component = "tilelang"
    device = "cuda"

    def test_the_probe_finds_the_device(self) -> None:
        assert probe("cuda").usable
