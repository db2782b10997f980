"""Full-parameter training steps of a whole decoder that is ternary throughout, and their memory.

By default the model has the sizes of Llama 2 7B: one sequence of 128 tokens per step, activation
checkpointing, votes cast in backward and applied.
"""

from __future__ import annotations

from typing import Any, Literal

from attrs import evolve, frozen

from arb_ternary.config.options import option, optional, positive
from arb_ternary_bench.cli.options import usable_backends
from arb_ternary_bench.steps.large_model import MODELS, GroupSize, LargeRun, run_large_model
from arb_ternary_bench.study import Session, Study
from arb_ternary_bench.table import Column, Record, ResultTable


@frozen(kw_only=True)
class LargeModelOptions:
    """Options of the study."""

    model: Literal["7b", "1b", "tiny"] = option("7b", "sizes of Llama 2 7B, TinyLlama, or less")
    layers: int | None = option(None, "fewer layers than it has", validator=optional(positive))
    steps: int = option(3, "optimizer steps", validator=positive)
    gradients: Literal["float", "int8"] = option("float", "gradients of linears")
    group_size: GroupSize = option(128, "weights that share an exponent")
    backend: str | None = option(None, "null = the preferred one")
    threads: int | None = option(None, "null = torch's", validator=optional(positive))


def run(options: LargeModelOptions, session: Session) -> dict[str, Any]:
    """Build the model and take the steps."""
    model = MODELS[options.model]
    if options.layers is not None:
        model = evolve(model, layers=options.layers)
    large = LargeRun(
        model=model,
        backend=options.backend or usable_backends("cpu")[0],
        steps=options.steps,
        group_size=options.group_size,
        gradients=options.gradients,
        threads=options.threads,
    )
    return run_large_model(large, say=session.say)


def _records(result: Record) -> list[Record]:
    parameters = result["parameters"]
    rows: list[Record] = [
        {"what": "training state; gradients are never stored", "bytes": result["state_bytes"]},
        {"what": "peak resident memory", "bytes": result["peak_bytes"]},
    ]
    for name, nbytes in result["others"].items():
        rows.append({"what": f"{name} would hold, before activations", "bytes": nbytes})
    return [{**row, "per_parameter": row["bytes"] / parameters} for row in rows]


def notes(result: Record) -> list[str]:
    """Return what a reader of the table has to know."""
    return [
        f"{result['model']}, {result['layers']} layers, backend {result['backend']}, gradients "
        f"{result['gradients']}, group {result['group_size']}: {result['parameters']:,} "
        f"parameters, of which float {result['float_parameters']:,}. "
        f"{result['seconds_per_step']:.2f} seconds per step ({result['tokens_per_step']} tokens, "
        f"activation checkpointing, {result['machine']['threads']} threads)."
    ]


TABLE = ResultTable(
    columns=(
        Column("what", lambda row: row["what"], left=True),
        Column("GiB", lambda row: f"{row['bytes'] / 2**30:.2f}"),
        Column("bytes per parameter", lambda row: f"{row['per_parameter']:.3f}"),
    ),
    records=_records,
    notes=notes,
)
STUDY = Study(options=LargeModelOptions, run=run, table=TABLE)
