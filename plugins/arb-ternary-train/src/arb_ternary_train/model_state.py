"""A model's state dict, made and loaded one module at a time.

``state_dict()`` of a model encodes all its ternary weights before the first can be written: a
second copy of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn

from arb_ternary.ternary.encoding import bytes_per_row, encode_at_rest
from arb_ternary.ternary.models import ternary_modules
from arb_ternary.ternary.module import TernaryModule
from arb_ternary_train.ranks.rows import row_bounds
from arb_ternary_train.safetensors_file import TensorParts


@frozen(eq=False)
class ModelState:
    """The state dict of ``model``, its names and tensors in the order of ``model.state_dict()``."""

    model: nn.Module

    def outlines(self) -> Iterator[tuple[str, Tensor]]:
        """Name and a tensor of the kind and shape of each; nothing is encoded."""
        for module, prefix, whole in _units(self.model):
            yield from (_save(module, prefix) if whole else _outline(module, prefix)).items()

    def parts(self) -> Iterator[Mapping[str, Tensor]]:
        """The tensors of one module after another."""
        for module, prefix, whole in _units(self.model):
            yield _save(module, prefix) if whole else _own(module, prefix)


@frozen(eq=False)
class PieceState:
    """What one of ``size`` ranks writes of the state dict of ``model``, where each writes a piece.

    Weights and accumulators of ternary modules are cut by rows, as the ranks own them, and all else
    is rank 0's. A tensor of a state dict is what its rows in all pieces are, one below the other.
    """

    model: nn.Module
    rank: int
    size: int

    def outlines(self) -> Iterator[tuple[str, Tensor]]:
        """As those of :class:`ModelState`."""
        for module, prefix, whole in _units(self.model):
            rows = None if whole else self._rows(module)
            found = _save(module, prefix) if whole else _outline(module, prefix)
            for name in _cut(prefix) if rows is not None else ():
                found[name] = found[name][rows]
            yield from ((name, found[name]) for name in self._named(found, prefix, rows))

    def parts(self) -> Iterator[Mapping[str, Tensor]]:
        """As those of :class:`ModelState`; also made is what only other ranks write, where all make
        it together.
        """
        for module, prefix, whole in _units(self.model):
            rows = None if whole else self._rows(module)
            if rows is None:
                found = _save(module, prefix) if whole else _own(module, prefix)
            else:
                assert isinstance(module, TernaryModule)
                found = {}
                nn.Module._save_to_state_dict(module, found, prefix, False)
                found[prefix + "weight"] = encode_at_rest(module.trits()[rows])
                votes = (
                    module.logical_votes()[rows] if module.owner is None else module.held_votes()
                )
                found[prefix + "votes"] = (
                    encode_at_rest(votes) if module.shape.vote_bits == 2 else votes
                )
            yield {name: found[name] for name in self._named(found, prefix, rows)}

    def _rows(self, module: nn.Module) -> slice | None:
        """The rows of a module that is cut; None where it is not."""
        if type(module)._save_to_state_dict is not TernaryModule._save_to_state_dict:
            return None
        assert isinstance(module, TernaryModule)
        return slice(*row_bounds(module.shape.out_features, self.size)[self.rank])

    def _named(self, found: Mapping[str, Any], prefix: str, rows: slice | None) -> list[str]:
        """Those of a module's tensors that are in this piece."""
        if self.rank == 0:
            return [*found]
        return [*_cut(prefix)] if rows is not None and rows.start < rows.stop else []


class Walk:
    """The parts of ``state``, once, for ranks that make them together.

    Where several ranks keep the rows of a module, a part is made by all of them at the same time.
    One of them writes; every rank calls :meth:`finish`, the writer too, however far it has come.
    """

    def __init__(self, state: TensorParts) -> None:
        self._outlines = iter(state.outlines())
        self._parts = iter(state.parts())

    def outlines(self) -> Iterator[tuple[str, Tensor]]:
        """See :class:`ModelState`; what is left of them."""
        return self._outlines

    def parts(self) -> Iterator[Mapping[str, Tensor]]:
        """See :class:`ModelState`; what is left of them."""
        return self._parts

    def finish(self) -> None:
        """Make what is left, for the other ranks."""
        for _ in self._outlines:
            pass
        for _ in self._parts:
            pass


def load_parts(
    model: nn.Module, tensors: Mapping[str, Tensor], kept: frozenset[str] = frozenset()
) -> None:
    """``model.load_state_dict(tensors)`` for the names, shapes and kinds of its own, each tensor
    asked for once.

    Those of the names ``kept`` are not asked for, and stay as they are.
    """
    for module, prefix, whole in _units(model):
        names = [*(_save(module, prefix) if whole else _outline(module, prefix))]
        if names and kept.issuperset(names):
            continue
        own = (
            {}
            if kept.isdisjoint(names)
            else (_save(module, prefix) if whole else _own(module, prefix))
        )
        part = {name: own[name] if name in kept else tensors[name] for name in names}
        if whole:
            module.load_state_dict(
                {name.removeprefix(prefix): tensor for name, tensor in part.items()}
            )
            continue
        faults: list[str] = []
        module._load_from_state_dict(part, prefix, {}, True, [], [], faults)
        if faults:
            raise RuntimeError("\n".join(faults))


def names_left_out(model: nn.Module) -> frozenset[str]:
    """What a state dict of ``model`` lacks: the accumulators of modules that were made without
    them.
    """
    modules = ternary_modules(model)
    return frozenset(
        f"{name}.votes" if name else "votes" for name, module in modules if not module.accumulates
    )


def _units(module: nn.Module, prefix: str = "") -> Iterator[tuple[nn.Module, str, bool]]:
    """The modules in their order, each with the beginning of its names and whether it is taken with
    its children.

    It is where it has its own idea of a state dict.
    """
    kind = type(module)
    saving = module._state_dict_pre_hooks or module._state_dict_hooks
    loading = module._load_state_dict_pre_hooks or module._load_state_dict_post_hooks
    whole = bool(saving or loading) or kind.state_dict is not nn.Module.state_dict
    whole = whole or kind.load_state_dict is not nn.Module.load_state_dict
    yield module, prefix, whole
    for name, child in () if whole else module._modules.items():
        if child is not None:
            yield from _units(child, f"{prefix}{name}.")


def _cut(prefix: str) -> tuple[str, str]:
    """The tensors of a ternary module that have a row for each of the weight's."""
    return prefix + "weight", prefix + "votes"


def _save(module: nn.Module, prefix: str) -> dict[str, Any]:
    return module.state_dict(prefix=prefix)


def _own(module: nn.Module, prefix: str) -> dict[str, Any]:
    """What the module itself adds to a state dict."""
    found: dict[str, Any] = {}
    module._save_to_state_dict(found, prefix, False)
    return found


def _outline(module: nn.Module, prefix: str) -> dict[str, Any]:
    """As :func:`_own`; what it would take time to encode has no numbers."""
    if type(module)._save_to_state_dict is not TernaryModule._save_to_state_dict:
        return _own(module, prefix)
    assert isinstance(module, TernaryModule)
    found: dict[str, Any] = {}
    nn.Module._save_to_state_dict(module, found, prefix, False)
    rows = module.shape.out_features
    columns = module.shape.in_features
    packed = torch.empty(rows, bytes_per_row(columns), dtype=torch.uint8, device="meta")
    votes = torch.empty(rows, columns, dtype=torch.int8, device="meta")
    found[prefix + "weight"] = packed
    if module.accumulates:
        found[prefix + "votes"] = packed if module.shape.vote_bits == 2 else votes
    return found
