"""What the three parts of the backend suite share: the backend under test, data, and the way to and
from its layout.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Final, TypeVar

import numpy as np
import pytest
import torch
from attrs import frozen
from hypothesis import HealthCheck, settings
from numpy.typing import NDArray
from torch import Tensor

from arb_ternary.backends import reference
from arb_ternary.backends.protocol import NARROW_NOISE, NARROW_VOTES, KernelBackend, WeightShape
from arb_ternary.backends.vote_state import VoteState, new_state

Array = NDArray[Any]
_Test = TypeVar("_Test", bound=Callable[..., None])

# : ``(M, N, K)``: ones, primes, one off a power of two, and exact multiples of every tile a kernel
# may use.
SHAPES: Final = (
    (1, 1, 1),
    (2, 5, 1),
    (3, 1, 9),
    (1, 5, 31),
    (2, 16, 128),
    (3, 33, 129),
    (7, 17, 300),
    (16, 64, 256),
)
#: Group sizes of the format; 0 stands for one exponent a row.
GROUP_SIZES: Final = (32, 64, 128, 256, 0)


def examples(count: int) -> Callable[[_Test], _Test]:
    """Settings of a property test that lives in a base class: inherited by several classes, slow
    kernels allowed.
    """
    return settings(
        max_examples=count,
        deadline=None,
        suppress_health_check=[
            HealthCheck.differing_executors,
            HealthCheck.function_scoped_fixture,
            HealthCheck.too_slow,
        ],
    )


def _filling() -> Any:
    """The module that holds the switch for filling fresh memory; its properties are unknown to type
    checkers.
    """
    return torch.utils.deterministic


def float32(values: Any) -> Array:
    """Numbers as a float32 array."""
    return np.array(values, np.float32)


@frozen(eq=False)
class Weight:
    """A weight in numpy and in the layout of the backend under test."""

    trits: Array
    exponent: Array
    shape: WeightShape
    packed: Tensor
    exponent_tensor: Tensor


class BackendCase:
    """Subclasses set ``component`` to the registered name, or override :meth:`make_backend`.

    Attributes:
        component: the backend's registered name.
        device: where the kernels are tried.
    """

    component: ClassVar[str] = ""
    device: ClassVar[str] = "cpu"

    def make_backend(self) -> KernelBackend:
        """The backend under test."""
        from arb_ternary.backends.select import get_backend

        if not self.component:
            raise NotImplementedError(
                f"{type(self).__name__}: set `component` or override make_backend()"
            )
        return get_backend(self.component)

    @pytest.fixture(autouse=True)
    def _the_backend_under_test(self) -> None:
        cls = type(self)
        if "_built" not in cls.__dict__:
            cls._built = self.make_backend()  # type: ignore[attr-defined]
        self.backend: KernelBackend = cls._built  # type: ignore[attr-defined]

    @pytest.fixture(autouse=True)
    def _fresh_memory_is_poisoned(self) -> Iterator[None]:
        """Fill what ``torch.empty`` returns with NaN or the largest integer: unwritten outputs
        cannot look right.
        """
        before = torch.get_deterministic_debug_mode(), _filling().fill_uninitialized_memory
        with warnings.catch_warnings():
            # Only the filling is wanted; an operation without a deterministic form on this device
            # is no fault.
            warnings.filterwarnings("ignore", message=".*deterministic.*")
            torch.set_deterministic_debug_mode("warn")
            _filling().fill_uninitialized_memory = True
            try:
                yield
            finally:
                torch.set_deterministic_debug_mode(before[0])
                _filling().fill_uninitialized_memory = before[1]

    def skip_without_narrow_noise(self) -> None:
        """Skip the test where the backend leaves votes with less noise to the reference."""
        if NARROW_NOISE not in self.backend.capabilities:
            pytest.skip(f"backend {self.backend.name!r} does not declare {NARROW_NOISE}")

    def run(self, op: str, *arguments: Any, **options: Any) -> Any:
        """Call a kernel; the test is skipped where the backend leaves an optional op to the
        reference.
        """
        kernel = self.backend.kernels.get(op)
        if kernel is None:
            pytest.skip(f"backend {self.backend.name!r} leaves {op} to the reference")
        return kernel(*arguments, **options)

    def tensor(self, array: Any, dtype: torch.dtype | None = None) -> Tensor:
        """A fresh tensor of a numpy array (or scalar) on the device."""
        made = torch.from_numpy(np.array(array, order="C")).to(self.device)
        return made if dtype is None else made.to(dtype)

    def array(self, tensor: Tensor) -> Array:
        """Back to numpy; bfloat16 through float32, which holds it exactly."""
        tensor = tensor.detach().cpu()
        return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()

    def weight(
        self,
        seed: int,
        rows: int,
        columns: int,
        group_size: int,
        exponents: tuple[int, int] = (-6, -2),
        vote_bits: int = 8,
    ) -> Weight:
        """A random weight with exponents from ``exponents[0]`` to ``exponents[1]``; ``group_size``
        0: one a row.
        """
        rng = np.random.default_rng(seed)
        shape = WeightShape(rows, columns, group_size or columns)
        exponent = rng.integers(exponents[0], exponents[1] + 1, (rows, shape.groups)).astype(
            np.int8
        )
        trits = rng.integers(-1, 2, (rows, columns)).astype(np.int8)
        return self.weight_of(trits, exponent, shape.group_size, vote_bits)

    def weight_of(
        self, trits: Array, exponent: Array, group_size: int, vote_bits: int = 8
    ) -> Weight:
        """The weight with these trits and exponents; the test is skipped where the backend lacks
        the bits of votes.
        """
        if vote_bits != 8 and NARROW_VOTES not in self.backend.capabilities:
            pytest.skip(f"backend {self.backend.name!r} does not declare {NARROW_VOTES}")
        shape = WeightShape(trits.shape[0], trits.shape[1], group_size, vote_bits)
        return Weight(
            trits, exponent, shape, self.run("pack", self.tensor(trits)), self.tensor(exponent)
        )

    def votes_in(self, votes_NK: Array, vote_bits: int = 8) -> Tensor:
        """Votes in the backend's layout; where it leaves that to the reference, in the
        reference's.
        """
        bits = () if vote_bits == 8 else (vote_bits,)
        pack = self.backend.kernels.get("pack_votes", reference.pack_votes)
        packed = pack(self.tensor(votes_NK), *bits)
        assert isinstance(packed, Tensor)
        return packed

    def votes_out(self, votes: Tensor, shape: WeightShape) -> Array:
        """Votes in the backend's layout to ``[N, K]``."""
        unpacked = self.backend.kernels.get("unpack_votes", reference.unpack_votes)(votes, shape)
        assert isinstance(unpacked, Tensor)
        return self.array(unpacked).reshape(shape.out_features, shape.in_features)

    def state(
        self,
        weight: Weight,
        votes: Array | None = None,
        exponent_votes: Array | None = None,
        **others: Tensor | None,
    ) -> VoteState:
        """The state of ``weight`` with these votes (zeros where none are given); ``others`` are
        fields of it.
        """
        shape = weight.shape
        if votes is None:
            votes = np.zeros((shape.out_features, shape.in_features), np.int8)
        if exponent_votes is not None:
            others = {"exponent_votes": self.tensor(exponent_votes), **others}
        held = self.votes_in(votes, shape.vote_bits)
        return new_state(
            shape, weight.packed, weight.exponent_tensor, held, self.backend.name, **others
        )

    def trits_out(self, packed: Tensor, shape: WeightShape) -> Array:
        """A packed weight to ``[N, K]``."""
        return self.array(self.run("unpack", packed, shape))
