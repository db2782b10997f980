"""The count of everything that a model stores: what is ternary, what is float, and the bytes of
each.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from attrs import asdict, frozen
from torch import Tensor, nn

from arb_ternary.ternary.models import is_stored, stored_modules, ternary_modules
from arb_ternary.ternary.module import TernaryModule


@frozen
class AuditRow:
    """One kind of tensor: how many elements, in how many bytes."""

    what: str
    elements: int
    nbytes: int


@frozen
class Audit:
    """What a model stores: counts by kind, and elements of the kinds that decide whether it is
    pure.

    Attributes:
        working_bytes: what ternary modules hold within a step only: gradient statistics and the
            scale of votes, O(N + K) a weight, and accumulators of 2 bits, which every step clears.
        optimizer_bytes: tensors that the optimizer keeps.
    """

    rows: tuple[AuditRow, ...]
    ternary_weights: int
    float_parameters: int
    float_buffers: int
    working_bytes: int
    optimizer_bytes: int

    @property
    def pure(self) -> bool:
        """No float parameter and no float buffer, and at least one trit."""
        return self.ternary_weights > 0 and self.float_parameters == 0 and self.float_buffers == 0

    @property
    def parameters(self) -> int:
        """Learnable numbers: trits, integer weights of other formats, integer biases and float
        parameters.
        """
        return sum(row.elements for row in self.rows if row.what in _PARAMETER_ROWS)

    @property
    def state_bytes(self) -> int:
        """Persistent bytes of training: all parameters, all buffers and the optimizer's tensors."""
        return sum(row.nbytes for row in self.rows) + self.optimizer_bytes

    @property
    def state_bits_per_parameter(self) -> float:
        """Persistent training state in bits a learnable number."""
        return 8.0 * self.state_bytes / self.parameters if self.parameters else 0.0

    def table(self) -> list[tuple[str, str, str]]:
        """Rows of text: what, elements, bytes; every kind of core's, also where it counts zero."""
        return [
            *((row.what, f"{row.elements:,}", f"{row.nbytes:,}") for row in self.rows),
            ("optimizer state", "", f"{self.optimizer_bytes:,}"),
            ("total persistent state", f"{self.parameters:,} parameters", f"{self.state_bytes:,}"),
            ("bits a parameter", "", f"{self.state_bits_per_parameter:.3f}"),
            ("working memory (not state)", "", f"{self.working_bytes:,}"),
        ]

    def to_json(self) -> dict[str, Any]:
        """Plain numbers for reports."""
        derived = ("pure", "parameters", "state_bytes", "state_bits_per_parameter")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}


_TERNARY = "ternary weights (packed)"
_BIAS = "integer biases"
_STORED = "integer weights of other formats"
_TRAINABLE = "float parameters, trainable"
_FROZEN = "float parameters, frozen"
_FLOAT_BUFFERS = "float buffers"
_OTHERS = "other integer buffers"
_PARAMETER_ROWS = frozenset({_TERNARY, _BIAS, _TRAINABLE, _FROZEN, _STORED})
#: The kind of a ternary module's buffer by its name.
_BUFFERS = {
    "weight": _TERNARY,
    **dict.fromkeys(("exponent", "exponent_origin", "bias_exponent"), "exponents"),
    **dict.fromkeys(("votes", "bias_votes"), "votes"),
    **dict.fromkeys(("exponent_votes", "correlation", "steps"), "exponent votes"),
    "bias": _BIAS,
    "control": "control words",
}


def _distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Each tensor once, though several names may share it."""
    return list({id(tensor): tensor for tensor in tensors}.values())


def optimizer_state_bytes(optimizer: Any) -> int:
    """Bytes of the tensors in an optimizer's state dict (its moments, for instance)."""
    if optimizer is None:
        return 0
    found: list[Tensor] = []

    def walk(value: Any) -> None:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, dict | list | tuple):
            for item in value.values() if isinstance(value, dict) else value:
                walk(item)

    walk(optimizer.state_dict())
    return sum(tensor.nbytes for tensor in _distinct(found))


def _kind(module: nn.Module, name: str, buffer: Tensor) -> str | None:
    """What a buffer of ``module`` is; None where nothing of it outlives a step."""
    if isinstance(module, TernaryModule) and name in _BUFFERS:
        # With 2 bits every vote crosses the only threshold there is.
        return None if name == "votes" and module.shape.vote_bits == 2 else _BUFFERS[name]
    if is_stored(module) and not buffer.is_floating_point():
        return "control words" if name == "control" else _STORED
    return _FLOAT_BUFFERS if buffer.is_floating_point() else _OTHERS


def _left_out(module: TernaryModule) -> list[Tensor]:
    """The accumulators that ``module`` was made without, without memory."""
    shape = module.shape
    if module.accumulates or shape.vote_bits == 2:
        return []
    dtype = torch.int8 if shape.vote_bits == 8 else torch.uint8
    columns = -(-shape.in_features * shape.vote_bits // 8)
    return [torch.empty(shape.out_features, columns, dtype=dtype, device="meta")]


def audit(model: nn.Module, optimizer: Any = None) -> Audit:
    """Count what ``model`` (and ``optimizer``, if given) stores. Tied tensors count once.

    Accumulators that were left out when a run was loaded count as there: they are part of what it
    stores.
    """
    modules = ternary_modules(model)
    stored = stored_modules(model)
    kinds = [*dict.fromkeys(_BUFFERS.values()), _TRAINABLE, _FROZEN, *([_STORED] if stored else [])]
    found: dict[str, list[Tensor]] = {kind: [] for kind in (*kinds, _FLOAT_BUFFERS, _OTHERS)}
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            kind = _kind(module, name, buffer)
            if kind is not None:
                found[kind].append(buffer)
    found[_BUFFERS["votes"]] += [tensor for _, module in modules for tensor in _left_out(module)]
    for parameter in model.parameters():
        found[_TRAINABLE if parameter.requires_grad else _FROZEN].append(parameter)
    trits = sum(module.shape.out_features * module.shape.in_features for _, module in modules)
    # Packed, a weight has fewer elements than it counts for.
    logical = {_TERNARY: trits, _STORED: sum(module.stored_weights for _, module in stored)}
    rows = {}
    for kind, tensors in found.items():
        distinct = _distinct(tensors)
        elements = logical.get(kind, sum(tensor.numel() for tensor in distinct))
        rows[kind] = AuditRow(kind, elements, sum(tensor.nbytes for tensor in distinct))
    return Audit(
        rows=tuple(rows.values()),
        ternary_weights=trits,
        float_parameters=rows[_TRAINABLE].elements + rows[_FROZEN].elements,
        float_buffers=rows[_FLOAT_BUFFERS].elements,
        working_bytes=sum(
            tensor.nbytes for _, module in modules for tensor in module.working_memory()
        ),
        optimizer_bytes=optimizer_state_bytes(optimizer),
    )
