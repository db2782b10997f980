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
from arb_ternary_bench.kernels.products import repeated
from arb_ternary_bench.kernels.timing import Variant

# : What votes are checked against, and what stands in for nothing here: the torch backend is the
# reference.
_REFERENCE: Final = "torch"
#: Quanta a trit, and a vote of one standard deviation: the default rule's cell and rate.
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


@frozen
class _Held:
    """One copy of a weight and its votes, in a backend's layout."""

    state: VoteState

    @property
    def changing(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.state.weight, self.state.votes, self.state.learned

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.changing)

    def clone(self) -> _Held:
        weight, votes, exponent_votes = (tensor.clone() for tensor in self.changing)
        return _Held(self.state._replace(weight=weight, votes=votes, exponent_votes=exponent_votes))

    def copy_(self, other: _Held) -> None:
        for own, theirs in zip(self.changing, other.changing, strict=True):
            own.copy_(theirs)

    def logical(self) -> tuple[Tensor, Tensor, Tensor]:
        """Trits, votes and the exponents' votes."""
        weight, votes, exponent_votes = self.changing
        name = self.state.backend
        shape = self.state.shape
        return (
            kernel(name, "unpack")(weight, shape),
            kernel(name, "unpack_votes")(votes, shape),
            exponent_votes,
        )


def _held(cell: Cell, operands: Operands, name: str, votes_NK: Tensor, **others: Tensor) -> _Held:
    exponent = torch.zeros(
        cell.out_features, cell.shape.groups, dtype=torch.int8, device=cell.device
    )
    weight = kernel(name, "pack")(operands.trits)
    votes = kernel(name, "pack_votes")(votes_NK)
    control = torch.tensor(_CONTROL)
    return _Held(new_state(cell.shape, weight, exponent, votes, name, control=control, **others))


# --- casting


def cast_contenders(
    cell: Cell, operands: Operands, backends: Sequence[str], *, integer: bool
) -> list[Contender]:
    """``votes -= round(scaled(grad_y.T @ x))``: of int8 gradients by shifts, or of bfloat16 ones by
    factors.

    torch's contenders do the matrix product alone, and leave the gradient in memory.
    """
    votes_NK = operands.integers(-_CELL + 1, _CELL - 1, cell.out_features, cell.in_features)
    grad = operands.int8_gradient if integer else operands.gradient.to(torch.bfloat16)
    scale = operands.gradient_scale if integer else None
    vote_scale = _vote_scale(cell, grad, scale, operands.q)

    def caster(name: str) -> tuple[_Held, Callable[[_Held], Tensor]]:
        run = kernel(name, "cast_scaled_votes")
        magnitudes = torch.zeros(cell.out_features + cell.in_features, device=cell.device)
        limits = torch.tensor(VoteLimits(_LIMIT, _EXPONENT_SHIFT), device=cell.device)

        def cast(held: _Held) -> Tensor:
            run(grad, operands.q, scale, held.state)
            return magnitudes

        scaling = {"magnitudes": magnitudes, "vote_scale": vote_scale, "limits": limits}
        return _held(cell, operands, name, votes_NK, **scaling), cast

    made = []
    for name in backends:
        fresh, cast = caster(name)
        note = (
            ""
            if "cast_scaled_votes" in get_backend(name).kernels
            else "the torch backend stands in"
        )
        if FUSED_VOTES not in get_backend(name).capabilities:
            note = note or "tiles of the gradient are tensors"
        moved = fresh.nbytes + fresh.state.votes.nbytes + grad.nbytes + operands.q.nbytes
        made.append(
            _updating(
                cell,
                name,
                fresh,
                cast,
                _cast_check(cell, name, caster, exact=integer),
                moved,
                cell.product_operations,
                note,
                exact=integer,
            )
        )
    made.extend(_gradient_products(cell, grad, operands, integer=integer))
    return made


def _vote_scale(cell: Cell, grad: Tensor, scale: Tensor | None, q: Tensor) -> Tensor:
    """Factors or shifts that turn one standard deviation of the gradient into :data:`_QUANTA`
    votes.
    """
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
    cell: Cell, name: str, caster: Callable[[str], Any], *, exact: bool
) -> Callable[[], None]:
    def check() -> None:
        results = []
        for each in (name, _REFERENCE):
            held, cast = caster(each)
            with poisoned(
                ((cell.out_features, cell.in_features), torch.float32), device=cell.device
            ):
                magnitudes = cast(held)
            results.append((*held.logical(), magnitudes))
        (
            (trits, votes, exponent_votes, sizes),
            (_, wanted_votes, wanted_exponent_votes, wanted_sizes),
        ) = results
        what = f"{cell.title}: {name}"
        check_equal(f"{what}, weight", trits, results[1][0])
        if exact:
            check_equal(f"{what}, votes", votes, wanted_votes)
            check_equal(f"{what}, votes of exponents", exponent_votes, wanted_exponent_votes)
            check_equal(f"{what}, magnitudes", sizes, wanted_sizes)
            return
        # The product is rounded to bfloat16, or not: a vote may then be drawn on the other side of
        # an integer.
        difference = (votes.to(torch.int16) - wanted_votes).abs()
        if int(difference.max()) > 1 or float(difference.to(torch.float32).mean()) > 0.1:
            raise ArbError(
                f"{what}: votes differ from those of backend {_REFERENCE!r} by up to "
                f"{int(difference.max())}, {float(difference.to(torch.float32).mean()):.3f} on "
                "average, where 1 and 0.1 are allowed",
                "The kernel is wrong; a speed of it means nothing.",
            )
        check_close(f"{what}, magnitudes", sizes, wanted_sizes)

    return check


