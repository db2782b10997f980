"""Bytes and seconds per step of ways to train on simulated machines.

Votes, DDP, FSDP2, HSDP, PowerSGD and 1-bit Adam. Nothing is measured, and nothing is sent: bytes
follow from the sizes of a model, seconds from bandwidths. Computation in which transfers could hide
is not counted. The formulas are in ``reports/distributed.md``.
"""

from __future__ import annotations

from typing import Any

from arb_ternary.config.fields import to_plain
from arb_ternary_bench.network.config import ClusterConfig, NetworkConfig, SchemeName
from arb_ternary_bench.network.model import Model, model_of
from arb_ternary_bench.network.schemes import SUMMARIES, state_bytes, transfers
from arb_ternary_bench.study import Session, Study
from arb_ternary_bench.table import Column, Record, ResultTable


def run(config: NetworkConfig, _session: Session) -> dict[str, Any]:
    """Compute bytes and seconds of every scheme on every cluster."""
    model = model_of(config.model)
    rows = []
    for cluster in config.clusters:
        for scheme in config.schemes:
            rows.append(_row(scheme, config, model, cluster))  # noqa: PERF401  # reads as the table
    return {
        "config": to_plain(config),
        "weights": model.weights,
        "float_parameters": model.float_parameters,
        "rows": rows,
    }


def _row(
    scheme: SchemeName, config: NetworkConfig, model: Model, cluster: ClusterConfig
) -> dict[str, Any]:
    found = transfers(scheme, config, model, cluster)
    inside = sum(each.sent.inside for each in found)
    between = sum(each.sent.between for each in found)
    return {
        "cluster": cluster.name,
        "scheme": scheme,
        "summary": SUMMARIES[scheme],
        "inside_bytes": inside,
        "between_bytes": between,
        "bits_per_weight": 8 * (inside + between) / model.weights,
        "seconds_inside": sum(each.sent.seconds_inside(cluster) for each in found),
        "seconds_between": sum(each.sent.seconds_between(cluster) for each in found),
        "seconds": sum(each.sent.seconds(cluster) for each in found),
        "state_bytes": state_bytes(scheme, config, model, cluster),
        "transfers": [
            {
                "what": each.what,
                "inside_bytes": each.sent.inside,
                "between_bytes": each.sent.between,
                "seconds": each.sent.seconds(cluster),
            }
            for each in found
        ],
    }


def _short(value: float) -> str:
    """Format with three digits, and whole numbers from a hundred on."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _column(title: str, key: str, scale: float) -> Column:
    return Column(title, lambda row: _short(row[key] * scale))


def notes(result: Record) -> list[str]:
    """Return the sizes of the model, and what the schemes are."""
    weights = f"{result['weights']:,} ternary weights"
    lines = [f"{weights}, {result['float_parameters']:,} float parameters."]
    schemes = dict.fromkeys(row["scheme"] for row in result["rows"])
    lines += [f"{scheme}: {SUMMARIES[scheme]}." for scheme in schemes]
    return lines


TABLE = ResultTable(
    columns=(
        Column("machines", lambda row: row["cluster"], left=True),
        Column("scheme", lambda row: row["scheme"], left=True),
        Column("GB sent", lambda row: _short((row["inside_bytes"] + row["between_bytes"]) / 1e9)),
        _column("of these between machines", "between_bytes", 1e-9),
        _column("bits per weight", "bits_per_weight", 1.0),
        _column("ms inside", "seconds_inside", 1e3),
        _column("ms between", "seconds_between", 1e3),
        _column("ms", "seconds", 1e3),
        _column("state GB", "state_bytes", 1e-9),
    ),
    records=lambda result: result["rows"],
    notes=notes,
)
STUDY = Study(options=NetworkConfig, run=run, table=TABLE)
