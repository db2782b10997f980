"""Ways of training compared at equal memory: decoders of 0.3 to 16 million linear weights.

Every run trains on the same tokens of the source of Python's standard library (PSF licence), in
less than one epoch. Settings are chosen on a part of the text that is held out, by runs of a
quarter of the length at the smallest and the largest width. Between the two a rate is a power of
the width, and other options are those of the nearer one. Final runs are measured on a part that
nothing else reads. The grid is in ``ladder.yaml``.
"""

from __future__ import annotations

import hashlib
import math
import statistics
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from attrs import asdict, evolve, field, frozen

from arb_ternary.config.options import option, positive
from arb_ternary.config.yaml_document import read_yaml
from arb_ternary.errors import ArbError
from arb_ternary_bench.figure import dress, new_figure, save
from arb_ternary_bench.machine import machine_facts
from arb_ternary_bench.quality.recipes import merged, rate_for
from arb_ternary_bench.runs import Outcome, PlannedRun, RunPool, choose, loss_of, study_folder
from arb_ternary_bench.study import Session, Study
from arb_ternary_bench.table import Column, Record, ResultTable, mean_and_deviation, number

LADDER_GRID: Final = Path(__file__).with_name("ladder.yaml")
#: Samples of a batch, predictions of a sample; optimizer steps of a run and of a trial.
BATCH: Final = 16
BLOCK: Final = 128
STEPS: Final = 1024
TRIAL_STEPS: Final = 256
#: Losses are measured on pieces of the text at equal distances: their number, and characters per
#: piece.
PIECES: Final = 64
PIECE: Final = 1024
#: Seed of trials; final runs count from 0.
TUNING_SEED: Final = 1000
#: Layers of the decoder, by width.
LAYERS: Final[Mapping[int, int]] = {96: 3, 192: 3, 320: 4, 640: 4}
#: Widths of the trials. Options are those of the narrower one below the middle.
NARROW: Final = 96
WIDE: Final = 640
MIDDLE: Final = 256
#: Points of a loss curve, at the largest width and at the others.
POINTS: Final = 8
FEW_POINTS: Final = 2
#: What a final run takes over from its outcome.
_KEPT: Final = (
    "loss",
    "curve",
    "tokens_per_second",
    "processor_seconds",
    "peak_bytes",
    "parameters",
    "float_parameters",
    "state_bytes",
)


@frozen(kw_only=True)
class LadderOptions:
    """Options of the study."""

    only: tuple[str, ...] = option((), "final runs to make, WAY-WIDTH-SEED; all of them if empty")
    float32: bool = option(
        False, "multiply in float32, for processors that have no instructions for bfloat16"
    )
    jobs: int = option(1, "runs at once, one thread each", validator=positive)


@frozen
class Setting:
    """Rates of float parts and of votes, for 2,560 steps, and further options of AdamW."""

    floats: float | None = None
    votes: float | None = None
    options: Mapping[str, float] = field(factory=dict)


def setting_at(width: int, narrow: Setting, wide: Setting) -> Setting:
    """Return the setting at a width, from the best ones at the smallest and the largest width."""

    def between(first: float | None, last: float | None) -> float | None:
        if first is None or last is None:
            return None
        power = math.log(last / first) / math.log(WIDE / NARROW)
        return float(f"{first * (width / NARROW) ** power:.3g}")

    options = (narrow if width < MIDDLE else wide).options
    return Setting(between(narrow.floats, wide.floats), between(narrow.votes, wide.votes), options)


def config(way: Mapping[str, Any], width: int, steps: int, setting: Setting) -> dict[str, Any]:
    """Return the config of a run without its data and its seed."""
    decoder = {
        "name": "decoder",
        "width": width,
        "layers": LAYERS[width],
        "heads": width // 32,
        "feed_forward": 2 * width,
        "activation": "swiglu",
        "query_key_norm": True,
        "max_length": BLOCK,
    }
    batches = way.get("batches", 1)
    phase = {
        "name": "standard",
        "steps": steps // batches,
        "batch_size": BATCH * batches,
        "block_size": BLOCK,
        "lr_schedule": "linear",
        "warmup_steps": steps // 10 // batches,
        "grad_clip": 1.0,
        "use_amp": True,
        "log_every": 32,
        "eval_batches": None,
    }
    plain = {
        "name": "ladder",
        "threads": 1,
        "checkpoint": {"every": 0},
        "model": merged(decoder, way["model"]),
        "optimizer": _with_rates(way["optimizer"], steps, setting),
        "phases": [merged(phase, way.get("phase", {}))],
    }
    if "backend" in way:
        plain["backend"] = way["backend"]
    return plain


