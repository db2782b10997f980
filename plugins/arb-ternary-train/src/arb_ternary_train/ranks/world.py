"""The processes that train one model together, as one of them sees the others.

A run in one process has the world :class:`Alone`, whose methods do nothing, so that nobody asks how
many there are. Methods that talk to the others are *collective*: every rank calls them, in the same
order, or all wait. What only rank 0 does (metrics, observers, checks) therefore never calls one.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from attrs import field, frozen

from arb_ternary.errors import ArbError, ConfigError, Interrupted

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from arb_ternary_train.ranks.watch import Member, Watch

#: Seconds that a rank which has lost another waits for the reason.
_FAREWELL: Final = 3.0
#: In errors of gloo and nccl whose other end has gone.
_LOST: Final = ("gloo/transport", "Connection closed by peer", "Connection reset by peer", "NCCL")


@runtime_checkable
class World(Protocol):
    """The ranks of a run. Values are plain: None, booleans, numbers, strings, bytes, tuples, lists
    and dicts of them.

    Attributes:
        rank: the number of this process, from 0.
        size: how many there are.
        device: where this process computes.
        group: what collectives of ``torch.distributed`` take; None in one process.
        restarts: how often the launcher has started the processes anew.
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
    def restarts(self) -> int: ...

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
        """The first of the ranks' reasons to stop that is not empty, or an empty one.
        Collective.
        """
        ...

    def barrier(self, what: str) -> None:
        """Wait until all ranks are here; ``what`` says where, for one who reads an error.
        Collective.
        """
        ...

    def kept(self) -> str | None:
        """A run begins: what it has kept in an earlier attempt, before the launcher started the
        processes anew.

        Empty where it had not begun; None where nothing outlives an attempt, so that nobody knows.
        The first run that a process begins is the first one of the earlier attempt, and so on.
        """
        ...

    def keep(self, text: str) -> None:
        """Keep ``text`` for a later attempt at the run that has begun last."""
        ...

    def apart(self) -> AbstractContextManager[None]:
        """Within a block this rank acts alone: ConfigError where that takes collectives of
        ``group``.
        """
        ...

    def close(self) -> None:
        """Leave, once all ranks have come to their end. Collective."""
        ...


class Kept:
    """What runs keep in ``store``, which outlives an attempt; None = nothing does."""

    def __init__(self, store: Store | None = None) -> None:
        self._store = store
        self._runs = 0

    def begin(self) -> str | None:
        """See ``World.kept``."""
        self._runs += 1
        if self._store is None:
            return None
        return (
            str(self._store.get(key).decode())
            if self._store.check([key := str(self._runs)])
            else ""
        )

    def keep(self, text: str) -> None:
        """See ``World.keep``."""
        if self._store is not None:
            self._store.set(str(self._runs), text)


