from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from arb_ternary_text.models.attention import visibility
from arb_ternary_text.models.decoder import Decoder

Decoders = Callable[..., Decoder]
Tokens = Callable[..., torch.Tensor]
Rounding = Callable[[Decoder, int], float]


@pytest.mark.parametrize("window", [None, 1, 3, 7, 9])
@pytest.mark.parametrize(("new", "total"), [(1, 1), (1, 7), (3, 7), (7, 7)])
def test_visibility_is_the_band_below_the_diagonal(
    new: int, total: int, window: int | None
) -> None:
    expected = [
        [key <= query and (window is None or query - key < window) for key in range(total)]
        for query in range(total - new, total)
    ]
    mask, is_causal = visibility(new, total, window, causal=True, device=torch.device("cpu"))
    if mask is None:
        mask = torch.ones(new, total, dtype=torch.bool)
        mask = mask.tril() if is_causal else mask
    assert mask.tolist() == expected


def test_a_model_that_is_not_causal_hides_nothing() -> None:
    assert visibility(3, 3, None, causal=False, device=torch.device("cpu")) == (None, False)


@pytest.mark.parametrize(
    "options", [{}, {"kv_heads": 2}, {"activation": "swiglu"}, {"sliding_window": 5}]
)
def test_later_tokens_do_not_change_earlier_logits(
    float_decoder: Decoders, tokens: Tokens, options: dict[str, object]
) -> None:
    model = float_decoder(**options)
    before = tokens(2, 12)
    after = before.clone()
    after[:, 7] = (after[:, 7] + 1) % model.vocabulary_size
    assert torch.equal(model(before)[:, :7], model(after)[:, :7])
    assert not torch.isclose(model(before)[:, 7:], model(after)[:, 7:]).all(dim=-1).any()


def test_without_causality_every_position_sees_every_other(
    float_decoder: Decoders, tokens: Tokens
) -> None:
    model = float_decoder(causal=False)
    before = tokens(1, 6)
    after = before.clone()
    after[0, 5] = (after[0, 5] + 1) % model.vocabulary_size
    assert not torch.isclose(model(before)[0, 0], model(after)[0, 0]).all()


def test_a_sliding_window_bounds_how_far_a_token_reaches(
    float_decoder: Decoders, tokens: Tokens
) -> None:
    window = 4
    layers = 3
    model = float_decoder(sliding_window=window, layers=layers)
    before = tokens(1, 20)
    after = before.clone()
    after[0, 0] = (after[0, 0] + 1) % model.vocabulary_size
    changed = (model(before) != model(after)).any(dim=-1)[0]
    # Each layer carries a token on by window - 1 positions.
    reach = layers * (window - 1)
    assert changed[: reach + 1].all()
    assert not changed[reach + 1 :].any()


def test_a_window_as_long_as_the_sequence_changes_nothing(
    float_decoder: Decoders, tokens: Tokens, rounding: Rounding
) -> None:
    windowed = float_decoder(sliding_window=12)
    full = float_decoder()
    full.load_state_dict(windowed.state_dict())
    torch.testing.assert_close(
        windowed(tokens(2, 12)), full(tokens(2, 12)), rtol=0, atol=rounding(full, 12)
    )


def test_grouped_queries_equal_all_heads_with_repeated_keys(
    float_decoder: Decoders, tokens: Tokens, rounding: Rounding
) -> None:
    grouped = float_decoder(kv_heads=2)
    full = float_decoder()
    state = grouped.state_dict()
    for name in list(state):
        if name.endswith(("key.weight", "value.weight")):
            state[name] = state[name].unflatten(0, (2, 4)).repeat_interleave(2, dim=0).flatten(0, 1)
    full.load_state_dict(state)
    torch.testing.assert_close(
        grouped(tokens(2, 9)), full(tokens(2, 9)), rtol=0, atol=rounding(full, 9)
    )


def test_query_key_norm_ignores_the_size_of_projections(
    float_decoder: Decoders, tokens: Tokens
) -> None:
    normed = float_decoder(query_key_norm=True)
    plain = float_decoder()
    for model in (normed, plain):
        before = model(tokens(1, 8))
        with torch.no_grad():
            for block in model.blocks:
                block.attention.query.weight *= 4
        # Only eps = 1e-6, next to a mean square of about 1, still depends on the size.
        assert torch.allclose(before, model(tokens(1, 8)), atol=1e-4) == (model is normed)
