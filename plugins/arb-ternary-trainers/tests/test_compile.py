from __future__ import annotations

from types import SimpleNamespace as Kit

import torch
from torch import nn

import arb_ternary


def test_a_compiled_model_learns_with_the_same_bits(kit: Kit) -> None:
    flips = []
    states = []
    for compiled in (False, True):
        model = kit.new_net()
        arb_ternary.ternarize(model, gradients="int8")
        optimizer = arb_ternary.make_optimizer(model, lr=0.5, float=torch.optim.SGD)
        forward = torch.compile(model.mixed, backend="aot_eager", fullgraph=True)
        for step in range(4):
            tokens = kit.Bigram().batch(step)
            logits = (forward if compiled else model.mixed)(tokens[:, :-1])
            nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
            flips.append(optimizer.last_outcome.flips)
        states.append(kit.integers(model))
    assert flips[:4] == flips[4:]
    assert sum(flips) > 0
    assert kit.same(*states)
