from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from arb_ternary_text.models import attend as module
from arb_ternary_text.models.attend import attend, whole_matrix_length
from arb_ternary_train.exact_arithmetic import exact_arithmetic


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    known: dict[str, Any] = {"architecture": "x86_64"}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: known, raising=False)
    module._bfloat16_length.cache_clear()
    yield known
    module._bfloat16_length.cache_clear()


@pytest.mark.parametrize(
    ("units", "length"),
    [({}, 0), ({"avx512_bf16": True}, 256), ({"avx512_bf16": True, "amx_bf16": True}, 512)],
)
def test_bfloat16_uses_whole_matrices_if_the_cpu_has_bfloat16(
    units: dict[str, bool], length: int, processor: dict[str, Any]
) -> None:
    processor.update(units)
    assert whole_matrix_length(torch.bfloat16) == length


@pytest.mark.parametrize("known", [{}, {"architecture": "aarch64"}])
def test_an_unknown_processor_uses_the_default_length(
    known: dict[str, Any], processor: Any
) -> None:
    processor.clear()
    processor.update(known)
    assert whole_matrix_length(torch.bfloat16) == 256


def test_float32_uses_whole_matrices_in_exact_runs_only() -> None:
    assert whole_matrix_length(torch.float32) == 0
    with exact_arithmetic():
        assert whole_matrix_length(torch.float32) == whole_matrix_length(torch.bfloat16) == 256


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-6)])
@pytest.mark.parametrize("exact", [False, True])
def test_either_way_gives_softmax_attention_and_its_gradients(
    dtype: torch.dtype, bound: float, exact: bool
) -> None:
    generator = torch.Generator().manual_seed(1)
    query, key, value, above = (
        torch.randn(2, 2, 40, 8, generator=generator).to(dtype) for _ in range(4)
    )
    given = [x.clone().requires_grad_() for x in (query, key, value)]
    with exact_arithmetic(exact):
        seen = attend(*given, mask=None, is_causal=True)
    seen.backward(above)
    wide = [x.double().requires_grad_() for x in (query, key, value)]
    scores = (wide[0] @ wide[1].mT / math.sqrt(8)).masked_fill(
        torch.ones(40, 40).triu(1).bool(), -math.inf
    )
    wanted = scores.softmax(-1) @ wide[2]
    wanted.backward(above.double())
    assert (seen.detach() - wanted.detach()).norm() < bound * wanted.detach().norm()
    for one, other in zip(given, wide, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert (one.grad - other.grad).norm() < bound * other.grad.norm()
