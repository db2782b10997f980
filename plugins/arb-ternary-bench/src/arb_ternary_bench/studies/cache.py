"""Loss and greedy text of a trained model by the format in which it keeps keys and values.

Held-out sequences of the run's data are read one token after another, so that every token sees
cached keys and values only. Then texts are written that begin as those sequences do, the likeliest
token each time. Everything is compared with float32, which keeps what it computes; a model that
computes in bfloat16 shows what any other rounding changes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from arb_ternary.config.options import option, positive
from arb_ternary.errors import UsageProblem
from arb_ternary.protocols.data import DataSource
from arb_ternary_bench.machine import bench_facts, describe, load_average, with_threads
from arb_ternary_bench.study import Session, Study
from arb_ternary_bench.table import Column, Record, ResultTable
from arb_ternary_text.models.cache import CacheNumbers
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_text.models.generate import generate
from arb_ternary_train.restore import load_run

#: The dtype of the computation, and the format of keys and values. The first is compared with.
WAYS: Final[tuple[tuple[torch.dtype, CacheNumbers], ...]] = (
    (torch.float32, "float"),
    (torch.float32, "bfloat16"),
    (torch.float32, "int8"),
    (torch.bfloat16, "bfloat16"),
)


@frozen(kw_only=True)
class CacheOptions:
    """Options of the study."""

    run: str = option("runs/demo", "a run of a decoder")
    batches: int = option(16, "batches of held-out sequences", validator=positive)
    batch_size: int = option(16, "sequences per batch", validator=positive)
    texts: int = option(20, "texts to write", validator=positive)
    prompt: int = option(16, "tokens that a text begins with", validator=positive)
    threads: int = option(1, "threads", validator=positive)


@frozen(eq=False)
class Reading:
    """Losses and likeliest tokens of one way, over the held-out tokens.

    Attributes:
        losses: loss of each token in nats, float64.
        likeliest: the token with the largest logit in its place.
        bytes_per_token: bytes of keys and values per token.
    """

    losses: Tensor
    likeliest: Tensor
    bytes_per_token: int


def run(options: CacheOptions, session: Session) -> dict[str, Any]:
    """Read the same tokens and write the same texts in each way.

    Raises:
        UsageProblem: the model of the run is not a decoder.
    """
    trained = load_run(Path(options.run))
    model = trained.model.eval()
    data = trained.config.data.build()
    if not isinstance(model, Decoder) or not isinstance(data, DataSource):
        raise UsageProblem(f"{options.run}: is not a run of a decoder")
    batches = data.held_out(options.batch_size, model.max_length, options.batches)
    sequences = [batch.data for batch in batches]
    starts = torch.cat(sequences)[: options.texts, : options.prompt].tolist()

    ways: list[dict[str, Any]] = []
    with with_threads(options.threads):
        facts = bench_facts([])
        first: tuple[Reading, list[list[int]]] | None = None
        for dtype, numbers in WAYS:
            model.set_dtype(dtype)
            reading = _read(model, sequences, numbers)
            written = _write(model, starts, numbers)
            if first is None:
                first = reading, written
            way = {"computed": str(dtype).removeprefix("torch."), "cache": numbers}
            ways.append(way | _compared(reading, first[0]) | _texts(written, first[1]))
            session.say(f"{way['computed']}, cache {numbers}: {ways[-1]['perplexity']:.4f}")
    return {
        "command": "python -m arb_ternary_bench.study cache",
        "machine": {**facts, "load_average_at_end": load_average()},
        "tokens": sum(each[:, 1:].numel() for each in sequences),
        "texts": len(starts),
        "new_tokens": model.max_length - options.prompt,
        "prompt": options.prompt,
        "ways": ways,
    }


@torch.no_grad()
def _read(model: Decoder, sequences: Sequence[Tensor], numbers: CacheNumbers) -> Reading:
    """Read sequences ``[B, S + 1]`` one token at a time."""
    losses = []
    likeliest = []
    for tokens_BS in sequences:
        cache = model.new_cache(tokens_BS.size(0), numbers)
        for place in range(tokens_BS.size(1) - 1):
            logits_BV = model(tokens_BS[:, place : place + 1], cache)[:, -1].double()
            losses.append(F.cross_entropy(logits_BV, tokens_BS[:, place + 1], reduction="none"))
            likeliest.append(logits_BV.argmax(dim=-1))
    return Reading(torch.cat(losses), torch.cat(likeliest), cache.bytes_per_token())


def _write(model: Decoder, starts: Sequence[list[int]], numbers: CacheNumbers) -> list[list[int]]:
    """Return greedy texts up to the end of the context."""
    count = model.max_length - len(starts[0])
    return [
        list(generate(model, start, max_new_tokens=count, temperature=0.0, cache=numbers))
        for start in starts
    ]


def _compared(reading: Reading, first: Reading) -> dict[str, float]:
    difference = reading.losses - first.losses
    return {
        "bytes_per_token": reading.bytes_per_token,
        "perplexity": math.exp(reading.losses.mean().item()),
        "difference": difference.mean().item(),
        "error": difference.std().item() / math.sqrt(difference.numel()),
        "same_token": (reading.likeliest == first.likeliest).double().mean().item(),
    }


def _texts(written: Sequence[list[int]], first: Sequence[list[int]]) -> dict[str, float]:
    """Count the texts that are the same, and the tokens before the first one that differs."""
    same = 0
    agreed = 0
    for ours, theirs in zip(written, first, strict=True):
        same += ours == theirs
        places = range(len(theirs))
        agreed += next((place for place in places if ours[place] != theirs[place]), len(theirs))
    return {"same_texts": same, "tokens_before": agreed / len(first)}


def notes(result: Record) -> list[str]:
    """Return what was read and written, and where."""
    return [
        f"{result['tokens']:,} held-out tokens, read one at a time; {result['texts']} texts of "
        f"{result['new_tokens']} tokens behind {result['prompt']}. The difference of the loss is "
        f"that of each token from float32, in nats, with its standard error. "
        f"{describe(result['machine'])}"
    ]


TABLE = ResultTable(
    columns=(
        Column("computed in", lambda row: row["computed"]),
        Column("cache", lambda row: row["cache"]),
        Column("bytes per token", lambda row: f"{row['bytes_per_token']:,}"),
        Column("perplexity", lambda row: f"{row['perplexity']:.4f}"),
        Column("difference", lambda row: f"{row['difference']:+.5f} +- {row['error']:.5f}"),
        Column("same likeliest token", lambda row: f"{row['same_token']:.2%}"),
        Column("same texts", lambda row: str(row["same_texts"])),
        Column("tokens before they differ", lambda row: f"{row['tokens_before']:.0f}"),
    ),
    records=lambda result: result["ways"],
    notes=notes,
)
STUDY = Study(options=CacheOptions, run=run, table=TABLE)
