"""Bytes that one rank holds of a model with sharded weights, on 1, 2 and 4 ranks.

    python plugins/arb-ternary-train/studies/sharded_memory.py measures, some minutes python
    plugins/arb-ternary-train/studies/sharded_memory.py --table prints the result as a table

Three steps of a decoder, one micro-batch a rank. Storages are counted by what they are: those of
packed weights, and of what sums the votes of a step, between steps and at the moment of a step when
most of them are there; accumulators, exponents, and the floats of rows and columns. The last column
is the most that torch had allocated at a time in the second step, all of it together: also
activations, messages and what kernels need for a moment. No time is measured and nothing is random.
On more than one rank the decoded form of weights is not kept (``ARB_TERNARY_DECODE_CACHE_MB=0``),
which would be int8 of every weight.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from arb_ternary.backends.select import use_backend
from arb_ternary.optim.protocol import collect_trainable
from arb_ternary.ternary.models import seed_votes, ternary_modules
from arb_ternary.ternary.module import TernaryModule
from arb_ternary_testing.ranks import on_ranks
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_train.ranks.exchange import own_rows, share_votes
from arb_ternary_train.ranks.weights import place_weights
from arb_ternary_train.ranks.world import World
from arb_ternary_votes.scaled_votes import ScaledVotes

RESULT: Final = Path(__file__).parents[1] / "results" / "sharded-memory.json"
MODEL: Final = {"width": 256, "layers": 12, "heads": 4, "max_length": 8}
VOCABULARY: Final = 1024
SIZES: Final = (1, 2, 4)


def stored(tensor: Tensor) -> int:
    """Bytes of what a tensor lies in, on this rank."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(local.untyped_storage().size())


class Meter:
    """The most bytes of packed weights, and of sums of votes, own rows and those of others
    together.
    """

    def __init__(self, modules: list[TernaryModule], *, sharded: bool) -> None:
        self.modules = modules
        self.sharded = sharded
        self.packed = 0
        self.summed = 0
        self.kept = sum(stored(module.weight) for module in modules)
        for module in modules:
            module.register_forward_pre_hook(self.look)
            module.on_backward = partial(self.look_later, module.on_backward)

    def look(self, *_: Any) -> None:
        """Count what is there now."""
        there = sum(
            stored(module.weight)
            for module in self.modules
            if not hasattr(module.weight, "to_local")
        )
        self.packed = max(self.packed, self.kept + there if self.sharded else there)
        self.summed = max(self.summed, sums_of(self.modules))

    def look_later(self, prepare: Callable[[], None] | None) -> None:
        """Count when backward comes by, and votes are about to be cast."""
        if prepare is not None:
            prepare()
        self.look()


def sums_of(modules: list[TernaryModule]) -> int:
    """Bytes of the sums of votes that are there now, for weights and exponents."""
    parts = [tensor for m in modules if m.sums is not None for tensor in vars(m.sums).values()]
    return sum(
        stored(part) for part in parts if isinstance(part, Tensor) and not part.is_floating_point()
    )


def most_allocated(step: Callable[[], None]) -> int:
    """Bytes that torch had allocated at a time during ``step``, at most, beyond those that it had
    before.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    assert found.profiler is not None
    events = found.profiler.kineto_results.events()
    changes = sorted(
        (event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"
    )
    return max(accumulate(change for _, change in changes))


def measured(world: World) -> dict[str, int]:
    """What this rank holds."""
    torch.manual_seed(0)
    with use_backend("torch"):
        model = Decoder(DecoderConfig(**MODEL), VOCABULARY)
    seed_votes(model, 0)
    weights = place_weights(model, "sharded", world)
    optimizer = ScaledVotes(collect_trainable(model).ternary)
    modules = [module for _, module in ternary_modules(model)]
    for module in modules:
        module.sum_votes()
    rounds = weights.rounds(modules)
    if world.size > 1:
        own_rows(model, world)
        share_votes(optimizer, world, rounds)

    def step() -> None:
        for module in modules:
            module.begin_micro_batch(world.rank)
        ids = torch.arange(8).view(1, 8) + world.rank
        nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.roll(1, 1).flatten()).backward()
        weights.end_round()
        if rounds is not None:
            rounds.end_round(last=True)
        for module in modules:
            module.end_micro_batch()
        optimizer.step()
        optimizer.zero_grad()

    step()
    held = {
        tensor.untyped_storage().data_ptr(): stored(tensor)
        for module in modules
        for found in (vars(module), vars(module.sums), module._buffers, module._parameters)
        for tensor in (
            each.to_local() if hasattr(each, "to_local") else each for each in found.values()
        )
        if isinstance(tensor, Tensor)
    }
    allocated = sum(held.values()) + most_allocated(step)
    meter = Meter(modules, sharded=world.size > 1)
    step()
    floats = [
        tensor
        for module in modules
        for found in (vars(module), vars(module.sums))
        for tensor in found.values()
        if isinstance(tensor, Tensor) and tensor.is_floating_point()
    ]
    return {
        "weights": sum(module.shape.out_features * module.shape.in_features for module in modules),
        "packed, between steps": sum(stored(module.weight) for module in modules),
        "packed, most in a step": meter.packed,
        "accumulators": sum(stored(module.votes) for module in modules),
        "sums of votes, between steps": sums_of(modules),
        "sums of votes, most in a step": meter.summed,
        "exponents and their votes": sum(
            stored(m.exponent) + stored(m.exponent_votes) for m in modules
        ),
        "floats of rows and columns": sum(map(stored, floats)),
        "all that is allocated, most in a step": allocated,
    }


def table(result: dict[str, Any]) -> str:
    """Bits a weight, of the rank that holds most."""
    names = [name for name in result["1"][0] if name != "weights"]
    lines = ["| ranks | " + " | ".join(names) + " |", "|---:|" + "---:|" * len(names)]
    for size, ranks in result.items():
        cells = [
            f"{max(rank[name] for rank in ranks) * 8 / ranks[0]['weights']:.2f}" for name in names
        ]
        lines.append(f"| {size} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--table", action="store_true", help="print the result as a table of bits a weight"
    )
    if parser.parse_args().table:
        print(table(json.loads(RESULT.read_text(encoding="utf-8"))))
        return
    os.environ["ARB_TERNARY_DECODE_CACHE_MB"] = "0"
    result = {str(size): on_ranks(size, measured, seconds=1200) for size in SIZES}
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
