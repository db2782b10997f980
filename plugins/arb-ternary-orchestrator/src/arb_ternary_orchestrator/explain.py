"""What was decided in a run, why, and what it cost: read back from the run's directory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from attrs import frozen

from arb_ternary.config.yaml_document import read_yaml
from arb_ternary.errors import UsageProblem
from arb_ternary_orchestrator.decision_log import read_decisions
from arb_ternary_train.directory import RunDirectory
from arb_ternary_train.metrics import read_metrics

Row = Sequence[object]

#: What the columns have room for, in the place of longer words.
_PHRASES: Final = {
    "loss / baseline": "loss {} x baseline",
    "slope in standard errors": "slope {} errors",
    "steps since the last decision": "{} steps",
}


def policies_in(run: RunDirectory, config: Any) -> list[Mapping[str, Any]]:
    """The options of each orchestrator in ``config``, the plain values of the run's config.

    Raises:
        UsageProblem: there is none.
    """
    found = [
        policy
        for policy in _values_called("policy", config)
        if isinstance(policy, Mapping) and policy.get("name") == "orchestrator"
    ]
    if not found:
        raise UsageProblem(
            f"{run.path}: this run has no orchestrator",
            "A phase has one with `orchestrator: {}` among its options, a manifest with "
            "`orchestrator_enabled: true`.",
        )
    return found


def _values_called(key: str, data: Any) -> Iterator[Any]:
    if isinstance(data, Mapping):
        for name, value in data.items():
            if name == key:
                yield value
            yield from _values_called(key, value)
    elif isinstance(data, list):
        for value in data:
            yield from _values_called(key, value)


@frozen
class Explanation:
    """The decisions of a run.

    Attributes:
        run: its directory.
        steps: that it has taken and kept so far.
        decisions: records of ``orchestrator_decisions.jsonl``, in order.
    """

    run: str
    steps: int
    decisions: Sequence[Mapping[str, Any]]

    @property
    def steps_spent(self) -> int:
        """Steps of candidates that were not kept."""
        return sum(each["steps_spent"] for each in self.decisions)

    @property
    def seconds(self) -> float:
        """Time that the decisions took."""
        return float(sum(each["seconds"] for each in self.decisions))

    @property
    def overhead(self) -> float:
        """Share of all steps, kept or not, that went to candidates that were not kept."""
        return self.steps_spent / max(1, self.steps + self.steps_spent)

    @property
    def kinds(self) -> Counter[str]:
        """How many decisions compared candidates, switched, and rolled back."""
        count: Counter[str] = Counter()
        for each in self.decisions:
            count["comparisons"] += bool(each["candidates"])
            count["switches"] += each["from"] != each["to"]
            count["rollbacks"] += each.get("rolled_back_to") is not None
        return count

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "run": self.run,
            "steps": self.steps,
            "steps_spent": self.steps_spent,
            "overhead": self.overhead,
            "seconds": self.seconds,
            **{kind: self.kinds[kind] for kind in ("comparisons", "switches", "rollbacks")},
            "decisions": [dict(each) for each in self.decisions],
        }

    def summary(self) -> list[str]:
        """What it comes to, a sentence a line."""
        if not self.decisions:
            return [f"{self.run}: no decision was due in {self.steps:,} steps."]
        counts = [_counted(len(self.decisions), "decisions")]
        counts += [
            _counted(self.kinds[kind], kind) for kind in ("comparisons", "switches", "rollbacks")
        ]
        return [
            f"{self.run}: {', '.join(counts)} in {self.steps:,} steps.",
            f"Candidates that were not kept took {_counted(self.steps_spent, 'steps')} more, "
            f"{self.overhead:.1%} of all; deciding took {_duration(self.seconds)}.",
        ]

    def decision_rows(self) -> Iterator[Row]:
        """Step, strategy before and after, why; the phase first where there are several."""
        several = self.several_phases
        for each in self.decisions:
            row = (
                each["step"],
                each["from"],
                "(stays)" if each["to"] == each["from"] else each["to"],
                _why(each),
            )
            yield (each.get("phase", ""), *row) if several else row

    def candidate_rows(self) -> Iterator[Row]:
        """Step, strategy, loss before and after, reward, steps, what became of these, time that the
        decision took.
        """
        for each in self.decisions:
            for place, candidate in enumerate(each["candidates"]):
                # Not the highest reward: the strategy in use stays where no other exceeds it by the
                # margin.
                kept = candidate["name"] == each["to"] and candidate["reward"] is not None
                yield (
                    "" if place else each["step"],
                    candidate["name"],
                    _number(candidate["loss_start"], ".4f"),
                    _number(candidate["loss_end"], ".4f"),
                    _number(candidate["reward"], "+.3f"),
                    candidate.get("steps", ""),
                    "kept" if kept else "failed" if candidate.get("failed") else "lost",
                    "" if place else _duration(each["seconds"]),
                )

    def notes(self) -> Iterator[str]:
        """What there is to say of candidates that failed, and of comparisons that were not made."""
        for each in self.decisions:
            if each.get("not_begun"):
                yield f"step {each['step']}: nothing was compared: {each['not_begun']}"
            for candidate in each["candidates"]:
                if isinstance(candidate.get("failed"), str):
                    yield f"step {each['step']}: {candidate['name']} failed: {candidate['failed']}"

    @property
    def several_phases(self) -> bool:
        """Whether decisions of more than one phase are among these."""
        return len({each.get("phase", "") for each in self.decisions}) > 1


def explain_run(run: RunDirectory) -> Explanation:
    """The decisions of a run so far, whether or not it has ended.

    Raises:
        UsageProblem: the run has no orchestrator.
        ArbError: a file of the run is damaged.
    """
    decisions = read_decisions(run.path)
    if not decisions:
        policies_in(
            run, read_yaml(run.config_file.read_text(encoding="utf-8"), str(run.config_file)).data
        )
    records = read_metrics(run.metrics_file) if run.metrics_file.exists() else []
    steps = max((record["step"] for record in records if record.get("event") == "train"), default=0)
    return Explanation(str(run.path), steps, decisions)


def _why(decision: Mapping[str, Any]) -> str:
    reason = decision["reason"]
    metric = decision["metric"]
    value = decision["value"]
    if metric in _PHRASES:
        seen = _PHRASES[metric].format(_number(value, ".4g"))
    elif reason in ("manual", "phase_change"):  # the number is that of steps, and says nothing more
        seen = str(metric)
    else:
        seen = f"{metric} {_number(value, '.4g')}"
    text = f"{reason.replace('_', ' ')}: {seen.removeprefix('phase ')}"
    back = decision.get("rolled_back_to")
    return text if back is None else f"{text}, back to step {back}"


def _number(value: Any, form: str) -> str:
    """A number of a record; one that is not finite is a text there."""
    return "" if value is None else value if isinstance(value, str) else format(value, form)


def _counted(count: int, nouns: str) -> str:
    singular = nouns.removesuffix("es") if nouns == "switches" else nouns.removesuffix("s")
    return f"{count:,} {singular if count == 1 else nouns}"


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"
