"""Perplexity of a language model whose weights were made ternary, before any training.

Compared are the float model, ``arb_ternary.ternarize`` with ``init="absmean"`` and ``"gptq"``, and
the phase ``projection`` of ``arb upcycle``. ``gptq`` and ``projection`` are given the same samples
of the built-in text; the perplexity is that of held-out samples. Embedding, head and norms stay
float, and weights share an exponent per row.

Needs the extra ``studies`` and the packages ``arb-ternary-trainers``, ``arb-ternary-upcycle`` and
``arb-ternary-chat``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from attrs import frozen
from torch import Tensor, nn

from arb_ternary.config.options import option, positive
from arb_ternary.protocols.data import BatchRequest, DataSource
from arb_ternary_bench.child import run_arb
from arb_ternary_bench.machine import bench_facts, describe, load_average, with_threads
from arb_ternary_bench.study import Session, Study
from arb_ternary_bench.table import Column, Record, ResultTable, number
from arb_ternary_train.loading import load_config

_FLOAT: Final = ("lm_head", "model.embed_tokens")


@frozen(kw_only=True)
class ProjectionOptions:
    """Options of the study."""

    model: str = option("model.gguf", "the float model: a folder of transformers or a GGUF file")
    samples: int = option(32, "samples that weights are fitted to", validator=positive)
    held_out: int = option(16, "held-out samples", validator=positive)
    length: int = option(256, "tokens of a sample", validator=positive)
    rotate: bool = option(
        False, "`arb upcycle` changes the basis first (`fold_rotate`), which `ternarize` cannot"
    )
    threads: int = option(2, "threads", validator=positive)


def run(options: ProjectionOptions, session: Session) -> dict[str, Any]:
    """Make the model ternary in each way, and measure all on the same held-out samples."""
    from arb_ternary import load_model

    folder = session.folder
    folder.mkdir(parents=True, exist_ok=True)
    facts = bench_facts([])
    ways: list[dict[str, Any]] = []

    def measured(way: str, logits_of: Callable[[Tensor], Tensor], seconds: float | None) -> None:
        perplexity = _perplexity(logits_of, held_out)
        minutes = None if seconds is None else seconds / 60
        ways.append({"way": way, "perplexity": perplexity, "minutes": minutes})
        session.say(f"{way}: {perplexity:.1f}")

    with with_threads(options.threads):
        started = time.monotonic()
        source = _upcycle(options, folder)
        seconds = time.monotonic() - started
        batches = source.held_out(1, options.length, options.held_out)
        held_out = [batch.data for batch in batches]
        measured("upcycle", load_model(folder / "upcycle" / "run").module, seconds)

        exported = folder / "float"
        exporting = ["export", options.model, str(exported), "--format", "hf"]
        run_arb([*exporting, "-o", "dtype=float32"], options.threads, folder / "export.log")
        measured("float", _logits_of(_pretrained(exported)), None)
        for init in ("absmean", "gptq"):
            model = _pretrained(exported)
            started = time.monotonic()
            _ternarize(model, init, _calibration(source, options))
            measured(init, _logits_of(model), time.monotonic() - started)
    return {
        "command": "python -m arb_ternary_bench.study projection",
        "machine": {**facts, "load_average_at_end": load_average()},
        "model": Path(options.model).name,
        "samples": options.samples,
        "held_out": len(held_out),
        "length": options.length,
        "rotate": options.rotate,
        "ways": ways,
    }


def _upcycle(options: ProjectionOptions, folder: Path) -> DataSource:
    """Round the model with ``arb upcycle``; return the text that it was fitted to."""
    made = folder / "upcycle"
    planned = ["upcycle", "run", options.model, "--out", str(made), "--config-only"]
    planned += ["--steps", "0", "--blockwise-steps", "0"]
    run_arb(planned, options.threads, folder / "config.log")
    phases = [f"{{name: load_teacher, teacher: {options.model}}}"]
    if options.rotate:
        phases.append("fold_rotate")
    tokens = options.samples * options.length
    phases.append(
        f"{{name: projection, calibration_tokens: {tokens}, block_size: {options.length}}}"
    )
    change = f"phases=[{', '.join(phases)}]"
    config = made / "config.yaml"
    training = ["train", str(config), "--run-dir", str(made / "run"), "-o", change]
    run_arb(training, options.threads, folder / "upcycle.log")
    source: DataSource = load_config(config).config.data.build()
    return source


def _calibration(source: DataSource, options: ProjectionOptions) -> list[Tensor]:
    """Return the samples that the phase ``projection`` of a run with seed 0 is fitted to."""
    request = BatchRequest(batch_size=1, block_size=options.length, seed=0)
    batches = source.batches(request)
    return [next(batches).data for _ in range(options.samples)]


def _pretrained(folder: Path) -> nn.Module:
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def _logits_of(model: Any) -> Callable[[Tensor], Tensor]:
    return lambda ids: model(input_ids=ids).logits


def _ternarize(model: nn.Module, init: str, samples: list[Tensor]) -> None:
    from arb_ternary import ternarize

    batches = [{"input_ids": sample} for sample in samples] if init == "gptq" else None
    ternarize(model, exclude=_FLOAT, init=init, group_size="row", calibration=batches)


@torch.no_grad()
def _perplexity(logits_of: Callable[[Tensor], Tensor], samples: list[Tensor]) -> float:
    """Return the exponential of the mean loss per token of samples ``[1, S + 1]``."""
    losses = []
    for sample in samples:
        logits_SV = logits_of(sample[:, :-1])[0]
        losses.append(nn.functional.cross_entropy(logits_SV, sample[0, 1:]).item())
    return math.exp(sum(losses) / len(losses))


def notes(result: Record) -> list[str]:
    """Return what was compared, and where."""
    basis = "in a rotated basis" if result["rotate"] else "without a change of basis"
    return [
        f"{result['model']}: {result['samples']} samples of {result['length']} tokens to fit, "
        f"{result['held_out']} held-out ones; `arb upcycle` {basis}. One choice of samples. "
        f"{describe(result['machine'])}"
    ]


_LABELS: Final = {
    "float": "float model",
    "absmean": '`ternarize(init="absmean")`',
    "gptq": '`ternarize(init="gptq")`',
    "upcycle": "projection of `arb upcycle`",
}
TABLE = ResultTable(
    columns=(
        Column("weights", lambda row: _LABELS[row["way"]]),
        Column("perplexity", lambda row: f"{row['perplexity']:,.1f}"),
        Column("minutes", lambda row: number(row["minutes"], 1)),
    ),
    records=lambda result: result["ways"],
    notes=notes,
)
STUDY = Study(options=ProjectionOptions, run=run, table=TABLE)
