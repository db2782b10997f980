"""Which gathers of weights a rank has left out in a round because it made fewer passes than the
others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


class Gathers:
    """Watches the passes of a model whose blocks gather their weights in forward and in backward.

    A gather needs all ranks. One that has no micro-batch in a round, or a loss that is not finite
    and so no backward, is told what to gather instead: what its last pass took, which was as that
    of the others.

    Args:
        model: what a pass calls.
        blocks: of the model, each of which gathers its weights before its forward and before its
            backward.
        reached: called with a block when backward comes to it.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        reached: Callable[[nn.Module], None] = lambda _: None,
    ) -> None:
        self._tell = reached
        self._watching = self._passed = False
        self._order = [*blocks]
        self._differentiable = [*blocks]
        #: Places in the order of blocks that backward will come to, and has not yet.
        self._awaited: list[int] = []
        model.register_forward_pre_hook(self._begin)
        for block in blocks:
            block.register_forward_hook(self._after_block)
        model.register_forward_hook(self._end)

    def missed(self, *, backward: bool) -> tuple[list[nn.Module | None], list[nn.Module]]:
        """What this rank has not gathered since the last call, in the order of the others.

        Args:
            backward: the others have made a backward pass too.

        Returns:
            Of forward, where None is what lies outside of blocks; and of backward.
        """
        forward = [] if self._passed else [None, *self._order]
        again: list[nn.Module] = []
        if backward:
            again = (
                [self._order[place] for place in self._awaited]
                if self._passed
                else self._differentiable
            )
        self._passed = False
        self._awaited = []
        return forward, again[::-1]

    def _begin(self, model: nn.Module, _inputs: Any) -> None:
        self._watching = self._passed = True
        self._order = []
        self._awaited = []
        if torch.is_grad_enabled():
            self._differentiable = []

    def _after_block(self, block: nn.Module, _inputs: Any, output: Any) -> None:
        if not self._watching:  # backward computes a block anew
            return
        place = len(self._order)
        self._order.append(block)
        found = [
            each for each in _tensors(output) if each.requires_grad and torch.is_grad_enabled()
        ]
        if found:
            self._awaited.append(place)
            self._differentiable.append(block)
        for tensor in found:
            tensor.register_hook(partial(self._reached, place))  # type: ignore[no-untyped-call]

    def _end(self, _model: nn.Module, _inputs: Any, _output: Any) -> None:
        self._watching = False

    def _reached(self, place: int, _grad: Tensor) -> None:
        if place in self._awaited:
            self._awaited.remove(place)
            self._tell(self._order[place])


def _tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, dict):
        output = tuple(output.values())
    return (
        [each for item in output for each in _tensors(item)]
        if isinstance(output, list | tuple)
        else []
    )
