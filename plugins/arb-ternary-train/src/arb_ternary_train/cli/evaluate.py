"""``arb eval``: measure a run's model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from arb_ternary.cli.options import as_json
from arb_ternary.cli.output import print_json, print_table
from arb_ternary.errors import UsageProblem
from arb_ternary_train.cli.options import load_options
from arb_ternary_train.openmp import wait_passively


@click.command()
@click.argument("run")
@click.option(
    "--batches",
    type=click.IntRange(min=1),
    help="Batches to evaluate, spread over the data; default: all.",
)
@load_options
@as_json
def evaluate(
    run: str, batches: int | None, backend: str | None, device: str | None, as_json: bool
) -> None:
    """Evaluate RUN, a run directory or a checkpoint: held-out loss, baselines, audit."""
    wait_passively()
    from arb_ternary_train.audit import audit
    from arb_ternary_train.model_source import find_run
    from arb_ternary_train.restore import load_run, measure

    if find_run(run) is None:
        raise UsageProblem(
            f"{run}: is not a run, so there are no held-out samples to evaluate its model on",
            f"`arb import {run} DIR` makes a run of a model. Name your data in DIR/config.yaml, "
            f"then: arb eval DIR",
        )
    trained = load_run(Path(run), backend=backend, device=device)
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
