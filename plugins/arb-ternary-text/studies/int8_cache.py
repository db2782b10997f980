"""What keys and values as int8 change in a trained decoder: held-out loss token by token, and
greedy texts.

    python plugins/arb-ternary-text/studies/int8_cache.py runs/demo

The run's held-out windows, spread evenly over its text, are read one token after another; then
texts are written behind the beginnings of such windows, the likeliest token each time. The first
way is the one that others are compared with; the last, which computes and keeps all in bfloat16,
shows what any other rounding changes.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from arb_ternary.protocols.data import DataSource
from arb_ternary_text.models.cache import CacheNumbers
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_text.models.generate import generate
from arb_ternary_train.restore import load_run

#: What is computed in, and what keys and values are kept as.
WAYS: tuple[tuple[torch.dtype, CacheNumbers], ...] = (
    (torch.float32, "float"),
    (torch.float32, "int8"),
    (torch.bfloat16, "float"),
)


@frozen(eq=False)
class Read:
    """What one way makes of held-out windows: of every token its loss, float64, and the likeliest
    instead.
    """

    losses: Tensor
    likeliest: Tensor
    bytes_per_token: int


@torch.no_grad()
def read(model: Decoder, windows: Sequence[Tensor], numbers: CacheNumbers) -> Read:
    """Windows ``[B, S + 1]``, token by token."""
    losses = []
    likeliest = []
    for tokens_BS in windows:
        cache = model.new_cache(len(tokens_BS), numbers)
        for place in range(tokens_BS.size(1) - 1):
            logits_BV = model(tokens_BS[:, place : place + 1], cache)[:, -1].double()
            losses.append(F.cross_entropy(logits_BV, tokens_BS[:, place + 1], reduction="none"))
            likeliest.append(logits_BV.argmax(dim=-1))
    return Read(torch.cat(losses), torch.cat(likeliest), cache.bytes_per_token())


def texts(model: Decoder, starts: Sequence[list[int]], numbers: CacheNumbers) -> list[list[int]]:
    """Greedy texts up to the end of the context."""
    new = model.max_length - len(starts[0])
    return [
        list(generate(model, start, max_new_tokens=new, temperature=0.0, cache=numbers))
        for start in starts
    ]


def main() -> None:
    """A line for each way."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--batches", type=int, default=16, help="of 16 windows")
    parser.add_argument("--texts", type=int, default=20)
    parser.add_argument("--prompt", type=int, default=16, help="tokens that a text begins with")
    options = parser.parse_args()
    torch.set_num_threads(1)
    trained = load_run(options.run)
    model = trained.model
    data = trained.config.data.build()
    assert isinstance(model, Decoder)
    assert isinstance(data, DataSource)
    windows = [batch.data for batch in data.held_out(16, model.max_length, options.batches)]
    starts = torch.cat(windows)[: options.texts, : options.prompt].tolist()
    first: tuple[Read, list[list[int]]] | None = None
    for dtype, numbers in WAYS:
        model.set_dtype(dtype)
        found = read(model, windows, numbers)
        written = texts(model, starts, numbers)
        first = first or (found, written)
        apart = found.losses - first[0].losses
        mean = float(found.losses.mean())
        error = float(apart.std()) / math.sqrt(len(apart))
        agree = float((found.likeliest == first[0].likeliest).double().mean())
        same = sum(map(list.__eq__, written, first[1]))
        print(
            f"{str(dtype).removeprefix('torch.')}, cache {numbers}, {found.bytes_per_token:,} "
            f"bytes a token: loss {mean:.5f}, perplexity {math.exp(mean):.4f}, apart "
            f"{float(apart.mean()):+.6f} +- {error:.6f}; the likeliest token is the same "
            f"{agree:.2%} of {len(apart):,} times; {same} of {len(written)} texts are the same, "
            f"{_until(written, first[1]):.0f} of {len(written[0])} tokens up to the first other",
            flush=True,
        )


def _until(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """Mean number of tokens before the first that differs."""
    agreed = [
        next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), len(x))
        for x, y in zip(ours, theirs, strict=True)
    ]
    return sum(agreed) / len(agreed)


if __name__ == "__main__":
    main()
