"""Contenders of the training side: casting scaled votes, and turning them into flips."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from attrs import frozen
from torch import Tensor

from arb_ternary.backends.dispatch import kernel
from arb_ternary.backends.protocol import FUSED_VOTES
from arb_ternary.backends.select import get_backend
from arb_ternary.backends.vote_state import VoteLimits, VoteState, new_state
from arb_ternary.errors import ArbError
from arb_ternary_bench.kernels.cells import Cell, Contender, check_close, check_equal, poisoned
from arb_ternary_bench.kernels.operands import Operands
from arb_ternary_bench.kernels.products import Product
from arb_ternary_bench.kernels.timing import Variant

#: The backend that others are checked against.
_REFERENCE: Final = "torch"
#: Quanta per trit, and a vote of one standard deviation: the default rule's cell and rate.
_CELL: Final = 64
_QUANTA: Final = 12.8
#: Largest vote in 256ths: 2.5 standard deviations.
_LIMIT: Final = round(256 * 2.5 * _QUANTA)
_EXPONENT_SHIFT: Final = 5
#: Share of an accumulator that decays, in 2**-16: the default rule's leak times its rate.
_DECAY: Final = round(65536 * 0.02 * 0.2)
#: Share of accumulators that cross their threshold in a step.
_CROSSING: Final = 0.005
#: Seed, step, stream and micro-batch.
_CONTROL: Final = (11, 7, 3, 0)
_STANDS_IN: Final = "the torch backend stands in"


@frozen
class _Votes:
    """One copy of a weight and its votes, in a backend's layout."""

    state: VoteState

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """The tensors that an update changes."""
        return self.state.weight, self.state.votes, self.state.learned

    @property
    def nbytes(self) -> int:
        """Their size."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def clone(self) -> _Votes:
        """Return another copy."""
        weight, votes, exponent_votes = (tensor.clone() for tensor in self.tensors)
        state = self.state._replace(weight=weight, votes=votes, exponent_votes=exponent_votes)
        return _Votes(state)

    def copy_(self, other: _Votes) -> None:
        """Take the values of another copy."""
        for own, theirs in zip(self.tensors, other.tensors, strict=True):
            own.copy_(theirs)

    def logical(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return trits, votes and the exponents' votes."""
        weight, votes, exponent_votes = self.tensors
        backend = self.state.backend
        shape = self.state.shape
        trits = kernel(backend, "unpack")(weight, shape)
        return trits, kernel(backend, "unpack_votes")(votes, shape), exponent_votes


#: A fresh copy, and what an op does to a copy.
Update = tuple[_Votes, Callable[[_Votes], Tensor]]


def _votes(cell: Cell, operands: Operands, name: str, votes_NK: Tensor, **others: Tensor) -> _Votes:
    groups = cell.shape.groups
    exponent = torch.zeros(cell.out_features, groups, dtype=torch.int8, device=cell.device)
    weight = kernel(name, "pack")(operands.trits)
    votes = kernel(name, "pack_votes")(votes_NK)
    control = torch.tensor(_CONTROL)
    state = new_state(cell.shape, weight, exponent, votes, name, control=control, **others)
    return _Votes(state)


def _random_votes(cell: Cell, operands: Operands) -> Tensor:
    return operands.integers(-_CELL + 1, _CELL - 1, cell.out_features, cell.in_features)


# --- casting


def cast_contenders(
    cell: Cell, operands: Operands, backends: Sequence[str], *, integer: bool
) -> list[Contender]:
    """Make the contenders of ``votes -= round(scaled(grad_y.T @ x))``.

    Gradients are int8 and scaled by shifts, or bfloat16 and scaled by factors. torch's contenders
    compute the matrix product alone, and leave the gradient in memory.
    """
    votes_NK = _random_votes(cell, operands)
    grad = operands.int8_gradient if integer else operands.gradient.to(torch.bfloat16)
    scale = operands.gradient_scale if integer else None
    vote_scale = _vote_scale(cell, grad, scale, operands.q)

    def update_of(name: str) -> Update:
        run = kernel(name, "cast_scaled_votes")
        magnitudes = torch.zeros(cell.out_features + cell.in_features, device=cell.device)
        limits = torch.tensor(VoteLimits(_LIMIT, _EXPONENT_SHIFT), device=cell.device)

        def cast(votes: _Votes) -> Tensor:
            run(grad, operands.q, scale, votes.state)
            return magnitudes

        scaling = {"magnitudes": magnitudes, "vote_scale": vote_scale, "limits": limits}
        return _votes(cell, operands, name, votes_NK, **scaling), cast

    made = []
    for name in backends:
        backend = get_backend(name)
        note = ""
        if "cast_scaled_votes" not in backend.kernels:
            note = _STANDS_IN
        elif FUSED_VOTES not in backend.capabilities:
            note = "tiles of the gradient are tensors"
        fresh, cast = update_of(name)
        moved = fresh.nbytes + fresh.state.votes.nbytes + grad.nbytes + operands.q.nbytes
        check = _cast_check(cell, name, update_of, exact=integer)
        update = _Updating(cell, name, fresh, cast, check, moved, cell.product_operations)
        made.append(update.contender(note, exact=integer))
    made.extend(_gradient_products(cell, grad, operands, integer=integer))
    return made


