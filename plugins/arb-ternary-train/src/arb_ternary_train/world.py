"""The processes that train one model together, as one of them sees the others.

A run in one process has the world :class:`SingleProcess`, whose methods do nothing, so that the
rest of the package does not ask how many processes there are. Several processes are the plugin
``arb-ternary-distributed``: :func:`init_world` is the only place where this package asks for it.

Methods that communicate are *collective*: every process calls them in the same order. What only
rank 0 does (metrics, observers, checks) therefore calls none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from attrs import field, frozen
from torch import nn
from torch.optim import Optimizer

from arb_ternary.errors import EnvironmentProblem
from arb_ternary.plugins.discovery import install_command
from arb_ternary.protocols.runs import Phase, PhaseResult
from arb_ternary_train.launcher import launched_process
from arb_ternary_train.microbatches import MicrobatchSchedule, SequentialSchedule
from arb_ternary_train.model_state import ModelState
from arb_ternary_train.precision import resolve_device

if TYPE_CHECKING:
    from arb_ternary_train.build import RunParts
    from arb_ternary_train.checkpoint import Pieces
    from arb_ternary_train.config import RanksConfig, RunConfig
    from arb_ternary_train.context import TrainingContext
    from arb_ternary_train.safetensors_file import TensorParts

#: Where the plugin for several processes has its ``init_distributed``.
_PLUGIN: Final = "arb_ternary_distributed"
_LAUNCH_MODULE: Final = f"{_PLUGIN}.launch"


class World(Protocol):
    """The processes of a run.

    Values that are communicated are plain: None, booleans, numbers, strings, bytes, and tuples,
    lists and dicts of them.

    Attributes:
        rank: number of this process, from 0.
        size: number of processes.
        device: where this process computes.
        is_main: whether this is rank 0, which owns the run's directory, its metrics and the screen.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def is_main(self) -> bool: ...

    # --- communication

    def broadcast(self, value: Any) -> Any:
        """Return the value of rank 0. Collective."""
        ...

    def run_on_main(self, make: Callable[[], Any]) -> Any:
        """Call ``make`` on rank 0 and return its result on every rank. Collective.

        Raises:
            ArbError: ``make`` raised it, on every rank.
        """
        ...

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank. Collective."""
        ...

    def barrier(self) -> None:
        """Wait for all ranks. Collective."""
        ...

    def stop_reason(self, own: str) -> str:
        """Return the first non-empty reason to stop of any rank, or "". Collective."""
        ...

    def main_process_only(self) -> AbstractContextManager[None]:
        """Return a context in which this process acts alone.

        Reading what other ranks hold raises ConfigError in it.
        """
        ...

    # --- checks before a run

    def check_config(self, config: RunConfig) -> None:
        """Check that these processes can train ``config``.

        Raises:
            ConfigError: they cannot; it names every option.
        """
        ...

    def check_parts(self, config: RunConfig, parts: RunParts) -> None:
        """Check that all ranks have the same run, and can train its model. Collective.

        Raises:
            ArbError: ranks differ, or the model or its optimizer needs one process.
        """
        ...

    # --- training

    def microbatch_schedule(
        self, count: int, options: RanksConfig, *, compiled: bool = False
    ) -> MicrobatchSchedule:
        """Return a schedule of the ``count`` micro-batches of a step.

        Args:
            count: micro-batches per step, of all ranks together.
            options: what the ranks share.
            compiled: whether the model is compiled.

        Raises:
            ConfigError: there are more ranks than micro-batches.
        """
        ...

    def runs_on_every_rank(self, options: Any) -> bool:
        """Return whether all ranks run a phase of these ``options`` together."""
        ...

    def run_phase_on_main(self, phase: Phase, context: TrainingContext) -> PhaseResult:
        """Run ``phase`` on rank 0 and give every rank the model that it leaves. Collective."""
        ...

    def save_model(
        self,
        model: nn.Module,
        options: RanksConfig,
        write: Callable[[TensorParts | Pieces], str],
    ) -> str:
        """Write a checkpoint by ``write`` on rank 0, to which all ranks contribute. Collective.

        Args:
            model: whose state is written.
            options: whether rank 0 writes the whole model or each rank a piece.
            write: writes a checkpoint of what it is given and returns its folder.

        Returns:
            The folder, on every rank.
        """
        ...

    def gather_full(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Replicate on every rank whatever is sharded, after the last step. Collective."""
        ...


@frozen
class SingleProcess:
    """The world of one process."""

    device: torch.device = field(factory=lambda: torch.device("cpu"))
    rank: int = 0
    size: int = 1
    is_main: bool = True

    def broadcast(self, value: Any) -> Any:
        return value

    def run_on_main(self, make: Callable[[], Any]) -> Any:
        return make()

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def barrier(self) -> None:
        """No-op: there is no other process."""

    def stop_reason(self, own: str) -> str:
        return own

    def main_process_only(self) -> AbstractContextManager[None]:
        return nullcontext()

    def check_config(self, config: RunConfig) -> None:
        """No-op: one process can train every config."""

    def check_parts(self, config: RunConfig, parts: RunParts) -> None:
        """No-op: one process can train every model."""

    def microbatch_schedule(
        self, count: int, options: RanksConfig, *, compiled: bool = False
    ) -> MicrobatchSchedule:
        return SequentialSchedule(count)

    def runs_on_every_rank(self, options: Any) -> bool:
        return True

    def run_phase_on_main(self, phase: Phase, context: TrainingContext) -> PhaseResult:
        return phase.run(context)

    def save_model(
        self,
        model: nn.Module,
        options: RanksConfig,
        write: Callable[[TensorParts | Pieces], str],
    ) -> str:
        return write(ModelState(model))

    def gather_full(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """No-op: nothing is sharded."""


@contextmanager
def init_world(device: str) -> Iterator[World]:
    """Yield the world in which the launcher of this process has put it.

    The plugin ``arb-ternary-distributed`` is loaded only if a launcher has started several
    processes, so that installing it changes no run of one process.

    Args:
        device: the config's; with several processes ``cuda`` is the GPU of the local rank.

    Raises:
        UsageProblem: the launcher's variables contradict each other.
        ConfigError: several processes would share a device that cannot be shared.
        EnvironmentProblem: the plugin is not installed, or not all processes have arrived in time.
    """
    process = launched_process()
    if process is None or process.size == 1:
        yield SingleProcess(resolve_device(device))
        return
    if find_spec(_PLUGIN) is None:
        raise EnvironmentProblem(
            f"{process.size} processes were started together, and the plugin that trains with "
            f"several is not installed",
            install_command("arb-ternary-distributed"),
        )
    with import_module(_LAUNCH_MODULE).init_distributed(device, process) as world:
        yield world
