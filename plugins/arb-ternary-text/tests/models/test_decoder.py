from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from arb_ternary.errors import UsageProblem
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoder import Decoder

Configs = Callable[..., DecoderConfig]
Decoders = Callable[..., Decoder]
Tokens = Callable[..., torch.Tensor]
Rounding = Callable[[Decoder, int], float]

VARIANTS = [
    {},
    {"kv_heads": 1, "head_dim": 6, "activation": "swiglu"},
    {"sliding_window": 4},
    {"sliding_window": 1},
    {
        "tie_embeddings": True,
        "sub_norms": False,
        "query_key_norm": True,
        "residual_scale": -1,
        "logit_scale": 2,
    },
]


@pytest.mark.parametrize("activation", ["relu2", "swiglu"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_number_of_parameters_is_the_formula(
    float_config: Configs, activation: str, tied: bool
) -> None:
    config = float_config(
        width=20,
        heads=5,
        kv_heads=1,
        head_dim=6,
        feed_forward=7,
        layers=3,
        activation=activation,
        tie_embeddings=tied,
    )
    D = 20
    H = 5
    G = 1
    C = 6
    F_ = 7
    L = 3
    V = 13
    matrices = 2 * D * H * C + 2 * D * G * C + (3 if activation == "swiglu" else 2) * D * F_
    expected = V * D * (1 if tied else 2) + L * (matrices + 2 * D) + D
    model = Decoder(config, V)
    assert sum(parameter.numel() for parameter in model.parameters()) == expected
    assert not list(model.buffers())


def test_a_float_decoder_without_sub_norms_is_llama(
    float_decoder: Decoders, tokens: Tokens, rounding: Rounding
) -> None:
    model = float_decoder(kv_heads=2, activation="swiglu", sub_norms=False, rotary_base=50.0)
    weights = dict(model.named_parameters())
    ids = tokens(1, 9)[0]

    def norm(x: torch.Tensor, gain: str) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weights[gain]

    def turned(x: torch.Tensor) -> torch.Tensor:
        plane = torch.complex(x[:, :2], x[:, 2:])
        frequency = torch.tensor([1.0, 50.0**-0.5], dtype=torch.float64)
        plane = plane * torch.exp(1j * torch.arange(len(x))[:, None] * frequency)
        return torch.cat((plane.real, plane.imag), 1)

    x = weights["embedding.weight"][ids]
    for number in range(2):
        at = f"blocks.{number}.attention"
        ff = f"blocks.{number}.feed_forward"
        h = norm(x, f"{at}.norm.weight")
        query, key, value = (
            h @ weights[f"{at}.{part}.weight"].T for part in ("query", "key", "value")
        )
        heads = []
        for head in range(4):
            mine = slice(4 * head, 4 * head + 4)
            shared = slice(4 * (head // 2), 4 * (head // 2) + 4)
            score = turned(query[:, mine]) @ turned(key[:, shared]).T / 2
            score = score.masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1), -math.inf)
            heads.append(score.softmax(-1) @ value[:, shared])
        x = x + torch.cat(heads, 1) @ weights[f"{at}.output.weight"].T
        h = norm(x, f"{ff}.norm.weight")
        gate = h @ weights[f"{ff}.gate.weight"].T
        up = h @ weights[f"{ff}.up.weight"].T
        x = x + (gate * gate.sigmoid() * up) @ weights[f"{ff}.down.weight"].T
    logits = norm(x, "final_norm.weight") @ weights["head.weight"].T
    torch.testing.assert_close(model(ids[None])[0], logits, rtol=0, atol=rounding(model, 9))


@pytest.mark.parametrize("options", VARIANTS)
@given(cuts=st.lists(st.integers(1, 14), max_size=6), grad=st.booleans())
def test_a_prompt_in_chunks_gives_the_logits_of_the_whole(
    float_decoder: Decoders,
    tokens: Tokens,
    rounding: Rounding,
    options: dict[str, object],
    cuts: list[int],
    grad: bool,
) -> None:
    model = float_decoder(**options)
    ids = tokens(2, 15)
    cache = model.new_cache(2)
    with torch.set_grad_enabled(grad):
        pieces = [model(piece, cache) for piece in ids.tensor_split(sorted(set(cuts)), dim=1)]
    torch.testing.assert_close(
        torch.cat(pieces, dim=1), model(ids), rtol=0, atol=4 * rounding(model, 15)
    )
    assert cache.length == 15


@pytest.mark.parametrize("length", [1, 7])
def test_next_logits_are_the_last_logits(
    float_decoder: Decoders, tokens: Tokens, length: int
) -> None:
    class Halved(Decoder):
        def forward(self, tokens_BS: torch.Tensor, cache: Any = None) -> torch.Tensor:
            return super().forward(tokens_BS, cache) / 2

    model = float_decoder()
    ids = tokens(3, 8 + length)
    own = Halved(model.config, model.vocabulary_size)
    own.set_dtype(torch.float64)
    own.load_state_dict(model.state_dict())
    for each, factor in ((model, 1.0), (own.eval(), 0.5)):
        cache = each.new_cache(3)
        each.next_logits(ids[:, :8], cache)
        found = each.next_logits(ids[:, 8:], cache)
        torch.testing.assert_close(found, model(ids)[:, -1] * factor)
        assert cache.length == 8 + length


def test_a_sliding_window_decodes_in_bounded_memory(
    float_decoder: Decoders, tokens: Tokens, rounding: Rounding
) -> None:
    model = float_decoder(sliding_window=5, max_length=8)
    ids = tokens(1, 40)
    cache = model.new_cache(1)
    with torch.no_grad():
        one_by_one = torch.cat([model(ids[:, i : i + 1], cache) for i in range(40)], dim=1)
    torch.testing.assert_close(one_by_one, model(ids), rtol=0, atol=rounding(model, 40))
    assert all(layer.stored[0].size(2) == 10 for layer in cache.layers)


def test_a_sequence_beyond_the_context_is_an_error(float_decoder: Decoders, tokens: Tokens) -> None:
    model = float_decoder(max_length=8)
    with pytest.raises(UsageProblem, match="a sequence of 9 exceeds the context of 8"):
        model(tokens(1, 9))
    cache = model.new_cache(1)
    model(tokens(1, 6), cache)
    with pytest.raises(UsageProblem, match="6 tokens seen and 3 more exceed the context of 8"):
        model(tokens(1, 3), cache)
    assert cache.length == 6
    model(tokens(1, 2), cache)


def test_a_cache_for_another_batch_is_refused(float_decoder: Decoders, tokens: Tokens) -> None:
    model = float_decoder()
    with pytest.raises(UsageProblem, match="batch of 3 sequences and is used with 2"):
        model(tokens(2, 4), model.new_cache(3))


def test_a_model_that_is_not_causal_has_no_cache(float_decoder: Decoders) -> None:
    model = float_decoder(causal=False)
    with pytest.raises(UsageProblem, match="not causal"):
        model.new_cache(1)
    with pytest.raises(UsageProblem, match="not causal"):
        model.set_state_preservation(True)


def test_the_constant_scales_are_powers_of_two(float_decoder: Decoders, tokens: Tokens) -> None:
    plain = float_decoder()
    scaled = float_decoder(logit_scale=-3)
    scaled.load_state_dict(plain.state_dict())
    assert torch.equal(scaled(tokens(1, 5)), plain(tokens(1, 5)) / 8)
    quiet = float_decoder(layers=1, residual_scale=-2)
    x = torch.randn(1, 5, 16, dtype=torch.float64)
    block = quiet.blocks[0]
    positions = quiet._positions(x, None)
    middle = x + block.attention(x, positions) / 4
    assert torch.equal(quiet.run_blocks(x), middle + block.feed_forward(middle) / 4)


@pytest.mark.parametrize("options", [{}, {"experts": 3}])
def test_zero_residual_blocks_are_the_identity_and_learn(
    float_decoder: Decoders, tokens: Tokens, options: dict[str, object]
) -> None:
    model = float_decoder(zero_residual=True, **options)
    x = model.embed(tokens(2, 6))
    assert torch.equal(model.run_blocks(x), x)
    model.logits(model.run_blocks(x)).square().sum().backward()
    for block in model.blocks:
        assert block.attention.output.weight.grad.abs().max() > 0
        for projection in block.feed_forward.output_projections():
            assert projection.weight.grad is None or projection.weight.grad.abs().max() > 0


def test_the_steps_of_the_forward_pass_can_be_taken_one_by_one(
    float_decoder: Decoders, tokens: Tokens
) -> None:
    model = float_decoder(layers=3)
    ids = tokens(2, 7)
    x = model.run_blocks(model.run_blocks(model.embed(ids), last=1), first=1)
    assert torch.equal(model.logits(x), model(ids))


def gradients(model: Decoder, ids: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
    return [
        parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
    ]


@pytest.mark.parametrize("options", [{}, {"sliding_window": 3}, {"experts": 3, "max_moe_iters": 2}])
def test_activation_checkpointing_gives_the_same_gradients(
    float_decoder: Decoders, tokens: Tokens, options: dict[str, object]
) -> None:
    model = float_decoder(**options).train()
    plain = gradients(model, tokens(2, 8))
    model.set_activation_checkpointing(True)
    for one, other in zip(plain, gradients(model, tokens(2, 8)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("enabled", "threshold", "times"),
    [(False, None, 1), (True, None, 2), (True, 14, 2), (True, 15, 1)],
)
def test_activations_are_recomputed_from_the_threshold_on(
    float_decoder: Decoders, tokens: Tokens, enabled: bool, threshold: int | None, times: int
) -> None:
    model = float_decoder().train()
    model.set_activation_checkpointing(enabled, threshold)
    calls = []
    model.blocks[0].attention.register_forward_pre_hook(lambda *_: calls.append(1))
    gradients(model, tokens(2, 8))
    assert len(calls) == times
    calls.clear()
    model.eval()
    gradients(model, tokens(2, 8))
    assert len(calls) == 1, "evaluation does not recompute"


@pytest.mark.parametrize(
    ("options", "recompute"),
    [
        ({}, True),
        pytest.param({"kv_heads": 2, "activation": "swiglu"}, False, marks=pytest.mark.extended),
        pytest.param({}, False, marks=pytest.mark.slow),
        pytest.param({"kv_heads": 2, "activation": "swiglu"}, True, marks=pytest.mark.slow),
        pytest.param({"sliding_window": 3}, False, marks=pytest.mark.slow),
        pytest.param({"sliding_window": 3}, True, marks=pytest.mark.slow),
    ],
)
def test_training_compiles_to_one_graph(
    float_decoder: Decoders, tokens: Tokens, options: dict[str, object], recompute: bool
) -> None:
    model = float_decoder(**options).train()
    model.set_activation_checkpointing(recompute)
    eager = gradients(model, tokens(2, 8))
    torch.compiler.reset()
    model.zero_grad()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    ids = tokens(2, 8)
    F.cross_entropy(compiled(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
    for parameter, expected in zip(model.parameters(), eager, strict=True):
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("window", [None, 5])
def test_preserved_state_continues_the_previous_batch(
    float_decoder: Decoders, tokens: Tokens, rounding: Rounding, window: int | None
) -> None:
    model = float_decoder(sliding_window=window, max_length=8).train()
    # Without a window a position sees at most the context.
    whole = float_decoder(sliding_window=window or 8, max_length=8)
    whole.load_state_dict(model.state_dict())
    ids = tokens(3, 24)
    model.set_state_preservation(True)
    streamed = torch.cat([model(piece) for piece in ids.split(6, dim=1)], dim=1)
    torch.testing.assert_close(streamed, whole(ids), rtol=0, atol=rounding(model, 24))


def test_state_is_reset_on_request_and_unused_in_evaluation(
    float_decoder: Decoders, tokens: Tokens
) -> None:
    model = float_decoder().train()
    fresh = model(tokens(1, 5))
    assert torch.equal(model(tokens(1, 5)), fresh), "nothing is kept unless it was asked for"
    model.set_state_preservation(True)
    assert torch.equal(model(tokens(1, 5)), fresh)
    continued = model(tokens(1, 5))
    assert not torch.equal(continued, fresh)
    model.reset_runtime_state()
    model(tokens(1, 5))
    assert torch.equal(model.eval()(tokens(1, 5)), fresh)
    assert torch.equal(model.train()(tokens(1, 5)), continued)


def test_no_gradient_reaches_an_earlier_batch(float_decoder: Decoders, tokens: Tokens) -> None:
    results = []
    for recompute in (False, True):
        torch.manual_seed(1)
        model = float_decoder(sliding_window=6).train()
        model.set_state_preservation(True)
        model.set_activation_checkpointing(recompute)
        results.append([gradients(model, tokens(2, 8, seed)) for seed in range(4)])
    for one, other in zip(*results, strict=True):
        for mine, yours in zip(one, other, strict=True):
            assert torch.equal(mine, yours)


def test_a_streamed_batch_learns_like_any_other(float_decoder: Decoders, tokens: Tokens) -> None:
    model = float_decoder(sliding_window=6).train()
    plain = gradients(model, tokens(2, 8))
    model.set_state_preservation(True)
    for one, other in zip(plain, gradients(model, tokens(2, 8)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-13)


def test_backward_over_streamed_batches_sums_gradients(
    float_decoder: Decoders, tokens: Tokens
) -> None:
    model = float_decoder(sliding_window=6).train()
    model.set_state_preservation(True)
    batches = [tokens(2, 8, seed) for seed in range(4)]
    separate = [gradients(model, ids) for ids in batches]
    model.reset_runtime_state()
    model.zero_grad()
    losses = [
        F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()) for ids in batches
    ]
    torch.stack(losses).sum().backward()
    for parameter, parts in zip(model.parameters(), zip(*separate, strict=True), strict=True):
        torch.testing.assert_close(
            parameter.grad, torch.stack(parts).sum(0), rtol=1e-10, atol=1e-13
        )


def test_saved_runtime_state_continues_the_stream_bit_for_bit(
    float_decoder: Decoders, tokens: Tokens
) -> None:
    model = float_decoder(sliding_window=6).train()
    model.set_state_preservation(True)
    assert model.runtime_state() is None
    with torch.no_grad():
        for seed in range(3):
            model(tokens(2, 7, seed))
        state = model.runtime_state()
        assert {stored.size(2) for layer in state["layers"] for stored in layer} == {5}, (
            "a window sees 5 earlier ones"
        )
        expected = model(tokens(2, 7, 9))
        model.reset_runtime_state()
        model.load_runtime_state(state)
        assert torch.equal(model(tokens(2, 7, 9)), expected)
        model.load_runtime_state(None)
        assert model.runtime_state() is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_set_dtype_changes_parameters_and_logits(
    float_config: Configs, tokens: Tokens, dtype: torch.dtype
) -> None:
    model = Decoder(float_config(), 11)
    model.set_dtype(dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    logits = model(tokens(2, 5))
    assert logits.dtype == dtype
    assert torch.isfinite(logits).all()


def test_an_empty_vocabulary_is_refused(float_config: Configs) -> None:
    with pytest.raises(UsageProblem, match="vocabulary_size"):
        Decoder(float_config(), 0)


def test_a_decoder_runs_given_blocks_in_order(float_config: Configs, tokens: Tokens) -> None:
    config = float_config(layers=3, zero_residual=False)
    donor = Decoder(config, 13)

    class Reversed(torch.nn.ModuleList):
        def __iter__(self):
            return iter([self._modules[name] for name in reversed(self._modules)])

    given_blocks = Reversed(donor.blocks)
    model = Decoder(config, 13, blocks=given_blocks)
    model.embedding = donor.embedding
    model.head = donor.head
    model.final_norm = donor.final_norm
    assert model.blocks is given_blocks
    x_BSD = donor.embed(tokens(2, 5))
    for number in (2, 1, 0):
        x_BSD = donor.run_blocks(x_BSD, number, number + 1)
    torch.testing.assert_close(model(tokens(2, 5)), donor.logits(x_BSD))
    assert len(model.new_cache(1).layers) == 3
