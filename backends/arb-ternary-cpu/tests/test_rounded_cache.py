"""Steps of the native decoder over keys and values kept as int8 and in bfloat16, beside the
modules, and beside steps over floats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from arb_ternary.backends.reference import quantize_rows
from arb_ternary.backends.select import use_backend
from arb_ternary_cpu.backend import build
from arb_ternary_cpu.isa import usable_isas
from arb_ternary_text.models import native_decode
from arb_ternary_text.models.cache import CacheNumbers
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_text.models.generate import generate

# For each instruction set.
pytestmark = pytest.mark.sampled("taken")

VOCABULARY = 45
#: Kinds of heads; features of a head that are no multiple of 16, or fewer; a window that slides.
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"kv_heads": 1, "head_dim": 24, "query_key_norm": True},
    {"head_dim": 6, "sliding_window": 5, "tie_embeddings": True},
    {"heads": 2, "head_dim": 160, "kv_heads": 1, "float_parts": ("embedding", "head", "norms")},
)


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(params=usable_isas())
def taken(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each step was the kernel's, of every instruction set in turn."""
    prepare = build(request.param).kernels["text.decode_step"]
    steps: list[bool] = []

    def counting(plan: Any) -> Callable[..., Tensor | None]:
        step: Callable[..., Tensor | None] = prepare(plan)

        def one(*arguments: Any) -> Tensor | None:
            result = step(*arguments)
            steps.append(result is not None)
            return result

        return one

    monkeypatch.setattr(
        native_decode,
        "get_backend",
        lambda _: SimpleNamespace(kernels={"text.decode_step": counting}),
    )
    return steps


def decoder(dtype: torch.dtype = torch.float32, **options: Any) -> Decoder:
    torch.manual_seed(len(options))
    base: dict[str, Any] = {"width": 64, "layers": 2, "heads": 4, "max_length": 200}
    with use_backend("cpu"):
        model = Decoder(DecoderConfig(**(base | options)), VOCABULARY)
    model.set_dtype(dtype)
    return model.eval()


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(
        0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(length)
    )


def decoded(model: Decoder, ids: Tensor, prompt: int, numbers: CacheNumbers = "int8") -> Tensor:
    """Logits ``[B, S - prompt, V]`` of one token after another, behind a prompt that is read at
    once.
    """
    cache = model.new_cache(ids.size(0), numbers)
    if prompt:
        model(ids[:, :prompt], cache)
    return torch.cat([model(token, cache) for token in ids[:, prompt:].split(1, dim=1)], dim=1)


def distances(steps: Tensor, expected: Tensor) -> Tensor:
    """Of each position, relative to its largest logit."""
    largest = expected.float().abs().amax(dim=-1)
    return ((steps.float() - expected.float()).abs().amax(dim=-1) / largest).flatten()


@pytest.mark.parametrize("options", VARIANTS, ids=lambda options: "-".join(options) or "default")
@pytest.mark.parametrize(
    ("prompt", "length"), [(4, 14), (60, 70)], ids=["short", "beyond the first room"]
)
@pytest.mark.parametrize("numbers", ["int8", "bfloat16"])
def test_a_step_gives_the_logits_of_the_modules(
    taken: list[bool],
    options: dict[str, Any],
    prompt: int,
    length: int,
    numbers: CacheNumbers,
    by_modules: Callable[[Any], Any],
) -> None:
    model = decoder(**options)
    ids = tokens(2, length)
    steps = decoded(model, ids, prompt, numbers)
    expected = decoded(by_modules(model), ids, prompt, numbers)
    assert taken == [True] * 10
    relative = distances(steps, expected)
    # As of float caches: a number that lies next to the middle of two integers, or of two bfloat16,
    # may be rounded the other way.
    rounding = 2 * 6 * 2 * 256**1.5 * torch.finfo(torch.float32).eps
    assert relative.amax() < 8 / 127
    assert relative.quantile(0.75) < rounding
    # It makes a difference.
    if numbers == "int8":
        floats = decoded(model, ids, prompt, "float")
        assert distances(expected, floats).median() > rounding
    else:
        floats = decoded(by_modules(model), ids, prompt, "float")
        assert distances(expected, floats).amax() > rounding


@pytest.mark.parametrize("options", VARIANTS, ids=lambda options: "-".join(options) or "default")
def test_the_bytes_that_a_step_keeps_are_those_of_quantize_rows(
    taken: list[bool], options: dict[str, Any]
) -> None:
    # What is kept in the first layer does not depend on what attention reads.
    model = decoder(**(options | {"layers": 1, "sliding_window": None}))
    ids = tokens(3, 9)
    floats = model.new_cache(3)
    rounded = model.new_cache(3, "int8")
    for cache in (floats, rounded):
        for token in ids.split(1, dim=1):
            model(token, cache)
    assert taken == [True] * 18
    codes = rounded.layers[0].stored[:2]
    scales = rounded.layers[0].stored[2:]
    for stored, code, scale in zip(floats.layers[0].stored, codes, scales, strict=True):
        wanted, wanted_scale = quantize_rows(stored[:, :, :9].flatten(0, 2))
        assert torch.equal(code[:, :, :9].flatten(0, 2), wanted)
        assert torch.equal(scale[:, :, :9].flatten(), wanted_scale)
        assert not code[:, :, 9:].any()
        assert not scale[:, :, 9:].any()


