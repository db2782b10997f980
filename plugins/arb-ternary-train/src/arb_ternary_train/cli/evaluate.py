"""``arb eval``: measure a run's model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from arb_ternary.cli.options import as_json
from arb_ternary.cli.output import print_json, print_notes, print_table
from arb_ternary.errors import UsageProblem
from arb_ternary_train.cli.options import load_options
from arb_ternary_train.openmp import wait_passively


@click.command()
@click.argument("source", type=click.Path())
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
@click.option(
    "--num-fewshot",
    type=click.IntRange(min=0),
    help="With --tasks: examples before each question; default: what each task says.",
)
@click.option(
    "--apply-chat-template",
    is_flag=True,
    default=None,
    help="With --tasks: ask in conversations, as the model's chat template writes them.",
)
@click.option(
    "--fewshot-as-multiturn/--fewshot-in-question",
    default=None,
    help="With --apply-chat-template: whether examples are turns of their own (the default).",
)
@click.option(
    "--system-instruction",
    metavar="TEXT",
    help="With --tasks: stands before everything; a system message in conversations.",
)
@load_options
@as_json
def evaluate(
    source: str,
    batches: int | None,
    tasks: str | None,
    backend: str | None,
    device: str | None,
    as_json: bool,
    **about_tasks: Any,
) -> None:
    """Evaluate SOURCE, a run directory or a checkpoint: held-out loss, baselines, audit.

    With --tasks, SOURCE may also be a model that another program has written.
    """
    wait_passively()
    given = {name: value for name, value in about_tasks.items() if value is not None}
    if tasks is not None:
        if batches is not None:
            raise UsageProblem("--batches: counts batches of held-out data", "Give --limit N.")
        asked = [name.strip() for name in tasks.split(",") if name.strip()]
        if "fewshot_as_multiturn" in given and "apply_chat_template" not in given:
            raise UsageProblem(
                "--fewshot-as-multiturn: is about conversations", "Add --apply-chat-template."
            )
        options = {**given, "backend": backend, "device": device}
        _evaluate_tasks(source, asked, options, as_json=as_json)
        return
    for name in given:
        option = f"--{name.replace('_', '-')}"
        raise UsageProblem(f"{option}: is about tasks, and none is named", "Add --tasks NAME.")
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

    The run's file ``tasks.json`` has the newest result of each task, and its report, if it has one,
    a table of them.

    Raises:
        EnvironmentProblem: the package that evaluates tasks is not installed.
        ArbError: the run's file is damaged.
    """
    import arb_ternary
    from arb_ternary_train.directory import write_json
    from arb_ternary_train.model_source import find_run
    from arb_ternary_train.task_results import (
        COLUMNS,
        find_evaluate_tasks,
        read_task_results,
        task_records,
    )

    evaluate_tasks = find_evaluate_tasks("--tasks")
    directory = find_run(source)
    # Read before the evaluation, so that a damaged file is found before it takes its time.
    kept = {} if directory is None else directory.task_results()
    found = evaluate_tasks(source, tasks, **options)
    records = task_records(found)
    if as_json:
        print_json(found)
    else:
        results = read_task_results(records, source)
        print_table(COLUMNS, [row for result in results for row in result.rows()])
        print_notes(found["notes"])
    if directory is not None:
        write_json(directory.tasks_file, {**kept, **records})
        click.echo(f"{directory.tasks_file}: has these results", err=True)
        try:
            refresh_report = arb_ternary.refresh_report
        except ImportError:  # a report is of the package that is not installed
            return
        refresh_report(directory.path)