def _with_rates(optimizer: Mapping[str, Any], steps: int, setting: Setting) -> dict[str, Any]:
    floats = None if setting.floats is None else rate_for(steps, setting.floats)
    votes = None if setting.votes is None else rate_for(steps, setting.votes)
    if optimizer["name"] == "split":
        return merged(optimizer, {"ternary": {"lr": votes}, "float": {"lr": floats}})
    return {**optimizer, "lr": votes if floats is None else floats, **setting.options}


def read_grid() -> Mapping[str, Any]:
    """Return the grid of the study, from ``ladder.yaml``."""
    grid: Mapping[str, Any] = read_yaml(
        LADDER_GRID.read_text(encoding="utf-8"), LADDER_GRID.name
    ).data
    return grid


# --- the text


def library_source(folder: Path | None = None) -> str:
    """Return the modules of Python's standard library that are single files, ordered by name.

    They differ between versions of Python: 4.7 million characters with Python 3.11.
    """
    where = folder or Path(sysconfig.get_path("stdlib"))
    return "\n".join(file.read_text(encoding="utf-8") for file in sorted(where.glob("*.py")))


def divide_text(text: str, folder: Path) -> dict[str, Path]:
    """Write a text in three files: ``train``, ``choice`` and ``validation``.

    Four fifths are for training. In the other two tenths, pieces are for choosing settings and for
    measuring.
    """
    first = len(text) * 8 // 10
    last = len(text) * 9 // 10
    parts = {
        "train": text[:first],
        "choice": _pieces(text[first:last]),
        "validation": _pieces(text[last:]),
    }
    files = {}
    for name, part in parts.items():
        files[name] = folder / f"{name}.txt"
        files[name].write_text(part, encoding="utf-8")
    return files


def _pieces(text: str) -> str:
    plain = text.encode().decode("ascii", "replace").replace("\ufffd", "?")
    distance = len(plain) // PIECES
    return "".join(plain[place * distance :][:PIECE] for place in range(PIECES))


# --- the runs


@frozen(eq=False)
class _Ladder:
    """The grid, and how its runs are planned."""

    grid: Mapping[str, Any]
    files: Mapping[str, Path]
    options: LadderOptions

    def trials(self) -> dict[tuple[str, int], list[Setting]]:
        """Return the settings to try, by way and width."""
        return {
            (way, int(width)): [Setting(**each) for each in settings]
            for width, ways in self.grid["trials"].items()
            for way, settings in ways.items()
        }

    def finals(self) -> Iterator[tuple[str, int, int]]:
        """Yield way, width and seed of the final runs."""
        for width, seed, ways in self.grid["finals"]:
            for way in ways:
                if not self.options.only or f"{way}-{width}-{seed}" in self.options.only:
                    yield way, width, seed

    def trial(self, way: str, width: int, number: int, setting: Setting) -> PlannedRun:
        """Plan a trial."""
        name = f"trial-{way}-{width}-{number}"
        plain = config(self.grid["ways"][way], width, TRIAL_STEPS, setting)
        labels = {"way": way, "width": width, "number": number, **asdict(setting)}
        return plan_run(
            name,
            plain,
            self.files,
            measured_on="choice",
            seed=TUNING_SEED,
            points=1,
            labels=labels,
        )

    def final(self, way: str, width: int, seed: int, setting: Setting) -> PlannedRun:
        """Plan a final run."""
        plain = config(self.grid["ways"][way], width, STEPS, setting)
        labels = {"way": way, "width": width, "seed": seed, **asdict(setting)}
        if self.options.float32:
            plain["phases"][0]["use_amp"] = False
            labels["float32"] = True
        points = POINTS if width == WIDE else FEW_POINTS
        return plan_run(
            f"{way}-{width}-{seed}",
            plain,
            self.files,
            measured_on="validation",
            seed=seed,
            points=points,
            labels=labels,
        )


