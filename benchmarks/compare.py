"""Train several configs side by side: the same seeds, in turn, one table.

Every run is a process of its own, so that its peak memory is its own. The configs take turns seed
by seed (A B A B), so that a drift of the machine's speed affects all alike. Speed and memory are
also given as ratios to the first config: machines differ, ratios less so.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import click

from arb_ternary.cli.options import as_json, overrides
from arb_ternary.errors import ConfigError, UsageProblem
from arb_ternary_train.directory import RunDirectory, write_json
from harness.child import run_arb
from harness.machine import machine_facts
from harness.script import main, say
from harness.table import Column, Record, ResultTable, mean_and_deviation, number

#: What the row of a config takes over from the audit of its run.
_AUDITED: Final = ("parameters", "float_parameters", "state_bytes", "state_bits_per_parameter")
#: The same from its report.
_REPORTED: Final = ("tokens", "unigram_entropy", "bigram_entropy")


@click.command()
@click.argument(
    "configs", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@click.option(
    "--seeds",
    default=3,
    show_default=True,
    type=click.IntRange(min=1),
    help="Train with seeds 0 .. N - 1.",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the figures to this JSON file too.",
)
@overrides
@as_json
def compare(
    configs: tuple[Path, ...],
    seeds: int,
    out: Path | None,
    overrides: tuple[str, ...],
    as_json: bool,
) -> None:
    """Train several CONFIGS with the same seeds, in turn, and print one table.

    Speed and memory are also given as ratios to the first config.
    """
    if len({config.stem for config in configs}) != len(configs):
        raise UsageProblem("two configs have the same file name", "Rename one of them.")
    result = train_configs(configs, seeds, overrides)
    if out is not None:
        write_json(out, result)
    TABLE.show(result, as_json=as_json)


def train_configs(
    configs: Sequence[Path], seeds: int, overrides: Sequence[str] = ()
) -> dict[str, Any]:
    """Train every config with every seed; return the content of the result file.

    Args:
        configs: config files; their names must differ.
        seeds: the seeds are 0 to ``seeds - 1``.
        overrides: further ``path=value`` overrides of every config.

    Raises:
        ArbError: a run failed; its output is the hint.
    """
    runs: dict[Path, list[dict[str, Any]]] = {config: [] for config in configs}
    with tempfile.TemporaryDirectory(prefix="arb-compare-") as folder:
        for seed in range(seeds):
            for config in configs:
                directory = Path(folder) / f"{config.stem}-{seed}"
                report = _train(config, directory, [*overrides, f"seed={seed}"])
                runs[config].append(report)
                say(
                    f"{config.stem}, seed {seed}: validation loss {report['validation_loss']:.4f}, "
                    f"{report['tokens_per_second']:,.0f} tokens/s, "
                    f"{report['peak_bytes'] / 2**20:,.0f} MiB"
                )
    return {
        "machine": machine_facts(),
        "seeds": seeds,
        "overrides": list(overrides),
        "configs": [summarise(config, reports) for config, reports in runs.items()],
    }


def _train(config: Path, directory: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Train in a process of its own; return the run's report with its peak memory."""
    arguments = ["train", str(config), "--run-dir", str(directory)]
    for override in overrides:
        arguments += ["-o", override]
    ended = run_arb(arguments, directory.with_name(f"{directory.name}.log"))
    report = json.loads(RunDirectory(directory).result_file.read_text(encoding="utf-8"))
    if report["validation_loss"] is None:
        raise ConfigError(
            f"{config}: phases.eval_every: 0 leaves nothing to compare",
            "Give the last phase another value.",
        )
    return {**report, "peak_bytes": ended.peak_bytes}


def summarise(config: Path, reports: Sequence[Record]) -> dict[str, Any]:
    """Return the row of a config from the reports of its runs, by seed."""
    losses = [report["validation_loss"] for report in reports]
    last = reports[-1]
    return {
        "name": config.stem,
        "config": config.name,
        "validation_losses": losses,
        "validation_loss_mean": statistics.fmean(losses),
        "validation_loss_stdev": statistics.stdev(losses) if len(losses) > 1 else 0.0,
        "tokens_per_second": [report["tokens_per_second"] for report in reports],
        "peak_bytes": [report["peak_bytes"] for report in reports],
        **{key: last["audit"][key] for key in _AUDITED},
        **{key: last[key] for key in _REPORTED},
    }


def _records(result: Record) -> Iterator[Record]:
    first = result["configs"][0]
    for row in result["configs"]:
        speed = statistics.median(row["tokens_per_second"])
        peak = max(row["peak_bytes"])
        yield {
            **row,
            "speed": speed,
            "peak": peak,
            "x_state": row["state_bytes"] / first["state_bytes"],
            "x_speed": speed / statistics.median(first["tokens_per_second"]),
            "x_peak": peak / max(first["peak_bytes"]),
        }


TABLE = ResultTable(
    columns=(
        Column("config", lambda row: row["name"], left=True),
        Column("validation loss", lambda row: mean_and_deviation(row["validation_losses"], 4)),
        Column("bigram", lambda row: f"{row['bigram_entropy']:.4f}"),
        Column("parameters", lambda row: number(row["parameters"])),
        Column("float", lambda row: number(row["float_parameters"])),
        Column(
            "state bits per parameter",
            lambda row: f"{row['state_bits_per_parameter']:.2f} ({row['x_state']:.2f}x)",
        ),
        Column("tokens/s", lambda row: f"{row['speed']:,.0f} ({row['x_speed']:.2f}x)"),
        Column("peak MiB", lambda row: f"{row['peak'] / 2**20:,.0f} ({row['x_peak']:.2f}x)"),
    ),
    records=_records,
    notes=lambda result: [", ".join(f"{key} {value}" for key, value in result["machine"].items())],
)

if __name__ == "__main__":
    main(compare)
