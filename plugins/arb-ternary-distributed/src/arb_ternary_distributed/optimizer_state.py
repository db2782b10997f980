"""The moments of AdamW, sharded: each rank keeps those of a slice of every float parameter.

This is stage 1 of ZeRO. All ranks have all float parameters and, at a step, the same gradients. A
rank steps its slices and receives the others. AdamW computes every element by itself, so the result
is that of one process to the bit. Slices begin at multiples of a processor's vectors, because the
last elements of a tensor, which fill no vector, may be rounded in another way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from arb_ternary.errors import ConfigError
from arb_ternary.optim.protocol import Joins, inner_optimizers
from arb_ternary.optim.ternary import TernaryOptimizer
from arb_ternary_distributed.collectives import all_gather_views

if TYPE_CHECKING:
    from arb_ternary_distributed.process_group import ProcessGroup

#: Slices begin at multiples of this number of elements, which no vector and no block of threads
#: crosses.
_ALIGNED: Final = 1024
#: State of AdamW that has a number for each element.
_MOMENTS: Final = ("exp_avg", "exp_avg_sq")
#: The sharded moments of optimizers.
_SHARDED: Final[WeakKeyDictionary[Optimizer, ShardedMoments]] = WeakKeyDictionary()


def reasons_against_sharding(optimizer: Optimizer) -> Iterator[str]:
    """Yield why optimizers of float parameters in ``optimizer`` cannot be sharded."""
    for each in inner_optimizers(optimizer):
        has_moments = type(each) is torch.optim.AdamW
        has_no_state = isinstance(each, TernaryOptimizer | Joins)
        if not has_moments and not has_no_state:
            yield (
                f"the state of {type(each).__name__} cannot be sharded; use replicated, or adamw "
                f"without float16 parameters"
            )


def shard_moments(optimizer: Optimizer, world: ProcessGroup) -> None:
    """Keep on each rank only its part of the moments of every AdamW in ``optimizer``.

    It has not stepped yet.

    Raises:
        ConfigError: ``optimizer`` contains another optimizer of float parameters.
    """
    for reason in reasons_against_sharding(optimizer):
        raise ConfigError(f"ranks.optimizer_state: {reason}")
    for each in inner_optimizers(optimizer):
        if isinstance(each, torch.optim.AdamW):
            _SHARDED[each] = ShardedMoments(each, world)


def gather_moments(optimizer: Optimizer) -> None:
    """Keep all moments on every rank again. Collective."""
    for each in inner_optimizers(optimizer):
        sharded = _SHARDED.pop(each, None)
        if sharded is not None:
            sharded.gather_full()


class ShardedMoments:
    """The moments of one rank, attached to ``optimizer`` by its hooks.

    Steps and state dicts are then collective. State dicts are those of one process: they hold whole
    moments. All ranks gather them on saving, and each loads its slices.
    """

    def __init__(self, optimizer: torch.optim.AdamW, world: ProcessGroup) -> None:
        self._optimizer = optimizer
        self._world = world
        #: Param group, index in it, and parameter, of what the current step replaces by slices.
        self._stepping: list[tuple[dict[str, Any], int, Tensor]] = []
        #: Steps of the parameters that have moments, in the order of their first steps.
        self._steps: dict[Tensor, int] = {}
        self._hooks = (
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_post_hook(self._gather_state),
            optimizer.register_load_state_dict_pre_hook(self._slice_state),
        )

    def gather_full(self) -> None:
        """Leave the optimizer with whole moments and without hooks. Collective."""
        whole = self._optimizer.state_dict()
        for hook in self._hooks:
            hook.remove()
        self._optimizer.load_state_dict(whole)

    def _bounds(self, parameter: Tensor, rank: int) -> slice:
        """Return the elements of a flat parameter that ``rank`` steps."""
        size = parameter.numel()
        chunk = -(-size // (self._world.size * _ALIGNED)) * _ALIGNED
        start = min(rank * chunk, size)
        return slice(start, min(start + chunk, size))

    def _before_step(self, optimizer: Optimizer, *_: object) -> None:
        """Replace parameters that have a gradient by own slices, in groups and state."""
        for group in optimizer.param_groups:
            for index, parameter in enumerate(group["params"]):
                if parameter.grad is None:
                    continue
                own = self._bounds(parameter, self._world.rank)
                part = parameter.detach().view(-1)[own]
                if part.numel():
                    part.grad = parameter.grad.reshape(-1)[own]
                group["params"][index] = part
                if state := optimizer.state.pop(parameter, None):
                    optimizer.state[part] = state
                self._stepping.append((group, index, parameter))
                self._steps[parameter] = self._steps.get(parameter, 0) + 1

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        """Put the parameters back, with the slices of all ranks."""
        parameters = []
        parts = []
        for group, index, parameter in self._stepping:
            part = group["params"][index]
            part.grad = None
            group["params"][index] = parameter
            if state := optimizer.state.pop(part, None):
                optimizer.state[parameter] = state
            parameters.append(parameter.detach().view(-1))
            parts.append(part)
        self._stepping.clear()
        self._all_gather(parts, parameters)

    def _gather_state(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the state dict with whole moments, in the order of one process."""
        numbers = dict(_numbered(optimizer, state_dict))
        whole: dict[int, dict[str, Any]] = {}
        for parameter, steps in self._steps.items():
            own = optimizer.state.get(parameter, {})
            whole[numbers[parameter]] = {"step": own.get("step", torch.tensor(float(steps)))}
        for name in _MOMENTS:
            parts = []
            moments = []
            for parameter in self._steps:
                nothing = parameter.new_empty(0)
                parts.append(optimizer.state.get(parameter, {}).get(name, nothing))
                moment = torch.empty_like(parameter, requires_grad=False)
                moments.append(moment.view(-1))
                whole[numbers[parameter]][name] = moment
            self._all_gather(parts, moments)
        return {**state_dict, "state": whole}

    def _slice_state(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return what this rank keeps of a state dict with whole moments."""
        parameters = {number: parameter for parameter, number in _numbered(optimizer, state_dict)}
        self._steps.clear()
        kept: dict[int, dict[str, Any]] = {}
        for number, state in state_dict["state"].items():
            parameter = parameters[number]
            self._steps[parameter] = int(state["step"])
            own = self._bounds(parameter, self._world.rank)
            if own.start == own.stop:
                continue
            kept[number] = dict(state)
            for name in _MOMENTS:
                kept[number][name] = state[name].reshape(-1)[own].clone()
        return {**state_dict, "state": kept}

    def _all_gather(self, parts: Sequence[Tensor], flat: Sequence[Tensor]) -> None:
        """Fill ``flat`` tensors from their slices ``parts`` on all ranks. Collective."""
        world = self._world
        for tensor, part in zip(flat, parts, strict=True):
            tensor[self._bounds(tensor, world.rank)] = part
        for dtype in dict.fromkeys(tensor.dtype for tensor in flat):
            members = [tensor for tensor in flat if tensor.dtype == dtype]
            views = [
                [tensor[self._bounds(tensor, rank)] for tensor in members]
                for rank in range(world.size)
            ]
            all_gather_views(views, rank=world.rank, group=world.group)


def _numbered(optimizer: Optimizer, state_dict: dict[str, Any]) -> Iterator[tuple[Tensor, int]]:
    """Yield the parameters with their numbers in a state dict."""
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        yield from zip(group["params"], saved["params"], strict=True)