def _gradient_products(
    cell: Cell, grad: Tensor, operands: Operands, *, integer: bool
) -> list[Contender]:
    left = operands.gradient.to(torch.bfloat16)
    right = operands.x.to(torch.bfloat16)
    wanted = left.to(torch.float32).t() @ right.to(torch.float32)
    made = [
        _gradient_product(cell, "torch bfloat16", left, right, wanted, lambda: left.t() @ right)
    ]
    if integer:
        q = operands.q
        columns = grad.t().contiguous() if 1 in grad.shape else grad.t()
        exact = (grad.to(torch.float64).t() @ q.to(torch.float64)).to(torch.int32)
        made.append(
            _gradient_product(cell, "torch int8", grad, q, exact, lambda: torch._int_mm(columns, q))
        )
    return made


def _gradient_product(
    cell: Cell, role: Any, left: Tensor, right: Tensor, wanted: Tensor, call: Callable[[], Tensor]
) -> Contender:
    exact = not wanted.is_floating_point()

    def check() -> None:
        with poisoned((tuple(wanted.shape), wanted.dtype), device=cell.device):
            got = call()
        (check_equal if exact else check_close)(f"{cell.title}: {role}", got, wanted)

    return Contender(
        variant=Variant(
            name=role,
            call=lambda _: call(),
            nbytes=left.nbytes + right.nbytes + wanted.nbytes,
            operations=cell.product_operations,
        ),
        role=role,
        name="torch._int_mm" if exact else "torch.matmul",
        check=check,
        checked="exact" if exact else "within tolerance",
        note="the product grad_y.T @ x alone: no optimizer",
    )


# --- applying


def apply_contenders(cell: Cell, operands: Operands, backends: Sequence[str]) -> list[Contender]:
    """Votes to flips, with decay and carry; torch's contender is fused AdamW in float32 on as many
    parameters.
    """
    votes_NK = operands.integers(-_CELL + 1, _CELL - 1, cell.out_features, cell.in_features)
    crossing = operands.uniform(*votes_NK.shape) < _CROSSING
    votes_NK[crossing] = torch.where(votes_NK[crossing] < 0, -_CELL - 9, _CELL + 9).to(torch.int8)

    def applier(name: str) -> tuple[_Held, Callable[[_Held], Tensor]]:
        run = kernel(name, "apply_scaled_votes")

        def apply(held: _Held) -> Tensor:
            flips: Tensor = run(held.state, _CELL, _DECAY, True)
            return flips

        return _held(cell, operands, name, votes_NK), apply

    made = []
    for name in backends:
        fresh, apply = applier(name)
        note = (
            ""
            if "apply_scaled_votes" in get_backend(name).kernels
            else "the torch backend stands in"
        )
        moved = 2 * fresh.state.votes.nbytes + fresh.state.weight.nbytes
        made.append(
            _updating(
                cell,
                name,
                fresh,
                apply,
                _apply_check(cell, name, applier),
                moved,
                0,
                note,
                exact=True,
            )
        )
    made.append(_adamw(cell, operands))
    return made


def _apply_check(cell: Cell, name: str, applier: Callable[[str], Any]) -> Callable[[], None]:
    def check() -> None:
        results = []
        for each in (name, _REFERENCE):
            held, apply = applier(each)
            flips = apply(held)
            results.append((*held.logical()[:2], flips.to(torch.int64).reshape(())))
        for part, got, wanted in zip(("weight", "votes", "flips"), *results, strict=True):
            check_equal(f"{cell.title}: {name}, {part}", got, wanted)

    return check


def _updating(
    cell: Cell,
    name: str,
    fresh: _Held,
    update: Callable[[_Held], Any],
    check: Callable[[], None],
    nbytes: int,
    operations: int,
    note: str,
    *,
    exact: bool,
) -> Contender:
    """A contender whose calls change a weight's state, which is put back, untimed, after each."""
    copies = repeated(cell, fresh.clone, fresh.clone(), fresh.nbytes)
    return Contender(
        variant=Variant(
            name=name,
            call=lambda i: update(copies[i]),
            restore=lambda i: copies[i].copy_(fresh),
            copies=len(copies),
            nbytes=nbytes,
            operations=operations,
            rotated_bytes=fresh.nbytes,
        ),
        role="backend",
        name=name,
        check=check,
        checked=f"{'exact' if exact else 'within tolerance'}, against backend {_REFERENCE}",
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

    state_bytes = 16 * cell.weights  # the parameter, its gradient and two moments, all float32
    copies = repeated(cell, optimizer, optimizer(), state_bytes)

    def check() -> None:
        """One step of AdamW from nothing moves every weight by the rate, against its gradient,
        after the decay.
        """
        weight = operands.normal(64, 64)
        gradient = operands.normal(64, 64)
        parameter = torch.nn.Parameter(weight.clone())
        parameter.grad = gradient
        torch.optim.AdamW([parameter], lr=0.01, weight_decay=0.1, eps=1e-20, fused=True).step()
        check_close(
            f"{cell.title}: AdamW",
            parameter.detach(),
            weight * 0.999 - 0.01 * gradient.sign(),
            1e-4,
        )

    return Contender(
        variant=Variant(
            name="torch fused AdamW",
            call=lambda i: copies[i].step(),
            copies=len(copies),
            nbytes=28 * cell.weights,  # 16 read and 12 written a weight
            rotated_bytes=state_bytes,
        ),
        role="torch AdamW",
        name="torch.optim.AdamW(fused=True), float32",
        check=check,
        checked="within tolerance",
    )
