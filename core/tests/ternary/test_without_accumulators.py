"""Modules without accumulators compute the same, and refuse to learn."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from arb_ternary import TernaryEmbedding, TernaryLinear, TernaryRMSNorm
from arb_ternary.errors import UsageProblem
from arb_ternary.ternary.module import TernaryModule
from arb_ternary.ternary.vote_memory import ACCUMULATES

_IDS = torch.tensor([0, 3, 3, 5])
_ROWS = torch.linspace(-2, 2, 4 * 40).view(4, 40)
_KINDS: dict[str, tuple[Callable[[int], TernaryModule], Tensor]] = {
    "linear": (lambda bits: TernaryLinear(40, 6, group_size=32, bias=True, vote_bits=bits), _ROWS),
    "float": (
        lambda bits: TernaryLinear(40, 6, group_size="row", activations="float", vote_bits=bits),
        _ROWS,
    ),
    "embedding": (lambda bits: TernaryEmbedding(6, 40, vote_bits=bits), _IDS),
    "norm": (lambda bits: TernaryRMSNorm(40, vote_bits=bits), _ROWS),
}


def without(make: Callable[[], TernaryModule]) -> TernaryModule:
    token = ACCUMULATES.set(False)
    try:
        return make()
    finally:
        ACCUMULATES.reset(token)


@pytest.fixture(params=[(kind, bits) for kind in _KINDS for bits in (8, 4, 2)], ids=str)
def pair(request: pytest.FixtureRequest) -> tuple[TernaryModule, TernaryModule, Tensor]:
    """A module with accumulators that hold something, one without that has its state, and an
    input.
    """
    kind, bits = request.param
    make, x = _KINDS[kind]
    torch.manual_seed(1)
    learns = make(bits)
    learns.set_trits(
        torch.randint_like(learns.trits(), -1, 2), votes=torch.ones_like(learns.trits())
    )
    computes = without(lambda: make(bits))
    computes.load_state_dict(learns.state_dict())
    return learns, computes, x


def test_one_computes_bit_for_bit_what_the_other_does(
    pair: tuple[TernaryModule, TernaryModule, Tensor],
) -> None:
    learns, computes, x = pair
    assert torch.equal(computes(x), learns(x))
    assert torch.equal(copy.deepcopy(computes)(x), learns(x))
    computes.set_backend("torch")
    assert torch.equal(computes.to("cpu").trits(), learns.trits())


def test_a_module_without_accumulators_saves_the_rest(
    pair: tuple[TernaryModule, TernaryModule, Tensor],
) -> None:
    learns, computes, _ = pair
    assert learns.votes.nbytes > 0
    assert computes.votes.nbytes == 0
    wanted = learns.state_dict()
    assert bool(wanted.pop("votes").any())
    found = computes.state_dict()
    assert list(found) == list(wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    with pytest.raises(RuntimeError, match=r'Missing key.*"votes"'):
        learns.load_state_dict(found)


@pytest.mark.parametrize("undoable", [True, False])
def test_backward_is_refused_and_says_how_to_train(
    undoable: bool, pair: tuple[TernaryModule, TernaryModule, Tensor]
) -> None:
    _, computes, x = pair
    computes.undoable = undoable
    before = {name: tensor.clone() for name, tensor in computes.state_dict().items()}
    with pytest.raises(UsageProblem, match="without its accumulators") as caught:
        computes(x).sum().backward()
    assert "--init-from" in caught.value.hint
    assert "accumulators=True" in caught.value.hint
    assert all(torch.equal(tensor, before[name]) for name, tensor in computes.state_dict().items())
    with pytest.raises(UsageProblem, match="without its accumulators"):
        computes.logical_votes()
    with pytest.raises(UsageProblem, match="without its accumulators"):
        computes.apply_votes("apply_votes", 1, 0)


def test_a_frozen_one_lets_gradients_through() -> None:
    layer = without(lambda: TernaryLinear(40, 6, activations="float"))
    layer.frozen = True
    x = _ROWS.clone().requires_grad_()
    layer(x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, layer.dense_weight().sum(dim=0).expand(4, 40))


def test_a_module_without_accumulators_loads_a_whole_state_dict() -> None:
    learns = nn.Sequential(TernaryLinear(40, 6))
    computes = nn.Sequential(without(lambda: TernaryLinear(40, 6)))
    computes.load_state_dict(learns.state_dict())
    layer = computes[0]
    layer.set_trits(torch.ones(6, 40, dtype=torch.int8))
    assert bool((layer.trits() == 1).all())
    assert layer.votes.nbytes == 0
