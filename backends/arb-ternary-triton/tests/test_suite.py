"""The kit's suite: in Triton's interpreter on the CPU, and on a GPU where there is one."""

from __future__ import annotations

import pytest
import torch

from arb_ternary_testing import BackendSuite

if not torch.cuda.is_available():

    @pytest.mark.interpreted
    @pytest.mark.sampled
    class TestInterpreted(BackendSuite):
        component = "triton"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA or ROCm device")
class TestOnGpu(BackendSuite):
    component = "triton"
    device = "cuda"
