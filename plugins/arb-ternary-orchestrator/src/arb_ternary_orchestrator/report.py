"""Reports of what was decided: to the files of a run, to the screen, and read back afterwards.

Decisions are the lines of ``orchestrator_decisions.jsonl`` in the run's directory. Of their values
only ``seconds`` depends on the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attrs import asdict, frozen

from arb_ternary.config.yaml_document import read_yaml
from arb_ternary.errors import ArbError, UsageProblem
from arb_ternary_train.directory import RunDirectory
from arb_ternary_train.durable import replacing
from arb_ternary_train.metrics import MetricsWriter, read_metrics, to_line
from arb_ternary_train.progress import format_duration

if TYPE_CHECKING:
    from arb_ternary_orchestrator.branches import Trial
    from arb_ternary_orchestrator.decisions import Trigger
    from arb_ternary_train.context import TrainingContext

DECISIONS_FILE: Final = "orchestrator_decisions.jsonl"
#: What is read of every decision.
_KEYS: Final = (
    "step",
    "from",
    "to",
    "reason",
    "metric",
    "value",
    "candidates",
    "steps_spent",
    "seconds",
)

Row = Sequence[object]


def read_decisions(directory: Path) -> list[dict[str, Any]]:
    """Read the decisions of the run in ``directory``, in order; empty if nothing was decided.

    Raises:
        ArbError: a line before the last is not a decision.
    """
    path = directory / DECISIONS_FILE
    records = read_metrics(path) if path.exists() else []
    for number, record in enumerate(records, start=1):
        missing = [key for key in _KEYS if key not in record]
        if missing:
            raise ArbError(f"{path}:{number}: the file is damaged: {missing[0]!r} is missing")
    return records


# --- while a run trains


class DecisionLog:
    """Reports the decisions of one loop: to the file of decisions, the metrics and the screen.

    The file is opened for the first decision, so a run that decides nothing has none. Decisions
    that a killed run wrote after the checkpoint are removed.

    Args:
        context: the run.
        known: number of decisions that the checkpoint knows; None if the loop begins.

    Attributes:
        length: number of decisions in the file.
    """

    def __init__(self, context: TrainingContext, known: int | None) -> None:
        self._context = context
        self._path = context.directory / DECISIONS_FILE
        self._writer: MetricsWriter | None = None
        self.length = 0
        if known is None:
            begin = context.step
            self._keep(lambda _, record: record["step"] < begin)  # those of earlier loops
        else:
            self._keep(lambda index, _: index < known)

    def _keep(self, keeps: Callable[[int, Mapping[str, Any]], bool]) -> None:
        records = read_decisions(self._path.parent)
        kept = [record for index, record in enumerate(records) if keeps(index, record)]
        self.length = len(kept)
        if kept:
            with replacing(self._path) as temporary:
                temporary.write_bytes(b"".join(map(to_line, kept)))
        else:
            self._path.unlink(missing_ok=True)

    def decided(
        self,
        trigger: Trigger,
        before: str,
        after: str,
        *,
        trials: Sequence[Trial] = (),
        steps_spent: int = 0,
        seconds: float = 0.0,
        rolled_back_to: int | None = None,
        not_begun: str | None = None,
        pending_steps: int = 0,
        numbers: Mapping[str, Any],
    ) -> None:
        """Report a decision.

        Args:
            trigger: why it was due.
            before: the strategy until now.
            after: the strategy from now on.
            trials: the candidates.
            steps_spent: steps of candidates that are not kept.
            seconds: time that the decision took.
            rolled_back_to: step of the run whose state was restored.
            not_begun: why candidates were not compared.
            pending_steps: steps that were taken and are not reported to the run yet.
            numbers: the telemetry at the time.

        Raises:
            ArbError: the disk is full.
        """
        context = self._context
        values = {
            "step": context.step + pending_steps,
            "from": before,
            "to": after,
            "reason": trigger.reason,
            "metric": trigger.metric,
            "value": trigger.value,
            "candidates": [asdict(trial) for trial in trials],
            "steps_spent": steps_spent,
            "rolled_back_to": rolled_back_to,
            "not_begun": not_begun,
        }
        outcome = f"{before} to {after}" if before != after else f"stays with {after}"
        mark: dict[str, str] = {}  # what a figure of the run shows
        if rolled_back_to is not None:
            outcome = f"back to step {rolled_back_to}, {outcome}"
            mark = {"mark": f"back to step {rolled_back_to}", "mark_kind": "rollback"}
        elif before != after:
            mark = {"mark": after, "mark_kind": "switch"}
        elif trials:
            mark = {"mark": "compared", "mark_kind": "branch"}
        if not_begun is not None:
            outcome = f"strategies are not compared: {not_begun}"
        rewards = [f"{trial.name} {_number(trial.reward, '.3f', 'failed')}" for trial in trials]
        if rewards:
            outcome += f"; rewards: {', '.join(rewards)}"

        record = context.record("decision", {**values, **mark})
        if self._writer is None:
            self._writer = MetricsWriter(self._path)
        telemetry = dict(numbers)
        line = {"phase": record["phase"], **values, "telemetry": telemetry, "seconds": seconds}
        self._writer.write(line)
        self.length += 1
        context.mark_progress()
        self.note(f"{trigger.reason} ({trigger.metric} {trigger.value:.4g}): {outcome}")

    def note(self, text: str) -> None:
        """Write a lasting line to the screen and to the run's log."""
        self._context.note(f"step {self._context.step}: orchestrator: {text}")

    def sync(self) -> int:
        """Make what was written durable; return the number of decisions."""
        if self._writer is not None:
            self._writer.sync()
        return self.length

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


# --- afterwards

