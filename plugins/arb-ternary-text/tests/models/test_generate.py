from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from arb_ternary.errors import UsageProblem
from arb_ternary_text.models.cache import CacheNumbers, KeyValueCache
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_text.models.generate import (
    CachedReader,
    generate,
    next_token_probabilities,
    streamed_text,
)

Decoders = Callable[..., Decoder]
Tokens = Callable[..., torch.Tensor]

FIVE = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15], dtype=torch.float64)


class Constant:
    """A model that always predicts the same distribution, and counts its calls."""

    sliding_window = None

    def __init__(self, probabilities: torch.Tensor, max_length: int = 1000) -> None:
        self.logits = probabilities.log()
        self.vocabulary_size = len(probabilities)
        self.max_length = max_length
        self.calls = 0

    def new_cache(self, batch_size: int) -> KeyValueCache:
        return KeyValueCache(1, batch_size, window=None, limit=self.max_length)

    def __call__(self, tokens_BS: torch.Tensor, cache: KeyValueCache) -> torch.Tensor:
        assert not torch.is_grad_enabled()
        self.calls += 1
        cache.reserve(*tokens_BS.shape)
        cache.advance(tokens_BS.size(1))
        return self.logits.expand(*tokens_BS.shape, -1)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.1, 0.4, 0.05, 0.3, 0.15]),
        ({"temperature": 0.0}, [0, 1, 0, 0, 0]),
        ({"top_k": 1}, [0, 1, 0, 0, 0]),
        ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7, 0]),
        ({"top_k": 99}, [0.1, 0.4, 0.05, 0.3, 0.15]),
        ({"top_p": 0.3}, [0, 1, 0, 0, 0]),
        ({"top_p": 0.6}, [0, 4 / 7, 0, 3 / 7, 0]),
        ({"top_p": 0.8}, [0, 0.4 / 0.85, 0, 0.3 / 0.85, 0.15 / 0.85]),
        ({"top_p": 1.0}, [0.1, 0.4, 0.05, 0.3, 0.15]),
        # Of the two tokens kept by top_k, the more likely has 4/7, which is more than top_p.
        ({"top_k": 2, "top_p": 0.5}, [0, 1, 0, 0, 0]),
        ({"top_k": 2, "top_p": 0.6}, [0, 4 / 7, 0, 3 / 7, 0]),
        ({"temperature": 0.5, "top_k": 2}, [0, 16 / 25, 0, 9 / 25, 0]),
    ],
)
def test_the_distribution_has_its_closed_form(
    options: dict[str, float], expected: list[float]
) -> None:
    probabilities = next_token_probabilities(FIVE.log() + 3.0, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(
        probabilities, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-15
    )


def test_of_equal_logits_the_lower_ids_are_kept() -> None:
    assert next_token_probabilities(torch.zeros(40), top_k=3).nonzero().flatten().tolist() == [
        0,
        1,
        2,
    ]
    assert next_token_probabilities(torch.zeros(40), temperature=0.0).argmax() == 0


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=30), st.integers(1, 35))
def test_top_k_keeps_what_a_sort_of_all_logits_puts_first(levels: list[int], top_k: int) -> None:
    kept = (
        next_token_probabilities(torch.tensor(levels, dtype=torch.float32), top_k=top_k)
        .nonzero()
        .flatten()
    )
    first = sorted(range(len(levels)), key=lambda token: (-levels[token], token))[:top_k]
    assert kept.tolist() == sorted(first)


@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"top_p": 0.5}])
def test_nan_logits_give_no_probability(options: dict[str, float]) -> None:
    logits = torch.tensor([0.0, math.nan, 1.0, 2.0])
    assert next_token_probabilities(logits, **options).isnan().any()  # type: ignore[arg-type]


@given(
    st.lists(st.floats(-60, 60), min_size=1, max_size=20),
    st.floats(0.01, 10),
    st.floats(0.01, 1),
    st.integers(1, 25),
)
def test_the_nucleus_is_the_smallest_that_reaches_top_p(
    logits: list[float], temperature: float, top_p: float, top_k: int
) -> None:
    full = next_token_probabilities(torch.tensor(logits), temperature, top_k)
    kept = next_token_probabilities(torch.tensor(logits), temperature, top_k, top_p)
    chosen = full[kept > 0]
    assert math.isclose(float(kept.sum()), 1.0, rel_tol=1e-12)
    assert (full > 0).sum() <= top_k
    assert chosen.sum() >= top_p - 1e-12
    assert chosen.sum() - chosen.min() < top_p + 1e-12


