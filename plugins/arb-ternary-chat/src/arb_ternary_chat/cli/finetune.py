"""The command ``arb finetune``: train a model on conversations."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from arb_ternary.cli.options import overrides
from arb_ternary_train.cli.options import load_options
from arb_ternary_train.openmp import wait_passively

if TYPE_CHECKING:
    from arb_ternary_chat.finetune import Method


@click.command()
@click.argument("source", type=click.Path())
@click.argument("data", type=click.Path())
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="Directory for everything that is written.",
)
@click.option("--steps", type=click.IntRange(min=1), help="Optimizer steps.")
@click.option(
    "--epochs",
    type=click.FloatRange(min=0, min_open=True),
    help="Passes over the conversations, instead of --steps.  [default: 1]",
)
@click.option(
    "--lr",
    metavar="auto|RATE",
    default="auto",
    show_default=True,
    help="Rate of the votes; auto: 0.05.",
)
@click.option(
    "--method",
    type=click.Choice(["votes", "votes+float-ends"]),
    default="votes",
    show_default=True,
    help="Train the ternary weights only, or by AdamW also the float parameters that the model "
    "has.",
)
@click.option(
    "--eval-share",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=0.05,
    show_default=True,
    help="Share of the conversations that is held out.",
)
@overrides
@load_options
def finetune(
    source: str,
    data: str,
    out: Path,
    steps: int | None,
    epochs: float | None,
    lr: str,
    method: Method,
    eval_share: float,
    overrides: tuple[str, ...],
    backend: str | None,
    device: str | None,
) -> None:
    """Fine-tune the model of SOURCE on the conversations of DATA.

    SOURCE is a run, a checkpoint, a GGUF file, a Hugging Face folder, or hf://org/name. DATA is a
    .jsonl, .json, .csv or .parquet file, a folder of them, or a glob pattern. The loss counts on
    the assistant's answers. The model is written in the format that it came in.

    Interrupted, the same command goes on, bit for bit.
    """
    wait_passively()
    from arb_ternary.errors import UsageProblem
    from arb_ternary_chat.finetune import FineTuning
    from arb_ternary_chat.finetune import finetune as run

    if steps is not None and epochs is not None:
        raise UsageProblem("--steps and --epochs exclude each other", "Give one of them.")
    asked = FineTuning(
        source=source,
        data=data,
        out=out,
        steps=steps,
        epochs=1.0 if epochs is None else epochs,
        lr=_rate(lr),
        method=method,
        eval_share=eval_share,
        overrides=overrides,
        backend=backend,
        device=device,
    )
    outcome = run(asked, lambda line: click.echo(line, err=True))
    click.echo(f"{out / 'run'}: loss {outcome.before.loss:.4f} -> {outcome.after:.4f}")
    shown = outcome.exported or out / "run"
    click.echo(f"talk to it: arb chat {shown}")


def _rate(lr: str) -> float | None:
    """Return the rate of the votes; None for ``auto``."""
    if lr == "auto":
        return None
    try:
        rate = float(lr)
    except ValueError:
        rate = 0.0
    if not 0 < rate < 1:
        raise click.BadParameter(
            f"{lr!r} is neither auto nor a number between 0 and 1", param_hint="--lr"
        )
    return rate