def _vote_scale(cell: Cell, grad: Tensor, scale: Tensor | None, q: Tensor) -> Tensor:
    """Return factors or shifts that make one standard deviation :data:`_QUANTA` votes."""
    some = grad[:, :64].to(torch.float32).t() @ q.to(torch.float32)
    deviation = float(some.std()) * (1.0 if scale is None else float(scale))
    factor = torch.tensor(_QUANTA / max(deviation, 1e-20))
    size = cell.out_features + cell.in_features
    if scale is None:
        factors = torch.ones(size, device=cell.device)
        factors[: cell.out_features] = factor
        return factors
    shifts = torch.zeros(size, dtype=torch.int32, device=cell.device)
    shifts[: cell.out_features] = round(-float(torch.log2(factor)))
    return shifts


def _cast_check(
    cell: Cell, name: str, update_of: Callable[[str], Update], *, exact: bool
) -> Callable[[], None]:
    def cast_by(backend: str) -> tuple[Tensor, ...]:
        votes, cast = update_of(backend)
        gradient = ((cell.out_features, cell.in_features), torch.float32)
        with poisoned(gradient, device=cell.device):
            magnitudes = cast(votes)
        return (*votes.logical(), magnitudes)

    def check() -> None:
        what = f"{cell.title}: {name}"
        trits, votes, exponent_votes, magnitudes = cast_by(name)
        wanted = cast_by(_REFERENCE)
        check_equal(f"{what}, weight", trits, wanted[0])
        if exact:
            check_equal(f"{what}, votes", votes, wanted[1])
            check_equal(f"{what}, votes of exponents", exponent_votes, wanted[2])
            check_equal(f"{what}, magnitudes", magnitudes, wanted[3])
            return
        # The product is rounded to bfloat16, or not: a vote may then be drawn on the other side of
        # an integer.
        difference = (votes.to(torch.int16) - wanted[1]).abs()
        largest = int(difference.max())
        mean = float(difference.to(torch.float32).mean())
        if largest > 1 or mean > 0.1:
            raise ArbError(
                f"{what}: votes differ from those of backend {_REFERENCE!r} by up to {largest}, "
                f"{mean:.3f} on average, where 1 and 0.1 are allowed",
                "The kernel is wrong; its speed means nothing.",
            )
        check_close(f"{what}, magnitudes", magnitudes, wanted[3])

    return check


def _gradient_products(
    cell: Cell, grad: Tensor, operands: Operands, *, integer: bool
) -> list[Contender]:
    note = "the product grad_y.T @ x alone: no optimizer"
    left = operands.gradient.to(torch.bfloat16)
    right = operands.x.to(torch.bfloat16)
    wanted = left.to(torch.float32).t() @ right.to(torch.float32)
    floats = Product(cell, left, wanted, exact=False).contender(
        "torch bfloat16",
        lambda _: left.t() @ right,
        [(right,)],
        role="torch bfloat16",
        function="torch.matmul",
        note=note,
        rotates=False,
    )
    if not integer:
        return [floats]
    q = operands.q
    # A matrix of one row or column is contiguous either way, which torch's product refuses.
    columns = grad.t().contiguous() if 1 in grad.shape else grad.t()
    sums = (grad.to(torch.float64).t() @ q.to(torch.float64)).to(torch.int32)
    integers = Product(cell, grad, sums, exact=True).contender(
        "torch int8",
        lambda _: torch._int_mm(columns, q),
        [(q,)],
        role="torch int8",
        function="torch._int_mm",
        note=note,
        rotates=False,
    )
    return [floats, integers]


# --- applying


