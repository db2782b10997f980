"""How the ops are registered with torch.

Like ``torch.library.custom_op``, but without what that puts around every call: it fills in defaults that our ops do not
have, in a time that grows with the square of the number of arguments, and wraps the function several times. A linear of
the demo has 19 arguments and a product of 60 microseconds; ``custom_op`` added 70, and 150 to both passes together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["NAMESPACE", "Op", "op"]

NAMESPACE: Final = "arb_ternary"
_LIBRARY: Final[Any] = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]

Function = Callable[..., Any]


class Op:
    """An op of the namespace: call it, or ``torch.ops.arb_ternary.<name>``, with all of its arguments in order.

    Args:
        name: within the namespace.
        function: computes it, for every device; annotated as ``torch.library.infer_schema`` wants it.
        mutates_args: names of the arguments that it changes.
    """

    def __init__(self, name: str, function: Function, mutates_args: Sequence[str]) -> None:
        self.__doc__ = function.__doc__
        self.name = name
        _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=mutates_args))
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        self.overload = getattr(getattr(torch.ops, NAMESPACE), name).default

    def __call__(self, *arguments: Any) -> Any:
        return self.overload(*arguments)

    def register_fake(self, function: Function) -> None:
        """Give the shapes and dtypes of the results, for ``torch.compile``."""
        torch.library.register_fake(f"{NAMESPACE}::{self.name}", function)

    def register_autograd(self, backward: Function, *, setup_context: Function) -> None:
        """Give the gradient: functions as ``torch.library.register_autograd`` takes them."""
        overload = self.overload

        class Differentiable(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *arguments: Any) -> Any:
                with torch._C._AutoDispatchBelowAutograd():
                    output = overload(*arguments)
                setup_context(ctx, arguments, output)
                return output

            @staticmethod
            @once_differentiable
            def backward(ctx: Any, *grads: Any) -> Any:
                return backward(ctx, *grads)

        def autograd(*arguments: Any) -> Any:
            if torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in arguments):
                return Differentiable.apply(*arguments)  # type: ignore[no-untyped-call]
            with torch._C._AutoDispatchBelowAutograd():
                return overload(*arguments)

        _LIBRARY.impl(self.name, autograd, "Autograd")


def op(*, mutates_args: Sequence[str] = ()) -> Callable[[Function], Op]:
    """Register a function as the op of its name; ``mutates_args`` as in :class:`Op`."""
    return lambda function: Op(function.__name__, function, mutates_args)
