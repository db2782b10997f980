"""A copy of a model to compute with, such as the reference of DPO."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from arb_ternary.backends.dispatch import pack_votes
from arb_ternary.ternary.models import ternary_modules
from arb_ternary.ternary.vote_memory import NoAccumulators


def frozen_copy(model: nn.Module) -> nn.Module:
    """Return a copy of ``model`` that computes and does not learn.

    Its ternary weights are frozen and have no accumulators: two bits per weight instead of ten. Its
    float parameters do not require grad. It has the mode (``train`` or ``eval``) of ``model``.
    """
    without: dict[int, Any] = {}
    for _, module in ternary_modules(model):
        none = torch.zeros(
            0, module.shape.in_features, dtype=torch.int8, device=module.votes.device
        )
        # A deep copy takes what is here instead of making a copy of its own.
        without[id(module.votes)] = pack_votes(module.backend, none, module.shape.vote_bits)
    copied = copy.deepcopy(model, without)
    copied.requires_grad_(False)
    for _, module in ternary_modules(copied):
        module.frozen = True
        module.accumulates = False
        module.shard = NoAccumulators()
        module.register_buffer("votes", module.votes, persistent=False)
        module.kept_votes = module.sums = module.magnitudes = module.vote_scale = None
    return copied
