"""Several processes that train one model together: the ``World`` of a distributed run."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from arb_ternary.errors import ArbError, ConfigError, Interrupted
from arb_ternary.protocols.runs import Phase, PhaseResult
from arb_ternary_distributed.checks import (
    check_checkpoint,
    check_config,
    check_parts,
    check_same_run,
    has_microbatches,
)
from arb_ternary_distributed.exchange import gather_rows
from arb_ternary_distributed.optimizer_state import gather_moments
from arb_ternary_distributed.phases import run_phase_on_main
from arb_ternary_distributed.saving import save_model
from arb_ternary_distributed.schedule import DistributedSchedule
from arb_ternary_train.build import RunParts
from arb_ternary_train.checkpoint import Checkpoint, Pieces
from arb_ternary_train.config import RanksConfig, RunConfig
from arb_ternary_train.microbatches import MicrobatchSchedule
from arb_ternary_train.safetensors_file import TensorParts

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from arb_ternary_distributed.sharded_weights import ShardedWeights
    from arb_ternary_distributed.watch import Member, Watch
    from arb_ternary_train.context import TrainingContext

#: Seconds that a rank which has lost another waits for the reason.
_FAREWELL: Final = 3.0
#: In errors of gloo and nccl whose other end has gone.
_LOST: Final = ("gloo/transport", "Connection closed by peer", "Connection reset by peer", "NCCL")


class ProcessGroup:
    """Several processes, on the default group of ``torch.distributed``, which has been initialised.

    Args:
        device: where this process computes; collectives of plain values go over the host in any
            case.
        members: all of them, by rank.
        farewells: where a rank says why it leaves; None = nowhere.
        watch: gives this rank's signs of life until it leaves.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        members: Sequence[Member] = (),
        farewells: Store | None = None,
        watch: Watch | None = None,
    ) -> None:
        self._device = device
        self._members = members
        self._rank = dist.get_rank()
        self._size = dist.get_world_size()
        self._farewells = farewells
        self._watch = watch
        self._waiting = "start"
        self._alone = False
        self._sharded: ShardedWeights | None = None

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
        """The group that collectives of ``torch.distributed`` take.

        Raises:
            ConfigError: this process acts alone.
        """
        if self._alone:
            raise ConfigError(
                f"rank {self.rank} alone asks for accumulators or moments, of which each rank has "
                f"only some",
                "An observer or a hook does this between steps, by logical_votes(), state_dict() "
                "or save_checkpoint(): "
                "leave it out, or read the rows of its rank only: local_votes().",
            )
        return dist.group.WORLD

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def broadcast(self, value: Any) -> Any:
        box = [value if self.is_main else None]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def run_on_main(self, make: Callable[[], Any]) -> Any:
        if not self.is_main:
            value, error = self.broadcast(None)
            if error is not None:
                raise _as_told(*error)
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
        dist.all_gather_object(values, value)
        return values

    def check_agreement(self, what: str, value: Any) -> None:
        """Check that all ranks have the same value; ``what`` names it. Collective.

        Raises:
            ArbError: they do not; it says which rank has which.
        """
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

    def barrier(self, where: str) -> None:
        self._waiting = where
        dist.all_reduce(torch.zeros(1, dtype=torch.int32))

    @contextmanager
    def main_process_only(self) -> Iterator[None]:
        before = self._alone
        self._alone = True
        weights = nullcontext() if self._sharded is None else self._sharded.main_process_only()
        try:
            with weights:
                yield
        finally:
            self._alone = before

    # --- checks before a run

    def check_config(self, config: RunConfig) -> None:
        check_config(config, self.size)

    def check_parts(self, config: RunConfig, parts: RunParts) -> None:
        check_same_run(self, config, parts)
        check_parts(config, parts, self.size)

    def check_checkpoint(self, checkpoint: Checkpoint) -> None:
        check_checkpoint(checkpoint, self.size)

    # --- training

    def shard_weights(self, model: nn.Module, options: RanksConfig) -> tuple[str, ...]:
        self._sharded = None
        if options.weights == "replicated":
            return ()
        # FSDP takes a second or two to import.
        from arb_ternary_distributed.sharded_weights import ShardedWeights

        self._sharded = ShardedWeights(model, self)
        return self._sharded.replicated

    def microbatch_schedule(
        self, count: int, options: RanksConfig, *, compiled: bool = False
    ) -> MicrobatchSchedule:
        return DistributedSchedule(self, count, options, self._sharded, compiled=compiled)

    def runs_on_every_rank(self, options: Any) -> bool:
        return has_microbatches(options)

    def run_phase_on_main(self, phase: Phase, context: TrainingContext) -> PhaseResult:
        return run_phase_on_main(self, phase, context)

    def end_evaluation_round(self) -> None:
        if self._sharded is not None:
            self._sharded.end_evaluation_round()

    def save_model(
        self,
        model: nn.Module,
        options: RanksConfig,
        write: Callable[[TensorParts | Pieces], str],
    ) -> str:
        return save_model(self, model, options, write)

    def gather_full(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        gather_rows(model)
        if self._sharded is not None:
            self._sharded.gather_full()
        if optimizer is not None:
            gather_moments(optimizer)

    # --- the end

    def close(self) -> None:
        """Leave, once all ranks have come to their end. Collective."""
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
