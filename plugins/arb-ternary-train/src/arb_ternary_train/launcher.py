"""Environment variables of launchers of several processes (torchrun, SLURM's srun).

Imports nothing heavy.
"""

from __future__ import annotations

from typing import Final

from attrs import frozen

from arb_ternary.environment import Variable, given
from arb_ternary.errors import UsageProblem

_RANK: Final = Variable("RANK", "", "set by torchrun: number of this process among all, from 0")
_WORLD_SIZE: Final = Variable(
    "WORLD_SIZE", "", "set by torchrun: number of processes that train together"
)
_LOCAL_RANK: Final = Variable(
    "LOCAL_RANK",
    "0",
    "set by torchrun: number of this process on its machine; with `device: cuda` its GPU",
)
_ADDRESS: Final = Variable(
    "MASTER_ADDR", "", "set by torchrun: machine where the processes meet; export it with srun"
)
_PORT: Final = Variable("MASTER_PORT", "29500", "set by torchrun: port on that machine")
_RESTARTS: Final = Variable(
    "TORCHELASTIC_RESTART_COUNT",
    "0",
    "set by torchrun: how often it has restarted the processes; above 0, `arb train` resumes by "
    "itself",
)
_AGENT_STORE: Final = Variable(
    "TORCHELASTIC_USE_AGENT_STORE",
    "0",
    "set by torchrun: whether torchrun, and not rank 0, hosts the store where the processes meet",
)
_SLURM_RANK: Final = Variable(
    "SLURM_PROCID", "", "set by srun: used in place of RANK if MASTER_ADDR is set"
)
_SLURM_SIZE: Final = Variable("SLURM_NTASKS", "", "set by srun: used in place of WORLD_SIZE")
_SLURM_LOCAL: Final = Variable("SLURM_LOCALID", "0", "set by srun: used in place of LOCAL_RANK")
RANK_TIMEOUT: Final = Variable(
    "ARB_TERNARY_RANK_TIMEOUT",
    "600",
    "seconds that a process waits in a step for one that trains with it before it names that one "
    "and ends; 0 = a day",
)
VARIABLES: Final = (
    _RANK,
    _WORLD_SIZE,
    _LOCAL_RANK,
    _ADDRESS,
    _PORT,
    _RESTARTS,
    _AGENT_STORE,
    _SLURM_RANK,
    _SLURM_SIZE,
    _SLURM_LOCAL,
    RANK_TIMEOUT,
)


@frozen
class LaunchedProcess:
    """A process that a launcher has started.

    Attributes:
        rank: number of this process among all, from 0.
        size: number of processes.
        local_rank: number of this process on its machine.
        address: machine where the processes meet.
        port: port there.
        restarts: how often the launcher has restarted the processes.
        hosted_by_launcher: whether the store where they meet outlives rank 0.
    """

    rank: int
    size: int
    local_rank: int
    address: str
    port: int
    restarts: int
    hosted_by_launcher: bool


def launched_process() -> LaunchedProcess | None:
    """Return what a launcher says of this process, or None if no launcher has started it.

    Raises:
        UsageProblem: the variables contradict each other, or some are missing.
    """
    if given([_RANK, _WORLD_SIZE]):
        rank = _RANK
        size = _WORLD_SIZE
        local = _LOCAL_RANK
    elif given([_ADDRESS]) and given([_SLURM_RANK]):
        rank = _SLURM_RANK
        size = _SLURM_SIZE
        local = _SLURM_LOCAL
    else:
        return None
    for missing, present in ((rank, size), (size, rank)):
        if not missing.read().strip():
            raise UsageProblem(
                f"{missing.name}: it is not set, and {present.name} is",
                "Start with torchrun, which sets both, or unset both to train in one process.",
            )
    number = rank.integer()
    count = size.integer()
    if number >= max(count, 1):
        raise UsageProblem(
            f"{rank.name}: {number}, of {count} processes in {size.name}, which count from 0"
        )
    if count > 1 and not _ADDRESS.read().strip():
        raise UsageProblem(
            f"{_ADDRESS.name}: it is not set, and {count} processes have to meet somewhere",
            "Start with torchrun, or export the name of the first machine.",
        )
    return LaunchedProcess(
        rank=number,
        size=count,
        local_rank=local.integer(),
        address=_ADDRESS.read().strip(),
        port=_PORT.integer(largest=65535),
        restarts=_RESTARTS.integer(),
        hosted_by_launcher=_AGENT_STORE.flag(),
    )


def require_single_process(command: str) -> None:
    """Check that ``command``, which works in one process, was not started in several.

    Raises:
        UsageProblem: it was.
    """
    process = launched_process()
    if process is not None and process.size > 1:
        raise UsageProblem(
            f"{command}: {process.size} processes were started together, and it works in one",
            "Start it without torchrun.",
        )
