"""The contents of a report that every run has."""

from __future__ import annotations

import base64
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from attrs import evolve

from arb_ternary.config.fields import leaves
from arb_ternary.config.yaml_document import dump_inline, read_yaml
from arb_ternary.errors import ArbError
from arb_ternary_train.directory import RunDirectory, reason_of
from arb_ternary_train.metrics import metric_names
from arb_ternary_train.plot import Points, draw_curves, read_curves
from arb_ternary_train.report_page.layers import read_layer_flips
from arb_ternary_train.report_page.runs import ReportedRun
from arb_ternary_train.report_page.sections import Attachment, Card, Figure, Section
from arb_ternary_train.report_page.tables import Column, Table, shown

#: Folder of a run whose files are shown as samples.
SAMPLES: Final = "samples"
#: Type of the content by the ending of a sample that is no text.
_MEDIA: Final[Mapping[str, str]] = {
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".gif": "image/gif",
    ".webp": "image/webp",
    ".wav": "audio/wav",
    ".flac": "audio/flac",
}
#: Largest sample on a page, in bytes.
_LARGEST: Final = 1 << 20
#: Numbers of the metrics that have no curve.
_NOT_DRAWN: Final = frozenset({"draws", "tokens"})
#: Most points of a curve.
_MOST_POINTS: Final = 1000
_RUN: Final = Column("run", "run", "text")


def make_cards(run: ReportedRun) -> list[Card]:
    """Return the numbers that people look for first."""
    unit = str(run.record.get("loss_unit", "nats per token"))
    loss = run.outcome("validation_loss", "validation", "loss")
    cards = []
    if loss is not None:
        cards.append(Card("Validation loss", shown(loss, "number"), unit))
    if run.audit is not None:
        bits = shown(run.audit.state_bits_per_parameter, "number")
        cards.append(Card("Training state", bits, "bits per parameter"))
        parameters = f"{run.audit.parameters:,} parameters"
        cards.append(Card("Model size", shown(run.audit.model_bytes, "bytes"), parameters))
    if run.result is not None and run.result["tokens_per_second"]:
        speed = shown(run.result["tokens_per_second"], "number")
        cards.append(Card("Training speed", speed, f"{run.noun}s per second"))
    return cards


def make_facts(run: ReportedRun) -> dict[str, str]:
    """Return short lines about a run, by their headings."""
    return {
        "data": str(run.record["data"]["name"]),
        "model": _component(run, "model"),
        "optimizer": _component(run, "optimizer"),
        "state": "finished" if run.result is not None else "not finished",
    }


def make_sections(runs: Sequence[ReportedRun]) -> list[Section]:
    """Return the sections about results, those that need a reader's attention first.

    Raises:
        ArbError: a file of a run is damaged.
    """
    return [
        Section("Runs", tables=[_overview(runs)] if len(runs) > 1 else []),
        _curves(runs),
        Section("Tasks", tables=[tasks_table(runs)]),
        Section("Checks", tables=[_checks(runs)]),
        _audit(runs),
        _flips(runs),
        _samples(runs),
    ]


def make_closing_sections(runs: Sequence[ReportedRun]) -> list[Section]:
    """Return the sections about how the results came about."""
    machine = Section("Machine and versions", tables=[_machine(runs)])
    if len(runs) == 1:
        return [machine, _repeat(runs)]
    options = Section("Options that differ", tables=[_differences(runs)])
    return [options, machine, _repeat(runs)]


def tasks_table(runs: Sequence[ReportedRun]) -> Table:
    """Return the results of tasks."""
    rows = [
        {
            "run": run.name,
            "task": result.task,
            "samples": result.samples,
            "examples": result.num_fewshot,
            "metric": metric.title,
            "value": metric.value,
            "stderr": metric.stderr,
            "step": result.step,
        }
        for run in runs
        for result in run.tasks
        for metric in result.metrics
    ]
    columns = (
        Column("task", "task", "text"),
        Column("samples", "samples", "count"),
        Column("examples", "examples", "count"),
        Column("metric", "metric", "text"),
        Column("value", "value"),
        Column("stderr", "standard error"),
        Column("step", "after steps", "count"),
    )
    return Table(
        "tasks",
        "Tasks",
        "The newest results of arb eval --tasks, by lm-evaluation-harness. Examples: questions "
        "with answers before each question.",
        _with_run(runs, columns),
        rows,
    )


def _with_run(runs: Sequence[ReportedRun], columns: Sequence[Column]) -> Sequence[Column]:
    """Return the columns after one with the name of the run, if there are several runs."""
    return (_RUN, *columns) if len(runs) > 1 else columns


def _component(run: ReportedRun, key: str) -> str:
    """Return the name of a component of a run's config."""
    found = read_yaml(run.config, str(run.directory.config_file)).data
    component = found.get(key) if isinstance(found, dict) else None
    if isinstance(component, dict):
        component = component.get("name")
    return str(component)


