"""The figures of ``arb bench network`` as JSON and as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from arb_ternary.config.fields import to_plain
from arb_ternary_bench.network.config import ClusterConfig, NetworkConfig, SchemeName
from arb_ternary_bench.network.model import Model, model_of
from arb_ternary_bench.network.schemes import SUMMARIES, state_bytes, transfers

FORMAT: Final = "arb-bench-network"
VERSION: Final = 1
COLUMNS: Final = (
    "machines",
    "scheme",
    "GB sent",
    "of these between machines",
    "bits a weight",
    "ms inside",
    "ms between",
    "ms",
    "state GB",
)


def compute(config: NetworkConfig) -> dict[str, Any]:
    """Bytes and seconds of every scheme on every cluster."""
    model = model_of(config.model)
    return {
        "format": FORMAT,
        "version": VERSION,
        "config": to_plain(config),
        "weights": model.weights,
        "float_parameters": model.float_parameters,
        "rows": [
            _row(scheme, config, model, cluster)
            for cluster in config.clusters
            for scheme in config.schemes
        ],
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


def rows(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The cells of the table."""
    return [
        (
            row["cluster"],
            row["scheme"],
            _short((row["inside_bytes"] + row["between_bytes"]) / 1e9),
            _short(row["between_bytes"] / 1e9),
            _short(row["bits_per_weight"]),
            _short(row["seconds_inside"] * 1e3),
            _short(row["seconds_between"] * 1e3),
            _short(row["seconds"] * 1e3),
            _short(row["state_bytes"] / 1e9),
        )
        for row in result["rows"]
    ]


def markdown(result: Mapping[str, Any]) -> str:
    """The table in Markdown."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---|---|" + "---:|" * (len(COLUMNS) - 2)]
    lines += [f"| {' | '.join(cells)} |" for cells in rows(result)]
    return "\n".join(lines) + "\n"


def _short(value: float) -> str:
    """Three digits; whole numbers from a hundred on."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
