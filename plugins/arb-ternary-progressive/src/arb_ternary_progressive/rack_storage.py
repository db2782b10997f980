"""Files of racks: safetensors, with the structure of the rack as JSON in the header."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import attrs
from attrs import frozen
from torch import Tensor

from arb_ternary.errors import CheckpointError, DataError
from arb_ternary_progressive.rack import Rack
from arb_ternary_train.checkpoint_format import tensor_digest, write_tensors
from arb_ternary_train.durable import replacing
from arb_ternary_train.model_state import load_state
from arb_ternary_train.safetensors_file import SafetensorsFile

FORMAT: Final = "arb-ternary-rack"
VERSION: Final = 1

#: Options that follow from the stacks, or concern only the initial weights of new ones.
_FREE = frozenset({"layers", "zero_head", "zero_residual"})


@frozen(eq=False)
class StoredRack:
    """The content of a file.

    Attributes:
        path: the file.
        header: the structure of the rack, and the model that it belongs to.
        tensors: its state dict.
    """

    path: Path
    header: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


def write_rack(rack: Rack, path: Path) -> None:
    """Write ``rack`` with its adapters to ``path``, atomically.

    Raises:
        CheckpointError: the file cannot be written.
    """
    tensors = rack.state_dict()
    header = {
        "format": FORMAT,
        "version": VERSION,
        **_identity(rack),
        "structure": rack.structure(),
        "digests": {name: tensor_digest(tensor) for name, tensor in tensors.items()},
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as new:
            write_tensors(new, tensors, json.dumps(header, sort_keys=True))
    except OSError as error:
        raise CheckpointError(f"{path}: the rack cannot be written: {error}") from error


def read_rack(path: Path) -> StoredRack:
    """Read and check a file.

    Raises:
        CheckpointError: it is missing, damaged, or not a rack.
    """
    if not path.exists():
        raise CheckpointError(f"{path}: there is no such file")
    try:
        file = SafetensorsFile(path)
        tensors = dict(file)
    except DataError as error:
        raise CheckpointError(error.what) from error
    try:
        header = json.loads(file.metadata.get("arb_ternary", ""))
    except ValueError:
        header = None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise CheckpointError(
            f"{path}: this is not the file of a rack",
            "Racks are written by ProgressiveRackBuilder.save().",
        )
    if header.get("version") != VERSION:
        raise CheckpointError(
            f"{path}: rack format version {header.get('version')!r}; this program reads {VERSION}"
        )
    if header["digests"].keys() != tensors.keys():
        raise CheckpointError(f"{path}: its tensors are not those that its header lists")
    for name, digest in header["digests"].items():
        if tensor_digest(tensors[name]) != digest:
            raise CheckpointError(
                f"{path}: tensor {name!r} is damaged: its checksum is not the one in the header"
            )
    return StoredRack(path, header, tensors)


def load_into(rack: Rack, stored: StoredRack) -> None:
    """Give ``rack``, which has no stacks, the stacks, adapters and weights of a file.

    Raises:
        CheckpointError: the rack in the file has another embedding, head or time.
    """
    here = _identity(rack)
    faults = []
    for key, value in here.items():
        there = stored.header[key]
        if isinstance(value, dict) and isinstance(there, dict):
            faults += [
                f"{name}: {there.get(name)!r} there, {value[name]!r} here"
                for name in value
                if there.get(name) != value[name]
            ]
        elif value != there:
            faults.append(f"{key}: {there!r} there, {value!r} here")
    if faults:
        raise CheckpointError(
            f"{stored.path}: the rack in it is of another model", "\n".join(faults)
        )
    rack.restore_structure(stored.header["structure"])
    load_state(rack, stored.tensors, str(stored.path))


def _identity(rack: Rack) -> dict[str, Any]:
    options = attrs.asdict(rack.config, filter=lambda attribute, _: attribute.name not in _FREE)
    embedding = rack.time_embedding
    return {
        "model": json.loads(json.dumps(options)),
        "vocabulary_size": rack.vocabulary_size,
        "mask_token": rack.mask_token,
        "time": None if embedding is None else repr(embedding).splitlines()[0],
    }
