"""Find the kernel of an op in a backend; the reference stands in for optional ops that it lacks."""

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
    """Return the optional ops that ``backend`` lacks, and the reference does for it."""
    return tuple(op for op in OPTIONAL_OPS if op not in backend.kernels)


def kernel(backend_name: str, op: str, needs: str | None = None) -> Kernel:
    """Return the kernel of ``op`` in the named backend.

    The reference stands in for an optional op that the backend lacks, and for one that ``needs`` a
    capability that it lacks.

    Raises:
        EnvironmentProblem: ARB_TERNARY_STRICT forbids the stand-in.
    """
    backend = get_backend(backend_name)
    if needs is not None and needs not in backend.capabilities:
        return _stand_in(backend, op, f"{op} with {needs}")
    found = backend.kernels.get(op)
    if found is None:
        return _stand_in(backend, op, op)
    return found


def vote_kernel(state: VoteState, sign_op: str, scaled_op: str) -> Kernel:
    """Return the kernel that casts the votes of ``state``.

    It is that of ``scaled_op`` if the state has a ``vote_scale``, else that of ``sign_op``. Votes
    with a ``noise_shift`` need the capability ``narrow_noise``.
    """
    if state.vote_scale is None:
        return kernel(state.backend, sign_op)
    if NARROW_NOISE not in get_backend(state.backend).capabilities:
        limits = VoteLimits(*state.limits.tolist())
        if limits.noise_shift:
            return kernel(state.backend, scaled_op, NARROW_NOISE)
    return kernel(state.backend, scaled_op)


def check_vote_bits(backend_name: str, vote_bits: int) -> None:
    """Refuse accumulators of fewer than 8 bits if the backend lacks ``narrow_votes``.

    Raises:
        EnvironmentProblem: it does.
    """
    if vote_bits != 8 and NARROW_VOTES not in get_backend(backend_name).capabilities:
        raise EnvironmentProblem(
            f"backend {backend_name!r} lacks the capability {NARROW_VOTES!r}: it keeps "
            f"accumulators in 8 bits only, not in {vote_bits}",
            "choose vote_bits 8, or another backend: arb backends list",
        )


def pack_votes(backend_name: str, votes_NK: Tensor, vote_bits: int) -> Tensor:
    """Return int8 votes ``[N, K]`` in the layout of the named backend."""
    return _pack_votes(kernel(backend_name, "pack_votes"), votes_NK, vote_bits)


def _pack_votes(pack: Kernel, votes_NK: Tensor, vote_bits: int) -> Tensor:
    """Pack votes with a kernel; it is given the bits only if they are not 8."""
    packed: Tensor = pack(votes_NK) if vote_bits == 8 else pack(votes_NK, vote_bits)
    return packed


def _stand_in(backend: KernelBackend, op: str, described: str) -> Kernel:
    """Return the reference kernel of ``op`` for tensors in the layout of ``backend``.

    Its weight or state is converted from that layout and back.

    Raises:
        EnvironmentProblem: ARB_TERNARY_STRICT forbids it.
    """
    if STRICT.flag():
        raise EnvironmentProblem(
            f"backend {backend.name!r} has no kernel for {described!r}, and ARB_TERNARY_STRICT=1 "
            f"forbids a stand-in",
            "unset ARB_TERNARY_STRICT, or choose a backend that has it: arb backends explain",
        )
    reference_kernel = reference.KERNELS[op]
    own: Mapping[str, Kernel] = backend.kernels

    def converted(weight: Tensor, shape: WeightShape) -> Tensor:
        return reference.pack(own["unpack"](weight, shape))

    def embedding(
        ids: Tensor, weight: Tensor, exponent: Tensor, shape: WeightShape, dtype: Any
    ) -> Any:
        return reference_kernel(ids, converted(weight, shape), exponent, shape, dtype)

    def with_state(*arguments: Any) -> Any:
        state = next(argument for argument in arguments if isinstance(argument, VoteState))
        shape = state.shape
        copy = state._replace(weight=converted(state.weight, shape))
        if "unpack_votes" in own:  # without it, their layout is that of the reference
            votes = own["unpack_votes"](state.votes, shape)
            copy = copy._replace(votes=reference.pack_votes(votes, shape.vote_bits))

        replaced = [copy if each is state else each for each in arguments]
        result = reference_kernel(*replaced)

        if op.startswith("apply"):  # casting leaves the weight alone
            state.weight.copy_(own["pack"](reference.unpack(copy.weight, shape)))
        if "pack_votes" in own:
            votes = reference.unpack_votes(copy.votes, shape)
            state.votes.copy_(_pack_votes(own["pack_votes"], votes, shape.vote_bits))
        return result

    if op == "embedding":
        return embedding
    takes_state = op.endswith("_votes") and "pack" not in op
    return with_state if takes_state else reference_kernel
