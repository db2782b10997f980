"""Rollbacks: the last good moments of a loop, and the strategy after going back to one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final

from attrs import frozen

from arb_ternary_orchestrator.state import Stateful
from arb_ternary_train.loop_state import Snapshot
from arb_ternary_train.step import Diverged, Skip

if TYPE_CHECKING:
    from arb_ternary_orchestrator.snapshots import Kept, SnapshotMemory
    from arb_ternary_train.loop import TrainingLoop

#: Steps on good data after which bad data are over.
_SOUND: Final = 5


@frozen(eq=False)
class GoodMoment:
    """A moment at which the loss was as usual.

    Attributes:
        step: steps that the loop had taken.
        strategy: the strategy in use.
        seen: state of the monitor.
        kept: the snapshot.
    """

    step: int
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
        """The last moment; IndexError before the first."""
        return self._moments[-1]

    def due(self, step: int) -> bool:
        """Return whether the moment after ``step`` steps has to be kept, if it is good."""
        return not self._moments or step - self._last >= self._every

    def wait(self, step: int) -> None:
        """Count the steps to the next moment from ``step`` on, after a rollback."""
        self._last = step

    def add(self, loop: TrainingLoop, strategy: str, seen: Mapping[str, Any]) -> None:
        """Keep the loop as it is now; the oldest moment is released if there are ``size``."""
        while len(self._moments) >= self._size:
            self._moments.pop(0).kept.release()
        self._last = loop.step
        kept = self._memory.take(loop)
        self._moments.append(GoodMoment(loop.step, strategy, seen, kept))

    def drop_since(self, step: int) -> None:
        """Release the moments from step ``step`` on; one always stays."""
        while len(self._moments) > 1 and self.newest.step >= step:
            self._moments.pop().kept.release()

    def clear(self) -> None:
        """Release all moments."""
        while self._moments:
            self._moments.pop().kept.release()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, moments oldest first."""
        moments = [
            {
                "step": moment.step,
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
                each["strategy"],
                each["seen"],
                self._memory.keep(Snapshot.from_state_dict(each["snapshot"])),
            )
            for each in state["moments"]
        ]
        self._last = state["last"]


def without_gradient(loop: TrainingLoop, norm: float) -> Diverged:
    """Return the error for gradients that are not finite, from a good state, batch after batch."""
    return Diverged(
        f"step {loop.context.step}: {loop.options.max_skipped} steps in a row had no finite "
        f"gradient, all from a state that had been found good; the last norm was {norm}",
        "Lower the learning rate, or continue from an earlier checkpoint: --resume PATH.",
        (Skip("gradient", norm, loop.microbatches),),
    )


class Recovery(Stateful):
    """The strategy that a rollback interrupted, and when to return to it.

    Bad data end at some point, and the safety strategy learns slowly. If the data are certainly to
    blame, a few good steps are enough. A strategy that explodes again after the return is not
    returned to a second time: only a comparison can choose it again.

    Args:
        calm: steps without a rollback after which to return.
    """

    state_names: ClassVar[tuple[str, ...]] = ("_interrupted", "_since", "_blameless", "_returned")

    def __init__(self, calm: int) -> None:
        self._calm = calm
        self._interrupted: str | None = None
        self._since = 0
        self._blameless = False
        self._returned: set[str] = set()

    def rolled_back(self, step: int, before: str, safety: str, *, blameless: bool) -> None:
        """Record that ``safety`` replaced ``before`` after a rollback.

        Args:
            step: steps that the loop has taken.
            before: the strategy until now; ``safety`` if one rollback follows another.
            safety: the strategy from now on.
            blameless: whether a state known to be good exploded at once, so that the data are the
                cause and not the strategy.
        """
        self._since = step
        self._blameless = blameless
        if before != safety:
            self._interrupted = None if before in self._returned else before

    def due(self, step: int) -> str | None:
        """Return the strategy to return to after ``step``; None if there is none, or not yet."""
        calm = min(_SOUND, self._calm) if self._blameless else self._calm
        return self._interrupted if self.since(step) >= calm else None

    def since(self, step: int) -> int:
        """Return the steps from the last rollback to ``step``."""
        return step - self._since

    def returned(self, strategy: str) -> None:
        """Record the return to ``strategy``."""
        self._returned.add(strategy)
        self._interrupted = None

    def cancel(self) -> None:
        """Forget the interrupted strategy: another decision says how training continues."""
        self._interrupted = None
