"""Batches of the core from the batches of any dataloader: tensors, tuples, mappings.

Shapes: ``B`` samples, ``S`` positions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from arb_ternary.errors import DataError, nearest
from arb_ternary.protocols.data import Batch

#: What may accompany the inputs, and the dtype that it becomes.
_BESIDE: Final = {"targets": torch.int64, "loss_mask": torch.bool}
_KNOWN: Final = {"input_ids", "sample_ids", *_BESIDE}


def as_batch(raw: Any) -> Batch:
    """Return the samples in ``raw``, before anything is hidden.

    A mapping has ``input_ids`` ``[B, S]`` and optionally ``sample_ids`` ``[B]``, ``targets`` and
    ``loss_mask`` ``[B, S]``; a tuple has inputs and optionally targets. Samples without ids are
    identified by a digest of their tokens. The token after the last is not known; the last one is
    repeated. Other tensors are extras of the batch.

    Raises:
        DataError: there are no token ids, or shapes or dtypes are wrong.
    """
    if isinstance(raw, Batch):
        return raw
    given = _as_mapping(raw)
    inputs_BS = _tokens(given["input_ids"])
    extras = {
        key: value
        for key, value in given.items()
        if isinstance(value, Tensor) and key not in _KNOWN
    }
    for key, dtype in _BESIDE.items():
        if given.get(key) is None:
            continue
        value_BS = torch.as_tensor(given[key])
        if value_BS.shape != inputs_BS.shape:
            raise DataError(
                f"batch: {key!r} has the shape {tuple(value_BS.shape)}, and 'input_ids' "
                f"{tuple(inputs_BS.shape)}"
            )
        extras[key] = value_BS.to(dtype)
    tokens_BT = torch.cat((inputs_BS, inputs_BS[:, -1:]), dim=1)
    return Batch(tokens_BT, _sample_ids(given.get("sample_ids"), inputs_BS), extras)


def _as_mapping(raw: Any) -> Mapping[str, Any]:
    """Return a batch of a dataloader as a mapping that has ``input_ids``."""
    if isinstance(raw, Tensor):
        return {"input_ids": raw}
    if isinstance(raw, tuple | list):
        if len(raw) not in {1, 2}:
            raise DataError(
                f"batch: a tuple has inputs, or inputs and targets, not {len(raw)} items"
            )
        return dict(zip(("input_ids", "targets"), raw, strict=False))
    if not isinstance(raw, Mapping):
        raise DataError(
            "batch: must be a mapping, a tensor, a tuple of tensors or a batch of the core, not "
            f"{type(raw).__name__}"
        )
    if "input_ids" not in raw:
        close = nearest("input_ids", [str(key) for key in raw])
        raise DataError(
            f"batch: has no 'input_ids'; its keys are {', '.join(map(str, raw)) or 'none'}",
            f"Rename {close!r} to 'input_ids'." if close else "",
        )
    return raw


def _tokens(given: Any) -> Tensor:
    tokens_BS = torch.as_tensor(given)
    if tokens_BS.dim() != 2 or tokens_BS.is_floating_point() or tokens_BS.dtype == torch.bool:
        raise DataError(
            f"batch: token ids must be whole numbers [B, S], not {tokens_BS.dtype} "
            f"{list(tokens_BS.shape)}"
        )
    return tokens_BS.to(torch.int64)


def _sample_ids(given: Any, inputs_BS: Tensor) -> Tensor:
    if given is None:
        return content_ids(inputs_BS)
    ids_B = torch.as_tensor(given)
    if ids_B.shape != inputs_BS.shape[:1] or ids_B.is_floating_point():
        raise DataError(
            f"batch: 'sample_ids' must be {inputs_BS.shape[0]} whole numbers, not {ids_B.dtype} of "
            f"shape {tuple(ids_B.shape)}"
        )
    return ids_B.to(torch.int64)


def content_ids(tokens_BS: Tensor) -> Tensor:
    """Return 63 bits of BLAKE2b of each row, int64 ``[B]``; equal rows have equal ids."""
    rows_BS = tokens_BS.detach().to("cpu", torch.int64).contiguous().numpy()
    ids = [
        int.from_bytes(hashlib.blake2b(row.tobytes(), digest_size=8).digest(), "little") >> 1
        for row in rows_BS
    ]
    return torch.tensor(ids, dtype=torch.int64, device=tokens_BS.device)
