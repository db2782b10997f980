"""A model folder: its weight files, its place in the hub's cache, and how it is downloaded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from attrs import frozen
from torch import Tensor

from arb_ternary.errors import DataError, EnvironmentProblem
from arb_ternary.plugins.discovery import install_command
from arb_ternary_interchange.huggingface.json_file import Values, read_object
from arb_ternary_interchange.huggingface.shards import INDEX_NAME, SINGLE_NAME
from arb_ternary_train.safetensors_file import SafetensorsFile, StoredTensor

#: Largest index: that of a model of a hundred thousand tensors.
_MAX_INDEX_BYTES: Final = 16 << 20
#: What is downloaded: nothing that could be run.
_PATTERNS: Final = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt")
#: Bytes of tensors that are compared at a time.
_PIECE: Final = 1 << 20
_PICKLED: Final = (".bin", ".pt", ".pth", ".ckpt")
_ADDRESS: Final = re.compile(r"hf://([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")


@frozen
class WeightFiles:
    """The tensors of a folder, whichever files they are in.

    Attributes:
        files: the safetensors file of each tensor.
        paths: every file that was read, an index included.
    """

    files: Mapping[str, SafetensorsFile]
    paths: tuple[Path, ...]

    @classmethod
    def open(cls, folder: Path) -> WeightFiles:
        """Read and check the headers of a folder's weight files.

        Raises:
            DataError: there are none, only pickled ones, or one is damaged.
        """
        # As transformers does: the single file counts if both are there.
        single = folder / SINGLE_NAME
        if single.is_file():
            file = SafetensorsFile(single)
            return cls(dict.fromkeys(file, file), (single,))
        index = folder / INDEX_NAME
        if index.is_file():
            files = _indexed(index)
            return cls(files, (index, *{file.path for file in files.values()}))
        raise _without_weights(folder)

    @property
    def is_packed(self) -> bool:
        """Whether some weights are trits, four per byte."""
        return any(file.outline(name).dtype is torch.uint8 for name, file in self.files.items())

    def entry(self, name: str) -> StoredTensor | None:
        """Return what a header says of a tensor; None if the folder has none of this name."""
        file = self.files.get(name)
        return None if file is None else file.entries[name]

    def where(self, name: str) -> str:
        """Return file and name of a tensor, for errors."""
        return f"{self.files[name].path}: tensor {name!r}"

    def read(self, name: str) -> Tensor:
        """Read a tensor from disk."""
        return self.files[name][name]

    def are_equal(self, first: str, second: str) -> bool:
        """Whether two tensors have the same dtype, shape and bytes; read piece by piece."""
        one = self.files[first].entries[first]
        other = self.files[second].entries[second]
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        paths = (self.files[first].path, self.files[second].path)
        try:
            with paths[0].open("rb") as left, paths[1].open("rb") as right:
                left.seek(one.start)
                right.seek(other.start)
                for done in range(0, one.nbytes, _PIECE):
                    size = min(_PIECE, one.nbytes - done)
                    if left.read(size) != right.read(size):
                        return False
        except OSError as error:
            raise DataError(f"{paths[0]}: cannot be read: {error.strerror}") from error
        return True


def _indexed(index: Path) -> dict[str, SafetensorsFile]:
    """Return the file of each tensor in an index."""
    placed = Values(str(index), read_object(index, _MAX_INDEX_BYTES)).within("weight_map")
    if placed is None:
        raise DataError(f"{index}: 'weight_map' is missing: it names the file of each tensor")
    opened: dict[str, SafetensorsFile] = {}
    files = {}
    for name, file_name in placed.found.items():
        if type(file_name) is not str or Path(file_name).name != file_name or "\0" in file_name:
            raise DataError(
                f"{index}: 'weight_map': {name[:120]!r} is in {file_name!r}, which is not a file "
                f"name"
            )
        if file_name not in opened:
            opened[file_name] = SafetensorsFile(index.parent / file_name)
        if name not in opened[file_name]:
            raise DataError(f"{index}: 'weight_map': {name[:120]!r} is not in {file_name}")
        files[name] = opened[file_name]
    return files


def _without_weights(folder: Path) -> DataError:
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLED)
    if pickled:
        return DataError(
            f"{folder}: has its weights as pickled files only ({pickled[0]}), which can run code "
            f"when they are read",
            "Save the model as safetensors where you trust it: model.save_pretrained(folder, "
            "safe_serialization=True).",
        )
    return DataError(f"{folder}: has neither {SINGLE_NAME} nor {INDEX_NAME}")


def model_folder(source: Path) -> Path:
    """Return the folder with the ``config.json``: ``source``, or the snapshot in it if it is a
    model in the hub's cache.

    Raises:
        DataError: it is neither.
    """
    if (source / "config.json").is_file():
        return source
    snapshots = source / "snapshots"
    if not snapshots.is_dir():
        raise DataError(
            f"{source}: is not a model folder: it has no config.json",
            "Give a folder that transformers has saved, one of the hub's cache "
            "(models--org--name), or hf://org/name.",
        )
    names = [folder.name for folder in snapshots.iterdir() if (folder / "config.json").is_file()]
    main = source / "refs" / "main"
    if main.is_file():
        name = main.read_text(encoding="utf-8", errors="replace").strip()
        if name in names:
            return snapshots / name
    if len(names) == 1:
        return snapshots / names[0]
    hint = "Download the model again: its cache is incomplete."
    if names:
        paths = [str(snapshots / name) for name in sorted(names)[:5]]
        hint = f"Give the folder of one of them: {', '.join(paths)}"
    raise DataError(
        f"{source}: has {len(names)} snapshots with a config.json, and no main one", hint
    )


def fetched(address: str) -> Path:
    """Return the folder of ``hf://org/name`` or ``hf://org/name@revision``, which is downloaded if
    it is not in the hub's cache.

    Raises:
        DataError: it is no such address, or the hub has no such model, or cannot be reached.
        EnvironmentProblem: ``huggingface_hub`` is not installed.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None:
        raise DataError(f"{address}: must be hf://org/name or hf://org/name@revision")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
        )
    except ImportError as error:
        raise EnvironmentProblem(
            f"{address}: needs the package huggingface_hub, which is not installed",
            f"{install_command('arb-ternary-interchange[hub]')}, or download the folder and give "
            "its path.",
        ) from error
    try:
        return Path(snapshot_download(match[1], revision=match[2], allow_patterns=list(_PATTERNS)))
    except LocalEntryNotFoundError as error:
        raise DataError(
            f"{address}: is not in the hub's cache, and the hub cannot be reached, or "
            f"HF_HUB_OFFLINE forbids it",
            "Connect, or download the folder elsewhere and give its path.",
        ) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise DataError(f"{address}: cannot be fetched: {str(error).splitlines()[0]}") from error
