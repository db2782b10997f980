"""What is in a model file, a run or a checkpoint, without reading its weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from arb_ternary.config.fields import config_fields, default_of, to_plain
from arb_ternary.config.structure import options_class
from arb_ternary.plugins.manager import manager
from arb_ternary_train.checkpoint import model_entries
from arb_ternary_train.directory import RunDirectory
from arb_ternary_train.init_from import checkpoint_path
from arb_ternary_train.safetensors_file import StoredTensor

#: Options that are shown whatever they are.
_SIZES: Final = ("width", "layers", "heads")
#: What only training needs of a module, by the last part of a tensor's name.
_TRAINING: Final = (
    "votes",
    "exponent_votes",
    "bias_votes",
    "exponent_origin",
    "control",
    "correlation",
    "steps",
)

#: Integers that say which, not how much: no parameters.
_INDICES: Final = ("planes",)


def inspect_path(path: str, name: str | None = None) -> Mapping[str, Any]:
    """What is in a run directory, a checkpoint, or whatever the importer ``name`` (None: one of
    them) recognises.

    Keys are those of ``Importer.inspect``, and ``path``; errors those of :func:`inspect_run` and
    ``find_source``.
    """
    from arb_ternary_interchange.importing import find_source  # which builds models

    if name is None and is_run(Path(path)):
        return {"path": path, **inspect_run(Path(path))}
    source = find_source(path, name)
    return {"path": path, **source.importer.inspect(source.path)}


def is_run(path: Path) -> bool:
    """Whether ``path`` is a run directory or a checkpoint."""
    return RunDirectory(path).exists() or (path / "manifest.json").is_file()


def inspect_run(path: Path) -> dict[str, Any]:
    """What is in a run directory (its newest checkpoint) or in one of its checkpoints; keys as
    those of ``Importer``.

    Raises:
        CheckpointError: there is no checkpoint.
        DataError: the checkpoint's file is damaged.
    """
    from arb_ternary_train.loading import load_config

    checkpoint = checkpoint_path(path)
    directory = RunDirectory.existing(
        path if RunDirectory(path).exists() else path.resolve().parent.parent
    )
    config = load_config(directory.config_file).config
    record = directory.record()
    model = to_plain(config.model, given=False)
    return {
        "format": "arb-ternary run",
        **describe_model(
            model if isinstance(model, dict) else {"name": model},
            record["vocabulary_size"],
            directory.attachments(),
        ),
        **count_tensors(model_entries(checkpoint)),
        "unmapped": record.get("imported", {}).get("notes", []),
        "metadata": {
            "name": config.name,
            "checkpoint": checkpoint.name,
            "data": record["data"],
            "versions": record["versions"],
            **{
                key: record[key]
                for key in ("imported", "init_from", "init_skip")
                if record.get(key)
            },
        },
    }


def describe_model(
    model: Mapping[str, Any], vocabulary_size: int, attachments: Mapping[str, Any]
) -> dict[str, Any]:
    """Architecture, vocabulary, tokenizer and scales of a model of this program, from its section
    of a config.
    """
    tokenizer = attachments.get("tokenizer")
    group = model.get("group_size")
    return {
        "architecture": _architecture(model),
        "vocabulary_size": vocabulary_size,
        "tokenizer": tokenizer.get("kind") if isinstance(tokenizer, dict) else None,
        "scales": "powers of two" + ("" if group is None else f", one a {_group(group)}"),
    }


def _architecture(model: Mapping[str, Any]) -> str:
    """The model's name, sizes, and options that are not at their defaults, on one line."""
    name = str(model.get("name"))
    registered = manager().registry.find("model", name)
    cls = None if registered is None else options_class(registered.spec)
    usual = (
        {} if cls is None else {str(field.alias): default_of(field) for field in config_fields(cls)}
    )
    parts = [name]
    for key, value in model.items():
        if (
            key == "name"
            or (key not in _SIZES and to_plain(usual.get(key)) == value)
            or value is None
        ):
            continue
        shown = " ".join(map(str, value)) if isinstance(value, list) else str(value).lower()
        parts.append(key if value is True else f"{key} {shown}")
    return ", ".join(parts)


def _group(size: Any) -> str:
    return str(size) if isinstance(size, str) else f"group of {size}"


def count_tensors(entries: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """Tensors, parameters and bits a parameter of a state dict in a file, or in several.

    Accumulators and what else only training needs do not count as bits. ``parameters`` is None
    where accumulators of 2 bits, packed as the weights are, leave open how many weights there are.
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
            {"name": name, "shape": list(entry.shape), "type": entry.dtype, "bytes": entry.nbytes}
            for name, entry in entries.items()
        ],
    }
