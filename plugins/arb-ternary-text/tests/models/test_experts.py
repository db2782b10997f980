from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_text.models.experts import Experts

Configs = Callable[..., DecoderConfig]
Decoders = Callable[..., Decoder]
Tokens = Callable[..., torch.Tensor]
Rounding = Callable[[Decoder, int], float]


@pytest.fixture(scope="session")
def layer(float_config: Configs) -> Callable[..., Experts]:
    def make(**changes: object) -> Experts:
        return Experts(float_config(**({"experts": 4} | changes))).double()

    return make


def one_token(layer: Experts, x_D: torch.Tensor) -> torch.Tensor:
    """Return the layer's update of one token, computed in plain Python."""
    update = torch.zeros_like(x_D)
    before: list[int] = []
    for _ in range(layer.max_iterations):
        state = layer.norm(x_D + layer.residual_scale * update)
        scores = (layer.router.weight @ state).tolist()
        chosen = sorted(
            sorted(range(len(scores)), key=lambda number: (-scores[number], number))[
                : layer.experts_per_token
            ]
        )
        if chosen == before:
            break
        among = chosen if layer.experts_per_token > 1 else range(len(scores))
        total = sum(torch.tensor(scores[number], dtype=torch.float64).exp() for number in among)
        for number in chosen:
            gate = torch.tensor(scores[number], dtype=torch.float64).exp() / total
            update = update + gate * layer.experts[number](state)
        before = chosen
    return update


@pytest.mark.parametrize("per_token", [1, 2, 3])
@pytest.mark.parametrize("passes", [1, 2, 5])
def test_each_token_is_treated_as_if_it_were_alone(
    layer: Callable[..., Experts], per_token: int, passes: int
) -> None:
    experts = layer(experts_per_token=per_token, max_moe_iters=passes, residual_scale=1)
    x = torch.randn(3, 5, 16, dtype=torch.float64)
    expected = torch.stack([one_token(experts, token) for token in x.flatten(0, 1)]).view_as(x)
    torch.testing.assert_close(experts(x), expected, rtol=0, atol=1e-12)


def test_later_passes_refine_tokens_that_change_their_choice(
    layer: Callable[..., Experts],
) -> None:
    x = torch.randn(64, 16, dtype=torch.float64)
    once = layer(max_moe_iters=1)
    twice = layer(max_moe_iters=2)
    twice.load_state_dict(once.state_dict())
    first, _ = once.route(once.norm(x))
    second, _ = once.route(once.norm(x + once(x)))
    repeats = (first == second).all(dim=-1)
    assert repeats.any()
    assert not repeats.all()
    same = (once(x) == twice(x)).all(dim=-1)
    assert torch.equal(same, repeats)


def test_all_experts_with_equal_scores_give_their_mean(layer: Callable[..., Experts]) -> None:
    experts = layer(experts_per_token=4)
    torch.nn.init.zeros_(experts.router.weight)
    x = torch.randn(6, 16, dtype=torch.float64)
    mean = torch.stack([expert(experts.norm(x)) for expert in experts.experts]).mean(0)
    torch.testing.assert_close(experts(x), mean, rtol=0, atol=1e-13)


def test_equal_experts_act_as_one(layer: Callable[..., Experts]) -> None:
    experts = layer(experts_per_token=2)
    for expert in experts.experts[1:]:
        expert.load_state_dict(experts.experts[0].state_dict())
    x = torch.randn(6, 16, dtype=torch.float64)
    torch.testing.assert_close(experts(x), experts.experts[0](experts.norm(x)), rtol=0, atol=1e-13)


def test_equal_scores_go_to_the_experts_with_the_lower_numbers(
    layer: Callable[..., Experts],
) -> None:
    experts = layer(experts=33, experts_per_token=3)
    torch.nn.init.zeros_(experts.router.weight)
    chosen, gates = experts.route(torch.randn(8, 16, dtype=torch.float64))
    assert chosen.tolist() == [[0, 1, 2]] * 8
    torch.testing.assert_close(gates, torch.full((8, 3), 1 / 3, dtype=torch.float64))


@pytest.mark.parametrize("per_token", [1, 2])
def test_the_router_learns(layer: Callable[..., Experts], per_token: int) -> None:
    experts = layer(experts_per_token=per_token, max_moe_iters=3)
    experts(torch.randn(8, 16, dtype=torch.float64)).square().sum().backward()
    assert experts.router.weight.grad is not None
    assert experts.router.weight.grad.abs().max() > 0


def test_experts_decode_as_they_read(
    float_decoder: Decoders, tokens: Tokens, rounding: Rounding
) -> None:
    model = float_decoder(experts=4, max_moe_iters=3)
    ids = tokens(2, 10)
    cache = model.new_cache(2)
    with torch.no_grad():
        pieces = [model(piece, cache) for piece in ids.split([3, 1, 1, 4, 1], dim=1)]
    # Each block may run its experts three times.
    torch.testing.assert_close(
        torch.cat(pieces, 1), model(ids), rtol=0, atol=3 * rounding(model, 10)
    )
