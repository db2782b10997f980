"""The state of a model in training, and whether it changes."""

from __future__ import annotations

import torch
from torch import nn

from arb_ternary_train.audit import audit


def fingerprint(model: nn.Module) -> tuple[float, ...]:
    """Return numbers that change if weights or their votes do."""
    tensors = [*model.parameters(), *model.buffers()]
    return tuple(float(tensor.detach().to(torch.float64).abs().sum()) for tensor in tensors)


def state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of weights, votes, exponents and moments, and of stored gradients."""
    gradients = sum(each.nbytes for each in model.parameters() if each.requires_grad)
    return audit(model, optimizer).state_bytes + gradients
