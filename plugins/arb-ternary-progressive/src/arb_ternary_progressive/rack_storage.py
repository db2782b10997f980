"""A rack in a file of its own: safetensors, with what the rack is made of as JSON in the header."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import attrs
import safetensors
from attrs import frozen
from torch import Tensor

from arb_ternary.errors import CheckpointError
from arb_ternary_progressive.rack import Rack
from arb_ternary_train.checkpoint_format import tensor_digest, write_tensors
from arb_ternary_train.durable import replacing
from arb_ternary_train.model_state import load_state

FORMAT: Final = "arb-ternary-rack"
VERSION: Final = 1

#: Options of the model that follow the stacks, or decide only how new ones are born.
_FREE = frozenset({"layers", "zero_head", "zero_residual"})


@frozen(eq=False)
class StoredRack:
    """What a file holds.

    Attributes:
        path: the file.
        header: what the rack is made of.
        tensors: its state dict.
    """

    path: Path
    header: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


def write_rack(rack: Rack, path: Path) -> None:
    """Write ``rack`` with its adapters to ``path``; a file that exists is replaced once the new one
    is complete.

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
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{path}: the rack cannot be written: {error}") from error


def read_rack(path: Path) -> StoredRack:
    """Read and check a file.

    Raises:
        CheckpointError: it is missing, damaged, or holds something else.
    """
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get("arb_ternary", "")
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118  # not a dict
    except FileNotFoundError:
        raise CheckpointError(f"{path}: there is no such file") from None
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{path}: the file is damaged or truncated: {error}") from error
    try:
        header = json.loads(text)
    except ValueError:
        header = None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise CheckpointError(
            f"{path}: this is not a rack", "A rack is written by ProgressiveRackBuilder.save()."
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
    """Give ``rack``, which has no stack yet, the stacks, adapters and weights of a file.

    Raises:
        CheckpointError: the file's rack has another embedding, head or time.
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
