"""The ops that are measured: what takes part in each, backends first, then torch's own.

Backends have to give the bits of the torch backend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from _kernels.cells import Contender, contender
from _kernels.operands import Operands
from arb_ternary.backends.dispatch import kernel
from arb_ternary.backends.vote_state import VoteLimits, VoteState, new_state

#: The backend that others are checked against.
_REFERENCE: Final = "torch"
#: Largest error of a float product, in root mean squares of the result: several roundings to
#: bfloat16.
_TOLERANCE: Final = 0.05
#: Quanta per trit, and a vote of one standard deviation: the default rule's cell and rate.
_CELL: Final = 64
_QUANTA: Final = 12.8
#: Largest vote in 256ths: 2.5 standard deviations; and the shift of the exponents' votes.
_LIMITS: Final = VoteLimits(round(256 * 2.5 * _QUANTA), 5)
#: Share of an accumulator that decays, in 2**-16: the default rule's leak times its rate.
_DECAY: Final = round(65536 * 0.02 * 0.2)
#: Share of accumulators that cross their threshold in a step.
_CROSSING: Final = 0.005
#: Seed, step, stream and micro-batch.
_CONTROL: Final = (11, 7, 3, 0)


def _packed(operands: Operands, backend: str) -> list[Tensor]:
    """Return the packed weight of a backend, and its exponents."""
    return [kernel(backend, "pack")(operands.trits), operands.exponent]


def _product(
    operands: Operands,
    name: str,
    call: Callable[..., Any],
    weight: Sequence[Tensor],
    left: Tensor,
    wanted: Tensor,
    **options: Any,
) -> Contender:
    """Make the contender of a product of ``left`` and a weight; ``call`` takes its tensors."""
    held = sum(tensor.nbytes for tensor in weight)
    return contender(
        operands.cell,
        name,
        lambda copy: call(*copy),
        lambda: [tensor.clone() for tensor in weight],
        held,
        [wanted],
        moved=held + left.nbytes + wanted.nbytes,
        operations=operands.cell.operations,
        **options,
    )


def _float_product(operands: Operands, left: Tensor, right: Tensor, wanted: Tensor) -> Contender:
    """Make torch's contender ``left @ right`` in bfloat16."""
    return _product(
        operands,
        "torch bfloat16",
        lambda weight: left @ weight,
        [right],
        left,
        wanted,
        role="torch_bfloat16",
        tolerance=_TOLERANCE,
    )


def _int_product(
    operands: Operands, left: Tensor, right: Tensor, *, transposed: bool = False
) -> Contender:
    """Make torch's contender ``left @ right`` of int8; sums of integers are exact in float64."""
    other = right.t() if transposed else right
    wanted = (left.to(torch.float64) @ other.to(torch.float64)).to(torch.int32)
    return _product(
        operands,
        "torch._int_mm",
        lambda codes: torch._int_mm(left, codes.t() if transposed else codes),
        [right],
        left,
        wanted,
        role="torch_int8",
    )


def linear(operands: Operands, backends: Sequence[str]) -> list[Contender]:
    """Make the contenders of ``x @ W.T`` of int8 rows, also with the quantisation of float rows."""
    shape = operands.cell.shape
    x = operands.x
    q = operands.q

    def times(backend: str) -> Callable[..., Any]:
        run = kernel(backend, "linear")
        return lambda *weight: run(q, operands.scale, *weight, None, shape, torch.float32)

    def quantise_and_times(backend: str) -> Callable[..., Any]:
        run = kernel(backend, "linear")
        quantise = kernel(backend, "quantize_rows")
        return lambda *weight: run(*quantise(x), *weight, None, shape, torch.float32)

    reference = _packed(operands, _REFERENCE)
    wanted = times(_REFERENCE)(*reference)
    of_floats = quantise_and_times(_REFERENCE)(*reference)
    made = []
    for name in backends:
        packed = _packed(operands, name)
        made.append(_product(operands, name, times(name), packed, q, wanted))
        made.append(
            _product(
                operands,
                f"{name} + quantize_rows",
                quantise_and_times(name),
                packed,
                x,
                of_floats,
            )
        )
    low = x.to(torch.bfloat16)
    floats = low.to(torch.float32) @ operands.dense.t()
    # A row of the weight is a column of the product's operand, as in torch.nn.Linear.
    made.append(_float_product(operands, low, operands.dense.to(torch.bfloat16).t(), floats))
    made.append(_int_product(operands, q, operands.trits, transposed=True))
    return made if operands.cell.device != "cpu" else [*made, _prepacked(operands)]