def _overview(runs: Sequence[ReportedRun]) -> Table:
    rows = []
    for run in runs:
        audit = run.audit
        row = {
            "run": run.name,
            "finished": run.result is not None,
            "steps": run.outcome("steps", "train", "step"),
            "tokens": run.outcome("tokens", "train", "tokens"),
            "loss": run.outcome("validation_loss", "validation", "loss"),
            "unit": run.record.get("loss_unit", "nats per token"),
            "speed": None if run.result is None else run.result["tokens_per_second"] or None,
        }
        if audit is not None:
            row["parameters"] = audit.parameters
            row["bits"] = audit.state_bits_per_parameter
            row["bytes"] = audit.model_bytes
        rows.append(row)
    nouns = " or ".join(sorted({f"{run.noun}s" for run in runs}))
    columns = (
        _RUN,
        Column("finished", "finished", "text"),
        Column("steps", "steps", "count"),
        Column("tokens", nouns, "count"),
        Column("loss", "validation loss"),
        Column("unit", "unit", "text"),
        Column("parameters", "parameters", "count"),
        Column("bits", "training state, bits per parameter"),
        Column("bytes", "model size", "bytes"),
        Column("speed", f"{nouns} per second"),
    )
    return Table("runs", "Runs", "", columns, rows)


def _curves(runs: Sequence[ReportedRun]) -> Section:
    """Return a figure per number of the metrics that changes; the loss comes first."""
    names = dict.fromkeys(["loss"])
    for run in runs:
        names |= dict.fromkeys(metric_names(run.metrics))
    figures = []
    for number, metric in enumerate(names):
        drawn = [
            read_curves(run.directory, run.metrics, index, metric)
            for index, run in enumerate(runs)
            if metric in metric_names(run.metrics)
        ]
        values = {value for each in drawn for _, value in (*each.train, *each.validation)}
        if metric in _NOT_DRAWN or len(values) < 2:
            continue
        curves = [
            evolve(
                each,
                train=_thinned(each.train),
                draws=_thinned(each.draws) if metric == "loss" else (),
            )
            for each in drawn
        ]
        size = (8.0, 4.0) if metric == "loss" else (5.4, 3.2)
        title = f"{metric.replace('_', ' ')} over optimizer steps"
        figures.append(Figure(f"curve-{number}", title, draw_curves(curves, metric, size)))
    note = "Thin: every step. Thick: smoothed. Points: evaluations on held-out samples."
    if not figures:
        note = "There are no steps to draw."
    return Section("Training", note, figures)


