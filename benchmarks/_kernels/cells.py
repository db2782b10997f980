"""A cell of the table: its sizes, its contenders, and how their results are checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal

import torch
from attrs import field, frozen
from torch import Tensor

from arb_ternary.backends.protocol import WeightShape
from arb_ternary.errors import ArbError
from harness.timing import Variant

Role = Literal["backend", "torch_bfloat16", "torch_int8", "torch_adamw", "peer"]
#: Copies of a cold operand take this many times the cache: replacement is not strictly by age.
_BEYOND: Final = 2
#: An operand of this many times the cache misses it alone.
_ALONE: Final = 4
#: Weights that share an exponent.
_GROUP: Final = 128


@frozen(kw_only=True)
class Cell:
    """A cell: its contenders take turns, and ratios are between them.

    Attributes:
        op: see :data:`_kernels.ops.OPS`.
        rows: ``M``.
        out_features: ``N``.
        in_features: ``K``.
        cold: operands come from memory: calls rotate among copies of the weight that no cache holds
            together. On a GPU the clock empties the cache before a call instead.
        cache_bytes: size of the last-level cache.
        device: where the operands are.
    """

    op: str
    rows: int
    out_features: int
    in_features: int
    cold: bool
    cache_bytes: int
    device: str = "cpu"

    @property
    def shape(self) -> WeightShape:
        """Logical shape of the weight."""
        return WeightShape(self.out_features, self.in_features, min(_GROUP, self.in_features))

    @property
    def operations(self) -> int:
        """Multiplications and additions of one product with the weight."""
        return 2 * self.rows * self.out_features * self.in_features

    def repeated(self, make: Callable[[], Any], nbytes: int) -> list[Any]:
        """Return as many operands of ``nbytes`` as calls rotate among in this cell."""
        copies = 1
        if self.cold and self.device == "cpu" and nbytes < _ALONE * self.cache_bytes:
            copies = max(2, -(-_BEYOND * self.cache_bytes // nbytes))
        return [make() for _ in range(copies)]

    @property
    def title(self) -> str:
        """Its description in messages."""
        where = "cold" if self.cold else "hot"
        return f"{self.op} {self.out_features}x{self.in_features}, M = {self.rows}, {where}"


@frozen(kw_only=True)
class Contender(Variant):
    """Something that takes part in a cell.

    Attributes:
        role: what it is compared as.
        check: computes once with poisoned outputs and raises :class:`ArbError` on a wrong result.
    """

    role: Role
    check: Callable[[], None] = field(repr=False)


def contender(
    cell: Cell,
    name: str,
    call: Callable[[Any], Any],
    make: Callable[[], Any],
    held: int,
    wanted: Sequence[Tensor],
    *,
    moved: int,
    operations: int = 0,
    tolerance: float = 0.0,
    role: Role = "backend",
    read: Callable[[Any, Any], Sequence[Tensor]] | None = None,
    restore: Callable[[Any], None] | None = None,
) -> Contender:
    """Make a contender.

    Args:
        cell: where.
        name: unique in the cell.
        call: does the work on one of the copies that calls rotate among.
        make: makes a copy.
        held: bytes of a copy.
        wanted: the right results.
        moved: bytes that a call reads and writes.
        operations: of a call; 0 where a rate means nothing.
        tolerance: largest error in root mean squares of what is wanted; 0 = equal.
        role: what it is compared as.
        read: returns the results, of the copy and of what ``call`` returned: by default that alone.
        restore: undoes what a call did to a copy, untimed.
    """
    copies = cell.repeated(make, held)

    def verify() -> None:
        copy = make()
        with poisoned():
            result = call(copy)
        found = [result] if read is None else read(copy, result)
        for got, right in zip(found, wanted, strict=True):
            check(f"{cell.title}: {name}", got, right, tolerance)

    return Contender(
        name=name,
        call=lambda i: call(copies[i]),
        restore=None if restore is None else lambda i: restore(copies[i]),
        copies=len(copies),
        nbytes=moved,
        operations=operations,
        role=role,
        check=verify,
    )


@contextmanager
def poisoned() -> Iterator[None]:
    """Make outputs that a kernel does not write look wrong.

    Within the block ``torch.empty`` gives NaN, or the largest integer.
    """
    filling: Any = torch.utils.deterministic
    before = torch.get_deterministic_debug_mode(), filling.fill_uninitialized_memory
    # Only the filling is wanted: an operation without a deterministic form would warn and go on.
    torch.set_deterministic_debug_mode("default")
    torch.use_deterministic_algorithms(True, warn_only=True)
    filling.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before[0])
        filling.fill_uninitialized_memory = before[1]


def check(what: str, got: Tensor, wanted: Tensor, tolerance: float = 0.0) -> None:
    """Check that two tensors are equal, or agree within a tolerance.

    Raises:
        ArbError: dtype or shape differ, or an element by more than ``tolerance`` root mean squares
            of what is wanted, or one is not finite.
    """
    if got.shape != wanted.shape or (got.dtype != wanted.dtype and not tolerance):
        raise ArbError(f"{what}: the result is {got.dtype} {tuple(got.shape)}, not {wanted.dtype}")
    wide = wanted.to(torch.float64)
    errors = (got.to(torch.float64) - wide).abs()
    allowed = tolerance * float(wide.square().mean().sqrt())
    wrong = int((~(errors <= allowed)).sum())  # NaN is wrong
    if wrong:
        raise ArbError(
            f"{what}: {wrong:,} of {got.numel():,} elements are wrong; the largest error is "
            f"{float(errors.max()):.4g}",
            "The kernel is wrong, or leaves a part of its output unwritten; a speed of it means "
            "nothing.",
        )
