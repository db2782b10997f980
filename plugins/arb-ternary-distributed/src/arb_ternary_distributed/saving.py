"""How several ranks write the model of a checkpoint: rank 0 all of it, or each rank a piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen
from torch import Tensor, nn

from arb_ternary.errors import ArbError, CheckpointError
from arb_ternary.ternary.encoding import encode_at_rest
from arb_ternary.ternary.module import TernaryModule
from arb_ternary_distributed.wire.rows import row_bounds
from arb_ternary_train import checkpoint_format as fmt
from arb_ternary_train.checkpoint import Pieces
from arb_ternary_train.config import RanksConfig
from arb_ternary_train.model_state import ModelState, state_units, unit_outline, unit_state
from arb_ternary_train.safetensors_file import TensorParts

if TYPE_CHECKING:
    from arb_ternary_distributed.process_group import ProcessGroup


def save_model(
    world: ProcessGroup,
    model: nn.Module,
    options: RanksConfig,
    write: Callable[[TensorParts | Pieces], str],
) -> str:
    """Write a checkpoint by ``write`` on rank 0, to which all ranks contribute. Collective.

    Returns:
        The folder, on every rank.
    """
    saved: PieceFiles | Walk = Walk(ModelState(model))
    if options.checkpoints == "pieces":
        saved = PieceFiles(model, world)
    if not world.is_main:
        saved.attend()

    def write_saved() -> str:
        try:
            return write(saved)
        finally:
            saved.finish()

    folder: str = world.run_on_main(write_saved)
    return folder


class Walk:
    """The parts of ``state``, once, for ranks that make them together.

    If several ranks hold the rows of a module, all of them make its part at the same time. One of
    them writes, and calls :meth:`finish` however far it has come; the others call :meth:`attend`.
    """

    def __init__(self, state: TensorParts) -> None:
        self._outlines = iter(state.outlines())
        self._parts = iter(state.parts())

    def outlines(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the remaining outlines; see ``TensorParts``."""
        return self._outlines

    def parts(self) -> Iterator[Mapping[str, Tensor]]:
        """Yield the remaining parts; see ``TensorParts``."""
        return self._parts

    def attend(self) -> None:
        """Make all parts together with the rank that writes them."""
        self.finish()

    def finish(self) -> None:
        """Make the remaining parts, for the other ranks."""
        for _ in self._outlines:
            pass
        for _ in self._parts:
            pass


class PieceFiles:
    """The ``Pieces`` of a checkpoint store: each rank writes a file of its rows.

    Rank 0 calls :meth:`write` and then :meth:`finish`; the others call :meth:`attend`.
    """

    def __init__(self, model: nn.Module, world: ProcessGroup) -> None:
        self._model = model
        self._world = world
        self._asked = False

    def write(self, folder: Path, metadata: str) -> Mapping[str, fmt.WrittenTensors]:
        """Ask every rank to write its piece into ``folder``, and do so.

        Raises:
            CheckpointError: a rank cannot.
        """
        self._asked = True
        self._world.broadcast((str(folder), metadata))
        return self._write_together(folder, metadata)

    def finish(self) -> None:
        """Tell the other ranks that nothing will be written, unless they have written."""
        if not self._asked:
            self._world.broadcast(None)

    def attend(self) -> None:
        """Wait for rank 0, and write this rank's piece if it asks for it."""
        asked = self._world.broadcast(None)
        if asked is None:
            return
        folder, metadata = asked
        try:
            self._write_together(Path(folder), metadata)
        except CheckpointError:
            return  # rank 0 raises the same error, and broadcasts it

    def _write_together(self, folder: Path, metadata: str) -> Mapping[str, fmt.WrittenTensors]:
        """Write this rank's piece, and gather the digests of all. Collective."""
        found = self._world.gather(self._write_own(folder, metadata))
        failed = {rank: each for rank, each in enumerate(found) if isinstance(each, str)}
        faults = [f"rank {rank}: {what}" for rank, what in failed.items()]
        if faults:
            raise CheckpointError(
                f"{folder.parent}: a checkpoint cannot be written: {'; '.join(faults)}",
                "Earlier checkpoints are intact. Every rank has to see this folder: use a shared "
                "disk, or ranks: {checkpoints: whole}. Then continue with --resume.",
            )
        return {name: fmt.WrittenTensors(*facts) for name, *facts in found}

    def _write_own(
        self,
        folder: Path,
        metadata: str,
    ) -> str | tuple[str, str, int, Mapping[str, str]]:
        """Write the piece of this rank; return name, digest, size and tensors, or what failed."""
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


@frozen(eq=False)
class PieceState:
    """The part of the state dict of ``model`` that one of ``size`` ranks writes if each writes a
    piece.

    Weights and accumulators of ternary modules are cut by rows, as the ranks own them; rank 0
    writes everything else. A tensor of a state dict consists of its rows in all pieces, in order.
    """

    model: nn.Module
    rank: int
    size: int

    def outlines(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and shape of each tensor of this piece; see ``ModelState``."""
        for module, prefix, whole in state_units(self.model):
            rows = None if whole else self._rows(module)
            found = unit_outline(module, prefix, whole)
            if rows is not None:
                for name in _sharded_names(prefix):
                    found[name] = found[name][rows]
            for name in self._names(found, prefix, rows):
                yield name, found[name]

    def parts(self) -> Iterator[Mapping[str, Tensor]]:
        """Yield the tensors of this piece; see ``ModelState``.

        What all ranks make together is also made by those that do not write it.
        """
        for module, prefix, whole in state_units(self.model):
            rows = None if whole else self._rows(module)
            if rows is None:
                found = unit_state(module, prefix, whole)
            else:
                assert isinstance(module, TernaryModule)
                found = _own_rows_state(module, prefix, rows)
            yield {name: found[name] for name in self._names(found, prefix, rows)}

    def _rows(self, module: nn.Module) -> slice | None:
        """Return the rows of a module that is sharded, or None if it is not."""
        if type(module)._save_to_state_dict is not TernaryModule._save_to_state_dict:
            return None
        assert isinstance(module, TernaryModule)
        return slice(*row_bounds(module.shape.out_features, self.size)[self.rank])

    def _names(self, found: Mapping[str, Any], prefix: str, rows: slice | None) -> list[str]:
        """Return the names of a module's tensors that are in this piece."""
        if self.rank == 0:
            return [*found]
        if rows is None or rows.start >= rows.stop:
            return []
        return [*_sharded_names(prefix)]


def _sharded_names(prefix: str) -> tuple[str, str]:
    """Return the names of a ternary module's tensors that have a row for each of the weight's."""
    return prefix + "weight", prefix + "votes"


def _own_rows_state(module: TernaryModule, prefix: str, rows: slice) -> dict[str, Any]:
    """Return the state of a module with these rows of its weight and accumulators only."""
    found: dict[str, Any] = {}
    nn.Module._save_to_state_dict(module, found, prefix, False)
    found[prefix + "weight"] = encode_at_rest(module.trits()[rows])
    votes = module.logical_votes()[rows] if module.shard is None else module.local_votes()
    if module.shape.vote_bits == 2:
        votes = encode_at_rest(votes)
    found[prefix + "votes"] = votes
    return found
