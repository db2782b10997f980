"""The pure decoder: no float state, votes from every layer, exact decoding."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from arb_ternary.backends.select import use_backend
from arb_ternary.ternary.models import reset_runtime_state, ternary_modules
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_train.audit import audit
from arb_ternary_train.exact_arithmetic import exact_arithmetic

Tokens = Callable[..., torch.Tensor]

VARIANTS: list[dict[str, Any]] = [
    {},
    {"kv_heads": 1, "activation": "swiglu", "learned_norms": True, "query_key_norm": True},
    {"tie_embeddings": True, "sliding_window": 5},
    {"experts": 3, "max_moe_iters": 2},
    {"embedding_scale_rule": "correlation", "group_size": "row", "gradients": "int8"},
    {"attention": "decoupled", "sem_dim": 6, "geo_dim": 4, "rotary_dim": 16, "kv_heads": 1},
]


def small(**changes: Any) -> Decoder:
    options = {
        "width": 32,
        "layers": 2,
        "heads": 2,
        "feed_forward": 64,
        "max_length": 16,
        "group_size": 32,
    }
    return Decoder(DecoderConfig(**(options | changes)), 11)


def loss_of(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.parametrize("options", VARIANTS)
def test_a_pure_model_has_no_float_parameters_or_buffers(
    options: dict[str, Any], tokens: Tokens
) -> None:
    model = small(**options)
    loss_of(model, tokens(2, 9)).backward()
    model(tokens(2, 9), model.new_cache(2))
    counted = audit(model)
    assert counted.pure
    assert not list(model.parameters())
    assert not [name for name, buffer in model.named_buffers() if buffer.is_floating_point()]


@pytest.mark.parametrize("part", ["embedding", "head", "norms", "linears"])
def test_each_float_part_replaces_only_its_own_weights(part: str) -> None:
    pure = small(learned_norms=True)
    mixed = small(learned_norms=True, float_parts=(part,))
    belongs = {
        "embedding": lambda name: name == "embedding",
        "head": lambda name: name == "head",
        "norms": lambda name: name.endswith("norm"),
        "linears": lambda name: name.startswith("blocks.") and not name.endswith("norm"),
    }[part]
    before, after = ({name for name, _ in ternary_modules(model)} for model in (pure, mixed))
    assert before - after == {name for name in before if belongs(name)} != set()
    floats = {name.removesuffix(".weight") for name, _ in mixed.named_parameters()}
    assert floats == before - after


@pytest.mark.parametrize("options", VARIANTS)
def test_every_layer_votes(options: dict[str, Any], tokens: Tokens) -> None:
    model = small(**options)
    loss_of(model, tokens(8, 17)).backward()
    for name, module in ternary_modules(model):
        assert module.logical_votes().any(), f"{name} cast no votes"


@pytest.mark.parametrize("options", VARIANTS)
def test_a_small_pure_model_starts_near_the_loss_of_chance(
    options: dict[str, Any], tokens: Tokens
) -> None:
    # Logits of about unit variance add half a nat to log V; a wrong scale anywhere adds several.
    assert abs(float(loss_of(small(**options), tokens(8, 17)).detach()) - math.log(11)) < 1.0


@pytest.mark.parametrize("options", VARIANTS)
def test_later_tokens_do_not_change_earlier_logits(options: dict[str, Any], tokens: Tokens) -> None:
    model = small(**options).eval()
    before = tokens(2, 12)
    after = before.clone()
    after[:, 7] = (after[:, 7] + 1) % 11
    with torch.no_grad():
        assert torch.equal(model(before)[:, :7], model(after)[:, :7])


def in_chunks(model: Decoder, ids: torch.Tensor) -> torch.Tensor:
    cache = model.new_cache(ids.size(0))
    return torch.cat([model(piece, cache) for piece in ids.split([4, 1, 6, 1, 2], dim=1)], dim=1)


@torch.no_grad()
@pytest.mark.parametrize("options", VARIANTS)
def test_a_prompt_in_chunks_gives_the_integers_of_the_whole(
    options: dict[str, Any], tokens: Tokens
) -> None:
    # Attention adds up in another order. In float64 that moves no activation to another int8 step,
    # so that every integer is the same, and a scale changes by one float32 rounding at most.
    model = small(**options).eval()
    model.set_dtype(torch.float64)
    torch.testing.assert_close(
        in_chunks(model, tokens(3, 14)), model(tokens(3, 14)), rtol=2**-22, atol=2**-22
    )


@torch.no_grad()
@pytest.mark.parametrize("options", VARIANTS)
def test_chunks_of_a_prompt_give_the_same_logits_in_float32(
    options: dict[str, Any], tokens: Tokens, rounding: Callable[[Decoder, int], float]
) -> None:
    model = small(**options, activations="float").eval()
    bound = rounding(model, 14) * 2.0**29 * model.config.max_moe_iters
    torch.testing.assert_close(
        in_chunks(model, tokens(3, 14)), model(tokens(3, 14)), rtol=0, atol=bound
    )


def test_without_sums_over_positions_chunks_give_the_same_bits(tokens: Tokens) -> None:
    # With a window of one position attention sums one term, and everything else is integer or per
    # token. Outside of exact arithmetic a single token uses the decoding kernel, whose norms add up
    # in another order.
    model = small(sliding_window=1).eval()
    ids = tokens(2, 14)
    with torch.no_grad(), exact_arithmetic():
        assert torch.equal(in_chunks(model, ids), model(ids))


def votes_of(model: Decoder) -> dict[str, torch.Tensor]:
    return {name: module.logical_votes() for name, module in ternary_modules(model)}


@pytest.mark.parametrize(
    "options", [*VARIANTS, {"gradients": "int8", "experts": 2, "max_moe_iters": 3}]
)
def test_recomputing_activations_casts_the_same_votes(
    options: dict[str, Any], tokens: Tokens
) -> None:
    kept = small(**options)
    recomputed = small(**options)
    recomputed.load_state_dict(kept.state_dict())
    recomputed.set_activation_checkpointing(True)
    for model in (kept, recomputed):
        loss_of(model, tokens(2, 9)).backward()
    expected = votes_of(kept)
    for name, votes in votes_of(recomputed).items():
        assert torch.equal(votes, expected[name]), name


@pytest.mark.parametrize(
    "options",
    [VARIANTS[0], *(pytest.param(each, marks=pytest.mark.slow) for each in VARIANTS[1:3])],
)
def test_compiled_training_casts_the_same_votes(options: dict[str, Any], tokens: Tokens) -> None:
    eager = small(**options)
    compiled = small(**options)
    compiled.load_state_dict(eager.state_dict())
    torch.compiler.reset()
    loss_of(eager, tokens(2, 9)).backward()
    loss_of(torch.compile(compiled, fullgraph=True, backend="aot_eager"), tokens(2, 9)).backward()
    expected = votes_of(eager)
    for name, votes in votes_of(compiled).items():
        assert torch.equal(votes, expected[name]), name


def test_a_tied_head_votes_into_the_embedding(tokens: Tokens) -> None:
    model = small(tie_embeddings=True)
    assert [name for name, _ in ternary_modules(model) if not name.startswith("blocks.")] == [
        "embedding"
    ]
    x = torch.randn(4, 32)
    model.head(x).square().sum().backward()
    logits = model.head(x).detach()
    rounded = torch.round(x / (x.abs().amax(-1, keepdim=True) / 127)) * (
        x.abs().amax(-1, keepdim=True) / 127
    )
    weight = model.embedding.dense_weight()
    # 32 products, each rounded, and the scale.
    torch.testing.assert_close(
        logits, rounded @ weight.T, rtol=0, atol=float(34 * 2**-23 * rounded.abs().sum(1).max())
    )
    gradient = 2 * logits.T @ rounded
    certain = gradient.abs() > 1e-3 * gradient.abs().max()
    assert torch.equal(
        model.embedding.logical_votes()[certain], -gradient.sign().to(torch.int8)[certain]
    )


def test_zero_residual_blocks_are_the_identity_and_vote(tokens: Tokens) -> None:
    model = small(zero_residual=True)
    x = model.embed(tokens(2, 9))
    assert torch.equal(model.run_blocks(x), x)
    loss_of(model, tokens(2, 9)).backward()
    votes = votes_of(model)
    assert all(
        votes[f"blocks.{block}.{part}"].any()
        for block in (0, 1)
        for part in ("attention.output", "feed_forward.down")
    )


@pytest.mark.parametrize("float_parts", [(), ("head",)])
def test_a_zero_head_makes_all_ids_equally_likely(
    float_parts: tuple[str, ...], tokens: Tokens
) -> None:
    models = []
    for zero_head in (False, True):
        torch.manual_seed(5)
        models.append(small(zero_head=zero_head, float_parts=float_parts))
    plain, zero = models
    assert float(loss_of(zero, tokens(2, 9)).detach()) == pytest.approx(math.log(11), rel=1e-6)
    assert abs(float(loss_of(plain, tokens(2, 9)).detach()) - math.log(11)) > 0.05
    assert torch.equal(zero.hidden(tokens(2, 9)), plain.hidden(tokens(2, 9)))
    assert zero.state_dict().keys() == plain.state_dict().keys()


def test_a_zero_model_can_be_built_on_the_meta_device() -> None:
    with use_backend("torch"), torch.device("meta"):
        model = small(zero_head=True, zero_residual=True)
    assert all(buffer.is_meta for name, buffer in model.named_buffers() if name.endswith("weight"))


def test_a_zero_head_votes_at_once_and_the_rest_later(
    tokens: Tokens,
) -> None:
    model = small(zero_head=True)
    ids = tokens(2, 9)
    loss_of(model, ids).backward()
    votes = votes_of(model)
    assert {name for name, cast in votes.items() if cast.any()} == {"head"}
    # The gradient of a logit is 1 / V, less 1 for the next id, over the number of predictions.
    hidden = model.final_norm(model.hidden(ids[:, :-1])).flatten(0, 1).detach()
    scale = hidden.abs().amax(-1, keepdim=True) / 127
    rounded = torch.round(hidden / scale) * scale
    gradient = (1 / 11 - F.one_hot(ids[:, 1:].flatten(), 11).float()).T @ rounded / len(rounded)
    certain = gradient.abs() > 1e-3 * gradient.abs().max()
    assert torch.equal(votes["head"][certain], -gradient.sign().to(torch.int8)[certain])
    model.head.set_trits(votes["head"])
    loss_of(model, ids).backward()
    assert all(cast.any() for cast in votes_of(model).values())


def test_a_state_dict_rebuilds_the_model_bit_for_bit(tokens: Tokens) -> None:
    model = small(learned_norms=True)
    other = small(learned_norms=True)
    assert not torch.equal(model(tokens(1, 8)), other(tokens(1, 8)))
    other.load_state_dict(model.state_dict())
    assert torch.equal(model(tokens(1, 8)), other(tokens(1, 8)))


def test_reset_runtime_state_reaches_the_decoder(tokens: Tokens) -> None:
    model = small()
    model.set_state_preservation(True)
    fresh = model(tokens(1, 5))
    reset_runtime_state(torch.nn.Sequential(model))
    assert torch.equal(model(tokens(1, 5)), fresh)
    assert not torch.equal(model(tokens(1, 5)), fresh)


def test_the_dtype_of_activations_can_be_set(tokens: Tokens) -> None:
    model = small(learned_norms=True)
    model.set_dtype(torch.bfloat16)
    logits = model(tokens(2, 9))
    assert logits.dtype == torch.bfloat16
    loss_of(model, tokens(2, 9)).backward()
    assert all(votes.any() for votes in votes_of(model).values())
    assert audit(model).pure


def test_vote_bits_reach_every_ternary_part() -> None:
    config = DecoderConfig(width=32, layers=1, heads=2, vote_bits=4, learned_norms=True)
    bits = {module.shape.vote_bits for _, module in ternary_modules(Decoder(config, 11))}
    assert bits == {4}
