"""What ranks tell each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from arb_ternary.errors import ArbError, ConfigError, UsageProblem
from arb_ternary.ternary.linear import TernaryLinear
from arb_ternary_testing.ranks import on_ranks
from arb_ternary_train.ranks.exchange import own_rows
from arb_ternary_train.ranks.world import Alone, Ranks, World


def talk(world: World) -> dict[str, Any]:
    """Everything that ranks can tell each other, as seen by one of them."""
    assert isinstance(world, World)
    told: dict[str, Any] = {"rank": world.rank, "size": world.size, "is_main": world.is_main}
    told["shared"] = world.share({"from": world.rank})
    told["gathered"] = world.gather(("value", world.rank))
    world.agree("size", world.size)
    told["no_stop"] = world.stop_reason("")
    told["stop"] = world.stop_reason("SIGTERM" if world.rank == 1 else "")
    told["made"] = world.from_main(lambda: f"made on {world.rank}")
    world.barrier("here")

    def fail() -> None:
        raise UsageProblem("it is wrong", "Make it right.")

    try:
        world.from_main(fail)
    except ArbError as error:
        told["error"] = (error.what, error.hint, error.exit_code)
    linear = TernaryLinear(4, 4)
    own_rows(linear, world)
    if world.rank == 0:
        with world.apart():
            try:
                # an observer of rank 0 would wait for the others, who do something else
                linear.state_dict()
            except ConfigError as error:
                told["apart"] = error.what
    told["together"] = list(linear.state_dict()["votes"].shape)
    try:
        world.agree("torch", "2.13" if world.rank == 1 else "2.12")
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


def remember(world: World) -> list[str]:
    """What two attempts at two runs, which only ranks of a launcher can tell apart, find kept."""
    store = dist.HashStore()
    found = []
    for attempt in range(2):
        ranks = Ranks(world.device, restarts=attempt, store=store)
        for run in ("first", "second"):
            found.append(ranks.kept())
            ranks.keep(f"{run} of attempt {attempt}")
    return found


def test_each_run_finds_what_the_same_run_of_an_earlier_attempt_has_kept() -> None:
    assert on_ranks(1, remember) == [["", "", "first of attempt 0", "second of attempt 0"]]


def test_a_process_without_a_store_does_not_know_what_was_kept() -> None:
    assert Alone().kept() is None


def test_one_process_agrees_with_itself() -> None:
    world = Alone()
    assert isinstance(world, World)
    assert (world.rank, world.size, world.is_main, world.group) == (0, 1, True, None)
    assert world.share("a") == world.from_main(lambda: "a") == world.stop_reason("a") == "a"
    assert world.gather("a") == ["a"]
    world.agree("anything", 1)
    world.barrier("anywhere")
    world.close()
