"""The check ``fidelity``: what the student has lost on held-out text, beside its teacher."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import Tensor

from arb_ternary.protocols.data import MaskedBatch
from arb_ternary_train.protocols import CheckResult
from arb_ternary_upcycle.verification.conclusion import conclude
from arb_ternary_upcycle.verification.config import FidelityConfig
from arb_ternary_upcycle.verification.pair import Pair, held_out_batches, logit_pieces, open_pair
from arb_ternary_upcycle.verification.reports import Findings, Judgement

if TYPE_CHECKING:
    from collections.abc import Sequence

    from arb_ternary_train.context import TrainingContext


@frozen
class Fidelity:
    """Teacher and student on the same predictions.

    Attributes:
        teacher_nll, student_nll: mean cross entropy, nats a prediction.
        divergence: mean ``KL(teacher || student)`` of the distributions over the next token, nats a
            prediction.
        agreement: share of predictions whose likeliest token is the same.
        tokens: predictions.
    """

    teacher_nll: float
    student_nll: float
    divergence: float
    agreement: float
    tokens: int

    @property
    def delta_nll(self) -> float:
        """Student less teacher."""
        return self.student_nll - self.teacher_nll

    @property
    def ppl_ratio(self) -> float:
        """The student's perplexity over the teacher's; infinite where that overflows."""
        return math.exp(self.delta_nll) if self.delta_nll < 709.0 else math.inf

    def to_json(self) -> dict[str, float]:
        """Plain numbers."""
        return {
            "teacher_nll": self.teacher_nll,
            "student_nll": self.student_nll,
            "delta_nll": self.delta_nll,
            "ppl_ratio": self.ppl_ratio,
            "divergence": self.divergence,
            "agreement": self.agreement,
            "tokens": float(self.tokens),
        }


def measure_fidelity(pair: Pair, batches: Sequence[MaskedBatch]) -> Fidelity:
    """Both models on the predictions of ``batches`` that count; sums are float64."""
    sums = torch.zeros(4, dtype=torch.float64)
    tokens = 0
    for number, *streams in pair.streams([batch.inputs for batch in batches]):
        counts = batches[number].loss_mask.flatten()
        targets = batches[number].targets.flatten()
        for place, *logits in logit_pieces(pair, *streams):
            kept = counts[place].to(logits[0].device)
            wanted = targets[place].to(logits[0].device)[kept]
            sums += _sums([each[kept] for each in logits], wanted)
            tokens += int(kept.sum())
    teacher, student, divergence, agreement = (sums / max(1, tokens)).tolist()
    return Fidelity(teacher, student, divergence, agreement, tokens)


def _sums(logits: Sequence[Tensor], targets_M: Tensor) -> Tensor:
    """Sums over ``M`` predictions: both losses, the divergence, equal choices."""
    teacher_MV, student_MV = (torch.log_softmax(each.double(), dim=-1) for each in logits)
    losses = [-each.gather(1, targets_M[:, None]).sum() for each in (teacher_MV, student_MV)]
    divergence = (teacher_MV.exp() * (teacher_MV - student_MV)).sum()
    same = (teacher_MV.argmax(dim=1) == student_MV.argmax(dim=1)).sum().double()
    return torch.stack([*losses, divergence, same]).cpu()


class FidelityCheck:
    """Compares losses: ``delta`` is the student's less the teacher's, and the ratio of perplexities
    its exponential.
    """

    def __init__(self, config: FidelityConfig) -> None:
        self.config = config

    def check(self, context: TrainingContext) -> CheckResult:
        """See ``Check``."""
        config = self.config
        pair = open_pair(context, config.teacher)
        batches = held_out_batches(context, config.batches, config.batch_size, config.block_size)
        found = measure_fidelity(pair, batches)
        judged = []
        if config.max_delta_nll is not None:
            judged.append(Judgement("delta NLL", found.delta_nll, config.max_delta_nll))
        if config.max_ppl_ratio is not None:
            judged.append(Judgement("perplexity ratio", found.ppl_ratio, config.max_ppl_ratio))
        details = {"batches": len(batches), "teacher": str(pair.teacher.model.path)}
        return conclude(
            context,
            "fidelity",
            config,
            Findings(judged=judged, metrics=found.to_json(), details=details),
        )


def build(config: FidelityConfig) -> FidelityCheck:
    """Factory of the check ``fidelity``."""
    return FidelityCheck(config)
