"""The memory of a run across restarts of its processes by torchrun.

torchrun's store outlives an attempt. The runner keeps the directory of the run there, so that a
restarted process continues the run that it had begun, also without ``--run-dir`` and ``--resume``.
"""

from __future__ import annotations

from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Final

from attrs import define

from arb_ternary.errors import EnvironmentProblem
from arb_ternary_train.launcher import LaunchedProcess, launched_process

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

#: How long the launcher's store may take to answer.
_TIMEOUT: Final = timedelta(minutes=5)


@define(eq=False)
class RestartMemory:
    """Directories of the runs of this process, by their number in the process.

    A restarted process begins the same runs in the same order, so that the numbers match.

    Attributes:
        restarts: how often the launcher has restarted the process.
    """

    _store: Store | None = None
    restarts: int = 0
    _runs: int = 0

    def begin_run(self) -> str | None:
        """Count a run; return the directory that an earlier attempt at it had stored.

        Returns:
            The directory, "" if the run had not begun, or None if nothing outlives an attempt.
        """
        self._runs += 1
        if self._store is None:
            return None
        key = str(self._runs)
        if not self._store.check([key]):
            return ""
        return str(self._store.get(key).decode())

    def store_directory(self, path: str) -> None:
        """Store the directory of the run that was begun last."""
        if self._store is not None:
            self._store.set(str(self._runs), path)


@cache
def restart_memory() -> RestartMemory:
    """Return the memory of this process, which is empty without a launcher."""
    process = launched_process()
    if process is None:
        return RestartMemory()
    store = _launcher_store(process) if process.hosted_by_launcher else None
    return RestartMemory(store, process.restarts)


def _launcher_store(process: LaunchedProcess) -> Store:
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    try:
        store = TCPStore(process.address, process.port, timeout=_TIMEOUT, wait_for_workers=False)
    except RuntimeError as error:
        raise EnvironmentProblem(
            f"rank {process.rank}: no connection to the launcher's store at {process.address}:"
            f"{process.port}: {error}",
            "MASTER_ADDR and MASTER_PORT are set by torchrun; do not change them.",
        ) from error
    return PrefixStore("arb_runs", store)
