"""Caches of keys and values, as floats, in bfloat16, and rounded to int8."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from arb_ternary.errors import UsageProblem
from arb_ternary_text.models.cache import (
    Bfloat16LayerCache,
    CacheNumbers,
    Int8LayerCache,
    KeyValueCache,
    LayerCache,
    Span,
)
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_text.models.generate import generate

Decoders = Callable[..., Decoder]
Tokens = Callable[..., Tensor]
Rounding = Callable[[Decoder, int], float]

DECOUPLED = {
    "attention": "decoupled",
    "sem_dim": 3,
    "geo_dim": 4,
    "kv_heads": 2,
    "null_key_value": True,
    "attention_gate": True,
}
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"kv_heads": 2},
    {"sliding_window": 5},
    {"query_key_norm": True},
    DECOUPLED,
)


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))
    return (drawn * torch.logspace(-6, 6, shape[2])[:, None]).to(dtype)


def in_whole(model: Decoder, ids: Tensor) -> Tensor:
    logits: Tensor = model(ids, model.new_cache(ids.size(0), "int8"))
    return logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_each_position_and_head_has_its_own_scale(dtype: torch.dtype) -> None:
    keys = rows(2, 3, 6, 10, dtype=dtype)
    values = rows(2, 3, 6, 7, dtype=dtype)
    values[1, 2, 4] = 0.0
    cache = Int8LayerCache()
    cache.capacity = 9
    seen = cache.extend(keys, values, Span(0, 0))
    for given, read, codes, scales in zip(
        (keys, values), seen, cache.stored[:2], cache.stored[2:], strict=True
    ):
        x = given.to(torch.float32).numpy()
        largest = np.abs(x).max(axis=-1, keepdims=True)
        scale = largest / np.float32(127)
        wanted = np.rint(np.divide(x, scale, out=np.zeros_like(x), where=scale != 0)).astype(
            np.int8
        )
        np.testing.assert_array_equal(scales[:, :, :6].numpy(), scale[..., 0])
        np.testing.assert_array_equal(codes[:, :, :6].numpy(), wanted)
        assert not codes[:, :, 6:].any()
        assert read.dtype == dtype
        assert torch.equal(read, torch.from_numpy(wanted * scale).to(dtype))


def test_rows_that_are_not_finite_stay_so() -> None:
    keys = rows(1, 1, 2, 4)
    keys[0, 0, 1, 2] = torch.nan
    cache = Int8LayerCache()
    cache.capacity = 2
    read, _ = cache.extend(keys, rows(1, 1, 2, 4), Span(0, 0))
    assert read[0, 0].isfinite().all(dim=-1).tolist() == [True, False]


@pytest.mark.parametrize("options", VARIANTS, ids=lambda options: next(iter(options), "default"))
@pytest.mark.parametrize("cuts", [[1] * 15, [4, 1, 6, 1, 3]], ids=["token by token", "in pieces"])
def test_a_prompt_in_pieces_gives_the_same_logits_and_cache(
    float_decoder: Decoders,
    tokens: Tokens,
    rounding: Rounding,
    options: dict[str, Any],
    cuts: list[int],
) -> None:
    model = float_decoder(**options)
    ids = tokens(2, 15)
    cache = model.new_cache(2, "int8")
    whole = model.new_cache(2, "int8")
    pieces = torch.cat([model(piece, cache) for piece in ids.split(cuts, dim=1)], dim=1)
    expected = model(ids, whole)
    torch.testing.assert_close(pieces, expected, rtol=0, atol=4 * rounding(model, 15))
    assert not torch.allclose(expected, model(ids), rtol=0, atol=1e-3)  # it is rounded
    torch.testing.assert_close(expected, model(ids), rtol=0, atol=0.3)
    kept = model.sliding_window or 16
    for mine, other in zip(cache.state_dict()["layers"], whole.state_dict()["layers"], strict=True):
        assert all(
            torch.equal(*(each[:, :, 1 - kept :] for each in pair))
            for pair in zip(mine, other, strict=True)
        )


def test_a_window_over_an_int8_cache_has_bounded_memory(
    float_decoder: Decoders, tokens: Tokens, rounding: Rounding
) -> None:
    model = float_decoder(sliding_window=5, max_length=8)
    ids = tokens(1, 40)
    cache = model.new_cache(1, "int8")
    one_by_one = torch.cat([model(token, cache) for token in ids.split(1, dim=1)], dim=1)
    torch.testing.assert_close(one_by_one, in_whole(model, ids), rtol=0, atol=rounding(model, 40))
    assert all(stored.size(2) == 10 for layer in cache.layers for stored in layer.stored)


def test_an_int8_cache_is_saved_and_continued(float_decoder: Decoders, tokens: Tokens) -> None:
    model = float_decoder(sliding_window=6)
    ids = tokens(2, 24)
    cache = model.new_cache(2, "int8")
    later = model.new_cache(2, "int8")
    model(ids[:, :15], cache)
    later.load_state_dict(cache.state_dict())
    assert torch.equal(model(ids[:, 15:], later), model(ids[:, 15:], cache))


@pytest.mark.parametrize(
    ("numbers", "dtype", "bytes_a_head"),
    [
        ("float", torch.float32, 4 * (4 + 4)),
        ("float", torch.bfloat16, 2 * (4 + 4)),
        ("bfloat16", torch.float32, 2 * (4 + 4)),
        ("bfloat16", torch.bfloat16, 2 * (4 + 4)),
        ("int8", torch.bfloat16, 4 + 4 + 8),
    ],
)
def test_bytes_per_token(
    float_decoder: Decoders,
    tokens: Tokens,
    numbers: CacheNumbers,
    dtype: torch.dtype,
    bytes_a_head: int,
) -> None:
    model = float_decoder(kv_heads=2)
    model.set_dtype(dtype)
    cache = model.new_cache(3, numbers)
    assert cache.bytes_per_token() == 0
    model(tokens(3, 5), cache)
    assert cache.bytes_per_token() == 2 * 2 * bytes_a_head  # two layers of two key heads
    slots = cache.layers[0].stored[0].size(2)
    held = sum(stored.nbytes for layer in cache.layers for stored in layer.stored)
    assert held == 3 * slots * cache.bytes_per_token()


def test_an_int8_cache_has_no_gradient(float_decoder: Decoders, tokens: Tokens) -> None:
    model = float_decoder()
    with torch.enable_grad(), pytest.raises(UsageProblem, match="int8 have no gradient"):
        model(tokens(1, 3), model.new_cache(1, "int8"))


def test_an_unknown_format_is_refused(float_decoder: Decoders) -> None:
    with pytest.raises(UsageProblem, match="'int4' is not one of float, bfloat16, int8"):
        float_decoder().new_cache(1, "int4")  # type: ignore[arg-type]
    with pytest.raises(
        UsageProblem,
        match="Decoder keeps keys and values as float or bfloat16 or int8, not as 'int4'",
    ):
        generate(float_decoder(), [1], max_new_tokens=1, cache="int4")  # type: ignore[arg-type]


def test_generation_with_an_int8_cache_beyond_the_context(
    float_decoder: Decoders,
) -> None:
    model = float_decoder(max_length=8)
    context = [1, 2, 3]
    expected = []
    for _ in range(20):
        expected.append(int(in_whole(model, torch.tensor([context]))[0, -1].argmax()))
        context.append(expected[-1])
        if len(context) > 8:
            context = context[-4:]
    assert (
        list(generate(model, [1, 2, 3], max_new_tokens=20, temperature=0.0, cache="int8"))
        == expected
    )


def test_a_model_without_cache_formats_refuses_int8() -> None:
    class Plain:
        sliding_window = None
        max_length = 9
        vocabulary_size = 3

        def new_cache(self, batch_size: int) -> KeyValueCache:
            return KeyValueCache(0, batch_size, window=None, limit=9)

        def __call__(self, tokens_BS: Tensor, cache: KeyValueCache) -> Tensor:
            return torch.zeros(*tokens_BS.shape, 3)

    assert list(generate(Plain(), [1], max_new_tokens=2, temperature=0.0)) == [0, 0]
    with pytest.raises(UsageProblem, match="Plain keeps keys and values as float, not as 'int8'"):
        generate(Plain(), [1], max_new_tokens=2, cache="int8")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bfloat16_rounds_to_the_nearest_even_number(dtype: torch.dtype) -> None:
    keys = rows(2, 3, 6, 10)
    # Halfway between two numbers: to the even one, downwards and upwards.
    keys[0, 0, 0, :2] = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8])
    cache = Bfloat16LayerCache()
    cache.capacity = 9
    seen, _ = cache.extend(keys.to(dtype), rows(2, 3, 6, 7).to(dtype), Span(0, 0))
    bits = keys.numpy().view(np.uint32)
    wanted = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    stored = cache.stored[0][:, :, :6].contiguous().view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(stored, wanted)
    assert seen.dtype == dtype
    np.testing.assert_array_equal(
        seen.to(torch.float32).numpy(), (wanted << 16).astype(np.uint32).view(np.float32)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_kept_as_they_are(dtype: torch.dtype) -> None:
    keys = torch.randn(1, 2, 3, 4).to(dtype)
    cache = Bfloat16LayerCache()
    cache.capacity = 3
    seen, _ = cache.extend(keys, keys, Span(0, 0))
    assert seen.dtype == cache.stored[0].dtype == dtype
    assert torch.equal(seen, keys)


def test_generation_keeps_keys_and_values_in_bfloat16(
    float_decoder: Decoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    new_cache = Decoder.new_cache
    monkeypatch.setattr(
        Decoder, "new_cache", lambda *asked: made.append(asked[-1]) or new_cache(*asked)
    )
    model = float_decoder()
    context = [1, 2, 3]
    for _ in range(20):
        cache = model.new_cache(1, "bfloat16")
        context.append(int(model(torch.tensor([context]), cache)[0, -1].argmax()))
    made.clear()
    assert list(generate(model, [1, 2, 3], max_new_tokens=20, temperature=0.0)) == context[3:]
    assert made == ["bfloat16"]


def test_a_float_cache_returns_its_input() -> None:
    cache = LayerCache()
    cache.capacity = 4
    keys = rows(1, 2, 3, 5)
    values = rows(1, 2, 3, 4)
    assert all(map(torch.equal, cache.extend(keys, values, Span(0, 0)), (keys, values)))
