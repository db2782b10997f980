"""The phase ``verify``: checks in the middle of a run, before later phases cost anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attrs import asdict

from arb_ternary.errors import ArbError
from arb_ternary.protocols.runs import PhaseResult
from arb_ternary_train.build import require_protocol
from arb_ternary_train.protocols import Check, CheckResult
from arb_ternary_upcycle.verification.config import VerifyConfig

if TYPE_CHECKING:
    from arb_ternary_train.context import TrainingContext


class VerifyPhase:
    """Makes all checks of ``config`` in their order; then a failed one may end the run."""

    name = "verify"

    def __init__(self, config: VerifyConfig) -> None:
        self.config = config
        self._results: list[CheckResult] = []

    def run(self, context: TrainingContext) -> PhaseResult:
        """Make the checks that have not been made; see ``Phase``.

        Raises:
            ArbError: a check that fails the run has not passed.
        """
        for choice in self.config.checks[len(self._results) :]:
            check: Check = require_protocol(choice.build(), Check, choice)
            result = check.check(context)
            self._results.append(result)
            context.record(
                "check", {"check": choice.name, "passed": result.passed, **result.metrics}
            )
            context.note(f"check {choice.name}: {result.verdict}: {result.summary}")
            context.mark_progress()
            context.stop_if_requested()
        failed = {}
        for choice, result in zip(self.config.checks, self._results, strict=True):
            if not result.passed and result.fails_run:
                failed[choice.name] = result.summary
        if failed:
            raise ArbError(
                f"{context.directory}: failed checks: {', '.join(failed)}",
                "\n".join(f"{name}: {summary}" for name, summary in failed.items()),
            )
        context.save_checkpoint()
        passed = sum(result.passed for result in self._results)
        metrics = {"checks": float(len(self._results)), "passed": float(passed)}
        return PhaseResult(steps=0, metrics=metrics)

    def state_dict(self) -> dict[str, Any]:
        """Return the outcomes so far."""
        return {"results": [asdict(result) for result in self._results]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the checks that were made."""
        self._results = [CheckResult(**result) for result in state["results"]]
