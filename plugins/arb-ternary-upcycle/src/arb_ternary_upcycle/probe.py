"""The loss of a float model, which is read from disk block by block."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from arb_ternary_upcycle.float_model import FloatModel
from arb_ternary_upcycle.teacher_module import Teacher


@torch.no_grad()
def probe_loss(model: FloatModel, tokens_NS: Tensor) -> float:
    """Return the mean cross entropy of all tokens but the first of each sample, in nats.

    Args:
        model: the model; each block is read once.
        tokens_NS: samples with the token that follows the last input, int64 ``[N, S + 1]``.
    """
    # One sample at a time: the values do not depend on how many there are, and memory stays small.
    teacher = Teacher(model, 0, tokens_NS.device)
    streams = [teacher.embed(sample[None, :-1]) for sample in tokens_NS]
    for number in range(model.config.layers):
        streams = [teacher.run_blocks(x_1SD, number, number + 1) for x_1SD in streams]
    losses = [
        F.cross_entropy(teacher.logits(x_1SD)[0], sample[1:])
        for x_1SD, sample in zip(streams, tokens_NS, strict=True)
    ]
    return float(torch.stack(losses).double().mean())