def _prepacked(operands: Operands) -> Contender:
    """Make oneDNN's int8 linear with a weight in its own layout, as inductor calls it.

    Activations are uint8 with an offset of 128: for signed ones it has no fast kernel on every
    processor.
    """
    q = operands.q
    trits = operands.trits
    ones = torch.ones(trits.shape[0])
    zeros = torch.zeros(trits.shape[0], dtype=torch.int64)
    codes = (q.to(torch.int16) + 128).to(torch.uint8)
    library = torch.ops.onednn
    wanted = q.to(torch.float64) @ trits.to(torch.float64).t()
    return contender(
        operands.cell,
        "torch onednn.qlinear",
        lambda packed: library.qlinear_pointwise(
            codes, 1.0, 128, packed, ones, zeros, None, 1.0, 0, torch.float32, "none", [], "none"
        ),
        lambda: library.qlinear_prepack(trits.clone(), list(q.shape)),
        trits.nbytes,
        [wanted.to(torch.float32)],
        moved=trits.nbytes + q.nbytes + wanted.nbytes // 2,
        operations=operands.cell.operations,
        role="torch_int8",
    )


def grad_input(operands: Operands, backends: Sequence[str]) -> list[Contender]:
    """Make the contenders of ``grad_y @ W`` of an int8 gradient."""
    shape = operands.cell.shape
    grad = operands.int8_gradient

    def times(backend: str) -> Callable[..., Any]:
        run = kernel(backend, "linear_grad_input")
        return lambda *weight: run(grad, operands.gradient_scale, *weight, shape, torch.float32)

    wanted = times(_REFERENCE)(*_packed(operands, _REFERENCE))
    made = [
        _product(operands, name, times(name), _packed(operands, name), grad, wanted)
        for name in backends
    ]
    low = operands.gradient.to(torch.bfloat16)
    floats = low.to(torch.float32) @ operands.dense
    made.append(_float_product(operands, low, operands.dense.to(torch.bfloat16), floats))
    made.append(_int_product(operands, grad, operands.trits))
    return made


# --- votes


def _state(operands: Operands, backend: str, votes_NK: Tensor, **others: Tensor) -> VoteState:
    shape = operands.cell.shape
    exponent = torch.zeros_like(operands.exponent)
    weight = kernel(backend, "pack")(operands.trits)
    votes = kernel(backend, "pack_votes")(votes_NK)
    control = torch.tensor(_CONTROL)
    return new_state(shape, weight, exponent, votes, backend, control=control, **others)


def _changing(state: VoteState) -> tuple[Tensor, Tensor, Tensor]:
    return state.weight, state.votes, state.learned


def _results(state: VoteState, more: Tensor) -> list[Tensor]:
    """Return weight and votes in logical order, exponents' votes, and sums or numbers of flips."""
    trits = kernel(state.backend, "unpack")(state.weight, state.shape)
    votes = kernel(state.backend, "unpack_votes")(state.votes, state.shape)
    return [trits, votes, state.learned, more.reshape(-1).to(torch.float32)]


def _updates(
    operands: Operands,
    backends: Sequence[str],
    op: str,
    state: Callable[[str], VoteState],
    run: Callable[..., Tensor],
    moved: int,
    operations: int,
) -> list[Contender]:
    """Make the contenders of an op that changes a weight's state, which is restored, untimed.

    ``run`` takes a backend's kernel and the state.
    """
    reference = state(_REFERENCE)
    wanted = _results(reference, run(kernel(_REFERENCE, op), reference))
    made = []
    for name in backends:
        fresh = _changing(state(name))

        def restore(copy: VoteState, fresh: tuple[Tensor, ...] = fresh) -> None:
            for own, before in zip(_changing(copy), fresh, strict=True):
                own.copy_(before)

        made.append(
            contender(
                operands.cell,
                name,
                partial(run, kernel(name, op)),
                partial(state, name),
                sum(tensor.nbytes for tensor in fresh),
                wanted,
                moved=moved,
                operations=operations,
                read=_results,
                restore=restore,
            )
        )
    return made


