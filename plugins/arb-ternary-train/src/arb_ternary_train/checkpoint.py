"""The checkpoints of a run: written whole or not at all, and verified when read.

``checkpoints/step-00000200/`` holds ``model.safetensors`` (the model's at-rest state dict),
``state.json`` and ``state.safetensors`` (everything else) and ``manifest.json``. If several ranks
write, the model may be in pieces (``model-00000-of-00002.safetensors``), which the manifest lists.

A checkpoint is written into a hidden temporary folder. Every file and the folder are flushed to the
disk, and only then the folder is renamed: a folder with the name of a checkpoint is complete,
whatever happened. ``checkpoints/latest`` names the newest one, for other programs. A second
checkpoint at the same step (an interruption between two micro-batches) is ``step-00000200.1``.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

from attrs import field, frozen
from torch import Tensor

from arb_ternary.errors import CheckpointError
from arb_ternary_train import checkpoint_format as fmt
from arb_ternary_train.directory import reason_of
from arb_ternary_train.durable import flush
from arb_ternary_train.safetensors_file import SafetensorsFile, StoredTensor, TensorParts

_LOG = logging.getLogger(__name__)

_NAME: Final = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_TEMPORARY: Final = ".writing-"
_MODEL: Final = "model.safetensors"
_STATE_TENSORS: Final = "state.safetensors"
_STATE: Final = "state.json"
_MANIFEST: Final = "manifest.json"


def no_fault(point: str) -> None:
    """No-op, the default of ``faults``."""


@frozen(eq=False)
class Checkpoint:
    """A checkpoint that has been read and verified.

    Attributes:
        path: its folder.
        step: optimizer steps of the whole run when it was written.
        identity: identity of the run; see ``arb_ternary_train.identity``.
        model: state dict of the model, in the at-rest form; a tensor is read when it is accessed.
        state: everything else; for a run see ``arb_ternary_train.run_state.RunState``.
    """

    path: Path
    step: int
    identity: Mapping[str, Any]
    model: Mapping[str, Tensor]
    state: Mapping[str, Any]


def read_checkpoint(path: Path) -> Checkpoint:
    """Read and verify the checkpoint in the folder ``path``.

    Raises:
        CheckpointError: it is missing, truncated, damaged or not a checkpoint; file and tensor are
            named.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path}: there is no checkpoint folder of this name")
    manifest = fmt.read_manifest(path / _MANIFEST)
    for name, facts in manifest["files"].items():
        file = path / name
        try:
            size = file.stat().st_size
        except FileNotFoundError:
            continue  # reading it below names what is missing
        except OSError as error:
            raise fmt.unreadable(file, error) from error
        if size != facts["size"]:
            raise CheckpointError(
                f"{file}: the file is truncated or altered: {size} bytes, should be {facts['size']}"
            )

    def tensors_in(name: str) -> fmt.VerifiedTensors:
        digest = manifest["files"][name]["sha256"]
        return fmt.read_tensors(path / name, digest, manifest["tensors"][name])

    pieces = [tensors_in(name) for name in manifest.get("pieces", [_MODEL])]
    model = pieces[0] if len(pieces) == 1 else fmt.JoinedTensors(pieces)
    tensors = tensors_in(_STATE_TENSORS)

    file = path / _STATE
    found = fmt.verified_digest(file)
    if found != manifest["files"][_STATE]["sha256"]:
        raise CheckpointError(
            f"{file}: the file is damaged: its checksum {found[:16]}... is not the one in the "
            f"manifest"
        )
    state = fmt.decode_state(json.loads(file.read_text(encoding="utf-8")), tensors)
    return Checkpoint(
        path=path, step=manifest["step"], identity=manifest["identity"], model=model, state=state
    )


