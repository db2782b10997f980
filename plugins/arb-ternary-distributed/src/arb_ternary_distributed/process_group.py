"""Several processes that train one model together: the ``World`` of a distributed run."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn
from torch.optim import Optimizer

from arb_ternary.errors import ArbError, ConfigError, Interrupted
from arb_ternary.protocols.runs import Phase, PhaseResult
from arb_ternary_distributed.checks import (
    check_config,
    check_parts,
    check_same_run,
    has_microbatches,
)
from arb_ternary_distributed.optimizer_state import gather_moments
from arb_ternary_distributed.saving import save_model
from arb_ternary_distributed.schedule import DistributedSchedule
from arb_ternary_distributed.shards import gather_rows
from arb_ternary_train.build import RunParts
from arb_ternary_train.checkpoint import Pieces
from arb_ternary_train.config import RanksConfig, RunConfig
from arb_ternary_train.microbatches import MicrobatchSchedule
from arb_ternary_train.model_state import ModelState, load_state
from arb_ternary_train.safetensors_file import TensorParts

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from arb_ternary_train.context import TrainingContext

#: Seconds that a rank which has lost another waits for that one's reason.
_REASON_TIMEOUT: Final = 3.0
#: How long ranks wait while rank 0 saves, or runs a phase alone.
PATIENCE: Final = timedelta(days=1)
#: In errors of gloo and nccl whose other end is gone, or does not answer.
_LOST: Final = ("gloo/transport", "Connection closed by peer", "Connection reset by peer", "NCCL")
_TIMED_OUT: Final = "Timed out"


@frozen
class Member:
    """A process of a process group; ``str()`` names it."""

    rank: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"


class ProcessGroup:
    """The default group of ``torch.distributed``, which has been initialised; see ``World``.

    Collectives of a step have the timeout of that group. Plain values, for which ranks may wait
    while rank 0 works alone, are communicated on the host by a group that waits for a day.

    Args:
        device: where this process computes.
        members: all ranks, by number.
        store: where a rank says why it leaves; None = nowhere.
        limit: timeout of the default group in seconds, for messages.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        members: Sequence[Member] = (),
        store: Store | None = None,
        limit: int = 0,
    ) -> None:
        self.device = device
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.is_main = self.rank == 0
        self._members = members
        self._store = store
        self._limit = limit
        self._patient = dist.new_group(backend="gloo", timeout=PATIENCE)
        self._alone = False

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group that collectives of ``torch.distributed`` take.

        Raises:
            ConfigError: this process acts alone.
        """
        if self._alone:
            raise ConfigError(
                f"rank {self.rank} alone asks for accumulators or moments, and each rank has only "
                f"some of them",
                "An observer or a hook does this between steps, by logical_votes(), state_dict() "
                "or save_checkpoint(): leave it out, or read the rows of its rank only: "
                "local_votes().",
            )
        return dist.group.WORLD

    # --- communication

    def broadcast(self, value: Any) -> Any:
        box = [value if self.is_main else None]
        dist.broadcast_object_list(box, src=0, group=self._patient)
        return box[0]

    def run_on_main(self, make: Callable[[], Any]) -> Any:
        if not self.is_main:
            value, error = self.broadcast(None)
            if error is not None:
                raise _received_error(*error)
            return value
        try:
            made = make()
        except ArbError as error:
            self.broadcast((None, (error.what, error.hint, error.exit_code)))
            raise
        self.broadcast((made, None))
        return made

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._patient)
        return values

    def barrier(self) -> None:
        dist.all_reduce(torch.zeros(1, dtype=torch.int32), group=self._patient)

    def stop_reason(self, own: str) -> str:
        wanted = torch.tensor([bool(own)], dtype=torch.int32)
        dist.all_reduce(wanted, op=dist.ReduceOp.MAX)
        if not wanted.item():
            return ""
        return next(str(reason) for reason in self.gather(own) if reason)

    def check_agreement(self, what: str, value: Any) -> None:
        """Check that all ranks have the same value; ``what`` names it. Collective.

        Raises:
            ArbError: they do not; it says which rank has which.
        """
        values = self.gather(value)
        if any(other != values[0] for other in values):
            advice = "Start all of them with the same installation, config and environment."
            raise ArbError(
                f"{what}: the ranks do not agree", "\n".join([*_differences(values), advice])
            )

    @contextmanager
    def main_process_only(self) -> Iterator[None]:
        before = self._alone
        self._alone = True
        try:
            yield
        finally:
            self._alone = before

    # --- checks before a run

    def check_config(self, config: RunConfig) -> None:
        check_config(config, self.size)

    def check_parts(self, config: RunConfig, parts: RunParts) -> None:
        check_same_run(self, config, parts)
        check_parts(config, parts, self.size)

    # --- training

    def microbatch_schedule(
        self,
        count: int,
        options: RanksConfig,
        *,
        compiled: bool = False,
    ) -> MicrobatchSchedule:
        return DistributedSchedule(self, count, options, compiled=compiled)

    def runs_on_every_rank(self, options: Any) -> bool:
        return has_microbatches(options)

    def run_phase_on_main(self, phase: Phase, context: TrainingContext) -> PhaseResult:
        gather_rows(context.model)

        def run_alone() -> PhaseResult:
            with context.main_process_only():
                return phase.run(context)

        result: PhaseResult = self.run_on_main(run_alone)
        self._broadcast_model(context.model)
        # Evaluations and checkpoints follow from these, and all ranks make them together.
        context.step, context.tokens, context.evaluation_shape = self.broadcast(
            (context.step, context.tokens, context.evaluation_shape)
        )
        return result

    def _broadcast_model(self, model: nn.Module) -> None:
        """Give every rank the model of rank 0, which has the same names, part by part."""
        if self.is_main:
            for part in ModelState(model).parts():
                self.broadcast(dict(part))
            self.broadcast(None)
            return
        tensors: dict[str, Tensor] = {}
        while (received := self.broadcast(None)) is not None:
            tensors.update(received)
        load_state(model, tensors, "rank 0")

    def save_model(
        self,
        model: nn.Module,
        options: RanksConfig,
        write: Callable[[TensorParts | Pieces], str],
    ) -> str:
        return save_model(self, model, options, write)

    def gather_full(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        gather_rows(model)
        if optimizer is not None:
            gather_moments(optimizer)

    # --- the end

    def shutdown(self) -> None:
        """Leave once all ranks have come to their end. Collective."""
        self.barrier()
        self._destroy()

    def shutdown_after(self, error: BaseException) -> ArbError | None:
        """Leave because of ``error``, and tell the other ranks why.

        Returns:
            An error to raise instead, if another rank is the cause of ``error``.
        """
        if isinstance(error, Interrupted):
            # All ranks have agreed to stop. torchrun sends SIGTERM again to those that end last.
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            with suppress(RuntimeError):  # rank 0 may have failed meanwhile
                self.barrier()
        cause = self._lost_rank(error) if _is_loss(error) else None
        if cause is None:
            reason = f"{type(error).__name__}: {error}"
            if isinstance(error, ArbError):
                reason = error.what
            self._tell(_reason_key(self.rank), reason)
        self._destroy()
        return cause

    def _lost_rank(self, error: BaseException) -> ArbError:
        """Return an error that names the rank whose end or silence ``error`` is a consequence of.

        torchrun names only ranks of its own machine.
        """
        again = "Start again with --resume; torchrun --max-restarts N does so itself."
        # gloo closes the connections of a rank that has waited too long; others may see that first.
        timed_out = _TIMED_OUT if _TIMED_OUT in str(error) else ""
        self._tell(_waiting_key(self.rank), timed_out)
        deadline = time.monotonic() + _REASON_TIMEOUT
        while time.monotonic() < deadline:
            for member, reason in self._told(_reason_key):
                return ArbError(
                    f"rank {self.rank}: {member} has ended: {reason}",
                    f"Its own message says more. {again}",
                )
            time.sleep(0.1)

        waiting = dict(self._told(_waiting_key))
        silent = [str(member) for member in self._members if member not in waiting]
        if _TIMED_OUT in waiting.values() and silent:
            return ArbError(
                f"{', '.join(silent)}: no sign of life for {self._limit} s, the limit of "
                f"ARB_TERNARY_RANK_TIMEOUT: stopped, hung or cut off",
                f"{again} The newest checkpoint is intact.",
            )
        first_line = str(error).partition("\n")[0]
        return ArbError(
            f"rank {self.rank}: another rank has ended without a word: {first_line}",
            f"Its own message says more. {again}",
        )

    def _tell(self, key: str, value: str) -> None:
        """Store a value for the other ranks."""
        if self._store is not None:
            with suppress(RuntimeError):  # the rank that hosts the store may be gone
                self._store.set(key, value)

    def _told(self, key_of: Callable[[int], str]) -> Iterator[tuple[Member, str]]:
        """Yield the ranks that have stored a value under their key, with the value."""
        if self._store is None:
            return
        with suppress(RuntimeError):  # the rank that hosts the store may be gone
            for member in self._members:
                key = key_of(member.rank)
                if self._store.check([key]):
                    yield member, self._store.get(key).decode()

    def _destroy(self) -> None:
        dist.destroy_process_group()


def _reason_key(rank: int) -> str:
    return f"left/{rank}"


def _waiting_key(rank: int) -> str:
    return f"waiting/{rank}"


def _is_loss(error: BaseException) -> bool:
    """Return whether ``error`` is that of a collective whose other ends are gone."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _LOST)


def _received_error(what: str, hint: str, exit_code: int) -> ArbError:
    """Return an error that rank 0 has raised."""
    kind = Interrupted if exit_code == Interrupted.exit_code else ArbError
    error = kind(what, hint)
    error.exit_code = exit_code
    return error


def _differences(values: Sequence[Any]) -> list[str]:
    """Return ``rank 0, 2: 'a'`` for each different value; of mappings only keys that differ."""
    if all(isinstance(value, Mapping) for value in values):
        lines = []
        for key in dict.fromkeys(key for value in values for key in value):
            found = [value.get(key, "nothing") for value in values]
            if any(value != found[0] for value in found):
                lines += [f"{key}: {line}" for line in _differences(found)]
        return lines
    different: list[Any] = []
    for value in values:
        if value not in different:
            different.append(value)
    lines = []
    for value in different:
        ranks = [str(rank) for rank, other in enumerate(values) if other == value]
        lines.append(f"rank {', '.join(ranks)}: {value}")
    return lines
