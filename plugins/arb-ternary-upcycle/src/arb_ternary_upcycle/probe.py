"""The loss of a float model, which is read from disk block by block."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from arb_ternary_upcycle.float_model import FloatModel


@torch.no_grad()
def probe_loss(model: FloatModel, tokens_NS: Tensor) -> float:
    """Return the mean cross entropy of all tokens but the first of each sample, in nats.

    Args:
        model: the model; each block is read once.
        tokens_NS: samples with the token that follows the last input, int64 ``[N, S + 1]``.
    """
    # One sample at a time: the values do not depend on how many there are, and memory stays small.
    streams = [model.embed(sample[None, :-1]) for sample in tokens_NS]
    for number in range(model.config.layers):
        block = model.block(number).to(tokens_NS.device)
        streams = [model.through(block, x_1SD) for x_1SD in streams]
    losses = [
        F.cross_entropy(model.logits(x_1SD)[0], sample[1:])
        for x_1SD, sample in zip(streams, tokens_NS, strict=True)
    ]
    return float(torch.stack(losses).double().mean())
