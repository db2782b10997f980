"""All that a training loop learns and counts, copied, to be put back: in memory, or in a folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from attrs import frozen
from torch import Tensor

from arb_ternary.ternary.models import reset_runtime_state, ternary_modules
from arb_ternary_train.checkpoint import CheckpointStore, read_checkpoint
from arb_ternary_train.model_state import ModelState, load_parts

if TYPE_CHECKING:
    from arb_ternary_train.loop import TrainingLoop

#: What says where a loop is in its data and its schedule, as opposed to what it has learnt.
_CURSOR: Final = ("step", "micro_batches", "skipped", "sampler", "rng")


@frozen(eq=False)
class Snapshot:
    """The state dicts of a loop's model and of the loop: what a checkpoint holds of them, without
    its policy.

    Attributes:
        model: the model's, in the at-rest form.
        loop: that of :meth:`TrainingLoop.training_state`.
    """

    model: Mapping[str, Tensor]
    loop: Mapping[str, Any]

    @classmethod
    def take(cls, loop: TrainingLoop) -> Self:
        """A copy of everything, as it is now."""
        parts = ModelState(loop.model).parts()
        return cls(
            {name: copied(tensor) for part in parts for name, tensor in part.items()},
            copied(loop.training_state()),
        )

    def restore(self, loop: TrainingLoop, *, cursor: bool = True) -> None:
        """Put everything back, bit for bit, into a loop with a model and an optimizer of the same
        structure.

        Args:
            loop: any loop of that structure; its policy is left alone.
            cursor: also the step counters, the place in the data, what the model remembers of it
                and the global generators. Otherwise these go on, the micro-batches in between are
                passed over, and nothing is remembered of the text before them.
        """
        state = copied(self.loop)
        if not cursor:
            now = loop.training_state()
            state |= {**{name: now[name] for name in _CURSOR}, "runtime": None}
        reset_runtime_state(loop.model)
        load_parts(loop.model, self.model)
        for _, module in ternary_modules(loop.model):
            module.clear_stats()
        loop.load_training_state(state)

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for tensor in (*self.model.values(), *_tensors_in(self.loop)))

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint can hold."""
        return {"model": dict(self.model), "loop": dict(self.loop)}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Self:
        """The inverse of :meth:`state_dict`."""
        return cls(state["model"], state["loop"])

    def save(self, folder: Path) -> Path:
        """Write it into a folder of its own in ``folder``, as a checkpoint is written; returns
        where it is.

        Raises:
            CheckpointError: the disk is full or refuses.
        """
        return CheckpointStore(folder, keep=0).save(
            self.loop["step"], self.model, {"loop": self.loop}, {}
        )

    @classmethod
    def read(cls, path: Path) -> Self:
        """What :meth:`save` wrote; the model's tensors are read when they are asked for.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        checkpoint = read_checkpoint(path)
        return cls(checkpoint.model, checkpoint.state["loop"])


def copied(value: Any) -> Any:
    """``value`` with every tensor in its mappings, lists and tuples cloned."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) in (list, tuple):
        return type(value)(copied(item) for item in value)
    if isinstance(value, Mapping):
        pairs = {key: copied(item) for key, item in value.items()}
        return Counter(pairs) if isinstance(value, Counter) else pairs
    return value


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item)