def plan_run(
    name: str,
    plain: dict[str, Any],
    files: Mapping[str, Path],
    *,
    measured_on: str,
    seed: int,
    points: int,
    labels: Mapping[str, Any],
) -> PlannedRun:
    """Plan a run of ``plain``, which gets its data, its seed and when it is evaluated.

    Args:
        name: name of the run.
        plain: config of the run; see :func:`config`.
        files: the parts of the text; see :func:`divide_text`.
        measured_on: the part on which losses are measured.
        seed: seed of the run.
        points: evaluations of the run.
        labels: what the outcome of the run holds besides.
    """
    phase = plain["phases"][0]
    phase["eval_every"] = max(1, phase["steps"] // points)
    data = {
        "name": "text",
        "tokenizer": "bytes",
        "path": str(files["train"]),
        "validation": str(files[measured_on]),
    }
    return PlannedRun(
        name=name,
        title=name,
        config={**plain, "seed": seed, "data": data},
        tokens=phase["steps"] * phase["batch_size"] * phase["block_size"],
        labels=labels,
    )


def run(options: LadderOptions, session: Session) -> dict[str, Any]:
    """Make the trials, choose settings, and make the final runs."""
    text = library_source()
    facts = {
        "name": "source of Python's standard library",
        "licence": "PSF",
        "bytes": len(text.encode()),
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
        "tokens_of_a_run": STEPS * BATCH * BLOCK,
    }
    folder = session.folder.resolve()
    with study_folder(folder, facts, jobs=options.jobs, threads=1, say=session.say) as pool:
        grid = read_grid()
        ladder = _Ladder(grid, divide_text(text, folder), options)
        tried, chosen = _tune(ladder, pool)
        finals = []
        for way, width, seed in ladder.finals():
            narrow, wide = chosen[grid["ways"][way]["settings"]]
            finals.append(ladder.final(way, width, seed, setting_at(width, narrow, wide)))
        outcomes = pool.train(finals)
    return {
        "machine": machine_facts(),
        "threads": 1,
        "text": facts,
        "trials": {
            name: {"loss": outcome["loss"], **{key: outcome[key] for key in ("floats", "votes")}}
            for name, outcome in tried.items()
        },
        "settings": {way: [asdict(each) for each in pair] for way, pair in chosen.items()},
        "finals": {name: final_record(outcome) for name, outcome in outcomes.items()},
    }


def _tune(
    ladder: _Ladder, pool: RunPool
) -> tuple[dict[str, Outcome], dict[str, tuple[Setting, Setting]]]:
    """Return the outcomes of all trials, and the best settings at both widths, by way."""
    trials = ladder.trials()
    tried: dict[str, Outcome] = {}
    best: dict[tuple[str, int], Setting] = {}
    for (way, width), settings in trials.items():
        planned = [ladder.trial(way, width, *each) for each in enumerate(settings)]
        outcomes = pool.train(planned)
        tried |= outcomes
        chosen = choose([loss_of(outcomes[each.name]) for each in planned])
        if chosen is None:
            raise ArbError(f"{way}, width {width}: no trial has a finite loss")
        best[way, width] = settings[chosen]
    ways = dict.fromkeys(way for way, _ in trials)
    return tried, {way: (best[way, NARROW], best[way, WIDE]) for way in ways}


def final_record(outcome: Outcome) -> dict[str, Any]:
    """Return what the result keeps of the outcome of a final run."""
    labels = ("way", "width", "seed", "floats", "votes", "options")
    # What votes are cast of is used up in backward, a matrix at a time.
    dtype_bytes = 2 if outcome["config"]["phases"][0].get("dtype") == "bfloat16" else 4
    return {
        **{key: outcome[key] for key in labels},
        "float32": outcome.get("float32", False),
        **{key: outcome[key] for key in _KEPT},
        "linear_weights": outcome["linears"]["weights"],
        "gradient_bytes": outcome["float_parameters"] * dtype_bytes,
    }


# --- tables and the figure


@frozen
class Style:
    """How a way is shown: its name in words, colour (Okabe and Ito, 2008) and marker."""

    label: str
    colour: str
    marker: str = "o"
    votes: bool = True


#: Every way, in the order of the legend. AdamW with 8-bit moments was measured at commit fccd45f.
STYLES: Final[Mapping[str, Style]] = {
    "orthogonal": Style("votes, orthogonalised", "#882255"),
    "gains": Style("votes, orthogonalised, float vectors", "#332288"),
    "vectors": Style("votes, float vectors", "#999933"),
    "votes8": Style("votes, 8 bits", "#D55E00"),
    "votes4": Style("votes, 4 bits", "#E69F00"),
    "pure": Style("votes, no float part", "#CC79A7"),
    "trits": Style("the same, orthogonalised, vectors of trits", "#AA4499"),
    "qat": Style("QAT (BitNet b1.58), AdamW", "#009E73", "s", votes=False),
    "qat_gains": Style("QAT, gains of all norms", "#44AA99", "s", votes=False),
    "float32": Style("float32, AdamW", "#0072B2", "D", votes=False),
    "adamw8": Style("AdamW, 8-bit moments", "#56B4E9", "^", votes=False),
    "bfloat16": Style("bfloat16, AdamW", "#000000", "v", votes=False),
}


@frozen
class Point:
    """A way at a width: means over seeds of losses, bytes and speeds."""

    way: str
    width: int
    weights: int
    losses: tuple[float, ...]
    kept: int
    peak: float
    speed: float
    processor: float
    float32: bool

    @property
    def loss(self) -> float:
        """Mean loss."""
        return statistics.fmean(self.losses)


def points(result: Record) -> list[Point]:
    """Return every way and width that ran, by width and in the order of the legend."""
    groups: dict[tuple[str, int], list[Record]] = {}
    for each in result["finals"].values():
        groups.setdefault((each["way"], each["width"]), []).append(each)
    found = [_point(way, width, runs) for (way, width), runs in groups.items()]
    weights: dict[int, int] = {}
    for point in found:
        weights.setdefault(point.width, point.weights)
    order = list(STYLES)
    found.sort(key=lambda point: (point.width, order.index(point.way)))
    return [evolve(point, weights=weights[point.width]) for point in found]


def _point(way: str, width: int, runs: Sequence[Record]) -> Point:
    return Point(
        way=way,
        width=width,
        weights=runs[0]["linear_weights"],
        losses=tuple(each["loss"] for each in runs),
        kept=runs[0]["state_bytes"] + runs[0]["gradient_bytes"],
        peak=statistics.median(each["peak_bytes"] for each in runs),
        speed=statistics.median(each["tokens_per_second"] for each in runs),
        processor=statistics.fmean(each["processor_seconds"] for each in runs),
        # Multiplied in float32, a run holds more than the others do.
        float32=any(each.get("float32") for each in runs),
    )


def _millions(point: Point) -> str:
    return f"{point.weights / 1e6:.1f} M"


TABLE = ResultTable(
    columns=(
        Column("linear weights", lambda row: _millions(row["point"])),
        Column("way", lambda row: row["point"].way, left=True),
        Column("validation loss", lambda row: mean_and_deviation(row["point"].losses, 3)),
        Column("state and gradients, MB", lambda row: number(row["point"].kept, 1, 1e-6)),
        Column("peak, MB", lambda row: number(row["point"].peak, 0, 1e-6)),
        Column("tokens/s", lambda row: number(row["point"].speed)),
        Column("processor, s", lambda row: number(row["point"].processor)),
    ),
    records=lambda result: [{"point": point} for point in points(result)],
)


def draw_memory(result: Record, destination: Path) -> None:
    """Draw loss over bytes of state and gradients, and over the peak memory of a process."""
    found = points(result)
    figure = new_figure(11.5, 5.2)
    kept, peak = figure.subplots(1, 2, sharey=True)
    for way, style in STYLES.items():
        mine = [point for point in found if point.way == way]
        _draw_way(kept, style, mine, [point.kept / 1e6 for point in mine])
        shown = [point for point in mine if not point.float32]
        _draw_way(peak, style, shown, [point.peak / 1e6 for point in shown])
    kept.set_xlabel("training state and stored gradients, MB")
    peak.set_xlabel("peak resident memory of the process, MB")
    kept.set_ylabel("validation loss, nats per byte")
    for axes in (kept, peak):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.minorticks_off()
        dress(axes)
    handles, labels = kept.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    sizes = ", ".join(f"{each / 1e6:.1f}" for each in sorted({point.weights for point in found}))
    tokens = result["text"]["tokens_of_a_run"]
    title = f"Equal tokens ({tokens:,}), {sizes} million linear weights from left to right"
    figure.suptitle(title, fontsize=11)
    save(figure, destination)


def _draw_way(axes: Any, style: Style, shown: Sequence[Point], places: Sequence[float]) -> None:
    axes.plot(
        places,
        [point.loss for point in shown],
        color=style.colour,
        marker=style.marker,
        markersize=7,
        label=style.label,
        linewidth=2.2 if style.votes else 1.3,
        linestyle="-" if style.votes else (0, (5, 2)),
        zorder=3 if style.votes else 2,
        markeredgecolor="white",
        markeredgewidth=0.8,
    )
    for place, point in zip(places, shown, strict=True):
        ends = [min(point.losses), max(point.losses)]
        axes.plot([place, place], ends, color=style.colour, linewidth=1.0, alpha=0.6, zorder=1)


STUDY = Study(options=LadderOptions, run=run, table=TABLE, figures={"ladder.png": draw_memory})