@pytest.mark.parametrize("spread", [0.0, 0.5, 3.0, 20.0])
@pytest.mark.parametrize("top_p", [0.1, 0.9, 1.0])
def test_the_nucleus_of_a_large_vocabulary(spread: float, top_p: float) -> None:
    # From one token to nearly all of them; many are equally likely.
    logits = np.round(np.random.default_rng(5).normal(size=30_000) * spread, 2)
    ranked = np.lexsort((np.arange(logits.size), -logits))
    likely = np.exp(logits - logits.max())
    likely = (likely / likely.sum())[ranked]
    kept = np.where(likely.cumsum() - likely < top_p - 1e-13, likely, 0)
    expected = np.zeros_like(logits)
    expected[ranked] = kept / kept.sum()
    found = next_token_probabilities(torch.from_numpy(logits), top_p=top_p).numpy()
    # Sums that round differently may place the border one token further.
    assert np.abs(found - expected).sum() < 3 / logits.size / top_p


@pytest.mark.parametrize("temperature", [1e-300, 1e-4])
def test_a_tiny_temperature_is_greedy_and_finite(temperature: float) -> None:
    assert next_token_probabilities(FIVE.log(), temperature).tolist() == [0, 1, 0, 0, 0]


def test_draws_follow_the_distribution() -> None:
    count = 4000
    drawn = list(generate(Constant(FIVE, 10**6), [0], max_new_tokens=count, seed=3))
    for token, probability in enumerate(FIVE.tolist()):
        # Five standard deviations of a binomial count.
        assert abs(drawn.count(token) - count * probability) < 5 * math.sqrt(
            count * probability * (1 - probability)
        )


def test_only_tokens_of_the_support_are_drawn() -> None:
    assert set(generate(Constant(FIVE), [0], max_new_tokens=300, top_k=2, seed=0)) == {1, 3}
    assert set(generate(Constant(FIVE), [0], max_new_tokens=300, top_p=0.8, seed=0)) == {1, 3, 4}
    never = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0], dtype=torch.float64)
    assert set(generate(Constant(never), [0], max_new_tokens=300, seed=0)) == {1, 3}


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_a_draw_at_either_end_is_a_possible_token(
    monkeypatch: pytest.MonkeyPatch, uniform: float
) -> None:
    never = torch.tensor([0.0, 0.2, 0.0, 0.7, 0.1, 0.0], dtype=torch.float64)
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.tensor(uniform, dtype=torch.float64))
    assert list(generate(Constant(never), [0], max_new_tokens=1, seed=0)) == [
        1 if uniform == 0 else 4
    ]


def test_a_seed_repeats_its_text_and_no_seed_does_not() -> None:
    def text(seed: int | None) -> list[int]:
        return list(generate(Constant(FIVE), [0], max_new_tokens=60, seed=seed))

    assert text(5) == text(5)
    assert text(5) != text(6)
    assert text(None) != text(None)


def test_a_stop_token_ends_the_text_and_is_not_part_of_it() -> None:
    assert list(generate(Constant(FIVE), [0], max_new_tokens=9, temperature=0.0, stop={1})) == []
    free = list(generate(Constant(FIVE), [0], max_new_tokens=60, seed=1))
    stopped = list(generate(Constant(FIVE), [0], max_new_tokens=60, seed=1, stop=[2, 4]))
    first = min(free.index(token) for token in (2, 4) if token in free)
    assert stopped == free[:first]


def test_tokens_are_streamed_with_gradients_enabled_between() -> None:
    model = Constant(FIVE)
    stream = generate(model, [0], max_new_tokens=5, seed=0)
    assert model.calls == 0
    next(stream)
    assert model.calls == 1
    assert torch.is_grad_enabled()
    assert len(list(stream)) == 4
    assert list(generate(model, [0], max_new_tokens=0)) == []


def greedy(model: Decoder, ids: list[int]) -> int:
    with torch.no_grad():
        return int(model(torch.tensor([ids]))[0, -1].argmax())


def test_greedy_text_is_the_argmax_of_full_forward_passes(float_decoder: Decoders) -> None:
    model = float_decoder()
    ids = [1, 2, 3]
    for _ in range(20):
        ids.append(greedy(model, ids))
    assert list(generate(model, [1, 2, 3], max_new_tokens=20, temperature=0.0)) == ids[3:]


