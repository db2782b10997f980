"""The same small Llama in transformers' ``Trainer``, trained in four ways from the same windows.

AdamW in float32, AdamW with states of 8 bits (bitsandbytes), quantisation-aware training as
onebitllms does it, and votes. Each way gets its rate from trials with seed 0, by the loss at the
end of the training; the other seeds use that rate. Embedding and head stay float in all four.

Needs the extra ``studies`` and the package ``arb-ternary-trainers``.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from attrs import evolve, frozen

from arb_ternary.config.fields import to_plain
from arb_ternary.config.options import option, positive
from arb_ternary.errors import EnvironmentProblem, Interrupted
from arb_ternary_bench.machine import bench_facts, describe, load_average
from arb_ternary_bench.runs import RunPool, study_folder
from arb_ternary_bench.study import Session, Study
from arb_ternary_bench.table import (
    Column,
    Record,
    ResultTable,
    mean_and_deviation,
    mebibytes,
    number,
)
from arb_ternary_bench.training.in_trainer import Method, TrainerRun, measure
from arb_ternary_train.directory import write_json

LABELS: Final[Mapping[Method, str]] = {
    "adamw": "float32, AdamW",
    "adamw8": "float32, AdamW with 8-bit states",
    "qat": "QAT (BitNet b1.58), AdamW",
    "votes": "votes, `arb_ternary.ternarize`",
}
_PACKAGES: Final = ("accelerate", "bitsandbytes", "transformers", "arb-ternary-trainers")


@frozen(kw_only=True)
class TrainerOptions:
    """Options of the study."""

    seeds: int = option(3, "train with seeds 0 to N - 1", validator=positive)
    steps: int = option(250, "optimizer steps", validator=positive)
    batch: int = option(16, "windows of a step", validator=positive)
    length: int = option(128, "tokens of a window", validator=positive)
    width: int = option(128, "features of the model, a multiple of 64", validator=positive)
    layers: int = option(4, "blocks of the model", validator=positive)
    windows: int = option(256, "windows of the validation text", validator=positive)
    adamw_rates: tuple[float, ...] = option((0.001, 0.002, 0.004), "rates of AdamW to try")
    qat_rates: tuple[float, ...] = option((0.002, 0.004, 0.008), "rates of QAT to try")
    votes_rates: tuple[float, ...] = option((0.05, 0.1, 0.2, 0.4), "rates of votes to try")
    float_rate: float = option(0.004, "rate of the float parameters beside votes")
    speed_steps: int = option(20, "steps of each run that measures speed", validator=positive)
    threads: int = option(1, "threads of a run", validator=positive)

    def rates(self, method: Method) -> tuple[float, ...]:
        """Return the rates to try."""
        if method == "votes":
            return self.votes_rates
        return self.qat_rates if method == "qat" else self.adamw_rates

    def planned(self, method: Method, rate: float, seed: int) -> TrainerRun:
        """Return a training run."""
        return TrainerRun(
            method=method,
            rate=rate,
            float_rate=self.float_rate,
            seed=seed,
            steps=self.steps,
            batch=self.batch,
            length=self.length,
            width=self.width,
            layers=self.layers,
            windows=self.windows,
            threads=self.threads,
        )


def run(options: TrainerOptions, session: Session) -> dict[str, Any]:
    """Choose the rates, train with every seed, then measure the speeds in turns.

    Raises:
        EnvironmentProblem: a package is missing.
        UsageProblem: a study with other settings is in the folder.
        Interrupted: SIGINT or SIGTERM came; the same command continues.
        ArbError: a run failed.
    """
    versions = _versions()
    may_grow = ("seeds", "adamw_rates", "qat_rates", "votes_rates", "speed_steps")
    identity = {key: value for key, value in to_plain(options).items() if key not in may_grow}
    folder = session.folder.resolve()
    with study_folder(folder, identity, jobs=1, threads=options.threads, say=session.say) as pool:
        rows = [_trained(options, method, pool) for method in LABELS]
        facts = {**bench_facts([]), "threads": options.threads}
        speeds = _speeds(options, {row["method"]: row["rate"] for row in rows}, pool)
    for row in rows:
        row["tokens_per_second"] = speeds[row["method"]]
    return {
        "machine": {**facts, "load_average_at_end": load_average()},
        "versions": versions,
        "methods": rows,
    }


def _versions() -> dict[str, str]:
    """Return the versions of the packages that the study needs."""
    try:
        return {name: version(name) for name in _PACKAGES}
    except PackageNotFoundError as error:
        raise EnvironmentProblem(
            f"the study trainer needs a package that is not installed: {error.name}",
            f"pip install {' '.join(_PACKAGES)}",
        ) from error


def _trained(options: TrainerOptions, method: Method, pool: RunPool) -> dict[str, Any]:
    """Return the figures of a method with its best rate, by seed, and the trials before."""
    rates = options.rates(method)
    trials = {rate: _result(options.planned(method, rate, 0), pool) for rate in rates}
    best = min(rates, key=lambda rate: trials[rate]["loss"])
    found = [_result(options.planned(method, best, seed), pool) for seed in range(options.seeds)]
    first = found[0]
    return {
        "method": method,
        "rate": best,
        "trials": {f"{rate:g}": trial["loss"] for rate, trial in trials.items()},
        "losses": [each["loss"] for each in found],
        "memory_bytes": [each["memory_bytes"] for each in found],
        "model_bytes": first["model_bytes"],
        "optimizer_bytes": first["optimizer_bytes"],
        "weights": first["weights"],
    }


def _result(planned: TrainerRun, pool: RunPool) -> dict[str, Any]:
    """Return the figures of a run, from its file if it has finished before."""
    file = pool.folder / f"{planned.method}-{planned.rate:g}-{planned.seed}.json"
    if not file.exists():
        found = _measured(planned, pool)
        write_json(file, found)
        pool.say(f"{planned.title}: loss {found['loss']:.4f}")
    result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return result


def _speeds(
    options: TrainerOptions, rates: Mapping[Method, float], pool: RunPool
) -> dict[Method, list[float]]:
    """Return the tokens per second of short runs, one of each method in turn, three times."""
    short = evolve(options, steps=options.speed_steps, windows=1)
    found: dict[Method, list[float]] = {method: [] for method in rates}
    for seed in range(3):
        for method, rate in rates.items():
            figures = _measured(short.planned(method, rate, seed), pool)
            found[method].append(figures["tokens_per_second"])
    return found


def _measured(planned: TrainerRun, pool: RunPool) -> dict[str, Any]:
    if pool.stop.requested:
        raise Interrupted(
            f"{pool.folder}: stopped by {pool.stop.reason}",
            "The same command continues the study.",
        )
    return measure(planned)


def notes(result: Record) -> list[str]:
    """Return what a reader of the table has to know."""
    options = result["options"]
    versions = ", ".join(f"{name} {found}" for name, found in result["versions"].items())
    return [
        f"Llama with {result['methods'][0]['weights']:,} weights in linears; {options['steps']} "
        f"steps of {options['batch']} x {options['length']} characters of the built-in text; "
        f"float32 between the linears. Loss in nats per character on {options['windows']} windows "
        f"of the validation text, mean and standard deviation of {options['seeds']} seeds. Rates "
        f"by the same loss with seed 0. Speed: median of three runs of {options['speed_steps']} "
        f"steps, in turns. Memory: most resident memory above that before the model, largest of "
        f"the seeds. {versions}. {describe(result['machine'])} Command: "
        f"`python -m arb_ternary_bench.study trainer`."
    ]


TABLE = ResultTable(
    columns=(
        Column("method", lambda row: LABELS[row["method"]], left=True),
        Column("loss", lambda row: mean_and_deviation(row["losses"], 3)),
        Column("rate", lambda row: f"{row['rate']:g}"),
        Column("tokens/s", lambda row: number(statistics.median(row["tokens_per_second"]))),
        Column("memory, MiB", lambda row: mebibytes(max(row["memory_bytes"]))),
        Column("checkpoint: model, MB", lambda row: number(row["model_bytes"], 2, 1e-6)),
        Column("optimizer, MB", lambda row: number(row["optimizer_bytes"], 2, 1e-6)),
    ),
    records=lambda result: result["methods"],
    notes=notes,
)
STUDY = Study(options=TrainerOptions, run=run, table=TABLE)
