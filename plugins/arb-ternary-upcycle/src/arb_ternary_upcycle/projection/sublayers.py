"""The linears of a block in the order in which they are computed, and what enters them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from arb_ternary.errors import ConfigError


class _Entered(Exception):
    """A pass has come to the linear that was waited for."""

    def __init__(self, inputs: Tensor) -> None:
        super().__init__()
        self.inputs = inputs


def linears_of(block: nn.Module) -> dict[str, nn.Linear]:
    """The linears inside a float block, by path."""
    return {name: module for name, module in block.named_modules() if isinstance(module, nn.Linear)}


@torch.no_grad()
def sublayers(block: nn.Module, run: Callable[[], object]) -> list[list[str]]:
    """Paths of the linears that read the same tensor, in the order in which a pass comes to them.

    Args:
        block: a float block.
        run: makes a pass through it.

    Raises:
        ConfigError: a linear is not computed exactly once.
    """
    groups: list[tuple[Tensor, list[str]]] = []

    def note(name: str, inputs: Tensor) -> None:
        if groups and groups[-1][0] is inputs:
            groups[-1][1].append(name)
        else:
            groups.append((inputs, [name]))

    handles = [
        module.register_forward_pre_hook(lambda _module, given, name=name: note(name, given[0]))
        for name, module in linears_of(block).items()
    ]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    called = [name for _, names in groups for name in names]
    if sorted(called) != sorted(linears_of(block)):
        odd = next(name for name in linears_of(block) if called.count(name) != 1)
        raise ConfigError(
            f"projection: {odd} is computed {called.count(odd)} times in a pass, and a projection "
            f"needs it once"
        )
    return [names for _, names in groups]


@torch.no_grad()
def entering(module: nn.Module, run: Callable[[], object]) -> Tensor:
    """What enters ``module`` in a pass that ``run`` makes, ``[..., K]``; the pass ends there."""

    def stop(_module: nn.Module, given: tuple[Tensor, ...]) -> None:
        raise _Entered(given[0])

    handle = module.register_forward_pre_hook(stop)
    try:
        run()
    except _Entered as entered:
        return entered.inputs
    finally:
        handle.remove()
    raise RuntimeError("the pass did not come to the linear")


@contextmanager
def watched(modules: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """A list with what entered each module, ``[..., K]``, in the last pass that was made inside."""
    seen: list[Tensor] = [torch.empty(0)] * len(modules)

    def keep(place: int, given: tuple[Tensor, ...]) -> None:
        seen[place] = given[0]

    handles = [
        module.register_forward_pre_hook(lambda _module, given, place=place: keep(place, given))
        for place, module in enumerate(modules)
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
