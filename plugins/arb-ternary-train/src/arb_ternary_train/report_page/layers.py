"""Flips per layer, from the checkpoints that a run kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from attrs import frozen
from torch import Tensor

from arb_ternary.ternary.encoding import TRITS_PER_BYTE, decode_at_rest
from arb_ternary_train.checkpoint import CheckpointStore, read_checkpoint
from arb_ternary_train.directory import RunDirectory

#: What a module with ternary weights stores beside them.
_BESIDE: Final = "control"


@frozen
class LayerFlips:
    """Trits that differ between the oldest and the newest checkpoint.

    Attributes:
        first: step of the oldest checkpoint.
        last: step of the newest one.
        flips: number of these trits by the name of the layer.
        weights: number of all trits by the name of the layer, if it is known.
    """

    first: int
    last: int
    flips: Mapping[str, int]
    weights: Mapping[str, int]


def read_layer_flips(directory: RunDirectory) -> LayerFlips | None:
    """Compare the checkpoints of a run; None if it kept fewer than two.

    Layers that are in one of them only, or have another shape there, are left out.

    Raises:
        CheckpointError: a checkpoint is damaged.
    """
    paths = CheckpointStore(directory.checkpoints).paths()
    if len(paths) < 2:
        return None
    old = read_checkpoint(paths[-1])
    new = read_checkpoint(paths[0])
    flips = {}
    weights = {}
    for name in new.model:
        layer, _, kind = name.rpartition(".")
        if kind != "weight" or f"{layer}.{_BESIDE}" not in new.model or name not in old.model:
            continue
        before = old.model[name]
        after = new.model[name]
        if before.dtype != torch.uint8 or before.shape != after.shape:
            continue
        flips[layer] = _count_flips(before, after)
        votes = new.model.get(f"{layer}.votes")
        if votes is not None and votes.dtype == torch.int8:  # a byte per weight
            weights[layer] = votes.numel()
    return LayerFlips(old.step, new.step, flips, weights)


def _count_flips(before: Tensor, after: Tensor) -> int:
    """Return the number of trits that differ between two packed weights."""
    differ = before != after
    old, new = (
        decode_at_rest(packed[differ].unsqueeze(1), TRITS_PER_BYTE) for packed in (before, after)
    )
    return int((old != new).sum())
