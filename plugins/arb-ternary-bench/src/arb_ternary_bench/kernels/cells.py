"""A cell of the table: its sizes, its contenders, and how their results are checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal

import torch
from attrs import field, frozen
from torch import Tensor

from arb_ternary.backends.protocol import WeightShape
from arb_ternary.errors import ArbError
from arb_ternary_bench.kernels.cache import copies_beyond
from arb_ternary_bench.kernels.timing import Variant

Role = Literal["backend", "torch bfloat16", "torch int8", "torch AdamW", "peer", "probe"]


@frozen(kw_only=True)
class Cell:
    """A cell: its contenders take turns, and ratios are between them.

    Attributes:
        op: see :data:`arb_ternary_bench.kernels.ops.OPS`.
        rows: ``M``.
        out_features: ``N``.
        in_features: ``K``.
        group_size: ``G``.
        cold: operands come from memory: calls rotate among copies of the weight that no cache holds
            together. On a GPU the clock empties the cache before a call instead.
        cache_bytes: size of the last-level cache.
        threads: of every contender.
        device: where the operands are.
    """

    op: str
    rows: int
    out_features: int
    in_features: int
    group_size: int
    cold: bool
    cache_bytes: int
    threads: int
    device: str = "cpu"

    @property
    def shape(self) -> WeightShape:
        """Logical shape of the weight."""
        return WeightShape(self.out_features, self.in_features, self.group_size)

    @property
    def weights(self) -> int:
        """Number of weights, ``N * K``."""
        return self.out_features * self.in_features

    @property
    def product_operations(self) -> int:
        """Multiplications and additions of one product with the weight."""
        return 2 * self.rows * self.weights

    def copies(self, operand_bytes: int) -> int:
        """Return how many copies of an operand of this size the calls rotate among."""
        if self.cold and self.device == "cpu":
            return copies_beyond(self.cache_bytes, operand_bytes)
        return 1

    def repeated(self, make: Callable[[], Any], first: Any, nbytes: int) -> list[Any]:
        """Return ``first``, an operand of ``nbytes``, and as many others as the calls rotate among.

        ``make`` makes each of the others.
        """
        operands = [first]
        while len(operands) < self.copies(nbytes):
            operands.append(make())
        return operands

    @property
    def title(self) -> str:
        """Its description in messages."""
        where = "cold" if self.cold else "hot"
        return f"{self.op} {self.out_features}x{self.in_features}, M = {self.rows}, {where}"


@frozen(kw_only=True)
class Contender:
    """Something that takes part in a cell.

    Attributes:
        variant: what is timed; its name is unique within the cell.
        role: what it is compared as.
        name: of the backend, peer or torch function.
        check: computes once with poisoned outputs and raises :class:`ArbError` on a wrong result.
        checked: how exact the check is, for the record.
        note: what else a reader has to know, for example what the time includes.
    """

    variant: Variant
    role: Role
    name: str
    check: Callable[[], None] = field(repr=False)
    checked: str
    note: str = ""


#: Largest error of a float product, in root mean squares of the result: several roundings to
#: bfloat16.
_FLOAT_TOLERANCE: Final = 0.05


def _filling() -> Any:
    """Return the module with the switch for filling fresh memory, which type checkers lack."""
    return torch.utils.deterministic


@contextmanager
def poisoned(*outputs: tuple[tuple[int, ...], torch.dtype], device: str = "cpu") -> Iterator[None]:
    """Make outputs that a kernel does not write look wrong.

    Within the block ``torch.empty`` gives NaN, or the largest integer. Memory of the outputs' sizes
    is filled in the same way and released, for kernels that use the same allocator without torch.
    """
    before = torch.get_deterministic_debug_mode(), _filling().fill_uninitialized_memory
    # Only the filling is wanted: with "warn", an operation without a deterministic form would warn
    # and go on.
    torch.set_deterministic_debug_mode("default")
    torch.use_deterministic_algorithms(True, warn_only=True)
    _filling().fill_uninitialized_memory = True
    try:
        released = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in outputs]
        del released
        yield
    finally:
        torch.set_deterministic_debug_mode(before[0])
        _filling().fill_uninitialized_memory = before[1]


def check_equal(what: str, got: Tensor, wanted: Tensor) -> None:
    """Check that two tensors are equal.

    Raises:
        ArbError: an element differs, or dtype or shape do.
    """
    if got.dtype != wanted.dtype or got.shape != wanted.shape:
        raise ArbError(
            f"{what}: the result is {got.dtype} {tuple(got.shape)}, not {wanted.dtype} "
            f"{tuple(wanted.shape)}"
        )
    if not torch.equal(got, wanted):
        differs = got != wanted  # NaN differs from everything
        place = tuple(int(i) for i in differs.nonzero()[0])
        raise ArbError(
            f"{what}: {int(differs.sum()):,} of {got.numel():,} elements are wrong; the first, at "
            f"{place}, is {got[place].item()} instead of {wanted[place].item()}",
            "The kernel is wrong, or leaves a part of its output unwritten; a speed of it means "
            "nothing.",
        )


def check_close(
    what: str, got: Tensor, wanted: Tensor, tolerance: float = _FLOAT_TOLERANCE
) -> None:
    """Check that two tensors agree.

    Raises:
        ArbError: an element differs by more than ``tolerance`` root mean squares of what is wanted,
            or is not finite.
    """
    if got.shape != wanted.shape:
        raise ArbError(f"{what}: the result is {tuple(got.shape)}, not {tuple(wanted.shape)}")
    wide = wanted.to(torch.float32)
    error = (got.to(torch.float32) - wide).abs()
    size = float(wide.square().mean().sqrt())
    largest = float(error.max()) if error.numel() else 0.0
    if not largest <= tolerance * size:
        raise ArbError(
            f"{what}: the largest error is {largest:.4g}, where {tolerance * size:.4g} is allowed",
            "The kernel is wrong, or leaves a part of its output unwritten; a speed of it means "
            "nothing.",
        )
