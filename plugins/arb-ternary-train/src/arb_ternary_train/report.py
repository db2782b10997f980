"""The report of a finished run: audit, loss and baselines, speed, checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import field, frozen

from arb_ternary.errors import ArbError
from arb_ternary.protocols.data import DataSource, MaskingStrategy
from arb_ternary_train.audit import Audit, audit
from arb_ternary_train.capabilities import baselines, held_out_predictions
from arb_ternary_train.context import TrainingContext
from arb_ternary_train.evaluate import loss_unit_of, prediction_name
from arb_ternary_train.progress import format_bytes
from arb_ternary_train.protocols import CheckResult


@frozen
class RunReport:
    """A finished run.

    Attributes:
        directory: the run directory.
        steps: optimizer steps.
        tokens: predictions trained on.
        validation_loss: loss of the evaluation at the end, in ``loss_unit``; None if there was
            none.
        validation_share: share of the held-out samples that the evaluation took; None if there
            was no evaluation, or if the data source does not say how many there are.
        validation_metrics: means of the masking's scores in the same evaluation.
        baselines: what simple predictors reach on all held-out samples, by name.
        tokens_per_second: training speed of this process, without evaluations and checkpoints; 0
            if it trained on nothing.
        audit: what the model stores.
        checks: outcome of each check, by name.
        phases: steps and final numbers of each phase.
        noun: name of one prediction.
        loss_unit: unit of the loss.
    """

    directory: str
    steps: int
    tokens: int
    validation_loss: float | None
    baselines: Mapping[str, float]
    tokens_per_second: float
    audit: Audit
    checks: tuple[tuple[str, CheckResult], ...]
    phases: tuple[dict[str, Any], ...]
    validation_metrics: Mapping[str, float] = field(factory=dict)
    validation_share: float | None = None
    noun: str = "token"
    loss_unit: str = "nats per token"

    @property
    def failed_checks(self) -> tuple[str, ...]:
        """Names of the checks that did not pass and fail the run."""
        return tuple(name for name, result in self.checks if _fails(result))

    def raise_failed_checks(self) -> None:
        """Raise an ArbError with the summary of each failed check, if there is one."""
        if not self.failed_checks:
            return
        summaries = [f"{name}: {result.summary}" for name, result in self.checks if _fails(result)]
        raise ArbError(
            f"{self.directory}: failed checks: {', '.join(self.failed_checks)}",
            "\n".join(summaries),
        )

    def rows(self) -> list[tuple[str, str]]:
        """Return the numbers as rows of text."""
        speed = "nothing trained in this process"
        if self.tokens_per_second:
            speed = f"{self.tokens_per_second:,.0f}"
        loss = "not evaluated" if self.validation_loss is None else f"{self.validation_loss:.4f}"
        rows = [(f"validation loss ({self.loss_unit})", loss)]
        for name, value in self.validation_metrics.items():
            rows.append((f"validation {_words(name)}", f"{value:.4f}"))
        for name, value in self.baselines.items():
            rows.append((f"{_words(name)} of all validation {self.noun}s", f"{value:.4f}"))
        if self.validation_share is not None:
            share = f"{self.validation_share:.0%} of the validation {self.noun}s"
            if self.validation_share == 1:
                share = f"all validation {self.noun}s"
            rows.append(("evaluated on", share))
        size = f"{format_bytes(self.audit.model_bytes)}, {self.audit.parameters:,} parameters"
        rows += [
            ("model size", size),
            ("training state", f"{self.audit.state_bits_per_parameter:.2f} bits per parameter"),
            ("steps", f"{self.steps:,}"),
            (f"{self.noun}s trained on", f"{self.tokens:,}"),
            (f"{self.noun}s per second", speed),
        ]
        return rows

    def to_json(self) -> dict[str, Any]:
        """Return plain numbers for ``result.json``."""
        checks = [
            {
                "name": name,
                "passed": result.passed,
                "fails_run": result.fails_run,
                "summary": result.summary,
                "metrics": dict(result.metrics),
            }
            for name, result in self.checks
        ]
        return {
            "steps": self.steps,
            "tokens": self.tokens,
            "validation_loss": self.validation_loss,
            "validation_metrics": dict(self.validation_metrics),
            **self.baselines,
            "baselines": sorted(self.baselines),
            "tokens_per_second": self.tokens_per_second,
            "audit": self.audit.to_json(),
            "checks": checks,
            "phases": list(self.phases),
        }


def baselines_of(
    data: DataSource, masking: MaskingStrategy, shape: tuple[int, int]
) -> Mapping[str, float]:
    """Return what simple predictors reach on the samples of an evaluation.

    Baselines are cross entropies: there are none if the losses of ``masking`` are not in nats.

    Args:
        data: the data source.
        masking: the masking strategy.
        shape: ``(batch_size, block_size)`` of the evaluation.
    """
    if not loss_unit_of(data, masking).startswith("nats"):
        return {}
    return baselines(data, shape[1])


def make_report(context: TrainingContext, checks: Sequence[tuple[str, CheckResult]]) -> RunReport:
    """Return the report of a run that has ended."""
    validation = context.validation
    book = context.logbook
    phases = []
    for choice, result in zip(context.config.phases, context.finished, strict=True):
        phases.append({"name": choice.name, "steps": result.steps, **result.metrics})
    share = None
    batch_size, block_size = context.shape_to_evaluate
    all_predictions = held_out_predictions(context.data, block_size)
    if validation is not None and all_predictions:
        share = min(1.0, context.batches_at_end * batch_size * block_size / all_predictions)
    return RunReport(
        directory=str(context.directory),
        steps=context.step,
        tokens=context.tokens,
        validation_loss=None if validation is None else validation.loss,
        baselines=baselines_of(context.data, context.masking, context.shape_to_evaluate),
        tokens_per_second=book.train_tokens / book.train_seconds if book.train_seconds else 0.0,
        audit=audit(context.model, context.optimizer),
        checks=tuple(checks),
        phases=tuple(phases),
        validation_metrics={} if validation is None else validation.metrics,
        validation_share=share,
        noun=prediction_name(context.data),
        loss_unit=loss_unit_of(context.data, context.masking),
    )


def _fails(result: CheckResult) -> bool:
    """Return whether a check fails the run."""
    return not result.passed and result.fails_run


def _words(name: str) -> str:
    return name.replace("_", " ")
