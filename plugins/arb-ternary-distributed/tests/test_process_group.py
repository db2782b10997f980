"""What ranks tell each other."""

from __future__ import annotations

from typing import Any

import pytest

from arb_ternary.errors import ArbError, ConfigError, UsageProblem
from arb_ternary.ternary.linear import TernaryLinear
from arb_ternary_distributed.exchange import shard_rows
from arb_ternary_distributed.process_group import ProcessGroup
from arb_ternary_testing.ranks import on_ranks


def talk(world: ProcessGroup) -> dict[str, Any]:
    """Everything that ranks can tell each other, as seen by one of them."""
    told: dict[str, Any] = {"rank": world.rank, "size": world.size, "is_main": world.is_main}
    told["shared"] = world.broadcast({"from": world.rank})
    told["gathered"] = world.gather(("value", world.rank))
    world.check_agreement("size", world.size)
    told["no_stop"] = world.stop_reason("")
    told["stop"] = world.stop_reason("SIGTERM" if world.rank == 1 else "")
    told["made"] = world.run_on_main(lambda: f"made on {world.rank}")
    world.barrier("here")

    def fail() -> None:
        raise UsageProblem("it is wrong", "Make it right.")

    try:
        world.run_on_main(fail)
    except ArbError as error:
        told["error"] = (error.what, error.hint, error.exit_code)
    linear = TernaryLinear(4, 4)
    shard_rows(linear, world)
    if world.rank == 0:
        with world.main_process_only():
            try:
                # an observer of rank 0 would wait for the others, who do something else
                linear.state_dict()
            except ConfigError as error:
                told["apart"] = error.what
    told["together"] = list(linear.state_dict()["votes"].shape)
    try:
        world.check_agreement("torch", "2.13" if world.rank == 1 else "2.12")
    except ArbError as error:
        told["disagreement"] = (error.what, error.hint.splitlines()[:2])
    return told


@pytest.mark.parametrize("size", [3])
def test_what_ranks_tell_each_other_is_the_same_on_all(size: int) -> None:
    for rank, told in enumerate(on_ranks(size, talk)):
        assert told == {
            "rank": rank,
            "size": size,
            "is_main": rank == 0,
            "shared": {"from": 0},
            "gathered": [("value", other) for other in range(size)],
            "no_stop": "",
            "stop": "SIGTERM",
            "made": "made on 0",
            "error": ("it is wrong", "Make it right.", 2),
            "together": [4, 4],
            "disagreement": ("torch: the ranks do not agree", ["rank 0, 2: 2.12", "rank 1: 2.13"]),
            **(
                {}
                if rank
                else {
                    "apart": "rank 0 alone asks for accumulators or moments, of which each rank "
                    "has only some"
                }
            ),
        }
