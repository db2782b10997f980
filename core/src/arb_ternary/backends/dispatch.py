"""From (backend name, op name) to a kernel, with the reference standing in for optional ops that a
backend lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from arb_ternary.backends import reference
from arb_ternary.backends.protocol import (
    NARROW_NOISE,
    NARROW_VOTES,
    OPTIONAL_OPS,
    KernelBackend,
    WeightShape,
)
from arb_ternary.backends.select import get_backend
from arb_ternary.backends.vote_state import VoteLimits, VoteState
from arb_ternary.environment import STRICT
from arb_ternary.errors import EnvironmentProblem

Kernel = Callable[..., Any]


def fallback_ops(backend: KernelBackend) -> tuple[str, ...]:
    """Optional ops that the reference does for ``backend``."""
    return tuple(op for op in OPTIONAL_OPS if op not in backend.kernels)


def kernel(backend_name: str, op: str, needs: str | None = None) -> Kernel:
    """The kernel of ``op`` in the named backend; for a missing optional one, the reference's or
    EnvironmentProblem.

    So too for one of a backend that lacks a capability which the call ``needs``.
    """
    backend = get_backend(backend_name)
    found = backend.kernels.get(op)
    if needs is not None and needs not in backend.capabilities:
        return _stand_in(backend, op, f"{op} with {needs}")
    return _stand_in(backend, op, op) if found is None else found


def vote_kernel(state: VoteState, sign_op: str, scaled_op: str) -> Kernel:
    """The kernel that casts the votes of ``state``: of ``scaled_op`` if it has a ``vote_scale``,
    else of ``sign_op``.

    A backend without the capability ``narrow_noise`` casts no votes with a ``noise_shift``: there
    the reference does.
    """
    if state.vote_scale is None:
        return kernel(state.backend, sign_op)
    backend = get_backend(state.backend)
    if NARROW_NOISE not in backend.capabilities and VoteLimits(*state.limits.tolist()).noise_shift:
        return _stand_in(backend, scaled_op, f"{scaled_op} with {NARROW_NOISE}")
    return kernel(state.backend, scaled_op)


def check_vote_bits(backend_name: str, vote_bits: int) -> None:
    """EnvironmentProblem for accumulators of fewer than 8 bits where the backend lacks
    ``narrow_votes``.
    """
    if vote_bits != 8 and NARROW_VOTES not in get_backend(backend_name).capabilities:
        raise EnvironmentProblem(
            f"backend {backend_name!r} lacks the capability {NARROW_VOTES!r}: it keeps "
            f"accumulators in 8 bits only, not in {vote_bits}",
            "choose vote_bits 8, or another backend: arb backends list",
        )


def pack_votes(backend_name: str, votes_NK: Tensor, vote_bits: int) -> Tensor:
    """int8 votes ``[N, K]`` in the layout of the named backend; the bits are passed on only where
    they are not 8.
    """
    return _pack_votes(kernel(backend_name, "pack_votes"), votes_NK, vote_bits)


def _pack_votes(pack: Kernel, votes_NK: Tensor, vote_bits: int) -> Tensor:
    packed: Tensor = pack(votes_NK) if vote_bits == 8 else pack(votes_NK, vote_bits)
    return packed


def _stand_in(backend: KernelBackend, op: str, described: str) -> Kernel:
    """The reference kernel of ``op``, with its weight or state converted from and to the layout of
    ``backend``.
    """
    if STRICT.flag():
        raise EnvironmentProblem(
            f"backend {backend.name!r} has no kernel for {described!r}, and ARB_TERNARY_STRICT=1 "
            f"forbids a stand-in",
            "unset ARB_TERNARY_STRICT, or choose a backend that has it: arb backends explain",
        )
    theirs = reference.KERNELS[op]
    own: Mapping[str, Kernel] = backend.kernels

    def converted(weight: Tensor, shape: WeightShape) -> Tensor:
        return reference.pack(own["unpack"](weight, shape))

    def embedding(
        ids: Tensor, weight: Tensor, exponent: Tensor, shape: WeightShape, dtype: Any
    ) -> Any:
        return theirs(ids, converted(weight, shape), exponent, shape, dtype)

    def of_a_state(*arguments: Any) -> Any:
        state = next(argument for argument in arguments if isinstance(argument, VoteState))
        shape = state.shape
        held = state._replace(weight=converted(state.weight, shape))
        if "unpack_votes" in own:  # else their layout is the reference's
            held = held._replace(
                votes=reference.pack_votes(own["unpack_votes"](state.votes, shape), shape.vote_bits)
            )
        result = theirs(*(held if argument is state else argument for argument in arguments))
        if op.startswith("apply"):  # casting leaves the weight alone
            state.weight.copy_(own["pack"](reference.unpack(held.weight, shape)))
        if "pack_votes" in own:
            unpacked = reference.unpack_votes(held.votes, shape)
            state.votes.copy_(_pack_votes(own["pack_votes"], unpacked, shape.vote_bits))
        return result

    if op == "embedding":
        return embedding
    return of_a_state if op.endswith("_votes") and "pack" not in op else theirs
