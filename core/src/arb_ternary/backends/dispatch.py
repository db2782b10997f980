"""From (backend name, op name) to a kernel, with the reference standing in for optional ops that a backend lacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from arb_ternary.backends import reference, reference_scaled_votes, reference_votes
from arb_ternary.backends.protocol import NARROW_VOTES, OPTIONAL_OPS, KernelBackend, WeightShape
from arb_ternary.backends.select import get_backend
from arb_ternary.environment import STRICT
from arb_ternary.errors import EnvironmentProblem

__all__ = ["Kernel", "check_vote_bits", "fallback_ops", "kernel", "pack_votes"]

Kernel = Callable[..., Any]


def fallback_ops(backend: KernelBackend) -> tuple[str, ...]:
    """Optional ops that the reference does for ``backend``."""
    return tuple(op for op in OPTIONAL_OPS if op not in backend.kernels)


def kernel(backend_name: str, op: str, *, needs: str | None = None) -> Kernel:
    """The kernel of ``op`` in the named backend.

    Args:
        backend_name: a name of ``arb backends list``.
        op: an op of the protocol.
        needs: a capability without which the backend's own kernel of an optional op does not serve.

    Raises:
        EnvironmentProblem: an optional op is missing and ``ARB_TERNARY_STRICT=1`` forbids the reference to stand in.
    """
    backend = get_backend(backend_name)
    found = backend.kernels.get(op)
    if found is not None and (needs is None or needs in backend.capabilities):
        return found
    if STRICT.flag():
        what = op if needs is None else f"{op} with {needs}"
        raise EnvironmentProblem(
            f"backend {backend_name!r} has no kernel for {what!r}, and ARB_TERNARY_STRICT=1 forbids a stand-in",
            "unset ARB_TERNARY_STRICT, or choose a backend that has it: arb backends explain",
        )
    return _stand_in(backend, op)


def check_vote_bits(backend_name: str, vote_bits: int) -> None:
    """Refuse accumulators of fewer than 8 bits for a backend that does not serve them.

    Raises:
        EnvironmentProblem: the backend lacks the capability ``narrow_votes``.
    """
    if vote_bits != 8 and NARROW_VOTES not in get_backend(backend_name).capabilities:
        raise EnvironmentProblem(
            f"backend {backend_name!r} lacks the capability {NARROW_VOTES!r}: it keeps accumulators in 8 bits only, "
            f"not in {vote_bits}",
            "choose vote_bits 8, or another backend: arb backends list",
        )


def pack_votes(backend_name: str, votes_NK: Tensor, vote_bits: int) -> Tensor:
    """int8 votes ``[N, K]`` in the layout of the named backend; the bits are passed on only where they are not 8."""
    bits = () if vote_bits == 8 else (vote_bits,)
    packed: Tensor = kernel(backend_name, "pack_votes")(votes_NK, *bits)
    return packed


def _stand_in(backend: KernelBackend, op: str) -> Kernel:
    """The reference kernel of ``op``, wrapped in conversions from and to the layout of ``backend``."""
    found: dict[str, Kernel] = {
        "pack_votes": reference.pack_votes,
        "unpack_votes": reference.unpack_votes,
        "quantize_gradient": reference_votes.quantize_gradient,
        "rms_norm_quantize": reference.rms_norm_quantize,
    }
    if op in found:
        return found[op]
    layout = _Layout(backend)

    def embedding(ids: Tensor, packed: Tensor, exponent: Tensor, shape: WeightShape, dtype: Any) -> Tensor:
        return reference.embedding(ids, layout.weight(packed, shape), exponent, shape, dtype)

    def embedding_votes(ids: Tensor, grad: Tensor, scale: Any, packed: Tensor, votes: Tensor, *rest: Any) -> None:
        shape: WeightShape = rest[-1]
        held = layout.votes(votes, shape)
        reference_votes.embedding_votes(ids, grad, scale, layout.weight(packed, shape), held, *rest)
        layout.store_votes(votes, held, shape)

    def cast_scaled_votes(
        grad: Tensor, x: Tensor, scale: Any, packed: Tensor, votes: Tensor, *rest: Any, noise_shift: int = 0
    ) -> None:
        shape: WeightShape = rest[-1]
        weight, held = layout.weight(packed, shape), layout.votes(votes, shape)
        reference_scaled_votes.cast_scaled_votes(grad, x, scale, weight, held, *rest, noise_shift=noise_shift)
        layout.store_votes(votes, held, shape)

    def embedding_scaled_votes(
        ids: Tensor, grad: Tensor, scale: Any, packed: Tensor, votes: Tensor, *rest: Any, noise_shift: int = 0
    ) -> None:
        shape: WeightShape = rest[-1]
        weight, held = layout.weight(packed, shape), layout.votes(votes, shape)
        reference_scaled_votes.embedding_scaled_votes(ids, grad, scale, weight, held, *rest, noise_shift=noise_shift)
        layout.store_votes(votes, held, shape)

    def apply_scaled_votes(packed: Tensor, votes: Tensor, *rest: Any) -> Tensor:
        shape: WeightShape = rest[-1]
        weight, held = layout.weight(packed, shape), layout.votes(votes, shape)
        flips = reference_scaled_votes.apply_scaled_votes(weight, held, *rest)
        layout.store_weight(packed, weight, shape)
        layout.store_votes(votes, held, shape)
        return flips

    converting: tuple[Kernel, ...] = (
        embedding,
        embedding_votes,
        cast_scaled_votes,
        embedding_scaled_votes,
        apply_scaled_votes,
    )
    return next(stand_in for stand_in in converting if stand_in.__name__ == op)


class _Layout:
    """Conversions between the layout of a backend and that of the reference."""

    def __init__(self, backend: KernelBackend) -> None:
        self._kernels: Mapping[str, Kernel] = backend.kernels
        self._votes_as_reference = "pack_votes" not in backend.kernels

    def weight(self, packed: Tensor, shape: WeightShape) -> Tensor:
        return reference.pack(self._kernels["unpack"](packed, shape))

    def store_weight(self, packed: Tensor, weight: Tensor, shape: WeightShape) -> None:
        packed.copy_(self._kernels["pack"](reference.unpack(weight, shape)))

    def votes(self, votes: Tensor, shape: WeightShape) -> Tensor:
        """Votes for the reference; they are the backend's own where it leaves their layout to the reference."""
        if self._votes_as_reference:
            return votes
        return reference.pack_votes(self._kernels["unpack_votes"](votes, shape), shape.vote_bits)

    def store_votes(self, votes: Tensor, held: Tensor, shape: WeightShape) -> None:
        if not self._votes_as_reference:
            bits = () if shape.vote_bits == 8 else (shape.vote_bits,)
            votes.copy_(self._kernels["pack_votes"](reference.unpack_votes(held, shape), *bits))
