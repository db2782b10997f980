"""The kernels that training and generation launch are among those that are compiled for GPUs.

The lane of the CPU is replaced by one for CUDA whose kernels only take note of the call. Memory for
results is zeroed, since they write nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pytest
import torch
from tilelang_variants import Variant, covering, every_variant

from arb_ternary.backends.select import reset_backends, use_backend
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_text.models.generate import generate
from arb_ternary_tilelang import casting, flipping, lookups, products, storage
from arb_ternary_tilelang.lane import Lane
from arb_ternary_train.loading import load_config
from arb_ternary_train.progress import Silent
from arb_ternary_train.runner import RunRequest, train

Launch = tuple[Callable[..., Any], tuple[object, ...]]

CONFIG = """
name: launched
seed: 5
data: {{name: text, path: {text}, tokenizer: bytes}}
model: {{name: decoder, width: 32, layers: 1, heads: 2, feed_forward: 48, max_length: 16,
         group_size: 32, {model}}}
optimizer: {{{optimizer}}}
checkpoint: {{every: 1000, keep: 1}}
phases:
  - {{name: standard, steps: 2, batch_size: {batch}, block_size: 8, eval_every: 1000}}
"""
SCALED = "name: scaled_votes, lr: 0.5, exponent_rate: 0.5"
SIGNS = "name: sign_votes, accum_threshold: 3, e_accum_threshold: 4, leak: 1"
#: Options of the model and of the optimizer, and sequences of a batch.
TRAINED = {
    "float gradients": ("gradients: float", SCALED, 2),
    "int8 gradients": ("gradients: int8", SCALED, 2),
    "int8 gradients, many rows": ("gradients: int8", SCALED, 16),
    "float activations": ("activations: float", SCALED, 2),
    "signs": ("gradients: int8", SIGNS, 2),
    "signs of float gradients": ("gradients: float", SIGNS, 16),
    "frozen exponents": (
        "gradients: int8, scale_rule: frozen, embedding_scale_rule: frozen",
        "name: scaled_votes, lr: 0.5, carry: false",
        2,
    ),
    "votes of 4 bits": ("gradients: int8, vote_bits: 4", SCALED, 2),
    "correlated embedding": ("gradients: int8, embedding_scale_rule: correlation", SIGNS, 2),
}


class Zeroed(ModuleType):
    """Torch, with zeros for new memory."""

    empty = staticmethod(torch.zeros)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[Launch]]:
    """The kernels that are launched, with their options."""
    found: set[Launch] = set()
    lane = Lane("cuda", "sm_90a", ModuleType("unused"), fixed=True)

    def kernel(
        _self: Lane, make: Callable[..., Any], *options: object, **_sizes: int
    ) -> Callable[..., None]:
        found.add((make, options))
        return lambda *_arguments: None

    monkeypatch.setattr(Lane, "kernel", kernel)
    for module in (casting, flipping, lookups, products, storage):
        monkeypatch.setattr(module, "lane_of", lambda _device: lane)
        monkeypatch.setattr(module, "torch", Zeroed("torch"))
    reset_backends()
    yield found
    reset_backends()


def _unknown(launched: set[Launch]) -> set[str]:
    known = {(variant.make, variant.options) for variant in every_variant()}
    return {Variant(make, options).name for make, options in launched - known}


@pytest.mark.parametrize("case", TRAINED)
def test_training_launches_kernels_that_are_compiled(
    case: str, launched: set[Launch], tmp_path: Path
) -> None:
    model, optimizer, batch = TRAINED[case]
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be " * 60)
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG.format(text=text, model=model, optimizer=optimizer, batch=batch))
    request = RunRequest(directory=tmp_path / "run", backend="tilelang", reporter=Silent)
    train(load_config(config).config, request)
    kernels = {make.__name__ for make, _options in launched}
    assert {"pack", "lookup", "product", "cast", "flip_trits"} <= kernels
    assert _unknown(launched) == set()


@pytest.mark.parametrize("activations", ["int8", "float"])
@pytest.mark.parametrize("autocast", [False, True])
def test_generation_launches_kernels_that_are_compiled(
    activations: Literal["int8", "float"], autocast: bool, launched: set[Launch]
) -> None:
    with use_backend("tilelang"), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        config = DecoderConfig(
            width=64, layers=1, heads=2, feed_forward=2048, max_length=32, activations=activations
        )
        model = Decoder(config, 64).eval()
        ids = list(generate(model, range(20), max_new_tokens=3, temperature=0.0))
    assert len(ids) == 3
    kernels = {make.__name__ for make, _options in launched}
    if activations == "int8":
        assert {"quantize_rows", "gemv"} <= kernels
    assert "product" in kernels
    assert any("bfloat16" in options for _make, options in launched) == autocast
    assert _unknown(launched) == set()


def test_each_family_of_kernels_is_compiled() -> None:
    every = every_variant()
    chosen = covering()
    assert set(chosen) <= set(every)
    assert len(set(every)) == len(every)

    # Each value of each option that is no number is compiled with each kernel.
    def values(variants: tuple[Variant, ...]) -> set[tuple[str, int, object]]:
        return {
            (variant.make.__name__, place, option)
            for variant in variants
            for place, option in enumerate(variant.options)
            if isinstance(option, str | bool)
        }

    assert values(chosen) == values(every)