def _thinned(points: Points) -> Points:
    """Return at most ``_MOST_POINTS`` points."""
    return points[:: -(-len(points) // _MOST_POINTS) or 1]


def _checks(runs: Sequence[ReportedRun]) -> Table:
    rows = [
        {"run": run.name, **check}
        for run in runs
        if run.result is not None
        for check in run.result["checks"]
    ]
    columns = (
        Column("name", "check", "text"),
        Column("passed", "passed", "text"),
        Column("summary", "measured", "long"),
    )
    return Table("checks", "Checks", "", _with_run(runs, columns), rows)


def _audit(runs: Sequence[ReportedRun]) -> Section:
    """Return elements and bytes by kind of tensor, a table for each run."""
    columns = (
        Column("what", "what", "text"),
        Column("elements", "elements", "count"),
        Column("bytes", "bytes", "count"),
    )
    title = "What the model stores"
    tables = []
    for run in runs:
        audit = run.audit
        if audit is None:
            continue
        rows: list[dict[str, Any]] = [
            {"what": kind.what, "elements": kind.elements, "bytes": kind.nbytes}
            for kind in audit.rows
            if kind.elements
        ]
        rows += [
            {"what": "optimizer state", "bytes": audit.optimizer_bytes},
            {
                "what": "total persistent state",
                "elements": audit.parameters,
                "bytes": audit.state_bytes,
            },
        ]
        purity = "pure ternary" if audit.pure else f"{audit.float_parameters:,} float parameters"
        note = f"{audit.state_bits_per_parameter:.3f} bits per parameter, {purity}."
        heading = run.name if len(runs) > 1 else title
        tables.append(Table("audit", heading, note, columns, rows))
    return Section(title, tables=tables)


def _flips(runs: Sequence[ReportedRun]) -> Section:
    """Return the flips of each layer between checkpoints, a table for each run that kept two."""
    columns = (
        Column("layer", "layer", "text"),
        Column("weights", "weights", "count"),
        Column("flips", "trits changed", "count"),
        Column("share", "share", "bar"),
    )
    title = "Flips per layer"
    tables = []
    for run in runs:
        found = read_layer_flips(run.directory)
        if found is None:
            continue
        rows = []
        for layer in sorted(found.flips, key=_natural):
            row: dict[str, Any] = {"layer": layer, "flips": found.flips[layer]}
            weights = found.weights.get(layer)
            if weights:
                row["weights"] = weights
                row["share"] = found.flips[layer] / weights
            rows.append(row)
        note = (
            "Trits that differ between the oldest and the newest checkpoint that is kept (steps "
            f"{found.first:,} to {found.last:,}). A trit that flipped back is not counted."
        )
        heading = run.name if len(runs) > 1 else title
        tables.append(Table("flips", heading, note, columns, rows))
    return Section(title, tables=tables)


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts the block 10 after the block 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _samples(runs: Sequence[ReportedRun]) -> Section:
    attachments = []
    for run in runs:
        prefix = f"{run.name}: " if len(runs) > 1 else ""
        files = _sample_files(run.directory)
        attachments += [_sample(file, prefix + file.name) for file in files]
    return Section("Samples", attachments=attachments)


def _sample_files(directory: RunDirectory) -> Iterator[Path]:
    folder = directory.path / SAMPLES
    if folder.is_dir():
        files = (file for file in folder.iterdir() if file.is_file())
        yield from sorted(file for file in files if not file.name.startswith("."))


def _sample(file: Path, title: str) -> Attachment:
    kind = _MEDIA.get(file.suffix.lower(), "text")
    try:
        if file.stat().st_size > _LARGEST:
            return Attachment(title, f"{file}: larger than 1 MiB, which is not shown")
        content = file.read_bytes()
    except OSError as error:
        raise ArbError(f"{file}: cannot be read: {reason_of(error)}") from error
    if kind != "text":
        data = base64.b64encode(content).decode("ascii")
        return Attachment(title, address=f"data:{kind};base64,{data}", kind=kind.partition("/")[0])
    try:
        return Attachment(title, content.decode("utf-8"))
    except UnicodeDecodeError:
        return Attachment(title, f"{file}: neither text nor a picture or sound that is shown")


def _differences(runs: Sequence[ReportedRun]) -> Table:
    """Return the options in which configs differ."""
    options = []
    for run in runs:
        document = read_yaml(run.config, str(run.directory.config_file))
        written = {}
        for path, value in leaves(document.data):
            if path[-1:] != ("given",):
                written[".".join(map(str, path))] = dump_inline(value)
        options.append(written)
    table = _by_run("options", "Options that differ", runs, options)
    differing = [row for row in table.rows if len({row[str(n)] for n in range(len(runs))}) > 1]
    return evolve(table, rows=differing)


def _machine(runs: Sequence[ReportedRun]) -> Table:
    facts = []
    for run in runs:
        record = run.record
        known = {
            "processor": record.get("processor"),
            "device": record.get("device"),
            "threads": record["threads"].get("last"),
            "backend": record["backend"]["name"],
            **record["versions"],
        }
        texts = {}
        for key, value in known.items():
            texts[key] = "not recorded" if value is None else str(value)
        facts.append(texts)
    return _by_run("machine", "Machine and versions", runs, facts)


def _by_run(
    name: str, title: str, runs: Sequence[ReportedRun], texts: Sequence[Mapping[str, str]]
) -> Table:
    """Return a table with a row for each key of ``texts``, and a column for each run."""
    columns = [Column("key", "", "text")]
    for number, run in enumerate(runs):
        columns.append(Column(str(number), run.name if len(runs) > 1 else "", "long"))
    rows = []
    for key in dict.fromkeys(key for each in texts for key in each):
        row = {"key": key}
        row |= {str(number): each.get(key, "-") for number, each in enumerate(texts)}
        rows.append(row)
    return Table(name, title, "", columns, rows)


def _repeat(runs: Sequence[ReportedRun]) -> Section:
    attachments = []
    for run in runs:
        prefix = f"{run.name}: " if len(runs) > 1 else ""
        commands = Attachment(f"{prefix}commands", _commands(run), folded=len(runs) > 1)
        config = Attachment(f"{prefix}config.yaml", run.config, folded=True)
        attachments += [commands, config]
    note = (
        "Save the config as config.yaml. It has every option, also those that were left at their "
        "defaults, and the seed."
    )
    return Section("How to repeat it", note, attachments=attachments)


def _commands(run: ReportedRun) -> str:
    versions = dict(run.record["versions"])
    python = versions.pop("python", None)
    lines = [] if python is None else [f"# Python {python}"]
    # The part after "+" says where a wheel of torch came from.
    pinned = [f"{name}=={version.partition('+')[0]}" for name, version in versions.items()]
    lines.append(f"pip install {' '.join(pinned)}")
    fingerprint = run.record["data"].get("fingerprint")
    if fingerprint is not None:
        lines.append(f"# Fingerprint of the data: {fingerprint}")
    command = ["arb", "train", "config.yaml", "--run-dir", run.directory.path.resolve().name]
    command += ["--backend", run.record["backend"]["name"]]
    if run.record.get("init_from") is not None:
        command += ["--init-from", run.record["init_from"]]
    for pattern in run.record.get("init_skip", ()):
        command += ["--init-skip", pattern]
    return "\n".join([*lines, shlex.join(command)])