def apply_contenders(cell: Cell, operands: Operands, backends: Sequence[str]) -> list[Contender]:
    """Make the contenders of votes to flips, with decay and carry.

    torch's contender is fused AdamW in float32 on as many parameters.
    """
    votes_NK = _random_votes(cell, operands)
    crossing = operands.uniform(*votes_NK.shape) < _CROSSING
    over = torch.where(votes_NK < 0, -_CELL - 9, _CELL + 9).to(torch.int8)
    votes_NK[crossing] = over[crossing]

    def update_of(name: str) -> Update:
        run = kernel(name, "apply_scaled_votes")

        def apply(votes: _Votes) -> Tensor:
            flips: Tensor = run(votes.state, _CELL, _DECAY, True)
            return flips

        return _votes(cell, operands, name, votes_NK), apply

    made = []
    for name in backends:
        fresh, apply = update_of(name)
        note = "" if "apply_scaled_votes" in get_backend(name).kernels else _STANDS_IN
        moved = 2 * fresh.state.votes.nbytes + fresh.state.weight.nbytes
        check = _apply_check(cell, name, update_of)
        update = _Updating(cell, name, fresh, apply, check, moved, 0)
        made.append(update.contender(note, exact=True))
    made.append(_adamw(cell, operands))
    return made


def _apply_check(cell: Cell, name: str, update_of: Callable[[str], Update]) -> Callable[[], None]:
    def apply_by(backend: str) -> tuple[Tensor, ...]:
        votes, apply = update_of(backend)
        flips = apply(votes).to(torch.int64).reshape(())
        trits, accumulators, _ = votes.logical()
        return trits, accumulators, flips

    def check() -> None:
        parts = ("weight", "votes", "flips")
        for part, got, wanted in zip(parts, apply_by(name), apply_by(_REFERENCE), strict=True):
            check_equal(f"{cell.title}: {name}, {part}", got, wanted)

    return check


@frozen
class _Updating:
    """An op of a backend that changes a weight's state; the state is put back, untimed."""

    cell: Cell
    name: str
    fresh: _Votes
    update: Callable[[_Votes], Any]
    check: Callable[[], None]
    nbytes: int
    operations: int

    def contender(self, note: str, *, exact: bool) -> Contender:
        """Make the contender; ``exact`` says how exact its check is."""
        fresh = self.fresh
        update = self.update
        copies = self.cell.repeated(fresh.clone, fresh.clone(), fresh.nbytes)
        precision = "exact" if exact else "within tolerance"
        return Contender(
            variant=Variant(
                name=self.name,
                call=lambda i: update(copies[i]),
                restore=lambda i: copies[i].copy_(fresh),
                copies=len(copies),
                nbytes=self.nbytes,
                operations=self.operations,
                rotated_bytes=fresh.nbytes,
            ),
            role="backend",
            name=self.name,
            check=self.check,
            checked=f"{precision}, against backend {_REFERENCE}",
            note=note,
        )


def _adamw(cell: Cell, operands: Operands) -> Contender:
    size = (cell.out_features, cell.in_features)

    def optimizer() -> torch.optim.Optimizer:
        parameter = torch.nn.Parameter(operands.normal(*size) * 0.02)
        parameter.grad = operands.normal(*size) * 1e-3
        made = torch.optim.AdamW([parameter], lr=1e-4, fused=True)
        made.step()
        return made

    state_bytes = 16 * cell.weights  # parameter, gradient and two moments, all float32
    copies = cell.repeated(optimizer, optimizer(), state_bytes)

    def check() -> None:
        """Check a first step: each weight decays and moves by the rate against its gradient."""
        weight = operands.normal(64, 64)
        gradient = operands.normal(64, 64)
        parameter = torch.nn.Parameter(weight.clone())
        parameter.grad = gradient
        torch.optim.AdamW([parameter], lr=0.01, weight_decay=0.1, eps=1e-20, fused=True).step()
        wanted = weight * 0.999 - 0.01 * gradient.sign()
        check_close(f"{cell.title}: AdamW", parameter.detach(), wanted, 1e-4)

    return Contender(
        variant=Variant(
            name="torch fused AdamW",
            call=lambda i: copies[i].step(),
            copies=len(copies),
            nbytes=28 * cell.weights,  # 16 read and 12 written per weight
            rotated_bytes=state_bytes,
        ),
        role="torch AdamW",
        name="torch.optim.AdamW(fused=True), float32",
        check=check,
        checked="within tolerance",
    )
