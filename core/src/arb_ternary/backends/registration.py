"""How the ops are registered with torch.

Like ``torch.library.custom_op``, but without what that puts around every call: it fills in defaults
that our ops do not have, in a time that grows with the square of the number of arguments, and wraps
the function several times. A linear of the demo has 19 arguments and a product of 60 microseconds;
``custom_op`` added 70, and 150 to both passes together.

A parameter of type :class:`~arb_ternary.backends.vote_state.VoteState` stands for all of its
fields: the schema lists them, a caller passes ``*state``, and functions, fakes and gradients see
one object.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, Signature, signature
from typing import Any, Final, get_type_hints

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from arb_ternary.backends.vote_state import VoteState

NAMESPACE: Final = "arb_ternary"
_LIBRARY: Final[Any] = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
_FIELDS: Final = len(VoteState._fields)

Function = Callable[..., Any]


class Op:
    """An op of the namespace: call it, or ``torch.ops.arb_ternary.<name>``, with all of its
    arguments in order.

    ``function`` computes it, for every device; it is annotated as ``torch.library.infer_schema``
    wants it, or with a ``VoteState``. ``mutates_args`` names the arguments, or fields of the state,
    that it changes. Who needs neither gradients nor a graph calls ``function`` itself, which the
    dispatcher has no part in.
    """

    def __init__(self, name: str, function: Function, mutates_args: Sequence[str]) -> None:
        self.__doc__ = function.__doc__
        self.name = name
        self.function = function
        hints = get_type_hints(function)
        names = list(signature(function).parameters)
        self._state = next(
            (i for i, parameter in enumerate(names) if hints[parameter] is VoteState), None
        )
        if self._state is not None:
            names[self._state : self._state + 1] = VoteState._fields
            hints = get_type_hints(VoteState) | hints
        _LIBRARY.define(
            name + torch.library.infer_schema(_prototype(names, hints), mutates_args=mutates_args)
        )
        _LIBRARY.impl(name, self._with_state(function), "CompositeExplicitAutograd")
        self.overload = getattr(getattr(torch.ops, NAMESPACE), name).default
        if hints["return"] is type(None):  # it changes its arguments only
            self.register_fake(lambda *_: None)

    def __call__(self, *arguments: Any) -> Any:
        return self.overload(*arguments)

    def _with_state(self, function: Function, leading: int = 0) -> Function:
        """``function`` as the dispatcher calls it: with the fields of the state one by one,
        ``leading`` places on.
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
        """Give the shapes and dtypes of the results, for ``torch.compile``."""
        torch.library.register_fake(f"{NAMESPACE}::{self.name}", self._with_state(function))

    def register_autograd(self, backward: Function, *, setup_context: Function) -> None:
        """Give the gradient: ``setup_context(ctx, output, *arguments)`` and ``backward(ctx,
        *grads)``.

        ``backward`` returns the gradients of the first arguments; those that follow have none.
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
            if torch.is_grad_enabled() and any(
                isinstance(a, Tensor) and a.requires_grad for a in arguments
            ):
                return Differentiable.apply(*arguments)  # type: ignore[no-untyped-call]
            with torch._C._AutoDispatchBelowAutograd():
                return overload(*arguments)

        _LIBRARY.impl(self.name, autograd, "Autograd")


def _prototype(names: Sequence[str], hints: Mapping[str, Any]) -> Function:
    """A function with these parameters, for ``infer_schema`` to look at."""

    def prototype() -> None:
        """Never called."""

    parameters = [
        Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, annotation=hints[name]) for name in names
    ]
    returned = None if hints["return"] is type(None) else hints["return"]
    prototype.__signature__ = Signature(parameters, return_annotation=returned)  # type: ignore[attr-defined]
    return prototype


def op(*, mutates_args: Sequence[str] = ()) -> Callable[[Function], Op]:
    """Register a function as the op of its name; ``mutates_args`` as in :class:`Op`."""
    return lambda function: Op(function.__name__, function, mutates_args)
