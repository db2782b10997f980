"""Describe a model file, a run or a checkpoint without reading its weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from arb_ternary.config.fields import config_fields, default_of, to_plain
from arb_ternary.config.structure import options_class
from arb_ternary.plugins.manager import manager
from arb_ternary_train.checkpoint import model_entries
from arb_ternary_train.directory import RunDirectory
from arb_ternary_train.model_state import checkpoint_path
from arb_ternary_train.safetensors_file import StoredTensor

#: Options that are shown even if they have their defaults.
_SIZES: Final = ("width", "layers", "heads")
#: Tensors of a module that only training needs, by the last part of their names.
_TRAINING: Final = (
    "votes",
    "exponent_votes",
    "bias_votes",
    "exponent_origin",
    "control",
    "correlation",
    "steps",
)
#: Tensors of integers that are indices and therefore not parameters.
_INDICES: Final = ("planes",)


def inspect_path(path: str, name: str | None = None) -> Mapping[str, Any]:
    """Describe a run directory, a checkpoint, or whatever the importer ``name`` reads (None: the
    one that recognises it).

    Returns the keys of ``Importer.inspect``, and ``path``. Raises as :func:`inspect_run` and
    ``find_source`` do.
    """
    from arb_ternary_interchange.importing import find_source  # imports all that builds models

    if name is None and is_run(Path(path)):
        return {"path": path, **inspect_run(Path(path))}
    source = find_source(path, name)
    return {"path": path, **source.importer.inspect(source.path)}


def is_run(path: Path) -> bool:
    """Whether ``path`` is a run directory or a checkpoint."""
    return RunDirectory(path).exists() or (path / "manifest.json").is_file()


def inspect_run(path: Path) -> dict[str, Any]:
    """Describe the newest checkpoint of a run directory, or a checkpoint, with the keys of
    ``Importer.inspect``.

    Raises:
        CheckpointError: there is no checkpoint.
        DataError: the checkpoint's file is damaged.
    """
    from arb_ternary_train.loading import load_config

    checkpoint = checkpoint_path(path)
    run = path if RunDirectory(path).exists() else path.resolve().parent.parent
    directory = RunDirectory.existing(run)
    config = load_config(directory.config_file).config
    record = directory.record()
    model = to_plain(config.model, given=False)
    section = model if isinstance(model, dict) else {"name": model}
    metadata = {
        "name": config.name,
        "checkpoint": checkpoint.name,
        "data": record["data"],
        "versions": record["versions"],
    }
    for key in ("imported", "init_from", "init_skip"):
        if record.get(key):
            metadata[key] = record[key]
    return {
        "format": "arb-ternary run",
        **describe_model(section, record["vocabulary_size"], directory.attachments()),
        **count_tensors(model_entries(checkpoint)),
        "unmapped": record.get("imported", {}).get("notes", []),
        "metadata": metadata,
    }


def describe_model(
    model: Mapping[str, Any], vocabulary_size: int, attachments: Mapping[str, Any]
) -> dict[str, Any]:
    """Describe architecture, vocabulary, tokenizer and scales of a model of this program, from its
    section of a config.
    """
    tokenizer = attachments.get("tokenizer")
    scales = "powers of two"
    group = model.get("group_size")
    if isinstance(group, str):
        scales += f", one per {group}"
    elif group is not None:
        scales += f", one per group of {group}"
    return {
        "architecture": _architecture(model),
        "vocabulary_size": vocabulary_size,
        "tokenizer": tokenizer.get("kind") if isinstance(tokenizer, dict) else None,
        "scales": scales,
    }


def _architecture(model: Mapping[str, Any]) -> str:
    """Return the model's name, its sizes and the options that are not at their defaults, on one
    line.
    """
    name = str(model.get("name"))
    registered = manager().registry.find("model", name)
    cls = None if registered is None else options_class(registered.spec)
    defaults = {}
    if cls is not None:
        defaults = {str(field.alias): default_of(field) for field in config_fields(cls)}

    parts = [name]
    for key, value in model.items():
        is_default = key not in _SIZES and to_plain(defaults.get(key)) == value
        if key == "name" or value is None or is_default:
            continue
        if value is True:
            parts.append(key)
        elif isinstance(value, list):
            parts.append(f"{key} {' '.join(map(str, value))}")
        else:
            parts.append(f"{key} {str(value).lower()}")
    return ", ".join(parts)


def count_tensors(entries: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """Count the parameters of a state dict in a file, and list its tensors.

    ``bits_per_weight`` leaves out accumulators and everything else that only training needs.
    ``parameters`` is None if there are accumulators of 2 bits: they are packed as the weights are,
    so that the file does not show the number of weights.
    """
    modules: dict[str, set[str]] = {}
    for name in entries:
        prefix, _, last = name.rpartition(".")
        modules.setdefault(prefix, set()).add(last)

    parameters = 0
    nbytes = 0
    exact = True
    for name, entry in entries.items():
        prefix, _, last = name.rpartition(".")
        ternary = {"weight", "votes", "control"} <= modules[prefix]
        if ternary and last == "votes":
            exact &= entry.dtype == "I8"
            parameters += math.prod(entry.shape)
        elif last == "bias" or not (ternary or last in _TRAINING or last in _INDICES):
            parameters += math.prod(entry.shape)
        if not (ternary and last in _TRAINING):
            nbytes += entry.nbytes
    return {
        "parameters": parameters if exact else None,
        "bits_per_weight": 8 * nbytes / parameters if exact and parameters else None,
        "tensors": [
            tensor_row(name, entry.shape, entry.dtype, entry.nbytes)
            for name, entry in entries.items()
        ],
    }


def tensor_row(name: str, shape: Sequence[int], kind: str, nbytes: int) -> dict[str, Any]:
    """Return an item of the list under ``tensors`` of ``Importer.inspect``."""
    return {"name": name, "shape": list(shape), "type": kind, "bytes": nbytes}


def printable(text: str) -> str:
    """Return ``text`` as a terminal can show it: escaped if a character cannot be printed."""
    return text if text.isprintable() else repr(text)
