"""``arb finetune`` on a packed model of 2.4 billion weights: tokens per second and memory.

The model is a GGUF file of random trits with a tokenizer of bytes; the conversations are random
words. So speed and memory are those of a real model, and its loss means nothing.
"""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any, Final

import click

from _generation.gguf_file import write_random_gguf
from _generation.shapes import SHAPES, GenerationShape
from arb_ternary.cli.options import as_json
from harness.child import run_arb
from harness.machine import describe, load_average, machine_facts
from harness.script import finish, main, say
from harness.table import Column, Record, ResultTable, number

#: Positions of the model.
_CONTEXT: Final = 4096
#: Conversations, and words of a question and of an answer.
_CONVERSATIONS: Final = 40
_WORDS: Final = 42
_VOCABULARY: Final = ("weight", "vote", "sign", "zero", "group", "scale", "flip", "step", "rate")


def write_conversations(file: Path) -> None:
    """Write conversations of one question and one answer of random words."""
    draw = random.Random(0)
    lines = []
    for _ in range(_CONVERSATIONS):
        question, answer = (" ".join(draw.choices(_VOCABULARY, k=_WORDS)) for _ in range(2))
        lines.append(json.dumps({"prompt": question, "completion": answer}) + "\n")
    file.write_text("".join(lines), encoding="utf-8")


def measure(folder: Path, shape: GenerationShape, *, steps: int, threads: int) -> dict[str, Any]:
    """Write the model and the conversations, fine-tune, and measure the command from outside."""
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "model.gguf"
    if not source.exists():
        say(f"{source}: writing {shape.weights():,} weights")
        write_random_gguf(source, shape, "TQ2_0", _CONTEXT, tokenizer=True)
    chats = folder / "chats.jsonl"
    write_conversations(chats)
    out = folder / "tuned"
    command = ["finetune", str(source), str(chats), "--out", str(out), "--steps", str(steps)]
    facts = {**machine_facts(), "threads": threads}
    started = time.monotonic()
    ended = run_arb(command, folder / "finetune.log", threads=threads)
    seconds = time.monotonic() - started
    report = json.loads((out / "run" / "result.json").read_text(encoding="utf-8"))
    return {
        "command": f"arb finetune model.gguf chats.jsonl --out tuned --steps {steps}",
        "machine": {**facts, "load_average_at_end": load_average()},
        "what": shape.what,
        "weights": shape.weights(),
        "steps": steps,
        "tokens": report["tokens"],
        "tokens_per_second": report["tokens_per_second"],
        "peak_bytes": ended.peak_bytes,
        "seconds": seconds,
        "source_bytes": source.stat().st_size,
        "exported_bytes": (out / "model.gguf").stat().st_size,
    }


def notes(result: Record) -> list[str]:
    """Return what was run, and where."""
    return [
        f"{result['what']}, random weights; {result['steps']} steps, {result['tokens']:,} tokens. "
        f"Import, evaluation before and after, training and export are one command, "
        f"`{result['command']}`, and took {result['seconds']:.0f} s. {describe(result['machine'])}"
    ]


TABLE = ResultTable(
    columns=(
        Column("weights", lambda row: f"{row['weights']:,}"),
        Column("file, GB", lambda row: number(row["source_bytes"], 2, 1e-9)),
        Column("peak memory, GiB", lambda row: number(row["peak_bytes"], 2, 2.0**-30)),
        Column("tokens/s", lambda row: number(row["tokens_per_second"], 1)),
        Column("exported, GB", lambda row: number(row["exported_bytes"], 2, 1e-9)),
    ),
    records=lambda result: [result],
    notes=notes,
)


@click.command()
@click.option("--steps", default=3, show_default=True, type=click.IntRange(min=1))
@click.option("--threads", default=2, show_default=True, type=click.IntRange(min=1))
@click.option(
    "--out",
    default=Path("runs/billions"),
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for models, result.json and the table.",
)
@as_json
def billions(steps: int, threads: int, out: Path, as_json: bool) -> None:
    """Fine-tune random weights of BitNet b1.58 2B4T's shapes, and measure it."""
    result = measure(out, SHAPES["2b"], steps=steps, threads=threads)
    finish(result, TABLE, out, as_json=as_json)


if __name__ == "__main__":
    main(billions)
