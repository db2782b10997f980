"""The count of everything that a model stores: what is ternary, what is float, and the bytes of each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from attrs import asdict, frozen
from torch import Tensor, nn

from arb_ternary.ternary.models import ternary_modules
from arb_ternary.ternary.stored import stored_modules

__all__ = ["Audit", "AuditRow", "audit", "optimizer_state_bytes"]


@frozen
class AuditRow:
    """One kind of tensor: how many elements, in how many bytes."""

    what: str
    elements: int
    nbytes: int


@frozen
class Audit:
    """What a model stores.

    Attributes:
        rows: counts by kind.
        ternary_weights: number of trits.
        float_parameters: elements of float parameters, trainable or frozen.
        float_buffers: elements of float buffers.
        working_bytes: what ternary modules hold within a step only: gradient statistics and the scale of votes,
            O(N + K) a weight, and accumulators of 2 bits, which every step clears.
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
        """Learnable numbers: trits, integer weights of other formats, integer biases and float parameters."""
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
        lines = [(row.what, f"{row.elements:,}", f"{row.nbytes:,}") for row in self.rows]
        lines.append(("optimizer state", "", f"{self.optimizer_bytes:,}"))
        lines.append(("total persistent state", f"{self.parameters:,} parameters", f"{self.state_bytes:,}"))
        lines.append(("bits a parameter", "", f"{self.state_bits_per_parameter:.3f}"))
        lines.append(("working memory (not state)", "", f"{self.working_bytes:,}"))
        return lines

    def to_json(self) -> dict[str, Any]:
        """Plain numbers for reports."""
        return {
            **asdict(self),
            "pure": self.pure,
            "parameters": self.parameters,
            "state_bytes": self.state_bytes,
            "state_bits_per_parameter": self.state_bits_per_parameter,
        }


_TERNARY = "ternary weights (packed)"
_BIAS = "integer biases"
_TRAINABLE = "float parameters, trainable"
_FROZEN = "float parameters, frozen"
_STORED = "integer weights of other formats"
_PARAMETER_ROWS = frozenset({_TERNARY, _BIAS, _TRAINABLE, _FROZEN, _STORED})


def _distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Each tensor once, though several names may share it."""
    return list({id(tensor): tensor for tensor in tensors}.values())


def _row(what: str, tensors: Iterable[Tensor], elements: int | None = None) -> AuditRow:
    found = _distinct(tensors)
    counted = sum(t.numel() for t in found) if elements is None else elements
    return AuditRow(what, counted, sum(t.nbytes for t in found))


def optimizer_state_bytes(optimizer: Any) -> int:
    """Bytes of the tensors in an optimizer's state dict (its moments, for instance)."""
    if optimizer is None:
        return 0
    found: list[Tensor] = []

    def walk(value: Any) -> None:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, dict):
            for item in value.values():
                walk(item)
        elif isinstance(value, list | tuple):
            for item in value:
                walk(item)

    walk(optimizer.state_dict())
    return sum(tensor.nbytes for tensor in _distinct(found))


def _stored_buffers(module: Any) -> list[Tensor]:
    """The integer buffers that hold the weights of a module of another format."""
    found = [buffer for buffer in module.buffers(recurse=False) if not buffer.is_floating_point()]
    return [buffer for buffer in found if buffer is not module.control]


def audit(model: nn.Module, optimizer: Any = None) -> Audit:
    """Count what ``model`` (and ``optimizer``, if given) stores. Tied tensors count once."""
    modules = [module for _, module in ternary_modules(model)]
    stored = stored_modules(model)
    codes = [buffer for _, module in stored for buffer in _stored_buffers(module)]
    owned = {id(buffer) for module in modules for buffer in module.buffers(recurse=False)}
    owned |= {id(tensor) for tensor in (*codes, *(module.control for _, module in stored))}
    others = [buffer for buffer in model.buffers() if id(buffer) not in owned]
    biases = [getattr(module, "bias", None) for module in modules]
    counted: set[int] = set()
    # With 2 bits every vote crosses the only threshold there is, so that none outlives a step.
    cleared = {id(module.votes) for module in modules if module.shape.vote_bits == 2}

    def named(*names: str) -> list[Tensor]:
        found = [t for m in modules for n in names if isinstance(t := getattr(m, n, None), Tensor)]
        counted.update(id(t) for t in found)
        return found

    trits = sum(module.shape.out_features * module.shape.in_features for module in modules)
    parameters = _distinct(model.parameters())
    rows = [
        _row(_TERNARY, named("weight"), trits),
        _row("exponents", named("exponent", "exponent_origin", "bias_exponent")),
        _row("votes", [t for t in named("votes", "bias_votes") if id(t) not in cleared]),
        _row("exponent votes", named("exponent_votes", "correlation", "steps")),
        _row(_BIAS, [bias for bias in biases if isinstance(bias, Tensor)]),
        _row("control words", [*named("control"), *(module.control for _, module in stored)]),
        _row(_TRAINABLE, [p for p in parameters if p.requires_grad]),
        _row(_FROZEN, [p for p in parameters if not p.requires_grad]),
    ]
    if stored:
        rows.append(_row(_STORED, codes, sum(module.stored_weights for _, module in stored)))
    counted.update(id(bias) for bias in biases if bias is not None)
    rest = others + [b for m in modules for b in m.buffers(recurse=False) if id(b) not in counted]
    float_buffers = _row("float buffers", [b for b in rest if b.is_floating_point()])
    rows += [float_buffers, _row("other integer buffers", [b for b in rest if not b.is_floating_point()])]
    return Audit(
        rows=tuple(rows),
        ternary_weights=trits,
        float_parameters=sum(p.numel() for p in parameters),
        float_buffers=float_buffers.elements,
        working_bytes=sum(tensor.nbytes for module in modules for tensor in module.working_memory()),
        optimizer_bytes=optimizer_state_bytes(optimizer),
    )
