"""How several ranks write the model of a checkpoint: rank 0 all of it, or each rank a piece."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import nn

from arb_ternary.errors import ArbError, CheckpointError
from arb_ternary_train import checkpoint_format as fmt
from arb_ternary_train.model_state import ModelState, PieceState, Walk
from arb_ternary_train.ranks.world import World
from arb_ternary_train.safetensors_file import TensorParts


class SavedModel(Protocol):
    """A model that rank 0 gives to a checkpoint store, while the others attend."""

    @property
    def content(self) -> TensorParts | PieceFiles:
        """What the store is given."""

    def finish(self) -> None:
        """On rank 0, after the store has written, or failed to. Collective with :meth:`attend`."""

    def attend(self) -> None:
        """On every other rank, instead."""


class WholeModel:
    """Rank 0 writes all of it, and all make it together."""

    def __init__(self, model: nn.Module) -> None:
        self.content: TensorParts | PieceFiles = Walk(ModelState(model))

    def finish(self) -> None:
        """See :class:`SavedModel`."""
        assert isinstance(self.content, Walk)
        self.content.finish()

    def attend(self) -> None:
        """See :class:`SavedModel`."""
        self.finish()


class PieceFiles:
    """The ``Pieces`` of a checkpoint store."""

    def __init__(self, model: nn.Module, world: World) -> None:
        self._model = model
        self._world = world
        self.are_asked = False

    def write(self, folder: Path, metadata: str) -> Mapping[str, fmt.WrittenTensors]:
        """Have every rank write its piece.

        Raises:
            CheckpointError: one of them cannot.
        """
        self.are_asked = True
        self._world.share((str(folder), metadata))
        return self.together(folder, metadata)

    def together(self, folder: Path, metadata: str) -> Mapping[str, fmt.WrittenTensors]:
        """Write this rank's piece, and hear of those of the others. Collective."""
        found = self._world.gather(self._own(folder, metadata))
        if faults := [
            f"rank {rank}: {each}" for rank, each in enumerate(found) if isinstance(each, str)
        ]:
            raise CheckpointError(
                f"{folder.parent}: a checkpoint cannot be written: {'; '.join(faults)}",
                "Earlier checkpoints are intact. Every rank has to see this folder: use a shared "
                "disk, or "
                "ranks: {checkpoints: whole}. Then continue with --resume.",
            )
        return {name: fmt.WrittenTensors(*facts) for name, *facts in found}

    def _own(self, folder: Path, metadata: str) -> str | tuple[str, str, int, Mapping[str, str]]:
        """The piece of this rank: name, digest, size, tensors; or what was wrong."""
        rank = self._world.rank
        size = self._world.size
        name = f"model-{rank:05d}-of-{size:05d}.safetensors"
        walk = Walk(PieceState(self._model, rank, size))
        try:
            written = fmt.write_flushed(folder / name, walk, metadata)
        except (OSError, ArbError) as error:
            return str(error)
        finally:
            walk.finish()
        return name, written.sha256, written.size, written.tensors


class ModelInPieces:
    """Each rank writes its rows."""

    def __init__(self, model: nn.Module, world: World) -> None:
        self._world = world
        self.content: Any = PieceFiles(model, world)

    def finish(self) -> None:
        """See :class:`SavedModel`."""
        if not self.content.are_asked:
            self._world.share(None)

    def attend(self) -> None:
        """See :class:`SavedModel`."""
        asked = self._world.share(None)
        if asked is not None:
            folder, metadata = asked
            try:
                self.content.together(Path(folder), metadata)
            except CheckpointError:
                return  # rank 0 raises it, and tells


def saved_model(model: nn.Module, how: Literal["whole", "pieces"], world: World) -> SavedModel:
    """What ranks save of ``model``, as the option ``ranks.checkpoints`` says."""
    return ModelInPieces(model, world) if how == "pieces" and world.size > 1 else WholeModel(model)
