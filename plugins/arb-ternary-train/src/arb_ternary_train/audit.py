"""Counts everything that a model stores: what is ternary, what is float, and the bytes of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from attrs import asdict, fields, frozen
from torch import Tensor, nn

from arb_ternary.ternary.models import ternary_modules
from arb_ternary.ternary.module import TernaryModule

_TERNARY: Final = "ternary weights (packed)"
_BIAS: Final = "integer biases"
_TRAINABLE: Final = "float parameters, trainable"
_FROZEN: Final = "float parameters, frozen"
_FLOAT_BUFFERS: Final = "float buffers"
_OTHERS: Final = "other integer buffers"
_PARAMETER_ROWS: Final = frozenset({_TERNARY, _BIAS, _TRAINABLE, _FROZEN})
_TRAINING_ROWS: Final = frozenset({"votes", "exponent votes", "control words"})
#: The kind of a ternary module's buffer, by its name.
_BUFFERS: Final = {
    "weight": _TERNARY,
    "exponent": "exponents",
    "exponent_origin": "exponents",
    "bias_exponent": "exponents",
    "votes": "votes",
    "bias_votes": "votes",
    "exponent_votes": "exponent votes",
    "correlation": "exponent votes",
    "steps": "exponent votes",
    "bias": _BIAS,
    "control": "control words",
}


@frozen
class AuditRow:
    """One kind of tensor: number of elements, and their bytes."""

    what: str
    elements: int
    nbytes: int


@frozen
class Audit:
    """Everything that a model stores.

    Attributes:
        rows: elements and bytes by kind of tensor.
        ternary_weights: number of trits.
        float_parameters: elements of float parameters.
        float_buffers: elements of float buffers.
        working_bytes: what ternary modules hold within a step only: gradient statistics and the
            scale of votes, O(N + K) per weight, and accumulators of 2 bits, which every step
            clears.
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
        """Whether there is at least one trit, no float parameter and no float buffer."""
        return self.ternary_weights > 0 and self.float_parameters == 0 and self.float_buffers == 0

    @property
    def parameters(self) -> int:
        """Number of trits, integer biases and float parameters."""
        return sum(row.elements for row in self.rows if row.what in _PARAMETER_ROWS)

    @property
    def state_bytes(self) -> int:
        """Persistent bytes of training: all parameters, all buffers and the optimizer's tensors."""
        return sum(row.nbytes for row in self.rows) + self.optimizer_bytes

    @property
    def state_bits_per_parameter(self) -> float:
        """Persistent training state in bits per parameter."""
        return 8.0 * self.state_bytes / self.parameters if self.parameters else 0.0

    @property
    def model_bytes(self) -> int:
        """Bytes of the model alone, without what only training needs."""
        return sum(row.nbytes for row in self.rows if row.what not in _TRAINING_ROWS)

    def table(self) -> list[tuple[str, str, str]]:
        """Return rows of text: what, elements, bytes. Kinds that do not occur are left out."""
        rows = [
            (row.what, f"{row.elements:,}", f"{row.nbytes:,}") for row in self.rows if row.elements
        ]
        return [
            *rows,
            ("optimizer state", "", f"{self.optimizer_bytes:,}"),
            ("total persistent state", f"{self.parameters:,} parameters", f"{self.state_bytes:,}"),
            ("bits per parameter", "", f"{self.state_bits_per_parameter:.3f}"),
            ("working memory (not state)", "", f"{self.working_bytes:,}"),
        ]

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Audit:
        """Return the audit of which ``content`` is the JSON.

        Raises:
            KeyError: something is missing.
            TypeError: something has another type.
        """
        rows = tuple(AuditRow(**row) for row in content["rows"])
        numbers = {each.name: content[each.name] for each in fields(cls) if each.name != "rows"}
        return cls(rows=rows, **numbers)

    def to_json(self) -> dict[str, Any]:
        """Return plain numbers for reports."""
        return {
            **asdict(self),
            "pure": self.pure,
            "parameters": self.parameters,
            "state_bytes": self.state_bytes,
            "state_bits_per_parameter": self.state_bits_per_parameter,
        }


def audit(model: nn.Module, optimizer: Any = None) -> Audit:
    """Count what ``model`` (and ``optimizer``, if given) stores. Tied tensors count once.

    Accumulators that were left out when a run was loaded are counted: the run stores them.
    """
    modules = ternary_modules(model)

    # Kinds in the order of the table; those of the core occur in every audit.
    kinds = [*dict.fromkeys(_BUFFERS.values()), _TRAINABLE, _FROZEN]
    found: dict[str, list[Tensor]] = {kind: [] for kind in (*kinds, _FLOAT_BUFFERS, _OTHERS)}
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            kind = _kind_of_buffer(module, name, buffer)
            if kind is not None:
                found[kind].append(buffer)
    for _, ternary in modules:
        found[_BUFFERS["votes"]] += _left_out(ternary)
    for parameter in model.parameters():
        found[_TRAINABLE if parameter.requires_grad else _FROZEN].append(parameter)

    trits = sum(module.shape.out_features * module.shape.in_features for _, module in modules)
    # A packed tensor has fewer elements than weights.
    logical = {_TERNARY: trits}
    rows = {}
    for kind, tensors in found.items():
        distinct = _distinct(tensors)
        elements = logical.get(kind, sum(tensor.numel() for tensor in distinct))
        rows[kind] = AuditRow(kind, elements, sum(tensor.nbytes for tensor in distinct))
    working = [tensor for _, module in modules for tensor in module.working_memory()]
    return Audit(
        rows=tuple(rows.values()),
        ternary_weights=trits,
        float_parameters=rows[_TRAINABLE].elements + rows[_FROZEN].elements,
        float_buffers=rows[_FLOAT_BUFFERS].elements,
        working_bytes=sum(tensor.nbytes for tensor in working),
        optimizer_bytes=optimizer_state_bytes(optimizer),
    )


def optimizer_state_bytes(optimizer: Any) -> int:
    """Return the bytes of the tensors in an optimizer's state dict, such as its moments."""
    if optimizer is None:
        return 0
    tensors = _distinct(tensors_in(optimizer.state_dict()))
    return sum(tensor.nbytes for tensor in tensors)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in mappings, lists and tuples, at any depth."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def _distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return each tensor once, even if several names share it."""
    return list({id(tensor): tensor for tensor in tensors}.values())


def _kind_of_buffer(module: nn.Module, name: str, buffer: Tensor) -> str | None:
    """Return the kind of a buffer of ``module``; None if nothing in it outlives a step."""
    if isinstance(module, TernaryModule) and name in _BUFFERS:
        # With 2 bits every vote crosses the only threshold that there is.
        return None if name == "votes" and module.shape.vote_bits == 2 else _BUFFERS[name]
    return _FLOAT_BUFFERS if buffer.is_floating_point() else _OTHERS


def _left_out(module: TernaryModule) -> list[Tensor]:
    """Return the accumulators that ``module`` was made without, as tensors without memory."""
    shape = module.shape
    if module.accumulates or shape.vote_bits == 2:
        return []
    dtype = torch.int8 if shape.vote_bits == 8 else torch.uint8
    columns = -(-shape.in_features * shape.vote_bits // 8)
    return [torch.empty(shape.out_features, columns, dtype=dtype, device="meta")]