def model_entries(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of the model in the checkpoint ``path``, as the file headers list them.

    No tensor is read.

    Raises:
        CheckpointError: the manifest is missing or damaged.
        DataError: a file of the model is missing or damaged.
    """
    found: dict[str, StoredTensor] = {}
    for name in fmt.read_manifest(path / _MANIFEST).get("pieces", [_MODEL]):
        for tensor, entry in SafetensorsFile(path / name).entries.items():
            above = found.get(tensor)
            if above is None:
                found[tensor] = entry
            else:
                shape = (above.shape[0] + entry.shape[0], *entry.shape[1:])
                found[tensor] = StoredTensor(
                    entry.dtype, shape, above.start, above.nbytes + entry.nbytes
                )
    return found


@runtime_checkable
class Pieces(Protocol):
    """A model that several processes write, one file each."""

    def write(self, folder: Path, metadata: str) -> Mapping[str, fmt.WrittenTensors]:
        """Make all processes write into ``folder``, which all of them see.

        Returns:
            The files by name, in the order of rows.
        """


@frozen
class CheckpointStore:
    """The checkpoints in one folder; one process at a time writes there.

    Args:
        root: the folder; created when the first checkpoint is written.
        keep: how many of the newest checkpoints are kept; 0 keeps all.
        faults: called with the name of every point between two effects on the disk. A test raises
            or dies there.
    """

    root: Path
    keep: int = 3
    faults: Callable[[str], None] = field(default=no_fault)

    def save(
        self,
        step: int,
        model: Mapping[str, Tensor] | TensorParts | Pieces,
        state: Mapping[str, Any],
        identity: Mapping[str, Any],
    ) -> Path:
        """Write a checkpoint and return its folder. On any failure existing ones stay as they are.

        Raises:
            CheckpointError: the disk is full or refuses.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._remove_leftovers()
            final = self._unused(step)
            temporary = self.root / f"{_TEMPORARY}{final.name}"
            temporary.mkdir()
            try:
                self._write(temporary, step, model, state, identity)
                temporary.rename(final)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
            self.faults("renamed")
            flush(self.root)
            self._point_to(final)
        except OSError as error:
            raise CheckpointError(
                f"{self.root}: the checkpoint of step {step} cannot be written: {error}",
                "Earlier checkpoints are intact. Free some space, then continue with --resume.",
            ) from error
        self._prune()
        return final

    def paths(self) -> list[Path]:
        """Return the complete checkpoints, newest first.

        Raises:
            CheckpointError: the folder is something else, or cannot be read.
        """
        try:
            found = [
                path for path in self.root.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()
            ]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise fmt.unreadable(self.root, error) from error
        return sorted(found, key=_order, reverse=True)

    def latest(self) -> Path:
        """Return the newest checkpoint, whether it can be read or not.

        Raises:
            CheckpointError: there is none.
        """
        paths = self.paths()
        if not paths:
            raise CheckpointError(f"{self.root}: there is no checkpoint here yet")
        return paths[0]

    def newest_good(self) -> tuple[Checkpoint | None, tuple[str, ...]]:
        """Return the newest checkpoint that can be read, and what was wrong with each newer one.

        Damaged checkpoints are moved to ``set-aside/``, so that they can still be examined. The
        result is None only if there is no checkpoint at all.

        Raises:
            CheckpointError: there are checkpoints and none can be read, or one is of a newer
                version, or the system refuses to read one. Nothing is changed.
        """
        faults: list[str] = []
        for path in self.paths():
            try:
                checkpoint = read_checkpoint(path)
            except fmt.UnreadableCheckpoint:
                raise
            except CheckpointError as error:
                faults.append(error.what)
                continue
            for fault in faults:
                _LOG.warning("%s; trying the checkpoint before it", fault)
            self.set_aside_newer(path)
            return checkpoint, tuple(faults)
        if faults:
            raise CheckpointError(
                f"{self.root}: none of the checkpoints can be read",
                "\n".join([*faults, "Nothing was changed. To begin anew: arb train --restart"]),
            )
        return None, ()

    def set_aside_newer(self, path: Path) -> None:
        """Move checkpoints newer than ``path``, from which the run continues, to ``set-aside/``.

        What a kill left half done is removed too.

        Raises:
            CheckpointError: the system refuses.
        """
        try:
            self._remove_leftovers()
            for newer in self.paths():
                if _order(newer) <= _order(path):
                    break
                aside = self.root / "set-aside"
                aside.mkdir(exist_ok=True)
                serial = 0
                while (target := aside / f"{newer.name}-{serial}").exists():
                    serial += 1
                newer.rename(target)
            self._point_to(path)
        except OSError as error:
            where = error.filename2 or error.filename or self.root
            raise CheckpointError(f"{where}: cannot be written: {reason_of(error)}") from error
        self._prune()

    def _write(
        self,
        folder: Path,
        step: int,
        model: Mapping[str, Tensor] | TensorParts | Pieces,
        state: Mapping[str, Any],
        identity: Mapping[str, Any],
    ) -> None:
        """Write the files of a checkpoint into ``folder`` and flush them to the disk."""
        tree, tensors = fmt.encode_state(state)
        metadata = f"{fmt.FORMAT} {fmt.VERSION}"
        self.faults("temporary folder made")

        pieces = {}
        if isinstance(model, Pieces):
            written = {**model.write(folder, metadata)}
            pieces = {"pieces": [*written]}
        else:
            written = {_MODEL: fmt.write_flushed(folder / _MODEL, model, metadata)}
        self.faults("model written")
        written[_STATE_TENSORS] = fmt.write_flushed(folder / _STATE_TENSORS, tensors, metadata)
        self.faults("state tensors written")
        (folder / _STATE).write_text(json.dumps(tree, allow_nan=False) + "\n", encoding="utf-8")
        self.faults("state written")
        files = {name: {"sha256": each.sha256, "size": each.size} for name, each in written.items()}
        files[_STATE] = {
            "sha256": fmt.file_digest(folder / _STATE),
            "size": (folder / _STATE).stat().st_size,
        }
        digests = {name: dict(each.tensors) for name, each in written.items()}
        content = {
            "step": step,
            "identity": dict(identity),
            "files": files,
            "tensors": digests,
            **pieces,
        }
        fmt.write_manifest(folder / _MANIFEST, content)
        self.faults("manifest written")
        for name in (_STATE, _MANIFEST):
            flush(folder / name)
        flush(folder)
        self.faults("flushed")

    def _unused(self, step: int) -> Path:
        """Return a path that follows those of existing checkpoints of ``step``."""
        serials = [serial for each, serial in map(_order, self.paths()) if each == step]
        name = f"step-{step:08d}"
        return self.root / (f"{name}.{max(serials) + 1}" if serials else name)

    def _point_to(self, path: Path) -> None:
        """Write the name of ``path`` to ``latest``."""
        temporary = self.root / f"{_TEMPORARY}latest"
        temporary.write_text(f"{path.name}\n", encoding="utf-8")
        flush(temporary)
        self.faults("pointer written")
        temporary.replace(self.root / "latest")
        flush(self.root)
        self.faults("pointer replaced")

    def _remove_leftovers(self) -> None:
        """Remove what a kill has left under temporary names."""
        for path in self.root.glob(f"{_TEMPORARY}*"):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    def _prune(self) -> None:
        """Delete all but the newest ``keep`` checkpoints."""
        if self.keep <= 0:
            return
        for path in self.paths()[self.keep :]:
            # Rename it first: a deletion that is cut short must not leave half a checkpoint under a
            # valid name.
            doomed = self.root / f"{_TEMPORARY}deleted-{path.name}"
            try:
                path.rename(doomed)
                self.faults("old one renamed")
                shutil.rmtree(doomed)
            except OSError as error:
                _LOG.warning("%s: an old checkpoint cannot be deleted: %s", path, error)


def _order(path: Path) -> tuple[int, int]:
    """Return step and serial number of a checkpoint's folder."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise CheckpointError(
            f"{path}: not the name of a checkpoint", "Their names are like step-00000200."
        )
    return int(match[1]), int(match[2] or 0)
