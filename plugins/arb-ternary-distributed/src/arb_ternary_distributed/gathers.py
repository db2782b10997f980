"""Gathers of weights that a rank has to make up for because it ran fewer passes than the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


class MissedGathers:
    """Watches the passes of a model whose blocks gather their weights in forward and in backward.

    A gather needs all ranks. A rank without a micro-batch in a round, or with a loss that is not
    finite and so without backward, has to gather all the same: the blocks of its last pass, which
    were those of the other ranks.

    Args:
        model: what a pass calls.
        blocks: of the model; each gathers its weights before its forward and before its backward.
        on_reach: called with a block when backward comes to it.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        on_reach: Callable[[nn.Module], None] = lambda _: None,
    ) -> None:
        self._on_reach = on_reach
        self._in_forward = False
        self._has_passed = False
        self._order = [*blocks]
        self._differentiable = [*blocks]
        #: Positions in the order of blocks to which backward will come, and has not yet.
        self._awaited: list[int] = []
        model.register_forward_pre_hook(self._begin)
        for block in blocks:
            block.register_forward_hook(self._after_block)
        model.register_forward_hook(self._end)

    def take(self, *, backward: bool) -> tuple[list[nn.Module | None], list[nn.Module]]:
        """Return what this rank has not gathered since the last call, in the order of the others.

        Args:
            backward: whether the other ranks have also run backward.

        Returns:
            What is missing of forward, with None for what lies outside of blocks; and of backward.
        """
        forward: list[nn.Module | None] = []
        if not self._has_passed:
            forward = [None, *self._order]
        again: list[nn.Module] = []
        if backward and self._has_passed:
            again = [self._order[position] for position in self._awaited]
        elif backward:
            again = self._differentiable
        self._has_passed = False
        self._awaited = []
        return forward, again[::-1]

    def _begin(self, model: nn.Module, _inputs: Any) -> None:
        self._in_forward = True
        self._has_passed = True
        self._order = []
        self._awaited = []
        if torch.is_grad_enabled():
            self._differentiable = []

    def _after_block(self, block: nn.Module, _inputs: Any, output: Any) -> None:
        if not self._in_forward:  # activation checkpointing computes a block again in backward
            return
        position = len(self._order)
        self._order.append(block)
        if not torch.is_grad_enabled():
            return
        found = [each for each in _tensors(output) if each.requires_grad]
        if found:
            self._awaited.append(position)
            self._differentiable.append(block)
        for tensor in found:
            tensor.register_hook(partial(self._reached, position))  # type: ignore[no-untyped-call]

    def _end(self, _model: nn.Module, _inputs: Any, _output: Any) -> None:
        self._in_forward = False

    def _reached(self, position: int, _grad: Tensor) -> None:
        if position in self._awaited:
            self._awaited.remove(position)
            self._on_reach(self._order[position])


def _tensors(output: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists and dicts."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        yield from _tensors(tuple(output.values()))
    elif isinstance(output, list | tuple):
        for item in output:
            yield from _tensors(item)