@pytest.mark.parametrize("options", VARIANTS, ids=lambda options: "-".join(options) or "default")
def test_the_bytes_that_a_step_keeps_in_bfloat16_are_rounded_floats(
    taken: list[bool], options: dict[str, Any]
) -> None:
    # What is kept in the first layer does not depend on what attention reads.
    model = decoder(**(options | {"layers": 1, "sliding_window": None}))
    ids = tokens(3, 9)
    floats = model.new_cache(3)
    rounded = model.new_cache(3, "bfloat16")
    for cache in (floats, rounded):
        for token in ids.split(1, dim=1):
            model(token, cache)
    assert taken == [True] * 18
    for whole, kept in zip(floats.layers[0].stored, rounded.layers[0].stored, strict=True):
        assert kept.dtype == torch.bfloat16
        assert torch.equal(whole.to(torch.bfloat16), kept)


def test_bfloat16_is_as_close_to_float32_as_the_modules(
    taken: list[bool], by_modules: Callable[[Any], Any]
) -> None:
    model = decoder(torch.bfloat16)
    ids = tokens(2, 16)
    steps = decoded(model, ids, 4)
    modules = decoded(by_modules(model), ids, 4)
    model.set_dtype(torch.float32)
    exact = decoded(by_modules(model), ids, 4)
    assert taken == [True] * 12
    assert steps.dtype == torch.bfloat16
    assert distances(steps, exact).mean() < 1.5 * distances(modules, exact).mean()


def test_neither_threads_nor_other_sequences_change_a_bit(taken: list[bool]) -> None:
    # large enough for several threads
    model = decoder(width=512, feed_forward=1400, layers=3, heads=8, kv_heads=4)
    ids = tokens(3, 6)
    before = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(decoded(model, ids, 0))
        results.append(torch.cat([decoded(model, row, 0) for row in ids.split(1)]))
    finally:
        torch.set_num_threads(before)
    assert all(taken)
    assert len(taken) == 6 * 6
    assert all(torch.equal(results[0], other) for other in results)


def test_a_cache_that_was_saved_is_continued(taken: list[bool]) -> None:
    model = decoder(sliding_window=6)
    ids = tokens(2, 24)
    whole = decoded(model, ids, 0)
    cache = model.new_cache(2, "int8")
    later = model.new_cache(2, "int8")
    for token in ids[:, :15].split(1, dim=1):
        model(token, cache)
    later.load_state_dict(cache.state_dict())
    rest = torch.cat([model(token, later) for token in ids[:, 15:].split(1, dim=1)], dim=1)
    assert all(taken)
    assert torch.equal(rest, whole[:, 15:])


def test_a_greedy_text_is_drawn_by_the_kernel(
    taken: list[bool], by_modules: Callable[[Any], Any]
) -> None:
    model = decoder(kv_heads=2)
    text = list(generate(model, [1, 2, 3], max_new_tokens=20, temperature=0.0, cache="int8"))
    assert taken == [True] * 19
    assert text == list(
        generate(by_modules(model), [1, 2, 3], max_new_tokens=20, temperature=0.0, cache="int8")
    )


@pytest.mark.parametrize("broken", ["codes", "scales", "shape", "stride", "too few"])
def test_a_rounded_cache_of_another_form_is_refused(broken: str) -> None:
    model = decoder()
    plan, _ = native_decode.plan_of(model)
    step = build(None).kernels["text.decode_step"](plan)
    codes = (1, 4, 8, 16)
    scales = (1, 4, 8)
    layer = [torch.zeros(codes, dtype=torch.int8) for _ in range(2)] + [
        torch.zeros(scales) for _ in range(2)
    ]
    cache = [tensor.clone() for tensor in layer * 2]
    assert step(torch.tensor([1]), cache, 0, 0, 0.0) is not None
    if broken == "too few":
        del cache[6:]
    else:
        place, tensor = {
            "codes": (5, torch.zeros(codes, dtype=torch.uint8)),
            "scales": (7, torch.zeros(scales, dtype=torch.float16)),
            "shape": (6, torch.zeros(1, 4, 9)),
            "stride": (6, torch.zeros(1, 8, 4).transpose(1, 2)),
        }[broken]
        cache[place] = tensor
    assert step(torch.tensor([1]), cache, 0, 0, 0.0) is None
