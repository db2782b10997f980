"""A few training steps with the kernels of one backend, for a tool that watches them: the part
``sanitizer``.

Sizes are ones, odd and a little over a tile, since kernels read and write past the end there if
anywhere. Combinations are taken until the time is up; the last line says how many, and exit code 1
is none at all.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Final

import torch
from attrs import frozen
from torch import nn

from arb_ternary import TernaryLinear
from arb_ternary.ternary.embedding import TernaryEmbedding, TernaryRMSNorm
from arb_ternary.ternary.models import ternary_modules
from arb_ternary.ternary.module import GroupSize
from arb_ternary_train.update import ternary_update
from arb_ternary_votes.scaled_votes import ScaledVotes
from arb_ternary_votes.sign_votes import SignVotes

#: ``(M, N, K)``: rows of a step, outputs (ids of the lookup too), inputs.
SIZES: Final = ((7, 130, 200), (1, 1, 1), (65, 257, 96))
STEPS: Final = 3


@frozen(kw_only=True)
class Combination:
    """What is trained."""

    sizes: tuple[int, int, int]
    group_size: GroupSize
    gradients: str
    optimizer: type[ScaledVotes] | type[SignVotes]

    def __str__(self) -> str:
        sizes = " x ".join(map(str, self.sizes))
        return (
            f"{sizes}, group_size {self.group_size}, {self.gradients} gradients, "
            f"{self.optimizer.__name__}"
        )


def combinations() -> Iterator[Combination]:
    """All of them, the default rule's first."""
    groups: tuple[GroupSize, ...] = (32, "row")
    for optimizer, gradients, group_size, sizes in product(
        (ScaledVotes, SignVotes), ("int8", "float"), groups, SIZES
    ):
        yield Combination(
            sizes=sizes, group_size=group_size, gradients=gradients, optimizer=optimizer
        )


def train(chosen: Combination, backend: str, device: str) -> None:
    """Lookup, norm and linear: forward, backward and update."""
    rows, outputs, inputs = chosen.sizes
    torch.manual_seed(0)
    model = nn.Sequential(
        TernaryEmbedding(
            outputs,
            inputs,
            group_size=chosen.group_size,
            gradients=chosen.gradients,
            backend=backend,
        ),
        TernaryRMSNorm(inputs, gradients=chosen.gradients, backend=backend),
        TernaryLinear(
            inputs,
            outputs,
            group_size=chosen.group_size,
            gradients=chosen.gradients,
            backend=backend,
        ),
    ).to(device)
    optimizer = chosen.optimizer(dict(ternary_modules(model)))
    ids = torch.randint(outputs, (rows,)).to(device)
    for _ in range(STEPS):
        ternary_update(model, optimizer, model(ids).square().mean())
    if device != "cpu":
        torch.cuda.synchronize(device)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train until the time is up; ``arguments`` are those of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--seconds", type=float, default=120.0, help="after these nothing new is begun"
    )
    chosen = parser.parse_args(arguments)
    until = time.monotonic() + chosen.seconds
    every = list(combinations())
    done = 0
    for combination in every:
        if time.monotonic() > until:
            break
        train(combination, chosen.backend, chosen.device)
        done += 1
        print(combination, flush=True)
    print(f"{chosen.backend} on {chosen.device}: {done} of {len(every)} combinations")
    return 0 if done else 1


if __name__ == "__main__":
    sys.exit(main())
