"""Micro-batches with known gradients, for all tests of this plugin."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

SHAPES = ((3, 2), (4,))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def parameters() -> Callable[..., list[torch.nn.Parameter]]:
    """Makes the same float64 parameters every time."""

    def make(dtype: torch.dtype = torch.float64) -> list[torch.nn.Parameter]:
        generator = torch.Generator().manual_seed(5)
        return [
            torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype))
            for shape in SHAPES
        ]

    return make


@pytest.fixture
def backward() -> Callable[[Sequence[Tensor], int, float], None]:
    """Run a backward whose gradient has noise of a given size and seed."""

    def run(parameters: Sequence[Tensor], seed: int, size: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        loss = torch.zeros((), dtype=parameters[0].dtype)
        for parameter in parameters:
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(
                parameter.dtype
            )
            loss = loss + (parameter * (0.2 + size * noise)).sum()
        loss.backward()

    return run
