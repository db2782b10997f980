"""The moments of AdamW, of which each rank keeps those of a slice of every float parameter (ZeRO,
stage 1).

All ranks have all float parameters and, at a step, the same gradients. A rank steps its slices and
is given the others. AdamW computes every element by itself, so the result is that of one process to
the bit. Slices begin where the vectors of a processor do: a last few elements that fill none may be
rounded in another way.
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
from arb_ternary_distributed.collectives import all_gather_single

if TYPE_CHECKING:
    from arb_ternary_distributed.process_group import ProcessGroup

# : Slices begin at multiples of so many elements, which no vector of a processor and no block of
# threads crosses.
_ALIGNED: Final = 1024
#: State of AdamW that has a number for each element.
_MOMENTS: Final = ("exp_avg", "exp_avg_sq")
#: Of the optimizers whose moments are cut.
_OWNED: Final[WeakKeyDictionary[Optimizer, OwnedMoments]] = WeakKeyDictionary()


def unsliced(optimizer: Optimizer) -> Iterator[str]:
    """Why optimizers of float parameters in ``optimizer`` cannot be cut."""
    for each in inner_optimizers(optimizer):
        if type(each) is not torch.optim.AdamW and not isinstance(each, TernaryOptimizer | Joins):
            yield (
                f"what {type(each).__name__} keeps cannot be cut; use replicated, or adamw "
                f"without float16 parameters"
            )


def shard_moments(optimizer: Optimizer, world: ProcessGroup) -> None:
    """Have each rank keep its part of the moments of every AdamW in ``optimizer``, which has not
    stepped yet.

    Raises:
        ConfigError: there is another optimizer of float parameters in it.
    """
    if refused := [*unsliced(optimizer)]:
        raise ConfigError(f"ranks.optimizer_state: {refused[0]}")
    for each in inner_optimizers(optimizer):
        if isinstance(each, torch.optim.AdamW):
            OwnedMoments(each, world)


def gather_moments(optimizer: Optimizer) -> None:
    """Have every rank keep all moments again, for what one rank does alone. Collective."""
    for each in inner_optimizers(optimizer):
        if (owned := _OWNED.pop(each, None)) is not None:
            owned.release()


class OwnedMoments:
    """The part of one rank, attached to ``optimizer`` by its hooks. Steps and state dicts are then
    collective.

    State dicts are those of one process: whole moments, which all ranks gather and each cuts when
    it loads them.
    """

    def __init__(self, optimizer: torch.optim.AdamW, world: ProcessGroup) -> None:
        self._optimizer = optimizer
        self._world = world
        self._stepping: list[tuple[dict[str, Any], int, Tensor]] = []
        # of the parameters that have moments, in the order of their first ones
        self._steps: dict[Tensor, int] = {}
        self._hooks = (
            optimizer.register_step_pre_hook(self._cut),
            optimizer.register_step_post_hook(self._join),
            optimizer.register_state_dict_post_hook(self._whole),
            optimizer.register_load_state_dict_pre_hook(self._sliced),
        )
        _OWNED[optimizer] = self

    def release(self) -> None:
        """Leave the optimizer as torch has it, with whole moments. Collective."""
        whole = self._optimizer.state_dict()
        for hook in self._hooks:
            hook.remove()
        self._optimizer.load_state_dict(whole)

    def _bounds(self, parameter: Tensor, rank: int) -> slice:
        chunk = -(-parameter.numel() // (self._world.size * _ALIGNED)) * _ALIGNED
        return slice(
            min(rank * chunk, parameter.numel()), min((rank + 1) * chunk, parameter.numel())
        )

    def _cut(self, optimizer: Optimizer, *_: object) -> None:
        """Have own slices stand in for the parameters that have a gradient, in groups and state."""
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

    def _join(self, optimizer: Optimizer, *_: object) -> None:
        """Put the parameters back, with the slices of all ranks."""
        parameters = []
        parts = []
        for group, index, parameter in self._stepping:
            part = group["params"][index]
            part.grad = None
            group["params"][index] = parameter
            if state := optimizer.state.pop(part, None):
                optimizer.state[parameter] = state
            parameters.append(parameter)
            parts.append(part)
        self._stepping.clear()
        for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
            members = [
                each for each, parameter in enumerate(parameters) if parameter.dtype == dtype
            ]
            wholes = [parameters[each].detach().view(-1) for each in members]
            self._gather([parts[each] for each in members], wholes)

    def _whole(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The state dict with whole moments, in the order of one process."""
        numbers = dict(_numbered(optimizer, state_dict))
        wholes: dict[Tensor, dict[str, Any]] = {}
        for parameter, steps in self._steps.items():
            own = optimizer.state.get(parameter, {})
            wholes[parameter] = {"step": own.get("step", torch.tensor(float(steps)))}
        for dtype in dict.fromkeys(parameter.dtype for parameter in wholes):
            members = [parameter for parameter in wholes if parameter.dtype == dtype]
            for name in _MOMENTS:
                nothing = members[0].new_empty(0)
                parts = [
                    optimizer.state.get(parameter, {}).get(name, nothing) for parameter in members
                ]
                found = [torch.empty_like(parameter, requires_grad=False) for parameter in members]
                self._gather(parts, [each.view(-1) for each in found])
                for parameter, moment in zip(members, found, strict=True):
                    wholes[parameter][name] = moment
        return {
            **state_dict,
            "state": {numbers[parameter]: state for parameter, state in wholes.items()},
        }

    def _sliced(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """What this rank keeps of a state dict with whole moments."""
        parameters = {number: parameter for parameter, number in _numbered(optimizer, state_dict)}
        self._steps.clear()
        kept: dict[int, dict[str, Any]] = {}
        for number, state in state_dict["state"].items():
            parameter = parameters[number]
            self._steps[parameter] = int(state["step"])
            own = self._bounds(parameter, self._world.rank)
            if own.start < own.stop:
                kept[number] = {
                    **state,
                    **{name: state[name].reshape(-1)[own].clone() for name in _MOMENTS},
                }
        return {**state_dict, "state": kept}

    def _gather(self, parts: Sequence[Tensor], into: Sequence[Tensor]) -> None:
        """Fill ``into``, flat tensors of one dtype, from the slices ``parts`` of all ranks."""
        world = self._world
        sizes = [self._bounds(each, 0).stop for each in into]
        sent = parts[0].new_zeros(sum(sizes))
        for place, part in zip(torch.split(sent, sizes), parts, strict=True):
            place[: part.numel()] = part
        found = sent.new_empty(world.size * sent.numel())
        all_gather_single(found, sent, group=world.group)
        for rank, message in enumerate(found.view(world.size, -1)):
            for whole, piece in zip(into, torch.split(message, sizes), strict=True):
                bounds = self._bounds(whole, rank)
                whole[bounds] = piece[: bounds.stop - bounds.start]


def _numbered(optimizer: Optimizer, state_dict: dict[str, Any]) -> Iterator[tuple[Tensor, int]]:
    """The parameters with their numbers in a state dict."""
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        yield from zip(group["params"], saved["params"], strict=True)
