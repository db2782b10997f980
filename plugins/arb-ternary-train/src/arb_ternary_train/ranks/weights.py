"""Where the packed weights of a run are, as a loop and an evaluation see it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final, Literal, Protocol

import torch
from torch import nn

from arb_ternary.errors import EnvironmentProblem
from arb_ternary.ternary.module import TernaryModule
from arb_ternary_train.ranks.rounds import RoundDelivery
from arb_ternary_train.ranks.world import World

#: The version with which this was tried; FSDP2 of 2.5 crashes on integer parameters.
_LEAST_TORCH: Final = "2.13"


class Weights(Protocol):
    """Methods are collective; gathers of weights need all ranks, also those that have nothing to
    compute just then.
    """

    @property
    def kept_whole(self) -> tuple[str, ...]:
        """Names of the modules whose weights every rank has although they were to be cut."""

    def rounds(self, voters: Sequence[TernaryModule]) -> RoundDelivery | None:
        """Who sends the votes of ``voters`` in every round from now on; None: they are summed to
        the end of a step.
        """

    def end_round(self) -> None:
        """Every rank has trained on a micro-batch, or has none, or one whose loss is not finite and
        had no backward.
        """

    def end_evaluation_round(self) -> None:
        """Every rank has evaluated a batch, or has none."""

    def apart(self) -> AbstractContextManager[None]:
        """Within a block this rank acts alone; ConfigError where that needs rows of others. Not
        collective.
        """

    def make_whole(self) -> None:
        """There will be no further step: every rank gets all weights, and needs no other one for
        them any more.
        """


class WholeWeights:
    """Every rank has all of them, always."""

    kept_whole = ()

    def rounds(self, voters: Sequence[TernaryModule]) -> None:
        """Votes of several micro-batches are less to send together."""

    def end_round(self) -> None:
        """Nothing was gathered."""

    def end_evaluation_round(self) -> None:
        """Nothing was gathered."""

    def apart(self) -> AbstractContextManager[None]:
        """Nothing is missing."""
        return nullcontext()

    def make_whole(self) -> None:
        """They are."""


def check_torch() -> None:
    """EnvironmentProblem where torch is too old to cut packed weights."""
    if torch.__version__ < _LEAST_TORCH:
        raise EnvironmentProblem(
            f"ranks.weights: sharded weights need torch {_LEAST_TORCH} or newer, and this is "
            f"{torch.__version__}",
            f"pip install 'torch>={_LEAST_TORCH}', or set ranks.weights to replicated",
        )


def place_weights(model: nn.Module, how: Literal["replicated", "sharded"], world: World) -> Weights:
    """Put the packed weights of ``model`` where the option ``ranks.weights`` says. Collective.

    Raises:
        EnvironmentProblem: torch is too old for it.
    """
    if how == "replicated" or world.size == 1:
        return WholeWeights()
    # FSDP takes a second or two to import.
    from arb_ternary_train.ranks.sharded_weights import ShardedWeights

    return ShardedWeights(model, world)
