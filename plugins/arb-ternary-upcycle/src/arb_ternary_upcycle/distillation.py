"""The divergence of a student's predictions from a teacher's.

Shapes: ``V`` vocabulary; ``...`` any others.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def divergence(student_V: Tensor, teacher_V: Tensor, counts: Tensor, temperature: float) -> Tensor:
    """Return ``T**2 * KL(teacher || student)`` in nats, the mean over the predictions that count.

    Both are softmaxes of logits over ``T``; the square keeps the size of the gradient (Hinton,
    Vinyals and Dean, "Distilling the Knowledge in a Neural Network", 2015). The result is a float32
    scalar, 0 if no prediction counts.

    Args:
        student_V: logits ``[..., V]``.
        teacher_V: logits ``[..., V]``, without a gradient.
        counts: bool ``[...]``.
        temperature: ``T``.
    """
    log_student = F.log_softmax(student_V.float() / temperature, dim=-1)
    log_teacher = F.log_softmax(teacher_V.float() / temperature, dim=-1)
    each = F.kl_div(log_student, log_teacher, reduction="none", log_target=True).sum(dim=-1)
    mean = each.masked_fill(~counts, 0.0).sum() / counts.sum().clamp_min(1)
    return torch.mul(mean, temperature**2)
