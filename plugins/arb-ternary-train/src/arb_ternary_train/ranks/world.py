"""The processes that train one model together, as one of them sees the others.

A run in one process has the world :class:`Alone`, whose methods do nothing, so that nobody asks how many there are.
Methods that talk to the others are *collective*: every rank calls them, in the same order, or all wait. What only rank
0 does (metrics, observers, checks) therefore never calls one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from attrs import field, frozen

from arb_ternary.errors import ArbError

__all__ = ["Alone", "Ranks", "World"]


@runtime_checkable
class World(Protocol):
    """The ranks of a run. Values are plain: None, booleans, numbers, strings, bytes, tuples, lists and dicts of them.

    Attributes:
        rank: the number of this process, from 0.
        size: how many there are.
        device: where this process computes.
        group: what collectives of ``torch.distributed`` take; None in one process.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def group(self) -> dist.ProcessGroup | None: ...

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which owns the run's directory, its metrics and the screen."""
        ...

    def share(self, value: Any) -> Any:
        """The value of rank 0. Collective."""
        ...

    def from_main(self, make: Callable[[], Any]) -> Any:
        """What ``make()`` returns on rank 0, which alone calls it. Collective.

        Raises:
            ArbError: ``make`` raised one, on every rank.
        """
        ...

    def gather(self, value: Any) -> list[Any]:
        """The values of all, by rank. Collective."""
        ...

    def agree(self, what: str, value: Any) -> None:
        """Have all ranks the same value? Collective.

        Raises:
            ArbError: no, and which rank has which; ``what`` names it.
        """
        ...

    def stop_reason(self, own: str) -> str:
        """The first of the ranks' reasons to stop that is not empty, or an empty one. Collective."""
        ...

    def barrier(self, what: str) -> None:
        """Wait until all ranks are here; ``what`` says where, for one who reads an error. Collective."""
        ...

    def close(self) -> None:
        """Leave the others. They need not be there any more."""
        ...


@frozen
class Alone:
    """One process: it agrees with itself."""

    device: torch.device = field(factory=lambda: torch.device("cpu"))
    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    is_main: bool = True

    def share(self, value: Any) -> Any:
        return value

    def from_main(self, make: Callable[[], Any]) -> Any:
        return make()

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def agree(self, what: str, value: Any) -> None:
        """There is nobody to disagree."""

    def stop_reason(self, own: str) -> str:
        return own

    def barrier(self, what: str) -> None:
        """There is nobody to wait for."""

    def close(self) -> None:
        """There is nobody to leave."""


class Ranks:
    """Several processes, on the default group of ``torch.distributed``, which has been initialised.

    Args:
        device: where this process computes; collectives of plain values go over the host in any case.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._doing = "start"

    @property
    def doing(self) -> str:
        """The last place where this rank has waited for the others."""
        return self._doing

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def size(self) -> int:
        return dist.get_world_size()

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def group(self) -> dist.ProcessGroup | None:
        return dist.group.WORLD

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def share(self, value: Any) -> Any:
        box = [value if self.is_main else None]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def from_main(self, make: Callable[[], Any]) -> Any:
        if not self.is_main:
            value, error = self.share(None)
            if error is not None:
                raise _as_told(*error)
            return value
        try:
            made = make()
        except ArbError as error:
            self.share((None, (error.what, error.hint, error.exit_code)))
            raise
        self.share((made, None))
        return made

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def agree(self, what: str, value: Any) -> None:
        values = self.gather(value)
        if all(other == values[0] for other in values):
            return
        raise ArbError(
            f"{what}: the ranks do not agree",
            "\n".join([*_by_value(values), "Start all of them with the same installation, config and environment."]),
        )

    def stop_reason(self, own: str) -> str:
        wanted = torch.tensor([bool(own)], dtype=torch.int32)
        dist.all_reduce(wanted, op=dist.ReduceOp.MAX)
        if not wanted.item():
            return ""
        return next(str(reason) for reason in self.gather(own) if reason)

    def barrier(self, what: str) -> None:
        self._doing = what
        dist.all_reduce(torch.zeros(1, dtype=torch.int32))

    def close(self) -> None:
        dist.destroy_process_group()


def _as_told(what: str, hint: str, exit_code: int) -> ArbError:
    """An error that another rank has raised."""
    error = ArbError(what, hint)
    error.exit_code = exit_code
    return error


def _by_value(values: list[Any]) -> list[str]:
    """``rank 0, 2: 'a'`` for each different value."""
    holders: list[tuple[Any, list[int]]] = []
    for rank, value in enumerate(values):
        for known, ranks in holders:
            if known == value:
                ranks.append(rank)
                break
        else:
            holders.append((value, [rank]))
    return [f"rank {', '.join(map(str, ranks))}: {value}" for value, ranks in holders]
