"""Which weights of a model become ternary, and why the others do not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from arb_ternary.errors import UsageProblem
from arb_ternary_train.part_names import is_named, near
from arb_ternary_trainers.layers import TERNARY_CLASSES, TernaryLayer, ternary_class
from arb_ternary_trainers.report import Left

#: Layers that stay float unless asked for. A model need not have them.
DEFAULT_EXCLUDE: Final = ("lm_head", "*.lm_head")
_DTYPES: Final = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@frozen(eq=False)
class Target:
    """A weight that becomes ternary.

    Attributes:
        names: names of the layers that have it; several if it is tied.
        layers: these layers.
        classes: the ternary class of each of them.
        parameter: the weight.
    """

    names: tuple[str, ...]
    layers: tuple[nn.Module, ...]
    classes: tuple[type[TernaryLayer], ...]
    parameter: nn.Parameter

    @property
    def name(self) -> str:
        """The name of the first layer."""
        return self.names[0]

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns of :meth:`matrix`."""
        rows = self.parameter.shape[0]
        columns = self.parameter.numel() // max(rows, 1)
        if self.classes[0].transposes_weight:
            return columns, rows
        return rows, columns

    def matrix(self) -> Tensor:
        """Return the weight as float32 ``[N, K]`` on the CPU."""
        weight = self.parameter.detach().to("cpu", torch.float32)
        if self.classes[0].transposes_weight:
            weight = weight.T
        return weight.flatten(1).contiguous()


def select(
    model: nn.Module, include: Sequence[str] | None, exclude: Sequence[str]
) -> tuple[list[Target], list[Left]]:
    """Return the weights that become ternary, and all other matrices with the reason.

    Raises:
        UsageProblem: a pattern names no module.
    """
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    every_name = [name for found in names.values() for name in found]
    _check_patterns("include", include or (), every_name)
    if tuple(exclude) != DEFAULT_EXCLUDE:
        _check_patterns("exclude", exclude, every_name)

    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in names:
        for name, parameter in module.named_parameters(recurse=False):
            owners.setdefault(parameter, []).append((module, name))

    targets: list[Target] = []
    left: list[Left] = []
    for parameter, places in owners.items():
        if not _is_matrix(parameter, places[0][1]):
            continue
        reasons = {}
        for module, name in places:
            why = _reason_against(module, name, names[module], include, exclude)
            reasons[_qualified(names[module][0], name)] = why
        first, *_ = reasons
        if any(reasons.values()):
            left.append(Left(first, _shape(parameter), _one_reason(reasons, first)))
            continue
        layers = tuple(module for module, _ in places)
        classes = tuple(each for each in map(ternary_class, layers) if each is not None)
        if len({each.transposes_weight for each in classes}) > 1:
            reason = "layers of different orientation share it"
            left.append(Left(first, _shape(parameter), reason))
            continue
        first_names = tuple(names[layer][0] for layer in layers)
        targets.append(Target(first_names, layers, classes, parameter))
    return targets, left


def _check_patterns(where: str, patterns: Sequence[str], names: Sequence[str]) -> None:
    """Refuse a pattern that names no module."""
    if isinstance(patterns, str):
        raise UsageProblem(f"{where}: must be a list of names, not the text {patterns!r}")
    for pattern in patterns:
        if not any(is_named(name, [pattern]) for name in names):
            raise UsageProblem(
                f"{where}: {pattern!r} names no module of the model", near(pattern, names)
            )


def _is_matrix(parameter: nn.Parameter, name: str) -> bool:
    """Whether a parameter has rows and columns, or may have once it has a shape."""
    if isinstance(parameter, nn.UninitializedParameter):
        return name != "bias"
    return parameter.dim() >= 2


def _shape(parameter: nn.Parameter) -> tuple[int, ...]:
    if isinstance(parameter, nn.UninitializedParameter):
        return ()
    return tuple(parameter.shape)


def _qualified(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name


def _one_reason(reasons: dict[str, str | None], first: str) -> str:
    """Return why a weight is left: a reason of its own layer, or of one that shares it."""
    own = reasons[first]
    if own:
        return own
    other, why = next((name, why) for name, why in reasons.items() if why)
    return f"it is also {other}, which is left: {why}"


def _reason_against(
    module: nn.Module,
    parameter_name: str,
    names: Sequence[str],
    include: Sequence[str] | None,
    exclude: Sequence[str],
) -> str | None:
    """Return why a parameter of ``module`` stays float; None if it can become ternary."""
    if include is not None and not any(is_named(name, include) for name in names):
        return "not included"
    for pattern in exclude:
        if any(is_named(name, [pattern]) for name in names):
            return f"excluded by {pattern!r}"
    return next(_obstacles(module, parameter_name), None)


def _obstacles(module: nn.Module, parameter_name: str) -> Iterator[str]:
    """Yield what keeps a parameter of ``module`` from becoming ternary."""
    kind = type(module).__name__
    parameter = module._parameters[parameter_name]
    assert parameter is not None
    if isinstance(module, ParametrizationList):
        yield "the weight of its layer is computed from it by a parametrization"
    if type(parameter) is not nn.Parameter:
        yield f"it is a {type(parameter).__name__}"
    if parameter_name != "weight":
        yield f"a parameter of {kind} itself, not of a linear, an embedding or a convolution"
    if ternary_class(module) is None:
        if isinstance(module, tuple(TERNARY_CLASSES)):
            yield f"{kind} has a forward of its own"
        yield f"{kind} is not a linear, an embedding or a convolution"
    if "forward" in vars(module):
        yield "the forward of its layer was replaced on the object, as accelerate's device map does"
    if parameter.dtype not in _DTYPES:
        yield f"its dtype is {parameter.dtype}"
    if parameter.is_meta:
        yield "it is on the device meta, without values"
    if not parameter.numel():
        yield "it has no elements"
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        yield "it has hooks, which a ternary weight cannot call"
    if isinstance(module, nn.Embedding):
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(module, option):
                yield f"the embedding has {option}"