@pytest.mark.parametrize("cache", ["float", "bfloat16", "int8"])
@pytest.mark.parametrize("window", [None, 8])
def test_a_reader_goes_on_where_it_was_or_from_where_it_is_rewound(
    float_decoder: Decoders, window: int | None, cache: CacheNumbers
) -> None:
    model = float_decoder(sliding_window=window)
    reader = CachedReader(model, cache=cache)

    def drawn(unread: list[int], reader: CachedReader | None) -> list[int]:
        options = {"max_new_tokens": 5, "temperature": 0.0, "cache": cache}
        return list(generate(model, unread, reader=reader, **options))

    first = drawn([1, 2, 3], reader)
    assert reader.seen == [1, 2, 3, *first[:-1]]
    text = [1, 2, 3, *first, 7]
    assert drawn(text[len(reader.seen) :], reader) == drawn(text, None)
    other = [1, 2, 3, first[0], 4, 4]
    reader.rewind(4)
    assert reader.seen == ([1, 2, 3, first[0]] if window is None else [])
    assert drawn(other[len(reader.seen) :], reader) == drawn(other, None)
    reader.rewind(0)
    assert reader.seen == []
    assert drawn([5], reader) == drawn([5], None)


def test_the_head_multiplies_only_the_last_prompt_position(
    float_decoder: Decoders, tokens: Tokens
) -> None:
    model = float_decoder()
    prompt = tokens(1, 9)
    sizes = []
    model.head.register_forward_hook(lambda _head, _inputs, logits: sizes.append(logits.numel()))
    (drawn,) = generate(model, prompt[0].tolist(), max_new_tokens=1, temperature=0.0)
    assert sizes == [model.vocabulary_size]
    assert drawn == greedy(model, prompt[0].tolist())


def test_a_long_prompt_keeps_its_latest_tokens(float_decoder: Decoders, tokens: Tokens) -> None:
    model = float_decoder(max_length=8)
    prompt = tokens(1, 21)[0].tolist()
    long, short = (
        list(generate(model, ids, max_new_tokens=6, seed=0)) for ids in (prompt, prompt[-8:])
    )
    assert long == short


def test_text_goes_on_beyond_the_context_from_its_latest_half(float_decoder: Decoders) -> None:
    model = float_decoder(max_length=8)
    context = [1, 2, 3]
    expected = []
    for _ in range(20):
        token = greedy(model, context)
        expected.append(token)
        context.append(token)
        if len(context) > 8:
            context = context[-4:]
    assert list(generate(model, [1, 2, 3], max_new_tokens=20, temperature=0.0)) == expected


def test_a_context_of_one_token_still_generates(float_decoder: Decoders) -> None:
    model = float_decoder(max_length=1)
    expected = [5]
    for _ in range(4):
        expected.append(greedy(model, expected[-1:]))
    assert list(generate(model, [3, 5], max_new_tokens=4, temperature=0.0)) == expected[1:]


def test_a_sliding_window_reads_all_of_a_long_prompt(
    float_decoder: Decoders, tokens: Tokens
) -> None:
    model = float_decoder(sliding_window=5, max_length=8)
    ids = tokens(1, 21)[0].tolist()
    prompt = list(ids)
    for _ in range(10):
        ids.append(greedy(model, ids))
    assert list(generate(model, prompt, max_new_tokens=10, temperature=0.0)) == ids[21:]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": -0.1}, "temperature: .* not -0.1"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_k": 0}, "top_k: must be at least 1, not 0"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"prompt_ids": []}, "prompt: must have at least one token"),
        ({"prompt_ids": [0, 5]}, "prompt: token ids must be from 0 to 4, not 5"),
        ({"stop": [-1]}, "stop: token ids must be from 0 to 4, not -1"),
    ],
)
def test_a_bad_value_is_refused_before_the_first_token(
    changes: dict[str, object], message: str
) -> None:
    options: dict[str, object] = {"prompt_ids": [0], "max_new_tokens": 1} | changes
    with pytest.raises(UsageProblem, match=message):
        generate(Constant(FIVE), **options)  # type: ignore[arg-type]


def test_streamed_text_shows_whole_characters_only() -> None:
    from arb_ternary_text.data.tokenizers import ByteTokenizer

    tokenizer = ByteTokenizer()
    ids = tokenizer.encode("é→a")
    pieces = list(streamed_text(tokenizer, tokenizer.encode("x"), iter(ids)))
    assert pieces == ["é", "→", "a"]
    cut = list(streamed_text(tokenizer, tokenizer.encode("x"), iter(ids[:4])))
    assert "".join(cut) == "é\ufffd"
