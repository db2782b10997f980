"""What an exchange of votes costs: its kernels one by one, and all of it on ranks of this machine.

    python plugins/arb-ternary-bench/studies/exchange.py both, 11 million weights, 2 ranks python
    plugins/arb-ternary-bench/studies/exchange.py --only kernels --threads 2

Kernels are those of the named backends, on one matrix, the shortest of several calls. The whole
exchange is that of a decoder of 42 weights (6 layers, width 384) under scaled votes of three
levels, one cast a rank and step, on ranks that talk over gloo, one thread each; a step is
collected, applied and shared as in a run, but nothing hides it. Its times are those of the slowest
rank, the median over the steps, and waiting for the others is counted as sending. "exchange" is
what a step of one process does not have, and is also told of the step in which it was shortest. The
load of the machine is told with the result: with fewer free cores than ranks elapsed times say
nothing, and those of the processors are a floor.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Final
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from attrs import frozen
from torch import nn

from arb_ternary import TernaryLinear, use_backend
from arb_ternary.backends.dispatch import kernel
from arb_ternary.backends.protocol import WeightShape
from arb_ternary.counters.hashing import MICRO, STEP
from arb_ternary.ternary.models import ternary_modules
from arb_ternary.ternary.module import TernaryModule
from arb_ternary_bench.compare import machine_facts
from arb_ternary_train.ranks import collectives, delivery, exchange
from arb_ternary_train.ranks.digits import base_for
from arb_ternary_train.ranks.exchange import OwnerRows, own_rows, share_votes
from arb_ternary_train.ranks.flips import count_bytes, decode_flips, encode_flips
from arb_ternary_train.ranks.wire import wire_kernel
from arb_ternary_train.ranks.world import Ranks
from arb_ternary_votes.scaled_votes import ScaledVotes

#: Rows and columns of the matrix of the kernels: 11.0 million weights.
ROWS = 5376
COLUMNS = 2048
#: Of the decoder: layers, width, width of the feed-forward part; 10.6 million weights.
LAYERS = 6
WIDTH = 384
FEED_FORWARD = 1024
#: Share of trits that flip in a step with one micro-batch at the full rate.
FLIPS: Final = 0.0028
_CALLS: Final = 9
_MILLI: Final = 1e3
# : Elapsed time, or that of all threads on a processor, which other programs do not lengthen by
# waiting.
_CLOCKS: Final = {"wall": time.perf_counter, "cpu": time.process_time}


def shortest(call: Callable[[], object]) -> float:
    """Milliseconds of the shortest of several calls."""
    times = []
    for _ in range(_CALLS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times) * _MILLI


def kernel_times(backend: str) -> dict[str, float]:
    """Milliseconds of each kernel on the whole matrix, and the bytes that it makes."""
    generator = torch.Generator().manual_seed(0)
    shape = WeightShape(ROWS, COLUMNS, 128)
    count = ROWS * COLUMNS
    found: dict[str, float] = {}
    for limit in (1, 7, 127):
        base = base_for(limit)
        values = torch.randint(-limit, limit + 1, (count,), dtype=torch.int16, generator=generator)
        packed = wire_kernel(backend, "digits_to_bytes")(values, base)
        total = torch.zeros(count, dtype=torch.int16)
        found[f"pack, base {base}"] = shortest(
            lambda: wire_kernel(backend, "digits_to_bytes")(values, base)  # noqa: B023
        )
        found[f"add, base {base}"] = shortest(
            lambda: wire_kernel(backend, "add_digits_")(total.zero_(), packed, base)  # noqa: B023
        )
        found[f"bits a weight, base {base}"] = 8 * packed.numel() / count
    trits = torch.randint(-1, 2, (ROWS, COLUMNS), dtype=torch.int8, generator=generator)
    moved = (torch.rand(ROWS, COLUMNS, generator=generator) < FLIPS) * torch.where(trits < 1, 1, -1)
    before, after = (
        kernel(backend, "pack")(each.to(torch.int8)) for each in (trits, trits + moved)
    )
    places, directions = wire_kernel(backend, "flip_list")(before, after, shape)
    message = encode_flips(places, directions, count)
    found["list of flips"] = shortest(
        lambda: wire_kernel(backend, "flip_list")(before, after, shape)
    )
    found["encode flips"] = shortest(lambda: encode_flips(places, directions, count))
    found["decode flips"] = shortest(lambda: decode_flips(message, count))
    found["bits a weight, flips"] = 8 * message.numel() / count

    def back_and_forth() -> None:
        for each in (directions, -directions):
            wire_kernel(backend, "apply_flips_")(before, shape, places, each)

    found["apply flips"] = shortest(back_and_forth) / 2
    assert count_bytes(count) + 2 * len(places) == message.numel()
    return found


class Blocks(nn.Module):
    """The weights of a decoder."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(WIDTH, WIDTH)] * 4 + [(WIDTH, FEED_FORWARD)] * 2 + [(FEED_FORWARD, WIDTH)]
        self.linears = nn.ModuleList(
            TernaryLinear(columns, rows, scale_rule="frozen")
            for _ in range(LAYERS)
            for columns, rows in sizes
        )


