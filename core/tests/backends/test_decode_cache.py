"""The decode cache of the torch backend changes no bit and keeps its budget."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from arb_ternary import TernaryLinear
from arb_ternary.backends import reference
from arb_ternary.backends.decode_cache import DecodeCache
from arb_ternary.backends.select import use_backend
from arb_ternary.errors import UsageProblem


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[DecodeCache]:
    """An empty cache of the backend that has one."""
    empty = DecodeCache()
    monkeypatch.setattr(reference, "CACHE", empty)
    with use_backend("torch"):
        yield empty


def test_a_changed_weight_is_decoded_again(cache: DecodeCache) -> None:
    layer = TernaryLinear(16, 4)
    x = torch.randn(2, 16)
    with torch.no_grad():
        layer(x)
        assert cache.nbytes == 16 * 4 + 4 * 4
        layer.set_trits(-layer.trits())
        assert torch.equal(layer(x), -TernaryLinear.forward(_negated(layer), x))
        layer.exponent += 1
        doubled = layer(x)
        layer.exponent -= 1
        assert torch.equal(doubled, 2 * layer(x))


def _negated(layer: TernaryLinear) -> TernaryLinear:
    other = TernaryLinear(16, 4)
    other.set_trits(-layer.trits(), layer.exponent)
    return other


def test_the_budget_is_kept(monkeypatch: pytest.MonkeyPatch, cache: DecodeCache) -> None:
    layers = [TernaryLinear(640, 640, group_size="row") for _ in range(6)]
    x = torch.randn(1, 640)
    monkeypatch.setenv("ARB_TERNARY_DECODE_CACHE_MB", "1")
    for layer in layers:
        layer(x)
    assert cache.nbytes == 2 * (640 * 640 + 640 * 4)


def test_a_budget_of_zero_turns_the_cache_off(
    monkeypatch: pytest.MonkeyPatch, cache: DecodeCache
) -> None:
    monkeypatch.setenv("ARB_TERNARY_DECODE_CACHE_MB", "0")
    TernaryLinear(64, 64)(torch.randn(1, 64))
    assert cache.nbytes == 0


def test_a_budget_that_is_no_number_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARB_TERNARY_DECODE_CACHE_MB", "plenty")
    with pytest.raises(UsageProblem, match="ARB_TERNARY_DECODE_CACHE_MB: 'plenty'"):
        TernaryLinear(8, 8)(torch.randn(1, 8))


def test_a_dead_weight_frees_its_entry(cache: DecodeCache) -> None:
    layer = TernaryLinear(256, 256)
    layer(torch.randn(1, 256))
    held = cache.nbytes
    assert held > 0
    del layer
    other = TernaryLinear(8, 8)
    other(torch.randn(1, 8))
    assert cache.nbytes == 8 * 8 + 8 * 4


def test_inference_tensors_are_decoded_every_time(cache: DecodeCache) -> None:
    with torch.inference_mode():
        layer = TernaryLinear(16, 4)
        y = layer(torch.ones(1, 16))
        layer.set_trits(-layer.trits())
        assert torch.equal(layer(torch.ones(1, 16)), -y)
    assert cache.nbytes == 0
