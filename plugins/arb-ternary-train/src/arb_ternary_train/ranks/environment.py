"""What launchers of several processes leave in the environment: torchrun, or srun of SLURM. Imports
nothing heavy.
"""

from __future__ import annotations

from typing import Final

from attrs import frozen

from arb_ternary.environment import Variable, given
from arb_ternary.errors import UsageProblem

_RANK: Final = Variable("RANK", "", "torchrun's own: the number of this process among all, from 0")
_WORLD_SIZE: Final = Variable("WORLD_SIZE", "", "torchrun's own: how many processes train together")
_LOCAL_RANK: Final = Variable(
    "LOCAL_RANK",
    "0",
    "torchrun's own: the number of this process on its machine; with `device: cuda` its GPU",
)
_ADDRESS: Final = Variable(
    "MASTER_ADDR", "", "torchrun's own: where the processes meet; to be exported with srun"
)
_PORT: Final = Variable("MASTER_PORT", "29500", "torchrun's own: the port there")
_RESTARTS: Final = Variable(
    "TORCHELASTIC_RESTART_COUNT",
    "0",
    "torchrun's own: how often it has started the processes anew; above 0, `arb train` resumes by "
    "itself",
)
_AGENT_STORE: Final = Variable(
    "TORCHELASTIC_USE_AGENT_STORE",
    "0",
    "torchrun's own: whether the place to meet is not in the process of rank 0",
)
_SLURM_RANK: Final = Variable(
    "SLURM_PROCID", "", "srun's own: stands for RANK, where MASTER_ADDR is set"
)
_SLURM_SIZE: Final = Variable("SLURM_NTASKS", "", "srun's own: stands for WORLD_SIZE")
_SLURM_LOCAL: Final = Variable("SLURM_LOCALID", "0", "srun's own: stands for LOCAL_RANK")
RANK_TIMEOUT: Final = Variable(
    "ARB_TERNARY_RANK_TIMEOUT",
    "300",
    "seconds without a sign of life of a process that trains with others, after which those name "
    "it and end; 0 = never",
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
class Place:
    """The place of this process among several.

    Attributes:
        rank: its number, from 0.
        size: how many there are.
        local_rank: its number on its machine.
        address: the machine where they meet.
        port: the port there.
        restarts: how often the launcher has started them anew.
        hosted_by_launcher: whether the place to meet outlives rank 0.
    """

    rank: int
    size: int
    local_rank: int
    address: str
    port: int
    restarts: int
    hosted_by_launcher: bool


def place_in_environment(*, least: int = 2) -> Place | None:
    """The place that the launcher gave this process; None where it has started fewer than
    ``least``, or there is none.

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
    absent = [variable.name for variable in (rank, size) if not variable.read().strip()]
    if absent:
        raise UsageProblem(
            f"{absent[0]}: it is not set, and {(size if absent[0] == rank.name else rank).name} is",
            "Start with torchrun, which sets both, or unset both to train in one process.",
        )
    number = rank.integer()
    count = size.integer()
    if number >= max(count, 1):
        raise UsageProblem(
            f"{rank.name}: {number}, of {count} processes in {size.name}, which count from 0"
        )
    if count < least:
        return None
    if count > 1 and not _ADDRESS.read().strip():
        raise UsageProblem(
            f"{_ADDRESS.name}: it is not set, and {count} processes have to meet somewhere",
            "Start with torchrun, or export the name of the first machine.",
        )
    return Place(
        rank=number,
        size=count,
        local_rank=local.integer(),
        address=_ADDRESS.read().strip(),
        port=_PORT.integer(),
        restarts=_RESTARTS.integer(),
        hosted_by_launcher=_AGENT_STORE.flag(),
    )


def refuse_several(command: str) -> None:
    """Refuse to run ``command`` in one of several processes.

    Raises:
        UsageProblem: this is one.
    """
    if (place := place_in_environment()) is not None:
        raise UsageProblem(
            f"{command}: {place.size} processes were started together, and it works in one",
            "Start it without torchrun; `arb train` trains a config of it on several.",
        )