@frozen
class Alone:
    """One process: it agrees with itself. A launcher may start it anew too, or have left it over of
    several.
    """

    device: torch.device = field(factory=lambda: torch.device("cpu"))
    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    restarts: int = 0
    is_main: bool = True
    _keeper: Kept = field(factory=Kept, eq=False)

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

    def keep(self, text: str) -> None:
        self._keeper.keep(text)

    def kept(self) -> str | None:
        return self._keeper.begin()

    def apart(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        """There is nobody to leave."""


class Ranks:
    """Several processes, on the default group of ``torch.distributed``, which has been initialised.

    Args:
        device: where this process computes; collectives of plain values go over the host in any
            case.
        members: all of them, by rank.
        restarts: how often the launcher has started them anew.
        store: what outlives an attempt; None = nothing does.
        farewells: where a rank says why it leaves; None = nowhere.
        watch: gives this rank's signs of life until it leaves.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        members: Sequence[Member] = (),
        restarts: int = 0,
        store: Store | None = None,
        farewells: Store | None = None,
        watch: Watch | None = None,
    ) -> None:
        self._device = device
        self._members = members
        self._restarts = restarts
        self._rank = dist.get_rank()
        self._size = dist.get_world_size()
        self._keeper = Kept(store)
        self._farewells = farewells
        self._watch = watch
        self._waiting = "start"
        self._apart = False

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def group(self) -> dist.ProcessGroup | None:
        if self._apart:
            raise ConfigError(
                f"rank {self.rank} alone asks for accumulators or moments, of which each rank has "
                f"only some",
                "An observer or a hook does this between steps, by logical_votes(), state_dict() "
                "or save_checkpoint(): "
                "leave it out, or read the rows of its rank only: held_votes().",
            )
        return dist.group.WORLD

    @property
    def restarts(self) -> int:
        return self._restarts

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
            "\n".join(
                [
                    *_by_value(values),
                    "Start all of them with the same installation, config and environment.",
                ]
            ),
        )

    def stop_reason(self, own: str) -> str:
        wanted = torch.tensor([bool(own)], dtype=torch.int32)
        dist.all_reduce(wanted, op=dist.ReduceOp.MAX)
        if not wanted.item():
            return ""
        return next(str(reason) for reason in self.gather(own) if reason)

    def barrier(self, what: str) -> None:
        self._waiting = what
        dist.all_reduce(torch.zeros(1, dtype=torch.int32))

    def kept(self) -> str | None:
        return self._keeper.begin()

    def keep(self, text: str) -> None:
        self._keeper.keep(text)

    @contextmanager
    def apart(self) -> Iterator[None]:
        before = self._apart
        self._apart = True
        try:
            yield
        finally:
            self._apart = before

    def close(self) -> None:
        self.barrier("end")
        self._end()

    def leave(self, error: BaseException) -> ArbError | None:
        """Leave because of ``error``; returns what to raise in its place, where another rank is
        behind it.
        """
        if isinstance(error, Interrupted):
            # All have agreed to stop. torchrun asks those again that end last.
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            with suppress(RuntimeError):  # rank 0 may have found something worse meanwhile
                self.barrier("end")
        cause = self._behind(error)
        if cause is None and self._farewells is not None:
            reason = (
                error.what if isinstance(error, ArbError) else f"{type(error).__name__}: {error}"
            )
            with suppress(RuntimeError):  # who hosts it may be the one who is gone
                self._farewells.set(f"left/{self.rank}", reason)
        self._end()
        return cause

    def _behind(self, error: BaseException) -> ArbError | None:
        """Who is behind ``error``, if it only says that the connection to another rank is lost."""
        if not _is_loss(error):
            return None
        again = (
            "Its own message says more. Start again with --resume; torchrun --max-restarts N "
            "does so itself."
        )
        until = time.monotonic() + _FAREWELL
        with suppress(RuntimeError):  # who hosts the farewells may be the one who is gone
            while self._farewells is not None and time.monotonic() < until:
                for member in self._members:
                    if self._farewells.check([key := f"left/{member.rank}"]):
                        reason = self._farewells.get(key).decode()
                        return ArbError(f"rank {self.rank}: {member} has ended: {reason}", again)
                time.sleep(0.1)
        first = str(error).partition("\n")[0]
        return ArbError(
            f"rank {self.rank}: another rank has ended without a word, after all had met at "
            f"{self._waiting!r}: {first}",
            again,
        )

    def _end(self) -> None:
        if self._watch is not None:
            self._watch.close()
        dist.destroy_process_group()


def _is_loss(error: BaseException) -> bool:
    """Whether ``error`` is that of a collective whose other ends are gone."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in _LOST)
    )


def _as_told(what: str, hint: str, exit_code: int) -> ArbError:
    """An error that another rank has raised."""
    error = Interrupted(what, hint) if exit_code == Interrupted.exit_code else ArbError(what, hint)
    error.exit_code = exit_code
    return error


def _by_value(values: list[Any]) -> list[str]:
    """``rank 0, 2: 'a'`` for each different value; of mappings only the keys that differ."""
    if all(isinstance(value, Mapping) for value in values):
        absent = "nothing"
        keys = dict.fromkeys(key for value in values for key in value)
        each = {key: [value.get(key, absent) for value in values] for key in keys}
        return [
            f"{key}: {line}"
            for key, found in each.items()
            if any(value != found[0] for value in found)
            for line in _by_value(found)
        ]
    holders: list[tuple[Any, list[int]]] = []
    for rank, value in enumerate(values):
        for known, ranks in holders:
            if known == value:
                ranks.append(rank)
                break
        else:
            holders.append((value, [rank]))
    return [f"rank {', '.join(map(str, ranks))}: {value}" for value, ranks in holders]
