"""What upcycling adds to a report, from the files of a run and of the runs that it started from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from arb_ternary_train.directory import RunDirectory
from arb_ternary_train.metrics import metric_names, read_metrics
from arb_ternary_train.plot import RunCurves, read_curves
from arb_ternary_train.report_page.tables import Column, Table
from arb_ternary_upcycle.stages import lineage
from arb_ternary_upcycle.store import read_json, stored_plan
from arb_ternary_upcycle.verification.reports import read_reports

#: Folder of the measurements of the phase ``benchmark`` in a run.
MEASUREMENTS: Final = Path("report") / "measurements"

_MODEL: Final = Column("model", "model", "text")
_SIZE: Final = (
    _MODEL,
    Column("prompt", "prompt", "count"),
    Column("generation", "generated", "count"),
    Column("batch", "batch", "count"),
)
_PERPLEXITY: Final = (
    _MODEL,
    Column("nll", "loss, nats per token"),
    Column("perplexity", "perplexity"),
    Column("ratio", "times the teacher's"),
    Column("divergence", "KL from the teacher"),
    Column("agreement", "same choice", "share"),
    Column("tokens", "tokens", "count"),
)
_LATENCY: Final = (
    *_SIZE,
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
    Column("bits_per_weight", "bits per weight"),
    Column("weight_bytes", "bytes of weights", "bytes"),
    Column("kv_cache_bytes", "keys and values", "bytes"),
    Column("peak_bytes", "peak", "bytes"),
)
_CACHE: Final = (
    _MODEL,
    Column("bytes_per_token", "keys and values per token", "bytes"),
    Column("ratio", "times the teacher's"),
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
    Column("rounding", "error of rounding alone"),
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
class Contents:
    """What upcycling adds to a report.

    Attributes:
        name: of the run.
        facts: short lines about it, by their headings.
        tables: those that have rows.
        projection: medians of the projection's errors; empty without a projection.
        curves: of each run that trained, the newest first.
    """

    name: str
    facts: Mapping[str, str]
    tables: Sequence[Table]
    projection: Mapping[str, float]
    curves: Sequence[RunCurves]

    def table(self, name: str) -> Table | None:
        """Return the table of that name, if it has rows."""
        return next((table for table in self.tables if table.name == name), None)

    def to_json(self) -> dict[str, Any]:
        """Return the content of ``report.json``."""
        return {
            "name": self.name,
            "facts": dict(self.facts),
            "projection_medians": dict(self.projection),
            **{table.name: table.to_json() for table in self.tables},
        }


def gather(run: Path) -> Contents:
    """Gather what there is about a run directory.

    Raises:
        ArbError: one of its files is damaged.
    """
    directory = RunDirectory.existing(run)
    record = directory.record()
    runs = list(reversed(list(lineage(run))))
    records = {each: _records(each) for each in runs}
    plan = stored_plan(run / MEASUREMENTS) or {}
    measured = {}
    if plan:
        for file in (run / MEASUREMENTS).glob("*.json"):
            measured[file.stem] = read_json(file)

    projection: Mapping[str, Any] = {}
    blocks: Sequence[Mapping[str, Any]] = []
    for each in runs:  # the newest run has the last word
        file = each / "stages" / "projection.json"
        if file.exists():
            projection = read_json(file)
        trained = [record for record in records[each] if record.get("event") == "block"]
        blocks = trained or blocks

    tables = (
        Table(
            "perplexity",
            "Quality on held-out text",
            "Both models on the same held-out predictions. KL is the divergence of the student's "
            "distribution from the teacher's, in nats per token; same choice: both find the same "
            "token the likeliest.",
            _PERPLEXITY,
            _perplexity(measured.get("perplexity")),
        ),
        Table(
            "checks",
            "Checks",
            "Each number with its limit. A number at its limit passes.",
            _CHECKS,
            _checks(run),
        ),
        Table(
            "latency",
            "Speed",
            "Medians of repetitions in which teacher and student take turns. First token: from the "
            "ids of a prompt to the next id.",
            _LATENCY,
            _passes(measured, "latency"),
        ),
        Table(
            "memory",
            "Memory",
            "Peak: weights, and the most that generating text takes in addition, if the system "
            "reports it.",
            _MEMORY,
            _passes(measured, "memory"),
        ),
        Table(
            "kv_cache",
            "Keys and values",
            "Bytes of each token of the context, in all layers together.",
            _CACHE,
            _cache(measured.get("kv_cache")),
        ),
        Table(
            "projection",
            "Projection to ternary weights",
            "|difference| / |teacher's output| of every linear. Rounding alone: both weights on "
            "the same inputs.",
            _PROJECTION,
            projection.get("linears", []),
        ),
        Table(
            "blockwise",
            "Block by block",
            "Distance of each block's output from the teacher's, before and after its training.",
            _BLOCKS,
            blocks,
        ),
    )
    curves = [
        read_curves(RunDirectory(each), records[each], 0, "loss")
        for each in reversed(runs)
        if "loss" in metric_names(records[each])
    ]
    return Contents(
        name=str(record["name"]),
        facts=_facts(record, plan, measured.get("machine")),
        tables=[table for table in tables if table.rows],
        projection=projection.get("medians", {}),
        curves=curves,
    )


def _facts(
    record: Mapping[str, Any], plan: Mapping[str, Any], machine: Mapping[str, Any] | None
) -> dict[str, str]:
    facts = {"ids": f"{record['vocabulary_size']:,}"}
    if "step" in plan:
        facts["measured after"] = f"{plan['step']:,} steps"
    if machine is not None:
        place = machine["gpu"] or machine["processor"]
        threads = f"{machine['threads']} thread{'s' if machine['threads'] > 1 else ''}"
        facts["measured on"] = f"{place}, {threads}, backend {machine['backend']}"
    versions = record["versions"]
    facts["with"] = f"arb-ternary-core {versions['arb-ternary-core']}, torch {versions['torch']}"
    return facts


def _perplexity(found: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    if found is None:
        return []
    rows = [
        {
            "model": model,
            "nll": found[f"{model}_nll"],
            "perplexity": _exponential(found[f"{model}_nll"]),
            "tokens": int(found["tokens"]),
        }
        for model in ("teacher", "student")
    ]
    rows[0]["ratio"] = 1.0
    rows[1]["ratio"] = found["ppl_ratio"]
    rows[1]["divergence"] = found["divergence"]
    rows[1]["agreement"] = found["agreement"]
    return rows


def _exponential(nll: float) -> float:
    """Return ``exp(nll)``, or ``nll`` itself if it is infinite or not a number."""
    return math.exp(nll) if nll < 709.0 else nll


def _passes(measured: Mapping[str, Any], kind: str) -> list[dict[str, Any]]:
    rows = []
    for name, found in measured.items():
        if name.startswith(f"{kind}-"):
            rows += found["rows"]
    return sorted(
        rows,
        key=lambda row: (row["prompt"], row["generation"], row["batch"], row["model"] != "teacher"),
    )


def _cache(found: Mapping[str, int] | None) -> list[dict[str, Any]]:
    if found is None:
        return []
    sizes = {name: found[f"{name}_bytes_per_token"] for name in ("teacher", "student")}
    return [
        {"model": name, "bytes_per_token": size, "ratio": size / sizes["teacher"]}
        for name, size in sizes.items()
    ]


def _checks(run: Path) -> list[dict[str, Any]]:
    rows = []
    for report in read_reports(run):
        for judged in report["judged"]:
            relation = "at most" if judged["at_most"] else "at least"
            shared = {"label": report["label"], "fails_run": report["fails_run"]}
            rows.append({**judged, **shared, "relation": relation})
    return rows


def _records(run: Path) -> list[dict[str, Any]]:
    file = RunDirectory(run).metrics_file
    return read_metrics(file) if file.exists() else []
