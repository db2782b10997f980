"""A phase without a training loop runs on rank 0, and all ranks go on with the model that it
leaves.
"""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from arb_ternary.errors import Interrupted
from arb_ternary.protocols.runs import PhaseResult
from arb_ternary.ternary.linear import TernaryLinear
from arb_ternary_distributed.checks import has_microbatches
from arb_ternary_distributed.phases import run_phase_on_main
from arb_ternary_testing.ranks import on_ranks


class Rewrites:
    def __init__(self) -> None:
        self.ran = False

    def run(self, context: Any) -> PhaseResult:
        self.ran = True
        context.model[0].set_trits(torch.ones(32, 32, dtype=torch.int8))
        context.model[1].weight.data.fill_(7.0)
        context.step = 3
        context.tokens = 96
        context.evaluation_shape = (4, 8)
        return PhaseResult(steps=0, metrics={"loss": 1.5})


class Stops:
    def run(self, context: Any) -> PhaseResult:
        raise Interrupted("stopped by SIGTERM")


def rewritten(world: Any) -> dict[str, Any]:
    torch.manual_seed(world.rank)
    context: Any = SimpleNamespace(
        world=world, model=nn.Sequential(TernaryLinear(32, 32), nn.Linear(2, 2))
    )
    context.step = 0
    context.tokens = 0
    context.evaluation_shape = None
    alone: list[bool] = []

    @contextmanager
    def main_process_only() -> Any:
        alone.append(True)
        yield

    context.main_process_only = main_process_only
    phase = Rewrites()
    result = run_phase_on_main(world, phase, context)
    trits = context.model[0].trits()
    told: dict[str, Any] = {"ran": phase.ran, "alone": bool(alone), "metrics": dict(result.metrics)}
    told["ones"] = bool((trits == 1).all())
    told["sevens"] = bool((context.model[1].weight == 7).all())
    told["counted"] = (context.step, context.tokens, context.evaluation_shape)
    try:
        run_phase_on_main(world, Stops(), context)
    except Interrupted as error:
        told["stopped"] = error.what
    return told


def test_rank_0_runs_it_and_all_have_its_model_and_counts() -> None:
    for rank, told in enumerate(on_ranks(2, rewritten)):
        expected = {
            "metrics": {"loss": 1.5},
            "ones": True,
            "sevens": True,
            "stopped": "stopped by SIGTERM",
        }
        expected["counted"] = (3, 96, (4, 8))
        assert told == {"ran": rank == 0, "alone": rank == 0, **expected}


def test_only_phases_with_microbatches_run_on_every_rank() -> None:
    assert has_microbatches(SimpleNamespace(gradient_accumulation_steps=4))
    assert not has_microbatches(SimpleNamespace())