#: Shorter words for some metrics, with the value.
_PHRASES: Final = {
    "loss / baseline": "loss {} x baseline",
    "slope in standard errors": "slope {} errors",
    "steps since the last decision": "{} steps",
}


def orchestrators_in(run: RunDirectory, config: Any) -> list[Mapping[str, Any]]:
    """Return the options of each orchestrator in ``config``, the plain values of a run's config.

    Raises:
        UsageProblem: there is none.
    """
    policies = [policy for policy in _values_of("policy", config) if isinstance(policy, Mapping)]
    found = [policy for policy in policies if policy.get("name") == "orchestrator"]
    if not found:
        raise UsageProblem(
            f"{run.path}: this run has no orchestrator",
            "A phase has one with `orchestrator: {}` among its options, a manifest with "
            "`orchestrator_enabled: true`.",
        )
    return found


def _values_of(key: str, data: Any) -> Iterator[Any]:
    if isinstance(data, Mapping):
        if key in data:
            yield data[key]
        data = list(data.values())
    if isinstance(data, list):
        for value in data:
            yield from _values_of(key, value)


@frozen
class Explanation:
    """The decisions of a run.

    Attributes:
        run: directory of the run.
        steps: steps that it has taken and kept so far.
        decisions: records of the file of decisions, in order.
    """

    run: str
    steps: int
    decisions: Sequence[Mapping[str, Any]]

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain values."""
        spent = sum(each["steps_spent"] for each in self.decisions)
        return {
            "run": self.run,
            "steps": self.steps,
            "steps_spent": spent,
            "overhead": spent / max(1, self.steps + spent),
            "seconds": float(sum(each["seconds"] for each in self.decisions)),
            "comparisons": sum(bool(each["candidates"]) for each in self.decisions),
            "switches": sum(each["from"] != each["to"] for each in self.decisions),
            "rollbacks": sum(each.get("rolled_back_to") is not None for each in self.decisions),
            "decisions": [dict(each) for each in self.decisions],
        }

    def summary(self) -> list[str]:
        """Return the totals, a sentence per line."""
        if not self.decisions:
            return [f"{self.run}: no decision was due in {self.steps:,} steps."]
        facts = self.to_json()
        return [
            f"{self.run}: steps: {self.steps:,}; decisions: {len(self.decisions)}; comparisons: "
            f"{facts['comparisons']}; switches: {facts['switches']}; rollbacks: "
            f"{facts['rollbacks']}",
            f"Steps of candidates that were not kept: {facts['steps_spent']:,}, "
            f"{facts['overhead']:.1%} of all; time of all decisions: "
            f"{format_duration(facts['seconds'])}",
        ]

    def decision_rows(self) -> Iterator[Row]:
        """Yield phase, step, strategy before and after, and the reason."""
        for each in self.decisions:
            after = "(stays)" if each["to"] == each["from"] else each["to"]
            yield each.get("phase", ""), each["step"], each["from"], after, _reason(each)

    def candidate_rows(self) -> Iterator[Row]:
        """Yield step, strategy, loss before and after, reward, steps, outcome, and the time that
        the decision took.
        """
        for each in self.decisions:
            step = each["step"]
            seconds = format_duration(each["seconds"])
            for candidate in each["candidates"]:
                outcome = "failed" if candidate.get("failed") else "lost"
                # The highest reward may lose: the strategy in use stays unless another exceeds it
                # by the margin.
                if candidate["name"] == each["to"] and candidate["reward"] is not None:
                    outcome = "kept"
                yield (
                    step,
                    candidate["name"],
                    _number(candidate["loss_start"], ".4f"),
                    _number(candidate["loss_end"], ".4f"),
                    _number(candidate["reward"], "+.3f"),
                    candidate.get("steps", ""),
                    outcome,
                    seconds,
                )
                step = seconds = ""

    def notes(self) -> Iterator[str]:
        """Yield a sentence per failed candidate, and per comparison that was not made."""
        for each in self.decisions:
            if each.get("not_begun"):
                yield f"step {each['step']}: nothing was compared: {each['not_begun']}"
            for candidate in each["candidates"]:
                if isinstance(candidate.get("failed"), str):
                    yield f"step {each['step']}: {candidate['name']} failed: {candidate['failed']}"


def explain_run(run: RunDirectory) -> Explanation:
    """Read the decisions of a run so far, whether or not it has ended.

    Raises:
        UsageProblem: the run has no orchestrator.
        ArbError: a file of the run is damaged.
    """
    decisions = read_decisions(run.path)
    if not decisions:
        text = run.config_file.read_text(encoding="utf-8")
        orchestrators_in(run, read_yaml(text, str(run.config_file)).data)
    records = read_metrics(run.metrics_file) if run.metrics_file.exists() else []
    steps = [record["step"] for record in records if record.get("event") == "train"]
    return Explanation(str(run.path), max(steps, default=0), decisions)


def _reason(decision: Mapping[str, Any]) -> str:
    reason = decision["reason"]
    metric = decision["metric"]
    value = _number(decision["value"], ".4g")
    seen = f"{metric} {value}"
    if metric in _PHRASES:
        seen = _PHRASES[metric].format(value)
    elif reason in ("manual", "phase_change"):  # the value is a number of steps
        seen = str(metric)
    text = f"{reason.replace('_', ' ')}: {seen.removeprefix('phase ')}"
    back = decision.get("rolled_back_to")
    return text if back is None else f"{text}, back to step {back}"


def _number(value: Any, form: str, missing: str = "") -> str:
    """Return a number of a record as text; a number that is not finite is a text there already."""
    if value is None:
        return missing
    return value if isinstance(value, str) else format(value, form)
