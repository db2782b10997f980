"""Vectors of numbers around 1 that are means of trits: gains of norms and factors of rows.

A gain has to move in small steps. One trit with a power of two cannot do that: its next values are
half, twice and 0. A mean of trits can, and it learns by votes like any other ternary weight, so
that a model with such vectors has no float parameter.

A backend may have kernels for several vectors at once, which have float32 gradients and no summed
votes:

* ``vector_values(states) -> values``: 1 plus the sum of each row, float32 ``[N]`` per vector.
* ``cast_vectors(grads, states)``: the votes of :func:`~arb_ternary.backends.ops.embedding_backward`
  for gradients ``[N]`` that repeat in all columns; it counts the casts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from arb_ternary.backends import ops
from arb_ternary.backends.select import get_backend
from arb_ternary.backends.vote_state import VoteState
from arb_ternary.ternary.module import TernaryModule, VoteOptions
from arb_ternary_text.models.config import VECTOR_TRITS

#: The ops that a backend needs for several vectors at once.
VECTOR_OPS: Final = ("text.vector_values", "text.cast_vectors")

#: Initial accumulators are spread from minus this to this: one less than the smallest threshold at
#: which a rule flips a trit.
_SPREAD: Final = 31


class TritVector(TernaryModule):
    """``v[n] = 1 + sum_d T[n, d] / D``: numbers from 0 to 2 in steps of ``1 / D``, exact in
    bfloat16.

    It is 1 plus the row sums of a ternary matrix ``[N, D]`` with exponents ``-log2(D)``. All trits
    of a number have the same gradient and would flip at once, so their initial accumulators are
    spread. The accumulators have 8 bits, whatever those of the model's matrices have.

    Args:
        features: ``N``.
        trits: ``D``, one of :data:`VECTOR_TRITS`; all trits are 0 at initialisation.
        gradients: as for every ternary module.
        backend: as for every ternary module.
    """

    #: Without it, a number whose trits all move at once would move eight times as fast as AdamW
    #: moves a gain at its usual rates.
    rate_factor = 1 / 8

    def __init__(
        self, features: int, trits: int, *, gradients: str = "float", backend: str | None = None
    ) -> None:
        if trits not in VECTOR_TRITS:
            raise ValueError(f"trits must be one of {VECTOR_TRITS}, got {trits}")
        options = VoteOptions(scale_rule="frozen", gradients=gradients, backend=backend)
        super().__init__(features, trits, group_size="row", fan_in=1, **options)
        unit = 1 - trits.bit_length()
        zeros = torch.zeros(features, trits, dtype=torch.int8)
        votes = None
        if self.accumulates:
            spread = torch.linspace(-_SPREAD, _SPREAD, trits).round().to(torch.int8)
            votes = spread.expand_as(zeros).contiguous()
        self.set_trits(zeros, torch.full_like(self.exponent, unit), votes)

    def forward(self) -> Tensor:
        """Return ``v [N]``, float32; backward casts the votes."""
        values = _TOGETHER.get({}).pop(self, None)
        if values is not None:
            self.expect_votes(values)
            return values
        rows = torch.arange(self.shape.out_features, device=self.weight.device)
        return 1 + self.look_up(rows, torch.float32).sum(dim=1)

    @torch.no_grad()
    def values(self) -> Tensor:
        """Return ``v`` as float32 ``[N]``, without a gradient."""
        return 1 + self.dense_weight().sum(dim=1)


class _Values(torch.autograd.Function):
    """The numbers of several vectors of one backend as one node of the graph."""

    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, vectors: list[TritVector]) -> tuple[Tensor, ...]:
        states = [vector.vote_state() for vector in vectors]
        # Weights are kept so that torch notices if they change before backward.
        ctx.save_for_backward(*(state.weight for state in states))
        ctx.set_materialize_grads(False)
        ctx.states = states
        ctx.gradients = [vector.gradients for vector in vectors]
        kernels: Mapping[str, Any] = get_backend(states[0].backend).kernels
        ctx.cast = kernels["text.cast_vectors"]
        return tuple(kernels["text.vector_values"](states))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        _ = ctx.saved_tensors
        plain: list[tuple[Tensor, VoteState]] = []
        for grad_N, state, gradients in zip(grads, ctx.states, ctx.gradients, strict=True):
            if grad_N is None:
                continue
            if gradients == "float" and state.sums is None:
                plain.append((grad_N, state))
                continue
            rows, columns = state.sizes[:2]
            grad_ND = grad_N.unsqueeze(1).expand(rows, columns)
            ops.embedding_backward(torch.arange(rows), grad_ND, state, gradients)
        ctx.cast([grad for grad, _ in plain], [state for _, state in plain])
        return None, None


#: Numbers that were computed together, by the vector that will ask for them.
_TOGETHER: Final[ContextVar[dict[TritVector, Tensor]]] = ContextVar("_TOGETHER")


@contextmanager
def vectors_together(*modules: nn.Module) -> Iterator[None]:
    """Compute the numbers of all vectors in ``modules`` by two calls of a kernel, there and back.

    Each vector returns its number once within the ``with`` block. Nothing happens if no votes are
    cast, in a compiled graph, and for vectors of backends without such kernels.
    """
    found: list[TritVector] = []
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        found = [each for top in modules for each in top.modules() if _has_kernels(each)]
        found = [each for each in found if each.backend == found[0].backend]
    if not found:
        yield
        return
    values = _Values.apply(found[0].anchor, found)  # type: ignore[no-untyped-call]
    token = _TOGETHER.set(dict(zip(found, values, strict=True)))
    try:
        yield
    finally:
        _TOGETHER.reset(token)


def _has_kernels(module: nn.Module) -> TypeGuard[TritVector]:
    """Return whether a module is a vector that casts votes by kernels for vectors."""
    if type(module) is not TritVector or ops.is_traced(module.weight):
        return False
    if module.backend != module.chosen_backend or module.vote_anchor() is None:
        return False
    return "text.cast_vectors" in get_backend(module.backend).kernels
