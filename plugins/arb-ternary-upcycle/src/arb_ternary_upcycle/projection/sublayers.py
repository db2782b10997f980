"""The linears of a block in the order in which they are computed, and their inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from arb_ternary.errors import ConfigError


class _Reached(Exception):
    """Ends a forward pass at a linear."""

    def __init__(self, inputs: Tensor) -> None:
        super().__init__()
        self.inputs = inputs


def linears_of(block: nn.Module) -> dict[str, nn.Linear]:
    """Return the linears inside a float block, by path."""
    return {name: module for name, module in block.named_modules() if isinstance(module, nn.Linear)}


@torch.no_grad()
def sublayers(block: nn.Module, run: Callable[[], object]) -> list[list[str]]:
    """Group the linears of a float block that read the same tensor.

    Args:
        block: the block.
        run: runs a forward pass through it.

    Returns:
        the paths of each group, in the order in which they are computed.

    Raises:
        ConfigError: a linear is not computed exactly once.
    """
    groups: list[list[str]] = []
    last: list[Tensor] = []

    def note(name: str, inputs: Tensor) -> None:
        if last and last[-1] is inputs:
            groups[-1].append(name)
        else:
            groups.append([name])
            last.append(inputs)

    linears = linears_of(block)
    with _inputs_to({module: partial(note, name) for name, module in linears.items()}):
        run()
    computed = [name for group in groups for name in group]
    for name in linears:
        if computed.count(name) != 1:
            raise ConfigError(
                f"projection: {name} is computed {computed.count(name)} times in a forward pass; "
                "a projection needs it exactly once"
            )
    return groups


@torch.no_grad()
def inputs_of(module: nn.Module, run: Callable[[], object]) -> Tensor:
    """Return the input of ``module``, ``[..., K]``, in a forward pass that stops there."""

    def stop(inputs: Tensor) -> None:
        raise _Reached(inputs)

    with _inputs_to({module: stop}):
        try:
            run()
        except _Reached as reached:
            return reached.inputs
    raise RuntimeError("the forward pass did not reach the linear")


@contextmanager
def recorded_inputs(modules: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """Yield a list with the input of each module, ``[..., K]``, in the latest forward pass."""
    inputs = [torch.empty(0)] * len(modules)
    with _inputs_to(
        {module: partial(inputs.__setitem__, index) for index, module in enumerate(modules)}
    ):
        yield inputs


@contextmanager
def _inputs_to(receivers: dict[nn.Module, Callable[[Tensor], None]]) -> Iterator[None]:
    """Call a function with the input of each module, whenever the module is computed."""

    def hook(receive: Callable[[Tensor], None], _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        receive(inputs[0])

    handles = [
        module.register_forward_pre_hook(partial(hook, receive))
        for module, receive in receivers.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
