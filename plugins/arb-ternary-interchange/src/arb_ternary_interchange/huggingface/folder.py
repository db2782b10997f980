"""A model folder: its weight files, where it lies in the hub's cache, and how it gets there."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from attrs import frozen
from torch import Tensor

from arb_ternary.errors import DataError, EnvironmentProblem
from arb_ternary_interchange.huggingface.json_file import Values, read_object
from arb_ternary_interchange.safetensors.shards import INDEX_NAME, SINGLE_NAME
from arb_ternary_train.safetensors_file import SafetensorsFile, StoredTensor

SCHEME: Final = "hf"

#: The index of a model of a hundred thousand tensors.
_MAX_INDEX_BYTES: Final = 16 << 20
#: What is fetched: nothing that could be run.
_PATTERNS: Final = ("*.safetensors", "*.json", "tokenizer.model")
_PICKLED: Final = (".bin", ".pt", ".pth", ".ckpt")
_ADDRESS: Final = re.compile(r"hf://([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")


@frozen
class WeightFiles:
    """The tensors of a folder, wherever they lie.

    Attributes:
        files: the safetensors file of each tensor.
    """

    files: Mapping[str, SafetensorsFile]

    @classmethod
    def open(cls, folder: Path) -> WeightFiles:
        """Read and check the headers of a folder's weight files.

        Raises:
            DataError: there are none, only pickled ones, or one is damaged.
        """
        index = folder / INDEX_NAME
        if not index.is_file():
            single = folder / SINGLE_NAME
            if not single.is_file():
                raise _without_weights(folder)
            file = SafetensorsFile(single)
            return cls(dict.fromkeys(file, file))
        placed = Values(str(index), read_object(index, _MAX_INDEX_BYTES)).within("weight_map")
        if placed is None:
            raise DataError(f"{index}: 'weight_map' is missing: it names the file of each tensor")
        opened: dict[str, SafetensorsFile] = {}
        files = {}
        for name, file_name in placed.found.items():
            if type(file_name) is not str or Path(file_name).name != file_name or "\0" in file_name:
                raise DataError(
                    f"{index}: 'weight_map': {name[:120]!r} is in {file_name!r}, which is no file "
                    f"name"
                )
            if file_name not in opened:
                opened[file_name] = SafetensorsFile(folder / file_name)
            if name not in opened[file_name]:
                raise DataError(f"{index}: 'weight_map': {name[:120]!r} is not in {file_name}")
            files[name] = opened[file_name]
        return cls(files)

    def entry(self, name: str) -> StoredTensor | None:
        """What a header says of a tensor; None when the folder has none of this name."""
        file = self.files.get(name)
        return None if file is None else file.entries[name]

    def read(self, name: str) -> Tensor:
        """A tensor, from disk."""
        return self.files[name][name]


def model_folder(source: Path) -> Path:
    """The folder with the ``config.json``: ``source``, or the snapshot in it where it is a model of
    the hub's cache.

    Raises:
        DataError: it is neither.
    """
    if (source / "config.json").is_file():
        return source
    snapshots = source / "snapshots"
    if not snapshots.is_dir():
        raise DataError(
            f"{source}: is no model folder: it has no config.json",
            "Give a folder that transformers has saved, one of the hub's cache "
            "(models--org--name), or hf://org/name.",
        )
    main = source / "refs" / "main"
    found = sorted(
        folder.name for folder in snapshots.iterdir() if (folder / "config.json").is_file()
    )
    if (
        main.is_file()
        and (name := main.read_text(encoding="utf-8", errors="replace").strip()) in found
    ):
        return snapshots / name
    if len(found) != 1:
        raise DataError(
            f"{source}: has {len(found)} snapshots with a config.json, and no main one",
            "Give the folder of one of them: "
            + ", ".join(str(snapshots / name) for name in found[:5])
            if found
            else "Download the model again: its cache is incomplete.",
        )
    return snapshots / found[0]


def fetched(address: str) -> Path:
    """The folder of ``hf://org/name`` or ``hf://org/name@revision``, downloaded where the hub's
    cache lacks it.

    Raises:
        DataError: the address is none, or the hub has no such model, or cannot be reached.
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
            "pip install 'arb-ternary-interchange[hub]', or download the folder and give its path.",
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
