"""Votes, float32 and QAT on tens of millions of tokens, each token read once, on a GPU.

A decoder of 16 million linear weights reads the Python source of installed packages. The settings
are those that the study ``ladder`` chose. A step takes a larger batch here, so that trials of a
tenth of the length choose a factor of their rates, for every way the same factors. The runs can
share one GPU, since a model of this size does not fill it: what is measured then is the loss, and
speeds are not comparable.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
from attrs import asdict, evolve, field, frozen

from arb_ternary.config.options import option, positive
from arb_ternary.errors import ArbError, ComponentError
from arb_ternary_bench.figure import dress, new_figure, save
from arb_ternary_bench.machine import machine_facts
from arb_ternary_bench.runs import PlannedRun, choose, loss_of, study_folder
from arb_ternary_bench.studies.ladder import (
    BATCH,
    BLOCK,
    STYLES,
    TUNING_SEED,
    Setting,
    config,
    divide_text,
    final_record,
    plan_run,
    read_grid,
)
from arb_ternary_bench.study import Session, Study
from arb_ternary_bench.table import Column, Record, ResultTable, number

#: The best settings of the ladder at width 640, from ``results/ladder.json``.
SETTINGS: Final[Mapping[str, Setting]] = {
    "votes8": Setting(floats=0.00126, votes=0.075),
    "float32": Setting(floats=0.001, options={"beta2": 0.99}),
    "qat": Setting(floats=0.0015, options={"weight_decay": 0.1}),
}
WIDTH: Final = 640
POINTS: Final = 16
#: A trial takes this part of the steps of a final run.
TRIAL_PART: Final = 10


@frozen(kw_only=True)
class ScaleOptions:
    """Options of the study."""

    tokens: int = option(
        40_000_000, "tokens of a run, rounded up to whole steps", validator=positive
    )
    batches: int = option(16, "how many batches of the ladder a step takes", validator=positive)
    ways: tuple[str, ...] = option(tuple(SETTINGS), f"ways of training, of {', '.join(SETTINGS)}")
    seeds: tuple[int, ...] = option((0,), "seeds of every way")
    factors: tuple[float, ...] = option(
        (0.5, 0.7, 1.0), "trials of every way: the ladder's rates times each of these"
    )
    packages: tuple[str, ...] = option(
        ("torch", "transformers"), "installed packages whose Python source is the text"
    )
    device: str = option("cuda", "device of the runs")
    backend: str = option("triton", "kernel backend of votes")
    jobs: int = option(3, "runs at once", validator=positive)

    @property
    def steps(self) -> int:
        """Optimizer steps of a final run."""
        return -(-self.tokens // (self.batches * BATCH * BLOCK))


def package_source(packages: tuple[str, ...]) -> str:
    """Return the Python modules of packages, in the order of their paths.

    Raises:
        ComponentError: a package is not installed.
    """
    modules: list[str] = []
    for package in packages:
        found = find_spec(package)
        if found is None or found.origin is None:
            raise ComponentError(f"packages: {package} is not installed here")
        folder = Path(found.origin).parent
        files = sorted(folder.glob("**/*.py"))
        modules.extend(file.read_text(encoding="utf-8", errors="replace") for file in files)
    return "\n".join(modules)


def run(options: ScaleOptions, session: Session) -> dict[str, Any]:
    """Choose a factor for every way by trials, and train it with every seed."""
    unknown = sorted(set(options.ways) - set(SETTINGS))
    if unknown:
        raise ComponentError(f"ways: {', '.join(unknown)}: choose from {', '.join(SETTINGS)}")
    text = package_source(options.packages)
    facts = {
        "name": "Python source of installed packages",
        "packages": {package: version(package) for package in options.packages},
        "bytes": len(text.encode()),
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
        "tokens_of_a_run": options.steps * options.batches * BATCH * BLOCK,
        "tokens_of_a_step": options.batches * BATCH * BLOCK,
    }
    folder = session.folder.resolve()
    with study_folder(folder, facts, jobs=options.jobs, threads=1, say=session.say) as pool:
        plans = _Plans(options, divide_text(text, folder))
        trials = {
            way: [plans.trial(way, factor) for factor in options.factors] for way in options.ways
        }
        tried = pool.train([trial for each in trials.values() for trial in each])
        finals = []
        for way, planned in trials.items():
            best = choose([loss_of(tried[each.name]) for each in planned])
            if best is None:
                raise ArbError(f"{way}: no trial has a finite loss")
            finals += [plans.final(way, options.factors[best], seed) for seed in options.seeds]
        outcomes = pool.train(finals)
    return {
        "machine": machine_facts(),
        "device": _device_name(options.device),
        "text": facts,
        "trials": {
            name: {key: outcome[key] for key in ("way", "factor", "loss")}
            for name, outcome in tried.items()
        },
        "finals": {
            name: {"factor": outcome["factor"], **final_record(outcome)}
            for name, outcome in outcomes.items()
        },
    }


@frozen
class _Plans:
    """Plans the runs. ``ways`` are those of the ladder's grid."""

    options: ScaleOptions
    files: Mapping[str, Path]
    ways: Mapping[str, Any] = field(factory=lambda: read_grid()["ways"])

    def trial(self, way: str, factor: float) -> PlannedRun:
        """Plan a trial, which is measured on the part of the text for choosing."""
        steps = max(1, self.options.steps // TRIAL_PART)
        plain, labels = self._config(way, factor, steps)
        return plan_run(
            f"trial-{way}-{factor:g}",
            plain,
            self.files,
            measured_on="choice",
            seed=TUNING_SEED,
            points=1,
            labels={**labels, "seed": TUNING_SEED},
        )

    def final(self, way: str, factor: float, seed: int) -> PlannedRun:
        """Plan a final run."""
        plain, labels = self._config(way, factor, self.options.steps)
        return plan_run(
            f"{way}-{WIDTH}-{seed}",
            plain,
            self.files,
            measured_on="validation",
            seed=seed,
            points=POINTS,
            labels={**labels, "seed": seed},
        )

    def _config(
        self, way: str, factor: float, steps: int
    ) -> tuple[dict[str, Any], Mapping[str, Any]]:
        """Return the config of a run without its data and its seed, and its labels."""
        chosen = self.ways[way]
        if "backend" in chosen:
            chosen = {**chosen, "backend": self.options.backend}
        setting = _scaled(SETTINGS[way], factor)
        plain = config(chosen, WIDTH, steps, setting)
        plain["device"] = self.options.device
        (phase,) = plain["phases"]
        phase["batch_size"] = self.options.batches * BATCH
        phase["log_every"] = max(1, steps // 128)
        return plain, {"way": way, "width": WIDTH, "factor": factor, **asdict(setting)}


def _scaled(setting: Setting, factor: float) -> Setting:
    """Return a setting with both rates times a factor, to three digits."""
    floats = None if setting.floats is None else float(f"{setting.floats * factor:.3g}")
    votes = None if setting.votes is None else float(f"{setting.votes * factor:.3g}")
    return evolve(setting, floats=floats, votes=votes)


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else device


def _to_float(result: Record, row: Record) -> float | None:
    """Return the distance of a run's loss from that of float32 with the same seed."""
    float32 = result["finals"].get(f"float32-{WIDTH}-{row['seed']}")
    if float32 is None or row["way"] == "float32" or None in (float32["loss"], row["loss"]):
        return None
    return float(row["loss"] - float32["loss"])


def _rows(result: Record) -> list[Record]:
    return [{**row, "to_float": _to_float(result, row)} for row in result["finals"].values()]


TABLE = ResultTable(
    columns=(
        Column("way", lambda row: row["way"], left=True),
        Column("seed", lambda row: str(row["seed"])),
        Column("factor", lambda row: f"{row['factor']:g}"),
        Column("validation loss", lambda row: number(row["loss"], 4)),
        Column(
            "to float32", lambda row: "" if row["to_float"] is None else f"{row['to_float']:+.3f}"
        ),
        Column(
            "state and gradients, MB",
            lambda row: number(row["state_bytes"] + row["gradient_bytes"], 1, 1e-6),
        ),
        Column("tokens/s", lambda row: number(row["tokens_per_second"])),
    ),
    records=_rows,
)


def draw(result: Record, destination: Path) -> None:
    """Draw the validation loss of every run over the tokens that it has read."""
    figure = new_figure(8.0, 4.8)
    axes = figure.subplots()
    labelled: set[str] = set()
    for row in result["finals"].values():
        style = STYLES[row["way"]]
        axes.plot(
            [tokens / 1e6 for tokens, _ in row["curve"]],
            [loss for _, loss in row["curve"]],
            color=style.colour,
            label=None if row["way"] in labelled else style.label,
            linewidth=1.6,
        )
        labelled.add(row["way"])
    axes.set_xlabel("million tokens read")
    axes.set_ylabel("validation loss, nats per byte")
    dress(axes)
    axes.legend(frameon=False)
    save(figure, destination)


STUDY = Study(options=ScaleOptions, run=run, table=TABLE, figures={"scale.png": draw})
