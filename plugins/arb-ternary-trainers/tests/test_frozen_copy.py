from __future__ import annotations

import copy
from types import SimpleNamespace as Kit

import pytest
import torch
from torch import nn

import arb_ternary
from arb_ternary.errors import UsageProblem
from arb_ternary.ternary.models import ternary_modules


def bits_per_weight(model: nn.Module) -> float:
    modules = [module for _, module in ternary_modules(model)]
    tensors = [tensor for m in modules for tensor in (*m.buffers(), *m.working_memory())]
    distinct = {id(tensor): tensor.nbytes for tensor in tensors}
    return 8 * sum(distinct.values()) / sum(m.trits().numel() for m in modules)


def test_a_frozen_copy_has_two_bits_per_weight_and_the_same_outputs(kit: Kit) -> None:
    model = kit.new_net(width=512)
    arb_ternary.ternarize(model)
    optimizer = arb_ternary.make_optimizer(model, lr=0.5, float_lr=0.02)
    tokens = kit.Bigram().batch(0)
    for _ in range(2):
        kit.loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    reference = arb_ternary.frozen_copy(model)
    assert bits_per_weight(copy.deepcopy(model)) > 10
    assert bits_per_weight(reference) < 2.3

    expected = model(tokens).detach()
    votes = kit.integers(model)
    kit.loss_of(reference, tokens).requires_grad_().backward()
    kit.loss_of(model, tokens).backward()
    optimizer.step()
    # The model goes on learning, and the copy stays.
    assert not kit.same(votes, kit.integers(model))
    assert torch.equal(reference(tokens), expected)
    assert not any(parameter.requires_grad for parameter in reference.parameters())
    with pytest.raises(UsageProblem, match="all ternary weights of the model"):
        arb_ternary.make_optimizer(reference)


def test_a_frozen_copy_is_saved_without_accumulators_and_copied_again(kit: Kit) -> None:
    model = kit.new_net()
    arb_ternary.ternarize(model)
    reference = arb_ternary.frozen_copy(model)
    state = reference.state_dict()
    assert "up.ternary.weight" in state
    assert "up.ternary.votes" not in state
    again = arb_ternary.frozen_copy(reference)
    for other in (again, copy.deepcopy(reference)):
        assert kit.same(dict(other.state_dict()), dict(state))
    reference.load_state_dict(copy.deepcopy(state))
    reference.to(torch.bfloat16)
    assert reference(kit.Bigram().batch(0)).dtype == torch.bfloat16
