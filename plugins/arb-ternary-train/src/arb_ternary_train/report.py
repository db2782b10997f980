"""What a finished run tells: the audit, the loss beside the entropies of the same tokens, the speed, the checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from attrs import frozen

from arb_ternary.protocols.runs import CheckResult
from arb_ternary.ternary.audit import Audit, audit
from arb_ternary_text.data.entropy import bigram_entropy, unigram_entropy
from arb_ternary_train.linear_state import LinearState, linear_state

if TYPE_CHECKING:
    from arb_ternary_train.context import RunContext

__all__ = ["RunReport", "make_report"]


@frozen
class RunReport:
    """A finished run.

    Attributes:
        directory: where it is.
        steps: optimizer steps.
        tokens: tokens trained on.
        validation_loss: mean cross entropy on all validation tokens, nats a token.
        unigram_entropy: entropy of those tokens, nats a token: what their frequencies alone give.
        bigram_entropy: entropy of a token given the one before it, nats a token.
        tokens_per_second: training speed of this process, without evaluations and checkpoints; 0 where it trained on
            nothing.
        audit: what the model stores.
        linears: training state of the linear weights of its blocks alone.
        checks: outcome of each check, by name.
        phases: steps and final numbers of each phase.
    """

    directory: str
    steps: int
    tokens: int
    validation_loss: float
    unigram_entropy: float
    bigram_entropy: float
    tokens_per_second: float
    audit: Audit
    linears: LinearState
    checks: tuple[tuple[str, CheckResult], ...]
    phases: tuple[dict[str, Any], ...]

    @property
    def failed_checks(self) -> tuple[str, ...]:
        """Names of the checks that did not pass."""
        return tuple(name for name, result in self.checks if not result.passed)

    def rows(self) -> list[tuple[str, str]]:
        """The numbers, as rows of text."""
        speed = f"{self.tokens_per_second:,.0f}" if self.tokens_per_second else "nothing trained in this process"
        return [
            ("steps", f"{self.steps:,}"),
            ("tokens trained on", f"{self.tokens:,}"),
            ("tokens a second", speed),
            ("validation loss (nats a token)", f"{self.validation_loss:.4f}"),
            ("unigram entropy of the same tokens", f"{self.unigram_entropy:.4f}"),
            ("bigram entropy of the same tokens", f"{self.bigram_entropy:.4f}"),
        ]

    def to_json(self) -> dict[str, Any]:
        """Plain numbers for ``result.json``."""
        return {
            "steps": self.steps,
            "tokens": self.tokens,
            "validation_loss": self.validation_loss,
            "unigram_entropy": self.unigram_entropy,
            "bigram_entropy": self.bigram_entropy,
            "tokens_per_second": self.tokens_per_second,
            "audit": self.audit.to_json(),
            "linears": self.linears.to_json(),
            "checks": [
                {"name": name, "passed": result.passed, "summary": result.summary, "metrics": dict(result.metrics)}
                for name, result in self.checks
            ],
            "phases": list(self.phases),
        }


def make_report(context: RunContext, checks: Sequence[tuple[str, CheckResult]]) -> RunReport:
    """The report of a run that has just been evaluated on all validation tokens."""
    validation = context.validation
    assert validation is not None, "the run evaluates before it reports"
    seen = context.data.validation[: validation.span]
    return RunReport(
        directory=str(context.directory.path),
        steps=context.step,
        tokens=context.tokens,
        validation_loss=validation.loss,
        unigram_entropy=unigram_entropy(seen[1:]),
        bigram_entropy=bigram_entropy(seen),
        tokens_per_second=context.train_tokens / context.train_seconds if context.train_seconds else 0.0,
        audit=audit(context.model, context.optimizer),
        linears=linear_state(context.model, context.optimizer),
        checks=tuple(checks),
        phases=tuple(
            {"name": choice.name, "steps": result.steps, **result.metrics}
            for choice, result in zip(context.config.phases, context.finished, strict=True)
        ),
    )
