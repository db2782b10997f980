"""Communication between ranks, and phases that rank 0 runs alone."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from arb_ternary.errors import ArbError, ConfigError, Interrupted, UsageProblem
from arb_ternary.protocols.runs import PhaseResult
from arb_ternary.ternary.linear import TernaryLinear
from arb_ternary_distributed.checks import has_microbatches
from arb_ternary_distributed.process_group import ProcessGroup
from arb_ternary_distributed.shards import shard_rows
from arb_test_support.ranks import on_ranks

SIZE = 3


def communicated(world: ProcessGroup) -> dict[str, Any]:
    """Return the results of all communication, as one rank sees them."""
    found: dict[str, Any] = {"rank": world.rank, "size": world.size, "is_main": world.is_main}
    found["broadcast"] = world.broadcast({"from": world.rank})
    found["gathered"] = world.gather(("value", world.rank))
    world.check_agreement("size", world.size)
    found["no_stop"] = world.stop_reason("")
    found["stop"] = world.stop_reason("SIGTERM" if world.rank == 1 else "")
    found["made"] = world.run_on_main(lambda: f"made on {world.rank}")
    world.barrier()

    def fail() -> None:
        raise UsageProblem("it is wrong", "Make it right.")

    try:
        world.run_on_main(fail)
    except ArbError as error:
        found["error"] = (error.what, error.hint, error.exit_code)
    try:
        world.check_agreement("torch", "2.13" if world.rank == 1 else "2.12")
    except ArbError as error:
        found["disagreement"] = (error.what, error.hint.splitlines()[:2])
    return found


def test_all_ranks_receive_the_same() -> None:
    for rank, found in enumerate(on_ranks(SIZE, communicated)):
        assert found == {
            "rank": rank,
            "size": SIZE,
            "is_main": rank == 0,
            "broadcast": {"from": 0},
            "gathered": [("value", other) for other in range(SIZE)],
            "no_stop": "",
            "stop": "SIGTERM",
            "made": "made on 0",
            "error": ("it is wrong", "Make it right.", 2),
            "disagreement": ("torch: the ranks do not agree", ["rank 0, 2: 2.12", "rank 1: 2.13"]),
        }


def alone(world: ProcessGroup) -> tuple[str, list[int]]:
    """Read sharded accumulators on rank 0 alone, and then on all ranks."""
    linear = TernaryLinear(4, 4)
    shard_rows(linear, world)
    refused = ""
    if world.is_main:
        with world.main_process_only():
            try:
                # An observer of rank 0 would wait for the other ranks, which do something else.
                linear.state_dict()
            except ConfigError as error:
                refused = error.what
    return refused, list(linear.state_dict()["votes"].shape)


def test_rank_0_alone_cannot_read_sharded_accumulators() -> None:
    refusal = "rank 0 alone asks for accumulators or moments, and each rank has only some of them"
    assert on_ranks(2, alone) == [(refusal, [4, 4]), ("", [4, 4])]


class Rewrites:
    """A phase that changes the model and the counts of the run."""

    def __init__(self) -> None:
        self.has_run = False

    def run(self, context: Any) -> PhaseResult:
        self.has_run = True
        context.model[0].set_trits(torch.ones(32, 32, dtype=torch.int8))
        context.model[1].weight.data.fill_(7.0)
        context.step = 3
        context.tokens = 96
        context.evaluation_shape = (4, 8)
        return PhaseResult(steps=0, metrics={"loss": 1.5})


class Stops:
    """A phase that is interrupted."""

    def run(self, context: Any) -> PhaseResult:
        raise Interrupted("stopped by SIGTERM")


def rewritten(world: ProcessGroup) -> dict[str, Any]:
    torch.manual_seed(world.rank)
    context: Any = SimpleNamespace(
        model=nn.Sequential(TernaryLinear(32, 32), nn.Linear(2, 2)),
        step=0,
        tokens=0,
        evaluation_shape=None,
        was_alone=False,
    )

    @contextmanager
    def main_process_only() -> Any:
        context.was_alone = True
        yield

    context.main_process_only = main_process_only
    phase = Rewrites()
    result = world.run_phase_on_main(phase, context)  # type: ignore[arg-type]
    found = {
        "has_run": phase.has_run,
        "was_alone": context.was_alone,
        "metrics": dict(result.metrics),
        "ones": bool((context.model[0].trits() == 1).all()),
        "sevens": bool((context.model[1].weight == 7).all()),
        "counts": (context.step, context.tokens, context.evaluation_shape),
    }
    try:
        world.run_phase_on_main(Stops(), context)  # type: ignore[arg-type]
    except Interrupted as error:
        found["stopped"] = error.what
    return found


def test_all_ranks_have_the_model_of_a_phase_on_rank_0() -> None:
    for rank, found in enumerate(on_ranks(2, rewritten)):
        assert found == {
            "has_run": rank == 0,
            "was_alone": rank == 0,
            "metrics": {"loss": 1.5},
            "ones": True,
            "sevens": True,
            "counts": (3, 96, (4, 8)),
            "stopped": "stopped by SIGTERM",
        }


def test_phases_with_microbatches_run_on_every_rank() -> None:
    assert has_microbatches(SimpleNamespace(gradient_accumulation_steps=4))
    assert not has_microbatches(SimpleNamespace())