def cast_votes(operands: Operands, backends: Sequence[str]) -> list[Contender]:
    """Make the contenders of ``votes -= round(scaled(grad_y.T @ x))`` of int8 gradients.

    torch's contenders compute the matrix product alone, and leave the gradient in memory.
    """
    cell = operands.cell
    q = operands.q
    grad = operands.int8_gradient
    scale = operands.gradient_scale
    votes_NK = operands.integers(-_CELL + 1, _CELL - 1, cell.out_features, cell.in_features)
    # A shift by which one standard deviation becomes as many quanta.
    some = grad[:, :64].to(torch.float32).t() @ q.to(torch.float32)
    ratio = some.std() * scale / _QUANTA
    shifts = torch.zeros(cell.out_features + cell.in_features, dtype=torch.int32, device=q.device)
    shifts[: cell.out_features] = torch.log2(ratio).round().to(torch.int32)
    limits = torch.tensor(_LIMITS, device=q.device)

    def state(backend: str) -> VoteState:
        sums = torch.zeros(shifts.shape, device=q.device)
        return _state(
            operands, backend, votes_NK, magnitudes=sums, vote_scale=shifts, limits=limits
        )

    def run(cast: Callable[..., Any], state: VoteState) -> Tensor:
        cast(grad, q, scale, state)
        assert state.magnitudes is not None
        return state.magnitudes

    # Accumulators of 8 bits are read and written, trits of 2 bits read.
    moved = grad.nbytes + q.nbytes + votes_NK.numel() * 9 // 4
    made = _updates(operands, backends, "cast_scaled_votes", state, run, moved, cell.operations)
    left = operands.gradient.to(torch.bfloat16).t()
    right = operands.x.to(torch.bfloat16)
    wanted = left.to(torch.float32) @ right.to(torch.float32)
    made.append(_float_product(operands, left, right, wanted))
    # A matrix of one row or column is contiguous either way, which torch's product refuses.
    columns = grad.t().contiguous() if 1 in grad.shape else grad.t()
    made.append(_int_product(operands, columns, q))
    return made


def apply_votes(operands: Operands, backends: Sequence[str]) -> list[Contender]:
    """Make the contenders of votes to flips, with decay and carry.

    torch's contender is fused AdamW in float32 on as many parameters.
    """
    cell = operands.cell
    votes_NK = operands.integers(-_CELL + 1, _CELL - 1, cell.out_features, cell.in_features)
    crossing = operands.normal(*votes_NK.shape).abs() < _CROSSING * 1.25
    over = torch.where(votes_NK < 0, -_CELL - 9, _CELL + 9).to(torch.int8)
    votes_NK[crossing] = over[crossing]

    def run(apply: Callable[..., Any], state: VoteState) -> Tensor:
        flips: Tensor = apply(state, _CELL, _DECAY, True)
        return flips

    def state(backend: str) -> VoteState:
        return _state(operands, backend, votes_NK)

    moved = votes_NK.numel() * 9 // 4
    made = _updates(operands, backends, "apply_scaled_votes", state, run, moved, 0)
    held = 16 * votes_NK.numel()  # parameter, gradient and two moments
    made.append(
        contender(
            cell,
            "torch fused AdamW",
            lambda optimizer: optimizer.step(),
            partial(_adamw, operands),
            held,
            [],
            moved=held * 7 // 4,  # of the four, three are written
            role="torch_adamw",
            read=lambda _copy, _result: [],
        )
    )
    return made


def _adamw(operands: Operands) -> torch.optim.Optimizer:
    parameter = torch.nn.Parameter(operands.dense.clone())
    parameter.grad = operands.normal(*parameter.shape) * 1e-3
    optimizer = torch.optim.AdamW([parameter], lr=1e-4, fused=True)
    optimizer.step()
    return optimizer


#: What makes the contenders of an op.
OPS: Final[Mapping[str, Callable[[Operands, Sequence[str]], list[Contender]]]] = {
    "linear": linear,
    "linear_grad_input": grad_input,
    "cast_scaled_votes_int8": cast_votes,
    "apply_scaled_votes": apply_votes,
}
