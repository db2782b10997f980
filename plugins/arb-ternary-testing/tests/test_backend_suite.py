"""Run the suite that every backend must pass on the torch backend."""

from __future__ import annotations

import pytest
import torch

from arb_ternary.backends import reference
from arb_ternary.backends.protocol import KernelBackend
from arb_ternary_testing import BackendSuite


class TestTorchBackend(BackendSuite):
    def make_backend(self) -> KernelBackend:
        return reference.build()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device")
class TestTorchBackendOnGpu(TestTorchBackend):
    device = "cuda"
