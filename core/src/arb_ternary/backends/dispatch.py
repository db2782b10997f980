"""From (backend name, op name) to a kernel, with the reference standing in for optional ops that a backend lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from arb_ternary.backends import reference, reference_votes
from arb_ternary.backends.protocol import OPTIONAL_OPS, KernelBackend, WeightShape
from arb_ternary.backends.select import get_backend
from arb_ternary.environment import read_flag
from arb_ternary.errors import EnvironmentProblem

__all__ = ["fallback_ops", "kernel"]

Kernel = Callable[..., Any]


def fallback_ops(backend: KernelBackend) -> tuple[str, ...]:
    """Optional ops that the reference does for ``backend``."""
    return tuple(op for op in OPTIONAL_OPS if op not in backend.kernels)


def kernel(backend_name: str, op: str) -> Kernel:
    """The kernel of ``op`` in the named backend.

    Raises:
        EnvironmentProblem: an optional op is missing and ``ARB_TERNARY_STRICT=1`` forbids the reference to stand in.
    """
    backend = get_backend(backend_name)
    found = backend.kernels.get(op)
    if found is not None:
        return found
    if read_flag("ARB_TERNARY_STRICT"):
        raise EnvironmentProblem(
            f"backend {backend_name!r} has no kernel for {op!r}, and ARB_TERNARY_STRICT=1 forbids a stand-in",
            "unset ARB_TERNARY_STRICT, or choose a backend that has it: arb backends explain",
        )
    return _stand_in(backend, op)


def _stand_in(backend: KernelBackend, op: str) -> Kernel:
    """The reference kernel of ``op``, wrapped in conversions from and to the layout of ``backend``."""
    unpack, unpack_votes = backend.kernels["unpack"], backend.kernels.get("unpack_votes", reference.unpack_votes)
    pack_votes = backend.kernels.get("pack_votes", reference.pack_votes)

    def reference_packed(packed: Tensor, shape: WeightShape) -> Tensor:
        trits = unpack(packed, shape)
        assert isinstance(trits, Tensor)
        return reference.pack(trits)

    def embedding(ids: Tensor, packed: Tensor, exponent: Tensor, shape: WeightShape, dtype: Any) -> Tensor:
        return reference.embedding(ids, reference_packed(packed, shape), exponent, shape, dtype)

    def embedding_votes(ids: Tensor, grad: Tensor, scale: Any, packed: Tensor, votes: Tensor, *rest: Any) -> None:
        shape: WeightShape = rest[-1]
        logical = unpack_votes(votes, shape)
        assert isinstance(logical, Tensor)
        reference_votes.embedding_votes(ids, grad, scale, reference_packed(packed, shape), logical, *rest)
        votes.copy_(pack_votes(logical))  # type: ignore[arg-type]

    stand_ins: dict[str, Kernel] = {
        "pack_votes": reference.pack_votes,
        "unpack_votes": reference.unpack_votes,
        "quantize_gradient": reference_votes.quantize_gradient,
        "rms_norm_quantize": reference.rms_norm_quantize,
        "embedding": embedding,
        "embedding_votes": embedding_votes,
    }
    return stand_ins[op]
