"""Votes of orthogonalised gradients: backends that ``run_end.py`` tries and no package has, a plugin file for it alone.

Muon (Jordan et al., 2024) replaces a gradient ``G`` by the nearest matrix whose singular values are all equal. Here the
gradient of one weight in one backward pass is so replaced before it is rounded to votes, wholly or by half; nothing of
it is kept, so that the state of a run is what it was. The kernels are those of the backend ``cpu``, but for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from arb_ternary import hookimpl
from arb_ternary.backends.protocol import FUSED_VOTES, KernelBackend
from arb_ternary.backends.vote_state import VoteState
from arb_ternary.specs import BackendSpec
from arb_ternary_cpu.backend import CpuBackend, build
from arb_ternary_cpu.isa import chosen_isa

ARB_API_VERSION = (1, 0)

#: The odd polynomial that drives singular values in (0, 1] towards 1, and how often Muon applies it.
POLYNOMIAL: Final = (3.4445, -4.7750, 2.0315)
ROUNDS: Final = 5
#: What a gradient of zeros is divided by.
TINY: Final = 1e-20


def orthogonalised(gradient_NK: Tensor) -> Tensor:
    """About ``U V^T`` of ``U S V^T``, by Newton and Schulz's iteration; float32 ``[N, K]``."""
    x = gradient_NK / gradient_NK.norm().clamp_min(TINY)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    first, third, fifth = POLYNOMIAL
    for _ in range(ROUNDS):
        square = x @ x.T
        x = first * x + (third * square + fifth * square @ square) @ x
    result: Tensor = x.T if tall else x
    return result.contiguous()


def even(matrix: Tensor) -> Tensor:
    """``matrix`` with a mean square of 1."""
    result: Tensor = matrix / matrix.square().mean().sqrt().clamp_min(TINY)
    return result


def orthogonal(name: str, share: float) -> KernelBackend:
    """The backend ``cpu``, whose scaled votes are those of gradients of which a share is orthogonalised."""
    cpu = build()
    plain = cpu.kernels["cast_scaled_votes"]

    def cast(grad: Tensor, x: Tensor, scale: Tensor | None, state: VoteState) -> None:
        if scale is not None:
            raise ValueError("gradients in int8 are not orthogonalised: take gradients 'float'")
        gradient = grad.float().T @ x.float()
        mixed = share * even(orthogonalised(gradient)) + (1.0 - share) * even(gradient)
        plain(torch.eye(mixed.shape[0]), mixed.contiguous(), None, state)

    kernels = {**cpu.kernels, "cast_scaled_votes": cast}
    return CpuBackend(chosen_isa(), name=name, capabilities=cpu.capabilities - {FUSED_VOTES}, kernels=kernels)


def build_whole() -> KernelBackend:
    """Votes of the orthogonalised gradient."""
    return orthogonal("orthogonal", 1.0)


def build_half() -> KernelBackend:
    """Votes of half the gradient and half what it is orthogonalised."""
    return orthogonal("half_orthogonal", 0.5)


@hookimpl
def arb_register_backends() -> Sequence[BackendSpec]:
    return tuple(
        BackendSpec(
            name=name,
            target=f"run_end_orthogonal:{factory.__name__}",
            probe="arb_ternary_cpu.probe:probe",
            priority=-20,
            summary="votes of orthogonalised gradients",
        )
        for name, factory in (("orthogonal", build_whole), ("half_orthogonal", build_half))
    )
