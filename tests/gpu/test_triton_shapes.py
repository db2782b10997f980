"""The launches of small shapes and of the kit's suite, translated for GPUs that need not be there.

Triton's interpreter takes what its compiler refuses: there an integer argument that equals 1 is a
tensor like others, while the compiler makes a constant of it, which has no methods.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any, Final

import pytest
import torch
from attrs import field, frozen
from torch import Tensor
from triton_code import OPS, call_of
from triton_launches import (
    TARGETS,
    Launch,
    Specialised,
    compile_launch,
    launches_of,
    recording,
    specialise,
    translate,
)

from arb_ternary.backends import reference
from arb_ternary.backends.protocol import (
    NARROW_NOISE,
    NARROW_VOTES,
    ROW_SHARDS,
    KernelBackend,
    WeightShape,
)
from arb_ternary.backends.vote_state import VoteState
from arb_ternary.counters.hashing import counter_hash
from arb_ternary_distributed.wire import WIRE_KERNELS
from arb_ternary_testing import BackendSuite
from arb_ternary_triton import backend
from arb_ternary_triton.arguments import packed_columns, vote_columns
from arb_ternary_triton.launch import INTERPRETED

pytestmark = pytest.mark.skipif(
    INTERPRETED, reason="kernels were made for the interpreter: unset TRITON_INTERPRET"
)

#: ``(M, N, K)`` whose sizes, numbers of groups and numbers of tiles are ones here and there.
SIZES: Final = ((1, 1, 1), (2, 5, 1), (3, 1, 9), (16, 64, 256))
#: The target of what is compiled for one only.
TARGET: Final = "sm_90a"
#: What this process translated, by target.
_known: set[tuple[str, Specialised]] = set()


def _translate(launches: Iterable[Launch], target: str) -> None:
    """Translate the launches that are new."""
    for launch in launches:
        one = specialise(launch)
        if (target, one) not in _known:
            translate(one, target)
            _known.add((target, one))


@pytest.mark.parametrize(
    "target",
    [pytest.param(each, marks=() if each == TARGET else pytest.mark.slow) for each in TARGETS],
)
@pytest.mark.parametrize("group_size", [32, 0], ids=["groups of 32", "rows"])
@pytest.mark.parametrize("sizes", SIZES)
def test_every_op_is_translated_for_sizes_of_one(
    sizes: tuple[int, int, int], group_size: int, target: str
) -> None:
    terms, rows, columns = sizes
    shape = WeightShape(rows, columns, group_size or columns)
    for op in OPS:
        for integer in (True, False):
            launches = launches_of(call_of(op, terms, shape, integer), target)
            assert launches
            _translate(launches, target)


@pytest.mark.parametrize("name", ["quantize_gradient", "cast_scaled_votes", "rms_norm_quantize"])
def test_exact_kernels_use_no_inexact_instruction(name: str) -> None:
    for integer in (True, False) if name == "cast_scaled_votes" else (True,):
        for launch in launches_of(call_of(name, 16, WeightShape(16, 64, 32), integer), TARGET):
            ptx = compile_launch(launch, TARGET).asm["ptx"]
            found = re.findall(r"\S*\.ftz\S*|fma\.\S*|\S+\.approx\S*|div\.full\S*", ptx)
            # Each vote by factors is a sum with a product by a power of two, which is exact.
            votes = 0
            if launch.constants.get("MODE") == 1 and "TERMS" in launch.constants:
                tile = launch.constants["ROWS"] * launch.constants["COLUMNS"]
                votes = tile // (32 * launch.warps)
            assert found == ["fma.rn.f32"] * votes, launch.kernel.__name__


# --- the kit's suite


@frozen
class _Recorded:
    """The torch backend, whose results the suite is content with; each call is recorded as one of
    ours beside it.
    """

    name: str = "triton, recorded"
    capabilities: frozenset[str] = frozenset({NARROW_NOISE, NARROW_VOTES, ROW_SHARDS})
    kernels: dict[str, Callable[..., Any]] = field(factory=dict)


def _weight(shape: WeightShape) -> Tensor:
    return torch.zeros(shape.out_features, packed_columns(shape.in_features), dtype=torch.uint8)


def _votes(shape: WeightShape) -> Tensor:
    dtype = torch.int8 if shape.vote_bits == 8 else torch.uint8
    return torch.zeros(
        shape.out_features, vote_columns(shape.in_features, shape.vote_bits), dtype=dtype
    )


def _in_our_layout(name: str, value: Any, shape: WeightShape | None) -> Any:
    """An argument for kernels that read and write nothing: a copy, in our layout where that
    differs.
    """
    if isinstance(value, list):
        return [_in_our_layout(name, each, shape) for each in value]
    if isinstance(value, VoteState):
        copies: dict[str, Any] = {
            field: each.clone()
            for field, each in value._asdict().items()
            if isinstance(each, Tensor)
        }
        return value._replace(**copies)._replace(
            weight=_weight(value.shape), votes=_votes(value.shape)
        )
    if not isinstance(value, Tensor):
        return value
    if shape is not None and name in ("packed", "weight", "before", "after"):
        return _weight(shape)
    if shape is not None and name == "votes":
        return _votes(shape)
    return value.clone()


def _recorded(ours: Callable[..., Any], wanted: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        bound = inspect.signature(ours).bind(*arguments, **options)
        shape = bound.arguments.get("shape")
        for name, value in bound.arguments.items():
            bound.arguments[name] = _in_our_layout(name, value, shape)
        result = wanted(*arguments, **options)
        with recording(TARGET) as launches:
            ours(*bound.args, **bound.kwargs)
        for target in TARGETS:
            _translate(launches, target)
        return result

    return call


def _quanta(
    sums: Tensor, whole: int, fraction: int, words: tuple[int, int, int], start: int
) -> Tensor:
    noise = counter_hash(sums.numel(), *words, start=start).view(sums.shape) >> 8 & (1 << 24) - 1
    return ((sums.long() * ((whole << 24) + fraction) + noise) >> 24).to(torch.int32)


def _both(grad: Tensor, row_scale: Tensor, *words: int) -> tuple[Tensor, ...]:
    seed, step, stream, folded_stream = words
    quantize = reference.KERNELS["quantize_gradient"]
    folded = grad * row_scale.to(grad.dtype)[:, None]
    return (*quantize(grad, seed, step, stream), *quantize(folded, seed, step, folded_stream))


def _several(
    grads: list[Tensor], row_scale: Tensor, words: list[tuple[int, ...]]
) -> list[tuple[Tensor, ...]]:
    return [_both(grad, row_scale, *each) for grad, each in zip(grads, words, strict=True)]


def _together(op: str, states: list[VoteState], settings: list[tuple[int, ...]]) -> Tensor:
    apply = reference.KERNELS[op]
    calls = zip(states, settings, strict=True)
    return torch.stack([apply(state, *each) for state, each in calls])


@pytest.mark.slow
class TestEveryLaunch(BackendSuite):
    def make_backend(self) -> KernelBackend:
        torch_kernels = {
            **reference.build().kernels,
            **WIRE_KERNELS,
            "votes.sums_to_quanta": _quanta,
            # These join others. Without a kernel, callers take the others.
            "quantize_gradients": _both,
            "quantize_several": _several,
            "apply_together": _together,
        }
        ours = backend.build().kernels
        return _Recorded(kernels={op: _recorded(ours[op], torch_kernels[op]) for op in ours})
