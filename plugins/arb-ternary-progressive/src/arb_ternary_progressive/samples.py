"""Read samples from the batches of any dataloader: tensors, tuples, mappings, core batches.

Shapes: ``B`` samples, ``S`` positions.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor

from arb_ternary.errors import DataError, nearest
from arb_ternary.protocols.data import Batch

#: Keys of a mapping that are read here; all others pass through.
KNOWN = ("input_ids", "sample_ids", "targets", "loss_mask")


@frozen(eq=False)
class Samples:
    """Samples before anything is hidden.

    Attributes:
        input_ids: int64 ``[B, S]``.
        sample_ids: int64 ``[B]``: identity of each sample.
        targets: int64 ``[B, S]``; None if the dataloader gives none.
        loss_mask: bool ``[B, S]``: positions that may count; None if the dataloader gives none.
        extras: everything else that it gives.
    """

    input_ids: Tensor
    sample_ids: Tensor
    targets: Tensor | None = None
    loss_mask: Tensor | None = None
    extras: Mapping[str, Any] = field(factory=dict)

    def batch(self) -> Batch:
        """Return a batch of the core, for masking strategies.

        The token after the last is not known; the last one is repeated.
        """
        tokens_BT = torch.cat((self.input_ids, self.input_ids[:, -1:]), dim=1)
        given = {**self.extras, "targets": self.targets, "loss_mask": self.loss_mask}
        tensors = {key: value for key, value in given.items() if isinstance(value, Tensor)}
        return Batch(tokens_BT, self.sample_ids, tensors)


def as_samples(
    raw: Batch | Mapping[str, Any] | Tensor | tuple[Tensor, ...] | list[Tensor],
) -> Samples:
    """Return the samples in ``raw``.

    A mapping has ``input_ids`` and optionally ``sample_ids``, ``targets`` and ``loss_mask``; a
    tuple has inputs and optionally targets; of a batch of the core the first ``S`` tokens are the
    inputs. Samples without ids are identified by a digest of their tokens.

    Raises:
        DataError: there are no token ids, or shapes or dtypes are wrong.
    """
    if isinstance(raw, Batch):
        return Samples(_tokens(raw.data)[:, :-1], raw.sample_ids, extras=dict(raw.extras))
    given = _as_mapping(raw)
    inputs_BS = _tokens(given["input_ids"])
    for key in ("targets", "loss_mask"):
        if given.get(key) is not None and given[key].shape != inputs_BS.shape:
            raise DataError(
                f"batch: {key!r} has the shape {tuple(given[key].shape)}, and 'input_ids' "
                f"{tuple(inputs_BS.shape)}"
            )
    targets_BS = given.get("targets")
    loss_mask_BS = given.get("loss_mask")
    return Samples(
        inputs_BS,
        _sample_ids(given.get("sample_ids"), inputs_BS),
        targets=None if targets_BS is None else targets_BS.to(torch.int64),
        loss_mask=None if loss_mask_BS is None else loss_mask_BS.to(torch.bool),
        extras={key: value for key, value in given.items() if key not in KNOWN},
    )


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


def cache_keys(sample_ids_B: Tensor, time: Tensor | float | None = None) -> Tensor:
    """Return the keys of samples in a cache of hidden states, int64 ``[B]``.

    Args:
        sample_ids_B: int64 ``[B]``.
        time: the time if it is an input of the model: a number, or float ``[B]``. Hidden states
            depend on it then, and the keys are 64 bits of BLAKE2b of id and time. Without a time,
            the keys are the sample ids.
    """
    if time is None:
        return sample_ids_B
    times_B = torch.as_tensor(time, dtype=torch.float32).cpu().expand(len(sample_ids_B))
    keys = []
    for sample, moment in zip(sample_ids_B.tolist(), times_B.tolist(), strict=True):
        digest = hashlib.blake2b(struct.pack("<qf", sample, moment), digest_size=8).digest()
        keys.append(int.from_bytes(digest, "little", signed=True))
    return torch.tensor(keys, dtype=torch.int64, device=sample_ids_B.device)
