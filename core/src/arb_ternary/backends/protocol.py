"""The protocol of a kernel backend: kernels by op name, in a memory layout of its own.

Shapes: ``M`` rows of activations (all leading dimensions flattened), ``K`` input features, ``N``
output features, ``G`` group size along ``K``, ``J = ceil(K / G)`` groups per row. A weight is
``W[n, k] = T[n, k] * 2**E[n, k // G]`` with ``T`` in {-1, 0, +1} and ``E`` int8. ``packed`` and
``votes`` are tensors in the layout of the backend; everything else is logical.

Core owns schemas, fakes and autograd (``arb_ternary.backends.ops``). Kernels are plain functions
that see neither. A kernel never resizes, never casts silently, and writes only to the tensors that
its docstring says it mutates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Protocol, runtime_checkable

from attrs import field, frozen
from attrs.validators import in_

#: Ops that every backend supplies.
REQUIRED_OPS: Final = (
    "pack",
    "unpack",
    "quantize_rows",
    "linear",
    "linear_grad_input",
    "cast_votes",
    "apply_votes",
    "apply_exponent_votes",
)
#: Ops that fall back to the reference if a backend lacks them (an error under
#: ``ARB_TERNARY_STRICT=1``).
OPTIONAL_OPS: Final = (
    "pack_votes",
    "unpack_votes",
    "quantize_gradient",
    "embedding",
    "embedding_votes",
    "rms_norm_quantize",
    "cast_scaled_votes",
    "embedding_scaled_votes",
    "apply_scaled_votes",
)
#: Ops that do the work of several calls at once. The calls are made if a backend lacks them.
#: ``quantize_gradients`` and ``quantize_several`` round one gradient or several for rows and votes
#: (``ops.quantize_related``), ``add_votes`` adds sums of votes to accumulators, ``apply_together``
#: applies the votes of many modules (``arb_ternary.ternary.vote_calls``).
COMBINED_OPS: Final = ("quantize_gradients", "quantize_several", "add_votes", "apply_together")
#: The ops of core. The name of any other op has a namespace: see :class:`KernelBackend`.
CORE_OPS: Final = (*REQUIRED_OPS, *OPTIONAL_OPS, *COMBINED_OPS)

#: Capability: ``cast_votes`` never materialises the gradient.
FUSED_VOTES: Final = "fused_votes"
#: Capability: every kernel that touches votes honours ``WeightShape.vote_bits``, and
#: ``pack_votes`` takes the bits.
NARROW_VOTES: Final = "narrow_votes"
#: Capability: ``cast_scaled_votes`` and ``embedding_scaled_votes`` take ``noise_shift``. Without it
#: the reference casts votes that need it.
NARROW_NOISE: Final = "narrow_noise"
#: Capability: ``apply_scaled_votes`` honours ``VoteState.first_row``. Without it the reference
#: applies the votes of some rows of a weight.
ROW_SHARDS: Final = "row_shards"

#: Sizes of an accumulator in bits. Sign votes saturate at -128 and 127, -7 and 7, or -1 and 1;
#: scaled votes at -127 and 127 instead of -128 and 127.
VOTE_BITS: Final = (8, 4, 2)


@frozen
class ProbeResult:
    """Whether a backend can work here, and why.

    Attributes:
        usable: whether it can work.
        reason: completes "usable: ..." or "unusable: ...".
        last_resort: it works, but any other usable backend is better, whatever the priorities; an
            interpreter, for example.
    """

    usable: bool
    reason: str
    last_resort: bool = False


@frozen
class WeightShape:
    """The logical shape of a ternary weight and its state.

    Attributes:
        out_features: ``N``, rows.
        in_features: ``K``, columns.
        group_size: ``G``, columns of a row that share an exponent.
        vote_bits: bits of an accumulator: 8, 4 or 2.
    """

    out_features: int
    in_features: int
    group_size: int
    vote_bits: int = field(default=8, validator=in_(VOTE_BITS))

    @property
    def groups(self) -> int:
        """Exponents per row, ``J``."""
        return -(-self.in_features // self.group_size)

    @property
    def largest_vote(self) -> int:
        """The value at which accumulators saturate, ``R``: 127, 7 or 1."""
        return (1 << (self.vote_bits - 1)) - 1

    @property
    def smallest_vote(self) -> int:
        """The value at which sign votes saturate below: -128, -7 or -1."""
        return -128 if self.vote_bits == 8 else -self.largest_vote


@runtime_checkable
class KernelBackend(Protocol):
    """A set of kernels that share a layout.

    Attributes:
        name: the registered name.
        capabilities: promises beyond correctness, e.g. :data:`FUSED_VOTES`, :data:`NARROW_VOTES`.
        kernels: implementation by op name. Ops of core have the signatures of
            ``arb_ternary.backends.reference``. An op of another package has a namespace in its
            name, which is that of the package without ``arb_ternary_``: ``text.attend`` is listed
            and called by ``arb_ternary_text``, which has torch code for backends without it.
    """

    @property
    def name(self) -> str: ...

    @property
    def capabilities(self) -> frozenset[str]: ...

    @property
    def kernels(self) -> Mapping[str, Callable[..., object]]: ...
