"""The last good moments of a loop, to go back to, and what comes after that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from arb_ternary_train.policy import Diverged, Skip
from arb_ternary_train.snapshot import Snapshot

if TYPE_CHECKING:
    from arb_ternary_orchestrator.snapshots import Kept, SnapshotMemory
    from arb_ternary_train.loop import TrainingLoop

#: Steps on sound data that show that the bad ones are over.
_SOUND: Final = 5


@frozen(eq=False)
class GoodMoment:
    """A moment when the loss was as it should be.

    Attributes:
        step: steps that the loop had taken, of which none was lost.
        microbatches: that it had drawn.
        strategy: under which it trained.
        seen: state of the monitor.
        kept: the snapshot.
    """

    step: int
    microbatches: int
    strategy: str
    seen: Mapping[str, Any]
    kept: Kept


class Ring:
    """The last ``size`` good moments, one every ``every`` steps."""

    def __init__(self, memory: SnapshotMemory, *, size: int, every: int) -> None:
        self._memory = memory
        self._size = size
        self._every = every
        self._moments: list[GoodMoment] = []
        self._last = 0

    def __len__(self) -> int:
        return len(self._moments)

    @property
    def newest(self) -> GoodMoment:
        """The last one; IndexError before the first."""
        return self._moments[-1]

    def due(self, step: int) -> bool:
        """Whether the moment after ``step`` steps is to be kept, if it is good."""
        return not self._moments or step - self._last >= self._every

    def wait(self, step: int) -> None:
        """Count the steps to the next good moment from ``step`` on: what was kept has just been
        gone back to.
        """
        self._last = step

    def add(self, loop: TrainingLoop, strategy: str, seen: Mapping[str, Any]) -> None:
        """Keep the loop as it is now; the oldest moment goes where there are ``size``."""
        while len(self._moments) >= self._size:
            self._moments.pop(0).kept.release()
        self._last = loop.step
        self._moments.append(
            GoodMoment(loop.step, loop.microbatches, strategy, seen, self._memory.take(loop))
        )

    def holds(self, loop: TrainingLoop) -> bool:
        """Whether the newest moment is now."""
        now = (loop.step, loop.microbatches)
        return bool(self._moments) and (self.newest.step, self.newest.microbatches) == now

    def drop_since(self, step: int) -> None:
        """Give up the moments from step ``step`` on; one always stays."""
        while len(self._moments) > 1 and self.newest.step >= step:
            self._moments.pop().kept.release()

    def clear(self) -> None:
        """Give up all moments."""
        while self._moments:
            self._moments.pop().kept.release()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint can hold, moments oldest first."""
        moments = [
            {
                "step": moment.step,
                "micro_batches": moment.microbatches,
                "strategy": moment.strategy,
                "seen": moment.seen,
                "snapshot": moment.kept.get().state_dict(),
            }
            for moment in self._moments
        ]
        return {"moments": moments, "last": self._last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` gave."""
        self.clear()
        self._moments = [
            GoodMoment(
                each["step"],
                each["micro_batches"],
                each["strategy"],
                each["seen"],
                self._memory.keep(Snapshot.from_state_dict(each["snapshot"])),
            )
            for each in state["moments"]
        ]
        self._last = state["last"]


def without_gradient(loop: TrainingLoop, norm: float) -> Diverged:
    """The error that ends a run whose gradients are not finite, from a good state, batch after
    batch.
    """
    return Diverged(
        f"step {loop.context.step}: {loop.options.max_skipped} steps in a row had no finite "
        f"gradient, all from a state that had been found good; the last norm was {norm}",
        "Lower the learning rate, or continue from an earlier checkpoint: --resume PATH.",
        Skip("gradient", norm, loop.microbatches),
    )


class Recovery:
    """The strategy that a rollback interrupted, and when training has been calm for long enough to
    go back to it.

    Bad data are over at some time, and the safety strategy learns slowly. Where the data are to
    blame for certain, a few sound steps are enough. A strategy that explodes again after it was
    gone back to is not trusted a second time: only a comparison brings it back.

    Args:
        calm: steps without a rollback after which the strategy is gone back to.
    """

    def __init__(self, calm: int) -> None:
        self._calm = calm
        self._interrupted: str | None = None
        self._since = 0
        self._blameless = False
        self._returned: set[str] = set()

    def rolled_back(self, step: int, before: str, safety: str, *, blameless: bool) -> None:
        """After step ``step`` the strategy ``safety`` has taken the place of ``before``.

        Args:
            step: that the loop has taken.
            before: the strategy until now; ``safety`` where one rollback follows another.
            safety: the strategy from now on.
            blameless: a state that had been found good exploded at once, so that it was the data.
        """
        self._since = step
        self._blameless = blameless
        if before != safety:
            self._interrupted = None if before in self._returned else before

    def due(self, step: int) -> str | None:
        """The strategy to go back to after step ``step``; None = there is none, or not yet."""
        calm = min(_SOUND, self._calm) if self._blameless else self._calm
        return self._interrupted if self.since(step) >= calm else None

    def since(self, step: int) -> int:
        """Steps between the last rollback and step ``step``."""
        return step - self._since

    def returned(self, strategy: str) -> None:
        """``strategy`` has been gone back to."""
        self._returned.add(strategy)
        self._interrupted = None

    def settled(self) -> None:
        """Another decision says how training goes on."""
        self._interrupted = None

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "interrupted": self._interrupted,
            "since": self._since,
            "blameless": self._blameless,
            "returned": sorted(self._returned),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` gave."""
        self._interrupted = state["interrupted"]
        self._since = state["since"]
        self._blameless = state["blameless"]
        self._returned = set(state["returned"])
