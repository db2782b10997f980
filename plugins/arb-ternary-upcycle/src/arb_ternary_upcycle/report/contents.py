"""What a report tells of a run: everything from the files of the run directory and of the runs that
it started from.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from arb_ternary.errors import ArbError
from arb_ternary_train.directory import RunDirectory
from arb_ternary_train.metrics import read_metrics
from arb_ternary_upcycle.benchmark.measurements import read_measurements
from arb_ternary_upcycle.report.tables import Column, Table
from arb_ternary_upcycle.stages import lineage
from arb_ternary_upcycle.verification.reports import read_reports

_SIZE: Final = (
    Column("model", "model", "text"),
    Column("prompt", "prompt", "count"),
    Column("generation", "generated", "count"),
    Column("batch", "batch", "count"),
)
_PERPLEXITY: Final = (
    Column("model", "model", "text"),
    Column("nll", "loss, nats a token"),
    Column("perplexity", "perplexity"),
    Column("ratio", "times the teacher's"),
    Column("divergence", "KL from the teacher"),
    Column("agreement", "same choice", "share"),
    Column("tokens", "tokens", "count"),
)
_LATENCY: Final = (
    *_SIZE,
    Column("prefill_seconds", "prefill", "seconds"),
    Column("first_token_seconds", "first token", "seconds"),
    Column("decode_seconds", "each further token", "seconds"),
    Column("prefill_tokens_per_second", "prefill, tokens/s"),
    Column("decode_tokens_per_second", "decode, tokens/s"),
    Column("decode_seconds_least", "fastest", "seconds"),
    Column("decode_seconds_most", "slowest", "seconds"),
)
_MEMORY: Final = (
    *_SIZE,
    Column("parameters", "weights", "count"),
    Column("bits_per_weight", "bits a weight"),
    Column("weight_bytes", "bytes of weights", "bytes"),
    Column("kv_cache_bytes", "keys and values", "bytes"),
    Column("peak_bytes", "peak", "bytes"),
)
_CACHE: Final = (
    Column("model", "model", "text"),
    Column("bytes_per_token", "keys and values of a token", "bytes"),
    Column("ratio", "of the teacher's"),
)
_CHECKS: Final = (
    Column("label", "check", "text"),
    Column("what", "measured", "text"),
    Column("value", "value"),
    Column("relation", "", "text"),
    Column("limit", "limit"),
    Column("passed", "passed", "text"),
    Column("fails_run", "fails the run", "text"),
)
_PROJECTION: Final = (
    Column("name", "linear", "text"),
    Column("held_out", "error, held out"),
    Column("calibration", "error, calibration"),
    Column("rounding", "of rounding alone"),
    Column("zeros", "trits of 0", "share"),
)
_BLOCKS: Final = (
    Column("block", "block", "count"),
    Column("steps", "steps", "count"),
    Column("l1_first", "L1 at first"),
    Column("l1", "L1 at last"),
    Column("reason", "ended by", "text"),
)


@frozen
class Curve:
    """Losses of one phase of one run, as step and loss."""

    title: str
    training: Sequence[tuple[int, float]]
    validation: Sequence[tuple[int, float]]


@frozen
class Contents:
    """A report before it has a form.

    Attributes:
        name: of the run.
        facts: short lines about it, by what they tell.
        tables: those that there is something for.
        projection: medians of the projection's errors; empty where there was none.
        curves: of the phases that trained, oldest first.
        config: the run's config, as text.
    """

    name: str
    facts: Mapping[str, str]
    tables: Sequence[Table]
    projection: Mapping[str, float]
    curves: Sequence[Curve]
    config: str

    def table(self, name: str) -> Table | None:
        """The table of that name."""
        return next((table for table in self.tables if table.name == name), None)

    def to_json(self) -> dict[str, Any]:
        """``report.json``: every table by its name, and the facts."""
        return {
            "name": self.name,
            "facts": dict(self.facts),
            "projection_medians": dict(self.projection),
            **{table.name: table.to_json() for table in self.tables},
        }


def gather(run: Path) -> Contents:
    """Everything that is known of the run directory ``run``.

    Raises:
        ArbError: a file of it is damaged.
    """
    directory = RunDirectory.existing(run)
    measured = read_measurements(run) or {"origin": {}, "parts": {}}
    parts: Mapping[str, Any] = measured["parts"]
    runs = list(reversed(list(lineage(run))))
    projection = _projection(runs)
    tables = [
        _perplexity(parts.get("perplexity")),
        Table("latency", "Speed", _LATENCY, _passes(parts, "latency")),
        Table("memory", "Memory", _MEMORY, _passes(parts, "memory")),
        _cache(parts.get("kv_cache")),
        Table("checks", "Checks", _CHECKS, _checks(run)),
        Table(
            "projection",
            "Projection to ternary weights",
            _PROJECTION,
            projection.get("linears", []),
        ),
        Table("blockwise", "Block by block", _BLOCKS, _blocks(runs)),
    ]
    record = directory.record()
    return Contents(
        name=str(record["name"]),
        facts=_facts(record, measured),
        tables=[table for table in tables if table.rows],
        projection=projection.get("medians", {}),
        curves=[curve for each in runs for curve in _curves(each, named=len(runs) > 1)],
        config=directory.config_file.read_text(encoding="utf-8"),
    )


def _facts(record: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, str]:
    machine = measured["parts"].get("machine", {})
    facts = {"data": str(record["data"]["name"]), "ids": f"{record['vocabulary_size']:,}"}
    if "step" in measured["origin"]:
        facts["measured after"] = f"{measured['origin']['step']:,} steps"
    if machine:
        place = machine["gpu"] or machine["processor"]
        threads = f"{machine['threads']} thread{'s' if machine['threads'] > 1 else ''}"
        facts["measured on"] = f"{place}, {threads}, backend {machine['backend']}"
    versions = record["versions"]
    facts["with"] = f"arb-ternary-core {versions['arb-ternary-core']}, torch {versions['torch']}"
    return facts


def _perplexity(found: Mapping[str, Any] | None) -> Table:
    rows: list[dict[str, Any]] = []
    if found is not None:
        teacher = found["teacher_nll"]
        student = found["student_nll"]
        common = {"tokens": int(found["tokens"])}
        rows = [
            {
                "model": "teacher",
                "nll": teacher,
                "perplexity": _exponential(teacher),
                "ratio": 1.0,
                **common,
            },
            {
                "model": "student",
                "nll": student,
                "perplexity": _exponential(student),
                "ratio": found["ppl_ratio"],
                "divergence": found["divergence"],
                "agreement": found["agreement"],
                **common,
            },
        ]
    return Table("perplexity", "Quality on held-out text", _PERPLEXITY, rows)


def _exponential(nll: Any) -> Any:
    """``exp(nll)``; a loss that is no number, or beyond any number, stays as it is."""
    return math.exp(nll) if isinstance(nll, float) and nll < 709.0 else nll


def _passes(parts: Mapping[str, Any], kind: str) -> list[dict[str, Any]]:
    rows = [row for key, found in parts.items() if key.startswith(f"{kind} ") for row in found]
    return sorted(
        rows,
        key=lambda row: (row["prompt"], row["generation"], row["batch"], row["model"] != "teacher"),
    )


def _cache(found: Mapping[str, int] | None) -> Table:
    rows: list[dict[str, Any]] = []
    if found is not None:
        sizes = {name: found[f"{name}_bytes_per_token"] for name in ("teacher", "student")}
        rows = [
            {"model": name, "bytes_per_token": size, "ratio": size / sizes["teacher"]}
            for name, size in sizes.items()
        ]
    return Table("kv_cache", "Keys and values", _CACHE, rows)


def _checks(run: Path) -> list[dict[str, Any]]:
    return [
        {
            **judged,
            "label": report["label"],
            "relation": "at most" if judged["at_most"] else "at least",
            "fails_run": report["fails_run"],
        }
        for report in read_reports(run)
        for judged in report["judged"]
    ]


def _projection(runs: Sequence[Path]) -> Mapping[str, Any]:
    """The newest report of a projection."""
    for run in reversed(runs):
        file = run / "stages" / "projection.json"
        if file.exists():
            try:
                found: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise ArbError(f"{file}: cannot be read: {error}") from error
            return found
    return {}


def _records(run: Path) -> list[dict[str, Any]]:
    file = RunDirectory(run).metrics_file
    return read_metrics(file) if file.exists() else []


def _blocks(runs: Sequence[Path]) -> list[dict[str, Any]]:
    """Of the newest run that trained block by block."""
    for run in reversed(runs):
        if rows := [record for record in _records(run) if record.get("event") == "block"]:
            return rows
    return []


def _curves(run: Path, *, named: bool) -> list[Curve]:
    records = _records(run)
    phases = dict.fromkeys(record["phase"] for record in records if record.get("event") == "train")
    return [
        Curve(
            f"{run.name}: {phase}" if named else phase,
            _points(records, phase, "train"),
            _points(records, phase),
        )
        for phase in phases
    ]


def _points(
    records: Sequence[Mapping[str, Any]], phase: str, event: str = "validation"
) -> list[tuple[int, float]]:
    """Step and loss; a loss that is no number is a text there, and is left out."""
    found = [
        (r["step"], r.get("loss"))
        for r in records
        if r.get("event") == event and r.get("phase") == phase
    ]
    return [(step, loss) for step, loss in found if isinstance(loss, int | float)]