@frozen
class Waiting:
    """A collective that has begun."""

    wait: Callable[[], object]


class Clock:
    """Milliseconds by what they were spent on, of one step; ``read`` is a clock in seconds."""

    def __init__(self, read: Callable[[], float]) -> None:
        self.read = read
        self.spent: dict[str, float] = defaultdict(float)

    def timed(self, what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call``, with its time counted."""

        def counted(*arguments: Any, **options: Any) -> Any:
            start = self.read()
            result = call(*arguments, **options)
            self.spent[what] += (self.read() - start) * _MILLI
            return result

        return counted

    def sent(self, what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """A collective, with its time counted and that for which it is waited."""

        def begun(*arguments: Any, **options: Any) -> Any:
            work = self.timed(what, call)(*arguments, **options)
            return work if work is None else Waiting(self.timed(what, work.wait))

        return begun

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count kernels, messages, and what accumulators take."""
        names = {
            "digits_to_bytes": "pack",
            "add_digits_": "add",
            "flip_list": "list flips",
            "apply_flips_": "apply flips",
            "weight_rows": "own rows",
        }
        gathered = self.sent("send counts and flips", collectives.all_gather_single)

        def timed_kernel(backend: str, op: str) -> Callable[..., Any]:
            return self.timed(names[op], wire_kernel(backend, op))

        with (
            patch.object(exchange, "wire_kernel", timed_kernel),
            patch.object(delivery, "wire_kernel", timed_kernel),
            patch.object(
                exchange, "encode_flips", self.timed("encode, decode", exchange.encode_flips)
            ),
            patch.object(
                exchange, "decode_flips", self.timed("encode, decode", exchange.decode_flips)
            ),
            patch.object(
                dist, "all_to_all_single", self.sent("send votes", dist.all_to_all_single)
            ),
            patch.object(delivery, "all_gather_single", gathered),
            patch.object(collectives, "all_gather_single", gathered),
            patch.object(dist, "all_reduce", self.sent("send counts and flips", dist.all_reduce)),
            patch.object(TernaryModule, "settle", self.timed("settle", TernaryModule.settle)),
            patch.object(
                ScaledVotes, "whole_votes", self.timed("in quanta", ScaledVotes.whole_votes)
            ),
        ):
            yield


def on_rank(rank: int, size: int, folder: str, backend: str, steps: int, clock_name: str) -> None:
    """Exchange made-up votes for some steps, and write what each took."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store", size), rank=rank, world_size=size
    )
    world = Ranks(torch.device("cpu"))
    torch.manual_seed(0)
    with use_backend(backend):
        model = Blocks()
    modules = dict(ternary_modules(model))
    optimizer = ScaledVotes(modules, vote_levels=3)
    for module in modules.values():
        size = (module.shape.out_features, module.shape.in_features)
        module.set_votes(torch.randint(-63, 64, size).to(torch.int8))
        assert module.magnitudes is not None
        module.magnitudes.fill_(1.0)
        module.control[MICRO] = 1
    # from here on the rule has magnitudes, without which no vote is worth anything
    optimizer.step()
    own_rows(model, world)
    share_votes(optimizer, world)
    assert isinstance(optimizer.exchange, OwnerRows)
    told: list[dict[str, float]] = []
    for step in range(steps):
        torch.manual_seed(1000 * step + rank)
        for module in modules.values():
            assert module.sums is not None
            drawn = torch.rand(module.shape.out_features, module.shape.in_features)
            module.sums.votes.copy_((drawn < 0.02).to(torch.int16) - (drawn > 0.98).to(torch.int16))
            module.sums.casts = 1
        clock = Clock(_CLOCKS[clock_name])
        sent = optimizer.exchange.sent_bytes
        world.barrier("the next step")
        start = clock.read()
        with clock.watching():
            optimizer.exchange.collect(optimizer)
            collected = clock.read()
            flips = [
                module.apply_votes("apply_scaled_votes", 64, 0, 1) for module in modules.values()
            ]
            applied = clock.read()
            optimizer.exchange.share(optimizer, flips)
        ended = clock.read()
        for module in modules.values():
            assert module.sums is not None
            module.control[STEP] += 1
            module.sums.clear()
        weights = sum(
            module.shape.out_features * module.shape.in_features for module in modules.values()
        )
        told.append(
            {
                **clock.spent,
                "apply votes": (applied - collected) * _MILLI - clock.spent["own rows"],
                "all": (ended - start) * _MILLI,
                "bits a weight sent": 8 * (optimizer.exchange.sent_bytes - sent) / weights,
                "flips, share": sum(int(each) for each in flips) / weights,
            }
        )
    Path(folder, f"rank-{rank}.json").write_text(json.dumps(told), encoding="utf-8")
    world.close()


def exchange_times(size: int, backend: str, steps: int, clock: str) -> dict[str, float]:
    """The median step of the slowest rank, by what its time was spent on."""
    with tempfile.TemporaryDirectory(prefix="arb-exchange-") as folder:
        processes.spawn(on_rank, (size, folder, backend, steps, clock), size)
        told = [
            json.loads(Path(folder, f"rank-{rank}.json").read_text(encoding="utf-8"))
            for rank in range(size)
        ]
    # The first steps allocate.
    slowest = max(told, key=lambda steps: median(step["all"] for step in steps[2:]))[2:]
    found = {what: median(step.get(what, 0.0) for step in slowest) for what in slowest[-1]}
    told_apart = set(found) - {"all", "bits a weight sent", "flips, share"}
    found["the rest"] = found["all"] - sum(found[what] for what in told_apart)
    # A step of one process turns sums into quanta, settles and applies them too, of all rows.
    in_any_case = ("in quanta", "settle", "apply votes")
    found["exchange"] = found["all"] - sum(found[what] for what in in_any_case)
    found["exchange, shortest"] = min(
        step["all"] - sum(step[what] for what in in_any_case) for step in slowest
    )
    return found


def table(columns: dict[str, dict[str, float]], ratio: Sequence[str] = ()) -> str:
    """Rows by what was measured; the last column is the ratio of two others."""
    names = [*columns, *([f"{ratio[0]} / {ratio[1]}"] if ratio else [])]
    lines = ["| | " + " | ".join(names) + " |", "|---|" + "---:|" * len(names)]
    for what in dict.fromkeys(what for column in columns.values() for what in column):
        cells = [f"{column.get(what, 0.0):.4g}" for column in columns.values()]
        if ratio:
            times = [columns[name].get(what, 0.0) for name in ratio]
            cells.append(
                f"{times[0] / times[1]:.1f}" if times[1] and not what.startswith("bits") else ""
            )
        lines.append(f"| {what} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=("kernels", "ranks"), help="one of the two parts")
    parser.add_argument("--backends", nargs="+", default=["torch", "cpu"])
    parser.add_argument(
        "--threads", type=int, nargs="+", default=[1, 2], help="of the kernels; default: 1 2"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument(
        "--clocks", nargs="+", choices=_CLOCKS, default=["wall", "cpu"], help="of the exchange"
    )
    given = parser.parse_args()
    facts = machine_facts()
    print(json.dumps({**facts, "load of the last minute": round(os.getloadavg()[0], 2)}))
    if given.only != "ranks":
        columns = {}
        for threads in given.threads:
            torch.set_num_threads(threads)
            columns |= {
                f"{backend}, {threads}": kernel_times(backend) for backend in given.backends
            }
        print(
            f"\nMilliseconds, {ROWS} x {COLUMNS} weights, by backend and threads; load "
            f"{os.getloadavg()[0]:.2f}\n"
        )
        first = [f"{backend}, {given.threads[0]}" for backend in given.backends[:2]]
        print(table(columns, first if len(first) == 2 else ()))
    if given.only != "kernels":
        columns = {
            f"{backend}, {clock}": exchange_times(given.ranks, backend, given.steps, clock)
            for backend in given.backends
            for clock in given.clocks
        }
        print(
            f"\nMilliseconds of a step on {given.ranks} ranks, one thread each; load "
            f"{os.getloadavg()[0]:.2f}\n"
        )
        print(table(columns))


if __name__ == "__main__":
    main()
