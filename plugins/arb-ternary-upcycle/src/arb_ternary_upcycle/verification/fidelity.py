"""The check ``fidelity``: the student's loss on held-out text against its teacher's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from attrs import asdict, define, frozen
from torch import Tensor

from arb_ternary.protocols.data import MaskedBatch
from arb_ternary_train.protocols import CheckResult
from arb_ternary_upcycle.verification.conclusion import conclude
from arb_ternary_upcycle.verification.config import FidelityConfig
from arb_ternary_upcycle.verification.pair import Pair, held_out_batches, open_pair
from arb_ternary_upcycle.verification.reports import judge

if TYPE_CHECKING:
    from arb_ternary_train.context import TrainingContext


@frozen
class Fidelity:
    """Teacher and student on the same predictions.

    Attributes:
        teacher_nll, student_nll: mean cross entropy, nats per prediction.
        divergence: mean ``KL(teacher || student)`` of the distributions over the next token, nats
            per prediction.
        agreement: share of predictions whose likeliest token is the same.
        tokens: number of predictions.
    """

    teacher_nll: float
    student_nll: float
    divergence: float
    agreement: float
    tokens: int

    @property
    def delta_nll(self) -> float:
        """The student's loss minus the teacher's."""
        return self.student_nll - self.teacher_nll

    @property
    def ppl_ratio(self) -> float:
        """The student's perplexity over the teacher's; infinite if that overflows."""
        return math.exp(self.delta_nll) if self.delta_nll < 709.0 else math.inf

    def to_json(self) -> dict[str, float]:
        """Return plain numbers."""
        derived = {"delta_nll": self.delta_nll, "ppl_ratio": self.ppl_ratio}
        return {**asdict(self), **derived, "tokens": float(self.tokens)}


def measure_fidelity(pair: Pair, batches: Sequence[MaskedBatch]) -> Fidelity:
    """Compare both models on the predictions of ``batches`` that count; sums are float64."""
    sums = torch.zeros(4, dtype=torch.float64)
    tokens = 0
    for number, *streams in pair.streams([batch.inputs for batch in batches]):
        counts = batches[number].loss_mask.flatten()
        targets = batches[number].targets.flatten()
        for place, teacher, student in pair.logits(*streams):
            kept = counts[place].to(teacher.device)
            wanted = targets[place].to(teacher.device)[kept]
            sums += _sums(teacher[kept], student[kept], wanted)
            tokens += int(kept.sum())
    teacher_nll, student_nll, divergence, agreement = (sums / max(1, tokens)).tolist()
    return Fidelity(teacher_nll, student_nll, divergence, agreement, tokens)


def _sums(teacher_MV: Tensor, student_MV: Tensor, targets_M: Tensor) -> Tensor:
    """Return sums over ``M`` predictions: both losses, the divergence, equal choices."""
    teacher_MV = torch.log_softmax(teacher_MV.double(), dim=-1)
    student_MV = torch.log_softmax(student_MV.double(), dim=-1)
    teacher_loss = -teacher_MV.gather(1, targets_M[:, None]).sum()
    student_loss = -student_MV.gather(1, targets_M[:, None]).sum()
    divergence = (teacher_MV.exp() * (teacher_MV - student_MV)).sum()
    same = (teacher_MV.argmax(dim=1) == student_MV.argmax(dim=1)).sum().double()
    return torch.stack([teacher_loss, student_loss, divergence, same]).cpu()


@define(eq=False)
class FidelityCheck:
    """Judges the difference of the losses, and its exponential, the ratio of perplexities."""

    config: FidelityConfig

    def check(self, context: TrainingContext) -> CheckResult:
        """See ``Check``."""
        config = self.config
        pair = open_pair(context, config.teacher)
        batches = held_out_batches(context, config.batches, config.batch_size, config.block_size)
        found = measure_fidelity(pair, batches)
        judged = [
            *judge("delta NLL", found.delta_nll, config.max_delta_nll),
            *judge("perplexity ratio", found.ppl_ratio, config.max_ppl_ratio),
        ]
        details = {"batches": len(batches), "teacher": str(pair.teacher.path)}
        return conclude(context, "fidelity", config, judged, found.to_json(), details)
