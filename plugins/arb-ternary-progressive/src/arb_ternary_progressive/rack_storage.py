"""Files of racks: a model's tensors as checkpoints hold them, with the rack's structure as JSON in
the header.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import attrs

from arb_ternary.errors import CheckpointError, DataError
from arb_ternary_interchange.safetensors.exporter import write_export
from arb_ternary_progressive.rack import Rack
from arb_ternary_train.checkpoint_format import VerifiedTensors, tensor_digest
from arb_ternary_train.identity import differences
from arb_ternary_train.model_state import ModelState, load_state
from arb_ternary_train.safetensors_file import SafetensorsFile

FORMAT: Final = "arb-ternary-rack"
VERSION: Final = 1

#: Options that follow from the stacks, or concern only the initial weights of new ones.
_FREE = frozenset({"layers", "zero_head", "zero_residual"})


def write_rack(rack: Rack, path: Path) -> None:
    """Write ``rack`` with its adapters to ``path``, atomically.

    Raises:
        ArbError: the file cannot be written.
    """
    header = {
        "format": FORMAT,
        "version": VERSION,
        **_identity(rack),
        "structure": rack.structure(),
        "digests": {name: tensor_digest(tensor) for name, tensor in rack.state_dict().items()},
    }
    write_export(path, ModelState(rack), header)


def load_rack(rack: Rack, path: Path) -> None:
    """Give ``rack``, which has no stacks, the stacks, adapters and weights of a file.

    Raises:
        CheckpointError: the file is missing, damaged, no rack, or of a rack with another embedding,
            head or time.
    """
    try:
        file = SafetensorsFile(path)
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
    here = _identity(rack)
    faults = differences({key: header[key] for key in here}, here)
    if faults:
        raise CheckpointError(f"{path}: the rack in it is of another model", "\n".join(faults))
    tensors = dict(VerifiedTensors(file, header["digests"]))
    rack.restore_structure(header["structure"])
    load_state(rack, tensors, str(path))


def _identity(rack: Rack) -> dict[str, Any]:
    options = attrs.asdict(rack.config, filter=lambda attribute, _: attribute.name not in _FREE)
    embedding = rack.time_embedding
    return {
        "model": json.loads(json.dumps(options)),
        "vocabulary_size": rack.vocabulary_size,
        "mask_token": rack.mask_token,
        "time": None if embedding is None else repr(embedding).splitlines()[0],
    }
