"""Decoupled attention equals its formula, written out in numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from arb_ternary.errors import UsageProblem
from arb_ternary.optim.protocol import collect_trainable
from arb_ternary_text.models.attention import make_positions
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_text.models.decoupled_attention import DecoupledAttention
from arb_ternary_text.models.generate import generate
from arb_ternary_train.audit import audit
from arb_ternary_train.model_state import ModelState, load_parts

Configs = Callable[..., DecoderConfig]
Decoders = Callable[..., Decoder]
Tokens = Callable[..., torch.Tensor]
Rounding = Callable[[Decoder, int], float]

DECOUPLED: dict[str, Any] = {"attention": "decoupled", "sem_dim": 3, "geo_dim": 4}
EVERYTHING = {
    **DECOUPLED,
    "kv_heads": 2,
    "rotary_dim": 10,
    "attention_gate": True,
    "null_key_value": True,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": DECOUPLED,
    "grouped, gates, null keys, planes": EVERYTHING,
    "tied": {**DECOUPLED, "tie_query_key": True, "head_dim": 5},
    "biases, factors": {
        **EVERYTHING,
        "query_key_value_bias": True,
        "rotary_factors": (1.0, 2.0, 1.5, 4.0, 8.0),
        "rotary_scaling": 2.0,
    },
    "tied, biases, null keys": {
        **DECOUPLED,
        "tie_query_key": True,
        "query_key_value_bias": True,
        "null_key_value": True,
    },
    "a window": {**EVERYTHING, "sliding_window": 4, "sub_norms": False},
    "not causal": {**EVERYTHING, "causal": False},
}


@torch.no_grad()
def decoupled(float_decoder: Decoders, **options: Any) -> Decoder:
    """Return a float64 decoder with random gates, null keys, biases and planes."""
    model = float_decoder(**(DECOUPLED | options))
    for block in model.blocks:
        attention = block.attention
        for name, parameter in attention.named_parameters(recurse=False):
            parameter.normal_(std=2.0 if name == "gate" else 0.7)
        if attention.biases is not None:
            for bias in attention.biases.parameters():
                bias.normal_()
        ranks = torch.stack(
            [torch.randperm(attention.rotary_planes) for _ in range(attention.key_heads)]
        )
        attention.set_planes(ranks[:, : attention.planes.size(1)])
    return model


def restated(
    attention: DecoupledAttention, config: DecoderConfig, x: torch.Tensor
) -> np.ndarray[Any, Any]:
    """Return the update of one sequence ``x [S, D]`` by the formula, with its own arithmetic."""
    weights = {name: tensor.detach().numpy() for name, tensor in attention.state_dict().items()}

    def norm(values: np.ndarray[Any, Any], name: str) -> np.ndarray[Any, Any]:
        gain = weights.get(f"{name}.weight", 1.0)
        return values / np.sqrt((values**2).mean(-1, keepdims=True) + config.norm_eps) * gain

    H = config.heads
    G = config.key_heads
    s = config.sem_dim or 0
    g = config.geo_dim or 0
    n = len(x)
    h = norm(x.numpy(), "norm")

    def projected(name: str, heads: int) -> np.ndarray[Any, Any]:
        out = h @ weights[f"{name}.weight"].T + weights.get(f"biases.{name}", 0.0)
        return out.reshape(n, heads, -1)  # type: ignore[no-any-return]

    q_sem = projected("query_semantic", H)
    q_geo = projected("query_geometric", H)
    k_sem = q_sem if config.tie_query_key else projected("key_semantic", G)
    k_geo = projected("key_geometric", G)
    value = projected("value", G)
    size = config.rotary_dim or g
    theta = config.rotary_base ** (-np.arange(size // 2) * 2 / size)
    theta = theta / np.array(config.rotary_factors or [1.0] * (size // 2)) / config.rotary_scaling
    logit = weights.get("gate", np.zeros(H))
    seen = np.zeros((n, H, value.shape[-1]))
    for head in range(H):
        j = head // (H // G)
        gate = 1 / (1 + np.exp(-logit[head]))
        turn = theta[weights["planes"][j].astype(int)]
        pair = [(v[..., : g // 2] + 1j * v[..., g // 2 :]) for v in (q_geo[:, head], k_geo[:, j])]
        for t in range(n):
            scores = []
            values = []
            if config.null_key_value:
                key = weights["null_key"].reshape(G, s)[j]
                scores.append(2 * gate * (q_sem[t, head] @ key) / np.sqrt(s))
                values.append(weights["null_value"].reshape(G, -1)[j])
            for u in range(n):
                if config.causal and (u > t or t - u >= (config.sliding_window or n)):
                    continue
                # Re sum q conj(k) e^{i theta (t - u)}: relative positions, where the module turns
                # both by their own.
                geometric = (
                    pair[0][t] * pair[1][u].conj() * np.exp(1j * turn * (t - u))
                ).real.sum()
                semantic = q_sem[t, head] @ k_sem[u, j]
                scores.append(
                    2 * gate * semantic / np.sqrt(s) + (2 - 2 * gate) * geometric / np.sqrt(g)
                )
                values.append(value[u, j])
            weight = np.exp(np.array(scores) - max(scores))
            seen[t, head] = weight @ np.array(values) / weight.sum()
    flat = seen.reshape(n, -1)
    flat = norm(flat, "output_norm") if config.has_sub_norms else flat
    return flat @ weights["output.weight"].T  # type: ignore[no-any-return]


@torch.no_grad()
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("grad", [False, True])
def test_the_update_is_the_formula(float_decoder: Decoders, name: str, grad: bool) -> None:
    model = decoupled(float_decoder, **VARIANTS[name])
    config = model.config
    attention = model.blocks[0].attention
    x = torch.randn(1, 9, config.width, dtype=torch.float64)
    positions = make_positions(config, x, start=0, total=9, window=config.sliding_window)
    # With a gradient, causal attention on a CPU may use whole matrices.
    with torch.set_grad_enabled(grad):
        update = attention(x, positions)[0]
    np.testing.assert_allclose(
        update.detach().numpy(), restated(attention, config, x[0]), rtol=0, atol=1e-12
    )


def test_without_semantic_queries_it_is_standard_attention(
    float_decoder: Decoders, tokens: Tokens, rounding: Rounding
) -> None:
    plain = float_decoder(kv_heads=2)
    model = float_decoder(**DECOUPLED, kv_heads=2, rotary_dim=4)
    state = plain.state_dict()
    for name, tensor in model.state_dict().items():
        if "semantic" in name or "planes" in name:
            state[name] = torch.zeros_like(tensor) if "query" in name else tensor
    for name in list(state):
        for part in ("query", "key"):
            if name.endswith(f"attention.{part}.weight"):
                state[name.replace(f"{part}.", f"{part}_geometric.")] = state.pop(name)
    model.load_state_dict(state)
    torch.testing.assert_close(
        model(tokens(2, 9)), plain(tokens(2, 9)), rtol=0, atol=rounding(plain, 9)
    )


@torch.no_grad()
def test_planes_go_with_the_features_that_they_turn(
    float_decoder: Decoders, tokens: Tokens
) -> None:
    """Exchanging the two pairs of a head in queries, keys and planes changes nothing."""
    model = float_decoder(**DECOUPLED, kv_heads=2, rotary_dim=8)
    before = model(tokens(1, 9))
    for block in model.blocks:
        block.attention.set_planes(block.attention.planes.flip(1))
        moved = model(tokens(1, 9))
        assert not torch.allclose(moved, before)
        for name in ("query_geometric", "key_geometric"):
            weight = getattr(block.attention, name).weight
            weight.copy_(weight.unflatten(0, (-1, 2, 2)).flip(2).flatten(0, 2))
        torch.testing.assert_close(model(tokens(1, 9)), before, rtol=0, atol=1e-12)


def test_default_planes_have_the_frequencies_of_a_small_head(
    float_decoder: Decoders, tokens: Tokens, rounding: Rounding
) -> None:
    own = float_decoder(**DECOUPLED, kv_heads=2)
    assert own.blocks[0].attention.planes.tolist() == [[0, 1], [0, 1]]
    # Plane 4 of a head of 16 features turns with base^(-8/16), plane 1 of one of 4 with
    # base^(-2/4).
    among = float_decoder(**DECOUPLED, kv_heads=2, rotary_dim=16)
    assert among.blocks[0].attention.planes.tolist() == [[0, 4], [0, 4]]
    state = {
        name: tensor for name, tensor in own.state_dict().items() if not name.endswith("planes")
    }
    among.load_state_dict(state, strict=False)
    torch.testing.assert_close(
        among(tokens(2, 20)), own(tokens(2, 20)), rtol=0, atol=rounding(own, 20)
    )


def test_new_gates_and_null_keys_are_neutral(float_decoder: Decoders, tokens: Tokens) -> None:
    plain = float_decoder(**DECOUPLED)
    gated = float_decoder(**DECOUPLED, attention_gate=True)
    gated.load_state_dict(plain.state_dict(), strict=False)
    assert torch.equal(gated(tokens(2, 9)), plain(tokens(2, 9)))
    null = float_decoder(**DECOUPLED, null_key_value=True, layers=1, sub_norms=False)
    x = torch.zeros(1, 3, 16, dtype=torch.float64)
    x[..., 0] = 1
    attention = null.blocks[0].attention
    with torch.no_grad():
        attention.query_semantic.weight.zero_()
        attention.query_geometric.weight.zero_()
    update = attention(x, make_positions(null.config, x, start=0, total=3, window=None))
    # All scores are 0, so the mean of t + 1 equal values and the null value 0 is (t + 1) / (t + 2)
    # of a value.
    value = attention.output(attention.value(attention.norm(x[0, 0])))
    for t in range(3):
        torch.testing.assert_close(update[0, t], value * (t + 1) / (t + 2), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "not causal"])
@pytest.mark.parametrize("grad", [False, True])
def test_a_prompt_in_chunks_gives_the_logits_of_the_whole(
    float_decoder: Decoders, tokens: Tokens, rounding: Rounding, name: str, grad: bool
) -> None:
    model = decoupled(float_decoder, **VARIANTS[name])
    ids = tokens(2, 15)
    whole = model(ids)
    for cuts in ([1] * 15, [4, 1, 6, 1, 3]):
        cache = model.new_cache(2)
        with torch.set_grad_enabled(grad):
            pieces = [model(piece, cache) for piece in ids.split(cuts, dim=1)]
        torch.testing.assert_close(
            torch.cat(pieces, dim=1), whole, rtol=0, atol=4 * rounding(model, 15)
        )


def test_a_cache_holds_what_the_options_say(float_decoder: Decoders, tokens: Tokens) -> None:
    # Two layers of two key heads: 3 + 4 features of keys, 4 of values; 4 and 4 where attention is
    # standard.
    for options, features in (
        (EVERYTHING, 2 * 2 * (3 + 4 + 4)),
        ({"kv_heads": 2}, 2 * 2 * (4 + 4)),
    ):
        model = float_decoder(**options)
        cache = model.new_cache(1)
        model(tokens(1, 5), cache)
        held = [stored[:, :, 0] for layer in cache.layers for stored in layer.stored]
        assert sum(stored.numel() for stored in held) == features


def test_generated_text_equals_full_forward_passes(float_decoder: Decoders) -> None:
    model = decoupled(float_decoder, **EVERYTHING)
    ids = [1, 2, 3]
    for token in generate(model, [1, 2, 3], max_new_tokens=12, temperature=0):
        assert token == int(model(torch.tensor([ids]))[0, -1].argmax())
        ids.append(token)
    assert len(ids) == 15


def test_streamed_batches_continue_and_their_state_is_saved(
    float_decoder: Decoders, tokens: Tokens, rounding: Rounding
) -> None:
    model = decoupled(float_decoder, **EVERYTHING, sliding_window=5).train()
    ids = tokens(2, 24)
    whole = model.eval()(ids)
    model.train().set_state_preservation(True)
    pieces = []
    for piece in ids.split(6, dim=1):
        state = model.runtime_state()
        model.reset_runtime_state()
        model.load_runtime_state(state)
        pieces.append(model(piece))
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=0, atol=rounding(model, 24))


def test_a_position_is_only_a_distance(float_decoder: Decoders, tokens: Tokens) -> None:
    """With a window, positions before it do not matter, however many there were."""
    model = decoupled(float_decoder, **EVERYTHING, sliding_window=4, layers=1)
    ids = tokens(1, 20)
    torch.testing.assert_close(model(ids)[:, -1], model(ids[:, -4:])[:, -1], rtol=0, atol=1e-12)


def gradients(
    model: Decoder, ids: torch.Tensor, run: Callable[..., torch.Tensor] | None = None
) -> dict[str, Any]:
    model.zero_grad()
    torch.nn.functional.cross_entropy(
        (model if run is None else run)(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()
    ).backward()
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def test_everything_learns_also_with_activation_checkpointing(
    float_decoder: Decoders, tokens: Tokens
) -> None:
    model = decoupled(float_decoder, **EVERYTHING, query_key_value_bias=True).train()
    plain = gradients(model, tokens(2, 9))
    model.set_activation_checkpointing(True)
    recomputed = gradients(model, tokens(2, 9))
    assert set(plain) == {name for name, _ in model.named_parameters()}
    for name, gradient in plain.items():
        assert gradient.abs().max() > 0, name
        assert torch.equal(gradient, recomputed[name]), name


@pytest.mark.slow
def test_training_compiles_to_one_graph(float_decoder: Decoders, tokens: Tokens) -> None:
    model = decoupled(float_decoder, **EVERYTHING, layers=1).train()
    eager = gradients(model, tokens(2, 9))
    torch.compiler.reset()
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    for name, gradient in gradients(model, tokens(2, 9), run).items():
        torch.testing.assert_close(gradient, eager[name], rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_computes_with_whole_planes(
    float_config: Configs, tokens: Tokens, dtype: torch.dtype
) -> None:
    model = Decoder(float_config(**EVERYTHING), 11)
    exact = model(tokens(2, 9)).detach()
    model.set_dtype(dtype)
    assert model.blocks[0].attention.planes.dtype == torch.int16
    logits = model(tokens(2, 9))
    assert logits.dtype == dtype
    assert (logits.float() - exact).abs().max() < 40 * torch.finfo(dtype).eps * exact.abs().max()


def test_state_is_saved_module_by_module_with_its_planes(
    float_decoder: Decoders, tokens: Tokens
) -> None:
    model, other = (decoupled(float_decoder, **EVERYTHING) for _ in range(2))
    assert not torch.equal(model(tokens(1, 9)), other(tokens(1, 9)))
    load_parts(
        other, {name: tensor for part in ModelState(model).parts() for name, tensor in part.items()}
    )
    assert torch.equal(model(tokens(1, 9)), other(tokens(1, 9)))


def test_invalid_planes_are_refused(float_decoder: Decoders) -> None:
    model = float_decoder(**EVERYTHING)
    attention = model.blocks[1].attention
    for planes, message in (
        (torch.tensor([[0, 1], [2, 5]]), "planes: must be 0 to 4 .*; there is no plane 5"),
        (torch.tensor([[0, -1], [2, 4]]), "no plane -1"),
        (torch.tensor([[0, 1]]), r"of shape \(2, 2\), not \(1, 2\)"),
    ):
        with pytest.raises(UsageProblem, match=message):
            attention.set_planes(planes)
    state = model.state_dict()
    state["blocks.1.attention.planes"] = torch.full((2, 2), 7, dtype=torch.int16)
    with pytest.raises(RuntimeError, match=r"blocks.1.attention.planes: .* no plane 7"):
        model.load_state_dict(state)
    with pytest.raises(RuntimeError, match="no plane 7"):
        load_parts(model, state)


@pytest.mark.parametrize(
    ("options", "floats"),
    [
        ({}, 0),
        ({"attention_gate": True}, 4),
        ({"null_key_value": True, "kv_heads": 2}, 2 * (3 + 8)),
        ({"query_key_value_bias": True, "tie_query_key": True}, 4 * (3 + 4 + 4 + 8)),
    ],
)
def test_gates_and_null_keys_are_float_and_counted(options: dict[str, Any], floats: int) -> None:
    config = DecoderConfig(width=32, layers=3, heads=4, **DECOUPLED, **options)
    model = Decoder(config, 16)
    counted = audit(model)
    assert counted.float_parameters == 3 * floats
    assert config.pure == counted.pure == (floats == 0)
    assert config.planned().kinds == set(collect_trainable(model).parts)
    # No float parameter is a matrix, as the options say, so weight decay does not reach them.
    assert not config.planned().matrices
    assert all(parameter.dim() == 1 for parameter in model.parameters())
    planes = next(row for row in counted.rows if row.what == "other integer buffers")
    assert planes.elements == 3 * config.key_heads * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sem_dim": 4}, "'sem_dim' has no effect because 'attention' is standard"),
        ({"null_key_value": True}, "'null_key_value' has no effect"),
        ({"attention": "decoupled", "geo_dim": 4}, "needs 'sem_dim'"),
        ({"attention": "decoupled", "sem_dim": 4}, "needs 'geo_dim'"),
        (
            {**DECOUPLED, "geo_dim": 5},
            "'geo_dim' must be even for the rotary embedding, for example 6; it is 5",
        ),
        ({**DECOUPLED, "rotary_dim": 7}, "'rotary_dim' must be even"),
        (
            {**DECOUPLED, "rotary_dim": 2},
            "'rotary_dim' must be at least 'geo_dim'.*; 2 is less than 4",
        ),
        ({**DECOUPLED, "rotary_dim": 2**16 + 2}, "whole number from 1 to 65536"),
        (
            {**DECOUPLED, "tie_query_key": True, "kv_heads": 1},
            "as many 'kv_heads' as 'heads', 4; there are 1",
        ),
        (
            {**DECOUPLED, "query_key_norm": True},
            "'query_key_norm' would undo .* remove it, or use 'attention'",
        ),
        (
            {**DECOUPLED, "architecture": "llama"},
            "'attention' is standard in 'architecture': llama; remove it",
        ),
        ({**DECOUPLED, "rotary_factors": (1.0,)}, "rotary_dim / 2 = 2 numbers"),
        ({"attention": "linear"}, "attention"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        DecoderConfig(**{"width": 32, "layers": 1, "heads": 4, **options})


def test_values_of_any_size_go_with_decoupled_attention(
    float_decoder: Decoders, tokens: Tokens
) -> None:
    assert torch.isfinite(float_decoder(**DECOUPLED, head_dim=3)(tokens(1, 5))).all()
