"""Kernels that pack and unpack votes and flips: a backend's own, or those in torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from arb_ternary.backends.select import get_backend
from arb_ternary.environment import STRICT
from arb_ternary.errors import EnvironmentProblem
from arb_ternary_distributed.wire import digits, flips, rows

Kernel = Callable[..., Any]

#: Kernels that a backend may offer in addition to the ops of the core. The first two do not
#: depend on a layout.
WIRE_KERNELS: Final[Mapping[str, Kernel]] = {
    "distributed.digits_to_bytes": digits.digits_to_bytes,
    "distributed.add_digits_": digits.add_digits_,
    "distributed.weight_rows": rows.weight_rows,
    "distributed.flip_list": flips.flip_list,
    "distributed.apply_flips_": flips.apply_flips_,
}
#: Used for a backend with a layout of its own and without these; they take its name first.
_ANY_LAYOUT: Final[Mapping[str, Kernel]] = {
    "distributed.weight_rows": rows.repacked_rows,
    "distributed.flip_list": flips.unpacked_flip_list,
    "distributed.apply_flips_": flips.repacked_flips_,
}


def wire_kernel(backend: str, name: str) -> Kernel:
    """Return the kernel of this name in :data:`WIRE_KERNELS` for tensors of the named backend.

    Raises:
        EnvironmentProblem: the backend has none, and ``ARB_TERNARY_STRICT=1`` forbids a substitute.
    """
    if backend == "torch":
        return WIRE_KERNELS[name]
    found = get_backend(backend).kernels.get(name)
    if found is not None:
        return found
    if STRICT.flag():
        raise EnvironmentProblem(
            f"backend {backend!r} has no kernel for {name!r}, and ARB_TERNARY_STRICT=1 forbids a "
            f"substitute in torch",
            "unset ARB_TERNARY_STRICT, or choose a backend that has it: arb backends list",
        )
    if name in _ANY_LAYOUT:
        return partial(_ANY_LAYOUT[name], backend)
    return WIRE_KERNELS[name]
