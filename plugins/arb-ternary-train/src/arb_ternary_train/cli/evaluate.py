"""``arb eval``: measure a run's model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from arb_ternary.cli.options import as_json
from arb_ternary.cli.output import print_json, print_notes, print_table
from arb_ternary.errors import EnvironmentProblem, UsageProblem
from arb_ternary_train.cli.options import load_options
from arb_ternary_train.openmp import wait_passively


@click.command()
@click.argument("source")
@click.option(
    "--batches",
    type=click.IntRange(min=1),
    help="Batches to evaluate, spread over the data; default: all.",
)
@click.option(
    "--tasks",
    metavar="NAME,NAME",
    help="Evaluate on tasks of lm-evaluation-harness instead of held-out data.",
)
@click.option(
    "--include",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="With --tasks: a folder of task files.",
)
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    help="With --tasks: number of samples of each task, from its beginning; default: all.",
)
@load_options
@as_json
def evaluate(
    source: str,
    batches: int | None,
    tasks: str | None,
    include: Path | None,
    limit: int | None,
    backend: str | None,
    device: str | None,
    as_json: bool,
) -> None:
    """Evaluate SOURCE, a run directory or a checkpoint: held-out loss, baselines, audit.

    With --tasks, SOURCE may also be a model that another program has written.
    """
    wait_passively()
    if tasks is not None:
        if batches is not None:
            raise UsageProblem("--batches: counts batches of held-out data", "Give --limit N.")
        asked = [name.strip() for name in tasks.split(",") if name.strip()]
        options = {"include": include, "limit": limit, "backend": backend, "device": device}
        _evaluate_tasks(source, asked, options, as_json=as_json)
        return
    for name, value in (("--include", include), ("--limit", limit)):
        if value is not None:
            raise UsageProblem(f"{name}: is about tasks, and none is named", "Add --tasks NAME.")
    from arb_ternary_train.audit import audit
    from arb_ternary_train.model_source import find_run
    from arb_ternary_train.restore import load_run, measure

    if find_run(source) is None:
        raise UsageProblem(
            f"{source}: is not a run, so there are no held-out samples to evaluate its model on",
            f"`arb import {source} DIR` makes a run of a model. Name your data in DIR/config.yaml, "
            f"then: arb eval DIR",
        )
    trained = load_run(Path(source), backend=backend, device=device)
    result, baselines = measure(trained, batches)
    counted = audit(trained.model)
    numbers: dict[str, Any] = {
        "checkpoint": str(trained.checkpoint.path),
        "step": trained.checkpoint.step,
        "backend": trained.backend,
        "tokens": result.tokens,
        "validation_loss": result.loss,
    }
    if trained.record.get("loss_unit", "nats").startswith("nats"):
        numbers["perplexity"] = result.perplexity
    numbers |= {**result.metrics, **baselines}
    if as_json:
        print_json({**numbers, "audit": counted.to_json()})
        return

    print_table(("what the model stores", "elements", "bytes"), counted.table())
    click.echo()
    rows = []
    for key, value in numbers.items():
        name = key.replace("_", " ")
        if key == "tokens":
            name = f"{trained.record.get('prediction_noun', 'token')}s"
        rows.append((name, f"{value:.4f}" if isinstance(value, float) else value))
    print_table(("evaluation", ""), rows)


def _evaluate_tasks(
    source: str, tasks: list[str], options: Mapping[str, Any], *, as_json: bool
) -> None:
    """Evaluate on tasks, print the results, and keep them if ``source`` is a run.

    The run's file ``tasks.json`` has the newest result of each task.

    Raises:
        EnvironmentProblem: the package that evaluates tasks is not installed.
        ArbError: the run's file is damaged.
    """
    import arb_ternary
    from arb_ternary.plugins.discovery import install_command
    from arb_ternary_train.directory import write_json
    from arb_ternary_train.model_source import find_run

    try:
        evaluate_tasks = arb_ternary.evaluate_tasks
    except ImportError as error:
        raise EnvironmentProblem(
            "--tasks: needs a package that is not installed: arb-ternary-evals",
            install_command("arb-ternary-evals"),
        ) from error
    directory = find_run(source)
    # Read before the evaluation, so that a damaged file is found before it takes its time.
    kept = {} if directory is None else directory.task_results()
    found = evaluate_tasks(source, tasks, **options)
    if as_json:
        print_json(found)
    else:
        print_table(("task", "samples", "metric", "", "±"), [*_rows(found)])
        print_notes(found["notes"])
    if directory is not None:
        about = {key: value for key, value in found.items() if key not in ("tasks", "samples")}
        for name, metrics in found["tasks"].items():
            kept[name] = {**about, "samples": found["samples"].get(name), "metrics": metrics}
        write_json(directory.tasks_file, kept)
        click.echo(f"{directory.tasks_file}: has these results", err=True)


def _rows(found: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield a row per metric of each task."""
    for task, metrics in found["tasks"].items():
        samples = found["samples"].get(task, "")
        for key, value in metrics.items():
            name, _, chosen = key.partition(",")
            if name.endswith("_stderr"):
                continue
            error = metrics.get(f"{name}_stderr,{chosen}")
            title = name if chosen in ("", "none") else f"{name} ({chosen})"
            shown = "" if error is None else f"{error:.4f}"
            yield task, str(samples), title.replace("_", " "), f"{value:.4f}", shown
