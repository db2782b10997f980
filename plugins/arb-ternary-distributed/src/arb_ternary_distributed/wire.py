"""The kernels by which votes and flips travel: a backend's own, or those in torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from arb_ternary.backends.select import get_backend
from arb_ternary.environment import STRICT
from arb_ternary.errors import EnvironmentProblem
from arb_ternary_distributed import digits, flips, rows

Kernel = Callable[..., Any]

#: What a backend may offer beside the ops of core. The first three know no layout of weights.
WIRE_KERNELS: Final[Mapping[str, Kernel]] = {
    "distributed.digits_to_bytes": digits.digits_to_bytes,
    "distributed.bytes_to_digits": digits.bytes_to_digits,
    "distributed.add_digits_": digits.add_digits_,
    "distributed.weight_rows": rows.weight_rows,
    "distributed.flip_list": flips.flip_list,
    "distributed.apply_flips_": flips.apply_flips_,
}
# : What stands in for those that do, where a backend has a layout of its own; the first argument is
# its name.
_ANY_LAYOUT: Final[Mapping[str, Kernel]] = {
    "distributed.weight_rows": rows.repacked_rows,
    "distributed.flip_list": flips.unpacked_flip_list,
    "distributed.apply_flips_": flips.repacked_flips_,
}


def wire_kernel(backend: str, name: str) -> Kernel:
    """The kernel of this name of :data:`WIRE_KERNELS` for tensors of the named backend.

    Raises:
        EnvironmentProblem: the backend has none, and ``ARB_TERNARY_STRICT=1`` forbids a stand-in.
    """
    if backend == "torch":
        return WIRE_KERNELS[name]
    found = get_backend(backend).kernels.get(name)
    if found is not None:
        return found
    if STRICT.flag():
        raise EnvironmentProblem(
            f"backend {backend!r} has no kernel for {name!r}, and ARB_TERNARY_STRICT=1 forbids a "
            f"stand-in",
            "unset ARB_TERNARY_STRICT, or choose a backend that has it: arb backends list",
        )
    return partial(_ANY_LAYOUT[name], backend) if name in _ANY_LAYOUT else WIRE_KERNELS[name]
