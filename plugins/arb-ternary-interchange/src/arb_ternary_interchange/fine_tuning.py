"""The config that an import writes: how the model can be fine-tuned."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from torch import nn

from arb_ternary.config.yaml_document import Document
from arb_ternary.optim.protocol import collect_trainable
from arb_ternary.plugins.manager import manager
from arb_ternary_interchange.protocols import ImportedModel
from arb_ternary_train.audit import audit
from arb_ternary_train.capabilities import checkpoints_activations, max_length
from arb_ternary_train.config import RunConfig
from arb_ternary_train.loading import structure_run

#: Weights from which a model is fine-tuned on one sequence per step, recomputing activations in the
#: backward pass.
_LARGE: Final = 100_000_000
_SMALL_PHASE: Final = {"steps": 500, "batch_size": 16, "block_size": 128, "warmup_steps": 25}
_LARGE_PHASE: Final = {"steps": 500, "batch_size": 1, "block_size": 256, "warmup_steps": 25}
# Learning rates of fine-tuning. For votes it is half of that of training from random weights: still
# lower rates learn less in as many steps when the new text differs much from the first one.
_OPTIMIZERS: Final[Mapping[str, Mapping[str, Any]]] = {
    "ternary": {"name": "scaled_votes", "lr": 0.05},
    "float": {"name": "adamw", "lr": 2e-4},
}


def data_section(tokenizer: Mapping[str, Any], vocabulary_size: int) -> dict[str, Any]:
    """Return a ``data:`` section that fits the ids of a model: the built-in text with the model's
    tokenizer, or a file of ids, which the user has to provide, if text cannot be encoded.
    """
    kind = tokenizer.get("kind", "ids")
    if kind == "ids":
        return {"name": "tokens", "train": "tokens.npy", "vocabulary_size": vocabulary_size}
    return {
        "name": "shakespeare",
        "tokenizer": "bytes" if kind == "bytes" else "{run}/tokenizer.json",
    }


def fine_tuning_config(
    imported: ImportedModel, model: nn.Module, directory: Path, source: str, seed: int
) -> RunConfig:
    """Return a config with which ``model`` can be fine-tuned.

    Args:
        imported: the model as its importer has read it.
        model: the model with its weights.
        directory: the run's directory.
        source: the source in the user's words, for errors.
        seed: the run's seed.
    """
    phase: dict[str, Any] = dict(_SMALL_PHASE)
    if audit(model).parameters >= _LARGE:
        phase = dict(_LARGE_PHASE)
        if checkpoints_activations(model):
            phase["activation_checkpointing"] = True
    longest = max_length(model)
    if longest is not None:
        phase["block_size"] = min(phase["block_size"], longest)

    trainable = collect_trainable(model).parts
    chosen = {kind: dict(_OPTIMIZERS[kind]) for kind in _OPTIMIZERS if trainable.get(kind)}
    optimizer: Any = next(iter(chosen.values()), "scaled_votes")
    if len(chosen) > 1:
        optimizer = {"name": "split", **chosen}

    data = {
        key: value.replace("{run}", str(directory)) if isinstance(value, str) else value
        for key, value in imported.data.items()
    }
    name = re.sub(r"[^A-Za-z0-9._-]", "-", directory.name).lstrip("._-")
    content = {
        "name": name or "imported",
        "seed": seed,
        "data": data,
        "model": dict(imported.model),
        "optimizer": optimizer,
        "phases": [{"name": "standard", **phase}],
    }
    document = Document(content, source=f"{source} (its config to fine-tune with)")
    return structure_run(document, manager().registry).config
