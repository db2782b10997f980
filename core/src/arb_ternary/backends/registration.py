"""Register the ops with torch.

This does what ``torch.library.custom_op`` does, without its cost per call: that fills in defaults,
which our ops do not have, in a time that grows with the square of the number of arguments, and
wraps the function several times. A linear of the demo has 19 arguments and a product that takes 60
microseconds. ``custom_op`` added 70 microseconds, and 150 to both passes together.

A parameter of type :class:`~arb_ternary.backends.vote_state.VoteState` stands for all of its
fields: the schema lists them, a caller passes ``*state``, and functions, fakes and gradients see
one object.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce, wraps
from inspect import Parameter, Signature, signature
from operator import or_
from typing import Any, Final, get_type_hints

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from arb_ternary.backends.vote_state import VoteState

NAMESPACE: Final = "arb_ternary"
_LIBRARY: Final[Any] = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
_FIELDS: Final = len(VoteState._fields)
#: Autocast of every kind of device.
_AUTOCAST: Final = reduce(
    or_,
    [
        torch._C.DispatchKeySet(key)
        for name, key in torch._C.DispatchKey.__members__.items()
        if name.startswith("Autocast")
    ],
)

Function = Callable[..., Any]


class Op:
    """An op of the namespace ``arb_ternary``.

    Call it, or ``torch.ops.arb_ternary.<name>``, with all of its arguments in order. A caller that
    needs neither gradients nor a graph calls ``function`` itself, without the dispatcher.

    Args:
        name: the name of the op.
        function: computes it, on every device. Its annotations are those that
            ``torch.library.infer_schema`` demands, or ``VoteState``.
        mutates_args: the arguments, or fields of the state, that it changes.
    """

    def __init__(self, name: str, function: Function, mutates_args: Sequence[str]) -> None:
        self.__doc__ = function.__doc__
        self.name = name
        self.function = _without_autocast(function)
        hints = get_type_hints(function)
        names = list(signature(function).parameters)
        #: Position of the state among the arguments.
        self._state: int | None = None
        for position, parameter in enumerate(names):
            if hints[parameter] is VoteState:
                self._state = position
        if self._state is not None:
            names[self._state : self._state + 1] = VoteState._fields
            hints = get_type_hints(VoteState) | hints

        prototype = _prototype(names, hints)
        schema = torch.library.infer_schema(prototype, mutates_args=mutates_args)
        _LIBRARY.define(name + schema)
        _LIBRARY.impl(name, self._with_state(self.function), "CompositeExplicitAutograd")
        self.overload = getattr(getattr(torch.ops, NAMESPACE), name).default
        if hints["return"] is type(None):  # it only changes its arguments
            self.register_fake(lambda *_: None)

    def __call__(self, *arguments: Any) -> Any:
        return self.overload(*arguments)

    def _with_state(self, function: Function, leading: int = 0) -> Function:
        """Return ``function`` as the dispatcher calls it: with the fields of the state one by one.

        The function has ``leading`` further arguments before those of the op.
        """
        if self._state is None:
            return function
        start = self._state + leading
        stop = start + _FIELDS

        def unpacked(*arguments: Any) -> Any:
            return function(
                *arguments[:start], VoteState(*arguments[start:stop]), *arguments[stop:]
            )

        return unpacked

    def register_fake(self, function: Function) -> None:
        """Register the function that gives shapes and dtypes of the results to torch.compile."""
        torch.library.register_fake(f"{NAMESPACE}::{self.name}", self._with_state(function))

    def register_autograd(self, backward: Function, *, setup_context: Function) -> None:
        """Register ``setup_context(ctx, output, *arguments)`` and ``backward(ctx, *grads)``.

        ``backward`` returns the gradients of the first arguments. The others have none.
        """
        overload = self.overload
        setup = self._with_state(setup_context, leading=2)

        class Differentiable(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *arguments: Any) -> Any:
                with torch._C._AutoDispatchBelowAutograd():
                    output = overload(*arguments)
                setup(ctx, output, *arguments)
                ctx.count = len(arguments)
                return output

            @staticmethod
            @once_differentiable
            def backward(ctx: Any, *grads: Any) -> Any:
                found = backward(ctx, *grads)
                return (*found, *(None,) * (ctx.count - len(found)))

        def autograd(*arguments: Any) -> Any:
            if torch.is_grad_enabled() and _requires_grad(arguments):
                return Differentiable.apply(*arguments)  # type: ignore[no-untyped-call]
            with torch._C._AutoDispatchBelowAutograd():
                return overload(*arguments)

        _LIBRARY.impl(self.name, autograd, "Autograd")


def _without_autocast(function: Function) -> Function:
    """Return ``function``, which computes in the dtypes of its arguments also under autocast.

    A kernel that multiplies integers as floats would be rounded by it.
    """

    @wraps(function)
    def without(*arguments: Any) -> Any:
        if not torch._C._is_any_autocast_enabled():
            return function(*arguments)
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return function(*arguments)

    return without


def _requires_grad(arguments: Sequence[Any]) -> bool:
    # A loop, because this runs in every call of an op, and any() takes half as long again.
    for argument in arguments:  # noqa: SIM110
        if isinstance(argument, Tensor) and argument.requires_grad:
            return True
    return False


def _prototype(names: Sequence[str], hints: Mapping[str, Any]) -> Function:
    """Return a function with these parameters for ``infer_schema``."""

    def prototype() -> None:
        """Never called."""

    parameters = [
        Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, annotation=hints[name]) for name in names
    ]
    returned = None if hints["return"] is type(None) else hints["return"]
    prototype.__signature__ = Signature(parameters, return_annotation=returned)  # type: ignore[attr-defined]
    return prototype


def op(*, mutates_args: Sequence[str] = ()) -> Callable[[Function], Op]:
    """Register the decorated function as the op of its name; see :class:`Op`."""
    return lambda function: Op(function.__name__, function, mutates_args)
