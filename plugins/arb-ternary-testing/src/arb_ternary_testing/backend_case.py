"""The base of the backend suite: the backend under test, random data, conversion of layouts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Final, TypeVar

import numpy as np
import pytest
import torch
from attrs import frozen
from hypothesis import HealthCheck, settings
from numpy.testing import assert_array_equal
from torch import Tensor

from arb_ternary.backends import reference
from arb_ternary.backends.protocol import NARROW_VOTES, KernelBackend, WeightShape
from arb_ternary.backends.vote_state import VoteState, new_state
from arb_ternary_testing.restatement import Array, dense_weight, float32, int8

#: ``(M, N, K)`` of a product: rows of the input, output features, input features.
Sizes = tuple[int, int, int]
_Test = TypeVar("_Test", bound=Callable[..., None])

#: Ones, primes, one off a power of two, and exact multiples of common tile sizes.
SHAPES: Final[tuple[Sizes, ...]] = (
    (1, 1, 1),
    (2, 5, 1),
    (3, 1, 9),
    (1, 5, 31),
    (2, 16, 128),
    (3, 33, 129),
    (7, 17, 300),
    (16, 64, 256),
)
#: Group sizes of the format; 0 stands for one exponent per row.
GROUP_SIZES: Final = (32, 64, 128, 256, 0)

#: Rows, columns and vote bits of weights whose votes are applied in one call.
MANY_WEIGHTS: Final = ((7, 131, 8), (1, 1, 8), (40, 640, 8), (300, 64, 4), (9, 333, 2))

every_shape = pytest.mark.parametrize("sizes", SHAPES)
every_group_size = pytest.mark.parametrize("group_size", GROUP_SIZES)


def examples(count: int) -> Callable[[_Test], _Test]:
    """Return settings for a property test that several classes inherit and slow kernels run."""
    return settings(
        max_examples=count,
        deadline=None,
        suppress_health_check=[
            HealthCheck.differing_executors,
            HealthCheck.function_scoped_fixture,
            HealthCheck.too_slow,
        ],
    )


def integers(seed: int, rows: int, columns: int, largest: int) -> Array:
    """Return a random int64 matrix with entries from ``-largest`` to ``largest``."""
    rng = np.random.default_rng(seed)
    return rng.integers(-largest, largest + 1, (rows, columns))


def small_floats(seed: int, rows: int, columns: int, largest: int) -> Array:
    """Return a random float32 matrix of integers, whose products and sums are exact."""
    return float32(integers(seed, rows, columns, largest))


def random_int8(seed: int, rows: int, columns: int, largest: int = 127) -> Array:
    """Return a random int8 matrix with entries from ``-largest`` to ``largest``."""
    return int8(integers(seed, rows, columns, largest))


def any_int8(seed: int, rows: int, columns: int) -> Array:
    """Return a random int8 matrix with entries from the whole range, -128 included."""
    rng = np.random.default_rng(seed)
    return int8(rng.integers(-128, 128, (rows, columns)))


def filled(value: float, rows: int, columns: int) -> Array:
    """Return an int8 matrix in which every entry is ``value``."""
    return np.full((rows, columns), value, np.int8)


def ones(rows: int, columns: int) -> Array:
    """Return a float32 matrix of ones."""
    return np.ones((rows, columns), np.float32)


def normal(seed: int, rows: int, columns: int) -> Array:
    """Return a random float32 matrix with standard normal entries."""
    rng = np.random.default_rng(seed)
    return float32(rng.standard_normal((rows, columns)))


def random_trits(seed: int, rows: int, columns: int) -> Array:
    """Return a random int8 matrix of trits."""
    return random_int8(seed, rows, columns, largest=1)


def gradient_with_nan() -> tuple[Array, Array, Array]:
    """Return ``grad`` [3, 5] and ``x`` [3, 40], each with one NaN, and the product ``grad.T @ x``.

    NaN fills row 2 and column 7 of the product.
    """
    grad = small_floats(1, 3, 5, 2)
    x = small_floats(2, 3, 40, 2)
    grad[1, 2] = np.nan
    x[0, 7] = np.nan
    with np.errstate(invalid="ignore"):
        product = grad.T @ x
    return grad, x, product


def squares_by_row_and_column(values: Array) -> Array:
    """Return the statistics of a gradient: no NaN, then sums of squares by row and by column."""
    squares = values.astype(np.float64) ** 2
    by_row = squares.sum(axis=1)
    by_column = squares.sum(axis=0)
    return np.concatenate([[0.0], by_row, by_column])


def sum_by_row(ids: Array, values: Array, rows: int) -> Array:
    """Return the sum of the rows of ``values`` that have the same id: int64 ``[rows, K]``."""
    total = np.zeros((rows, values.shape[1]), np.int64)
    np.add.at(total, ids, values)
    return total


@frozen(eq=False)
class Weight:
    """A weight in numpy and in the layout of the backend under test."""

    trits: Array
    exponent: Array
    shape: WeightShape
    packed: Tensor
    exponent_tensor: Tensor

    @property
    def group_size(self) -> int:
        """Weights per exponent."""
        return self.shape.group_size

    @property
    def dense(self) -> Array:
        """The weight as a float64 matrix ``[N, K]``, exact."""
        return dense_weight(self.trits, self.exponent, self.group_size)


@frozen(eq=False)
class Cast:
    """Contents of a state after votes were cast."""

    votes: Array
    exponent_votes: Array
    stats: Array
    magnitudes: Array | None


class BackendCase:
    """Base of the backend tests.

    Subclasses set ``component`` to the registered name, or override :meth:`make_backend`.

    Attributes:
        component: the backend's registered name.
        device: device that the kernels are tried on.
    """

    component: ClassVar[str] = ""
    device: ClassVar[str] = "cpu"

    def make_backend(self) -> KernelBackend:
        """Return the backend under test."""
        from arb_ternary.backends.select import get_backend

        if not self.component:
            raise NotImplementedError(
                f"{type(self).__name__}: set `component` or override make_backend()"
            )
        return get_backend(self.component)

    @pytest.fixture(autouse=True)
    def _backend_under_test(self) -> None:
        cls = type(self)
        if "_built" not in cls.__dict__:
            cls._built = self.make_backend()  # type: ignore[attr-defined]
        self.backend: KernelBackend = cls._built  # type: ignore[attr-defined]

    @pytest.fixture(autouse=True)
    def _poisoned_memory(self) -> Iterator[None]:
        """Fill the memory of ``torch.empty`` with NaN or the largest integer.

        An output that a kernel did not write then cannot look right.
        """
        mode = torch.get_deterministic_debug_mode()
        # Type checkers do not know its properties.
        memory: Any = torch.utils.deterministic
        fill = memory.fill_uninitialized_memory
        with warnings.catch_warnings():
            # Only the filling is wanted: an operation without a deterministic form is no fault.
            warnings.filterwarnings("ignore", message=".*deterministic.*")
            torch.set_deterministic_debug_mode("warn")
            memory.fill_uninitialized_memory = True
            try:
                yield
            finally:
                torch.set_deterministic_debug_mode(mode)
                memory.fill_uninitialized_memory = fill

    def require(self, capability: str) -> None:
        """Skip the test if the backend does not declare the capability."""
        if capability not in self.backend.capabilities:
            pytest.skip(f"backend {self.backend.name!r} does not declare {capability}")

    def run(self, op: str, *arguments: Any, **options: Any) -> Any:
        """Call a kernel. The test is skipped if the backend leaves this op to the reference."""
        kernel = self.backend.kernels.get(op)
        if kernel is None:
            pytest.skip(f"backend {self.backend.name!r} leaves {op} to the reference")
        return kernel(*arguments, **options)

    # --- to and from the device

    def tensor(self, array: Any, dtype: torch.dtype | None = None) -> Tensor:
        """Return a new tensor with the values of a numpy array or scalar, on the device."""
        copied = np.array(array, order="C")
        tensor = torch.from_numpy(copied).to(self.device)
        return tensor if dtype is None else tensor.to(dtype)

    def scalar(self, value: float | None) -> Tensor | None:
        """Return a float32 scalar on the device, or None for None."""
        return None if value is None else self.tensor(float32(value))

    def array(self, tensor: Tensor) -> Array:
        """Return a tensor as a numpy array. bfloat16 becomes float32, which holds it exactly."""
        tensor = tensor.detach().cpu()
        if tensor.dtype == torch.bfloat16:
            tensor = tensor.float()
        return tensor.numpy()

    def assert_equal(self, tensor: Tensor, wanted: Any) -> None:
        """Assert that a tensor has exactly these values."""
        assert_array_equal(self.array(tensor), wanted)

    @contextmanager
    def unchanged(self, *inputs: Tensor) -> Iterator[None]:
        """Assert that a kernel does not change its inputs."""
        before = [tensor.clone() for tensor in inputs]
        yield
        for tensor, old in zip(inputs, before, strict=True):
            now = tensor.nan_to_num()
            assert torch.equal(now, old.nan_to_num()), "an input was changed"

    # --- weights

    def weight(
        self,
        seed: int,
        rows: int,
        columns: int,
        group_size: int,
        exponents: tuple[int, int] = (-6, -2),
        vote_bits: int = 8,
    ) -> Weight:
        """Return a random weight.

        Args:
            seed: seed of the random numbers.
            rows: output features.
            columns: input features.
            group_size: weights per exponent; 0 stands for one exponent per row.
            exponents: smallest and largest exponent.
            vote_bits: bits of a vote accumulator.
        """
        rng = np.random.default_rng(seed)
        shape = WeightShape(rows, columns, group_size or columns)
        low, high = exponents
        exponent = int8(rng.integers(low, high + 1, (rows, shape.groups)))
        trits = int8(rng.integers(-1, 2, (rows, columns)))
        return self.weight_of(trits, exponent, shape.group_size, vote_bits)

    def weight_of(
        self,
        trits: Array,
        exponent: Array,
        group_size: int,
        vote_bits: int = 8,
    ) -> Weight:
        """Return the weight with these trits and exponents.

        The test is skipped if the backend does not have accumulators of ``vote_bits``.
        """
        if vote_bits != 8:
            self.require(NARROW_VOTES)
        rows, columns = trits.shape
        return Weight(
            trits=trits,
            exponent=exponent,
            shape=WeightShape(rows, columns, group_size, vote_bits),
            packed=self.pack(trits),
            exponent_tensor=self.tensor(exponent),
        )

    def pack(self, trits: Array) -> Tensor:
        """Return trits in the backend's layout."""
        packed = self.run("pack", self.tensor(trits))
        assert isinstance(packed, Tensor)
        return packed

    def trits_out(self, packed: Tensor, shape: WeightShape) -> Array:
        """Return the trits of a packed weight: ``[N, K]``."""
        return self.array(self.run("unpack", packed, shape))

    def assert_trits(self, weight: Weight, wanted: Array) -> None:
        """Assert that the packed weight now holds these trits."""
        trits = self.trits_out(weight.packed, weight.shape)
        assert_array_equal(trits, wanted)

    # --- votes

    def votes_in(self, votes_NK: Array, vote_bits: int = 8) -> Tensor:
        """Return votes in the backend's layout, or the reference's if the backend has none."""
        pack = self.backend.kernels.get("pack_votes", reference.pack_votes)
        votes = self.tensor(votes_NK)
        packed = pack(votes) if vote_bits == 8 else pack(votes, vote_bits)
        assert isinstance(packed, Tensor)
        return packed

    def votes_out(self, votes: Tensor, shape: WeightShape) -> Array:
        """Return votes in the backend's layout as a matrix ``[N, K]``."""
        unpack = self.backend.kernels.get("unpack_votes", reference.unpack_votes)
        unpacked = unpack(votes, shape)
        assert isinstance(unpacked, Tensor)
        return self.array(unpacked).reshape(shape.out_features, shape.in_features)

    def assert_votes(self, state: VoteState, wanted: Any) -> None:
        """Assert that the accumulators hold these votes."""
        votes = self.votes_out(state.votes, state.shape)
        assert_array_equal(votes, wanted)

    def state(
        self,
        weight: Weight,
        votes: Array | None = None,
        exponent_votes: Array | None = None,
        **others: Tensor | None,
    ) -> VoteState:
        """Return the state of ``weight`` with these votes, zeros by default.

        ``others`` are more fields of the state.
        """
        shape = weight.shape
        if votes is None:
            votes = filled(0, shape.out_features, shape.in_features)
        if exponent_votes is not None:
            others = {"exponent_votes": self.tensor(exponent_votes), **others}
        packed = self.votes_in(votes, shape.vote_bits)
        return new_state(
            shape,
            weight.packed,
            weight.exponent_tensor,
            packed,
            self.backend.name,
            **others,
        )

    def cast_into(
        self,
        state: VoteState,
        op: str,
        left: Tensor,
        right: Tensor,
        scale: float | None,
    ) -> Cast:
        """Run a kernel that casts votes and return the new contents of the state."""
        inputs = [left, right, state.weight]
        if state.vote_scale is not None:
            inputs.append(state.vote_scale)
        with self.unchanged(*inputs):
            self.run(op, left, right, self.scalar(scale), state)
        magnitudes = None
        if state.magnitudes is not None:
            magnitudes = self.array(state.magnitudes)
        return Cast(
            votes=self.votes_out(state.votes, state.shape),
            exponent_votes=self.array(state.learned),
            stats=self.array(state.stats),
            magnitudes=magnitudes,
        )
